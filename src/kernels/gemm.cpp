// Matrix products through cuBLASLt.
//
// cuBLASLt is column-major: a row-major D = op(A) op(B) is its D^T = op(B)^T op(A)^T, so A and B change places, and
// rows and columns of every matrix do.

#include "gemm.h"

#ifdef PGPT_WITH_CUDA

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty_like.h>
#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "pgpt/base/cuda.h"

#define PGPT_CUBLASLT_CHECK(call, ...)                                                                                \
  do {                                                                                                                \
    const cublasStatus_t pgpt_status = (call);                                                                        \
    PGPT_CHECK(DeviceError, pgpt_status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", cublasLtGetStatusString(pgpt_status), \
               " in ", #call, " for ", __VA_ARGS__, "; without --gemm-algorithms libtorch computes it");              \
  } while (false)

namespace pgpt::kernels {
namespace {

static_assert(sizeof(GemmAlgorithm::words) == sizeof(cublasLtMatmulAlgo_t::data));

constexpr int kCandidates = 8;          // suggestions that are timed
constexpr std::size_t kRounds = 9;      // measurements of each; the median counts
constexpr double kSettleMs = 10;        // measurements this long follow as long a run that lets the clock settle
constexpr std::size_t kLongRounds = 2;  // number of those
constexpr int kLongCandidates = 16;     // suggestions timed so
constexpr double kWorthwhile = 0.99;    // a smaller gain over the first suggestion may be noise
constexpr std::int64_t kAligned = 128;  // of tensors and of parameters in flat buffers

cudaDataType_t data_type(GemmType type) {
  switch (type) {
    case GemmType::kBFloat16:
      return CUDA_R_16BF;
    case GemmType::kFloat16:
      return CUDA_R_16F;
    case GemmType::kFloat32:
      return CUDA_R_32F;
  }
  return CUDA_R_32F;
}

/// libtorch's cuBLAS handle, which is a cuBLASLt handle too, and the workspace it has for the current stream.
struct Library {
  Library() : stream(at::cuda::getCurrentCUDAStream().stream()) {
    cublasHandle_t blas = at::cuda::getCurrentCUDABlasHandle();
    handle = reinterpret_cast<cublasLtHandle_t>(blas);
    // Shared with libtorch's other products on this stream, so that it costs no memory.
    at::cuda::WorkspaceMapWithMutex& all = at::cuda::cublas_handle_stream_to_workspace();
    const std::shared_lock lock(all.mutex);
    const auto found = all.map.find({static_cast<void*>(blas), static_cast<void*>(stream)});
    PGPT_ASSERT(found != all.map.end(), "libtorch has no cuBLAS workspace for this stream");
    workspace = found->second.get();
    workspace_bytes = at::cuda::getChosenWorkspaceSize();
  }
  cudaStream_t stream;
  cublasLtHandle_t handle;
  void* workspace;
  std::size_t workspace_bytes;
};

/// Elements from row to row of A and B as they are stored.
struct Strides {
  std::int64_t a, b;
  /// Of contiguous matrices.
  explicit Strides(const GemmShape& s) : a(s.transpose_a ? s.rows : s.inner), b(s.transpose_b ? s.inner : s.columns) {}
  Strides(std::int64_t row_a, std::int64_t row_b) : a(row_a), b(row_b) {}
};

struct Addresses {
  const void *a, *b, *bias;
  void* d;
  float alpha;
};

/// What cuBLASLt needs to know of a product apart from addresses. Lives on the stack: nothing is allocated.
struct Description {
  Description(const GemmShape& s, const void* bias, const Strides& strides) {
    PGPT_CUBLASLT_CHECK(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), describe(s));
    set(CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, s);
    set(CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, s);
    if (s.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, s);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, s);
    }
    layout(first, s.input, s.transpose_b ? s.columns : s.inner, s.transpose_b ? s.inner : s.columns, strides.b, s);
    layout(second, s.input, s.transpose_a ? s.inner : s.rows, s.transpose_a ? s.rows : s.inner, strides.a, s);
    layout(result, s.output, s.rows, s.columns, s.columns, s);
  }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value, const GemmShape& s) {
    PGPT_CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value), describe(s));
  }
  static void layout(cublasLtMatrixLayoutOpaque_t& matrix, GemmType type, std::int64_t rows, std::int64_t columns,
                     std::int64_t stride, const GemmShape& s) {
    PGPT_CUBLASLT_CHECK(cublasLtMatrixLayoutInit(&matrix, data_type(type), static_cast<std::uint64_t>(columns),
                                                 static_cast<std::uint64_t>(rows), stride),
                        describe(s));
  }

  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t first, second, result;  // B, A and D
};

