// Norms and optimizer steps over flat buffers.

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "fast.h"
#include "optimizer_loops.h"
#include "parallel.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

// Work is cut at multiples of this inside each segment, so sums do not depend on the number of threads.
constexpr std::int64_t kPiece = 1 << 16;

struct Piece {
  std::int64_t begin, end;
  const Segment* segment;
};

std::vector<Piece> cut(const SegmentTable& table, bool only_normed) {
  std::vector<Piece> pieces;
  for (const Segment& segment : table.host) {
    if (only_normed && segment.norm_weight == 0) continue;
    for (std::int64_t begin = segment.begin; begin < segment.end; begin += kPiece) {
      pieces.push_back({begin, std::min(segment.end, begin + kPiece), &segment});
    }
  }
  return pieces;
}

template <class Function>
void for_each_piece(const std::vector<Piece>& pieces, const Function& function) {
  detail::parallel_for(0, static_cast<std::int64_t>(pieces.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) function(i, pieces[static_cast<std::size_t>(i)]);
  });
}

void check_flat(const at::Tensor& flat, const SegmentTable& table) {
  PGPT_ASSERT(flat.is_contiguous(), "flat buffers are contiguous");
  for (const Segment& segment : table.host) {
    PGPT_ASSERT(segment.begin >= 0 && segment.end <= flat.numel(), "segment [", segment.begin, ", ", segment.end,
                ") in a buffer of ", flat.numel());
  }
}

// Sum over the normed segments of one value per piece, in piece order.
template <class Total, class Function>
Total sum_of_pieces(const SegmentTable& table, const Function& function) {
  const std::vector<Piece> pieces = cut(table, true);
  std::vector<Total> partial(pieces.size());
  for_each_piece(pieces,
                 [&](std::int64_t i, const Piece& piece) { partial[static_cast<std::size_t>(i)] = function(piece); });
  return std::accumulate(partial.begin(), partial.end(), Total{0});
}

// Eight running sums let the compiler use vector registers; their order is fixed.
template <class T>
double sum_of_squares(const T* data, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kLanes = 8;
  double lanes[kLanes] = {};
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(data[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < end; ++i) {
    const auto value = static_cast<double>(data[i]);
    lanes[0] += value * value;
  }
  return std::accumulate(lanes, lanes + kLanes, 0.0);
}

void check_step(const at::Tensor& weights, const at::Tensor& master, const at::Tensor& gradient,
                const SegmentTable& segments, const StepScalars& scalars) {
  PGPT_ASSERT(master.scalar_type() == at::kFloat, "masters are fp32");
  PGPT_ASSERT(scalars.values.scalar_type() == at::kFloat && scalars.values.is_contiguous(), "step scalars are fp32");
  check_flat(weights, segments);
  check_flat(master, segments);
  check_flat(gradient, segments);
  for (const Segment& segment : segments.host) {
    PGPT_ASSERT(segment.group >= 0 && StepScalars::kCount + segment.group < scalars.values.numel(), "group ",
                segment.group);
  }
}

// Calls function(weights pointer, gradient pointer) with their element types; the weights pointer is null when they are
// the master.
template <class Function>
void with_types(at::Tensor& weights, const at::Tensor& master, const at::Tensor& gradient, const Function& function) {
  const auto with_gradient = [&](auto* weight) {
    if (gradient.scalar_type() == at::kBFloat16) return function(weight, gradient.const_data_ptr<at::BFloat16>());
    if (gradient.scalar_type() == at::kHalf) return function(weight, gradient.const_data_ptr<at::Half>());
    PGPT_ASSERT(gradient.scalar_type() == at::kFloat, "gradients are fp32, bf16 or fp16");
    function(weight, gradient.const_data_ptr<float>());
  };
  if (weights.scalar_type() == at::kBFloat16) return with_gradient(weights.mutable_data_ptr<at::BFloat16>());
  if (weights.scalar_type() == at::kHalf) return with_gradient(weights.mutable_data_ptr<at::Half>());
  PGPT_ASSERT(weights.scalar_type() == at::kFloat, "weights are bf16, fp16 or fp32");
  with_gradient(weights.data_ptr() == master.data_ptr() ? static_cast<float*>(nullptr)
                                                        : weights.mutable_data_ptr<float>());
}

// `value` where the step is not skipped, else what is there; decided on the device.
void store_unless(const at::Tensor& skip, const at::Tensor& target, const at::Tensor& value) {
  target.copy_(at::where(skip, target, value.to(target.scalar_type())));
}

}  // namespace

