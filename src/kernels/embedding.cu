// Embedding rows, and their gradient without atomics.
//
// Gradient: (id, token) pairs are sorted by id (stable, so tokens stay in order). Blocks take fixed stretches of the
// sorted list and sum runs of equal ids. A run inside one stretch goes straight to the result; the pieces of a run that
// crosses stretches go to a workspace, and a second kernel adds them in order. All sizes are known on the host, so a
// CUDA graph can hold the whole thing.

#include <climits>
#include <cub/device/device_radix_sort.cuh>

#include "device.cuh"

namespace pgpt::kernels::cuda {
namespace {

constexpr int kStretch = 32;  // sorted tokens a block sums
constexpr int kThreads = 256;
constexpr int kStrip = 8 * kThreads;  // columns a block sums
constexpr int kAhead = 4;             // rows in flight a thread

template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const T* __restrict__ table, std::int64_t rows, std::int64_t width,
                  const std::int64_t* __restrict__ ids, std::int64_t tokens, FastDivider vectors_per_row,
                  T* __restrict__ y) {
  // Threads of a block run over whole rows; one block covers kThreads vectors of the flat result.
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads,
                     first_row = first / vectors_per_row.divisor;
  const auto offset = static_cast<std::uint32_t>(first - first_row * vectors_per_row.divisor) + threadIdx.x;
  const std::uint32_t local = vectors_per_row.divide(offset);
  const std::int64_t row = first_row + local, column = std::int64_t{8} * (offset - local * vectors_per_row.divisor);
  if (row >= tokens) return;
  const std::int64_t id = ids[row];
  Raw8<T> raw;
  if (id >= 0 && id < rows) {
    raw = load8(table + id * width + column);
  } else {
    float nans[8];
#pragma unroll
    for (float& x : nans) x = nanf("");
    raw = pack<T>(nans);
  }
  store8(y + row * width + column, raw);
}

// Sort keys; an id outside the table becomes `rows`, which the sums skip.
__global__ void __launch_bounds__(kThreads) keys_kernel(const std::int64_t* __restrict__ ids, int tokens, int rows,
                                                        int* __restrict__ keys, int* __restrict__ places) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= tokens) return;
  const std::int64_t id = ids[i];
  keys[i] = id >= 0 && id < rows ? static_cast<int>(id) : rows;
  places[i] = i;
}

