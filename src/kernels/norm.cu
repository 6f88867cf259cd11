// LayerNorm and RMSNorm with the residual addition before it (forward) or after it (backward) in the same pass.
//
// Threads of a warp part (Group lanes) or of a whole block (Group 0) share one row and keep it in registers, so each
// tensor is read once. Backward blocks walk over many rows and keep their columns' weight gradients in registers; a
// second kernel adds the blocks' parts.

#include <type_traits>

#include "columns.cuh"
#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kGroupThreads = 128;  // threads of a block whose warp parts own rows
constexpr int kRowsPerBlock = 8;    // rows that share one read of the weight in forward

struct Shape {
  std::int64_t rows;
  int width;
  float epsilon;
  bool rms, zero_centered;
};

// How rows map to threads; see with_plan.
struct Plan {
  int threads;
  int rows_per_block;
  int vectors;  // of 8 columns a thread
};

template <class X, class W, int Group, int Vectors>
__global__ void __launch_bounds__(Group > 0 ? kGroupThreads : 512)
    forward_kernel(Shape shape, const X* __restrict__ x, const W* __restrict__ delta, const W* __restrict__ weight,
                   const W* __restrict__ bias, X* __restrict__ sum, W* __restrict__ y, float* __restrict__ mean_out,
                   float* __restrict__ rstd_out) {
  __shared__ float buffer[2 * 32];
  int phase = 0;
  const int lanes = Group > 0 ? Group : blockDim.x;
  const int lane = Group > 0 ? threadIdx.x % (Group > 0 ? Group : 1) : threadIdx.x;
  const int rows_per_block = Group > 0 ? blockDim.x / (Group > 0 ? Group : 1) : 1;
  const int vectors = shape.width / 8;
  const float inverse_width = 1.0F / static_cast<float>(shape.width);
  const auto row_sum = [&](float value) {
    if constexpr (Group > 0) return lanes_sum<Group>(value);
    float values[1] = {value};
    block_sum(values, buffer, phase);
    return values[0];
  };

  Raw8<W> gain_raw[Vectors], shift_raw[Vectors];
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    const int c = lane + i * lanes;
    gain_raw[i] = c < vectors ? load8(weight + 8 * c) : zero8<W>();
    shift_raw[i] = bias != nullptr && c < vectors ? load8(bias + 8 * c) : zero8<W>();
  }
  const float gain_offset = shape.zero_centered ? 1.0F : 0.0F;

  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block; first < shape.rows;
       first += static_cast<std::int64_t>(gridDim.x) * rows_per_block) {
    const std::int64_t row = first + (Group > 0 ? threadIdx.x / (Group > 0 ? Group : 1) : 0);
    const bool live = row < shape.rows;
    const std::int64_t base = row * shape.width;
    Raw8<X> raw[Vectors];
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const int c = lane + i * lanes;
      raw[i] = live && c < vectors ? load8(x + base + 8 * c) : zero8<X>();
    }
    if (delta != nullptr) {
      Raw8<W> delta_raw[Vectors];
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        const int c = lane + i * lanes;
        delta_raw[i] = live && c < vectors ? load8(delta + base + 8 * c) : zero8<W>();
      }
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        const int c = lane + i * lanes;
        float a[8], b[8];
        unpack(raw[i], a);
        unpack(delta_raw[i], b);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] += b[j];
        raw[i] = pack<X>(a);
        if (live && c < vectors) store8(sum + base + 8 * c, raw[i]);
      }
    }
    float mean = 0;
    if (!shape.rms) {
      float total = 0;
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        float v[8];
        unpack(raw[i], v);
        total += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
      }
      mean = row_sum(total) * inverse_width;
    }
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      if (lane + i * lanes < vectors) {
        float v[8];
        unpack(raw[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += (v[j] - mean) * (v[j] - mean);
      }
    }
    const float rstd = 1.0F / sqrtf(row_sum(squares) * inverse_width + shape.epsilon);
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const int c = lane + i * lanes;
      if (live && c < vectors) {
        float v[8], g[8], b[8];
        unpack(raw[i], v);
        unpack(gain_raw[i], g);
        unpack(shift_raw[i], b);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = (v[j] - mean) * rstd * (g[j] + gain_offset) + b[j];
        store8(y + base + 8 * c, pack<W>(v));
      }
    }
    if (live && lane == 0) {
      rstd_out[row] = rstd;
      if (mean_out != nullptr) mean_out[row] = mean;
    }
  }
}

