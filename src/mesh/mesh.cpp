#include "pgpt/mesh/mesh.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "pgpt/base/error.h"

namespace pgpt::mesh {
namespace {

/// Checks every degree before anything divides by it.
Degrees checked(const Degrees& d) {
  const auto positive = [](const char* what, std::int64_t value) {
    PGPT_CHECK(ConfigError, value >= 1, what, " is ", value, "; it must be at least 1");
  };
  positive("the world size", d.world);
  positive("the tensor parallel size (--tensor-model-parallel-size)", d.tensor);
  positive("the pipeline parallel size (--pipeline-model-parallel-size)", d.pipeline);
  positive("the context parallel size (--context-parallel-size)", d.context);
  positive("the GTP size (--tensor-parallel-num-weight-shards / tensor parallel size)", d.gtp);
  positive("the expert parallel size (--expert-model-parallel-size)", d.expert);
  positive("the expert tensor parallel size (--expert-tensor-parallel-size)", d.expert_tensor);
  positive("the expert GTP size (--expert-tensor-parallel-num-weight-shards / expert tensor parallel size)",
           d.expert_gtp);

  const std::int64_t dense = d.tensor * d.gtp * d.context * d.pipeline;
  PGPT_CHECK(ConfigError, d.world % dense == 0, "world size ", d.world, " is not divisible by tensor parallel ",
             d.tensor, " x GTP ", d.gtp, " x context parallel ", d.context, " x pipeline parallel ", d.pipeline, " = ",
             dense, "; start a multiple of ", dense, " ranks or lower one of these sizes");
  const std::int64_t expert = d.expert_tensor * d.expert * d.expert_gtp * d.pipeline;
  PGPT_CHECK(ConfigError, d.world % expert == 0, "world size ", d.world, " is not divisible by expert tensor parallel ",
             d.expert_tensor, " x expert parallel ", d.expert, " x expert GTP ", d.expert_gtp, " x pipeline parallel ",
             d.pipeline, " = ", expert, "; start a multiple of ", expert, " ranks or lower one of these sizes");
  return d;
}

Grid dense_grid(const Degrees& d) {
  const std::int64_t data = d.world / (d.tensor * d.gtp * d.context * d.pipeline);
  if (d.pipeline_before_data) {
    return Grid({Axis::kTensor, Axis::kGtp, Axis::kContext, Axis::kPipeline, Axis::kData},
                {d.tensor, d.gtp, d.context, d.pipeline, data});
  }
  return Grid({Axis::kTensor, Axis::kGtp, Axis::kContext, Axis::kData, Axis::kPipeline},
              {d.tensor, d.gtp, d.context, data, d.pipeline});
}

Grid expert_grid(const Degrees& d) {
  const std::int64_t data = d.world / (d.expert_tensor * d.expert * d.expert_gtp * d.pipeline);
  if (d.pipeline_before_data) {
    return Grid({Axis::kTensor, Axis::kExpert, Axis::kGtp, Axis::kPipeline, Axis::kData},
                {d.expert_tensor, d.expert, d.expert_gtp, d.pipeline, data});
  }
  return Grid({Axis::kTensor, Axis::kExpert, Axis::kGtp, Axis::kData, Axis::kPipeline},
              {d.expert_tensor, d.expert, d.expert_gtp, data, d.pipeline});
}

const NamedGroup& find_group(const std::string& name) {
  for (const NamedGroup& group : Mesh::named_groups()) {
    if (group.name == name) return group;
  }
  PGPT_ASSERT(false, "no group is named ", name);
  std::abort();
}

/// The members of a pipeline group that form the named group; all of them for every other kind.
std::vector<int> select_members(const std::string& name, std::vector<int> members) {
  if (name == "position_embedding") return {members.front()};
  if (name == "embedding" && members.size() > 1) return {members.front(), members.back()};
  return members;
}

std::string pad(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

}  // namespace

Grid::Grid(std::vector<Axis> order, std::vector<std::int64_t> sizes)
    : order_(std::move(order)), sizes_(std::move(sizes)) {
  PGPT_ASSERT(order_.size() == sizes_.size(), order_.size(), " axes but ", sizes_.size(), " sizes");
  for (std::size_t i = 0; i < order_.size(); ++i) {
    PGPT_ASSERT(sizes_[i] >= 1, "axis ", i, " has size ", sizes_[i]);
    PGPT_ASSERT(std::count(order_.begin(), order_.end(), order_[i]) == 1, "axis ", i, " is named twice");
  }
}

std::int64_t Grid::size(Axis axis) const {
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (order_[i] == axis) return sizes_[i];
  }
  return 1;
}

std::int64_t Grid::world() const {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes_) product *= size;
  return product;
}

