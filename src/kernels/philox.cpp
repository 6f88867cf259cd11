// Random fills that repeat those of CUDA generators, on either device.

#include "philox.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#ifdef PGPT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#endif

#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

// Launch shape of libtorch's fill kernels: threads of a block, blocks that one multiprocessor holds, values of one
// counter.
constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kBlocksPerProcessor = 8;
constexpr std::int64_t kValues = 4;
constexpr float kStep = 0x1p-32F;
constexpr float kHalfStep = 0x1p-33F;

struct Four {
  float value[4];
};

// A word as a number in (0, 1].
float unit(std::uint32_t word) { return static_cast<float>(word) * kStep + kHalfStep; }

// Box-Muller as the GPU's library does it: the angle in fp32 with one rounding of the product and sum.
void normal_pair(std::uint32_t x, std::uint32_t y, float* out) {
  constexpr float kAngle = kStep * 2 * std::numbers::pi_v<float>;
  const float radius = std::sqrt(-2.0F * std::log(unit(x)));
  const float angle = std::fma(static_cast<float>(y), kAngle, kAngle / 2);
  out[0] = radius * std::sin(angle);
  out[1] = radius * std::cos(angle);
}

Four normals(const detail::PhiloxWords& words) {
  Four four;
  normal_pair(words.word[0], words.word[1], four.value);
  normal_pair(words.word[2], words.word[3], four.value + 2);
  return four;
}

// Counter (offset/4 + pass, thread) yields elements pass*4*threads + thread + {0,1,2,3}*threads.
template <class T, class Draw>
void fill(T* out, std::int64_t numel, PhiloxState& state, std::int64_t sm_count, const Draw& draw) {
  if (numel == 0) return;
  const std::int64_t threads = kThreads * std::min(kBlocksPerProcessor * sm_count, (numel + kThreads - 1) / kThreads);
  const std::int64_t passes = (numel + kValues * threads - 1) / (kValues * threads);
  detail::parallel_for(0, passes * threads, 4096, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t pass = item / threads, thread = item % threads;
      const std::int64_t first = pass * kValues * threads + thread;
      if (first >= numel) continue;
      const Four four = draw(detail::philox(state.seed, state.offset / 4 + static_cast<std::uint64_t>(pass),
                                            static_cast<std::uint64_t>(thread)));
      for (std::int64_t j = 0; j < kValues; ++j) {
        const std::int64_t index = first + j * threads;
        if (index < numel) out[index] = static_cast<T>(four.value[j]);
      }
    }
  });
  state.offset += static_cast<std::uint64_t>(4 * passes);
}

template <class Draw>
void fill_cpu(at::Tensor& tensor, PhiloxState& state, std::int64_t sm_count, const Draw& draw) {
  PGPT_ASSERT(sm_count > 0, "multiprocessors ", sm_count);
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return fill(tensor.mutable_data_ptr<at::BFloat16>(), tensor.numel(), state, sm_count, draw);
    case at::kHalf:
      return fill(tensor.mutable_data_ptr<at::Half>(), tensor.numel(), state, sm_count, draw);
    case at::kFloat:
      return fill(tensor.mutable_data_ptr<float>(), tensor.numel(), state, sm_count, draw);
    default:
      PGPT_ASSERT(false, "random fills are bf16, fp16 or fp32");
  }
}

template <class Fill>
void fill_cuda(const at::Tensor& tensor, PhiloxState& state, const Fill& fill_with) {
#ifdef PGPT_WITH_CUDA
  at::Generator generator = at::cuda::detail::createCUDAGenerator(tensor.device().index());
  auto* implementation = at::check_generator<at::CUDAGeneratorImpl>(generator);
  implementation->set_current_seed(state.seed);
  implementation->set_philox_offset_per_thread(state.offset);
  fill_with(generator);
  state.offset = implementation->philox_offset_per_thread();
#else
  (void)tensor, (void)state, (void)fill_with;
  PGPT_ASSERT(false, "a CUDA tensor in a build without CUDA");
#endif
}

void check_fill(const at::Tensor& tensor, const PhiloxState& state) {
  PGPT_ASSERT(tensor.is_contiguous(), "random fills need contiguous tensors");
  PGPT_ASSERT(state.offset % 4 == 0, "Philox offset ", state.offset, " is no multiple of 4");
}

}  // namespace

void philox_normal_(at::Tensor& tensor, double std, PhiloxState& state, std::int64_t sm_count) {
  check_fill(tensor, state);
  if (tensor.is_cuda()) {
    fill_cuda(tensor, state, [&](const at::Generator& generator) { tensor.normal_(0.0, std, generator); });
    return;
  }
  const auto factor = static_cast<float>(std);
  fill_cpu(tensor, state, sm_count, [factor](const detail::PhiloxWords& words) {
    Four four = normals(words);
    for (float& value : four.value) value *= factor;
    return four;
  });
}

void philox_uniform_(at::Tensor& tensor, double bound, PhiloxState& state, std::int64_t sm_count) {
  check_fill(tensor, state);
  if (tensor.is_cuda()) {
    fill_cuda(tensor, state, [&](const at::Generator& generator) { tensor.uniform_(-bound, bound, generator); });
    return;
  }
  // The kernel takes its bounds in the tensor's type, and turns (0, 1] round to include the lower bound instead of the
  // upper one.
  const float high = at::full({}, bound, tensor.options()).item<float>();
  const float range = at::full({}, high - -high, tensor.options().dtype(at::kFloat)).item<float>();
  const at::ScalarType type = tensor.scalar_type();
  fill_cpu(tensor, state, sm_count, [high, range, type](const detail::PhiloxWords& words) {
    Four four;
    for (std::size_t j = 0; j < 4; ++j) {
      float value = std::fma(unit(words.word[j]), range, -high);
      if (type == at::kBFloat16) value = static_cast<at::BFloat16>(value);
      if (type == at::kHalf) value = static_cast<at::Half>(value);
      four.value[j] = value == high ? -high : value;
    }
    return four;
  });
}

}  // namespace pgpt::kernels