// Threads of a backward block at most.
template <int Group, int Vectors>
constexpr int kBackwardThreads = Group > 0 ? kGroupThreads : (Vectors == 1 ? 256 : 512);

// Sums: also the column sums of dx. The registers are taken, so each thread keeps these in shared memory.
template <class X, class W, int Group, int Vectors, bool Rms, bool Sums>
__global__ void __launch_bounds__(kBackwardThreads<Group, Vectors>)
    backward_kernel(Shape shape, const W* __restrict__ dy, const X* __restrict__ x, const W* __restrict__ weight,
                    const float* __restrict__ mean_in, const float* __restrict__ rstd_in, const X* __restrict__ skip,
                    X* __restrict__ dx, float* __restrict__ parts) {
  // Loads of the next row overlap the reduction of this one, where registers allow it.
  constexpr bool kPrefetch = Group == 0 && Vectors <= 2;
  __shared__ float buffer[2 * 2 * 32];
  __shared__ float4 dx_sum[Sums ? 2 * Vectors : 1][Sums ? kBackwardThreads<Group, Vectors> : 1];
  int phase = 0;
  const int lanes = Group > 0 ? Group : blockDim.x;
  const int lane = Group > 0 ? threadIdx.x % (Group > 0 ? Group : 1) : threadIdx.x;
  const int rows_per_block = Group > 0 ? blockDim.x / (Group > 0 ? Group : 1) : 1;
  const int row_in_block = Group > 0 ? threadIdx.x / (Group > 0 ? Group : 1) : 0;
  const int vectors = shape.width / 8;
  const float inverse_width = 1.0F / static_cast<float>(shape.width);
  const float gain_offset = shape.zero_centered ? 1.0F : 0.0F;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * rows_per_block;

  Raw8<W> gain_raw[Vectors];
  float weight_sum[Vectors][8], bias_sum[Rms ? 1 : Vectors][8];
#pragma unroll
  for (int i = 0; i < Vectors; ++i) {
    const int c = lane + i * lanes;
    gain_raw[i] = c < vectors ? load8(weight + 8 * c) : zero8<W>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      weight_sum[i][j] = 0;
      if constexpr (!Rms) bias_sum[i][j] = 0;
    }
    if constexpr (Sums) dx_sum[2 * i][threadIdx.x] = dx_sum[2 * i + 1][threadIdx.x] = float4{0, 0, 0, 0};
  }

  Raw8<W> dy_raw[Vectors];
  Raw8<X> x_raw[Vectors];
  float mean = 0, rstd = 0;
  const auto load_row = [&](std::int64_t row, Raw8<W>(&dy_to)[Vectors], Raw8<X>(&x_to)[Vectors], float& mean_to,
                            float& rstd_to) {
    const bool live = row < shape.rows;
    const std::int64_t base = row * shape.width;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const int c = lane + i * lanes;
      dy_to[i] = live && c < vectors ? load8(dy + base + 8 * c) : zero8<W>();
      x_to[i] = live && c < vectors ? load8(x + base + 8 * c) : zero8<X>();
    }
    rstd_to = live ? rstd_in[row] : 0.0F;
    mean_to = !Rms && live ? mean_in[row] : 0.0F;
  };

  std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block;
  if constexpr (kPrefetch) load_row(first + row_in_block, dy_raw, x_raw, mean, rstd);
  for (; first < shape.rows; first += step) {
    const std::int64_t row = first + row_in_block;
    const bool live = row < shape.rows;
    const std::int64_t base = row * shape.width;
    Raw8<W> next_dy[kPrefetch ? Vectors : 1];
    Raw8<X> next_x[kPrefetch ? Vectors : 1];
    float next_mean = 0, next_rstd = 0;
    if constexpr (!kPrefetch) load_row(row, dy_raw, x_raw, mean, rstd);
    Raw8<X> skip_raw[Vectors];
    if (skip != nullptr) {
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        const int c = lane + i * lanes;
        skip_raw[i] = live && c < vectors ? load8(skip + base + 8 * c) : zero8<X>();
      }
    }
    if constexpr (kPrefetch) load_row(row + step, next_dy, next_x, next_mean, next_rstd);

    // Columns past the width read as zeros in dy and the gain, so they add nothing.
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      float g[8], v[8], d[8];
      unpack(gain_raw[i], g);
      unpack(x_raw[i], v);
      unpack(dy_raw[i], d);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float normalised = (v[j] - mean) * rstd;
        const float scaled = d[j] * (g[j] + gain_offset);
        sums[0] += scaled * normalised;
        weight_sum[i][j] += d[j] * normalised;
        if constexpr (!Rms) {
          sums[1] += scaled;
          bias_sum[i][j] += d[j];
        }
      }
    }
    if constexpr (Group > 0) {
      sums[0] = lanes_sum<Group>(sums[0]);
      if constexpr (!Rms) sums[1] = lanes_sum<Group>(sums[1]);
    } else if constexpr (Rms) {
      float one[1] = {sums[0]};
      block_sum(one, buffer, phase);
      sums[0] = one[0];
    } else {
      block_sum(sums, buffer, phase);
    }
    const float projection = sums[0] * inverse_width, average = sums[1] * inverse_width;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const int c = lane + i * lanes;
      if (live && c < vectors) {
        float g[8], v[8], d[8];
        unpack(gain_raw[i], g);
        unpack(x_raw[i], v);
        unpack(dy_raw[i], d);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float normalised = (v[j] - mean) * rstd;
          d[j] = rstd * (d[j] * (g[j] + gain_offset) - normalised * projection - average);
        }
        Raw8<X> result = pack<X>(d);
        if (skip != nullptr) {
          float s[8];
          unpack(skip_raw[i], s);
          unpack(result, d);
#pragma unroll
          for (int j = 0; j < 8; ++j) d[j] += s[j];
          result = pack<X>(d);
        }
        store8(dx + base + 8 * c, result);
        if constexpr (Sums) {
          // Not contracted with the product before: the values that were stored are added.
          unpack(result, d);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float4 total = dx_sum[2 * i + k][threadIdx.x];
            total.x = __fadd_rn(total.x, d[4 * k]);
            total.y = __fadd_rn(total.y, d[4 * k + 1]);
            total.z = __fadd_rn(total.z, d[4 * k + 2]);
            total.w = __fadd_rn(total.w, d[4 * k + 3]);
            dx_sum[2 * i + k][threadIdx.x] = total;
          }
        }
      }
    }
    if constexpr (kPrefetch) {
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        dy_raw[i] = next_dy[i];
        x_raw[i] = next_x[i];
      }
      mean = next_mean;
      rstd = next_rstd;
    }
  }

  const auto part_of = [&](int section) {
    return parts + (static_cast<std::int64_t>(gridDim.x) * section + blockIdx.x) * shape.width;
  };
  float* const weight_part = part_of(0);
  float* const bias_part = part_of(1);
  float* const dx_part = part_of(Rms ? 1 : 2);
  if constexpr (Group == 0) {
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
      const int c = lane + i * lanes;
      if (c < vectors) {
        store8(weight_part + 8 * c, pack<float>(weight_sum[i]));
        if constexpr (!Rms) store8(bias_part + 8 * c, pack<float>(bias_sum[i]));
        if constexpr (Sums) {
#pragma unroll
          for (int k = 0; k < 2; ++k) reinterpret_cast<float4*>(dx_part + 8 * c)[k] = dx_sum[2 * i + k][threadIdx.x];
        }
      }
    }
  } else {
    // The block's groups hold the same columns: added in shared memory, always in the same order.
    __shared__ float columns[kGroupThreads * Vectors * 8];
    const auto add_groups = [&](const float (&values)[Vectors][8], float* part) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        const int c = lane + i * lanes;
        if (c < vectors) {
#pragma unroll
          for (int j = 0; j < 8; ++j) columns[row_in_block * shape.width + 8 * c + j] = values[i][j];
        }
      }
      __syncthreads();
      for (int c = threadIdx.x; c < shape.width; c += blockDim.x) {
        float total = 0;
        for (int group = 0; group < rows_per_block; ++group) total += columns[group * shape.width + c];
        part[c] = total;
      }
    };
    add_groups(weight_sum, weight_part);
    if constexpr (!Rms) add_groups(bias_sum, bias_part);
    if constexpr (Sums) {
      float sums[Vectors][8];
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 total = dx_sum[2 * i + k][threadIdx.x];
          sums[i][4 * k] = total.x;
          sums[i][4 * k + 1] = total.y;
          sums[i][4 * k + 2] = total.z;
          sums[i][4 * k + 3] = total.w;
        }
      }
      add_groups(sums, dx_part);
    }
  }
}

