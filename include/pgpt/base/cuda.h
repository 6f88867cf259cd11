#pragma once

// RAII handles over the CUDA runtime. In a build without CUDA only NvtxRange exists, and it does nothing.
// Included only by modules that link libtorch (they carry the CUDA include folders).

#ifdef PGPT_WITH_CUDA

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <utility>

#include "pgpt/base/error.h"

/// Throws DeviceError naming the failed call; clears CUDA's last error first, so that handlers can still call CUDA.
#define PGPT_CUDA_CHECK(call)                                                                                        \
  do {                                                                                                               \
    const cudaError_t pgpt_cuda_status = (call);                                                                     \
    if (pgpt_cuda_status != cudaSuccess) {                                                                           \
      (void)cudaGetLastError();                                                                                      \
      throw ::pgpt::DeviceError(::pgpt::concat("CUDA: ", cudaGetErrorString(pgpt_cuda_status), " (",                 \
                                               cudaGetErrorName(pgpt_cuda_status), ") in ", #call, " at ", __FILE__, \
                                               ":", __LINE__));                                                      \
    }                                                                                                                \
  } while (false)

namespace pgpt::cuda {

/// Owns one CUDA handle; move-only; an empty one holds null. Destruction ignores errors: CUDA may already be gone.
template <class T, cudaError_t (*Destroy)(T)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) noexcept : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      value_ = std::exchange(other.value_, nullptr);
    }
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { reset(); }

  [[nodiscard]] T get() const noexcept { return value_; }

 private:
  void reset() noexcept {
    if (value_ != nullptr) (void)Destroy(value_);
    value_ = nullptr;
  }
  T value_ = nullptr;
};

/// A stream of the current device; does not synchronise with the legacy default stream.
class Stream {
 public:
  /// Creates the stream; `high_priority` asks for the device's highest priority. Throws DeviceError.
  explicit Stream(bool high_priority = false) {
    int lowest = 0;
    int highest = 0;
    PGPT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    PGPT_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest));
    handle_ = Handle<cudaStream_t, cudaStreamDestroy>(stream);
  }
  [[nodiscard]] cudaStream_t get() const noexcept { return handle_.get(); }

 private:
  Handle<cudaStream_t, cudaStreamDestroy> handle_;
};

/// An event of the current device; without timing unless asked for.
class Event {
 public:
  /// Creates the event. Throws DeviceError.
  explicit Event(bool timing = false) {
    cudaEvent_t event = nullptr;
    PGPT_CUDA_CHECK(cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming));
    handle_ = Handle<cudaEvent_t, cudaEventDestroy>(event);
  }
  [[nodiscard]] cudaEvent_t get() const noexcept { return handle_.get(); }
  /// Marks everything queued on `stream` so far.
  void record(cudaStream_t stream) const { PGPT_CUDA_CHECK(cudaEventRecord(handle_.get(), stream)); }
  /// Makes later work on `stream` wait for the mark; the host does not block.
  void block(cudaStream_t stream) const { PGPT_CUDA_CHECK(cudaStreamWaitEvent(stream, handle_.get(), 0)); }
  /// True once everything before the mark has finished. Throws DeviceError if it failed.
  [[nodiscard]] bool done() const {
    const cudaError_t status = cudaEventQuery(handle_.get());
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    PGPT_CUDA_CHECK(status);
    return true;
  }
  /// Blocks the host until the mark is reached.
  void synchronize() const { PGPT_CUDA_CHECK(cudaEventSynchronize(handle_.get())); }
  /// Milliseconds from `start` to this event; both need timing and must have been reached.
  [[nodiscard]] float milliseconds_since(const Event& start) const {
    float elapsed = 0;
    PGPT_CUDA_CHECK(cudaEventElapsedTime(&elapsed, start.get(), get()));
    return elapsed;
  }

 private:
  Handle<cudaEvent_t, cudaEventDestroy> handle_;
};

/// Names a range of host time in the profiler.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange() { nvtxRangePop(); }
};

}  // namespace pgpt::cuda

#else

namespace pgpt::cuda {

/// Does nothing in a build without CUDA.
class NvtxRange {
 public:
  explicit NvtxRange(const char* /*name*/) {}
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

}  // namespace pgpt::cuda

#endif
