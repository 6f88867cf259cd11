#include "pgpt/training/groups.h"

namespace pgpt::training {

Groups create_groups(comm::World& world, const mesh::Mesh& mesh) {
  const auto create = [&](const std::string& name, const std::string& members_of, bool high_priority = false) {
    return world.create_group(name, mesh.group(members_of, world.rank()), high_priority);
  };
  Groups groups;
  groups.gtp_gather = create("gtp", "gtp", /*high_priority=*/true);
  groups.gtp_scatter = create("gtp_scatter", "gtp");
  groups.replicate_data = create("replicate_dp_cp", "replicate_dp_cp");
  groups.data = create("data_cp", "data_cp");
  groups.model = create("model", "model");
  return groups;
}

}  // namespace pgpt::training