template <class T>
std::int64_t attribute_of(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  std::size_t written = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written);
  PGPT_CHECK(DeviceError, status == CUBLAS_STATUS_SUCCESS && written == sizeof value,
             "cuBLASLt does not tell attribute ", static_cast<int>(attribute),
             " of an algorithm: ", cublasLtGetStatusString(status));
  return static_cast<std::int64_t>(value);
}

GemmAlgorithm to_algorithm(const cublasLtMatmulAlgo_t& algo, std::size_t workspace) {
  GemmAlgorithm a;
  std::memcpy(a.words.data(), algo.data, sizeof algo.data);
  a.id = attribute_of<std::int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID);
  a.tile = attribute_of<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
  a.stages = attribute_of<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_STAGES_ID);
  a.split_k = attribute_of<std::int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  a.reduction_scheme = attribute_of<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
  a.swizzle = attribute_of<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING);
  a.custom_option = attribute_of<std::uint32_t>(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
  a.inner_shape = attribute_of<std::uint16_t>(algo, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID);
  a.cluster_shape = attribute_of<std::uint16_t>(algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
  a.workspace = static_cast<std::int64_t>(workspace);
  return a;
}

cublasLtMatmulAlgo_t to_library(const GemmAlgorithm& algorithm) {
  cublasLtMatmulAlgo_t algo;
  std::memcpy(algo.data, algorithm.words.data(), sizeof algo.data);
  return algo;
}

/// The library's suggestions for a shape, best first; at least one.
std::vector<GemmAlgorithm> suggestions(const Library& library, const GemmShape& s, Description& description,
                                       int wanted) {
  cublasLtMatmulPreferenceOpaque_t preference;
  PGPT_CUBLASLT_CHECK(cublasLtMatmulPreferenceInit(&preference), describe(s));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    PGPT_CUBLASLT_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
                        describe(s));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(library.workspace_bytes));
  // Parts of a split sum may meet in fp32 only.
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (s.output == GemmType::kFloat32) reductions |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(attribute, static_cast<std::uint32_t>(s.alignment));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(wanted));
  int found = 0;
  PGPT_CUBLASLT_CHECK(cublasLtMatmulAlgoGetHeuristic(library.handle, &description.operation, &description.first,
                                                     &description.second, &description.result, &description.result,
                                                     &preference, wanted, results.data(), &found),
                      describe(s));
  std::vector<GemmAlgorithm> list;
  for (int i = 0; i < found; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) list.push_back(to_algorithm(result.algo, result.workspaceSize));
  }
  PGPT_CHECK(DeviceError, !list.empty(), "cuBLASLt has no algorithm for ", describe(s),
             "; without --gemm-algorithms libtorch computes it");
  return list;
}

