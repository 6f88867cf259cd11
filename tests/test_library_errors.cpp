// Errors that come from libtorch, as the user sees them.
#include <c10/util/Exception.h>

#include <stdexcept>

#include "pgpt/training/library_errors.h"
#include "support/catch.h"
#include "support/text.h"

using namespace pgpt;
using test::contains;

namespace {

template <class Throw>
Error translated(const Throw& thrower) {
  try {
    thrower();
  } catch (const std::exception& error) {
    return training::translate(error);
  }
  FAIL("nothing was thrown");
  return {ExitCode::kDone, ""};
}

}  // namespace

TEST_CASE("errors of libtorch are one line with the code of their kind", "[cpu]") {
  const Error cudnn = translated([] { TORCH_CHECK(false, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR\nmore\nlines"); });
  CHECK(cudnn.code() == ExitCode::kDevice);
  CHECK(std::string(cudnn.what()) == "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR");
  const Error shape = translated([] { TORCH_CHECK(false, "shapes do not fit"); });
  CHECK(shape.code() == ExitCode::kConfiguration);
  CHECK(std::string(shape.what()) == "shapes do not fit");
  const Error plain = translated([] { throw std::runtime_error("CUDA error: an illegal memory access\n at line 3"); });
  CHECK(plain.code() == ExitCode::kDevice);
  CHECK(std::string(plain.what()) == "CUDA error: an illegal memory access");
}

TEST_CASE("a full GPU says what needs less memory", "[cpu]") {
  const Error full =
      translated([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 20.00 GiB."); });
  CHECK(full.code() == ExitCode::kDevice);
  CHECK(contains(full.what(), "Tried to allocate 20.00 GiB. What needs less: a smaller --micro-batch-size"));
  CHECK_FALSE(contains(full.what(), "\n"));
}

TEST_CASE("errors of this program pass unchanged", "[cpu]") {
  const Error own = translated([] { throw CommError("rank 3 is gone\nfor good"); });
  CHECK(own.code() == ExitCode::kCommunication);
  CHECK(std::string(own.what()) == "rank 3 is gone\nfor good");
}
