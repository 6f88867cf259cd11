#pragma once

#include <memory>

#include "pgpt/comm/world.h"
#include "pgpt/mesh/mesh.h"

namespace pgpt::training {

/// The communicators that training uses, created in the reference's order; groups of one rank open no connection.
struct Groups {
  std::unique_ptr<comm::Communicator> gtp_gather;  ///< GTP peers: weight gathers
  std::unique_ptr<comm::Communicator>
      gtp_scatter;  ///< the same peers: gradient reduce-scatters and completion of replicated gradients
  std::unique_ptr<comm::Communicator> replicate_data;  ///< D x C, GTP left out: gradient buckets
  std::unique_ptr<comm::Communicator> data;            ///< GTP x C x D: losses, token counts, evaluation
  std::unique_ptr<comm::Communicator> model;           ///< T x GTP x P: norms and counts
};

/// Collective over the whole world; `gtp_transport` is that of the two GTP groups.
[[nodiscard]] Groups create_groups(comm::World& world, const mesh::Mesh& mesh, comm::Transport gtp_transport);

}  // namespace pgpt::training