SegmentTable make_segment_table(std::vector<Segment> segments, at::Device device) {
  SegmentTable table{std::move(segments), {}};
  if (device.is_cuda()) {
    const auto bytes = static_cast<std::int64_t>(table.host.size() * sizeof(Segment));
    const at::Tensor host = at::empty({bytes}, at::kByte);
    if (bytes > 0) std::memcpy(host.mutable_data_ptr(), table.host.data(), static_cast<std::size_t>(bytes));
    table.device = host.to(device);
  }
  return table;
}

at::Tensor squared_norm(const at::Tensor& flat, const SegmentTable& segments, const Policy& policy) {
  check_flat(flat, segments);
  if constexpr (fast::kBuilt) {
    if (auto norm = fast::squared_norm(flat, segments, policy)) return *norm;
  }
  const at::Tensor result = at::zeros({}, flat.options().dtype(at::kDouble));
  if (flat.is_cuda()) {
    for (const Segment& segment : segments.host) {
      if (segment.norm_weight == 0) continue;
      result.add_(flat.slice(0, segment.begin, segment.end).to(at::kDouble).square_().sum());
    }
    return result;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, flat.scalar_type(), "squared_norm", [&] {
    const auto* data = flat.const_data_ptr<scalar_t>();
    result.fill_(sum_of_pieces<double>(
        segments, [&](const Piece& piece) { return sum_of_squares(data, piece.begin, piece.end); }));
  });
  return result;
}

at::Tensor count_zeros(const at::Tensor& flat, const SegmentTable& segments) {
  check_flat(flat, segments);
  if constexpr (fast::kBuilt) {
    if (auto zeros = fast::count_zeros(flat, segments)) return *zeros;
  }
  const at::Tensor result = at::zeros({}, flat.options().dtype(at::kLong));
  if (flat.is_cuda()) {
    for (const Segment& segment : segments.host) {
      if (segment.norm_weight != 0) result.add_((flat.slice(0, segment.begin, segment.end) == 0).sum());
    }
    return result;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, flat.scalar_type(), "count_zeros", [&] {
    const auto* data = flat.const_data_ptr<scalar_t>();
    result.fill_(sum_of_pieces<std::int64_t>(segments, [&](const Piece& piece) {
      return static_cast<std::int64_t>(std::count_if(data + piece.begin, data + piece.end,
                                                     [](scalar_t value) { return static_cast<float>(value) == 0.0F; }));
    }));
  });
  return result;
}

at::Tensor has_non_finite(const at::Tensor& flat) {
  if constexpr (fast::kBuilt) {
    if (auto found = fast::has_non_finite(flat)) return *found;
  }
  if (flat.numel() == 0) return at::zeros({}, flat.options().dtype(at::kFloat));
  // Extremes carry NaN and Inf through without a temporary of the buffer's size.
  const auto [low, high] = at::aminmax(flat);
  return at::logical_not(at::logical_and(at::isfinite(low), at::isfinite(high))).to(at::kFloat).reshape({});
}

void adam_step(at::Tensor& weights, at::Tensor& master, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
               const at::Tensor& gradient, const SegmentTable& segments, const AdamOptions& options,
               const StepScalars& scalars, const Policy& policy) {
  check_step(weights, master, gradient, segments, scalars);
  check_flat(exp_avg, segments);
  check_flat(exp_avg_sq, segments);
  if constexpr (fast::kBuilt) {
    if (fast::adam_step(weights, master, exp_avg, exp_avg_sq, gradient, segments, options, scalars, policy)) return;
  }
  const float beta1 = options.beta1, beta2 = options.beta2, epsilon = options.epsilon;
  const float rest1 = 1.0F - beta1, rest2 = 1.0F - beta2;
  if (master.is_cuda()) {
    const auto scalar = [&](std::int64_t i) { return scalars.values.select(0, i); };
    const at::Tensor skip = scalar(StepScalars::kSkip) != 0;
    for (const Segment& segment : segments.host) {
      const auto part = [&](const at::Tensor& flat) { return flat.slice(0, segment.begin, segment.end); };
      const at::Tensor p = part(master);
      const at::Tensor g = part(gradient).to(at::kFloat) * scalar(StepScalars::kGradientScale);
      const at::Tensor m = part(exp_avg) * beta1 + g * rest1;
      const at::Tensor v = part(exp_avg_sq) * beta2 + g * rest2 * g;
      const at::Tensor decay = scalar(StepScalars::kWeightDecay) * segment.weight_decay_multiplier;
      const at::Tensor update = (m / scalar(StepScalars::kBiasCorrection1)) /
                                    ((v / scalar(StepScalars::kBiasCorrection2)).sqrt_() + epsilon) +
                                p * decay;
      const at::Tensor next = p - scalar(StepScalars::kCount + segment.group) * update;
      store_unless(skip, part(weights), next);
      store_unless(skip, p, next);
      store_unless(skip, part(exp_avg), m);
      store_unless(skip, part(exp_avg_sq), v);
    }
    return;
  }
  const float* values = scalars.values.const_data_ptr<float>();
  if (values[StepScalars::kSkip] != 0) return;
  const float scale = values[StepScalars::kGradientScale];
  const float correction1 = values[StepScalars::kBiasCorrection1], correction2 = values[StepScalars::kBiasCorrection2];
  auto* p = master.mutable_data_ptr<float>();
  auto* m = exp_avg.mutable_data_ptr<float>();
  auto* v = exp_avg_sq.mutable_data_ptr<float>();
  const std::vector<Piece> pieces = cut(segments, false);
  with_types(weights, master, gradient, [&](auto* weight, const auto* grad) {
    for_each_piece(pieces, [&](std::int64_t, const Piece& piece) {
      detail::AdamCoefficients c{beta1, beta2, epsilon, scale, correction1, correction2, 0, 0};
      c.rate = values[StepScalars::kCount + piece.segment->group];
      c.decay = values[StepScalars::kWeightDecay] * piece.segment->weight_decay_multiplier;
      const std::int64_t begin = piece.begin;
      detail::adam_elements(p + begin, m + begin, v + begin, grad + begin, piece.end - begin, c);
      if (weight == nullptr) return;
      using Weight = std::remove_pointer_t<decltype(weight)>;
      for (std::int64_t i = piece.begin; i < piece.end; ++i) weight[i] = static_cast<Weight>(p[i]);
    });
  });
}

