#include "peer_memory.h"

#ifdef PGPT_WITH_CUDA

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "pgpt/base/cuda.h"
#include "pgpt/base/error.h"

namespace pgpt::comm {
namespace {

// Numbers start shortly before they wrap around, so that every run passes that point.
constexpr std::uint32_t kFirstSequence = 0xffffff80U;
// Rows of the flags, each with one word a rank: what peers signalled (by PeerMemory::Event), where outgoing numbers are
// copied from, and the trial copies of the constructor.
constexpr std::size_t kOutgoingRow = 3, kTrialRow = 6;
// A smaller allocation would share its pages with others, and all of them would be mapped by the peers.
constexpr std::size_t kFlagBytes = std::size_t{2} << 20;
constexpr int kMostRanks = 64;

template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  PGPT_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
#else
  (void)version;
  PGPT_CUDA_CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
  PGPT_CHECK(DeviceError, found == cudaDriverEntryPointSuccess && function != nullptr, "the GPU driver lacks ", name,
             "; install a newer driver");
  return reinterpret_cast<Function>(function);
}

#define PGPT_DRIVER_CHECK(call)                                                                       \
  do {                                                                                                \
    const CUresult pgpt_driver_status = (call);                                                       \
    PGPT_CHECK(DeviceError, pgpt_driver_status == CUDA_SUCCESS, "CUDA driver error ",                 \
               static_cast<int>(pgpt_driver_status), " in ", #call, " at ", __FILE__, ":", __LINE__); \
  } while (false)

/// What tells machines apart; containers of one machine may have different host names.
std::string node_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  return boot.empty() ? host : concat(boot, " ", host);
}
std::string identity_key(const std::string& node) { return node.substr(0, node.find(' ')); }
std::string host_name(const std::string& node) { return node.substr(node.find(' ') + 1); }

std::string bus_id(int device) {
  char text[32] = "";
  PGPT_CUDA_CHECK(cudaDeviceGetPCIBusId(text, sizeof text, device));
  return text;
}

int current_device() {
  int device = 0;
  PGPT_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

}  // namespace

/// Memory of one rank as its peers need it to map it; sent as raw bytes.
struct PeerMemory::Exported {
  cudaIpcMemHandle_t handle{};
  std::uint64_t offset = 0;  ///< from the start of the allocation
  std::uint64_t bytes = 0;

  [[nodiscard]] std::string pack() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
  static Exported unpack(const std::string& text, std::size_t index) {
    Exported result;
    std::memcpy(static_cast<void*>(&result), text.data() + index * sizeof result, sizeof result);
    return result;
  }
};

/// Functions of the driver that the runtime does not wrap.
struct PeerMemory::Driver {
  PFN_cuStreamWriteValue32_v11070 write_value = nullptr;
  PFN_cuStreamWaitValue32_v11070 wait_value = nullptr;
  PFN_cuMemGetAddressRange_v3020 address_range = nullptr;

  static const Driver& get() {
    static const Driver driver{
        driver_function<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 11070),
        driver_function<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 11070),
        driver_function<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020),
    };
    return driver;
  }
};

PeerMemory::PeerMemory(const GroupSetup& setup)
    : record_(setup.record),
      watchdog_(setup.watchdog),
      store_(setup.store),
      sequence_(kFirstSequence),
      peer_flags_(setup.record->ranks.size(), nullptr) {
  try {
    open();
  } catch (const ConfigError&) {
    // All ranks are here. None frees what another still maps.
    unmap();
    (void)exchange("");
    if (flags_ != nullptr) PGPT_CUDA_CHECK(cudaFree(flags_));
    throw;
  }
}