// Calls f(integral_constant<Group>, integral_constant<Vectors>, Plan) for a width. Forward keeps little, so a warp
// takes rows of up to 1024 columns without a barrier; backward's column sums need registers, so there several warps
// share a row from 257 columns on.
template <class F>
void with_plan(std::int64_t width, bool backward, F&& f) {
  using std::integral_constant;
  const int vectors = static_cast<int>(width / 8);
  const auto group = [&](auto lanes, auto count) {
    f(lanes, count, Plan{kGroupThreads, kGroupThreads / decltype(lanes)::value, decltype(count)::value});
  };
  const auto block = [&](auto count) {
    const int threads = ceil_div(ceil_div(vectors, decltype(count)::value), 32) * 32;
    f(integral_constant<int, 0>{}, count, Plan{threads, 1, decltype(count)::value});
  };
  if (vectors <= 8) return group(integral_constant<int, 8>{}, integral_constant<int, 1>{});
  if (vectors <= 16) return group(integral_constant<int, 16>{}, integral_constant<int, 1>{});
  if (vectors <= 32) return group(integral_constant<int, 32>{}, integral_constant<int, 1>{});
  if (vectors <= 64 && !backward) return group(integral_constant<int, 32>{}, integral_constant<int, 2>{});
  if (vectors <= 96 && !backward) return group(integral_constant<int, 32>{}, integral_constant<int, 3>{});
  if (vectors <= 128 && !backward) return group(integral_constant<int, 32>{}, integral_constant<int, 4>{});
  if (vectors <= 256) return block(integral_constant<int, 1>{});
  if (vectors <= 1024) return block(integral_constant<int, 2>{});
  if (vectors <= 2048) return block(integral_constant<int, 4>{});
  throw std::logic_error("internal error: the norm kernels take at most 16384 columns");
}

