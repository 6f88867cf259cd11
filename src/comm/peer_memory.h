#pragma once

#ifdef PGPT_WITH_CUDA

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"

namespace pgpt::comm {

/// The memory of a group's peers on the same node, mapped into this process, and flags in device memory by which
/// streams of different ranks wait for each other without a kernel or the host.
///
/// An operation counts up one sequence number, the same on all ranks. A rank reports events of it to its peers: kReady
/// (its input may be read), kDone (it has read theirs) and kFence (it has come to a fence).
class PeerMemory final : public GroupResource {
 public:
  enum Event : std::size_t { kReady, kDone, kFence };

  /// Collective. Every rank throws ConfigError, with what the first one found, when the group's GPUs cannot read each
  /// other's memory; nothing stays behind.
  explicit PeerMemory(const GroupSetup& setup);

  /// See Communicator::share.
  void share(const std::vector<at::Tensor>& tensors);

  /// Bytes inside the shared tensors, the same on every rank.
  struct Place {
    std::size_t tensor = 0;
    std::size_t offset = 0;
  };
  /// Where `tensor` lies in one shared tensor; nothing if it does not lie whole in one.
  [[nodiscard]] std::optional<Place> find(const at::Tensor& tensor) const;
  /// That place in the memory of rank `peer` of the group, not this one.
  [[nodiscard]] const std::byte* address(const Place& place, int peer) const;

  /// The number of the next operation.
  [[nodiscard]] std::uint32_t next_sequence() { return ++sequence_; }
  /// Once `stream` gets here: tells all peers that this rank's `event` of operation `sequence` has happened.
  void signal(Event event, std::uint32_t sequence, cudaStream_t stream) const;
  /// Holds `stream` until `peer` has signalled the event of this operation.
  void await(Event event, std::uint32_t sequence, int peer, cudaStream_t stream) const;

  /// Unmaps the peers' memory, waits until all have, and frees the flags.
  void close() override;

 private:
  struct Exported;
  struct Driver;
  struct Shared {
    at::Tensor tensor;
    std::vector<const std::byte*> peers;  ///< by rank; null for this one
  };

  void open();
  void unmap();
  [[nodiscard]] std::vector<std::string> exchange(const std::string& own);
  void agree(const std::string& problem);
  [[nodiscard]] Exported export_memory(const void* pointer, std::size_t bytes) const;
  [[nodiscard]] const std::byte* import_memory(const Exported& exported, int peer);
  [[nodiscard]] std::string check_neighbours(const std::vector<std::string>& nodes,
                                             const std::vector<std::string>& gpus) const;
  void check_copies();
  void check_sharing();
  [[nodiscard]] std::uint32_t* word(std::size_t row, int rank) const;
  [[nodiscard]] std::uint32_t* peer_word(int peer, std::size_t row, int rank) const;

  GroupPtr record_;
  Watchdog* watchdog_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rounds_ = 0;
  std::uint32_t sequence_;
  std::uint32_t* flags_ = nullptr;          // rows of one word for each rank, in this rank's memory
  std::vector<std::uint32_t*> peer_flags_;  // the same of each peer; null for this rank
  std::vector<Shared> shared_;
  std::map<std::pair<int, std::string>, std::byte*> imports_;  // (peer, handle) -> base of its mapping
  bool closed_ = false;
};

}  // namespace pgpt::comm

#endif