std::int64_t Grid::coordinate(std::int64_t rank, Axis axis) const {
  PGPT_ASSERT(rank >= 0 && rank < world(), "rank ", rank, " of ", world());
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (order_[i] == axis) return rank / stride % sizes_[i];
    stride *= sizes_[i];
  }
  return 0;
}

std::vector<int> Grid::group(std::int64_t rank, const std::vector<Axis>& axes) const {
  PGPT_ASSERT(rank >= 0 && rank < world(), "rank ", rank, " of ", world());
  // Fastest axis first means ascending rank: each slower axis adds a stride that is not below the span of the faster
  // ones.
  std::vector<int> members{static_cast<int>(rank)};
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < order_.size(); ++i) {
    if (std::find(axes.begin(), axes.end(), order_[i]) != axes.end()) {
      const std::int64_t own = rank / stride % sizes_[i];
      std::vector<int> extended;
      extended.reserve(members.size() * static_cast<std::size_t>(sizes_[i]));
      for (std::int64_t c = 0; c < sizes_[i]; ++c) {
        for (const int member : members) extended.push_back(static_cast<int>(member + (c - own) * stride));
      }
      members = std::move(extended);
    }
    stride *= sizes_[i];
  }
  return members;
}

std::vector<std::vector<int>> Grid::groups(const std::vector<Axis>& axes) const {
  std::vector<std::vector<int>> all;
  for (std::int64_t rank = 0; rank < world(); ++rank) {
    // The lowest rank of a group is the one whose coordinates along `axes` are all 0; these ranks ascend as the
    // coordinates of the other axes count up.
    std::vector<int> members = group(rank, axes);
    if (members.front() == rank) all.push_back(std::move(members));
  }
  return all;
}

Mesh::Mesh(const Degrees& degrees)
    : degrees_(checked(degrees)), dense_(dense_grid(degrees)), expert_(expert_grid(degrees)) {
  const Degrees& d = degrees_;
  const std::int64_t data = dense_.size(Axis::kData);
  const std::int64_t expert_data = expert_.size(Axis::kData);
  // With one stage the order of data and pipeline is the same grid, but the reference asks for equal sizes even then.
  PGPT_CHECK(ConfigError, !d.pipeline_before_data || data == expert_data,
             "--use-tp-pp-dp-mapping needs equal data parallel ", "sizes in both grids, but it is ", data,
             " for dense weights (world ", d.world, " / (tensor ", d.tensor, " x GTP ", d.gtp, " x context ", d.context,
             " x pipeline ", d.pipeline, ")) and ", expert_data, " for experts (world ", d.world, " / (expert tensor ",
             d.expert_tensor, " x expert ", d.expert, " x expert GTP ", d.expert_gtp, " x pipeline ", d.pipeline,
             ")); drop the option or choose expert sizes with the same product");
  PGPT_CHECK(ConfigError, dense_.groups({Axis::kPipeline}) == expert_.groups({Axis::kPipeline}),
             "the pipeline groups of dense weights (tensor ", d.tensor, " x GTP ", d.gtp, " x context ", d.context,
             " x data ", data, ") and of experts (expert tensor ", d.expert_tensor, " x expert ", d.expert,
             " x expert GTP ", d.expert_gtp, " x data ", expert_data, ") differ at pipeline size ", d.pipeline,
             "; choose sizes with the same product");
}