// Blocks of the backward kernel: as many as run at once, but at most 8 an SM to keep the parts few. Registers allow
// about 1024 threads an SM at one vector a thread (64 registers each).
int backward_blocks(const NormArguments& norm, const Plan& plan) {
  const std::int64_t per_sm = std::clamp(1024 / plan.vectors / plan.threads, 1, 8);
  return static_cast<int>(
      std::max<std::int64_t>(1, std::min(ceil_div<std::int64_t>(norm.rows, plan.rows_per_block), sm_count() * per_sm)));
}

Shape shape_of(const NormArguments& norm) {
  return {norm.rows, static_cast<int>(norm.width), static_cast<float>(norm.epsilon), norm.rms, norm.zero_centered};
}

}  // namespace

void norm_forward(const NormArguments& norm, const void* x, const void* delta, void* sum, void* y,
                  cudaStream_t stream) {
  if (norm.rows == 0) return;
  with_stream_type(norm.x_type, norm.type, [&](auto x_tag, auto tag) {
    using X = decltype(x_tag);
    using W = decltype(tag);
    with_plan(norm.width, false, [&](auto group, auto vectors, const Plan& plan) {
      const std::int64_t row_blocks = ceil_div<std::int64_t>(norm.rows, plan.rows_per_block);
      const std::int64_t enough = static_cast<std::int64_t>(sm_count()) * (2048 / plan.threads);
      const std::int64_t blocks =
          std::min(row_blocks, std::max(enough, ceil_div<std::int64_t>(row_blocks, kRowsPerBlock)));
      forward_kernel<X, W, decltype(group)::value, decltype(vectors)::value>
          <<<static_cast<unsigned>(blocks), plan.threads, 0, stream>>>(
              shape_of(norm), static_cast<const X*>(x), static_cast<const W*>(delta),
              static_cast<const W*>(norm.weight), static_cast<const W*>(norm.bias), static_cast<X*>(sum),
              static_cast<W*>(y), norm.mean, norm.rstd);
    });
  });
  check_launch("norm_forward");
}

