// Rotary positions: in place, or while heads move between the packed QKV layout and its parts.
//
// A thread owns one item of one head: `Width` pairs of channels to rotate (2 * Width channels; interleaved: Width / 2
// pairs), or Width channels behind the rotated ones to copy. Width is 8 (16-byte accesses) where dimensions and strides
// allow it, else 1 (2 when interleaved).

#include <type_traits>

#include "columns.cuh"
#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int Width>
__device__ void load_channels(const T* p, float (&x)[Width]) {
  if constexpr (Width == 8) {
    unpack(load8(p), x);
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] = to_float(p[i]);
  }
}
template <class T, int Width>
__device__ void store_channels(T* p, const float (&x)[Width]) {
  if constexpr (Width == 8) {
    store8(p, pack<T>(x));
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) p[i] = from_float<T>(x[i]);
  }
}

// (a, b) turned by the angle; without fused rounding cosine, sine, products and sum are each rounded to T.
template <class T>
__device__ void turn(float& a, float& b, float cos, float sin, bool fused_rounding) {
  float first, second;
  if (fused_rounding) {
    first = a * cos - b * sin;
    second = b * cos + a * sin;
  } else {
    cos = rounded<T>(cos);
    sin = rounded<T>(sin);
    first = rounded<T>(__fmul_rn(a, cos)) - rounded<T>(__fmul_rn(b, sin));
    second = rounded<T>(__fmul_rn(b, cos)) + rounded<T>(__fmul_rn(a, sin));
  }
  a = first;
  b = second;
}

// Items of one head: `rotating` then `copying`.
struct Items {
  int rotating, copying;
};

// Divisors of a flat item index: items of a token and of a head, heads of a group, positions of a sequence.
struct Dividers {
  FastDivider token, head, group, sequence;
};

// The row of the table that token number `token`, at `position` of its sequence, is turned by.
__device__ std::int64_t angle_row(const RotationArguments& rotation, std::uint32_t token, std::int64_t position) {
  return rotation.positions == nullptr ? position : rotation.positions[token];
}

// Moves item `item` of one head from `from` to `to` (may be the same), turning the first channels when `turning`.
template <class T, int Width, bool Interleaved>
__device__ void move_item(const T* from, T* to, int item, const Items& items, std::int64_t position, bool turning,
                          const RotationArguments& rotation) {
  const int dim = static_cast<int>(rotation.dim), half = dim / 2;
  if (item >= items.rotating) {
    const int c = dim + (item - items.rotating) * Width;
    float x[Width];
    load_channels<T, Width>(from + c, x);
    store_channels<T, Width>(to + c, x);
    return;
  }
  const float* cos = rotation.cos + position * half;
  const float* sin = rotation.sin + position * half;
  if constexpr (Interleaved) {
    static_assert(Width % 2 == 0);
    const int c = item * Width;
    float x[Width];
    load_channels<T, Width>(from + c, x);
    if (turning) {
#pragma unroll
      for (int i = 0; i < Width / 2; ++i) {
        turn<T>(x[2 * i], x[2 * i + 1], cos[c / 2 + i], rotation.sin_sign * sin[c / 2 + i], rotation.fused_rounding);
      }
    }
    store_channels<T, Width>(to + c, x);
  } else {
    const int c = item * Width;
    float a[Width], b[Width];
    load_channels<T, Width>(from + c, a);
    load_channels<T, Width>(from + half + c, b);
    if (turning) {
      float cosines[Width], sines[Width];
      load_channels<float, Width>(cos + c, cosines);
      load_channels<float, Width>(sin + c, sines);
#pragma unroll
      for (int i = 0; i < Width; ++i)
        turn<T>(a[i], b[i], cosines[i], rotation.sin_sign * sines[i], rotation.fused_rounding);
    }
    store_channels<T, Width>(to + c, a);
    store_channels<T, Width>(to + half + c, b);
  }
}