/// With `source` null the result replaces `target`, else it is `source` plus the product.
void launch(const Library& library, const GemmShape& s, Description& description, const GemmAlgorithm& algorithm,
            const Addresses& addresses, const void* source, void* target) {
  const float beta = source != nullptr ? 1.0F : 0.0F;
  const cublasLtMatmulAlgo_t algo = to_library(algorithm);
  PGPT_CUBLASLT_CHECK(
      cublasLtMatmul(library.handle, &description.operation, &addresses.alpha, addresses.b, &description.first,
                     addresses.a, &description.second, &beta, source != nullptr ? source : target, &description.result,
                     target, &description.result, &algo, library.workspace, library.workspace_bytes, library.stream),
      describe(s));
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The fastest suggestion with these operands, each timed for `sample_ms`. `target` receives results (`source` as in
/// `launch`).
GemmAlgorithm fastest(const Library& library, const GemmShape& s, Description& description, const Addresses& addresses,
                      const void* source, void* target, double sample_ms) {
  const bool settles = sample_ms >= kSettleMs;
  std::vector<GemmAlgorithm> list = suggestions(library, s, description, settles ? kLongCandidates : kCandidates);
  const auto timed = [&](const GemmAlgorithm& algorithm, std::int64_t calls, const pgpt::cuda::Event& begin,
                         const pgpt::cuda::Event& end) {
    begin.record(library.stream);
    for (std::int64_t i = 0; i < calls; ++i) launch(library, s, description, algorithm, addresses, source, target);
    end.record(library.stream);
  };
  const pgpt::cuda::Event begin(true), end(true);
  for (const GemmAlgorithm& algorithm : list) launch(library, s, description, algorithm, addresses, source, target);
  timed(list.front(), 2, begin, end);
  end.synchronize();
  const double once = std::max(end.milliseconds_since(begin) / 2.0, 1e-3);
  const std::int64_t calls = std::clamp<std::int64_t>(static_cast<std::int64_t>(sample_ms / once), 1, 100'000);
  // All candidates take turns, so that clocks and temperature are the same for each; or, when they run for long, so
  // that each meets the same drift while the clock follows from what it draws itself.
  std::vector<pgpt::cuda::Event> begins, ends;
  for (std::size_t i = 0; i < (settles ? kLongRounds : kRounds) * list.size(); ++i) {
    const GemmAlgorithm& candidate = list[i % list.size()];
    begins.emplace_back(true);
    ends.emplace_back(true);
    if (settles) timed(candidate, calls, begins.back(), ends.back());
    timed(candidate, calls, begins.back(), ends.back());
  }
  ends.back().synchronize();
  for (std::size_t c = 0; c < list.size(); ++c) {
    std::vector<double> samples;
    for (std::size_t i = c; i < begins.size(); i += list.size())
      samples.push_back(ends[i].milliseconds_since(begins[i]));
    list[c].microseconds = median(std::move(samples)) * 1e3 / static_cast<double>(calls);
  }
  const double first = list.front().microseconds;
  const GemmAlgorithm& best = *std::min_element(
      list.begin(), list.end(), [](const auto& x, const auto& y) { return x.microseconds < y.microseconds; });
  GemmAlgorithm chosen = best.microseconds < kWorthwhile * first ? best : list.front();
  chosen.heuristic_microseconds = first;
  return chosen;
}

/// The algorithm of a shape met for the first time. Timing leaves anything in `d` when it is overwritten anyway, and
/// does not touch it when it is added to.
const GemmAlgorithm& choose(GemmAlgorithms& algorithms, const Library& library, const GemmShape& s,
                            Description& description, const Addresses& addresses, const at::Tensor& d) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  PGPT_CUDA_CHECK(cudaStreamIsCapturing(library.stream, &capture));
  if (!algorithms.tunes() || capture != cudaStreamCaptureStatusNone) {
    // A graph that is being captured runs nothing, so nothing can be timed; but a later run must choose the same.
    return algorithms.add(s, suggestions(library, s, description, 1).front(), algorithms.tunes());
  }
  GemmAlgorithm mine;
  if (algorithms.chooser()) {
    const at::Tensor scratch = s.accumulate ? at::empty_like(d) : d;
    mine = fastest(library, s, description, addresses, s.accumulate ? addresses.d : nullptr, scratch.mutable_data_ptr(),
                   algorithms.sample_ms());
  }
  return algorithms.add_agreed(s, mine);
}

/// Rows may lie apart.
bool is_matrix(const at::Tensor& t) {
  const auto element = static_cast<std::int64_t>(t.element_size());
  return t.is_cuda() && t.dim() == 2 && t.numel() > 0 && t.stride(1) == 1 && t.stride(0) >= t.size(1) &&
         t.size(1) * element % 16 == 0 && t.stride(0) * element % 16 == 0;
}

std::optional<GemmType> gemm_type(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16:
      return GemmType::kBFloat16;
    case at::kHalf:
      return GemmType::kFloat16;
    case at::kFloat:
      return GemmType::kFloat32;
    default:
      return std::nullopt;
  }
}

}  // namespace