// Where finished sums go: a dense table in T, or added to an fp32 table.
template <class T>
struct DenseResult {
  T* out;
  std::int64_t width;
  __device__ void put(std::int64_t row, std::int64_t column, const float (&sum)[8]) const {
    store8(out + row * width + column, pack<T>(sum));
  }
};
// The row sum is rounded to T first, as the dense table would be.
template <class T>
struct AddedResult {
  float* out;
  std::int64_t width;
  __device__ void put(std::int64_t row, std::int64_t column, const float (&sum)[8]) const {
    float x[8];
    float* const p = out + row * width + column;
    unpack(load8(p), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += static_cast<float>(static_cast<T>(sum[i]));
    store8(p, pack<float>(x));
  }
};

// Pieces of runs that cross stretches, [stretches, width] each: `heads` of the run that came from the stretch before,
// `tails` of the run that starts here and goes on. A run that fills the stretch and goes on at both ends is a head.
struct Pieces {
  float* heads;
  float* tails;
};

template <class T, class Result>
__global__ void __launch_bounds__(kThreads)
    sum_stretches_kernel(const T* __restrict__ dy, const int* __restrict__ keys, const int* __restrict__ places,
                         int tokens, std::int64_t width, int rows, Result result, Pieces pieces) {
  __shared__ int key[kStretch + 2], place[kStretch];
  const int begin = blockIdx.x * kStretch, count = min(kStretch, tokens - begin);
  // key[0] and key[count + 1] are the neighbours' keys, -1 outside the list.
  for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
    const int at = begin + i - 1;
    key[i] = at >= 0 && at < tokens ? keys[at] : -1;
    if (i < count) place[i] = places[begin + i];
  }
  __syncthreads();
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kStrip + 8 * threadIdx.x;
  if (column >= width) return;
  const std::int64_t piece = static_cast<std::int64_t>(blockIdx.x) * width + column;
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  bool from_before = key[0] == key[1];
  for (int first = 0; first < count; first += kAhead) {
    Raw8<T> raw[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < count) raw[i] = load8(dy + static_cast<std::int64_t>(place[first + i]) * width + column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= count) break;
      float x[8];
      unpack(raw[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += x[j];
      const int k = key[first + i + 1];
      const bool last = first + i == count - 1, goes_on = last && key[count + 1] == k;
      if (!last && key[first + i + 2] == k) continue;
      // The run ends here, or the stretch does.
      if (from_before)
        store8(pieces.heads + piece, pack<float>(sum));
      else if (goes_on)
        store8(pieces.tails + piece, pack<float>(sum));
      else if (k < rows)
        result.put(k, column, sum);
      from_before = false;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = 0;
    }
  }
}

// One block for each stretch in which a crossing run starts: tail of this stretch, then heads of the following ones.
template <class Result>
__global__ void __launch_bounds__(kThreads)
    join_runs_kernel(const int* __restrict__ keys, int tokens, std::int64_t width, int rows, Result result,
                     Pieces pieces) {
  const int last = blockIdx.x * kStretch + kStretch - 1;  // the grid leaves out the last stretch, so last + 1 exists
  const int k = keys[last];
  if (k >= rows || keys[last + 1] != k) return;
  const int begin = blockIdx.x * kStretch;
  if (begin > 0 && keys[begin] == k && keys[begin - 1] == k) return;  // started earlier
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.y) * kStrip + 8 * threadIdx.x;
  if (column >= width) return;
  float sum[8];
  unpack(load8(pieces.tails + static_cast<std::int64_t>(blockIdx.x) * width + column), sum);
  // Stretches that the run reaches: those whose first key is k.
  int end = blockIdx.x + 1;
  const int stretches = (tokens + kStretch - 1) / kStretch;
  {
    int low = end, high = stretches;  // keys[low * kStretch] == k; first stretch beyond the run lies in (low, high]
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (keys[middle * kStretch] == k)
        low = middle;
      else
        high = middle;
    }
    end = low + 1;
  }
#pragma unroll 8
  for (int stretch = blockIdx.x + 1; stretch < end; ++stretch) {
    float x[8];
    unpack(load8(pieces.heads + static_cast<std::int64_t>(stretch) * width + column), x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += x[j];
  }
  result.put(k, column, sum);
}

// Layout of the workspace.
struct Workspace {
  int *keys_in, *keys_out, *places_in, *places_out;
  Pieces pieces;
  void* sort;
  std::size_t sort_bytes, bytes;

  Workspace(void* base, std::int64_t tokens, std::int64_t width, std::int64_t rows) {
    std::size_t used = 0;
    const auto take = [&](std::size_t size) {
      char* const p = static_cast<char*>(base) + used;
      used += (size + 255) / 256 * 256;
      return p;
    };
    const std::size_t list = sizeof(int) * static_cast<std::size_t>(tokens);
    const auto piece = sizeof(float) * static_cast<std::size_t>(ceil_div<std::int64_t>(tokens, kStretch) * width);
    keys_in = reinterpret_cast<int*>(take(list));
    keys_out = reinterpret_cast<int*>(take(list));
    places_in = reinterpret_cast<int*>(take(list));
    places_out = reinterpret_cast<int*>(take(list));
    pieces.heads = reinterpret_cast<float*>(take(piece));
    pieces.tails = reinterpret_cast<float*>(take(piece));
    sort_bytes = 0;
    check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, keys_in, keys_out, places_in, places_out,
                                               static_cast<int>(tokens), 0, key_bits(rows)),
               "embedding sort");
    sort = take(sort_bytes);
    bytes = used;
  }
  // Bits of the largest key, which is `rows` itself.
  static int key_bits(std::int64_t rows) {
    int bits = 1;
    while ((std::int64_t{1} << bits) <= rows) ++bits;
    return bits;
  }
};