template <class T, int Width, bool Interleaved>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(T* x, HeadLayout layout, RotationArguments rotation, Items items, Dividers by, int tokens_per_block) {
  const auto tokens = static_cast<std::uint32_t>(layout.batch * layout.sequence);
  const std::uint32_t first = blockIdx.x * static_cast<std::uint32_t>(tokens_per_block);
  const std::uint32_t count = by.token.divisor * static_cast<std::uint32_t>(tokens_per_block);
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const std::uint32_t local = by.token.divide(i), in_token = i - local * by.token.divisor;
    const std::uint32_t token = first + local;
    if (token >= tokens) return;
    const std::uint32_t slot = by.head.divide(in_token), item = in_token - slot * by.head.divisor;
    const std::uint32_t group = by.group.divide(slot), head = slot - group * by.group.divisor;
    const std::int64_t batch = by.sequence.divide(token), position = token - batch * by.sequence.divisor;
    T* p = x + batch * layout.batch_stride + position * layout.position_stride + group * layout.group_stride +
           head * layout.head_stride;
    move_item<T, Width, Interleaved>(p, p, static_cast<int>(item), items, angle_row(rotation, token, position), true,
                                     rotation);
  }
}

template <class T, int Width, bool Interleaved, bool Split>
__global__ void __launch_bounds__(kThreads)
    move_qkv_kernel(QkvArguments qkv, RotationArguments rotation, Items items, Dividers by, int tokens_per_block) {
  const auto tokens = static_cast<std::uint32_t>(qkv.batch * qkv.sequence);
  const std::uint32_t first = blockIdx.x * static_cast<std::uint32_t>(tokens_per_block);
  const std::uint32_t count = by.token.divisor * static_cast<std::uint32_t>(tokens_per_block);
  const auto heads = static_cast<std::uint32_t>(qkv.heads_per_group);
  for (std::uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const std::uint32_t local = by.token.divide(i), in_token = i - local * by.token.divisor;
    const std::uint32_t token = first + local;
    if (token >= tokens) return;
    const std::uint32_t slot = by.head.divide(in_token), item = in_token - slot * by.head.divisor;
    const std::uint32_t group = by.group.divide(slot), place = slot - group * by.group.divisor;
    const std::int64_t batch = by.sequence.divide(token), position = token - batch * by.sequence.divisor;
    T* packed = static_cast<T*>(qkv.packed) + (token * (by.group.divisor * qkv.groups) + slot) * qkv.head_dim;
    const HeadsPointer& part = place < heads ? qkv.q : (place == heads ? qkv.k : qkv.v);
    const std::uint32_t head = place < heads ? group * heads + place : group;
    T* single = static_cast<T*>(part.data) + batch * part.batch_stride + position * part.position_stride +
                head * part.head_stride;
    const bool turning = place <= heads;
    const std::int64_t row = angle_row(rotation, token, position);
    if constexpr (Split) {
      move_item<T, Width, Interleaved>(packed, single, static_cast<int>(item), items, row, turning, rotation);
    } else {
      move_item<T, Width, Interleaved>(single, packed, static_cast<int>(item), items, row, turning, rotation);
    }
  }
}

// How the merge with column sums turns heads: not at all, channel c with c + dim/2, or c with c + 1.
enum class Turn { kNone, kHalves, kPairs };