void PeerMemory::open() {
  const int size = static_cast<int>(record_->ranks.size());
  PGPT_CHECK(ConfigError, size <= kMostRanks, "group '", record_->name, "' has ", size, " ranks, at most ", kMostRanks,
             " GPUs of one node are served");
  std::string problem;
  Exported own;
  std::string gpu;
  try {
    gpu = bus_id(current_device());
    (void)Driver::get();
    void* memory = nullptr;
    PGPT_CUDA_CHECK(cudaMalloc(&memory, kFlagBytes));
    flags_ = static_cast<std::uint32_t*>(memory);
    std::vector<std::uint32_t> start(kFlagBytes / sizeof(std::uint32_t), kFirstSequence);
    PGPT_CUDA_CHECK(cudaMemcpy(memory, start.data(), kFlagBytes, cudaMemcpyHostToDevice));
    own = export_memory(memory, kFlagBytes);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  agree(problem);
  const std::vector<std::string> nodes = exchange(node_identity());
  const std::vector<std::string> gpus = exchange(gpu);
  agree(check_neighbours(nodes, gpus));
  const std::vector<std::string> exported = exchange(own.pack());
  try {
    for (int r = 0; r < size; ++r) {
      if (r == record_->rank) continue;
      const std::byte* base = import_memory(Exported::unpack(exported[static_cast<std::size_t>(r)], 0), r);
      peer_flags_[static_cast<std::size_t>(r)] =
          const_cast<std::uint32_t*>(reinterpret_cast<const std::uint32_t*>(base));
    }
  } catch (const std::exception& error) {
    problem = concat(error.what(), " (mapping a peer's memory)");
  }
  agree(problem);
  check_copies();
  check_sharing();
}

/// Allocations of libtorch can be mapped by other processes, which depends on its settings.
void PeerMemory::check_sharing() {
  std::string problem;
  try {
    const at::Tensor trial = at::empty({1}, at::TensorOptions().device(at::kCUDA).dtype(at::kByte));
    (void)export_memory(trial.data_ptr(), trial.nbytes());
  } catch (const std::exception& error) {
    problem = error.what();
  }
  agree(problem);
}

/// Every rank's text, by rank. Blocking; the watchdog ends the process when a peer stays away.
std::vector<std::string> PeerMemory::exchange(const std::string& own) {
  const Watchdog::Section section(watchdog_, record_, "exchange of memory handles", record_->sequence);
  const int round = rounds_++;
  const auto key = [round](int r) { return concat("peer_memory/", round, "/", r); };
  std::vector<std::string> texts;
  try {
    const std::string sent = "=" + own;  // never empty
    store_->set(key(record_->rank), std::vector<std::uint8_t>(sent.begin(), sent.end()));
    for (int r = 0; r < static_cast<int>(record_->ranks.size()); ++r) {
      const auto bytes = store_->get(key(r));
      texts.emplace_back(bytes.begin() + 1, bytes.end());
    }
  } catch (const std::exception& error) {
    throw CommError(watchdog_->explain(*record_, "exchange of memory handles", record_->sequence, brief(error)).text);
  }
  return texts;
}

/// Throws on every rank if one has a problem.
void PeerMemory::agree(const std::string& problem) {
  const std::vector<std::string> problems = exchange(problem);
  for (std::size_t r = 0; r < problems.size(); ++r) {
    PGPT_CHECK(ConfigError, problems[r].empty(), "group '", record_->name, "', rank ", record_->ranks[r], ": ",
               problems[r]);
  }
}

std::string PeerMemory::check_neighbours(const std::vector<std::string>& nodes,
                                         const std::vector<std::string>& gpus) const {
  const auto self = static_cast<std::size_t>(record_->rank);
  for (std::size_t r = 0; r < nodes.size(); ++r) {
    if (r == self) continue;
    if (identity_key(nodes[r]) != identity_key(nodes[self])) {
      return concat("rank ", record_->ranks[r], " is on another node (", host_name(nodes[r]), ", this is ",
                    host_name(nodes[self]), ")");
    }
    if (gpus[r] == gpus[self]) return concat("rank ", record_->ranks[r], " uses the same GPU ", gpus[r]);
    int peer = 0;
    if (cudaDeviceGetByPCIBusId(&peer, gpus[r].c_str()) != cudaSuccess) {
      (void)cudaGetLastError();  // hidden from this process; mapping its memory may work all the same
      continue;
    }
    int reachable = 0;
    if (cudaDeviceCanAccessPeer(&reachable, current_device(), peer) != cudaSuccess || reachable == 0) {
      (void)cudaGetLastError();
      return concat("GPU ", gpus[self], " cannot read the memory of GPU ", gpus[r]);
    }
  }
  return "";
}

/// Each rank writes a word of its own to every peer and looks at what has arrived; a stream waits for what is there.
void PeerMemory::check_copies() {
  const int size = static_cast<int>(record_->ranks.size());
  const auto number = [](int r) { return static_cast<std::uint32_t>(r) + 1; };
  std::string problem;
  try {
    const std::uint32_t own = number(record_->rank);
    PGPT_CUDA_CHECK(cudaMemcpy(word(kTrialRow, record_->rank), &own, sizeof own, cudaMemcpyHostToDevice));
    for (int r = 0; r < size; ++r) {
      if (r == record_->rank) continue;
      PGPT_CUDA_CHECK(cudaMemcpy(peer_word(r, kTrialRow, record_->rank), word(kTrialRow, record_->rank), sizeof own,
                                 cudaMemcpyDeviceToDevice));
    }
    PGPT_CUDA_CHECK(cudaDeviceSynchronize());
  } catch (const std::exception& error) {
    problem = concat(error.what(), " (a trial copy to a peer)");
  }
  agree(problem);
  try {
    std::vector<std::uint32_t> arrived(static_cast<std::size_t>(size));
    PGPT_CUDA_CHECK(
        cudaMemcpy(arrived.data(), word(kTrialRow, 0), arrived.size() * sizeof(std::uint32_t), cudaMemcpyDeviceToHost));
    for (int r = 0; r < size; ++r) {
      if (arrived[static_cast<std::size_t>(r)] == number(r)) continue;
      problem = concat("a trial copy from rank ", record_->ranks[static_cast<std::size_t>(r)], " did not arrive");
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    PGPT_DRIVER_CHECK(Driver::get().wait_value(stream, reinterpret_cast<CUdeviceptr>(word(kTrialRow, record_->rank)),
                                               number(record_->rank), CU_STREAM_WAIT_VALUE_GEQ));
    PGPT_CUDA_CHECK(cudaStreamSynchronize(stream));
  } catch (const std::exception& error) {
    problem = error.what();
  }
  agree(problem);
}

PeerMemory::Exported PeerMemory::export_memory(const void* pointer, std::size_t bytes) const {
  CUdeviceptr base = 0;
  std::size_t length = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  PGPT_DRIVER_CHECK(Driver::get().address_range(&base, &length, address));
  Exported result;
  result.offset = address - base;
  result.bytes = bytes;
  const cudaError_t status = cudaIpcGetMemHandle(&result.handle, reinterpret_cast<void*>(base));
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    std::string settings;
    for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
      if (const char* value = std::getenv(name)) settings += concat(" ", name, "=", value);
    }
    throw DeviceError(concat("memory cannot be shared with other processes (cudaIpcGetMemHandle: ",
                             cudaGetErrorString(status), "); expandable_segments and cudaMallocAsync prevent it: ",
                             settings.empty() ? "no allocator settings are in force" : "found" + settings));
  }
  return result;
}

