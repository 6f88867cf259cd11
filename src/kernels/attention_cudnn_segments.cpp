// Fused attention of cuDNN over segments of different lengths, through NVIDIA's header-only graph interface; the only
// file that includes it. Built without those headers, it takes nothing.

#include "attention_forms.h"

#ifdef PGPT_WITH_CUDNN_FRONTEND

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cudnn/Handle.h>
#include <c10/cuda/CUDAGuard.h>
#include <cudnn_frontend.h>

#include <limits>
#include <map>
#include <unordered_map>

namespace pgpt::kernels::detail {
namespace {

namespace fe = cudnn_frontend;
using TensorPointer = std::shared_ptr<fe::graph::Tensor_attributes>;

// Everything that a plan depends on; strides are in elements.
struct Shape {
  std::int64_t device, dtype, segments, tokens, longest, nh, ng, d;
  std::int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  auto operator<=>(const Shape&) const = default;

  Shape(const Qkv& qkv, const AttentionSegments& cut)
      : device(qkv.q.get_device()),
        dtype(static_cast<std::int64_t>(qkv.q.scalar_type())),
        segments(cut.lengths.numel()),
        tokens(qkv.q.size(0) * qkv.q.size(1)),
        longest(qkv.q.size(1)),
        nh(qkv.q.size(2)),
        ng(qkv.k.size(2)),
        d(qkv.q.size(3)),
        q_row(qkv.q.stride(1)),
        q_head(qkv.q.stride(2)),
        k_row(qkv.k.stride(1)),
        k_head(qkv.k.stride(2)),
        v_row(qkv.v.stride(1)),
        v_head(qkv.v.stride(2)) {}
};

// Names of the graphs' tensors. The offsets are where each segment begins, in elements from the tensor's own first; q,
// k, v and their gradients have the strides of the former, the output and its gradient are contiguous.
enum Uid : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kStatistics,
  kGradOut,
  kGradQ,
  kGradK,
  kGradV,
  kScale,
  kQueryLengths,
  kKeyLengths,
  kOffsetsQ,
  kOffsetsK,
  kOffsetsV,
  kOffsetsOut,  // and of its gradient
  kOffsetsStatistics,
};
constexpr std::int64_t kNumOffsets = kOffsetsStatistics - kOffsetsQ + 1;

class Builder {
 public:
  explicit Builder(const Shape& shape) : shape_(shape), graph_(std::make_shared<fe::graph::Graph>()) {
    const bool half = static_cast<at::ScalarType>(shape.dtype) == at::kHalf;
    graph_->set_io_data_type(half ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  // One value a segment, or one more.
  TensorPointer integers(Uid uid, std::int64_t count) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
  }
  TensorPointer offsets(Uid uid) {
    TensorPointer& tensor = offsets_[uid];
    if (!tensor) tensor = integers(uid, shape_.segments + 1);
    return tensor;
  }
  TensorPointer scale() {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(kScale)
                              .set_dim({1, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_is_pass_by_value(true)
                              .set_data_type(fe::DataType_t::FLOAT));
  }
  // Gives a tensor its place: tokens of one segment lie `row` apart, heads `head`.
  void place(fe::graph::Tensor_attributes& tensor, Uid uid, std::int64_t heads, std::int64_t width, std::int64_t row,
             std::int64_t head, Uid offsets_uid) {
    tensor.set_uid(uid)
        .set_dim({shape_.segments, heads, shape_.longest, width})
        .set_stride({shape_.longest * row, head, row, 1})
        .set_ragged_offset(offsets(offsets_uid));
  }
  // The four layouts; `tensor` is one that cuDNN writes.
  void like_q(fe::graph::Tensor_attributes& tensor, Uid uid) {
    place(tensor, uid, shape_.nh, shape_.d, shape_.q_row, shape_.q_head, kOffsetsQ);
  }
  void like_k(fe::graph::Tensor_attributes& tensor, Uid uid) {
    place(tensor, uid, shape_.ng, shape_.d, shape_.k_row, shape_.k_head, kOffsetsK);
  }
  void like_v(fe::graph::Tensor_attributes& tensor, Uid uid) {
    place(tensor, uid, shape_.ng, shape_.d, shape_.v_row, shape_.v_head, kOffsetsV);
  }
  void like_out(fe::graph::Tensor_attributes& tensor, Uid uid) {
    place(tensor, uid, shape_.nh, shape_.d, shape_.nh * shape_.d, shape_.d, kOffsetsOut);
  }
  using Layout = void (Builder::*)(fe::graph::Tensor_attributes&, Uid);
  TensorPointer input(Layout layout, Uid uid) {
    fe::graph::Tensor_attributes tensor;
    (this->*layout)(tensor, uid);
    return graph_->tensor(tensor);
  }
  void output(Layout layout, const TensorPointer& tensor, Uid uid) {
    (this->*layout)(*tensor, uid);
    tensor->set_output(true);
  }
  // Row statistics, fp32 [tokens,nh].
  void place_statistics(fe::graph::Tensor_attributes& tensor) {
    place(tensor, kStatistics, shape_.nh, 1, shape_.nh, 1, kOffsetsStatistics);
    tensor.set_data_type(fe::DataType_t::FLOAT);
  }

  // What both directions ask for: causal, and inside each segment's length only.
  template <class Attributes>
  void mask(Attributes& attributes) {
    attributes.set_attn_scale(scale())
        .set_padding_mask(true)
        .set_seq_len_q(integers(kQueryLengths, shape_.segments))
        .set_seq_len_kv(integers(kKeyLengths, shape_.segments))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
  }

  [[nodiscard]] fe::graph::Graph& graph() { return *graph_; }

  // The graph with its kernel chosen, or null where cuDNN has none.
  std::shared_ptr<fe::graph::Graph> finish(cudnnHandle_t handle) {
    const bool good = graph_->validate().is_good() && graph_->build_operation_graph(handle).is_good() &&
                      graph_->create_execution_plans({fe::HeurMode_t::A}).is_good() &&
                      graph_->check_support().is_good() && graph_->build_plans().is_good();
    return good ? graph_ : nullptr;
  }

 private:
  Shape shape_;
  std::shared_ptr<fe::graph::Graph> graph_;
  std::map<Uid, TensorPointer> offsets_;
};

std::shared_ptr<fe::graph::Graph> build_forward(const Shape& shape, cudnnHandle_t handle) {
  Builder builder(shape);
  fe::graph::SDPA_attributes attributes;
  attributes.set_name("attention").set_generate_stats(true);
  builder.mask(attributes);
  auto [out, statistics] =
      builder.graph().sdpa(builder.input(&Builder::like_q, kQ), builder.input(&Builder::like_k, kK),
                           builder.input(&Builder::like_v, kV), attributes);
  builder.output(&Builder::like_out, out, kOut);
  builder.place_statistics(*statistics);
  statistics->set_output(true);
  return builder.finish(handle);
}

std::shared_ptr<fe::graph::Graph> build_backward(const Shape& shape, cudnnHandle_t handle) {
  Builder builder(shape);
  fe::graph::SDPA_backward_attributes attributes;
  // Without the totals the workspace would hold every segment at the longest length.
  attributes.set_name("attention_backward").set_max_total_seq_len_q(shape.tokens);
  attributes.set_max_total_seq_len_kv(shape.tokens);
  builder.mask(attributes);
  fe::graph::Tensor_attributes statistics;
  builder.place_statistics(statistics);
  auto [dq, dk, dv] = builder.graph().sdpa_backward(
      builder.input(&Builder::like_q, kQ), builder.input(&Builder::like_k, kK), builder.input(&Builder::like_v, kV),
      builder.input(&Builder::like_out, kOut), builder.input(&Builder::like_out, kGradOut),
      builder.graph().tensor(statistics), attributes);
  // cuDNN writes dq where q's strides say, whatever is asked for.
  builder.output(&Builder::like_q, dq, kGradQ);
  builder.output(&Builder::like_k, dk, kGradK);
  builder.output(&Builder::like_v, dv, kGradV);
  return builder.finish(handle);
}

// Both directions of one shape; null where cuDNN has no kernel for one of them.
struct Plans {
  std::shared_ptr<fe::graph::Graph> forward, backward;
  at::Tensor rows;  // int32 [kNumOffsets,1] on the device: elements from token to token, in the order of the offsets

  explicit Plans(const Shape& shape) {
    cudnnHandle_t const handle = at::native::getCudnnHandle();
    forward = build_forward(shape, handle);
    if (forward) backward = build_backward(shape, handle);
    if (!backward) return;
    const std::vector<std::int64_t> values{shape.q_row, shape.k_row, shape.v_row, shape.nh * shape.d, shape.nh};
    rows = at::tensor(values, at::kInt)
               .view({kNumOffsets, 1})
               .to(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(shape.device)));
  }
};

const Plans& plans_for(const Shape& shape) {
  // cuDNN handles belong to threads, and so do the plans. Never destroyed: at exit the driver may be gone before them.
  static thread_local auto* const known = new std::map<Shape, Plans>();
  const auto found = known->find(shape);
  return found != known->end() ? found->second : known->try_emplace(shape, shape).first->second;
}

using Arguments = std::unordered_map<std::int64_t, void*>;

void* address(const at::Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

void execute(const fe::graph::Graph& graph, const Plans& plans, const AttentionSegments& segments, double scale,
             Arguments& arguments) {
  float fp32_scale = static_cast<float>(scale);
  // cuDNN takes for granted that each tensor begins at a 16-byte boundary.
  constexpr std::int64_t kAligned = 4;
  const std::int64_t count = segments.cu_seqlens.numel();
  const at::Tensor offsets =
      at::empty({kNumOffsets, (count + kAligned - 1) / kAligned * kAligned}, plans.rows.options());
  at::Tensor used = offsets.narrow(1, 0, count);
  at::mul_out(used, plans.rows, segments.cu_seqlens.unsqueeze(0));
  for (std::int64_t i = 0; i < kNumOffsets; ++i) arguments[kOffsetsQ + i] = address(offsets.select(0, i));
  arguments[kQueryLengths] = arguments[kKeyLengths] = address(segments.lengths);
  arguments[kScale] = &fp32_scale;
  const at::Tensor workspace = at::empty({graph.get_workspace_size()}, offsets.options().dtype(at::kByte));
  fe::error_t error = graph.execute(at::native::getCudnnHandle(), arguments, address(workspace));
  PGPT_CHECK(DeviceError, error.is_good(), "cuDNN's attention over segments failed: ", error.get_message(),
             "; --attention-backend unfused does without it");
}

// Heads that the kernels read in place: rows at one distance over the samples, everything at 16-byte boundaries.
bool regular(const at::Tensor& x) {
  return x.stride(3) == 1 && x.stride(0) == x.size(1) * x.stride(1) && x.stride(1) % 8 == 0 && x.stride(2) % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

// Tensors with the strides of q, k and v; in one allocation where those lie side by side in one.
Qkv empty_like_inputs(const Qkv& x) {
  const std::int64_t row = x.q.stride(1), tokens = x.q.size(0) * x.q.size(1);
  const std::int64_t first = std::min({x.q.storage_offset(), x.k.storage_offset(), x.v.storage_offset()});
  const auto inside = [&](const at::Tensor& t) {
    const std::int64_t end = t.storage_offset() - first + (t.size(2) - 1) * t.stride(2) + t.size(3);
    return t.is_alias_of(x.q) && t.stride(1) == row && end <= row;
  };
  if (inside(x.q) && inside(x.k) && inside(x.v)) {
    const at::Tensor packed = at::empty({tokens * row}, x.q.options());
    const auto part = [&](const at::Tensor& t) {
      return packed.as_strided(t.sizes(), t.strides(), t.storage_offset() - first);
    };
    return {part(x.q), part(x.k), part(x.v)};
  }
  const auto like = [](const at::Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options()); };
  return {like(x.q), like(x.k), like(x.v)};
}

}  // namespace

bool cudnn_segments_takes(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options) {
  // Older GPUs and cuDNN versions lack kernels that need no padding.
  constexpr std::size_t kOldestCudnn = 90600;
  if (!qkv.q.is_cuda() || !fused_gpu_takes(qkv, options, largest_cudnn_head_dim(qkv.q)) || qkv.q.size(3) % 16 != 0)
    return false;
  if (at::cuda::getDeviceProperties(qkv.q.get_device())->major < 9 || cudnnGetVersion() < kOldestCudnn) return false;
  if (!regular(qkv.q) || !regular(qkv.k) || !regular(qkv.v)) return false;
  const Shape shape(qkv, segments);
  // Offsets are 32-bit numbers.
  const std::int64_t widest = std::max({shape.q_row, shape.k_row, shape.v_row, shape.nh * shape.d});
  if (shape.tokens * widest > std::numeric_limits<std::int32_t>::max()) return false;
  const c10::cuda::CUDAGuard guard(qkv.q.device());
  return plans_for(shape).backward != nullptr;
}

at::Tensor cudnn_segments_forward(const Qkv& qkv, const AttentionSegments& segments, const AttentionOptions& options,
                                  AttentionSaved& saved) {
  const c10::cuda::CUDAGuard guard(qkv.q.device());
  const Plans& plans = plans_for(Shape(qkv, segments));
  const std::int64_t b = qkv.q.size(0), s = qkv.q.size(1), nh = qkv.q.size(2);
  saved.out = at::empty({b, s, nh, qkv.q.size(3)}, qkv.q.options());
  saved.log_sum_exp = at::empty({b, s, nh}, qkv.q.options().dtype(at::kFloat)).transpose(1, 2);
  Arguments arguments{{kQ, address(qkv.q)},
                      {kK, address(qkv.k)},
                      {kV, address(qkv.v)},
                      {kOut, address(saved.out)},
                      {kStatistics, address(saved.log_sum_exp)}};
  execute(*plans.forward, plans, segments, options.scale, arguments);
  return saved.out;
}

Qkv cudnn_segments_backward(const at::Tensor& dout, const AttentionSaved& saved) {
  const c10::cuda::CUDAGuard guard(saved.q.device());
  const Plans& plans = plans_for(Shape({saved.q, saved.k, saved.v}, saved.segments));
  const at::Tensor dy = dout.contiguous();
  Qkv gradient = empty_like_inputs({saved.q, saved.k, saved.v});
  Arguments arguments{{kQ, address(saved.q)},
                      {kK, address(saved.k)},
                      {kV, address(saved.v)},
                      {kOut, address(saved.out)},
                      {kStatistics, address(saved.log_sum_exp)},
                      {kGradOut, address(dy)},
                      {kGradQ, address(gradient.q)},
                      {kGradK, address(gradient.k)},
                      {kGradV, address(gradient.v)}};
  execute(*plans.backward, plans, saved.segments, saved.options.scale, arguments);
  return gradient;
}

}  // namespace pgpt::kernels::detail

#else

namespace pgpt::kernels::detail {

bool cudnn_segments_takes(const Qkv& /*qkv*/, const AttentionSegments& /*segments*/,
                          const AttentionOptions& /*options*/) {
  return false;
}
at::Tensor cudnn_segments_forward(const Qkv& /*qkv*/, const AttentionSegments& /*segments*/,
                                  const AttentionOptions& /*options*/, AttentionSaved& /*saved*/) {
  PGPT_ASSERT(false, "built without cuDNN's graph interface");
  return {};
}
Qkv cudnn_segments_backward(const at::Tensor& /*dout*/, const AttentionSaved& /*saved*/) {
  PGPT_ASSERT(false, "built without cuDNN's graph interface");
  return {};
}

}  // namespace pgpt::kernels::detail

#endif