bool gemm(GemmAlgorithms& algorithms, const GemmOperand& a, const GemmOperand& b, const at::Tensor& bias, double alpha,
          bool accumulate, const at::Tensor& d) {
  if (!is_matrix(a.stored) || !is_matrix(b.stored) || !is_matrix(d) || !d.is_contiguous()) return false;
  const std::optional<GemmType> input = gemm_type(a.stored), second = gemm_type(b.stored), output = gemm_type(d);
  if (!input || !output || input != second || input == GemmType::kFloat32) return false;
  if (output != input && output != GemmType::kFloat32) return false;
  if (bias.defined() && (!bias.is_cuda() || !bias.is_contiguous() || bias.scalar_type() != d.scalar_type()))
    return false;
  GemmShape s;
  s.rows = d.size(0);
  s.columns = d.size(1);
  s.inner = a.stored.size(a.transposed ? 0 : 1);
  PGPT_ASSERT(a.stored.size(a.transposed ? 1 : 0) == s.rows && b.stored.size(b.transposed ? 0 : 1) == s.columns &&
                  b.stored.size(b.transposed ? 1 : 0) == s.inner && (!bias.defined() || bias.numel() == s.columns),
              "sizes of ", describe(s));
  s.transpose_a = a.transposed;
  s.transpose_b = b.transposed;
  s.input = *input;
  s.output = *output;
  s.bias = bias.defined();
  s.accumulate = accumulate;
  const Addresses addresses{a.stored.const_data_ptr(), b.stored.const_data_ptr(),
                            bias.defined() ? bias.const_data_ptr() : nullptr, d.mutable_data_ptr(),
                            static_cast<float>(alpha)};
  const std::uintptr_t bits =
      reinterpret_cast<std::uintptr_t>(addresses.a) | reinterpret_cast<std::uintptr_t>(addresses.b) |
      reinterpret_cast<std::uintptr_t>(addresses.bias) | reinterpret_cast<std::uintptr_t>(addresses.d);
  if (bits % 16 != 0) return false;
  s.alignment = bits % static_cast<std::uintptr_t>(kAligned) == 0 ? kAligned : 16;
  const Library library;
  Description description(s, addresses.bias, {a.stored.stride(0), b.stored.stride(0)});
  const GemmAlgorithm* algorithm = algorithms.find(s);
  if (algorithm == nullptr) algorithm = &choose(algorithms, library, s, description, addresses, d);
  launch(library, s, description, *algorithm, addresses, accumulate ? addresses.d : nullptr, addresses.d);
  return true;
}

std::optional<GemmLibrary> gemm_library() {
  return GemmLibrary{at::cuda::getCurrentDeviceProperties()->name, static_cast<std::int64_t>(cublasLtGetVersion())};
}

void check_gemm_algorithms(const GemmAlgorithms& algorithms, const std::string& file) {
  const Library library;
  for (const auto& [s, algorithm] : algorithms.kept()) {
    Description description(s, library.workspace, Strides(s));  // any address will do: nothing runs
    const cublasLtMatmulAlgo_t algo = to_library(algorithm);
    GemmAlgorithm named = to_algorithm(algo, static_cast<std::size_t>(algorithm.workspace));
    named.microseconds = algorithm.microseconds;
    named.heuristic_microseconds = algorithm.heuristic_microseconds;
    std::string wrong;
    if (named != algorithm) {
      wrong = "its \"words\" are not the algorithm that its other values name";
    } else {
      cublasLtMatmulHeuristicResult_t result{};
      const cublasStatus_t status =
          cublasLtMatmulAlgoCheck(library.handle, &description.operation, &description.first, &description.second,
                                  &description.result, &description.result, &algo, &result);
      if (status != CUBLAS_STATUS_SUCCESS) {
        wrong = concat("cuBLASLt refuses it (", cublasLtGetStatusString(status), ")");
      } else if (result.workspaceSize > library.workspace_bytes) {
        wrong = concat("it needs ", result.workspaceSize, " bytes of workspace, there are ", library.workspace_bytes);
      }
    }
    PGPT_CHECK(DataError, wrong.empty(), "--gemm-algorithms ", file, ": the entry for ", describe(s),
               " is damaged: ", wrong, "; delete the file, or name another");
  }
}

}  // namespace pgpt::kernels

#else

namespace pgpt::kernels {

std::optional<GemmLibrary> gemm_library() { return std::nullopt; }

void check_gemm_algorithms(const GemmAlgorithms& /*algorithms*/, const std::string& /*file*/) {}

}  // namespace pgpt::kernels

#endif