const std::byte* PeerMemory::import_memory(const Exported& exported, int peer) {
  const std::pair<int, std::string> key(
      peer, std::string(reinterpret_cast<const char*>(&exported.handle), sizeof exported.handle));
  const auto known = imports_.find(key);
  if (known != imports_.end()) return known->second + exported.offset;
  void* base = nullptr;
  PGPT_CUDA_CHECK(cudaIpcOpenMemHandle(&base, exported.handle, cudaIpcMemLazyEnablePeerAccess));
  return imports_.emplace(key, static_cast<std::byte*>(base)).first->second + exported.offset;
}

void PeerMemory::share(const std::vector<at::Tensor>& tensors) {
  ++record_->sequence;  // so that the watchdog can tell who has not come yet
  std::string problem;
  std::string own;
  try {
    for (const at::Tensor& tensor : tensors) {
      check_contiguous(tensor);
      own += (tensor.numel() == 0 ? Exported{} : export_memory(tensor.data_ptr(), tensor.nbytes())).pack();
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  agree(problem);
  const std::vector<std::string> all = exchange(own);
  for (const std::string& text : all) {
    bool same = text.size() == own.size();
    for (std::size_t i = 0; same && i < tensors.size(); ++i) {
      same = Exported::unpack(text, i).bytes == Exported::unpack(own, i).bytes;
    }
    PGPT_ASSERT(same, "the ranks of group ", record_->name, " share tensors of different sizes");
  }
  std::vector<Shared> added;
  try {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      added.push_back({tensors[i], std::vector<const std::byte*>(all.size(), nullptr)});
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (static_cast<int>(r) == record_->rank || tensors[i].numel() == 0) continue;
        added.back().peers[r] = import_memory(Exported::unpack(all[r], i), static_cast<int>(r));
      }
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  agree(problem);
  shared_.insert(shared_.end(), added.begin(), added.end());
}

std::optional<PeerMemory::Place> PeerMemory::find(const at::Tensor& tensor) const {
  const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  for (std::size_t i = 0; i < shared_.size(); ++i) {
    const auto* const base = static_cast<const std::byte*>(shared_[i].tensor.const_data_ptr());
    if (begin >= base && begin + tensor.nbytes() <= base + shared_[i].tensor.nbytes()) {
      return Place{i, static_cast<std::size_t>(begin - base)};
    }
  }
  return std::nullopt;
}

const std::byte* PeerMemory::address(const Place& place, int peer) const {
  PGPT_ASSERT(!closed_, "group ", record_->name, " was used after its world's shutdown");
  return shared_[place.tensor].peers[static_cast<std::size_t>(peer)] + place.offset;
}

std::uint32_t* PeerMemory::word(std::size_t row, int rank) const {
  return flags_ + row * kMostRanks + static_cast<std::size_t>(rank);
}

std::uint32_t* PeerMemory::peer_word(int peer, std::size_t row, int rank) const {
  return peer_flags_[static_cast<std::size_t>(peer)] + row * kMostRanks + static_cast<std::size_t>(rank);
}

void PeerMemory::signal(Event event, std::uint32_t sequence, cudaStream_t stream) const {
  // The driver promises its value writes for this GPU's own memory only; copies work for mapped peers too. In stream
  // order the copy follows all that came before, and the next operation's number replaces this one only after it.
  std::uint32_t* const outgoing = word(kOutgoingRow + event, record_->rank);
  PGPT_DRIVER_CHECK(Driver::get().write_value(stream, reinterpret_cast<CUdeviceptr>(outgoing), sequence,
                                              CU_STREAM_WRITE_VALUE_DEFAULT));
  const int size = static_cast<int>(record_->ranks.size());
  for (int i = 1; i < size; ++i) {
    const int peer = (record_->rank + i) % size;
    PGPT_CUDA_CHECK(cudaMemcpyAsync(peer_word(peer, event, record_->rank), outgoing, sizeof sequence,
                                    cudaMemcpyDeviceToDevice, stream));
  }
}

void PeerMemory::await(Event event, std::uint32_t sequence, int peer, cudaStream_t stream) const {
  // Compares cyclically, so a wrapped number is later too.
  PGPT_DRIVER_CHECK(Driver::get().wait_value(stream, reinterpret_cast<CUdeviceptr>(word(event, peer)), sequence,
                                             CU_STREAM_WAIT_VALUE_GEQ));
}

void PeerMemory::unmap() {
  for (const auto& [key, base] : imports_) PGPT_CUDA_CHECK(cudaIpcCloseMemHandle(base));
  imports_.clear();
}

void PeerMemory::close() {
  if (closed_) return;
  closed_ = true;
  unmap();
  // Memory must not be freed while a peer maps it. One that was killed on its way out never says so: then the end of
  // this process frees it.
  constexpr auto kClosedKey = "peer_memory/closed";
  store_->add(kClosedKey, 1);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (store_->add(kClosedKey, 0) < static_cast<std::int64_t>(record_->ranks.size())) {
    if (std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  shared_.clear();
  PGPT_CUDA_CHECK(cudaFree(flags_));
  flags_ = nullptr;
}

}  // namespace pgpt::comm

#endif