bool norm_backward_sums(const NormArguments& norm) { return norm.x_type == norm.type && norm.width <= 8192; }

std::size_t norm_backward_workspace(const NormArguments& norm, bool sums) {
  std::size_t bytes = 0;
  with_plan(norm.width, true, [&](auto, auto, const Plan& plan) {
    bytes = sizeof(float) * static_cast<std::size_t>(backward_blocks(norm, plan)) *
            static_cast<std::size_t>(norm.width) * ((norm.rms ? 1 : 2) + (sums ? 1 : 0));
  });
  return bytes;
}

void norm_backward(const NormArguments& norm, const void* dy, const void* x, const void* skip, void* dx, void* dweight,
                   void* dbias, void* column_sums, void* workspace, cudaStream_t stream) {
  with_stream_type(norm.x_type, norm.type, [&](auto x_tag, auto tag) {
    using X = decltype(x_tag);
    using W = decltype(tag);
    with_plan(norm.width, true, [&](auto group, auto vectors, const Plan& plan) {
      constexpr int kGroup = decltype(group)::value, kVectors = decltype(vectors)::value;
      if constexpr (kGroup == 0 || kVectors == 1) {  // the others are forward plans
        const int blocks = backward_blocks(norm, plan);
        auto* const parts = static_cast<float*>(workspace);
        const auto launch = [&](auto rms, auto sums) {
          backward_kernel<X, W, kGroup, kVectors, decltype(rms)::value, decltype(sums)::value>
              <<<blocks, plan.threads, 0, stream>>>(shape_of(norm), static_cast<const W*>(dy), static_cast<const X*>(x),
                                                    static_cast<const W*>(norm.weight), norm.mean, norm.rstd,
                                                    static_cast<const X*>(skip), static_cast<X*>(dx), parts);
        };
        const auto launch_with = [&](auto sums) {
          if (norm.rms)
            launch(std::true_type{}, sums);
          else
            launch(std::false_type{}, sums);
        };
        if (column_sums == nullptr) {
          launch_with(std::false_type{});
        } else if constexpr (std::is_same_v<X, W> && kVectors <= 2) {
          launch_with(std::true_type{});
        } else {
          throw std::logic_error("internal error: column sums of a norm gradient that norm_backward_sums refuses");
        }
        check_launch("norm_backward");
        auto* const to_weight = static_cast<W*>(dweight);
        auto* const to_bias = static_cast<W*>(dbias);
        auto* const to_sums = static_cast<W*>(column_sums);
        const SectionSums<W> sections =
            norm.rms ? SectionSums<W>{{to_weight, to_sums, nullptr}} : SectionSums<W>{{to_weight, to_bias, to_sums}};
        add_parts<W>(parts, blocks, norm.width, sections, stream);
      }
    });
  });
}

}  // namespace pgpt::kernels::cuda