const std::vector<NamedGroup>& Mesh::named_groups() {
  using enum Axis;
  static const std::vector<NamedGroup> table = {
      {"gtp", false, {kGtp}},
      {"replicate_dp_cp", false, {kContext, kData}},
      {"replicate_dp", false, {kData}},
      {"data", false, {kGtp, kData}},
      {"data_cp", false, {kGtp, kContext, kData}},
      {"context", false, {kContext}},
      {"model", false, {kTensor, kGtp, kPipeline}},
      {"tensor", false, {kTensor}},
      {"pipeline", false, {kPipeline}},
      {"embedding", false, {kPipeline}},
      {"position_embedding", false, {kPipeline}},
      {"tensor_data_cp", false, {kTensor, kGtp, kContext, kData}},
      {"tensor_data", false, {kTensor, kGtp, kData}},
      {"tensor_context", false, {kTensor, kContext}},
      {"expert_gtp", true, {kGtp}},
      {"expert", true, {kExpert}},
      {"expert_tensor", true, {kTensor}},
      {"tensor_expert", true, {kTensor, kExpert}},
      {"tensor_expert_pipeline", true, {kTensor, kExpert, kPipeline}},
      {"expert_model", true, {kTensor, kExpert, kGtp, kPipeline}},
      {"expert_replicate_dp", true, {kData}},
      {"expert_data", true, {kGtp, kData}},
      {"world", false, {kTensor, kGtp, kContext, kData, kPipeline}},
  };
  return table;
}

std::vector<int> Mesh::group(const std::string& name, std::int64_t rank) const {
  const NamedGroup& group = find_group(name);
  return select_members(name, (group.expert_grid ? expert_ : dense_).group(rank, group.axes));
}

std::vector<std::vector<int>> Mesh::groups(const std::string& name) const {
  const NamedGroup& group = find_group(name);
  std::vector<std::vector<int>> all = (group.expert_grid ? expert_ : dense_).groups(group.axes);
  for (std::vector<int>& members : all) members = select_members(name, std::move(members));
  return all;
}

std::int64_t Mesh::data_rank(std::int64_t rank) const {
  return dense_.coordinate(rank, Axis::kGtp) + dense_.size(Axis::kGtp) * dense_.coordinate(rank, Axis::kData);
}

std::string Mesh::describe() const {
  const Degrees& d = degrees_;
  constexpr std::size_t kMaxLine = 100;  // longer lists of groups end in "..."
  std::string out = concat("mesh of ", d.world, " rank(s), fastest axis first (",
                           d.pipeline_before_data ? "tp-pp-dp" : "tp-dp-pp", " order)\n");
  const std::string dense_head = concat("  dense grid:  tensor ", d.tensor, " x gtp ", d.gtp, " x context ", d.context);
  const std::string expert_head =
      concat("  expert grid: tensor ", d.expert_tensor, " x expert ", d.expert, " x gtp ", d.expert_gtp);
  const auto tail = [&](const Grid& grid) {
    const std::string data = concat(" x data ", grid.size(Axis::kData));
    const std::string pipeline = concat(" x pipeline ", d.pipeline);
    return (d.pipeline_before_data ? pipeline + data : data + pipeline) + "\n";
  };
  out += dense_head + tail(dense_) + expert_head + tail(expert_);
  out += concat("  data ranks (read different samples): ", d.gtp * replicate_data(),
                ", replicate data parallel size: ", replicate_data(), "\n");
  out += "  group                    size  count  members\n";
  for (const NamedGroup& named : named_groups()) {
    const std::vector<std::vector<int>> all = groups(named.name);
    std::string line = "  " + pad(named.name, 23) + "  " + pad(std::to_string(all.front().size()), 4) + "  " +
                       pad(std::to_string(all.size()), 5) + " ";
    if (all.front().size() == 1) {
      line += " (single ranks)";
    } else {
      for (const std::vector<int>& members : all) {
        std::string text = " [";
        for (const int member : members) text += concat(text.size() == 2 ? "" : " ", member);
        text += "]";
        if (line.size() + text.size() > kMaxLine) {
          line += " ...";
          break;
        }
        line += text;
      }
    }
    out += line + "\n";
  }
  return out;
}

}  // namespace pgpt::mesh
