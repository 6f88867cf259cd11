#pragma once

#include <memory>

#include "pgpt/comm/world.h"
#include "pgpt/mesh/mesh.h"

namespace pgpt::training {

/// The communicators that training uses, created in the reference's order; groups of one rank open no connection.
struct Groups {
  std::shared_ptr<comm::Communicator> gtp_gather;  ///< GTP peers: weight gathers
  /// The same peers: gradient reduce-scatters and completion of replicated gradients. With --gtp-communicators 1 the
  /// gathers' communicator.
  std::shared_ptr<comm::Communicator> gtp_scatter;
  std::unique_ptr<comm::Communicator> replicate_data;  ///< D x C, GTP left out: gradient buckets
  std::unique_ptr<comm::Communicator> data;            ///< GTP x C x D: losses, token counts, evaluation
  std::unique_ptr<comm::Communicator> model;           ///< T x GTP x P: norms and counts
};

/// Collective over the whole world; `gtp_transport` is that of the `gtp_communicators` (1 or 2) GTP groups.
[[nodiscard]] Groups create_groups(comm::World& world, const mesh::Mesh& mesh, comm::Transport gtp_transport,
                                   std::int64_t gtp_communicators);

}  // namespace pgpt::training