// q, k, v -> packed with packed's column sums. Block (strip, part): 32 items of every token of one chunk, whose tokens
// are dealt to the warps; a lane loads kBatch tokens before it turns them. Items are as above, of width 8.
template <class T, Turn Form>
__global__ void __launch_bounds__(kStripThreads, Form == Turn::kNone ? 4 : 3)
    merge_sums_kernel(QkvArguments qkv, RotationArguments rotation, Items items, Dividers by, std::uint32_t tokens,
                      std::uint32_t tokens_per_part, float* __restrict__ parts) {
  constexpr int kRuns = Form == Turn::kHalves ? 2 : 1;  // of 8 channels an item
  constexpr int kBatch = Form == Turn::kNone ? 4 : (Form == Turn::kPairs ? 2 : 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int dim = static_cast<int>(rotation.dim), half = dim / 2;
  const auto heads = static_cast<std::uint32_t>(qkv.heads_per_group);
  const std::int64_t width = by.group.divisor * qkv.groups * qkv.head_dim;
  // Channel j of a lane's totals, inside its head; negative: none.
  const auto channel_of = [&](int item, int j) {
    if (item >= items.rotating) return j < 8 ? dim + (item - items.rotating) * 8 + j : -1;
    return j < 8 ? item * 8 + j : half + item * 8 + j - 8;
  };
  float total[8 * kRuns];
#pragma unroll
  for (int i = 0; i < 8 * kRuns; ++i) total[i] = 0;

  const std::uint32_t index = blockIdx.x * 32 + lane;
  if (index < by.token.divisor) {
    const std::uint32_t slot = by.head.divide(index), group = by.group.divide(slot),
                        place = slot - group * by.group.divisor;
    const int item = static_cast<int>(index - slot * by.head.divisor);
    const bool paired = item < items.rotating, turning = paired && place <= heads;
    const int channel = channel_of(item, 0);
    const HeadsPointer& from = place < heads ? qkv.q : (place == heads ? qkv.k : qkv.v);
    const std::int64_t batch_stride = from.batch_stride, position_stride = from.position_stride;
    const T* const single =
        static_cast<const T*>(from.data) + (place < heads ? group * heads + place : group) * from.head_stride + channel;
    T* const packed = static_cast<T*>(qkv.packed) + slot * qkv.head_dim + channel;
    const std::uint32_t begin = blockIdx.y * tokens_per_part;
    const std::uint32_t end = begin + tokens_per_part < tokens ? begin + tokens_per_part : tokens;
    for (std::uint32_t first = begin + warp; first < end; first += kBatch * kStripWarps) {
      Raw8<T> raw[kBatch][kRuns];
      std::uint32_t positions[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const std::uint32_t token = first + b * kStripWarps;
        if (token >= end) continue;
        const std::uint32_t batch = by.sequence.divide(token);
        positions[b] = token - batch * by.sequence.divisor;
        const T* const p = single + batch * batch_stride + positions[b] * position_stride;
        raw[b][0] = load8(p);
        if constexpr (kRuns == 2) raw[b][1] = paired ? load8(p + half) : zero8<T>();
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const std::uint32_t token = first + b * kStripWarps;
        if (token >= end) continue;
        float x[kRuns][8];
#pragma unroll
        for (int run = 0; run < kRuns; ++run) unpack(raw[b][run], x[run]);
        if constexpr (Form != Turn::kNone) {
          if (turning) {
            const std::int64_t at = angle_row(rotation, token, positions[b]) * half;
            if constexpr (Form == Turn::kPairs) {
              const float *cos = rotation.cos + at + channel / 2, *sin = rotation.sin + at + channel / 2;
#pragma unroll
              for (int i = 0; i < 4; ++i)
                turn<T>(x[0][2 * i], x[0][2 * i + 1], cos[i], rotation.sin_sign * sin[i], rotation.fused_rounding);
            } else {
              float cosines[8], sines[8];
              load_channels<float, 8>(rotation.cos + at + channel, cosines);
              load_channels<float, 8>(rotation.sin + at + channel, sines);
#pragma unroll
              for (int i = 0; i < 8; ++i)
                turn<T>(x[0][i], x[1][i], cosines[i], rotation.sin_sign * sines[i], rotation.fused_rounding);
            }
          }
        }
        T* const to = packed + token * width;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
          if (run == 1 && !paired) continue;
          const Raw8<T> result = pack<T>(x[run]);
          store8(to + run * half, result);
          // Not contracted with a product before: the values that were stored are added.
          unpack(result, x[run]);
#pragma unroll
          for (int i = 0; i < 8; ++i) total[run * 8 + i] = __fadd_rn(total[run * 8 + i], x[run][i]);
        }
      }
    }
  }
  store_strip(total, parts + blockIdx.y * width, [&](int place) {
    const std::uint32_t other = blockIdx.x * 32 + place / (8 * kRuns);
    if (other >= by.token.divisor) return std::int64_t{-1};
    const std::uint32_t slot = by.head.divide(other);
    const int channel = channel_of(static_cast<int>(other - slot * by.head.divisor), place % (8 * kRuns));
    return channel < 0 ? std::int64_t{-1} : slot * qkv.head_dim + channel;
  });
}

// Calls f(T{}, integral_constant<Turn>).
template <class F>
void with_turn(Type type, const RotationArguments& rotation, F&& f) {
  with_type(type, [&](auto tag) {
    if (rotation.dim == 0)
      f(tag, std::integral_constant<Turn, Turn::kNone>{});
    else if (rotation.interleaved)
      f(tag, std::integral_constant<Turn, Turn::kPairs>{});
    else
      f(tag, std::integral_constant<Turn, Turn::kHalves>{});
  });
}

