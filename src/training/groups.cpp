#include "pgpt/training/groups.h"

namespace pgpt::training {

Groups create_groups(comm::World& world, const mesh::Mesh& mesh, comm::Transport gtp_transport,
                     std::int64_t gtp_communicators) {
  const auto create = [&](const std::string& name, const std::string& members_of,
                          const comm::GroupOptions& options = {}) {
    return world.create_group(name, mesh.group(members_of, world.rank()), options);
  };
  Groups groups;
  groups.gtp_gather = create("gtp", "gtp", {.high_priority = true, .transport = gtp_transport});
  groups.gtp_scatter = groups.gtp_gather;
  if (gtp_communicators > 1) {
    groups.gtp_scatter = create("gtp_scatter", "gtp", {.high_priority = false, .transport = gtp_transport});
  }
  groups.replicate_data = create("replicate_dp_cp", "replicate_dp_cp");
  groups.data = create("data_cp", "data_cp");
  groups.model = create("model", "model");
  return groups;
}

}  // namespace pgpt::training