template <class T, class Result>
void sum_by_id(const void* dy, const std::int64_t* ids, std::int64_t tokens, std::int64_t width, std::int64_t rows,
               const Result& result, void* workspace, cudaStream_t stream) {
  if (tokens == 0) return;
  if (tokens > INT_MAX - kStretch || rows >= INT_MAX)
    throw std::logic_error("internal error: embedding sizes over 2^31");
  Workspace w(workspace, tokens, width, rows);
  const int count = static_cast<int>(tokens), stretches = ceil_div(count, kStretch);
  keys_kernel<<<ceil_div(count, kThreads), kThreads, 0, stream>>>(ids, count, static_cast<int>(rows), w.keys_in,
                                                                  w.places_in);
  check_launch("embedding keys");
  check_cuda(cub::DeviceRadixSort::SortPairs(w.sort, w.sort_bytes, w.keys_in, w.keys_out, w.places_in, w.places_out,
                                             count, 0, Workspace::key_bits(rows), stream),
             "embedding sort");
  const auto strips = static_cast<unsigned>(ceil_div<std::int64_t>(width, kStrip));
  const int threads = static_cast<int>(std::min<std::int64_t>(kThreads, ceil_div<std::int64_t>(width / 8, 32) * 32));
  sum_stretches_kernel<T><<<dim3(static_cast<unsigned>(stretches), strips), threads, 0, stream>>>(
      static_cast<const T*>(dy), w.keys_out, w.places_out, count, width, static_cast<int>(rows), result, w.pieces);
  check_launch("embedding sums");
  if (stretches == 1) return;
  join_runs_kernel<<<dim3(static_cast<unsigned>(stretches - 1), strips), threads, 0, stream>>>(
      w.keys_out, count, width, static_cast<int>(rows), result, w.pieces);
  check_launch("embedding joins");
}

}  // namespace

void embedding_forward(Type type, const void* table, std::int64_t rows, std::int64_t width, const std::int64_t* ids,
                       std::int64_t tokens, void* y, cudaStream_t stream) {
  if (tokens == 0) return;
  const std::int64_t vectors = width / 8;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    gather_kernel<T>
        <<<static_cast<unsigned>(ceil_div<std::int64_t>(tokens * vectors, kThreads)), kThreads, 0, stream>>>(
            static_cast<const T*>(table), rows, width, ids, tokens, FastDivider(static_cast<std::uint32_t>(vectors)),
            static_cast<T*>(y));
  });
  check_launch("embedding_forward");
}

std::size_t embedding_gradient_workspace(std::int64_t tokens, std::int64_t width, std::int64_t rows) {
  return Workspace(nullptr, tokens, width, rows).bytes;
}

void embedding_gradient(Type type, const void* dy, const std::int64_t* ids, std::int64_t tokens, std::int64_t width,
                        std::int64_t rows, void* out, void* workspace, cudaStream_t stream) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    check_cuda(cudaMemsetAsync(out, 0, sizeof(T) * static_cast<std::size_t>(rows * width), stream),
               "embedding_gradient");
    sum_by_id<T>(dy, ids, tokens, width, rows, DenseResult<T>{static_cast<T*>(out), width}, workspace, stream);
  });
}

void accumulate_embedding_gradient(Type type, const void* dy, const std::int64_t* ids, std::int64_t tokens,
                                   std::int64_t width, std::int64_t rows, float* main_gradient, void* workspace,
                                   cudaStream_t stream) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    sum_by_id<T>(dy, ids, tokens, width, rows, AddedResult<T>{main_gradient, width}, workspace, stream);
  });
}

}  // namespace pgpt::kernels::cuda