// Calls f(T{}, integral_constant<Width>, bool_constant<interleaved>).
template <class F>
void with_form(Type type, bool wide, bool interleaved, F&& f) {
  with_type(type, [&](auto tag) {
    if (wide && interleaved)
      f(tag, std::integral_constant<int, 8>{}, std::true_type{});
    else if (wide)
      f(tag, std::integral_constant<int, 8>{}, std::false_type{});
    else if (interleaved)
      f(tag, std::integral_constant<int, 2>{}, std::true_type{});
    else
      f(tag, std::integral_constant<int, 1>{}, std::false_type{});
  });
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

bool wide_dimensions(std::int64_t head_dim, const RotationArguments& rotation) {
  return head_dim % 8 == 0 && rotation.dim % (rotation.interleaved ? 8 : 16) == 0 && aligned(rotation.cos) &&
         aligned(rotation.sin);
}

// Grid of a launch over tokens: small heads share a block.
struct Tiling {
  Dividers by;
  int tokens_per_block, threads;
  unsigned blocks;

  Tiling(std::int64_t batch, std::int64_t sequence, std::int64_t slots, std::int64_t slots_per_group,
         const Items& items) {
    const std::int64_t tokens = batch * sequence, per_head = items.rotating + items.copying,
                       per_token = slots * per_head;
    if (tokens >= (std::int64_t{1} << 31) - kThreads)
      throw std::logic_error("internal error: too many tokens for the rope kernels");
    by = {FastDivider(static_cast<std::uint32_t>(per_token)), FastDivider(static_cast<std::uint32_t>(per_head)),
          FastDivider(static_cast<std::uint32_t>(slots_per_group)), FastDivider(static_cast<std::uint32_t>(sequence))};
    tokens_per_block = static_cast<int>(std::max<std::int64_t>(1, kThreads / per_token));
    threads = static_cast<int>(
        std::min<std::int64_t>(kThreads, ceil_div<std::int64_t>(tokens_per_block * per_token, 32) * 32));
    blocks = static_cast<unsigned>(ceil_div<std::int64_t>(tokens, tokens_per_block));
  }
};

bool wide_layout(const QkvArguments& qkv, const RotationArguments& rotation) {
  bool wide = wide_dimensions(qkv.head_dim, rotation) && aligned(qkv.packed);
  for (const HeadsPointer* part : {&qkv.q, &qkv.k, &qkv.v}) {
    wide = wide && aligned(part->data) && part->batch_stride % 8 == 0 && part->position_stride % 8 == 0 &&
           part->head_stride % 8 == 0;
  }
  return wide;
}

Items items_of(std::int64_t head_dim, const RotationArguments& rotation, int width) {
  return {static_cast<int>(rotation.dim / (rotation.interleaved ? width : 2 * width)),
          static_cast<int>((head_dim - rotation.dim) / width)};
}

Tiling tiling_of(const QkvArguments& qkv, const Items& items) {
  const std::int64_t per_group = qkv.heads_per_group + 2;
  return {qkv.batch, qkv.sequence, qkv.groups * per_group, per_group, items};
}

void move_qkv(const QkvArguments& qkv, const RotationArguments& rotation, bool split, cudaStream_t stream) {
  const std::int64_t tokens = qkv.batch * qkv.sequence;
  if (tokens == 0) return;
  with_form(qkv.type, wide_layout(qkv, rotation), rotation.interleaved, [&](auto tag, auto width, auto interleaved) {
    using T = decltype(tag);
    constexpr int kWidth = decltype(width)::value;
    constexpr bool kInterleaved = decltype(interleaved)::value;
    const Items items = items_of(qkv.head_dim, rotation, kWidth);
    const Tiling t = tiling_of(qkv, items);
    const auto launch = [&](auto kernel) {
      kernel<<<t.blocks, t.threads, 0, stream>>>(qkv, rotation, items, t.by, t.tokens_per_block);
    };
    if (split)
      launch(move_qkv_kernel<T, kWidth, kInterleaved, true>);
    else
      launch(move_qkv_kernel<T, kWidth, kInterleaved, false>);
  });
  check_launch(split ? "split_qkv" : "merge_qkv");
}

std::int64_t packed_width(const QkvArguments& qkv) { return qkv.groups * (qkv.heads_per_group + 2) * qkv.head_dim; }

// Strips and token chunks of merge_sums_kernel.
struct SumGrid {
  std::int64_t strips;
  int parts;
};
SumGrid sum_grid(const QkvArguments& qkv, const RotationArguments& rotation) {
  const Items items = items_of(qkv.head_dim, rotation, 8);
  const std::int64_t per_token = qkv.groups * (qkv.heads_per_group + 2) * (items.rotating + items.copying);
  SumGrid grid{ceil_div<std::int64_t>(per_token, 32), 1};
  with_turn(qkv.type, rotation, [&](auto tag, auto form) {
    static const std::int64_t resident =
        resident_blocks(merge_sums_kernel<decltype(tag), decltype(form)::value>, kStripThreads);
    grid.parts = row_parts(qkv.batch * qkv.sequence, grid.strips, resident);
  });
  return grid;
}

}  // namespace