void sgd_step(at::Tensor& weights, at::Tensor& master, at::Tensor& momentum_buffer, const at::Tensor& gradient,
              const SegmentTable& segments, double momentum, const StepScalars& scalars, const Policy& policy) {
  check_step(weights, master, gradient, segments, scalars);
  check_flat(momentum_buffer, segments);
  if constexpr (fast::kBuilt) {
    if (fast::sgd_step(weights, master, momentum_buffer, gradient, segments, momentum, scalars, policy)) return;
  }
  const auto factor = static_cast<float>(momentum);
  if (master.is_cuda()) {
    const auto scalar = [&](std::int64_t i) { return scalars.values.select(0, i); };
    const at::Tensor skip = scalar(StepScalars::kSkip) != 0;
    const at::Tensor first = scalar(StepScalars::kFirstMomentum) != 0;
    for (const Segment& segment : segments.host) {
      const auto part = [&](const at::Tensor& flat) { return flat.slice(0, segment.begin, segment.end); };
      const at::Tensor p = part(master);
      const at::Tensor decay = scalar(StepScalars::kWeightDecay) * segment.weight_decay_multiplier;
      const at::Tensor g = part(gradient).to(at::kFloat) * scalar(StepScalars::kGradientScale) + p * decay;
      const at::Tensor velocity = at::where(first, g, part(momentum_buffer) * factor + g);
      const at::Tensor next = p - scalar(StepScalars::kCount + segment.group) * velocity;
      store_unless(skip, part(weights), next);
      store_unless(skip, p, next);
      store_unless(skip, part(momentum_buffer), velocity);
    }
    return;
  }
  const float* values = scalars.values.const_data_ptr<float>();
  if (values[StepScalars::kSkip] != 0) return;
  const float scale = values[StepScalars::kGradientScale];
  const bool first = values[StepScalars::kFirstMomentum] != 0;
  auto* p = master.mutable_data_ptr<float>();
  auto* velocity = momentum_buffer.mutable_data_ptr<float>();
  const std::vector<Piece> pieces = cut(segments, false);
  with_types(weights, master, gradient, [&](auto* weight, const auto* grad) {
    for_each_piece(pieces, [&](std::int64_t, const Piece& piece) {
      const float rate = values[StepScalars::kCount + piece.segment->group];
      const float decay = values[StepScalars::kWeightDecay] * piece.segment->weight_decay_multiplier;
      for (std::int64_t i = piece.begin; i < piece.end; ++i) {
        const float g = static_cast<float>(grad[i]) * scale + decay * p[i];
        velocity[i] = first ? g : factor * velocity[i] + g;
        p[i] = p[i] - rate * velocity[i];
      }
      if (weight == nullptr) return;
      using Weight = std::remove_pointer_t<decltype(weight)>;
      for (std::int64_t i = piece.begin; i < piece.end; ++i) weight[i] = static_cast<Weight>(p[i]);
    });
  });
}

}  // namespace pgpt::kernels