void rotate(Type type, void* x, const HeadLayout& layout, const RotationArguments& rotation, cudaStream_t stream) {
  const std::int64_t tokens = layout.batch * layout.sequence;
  if (tokens == 0 || rotation.dim == 0) return;
  const bool wide = wide_dimensions(layout.head_dim, rotation) && aligned(x) && layout.batch_stride % 8 == 0 &&
                    layout.position_stride % 8 == 0 && layout.group_stride % 8 == 0 && layout.head_stride % 8 == 0;
  with_form(type, wide, rotation.interleaved, [&](auto tag, auto width, auto interleaved) {
    using T = decltype(tag);
    constexpr int kWidth = decltype(width)::value;
    constexpr bool kInterleaved = decltype(interleaved)::value;
    const Items items{static_cast<int>(rotation.dim / (kInterleaved ? kWidth : 2 * kWidth)), 0};
    const Tiling t(layout.batch, layout.sequence, layout.groups * layout.heads, layout.heads, items);
    rotate_kernel<T, kWidth, kInterleaved>
        <<<t.blocks, t.threads, 0, stream>>>(static_cast<T*>(x), layout, rotation, items, t.by, t.tokens_per_block);
  });
  check_launch("rotate");
}

void split_qkv(const QkvArguments& qkv, const RotationArguments& rotation, cudaStream_t stream) {
  move_qkv(qkv, rotation, true, stream);
}
void merge_qkv(const QkvArguments& qkv, const RotationArguments& rotation, cudaStream_t stream) {
  move_qkv(qkv, rotation, false, stream);
}

bool merge_qkv_sums_fits(const QkvArguments& qkv, const RotationArguments& rotation) {
  return wide_layout(qkv, rotation) && qkv.batch * qkv.sequence > 0;
}

std::size_t merge_qkv_sums_workspace(const QkvArguments& qkv, const RotationArguments& rotation) {
  return sizeof(float) * static_cast<std::size_t>(sum_grid(qkv, rotation).parts) *
         static_cast<std::size_t>(packed_width(qkv));
}

void merge_qkv_sums(const QkvArguments& qkv, const RotationArguments& rotation, void* column_sums, void* workspace,
                    cudaStream_t stream) {
  const SumGrid grid = sum_grid(qkv, rotation);
  const std::int64_t tokens = qkv.batch * qkv.sequence, tokens_per_part = ceil_div<std::int64_t>(tokens, grid.parts);
  auto* const partial = static_cast<float*>(workspace);
  with_turn(qkv.type, rotation, [&](auto tag, auto form) {
    using T = decltype(tag);
    const Items items = items_of(qkv.head_dim, rotation, 8);
    const Tiling t = tiling_of(qkv, items);
    const dim3 blocks(static_cast<unsigned>(grid.strips), static_cast<unsigned>(grid.parts));
    merge_sums_kernel<T, decltype(form)::value>
        <<<blocks, kStripThreads, 0, stream>>>(qkv, rotation, items, t.by, static_cast<std::uint32_t>(tokens),
                                               static_cast<std::uint32_t>(tokens_per_part), partial);
    check_launch("merge_qkv_sums");
    add_parts<T>(partial, grid.parts, packed_width(qkv), {{static_cast<T*>(column_sums), nullptr, nullptr}}, stream);
  });
}

}  // namespace pgpt::kernels::cuda
