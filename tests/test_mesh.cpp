// Rank grids: worked groups, the reference's own groups, and random grids against the generic rule.
#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "pgpt/base/error.h"
#include "pgpt/mesh/mesh.h"
#include "support/catch.h"
#include "support/json.h"
#include "support/text.h"

namespace {

using pgpt::mesh::Axis;
using pgpt::mesh::Degrees;
using pgpt::mesh::Grid;
using pgpt::mesh::Mesh;
using pgpt::test::contains;
using Groups = std::vector<std::vector<int>>;

/// "02;13" -> {{0, 2}, {1, 3}}; "singles" -> one group a rank. All worked cases have fewer than ten ranks.
Groups parse_groups(const std::string& text, std::int64_t world) {
  Groups groups;
  if (text == "singles") {
    for (int rank = 0; rank < world; ++rank) groups.push_back({rank});
    return groups;
  }
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ';');) {
    groups.emplace_back();
    for (const char digit : part) groups.back().push_back(digit - '0');
  }
  return groups;
}

void check_groups(const Mesh& mesh, const std::string& name, const Groups& expected) {
  INFO("group " << name);
  CHECK(mesh.groups(name) == expected);
  for (const auto& members : expected) {
    for (const int rank : members) CHECK(mesh.group(name, rank) == members);
  }
}

/// world, T, P, C, G, E, ETP, EGTP.
Degrees degrees(std::int64_t world, std::int64_t t, std::int64_t p, std::int64_t c, std::int64_t g, std::int64_t e = 1,
                std::int64_t etp = 0, std::int64_t egtp = 1) {
  Degrees d;
  d.world = world, d.tensor = t, d.pipeline = p, d.context = c, d.gtp = g;
  d.expert = e, d.expert_tensor = etp > 0 ? etp : t, d.expert_gtp = egtp;
  return d;
}

std::string error_of(const Degrees& d) {
  return pgpt::test::error_of<pgpt::ConfigError>([&] { Mesh mesh(d); });
}

}  // namespace

TEST_CASE("dense groups equal the worked table", "[cpu][mesh]") {
  struct Row {
    const char* name;
    Degrees degrees;
    std::map<std::string, std::string> groups;
  };
  const std::vector<Row> rows = {
      {"W2 GTP2",
       degrees(2, 1, 1, 1, 2),
       {{"gtp", "01"}, {"replicate_dp", "0;1"}, {"data", "01"}, {"model", "01"}, {"tensor", "singles"}}},
      {"W4 TP2 GTP2",
       degrees(4, 2, 1, 1, 2),
       {{"gtp", "02;13"}, {"replicate_dp", "singles"}, {"data", "02;13"}, {"model", "0123"}, {"tensor", "01;23"}}},
      {"W4 GTP2 DP2",
       degrees(4, 1, 1, 1, 2),
       {{"gtp", "01;23"}, {"replicate_dp", "02;13"}, {"data", "0123"}, {"model", "01;23"}}},
      {"W4 GTP2 CP2",
       degrees(4, 1, 1, 2, 2),
       {{"gtp", "01;23"},
        {"replicate_dp", "singles"},
        {"replicate_dp_cp", "02;13"},
        {"context", "02;13"},
        {"data", "01;23"},
        {"data_cp", "0123"},
        {"model", "01;23"}}},
      {"W4 GTP2 PP2",
       degrees(4, 1, 2, 1, 2),
       {{"gtp", "01;23"}, {"replicate_dp", "singles"}, {"data", "01;23"}, {"model", "0123"}, {"pipeline", "02;13"}}},
      {"W4 GTP4",
       degrees(4, 1, 1, 1, 4),
       {{"gtp", "0123"}, {"replicate_dp", "singles"}, {"data", "0123"}, {"model", "0123"}}},
      {"W8 TP2 GTP2 DP2",
       degrees(8, 2, 1, 1, 2),
       {{"gtp", "02;13;46;57"},
        {"replicate_dp", "04;15;26;37"},
        {"data", "0246;1357"},
        {"model", "0123;4567"},
        {"tensor", "01;23;45;67"}}},
      {"W8 PP2 TP2 GTP2",
       degrees(8, 2, 2, 1, 2),
       {{"gtp", "02;13;46;57"},
        {"replicate_dp", "singles"},
        {"data", "02;13;46;57"},
        {"model", "01234567"},
        {"tensor", "01;23;45;67"},
        {"pipeline", "04;15;26;37"}}},
      {"W8 GTP4 DP2",
       degrees(8, 1, 1, 1, 4),
       {{"gtp", "0123;4567"}, {"replicate_dp", "04;15;26;37"}, {"data", "01234567"}, {"model", "0123;4567"}}},
      {"W8 GTP2 CP2 PP2",
       degrees(8, 1, 2, 2, 2),
       {{"gtp", "01;23;45;67"},
        {"replicate_dp", "singles"},
        {"replicate_dp_cp", "02;13;46;57"},
        {"context", "02;13;46;57"},
        {"data", "01;23;45;67"},
        {"data_cp", "0123;4567"},
        {"model", "0145;2367"},
        {"pipeline", "04;15;26;37"}}},
  };
  for (const Row& row : rows) {
    INFO(row.name);
    const Mesh mesh(row.degrees);
    for (const auto& [name, text] : row.groups) check_groups(mesh, name, parse_groups(text, row.degrees.world));
  }
}

TEST_CASE("expert groups equal the worked table", "[cpu][mesh]") {
  struct Row {
    const char* name;
    Degrees degrees;
    const char *expert, *egtp, *edp, *egtp_edp, *etp_ep_pp, *etp_ep_egtp_pp;
  };
  const char* s = "singles";
  const std::vector<Row> rows = {
      {"W2 GTP2, EP1 EGTP1", degrees(2, 1, 1, 1, 2), s, s, "01", "01", s, s},
      {"W4 TP2 GTP2, EGTP1", degrees(4, 2, 1, 1, 2), s, s, "02;13", "02;13", "01;23", "01;23"},
      {"W4 GTP2 DP2, EGTP1", degrees(4, 1, 1, 1, 2), s, s, "0123", "0123", s, s},
      {"W4 GTP2, EP2 EGTP1", degrees(4, 1, 1, 1, 2, 2), "01;23", s, "02;13", "02;13", "01;23", "01;23"},
      {"W4 GTP2, EP2 EGTP2", degrees(4, 1, 1, 1, 2, 2, 1, 2), "01;23", "02;13", s, "02;13", "01;23", "0123"},
      {"W8 GTP2, EP2 EGTP2", degrees(8, 1, 1, 1, 2, 2, 1, 2), "01;23;45;67", "02;13;46;57", "04;15;26;37", "0246;1357",
       "01;23;45;67", "0123;4567"},
      {"W8 TP2 GTP2, ETP1 EP2 EGTP2", degrees(8, 2, 1, 1, 2, 2, 1, 2), "01;23;45;67", "02;13;46;57", "04;15;26;37",
       "0246;1357", "01;23;45;67", "0123;4567"},
      {"W8 TP2 GTP2, ETP2 EP2 EGTP2", degrees(8, 2, 1, 1, 2, 2, 2, 2), "02;13;46;57", "04;15;26;37", s, "04;15;26;37",
       "0123;4567", "01234567"},
      {"W8 TP2 GTP2, ETP2 EP2 EGTP1", degrees(8, 2, 1, 1, 2, 2, 2, 1), "02;13;46;57", s, "04;15;26;37", "04;15;26;37",
       "0123;4567", "0123;4567"},
      {"W8 GTP2, EP4 EGTP2", degrees(8, 1, 1, 1, 2, 4, 1, 2), "0123;4567", "04;15;26;37", s, "04;15;26;37", "0123;4567",
       "01234567"},
      {"W8 PP2 TP2 GTP2, EGTP1", degrees(8, 2, 2, 1, 2), s, s, "02;13;46;57", "02;13;46;57", "0145;2367", "0145;2367"},
      {"W8 GTP2 CP2 PP2, EGTP1", degrees(8, 1, 2, 2, 2), s, s, "0123;4567", "0123;4567", "04;15;26;37", "04;15;26;37"},
  };
  for (const Row& row : rows) {
    INFO(row.name);
    const Mesh mesh(row.degrees);
    const std::int64_t world = row.degrees.world;
    check_groups(mesh, "expert", parse_groups(row.expert, world));
    check_groups(mesh, "expert_gtp", parse_groups(row.egtp, world));
    check_groups(mesh, "expert_replicate_dp", parse_groups(row.edp, world));
    check_groups(mesh, "expert_data", parse_groups(row.egtp_edp, world));
    check_groups(mesh, "tensor_expert_pipeline", parse_groups(row.etp_ep_pp, world));
    check_groups(mesh, "expert_model", parse_groups(row.etp_ep_egtp_pp, world));
  }
}

TEST_CASE("groups and data ranks equal the reference's", "[cpu][mesh]") {
  const auto golden = pgpt::test::read_json(std::string(PGPT_TEST_DATA) + "/ranks.json");
  std::size_t cases = 0;
  for (const auto& layout : golden.at("rank_layouts")) {
    INFO(layout.dump());
    const std::int64_t t = layout.at("tp"), g = layout.at("gtp_remat"), c = layout.at("cp"), p = layout.at("pp");
    // An expert grid of the same product makes the layout with pipeline before data valid too.
    Degrees d = degrees(layout.at("world"), t, p, c, g, c, t, g);
    d.pipeline_before_data = layout.at("order") == "tp-cp-ep-pp-dp";
    const Mesh mesh(d);
    CHECK(mesh.replicate_data() == layout.at("dp_replicate").get<std::int64_t>());
    const std::map<std::string, std::string> names = {
        {"data", "data_groups"},        {"replicate_dp", "replicate_dp_groups"},
        {"gtp", "gtp_groups"},          {"context", "cp_groups"},
        {"tensor", "tp_groups"},        {"pipeline", "pp_groups"},
        {"data_cp", "dp_cp_gtp_groups"}};
    for (const auto& [name, key] : names) check_groups(mesh, name, layout.at(key).get<Groups>());
    for (std::int64_t rank = 0; rank < d.world; ++rank) {
      CHECK(mesh.data_rank(rank) == layout.at("sampler_rank_by_world_rank").at(rank).get<std::int64_t>());
      CHECK(static_cast<std::int64_t>(mesh.group("data", rank).size()) ==
            layout.at("sampler_size").get<std::int64_t>());
    }
    ++cases;
  }
  CHECK(cases == 7);
}

TEST_CASE("the group of all ranks, embedding groups and creation order are the reference's", "[cpu][mesh]") {
  std::vector<std::string> names;
  for (const auto& group : Mesh::named_groups()) names.push_back(group.name);
  CHECK(names == std::vector<std::string>{"gtp",
                                          "replicate_dp_cp",
                                          "replicate_dp",
                                          "data",
                                          "data_cp",
                                          "context",
                                          "model",
                                          "tensor",
                                          "pipeline",
                                          "embedding",
                                          "position_embedding",
                                          "tensor_data_cp",
                                          "tensor_data",
                                          "tensor_context",
                                          "expert_gtp",
                                          "expert",
                                          "expert_tensor",
                                          "tensor_expert",
                                          "tensor_expert_pipeline",
                                          "expert_model",
                                          "expert_replicate_dp",
                                          "expert_data",
                                          "world"});
  const Mesh mesh(degrees(8, 1, 4, 1, 2));
  CHECK(mesh.groups("pipeline") == Groups{{0, 2, 4, 6}, {1, 3, 5, 7}});
  CHECK(mesh.groups("embedding") == Groups{{0, 6}, {1, 7}});
  CHECK(mesh.group("embedding", 2) == std::vector<int>{0, 6});
  CHECK(mesh.groups("position_embedding") == Groups{{0}, {1}});
  CHECK(mesh.groups("world") == Groups{{0, 1, 2, 3, 4, 5, 6, 7}});
  CHECK(Mesh(degrees(2, 1, 1, 1, 2)).groups("embedding") == Groups{{0}, {1}});
  CHECK_THROWS_AS(mesh.group("no such group", 0), std::logic_error);
  CHECK_THROWS_AS(mesh.group("gtp", 8), std::logic_error);
}

namespace {

/// The generic rule, written the other way round from the library: nested counters over coordinates, no rank
/// arithmetic.
Groups enumerate_groups(const std::vector<std::int64_t>& sizes, const std::vector<bool>& inside) {
  const std::size_t n = sizes.size();
  const auto advance = [&](std::vector<std::int64_t>& at, bool which) {
    for (std::size_t i = 0; i < n; ++i) {
      if (inside[i] != which) continue;
      if (++at[i] < sizes[i]) return true;
      at[i] = 0;
    }
    return false;
  };
  const auto rank_of = [&](const std::vector<std::int64_t>& at) {
    std::int64_t rank = 0;
    for (std::size_t i = n; i-- > 0;) rank = rank * sizes[i] + at[i];
    return static_cast<int>(rank);
  };
  Groups groups;
  std::vector<std::int64_t> at(n, 0);
  do {
    groups.emplace_back();
    do groups.back().push_back(rank_of(at));
    while (advance(at, true));
  } while (advance(at, false));
  return groups;
}

}  // namespace

TEST_CASE("random grids follow the generic rule in both rank orders", "[cpu][mesh]") {
  std::mt19937 random(20240607);
  const auto draw = [&](std::initializer_list<std::int64_t> choices) {
    return *(choices.begin() + static_cast<std::ptrdiff_t>(random() % choices.size()));
  };
  int pipeline_first = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t t = draw({1, 2, 3, 4}), g = draw({1, 2, 3, 4}), c = draw({1, 2, 3}), p = draw({1, 2, 3}),
                       data = draw({1, 2, 3, 5});
    Degrees d = degrees(t * g * c * p * data, t, p, c, g);
    d.pipeline_before_data = trial % 2 == 1;
    if (d.pipeline_before_data) {
      // Equal products keep both data sizes equal; the factors are permuted.
      d.expert_tensor = g, d.expert = t, d.expert_gtp = c;
      ++pipeline_first;
    } else {
      // Any divisors of the ranks of one stage.
      std::int64_t rest = t * g * c * data;
      const auto take = [&](std::int64_t factor) {
        if (rest % factor != 0) return std::int64_t{1};
        rest /= factor;
        return factor;
      };
      d.expert_tensor = take(draw({1, 2, 3, 4}));
      d.expert = take(draw({1, 2, 3, 4, 5}));
      d.expert_gtp = take(draw({1, 2, 3, 4}));
    }
    INFO("world " << d.world << " tp " << t << " gtp " << g << " cp " << c << " pp " << p << " etp " << d.expert_tensor
                  << " ep " << d.expert << " egtp " << d.expert_gtp << " pp-before-dp " << d.pipeline_before_data);
    const Mesh mesh(d);
    const std::int64_t edp = d.world / (d.expert_tensor * d.expert * d.expert_gtp * p);
    using enum Axis;
    const std::vector<Axis> dense_order = d.pipeline_before_data
                                              ? std::vector<Axis>{kTensor, kGtp, kContext, kPipeline, kData}
                                              : std::vector<Axis>{kTensor, kGtp, kContext, kData, kPipeline};
    const std::vector<Axis> expert_order = d.pipeline_before_data
                                               ? std::vector<Axis>{kTensor, kExpert, kGtp, kPipeline, kData}
                                               : std::vector<Axis>{kTensor, kExpert, kGtp, kData, kPipeline};
    const std::map<Axis, std::int64_t> dense_size = {
        {kTensor, t}, {kGtp, g}, {kContext, c}, {kData, data}, {kPipeline, p}};
    const std::map<Axis, std::int64_t> expert_size = {
        {kTensor, d.expert_tensor}, {kExpert, d.expert}, {kGtp, d.expert_gtp}, {kData, edp}, {kPipeline, p}};
    for (const auto& named : Mesh::named_groups()) {
      if (named.name == "embedding" || named.name == "position_embedding") continue;
      const auto& order = named.expert_grid ? expert_order : dense_order;
      const auto& size = named.expert_grid ? expert_size : dense_size;
      std::vector<std::int64_t> sizes;
      std::vector<bool> inside;
      for (const Axis axis : order) {
        sizes.push_back(size.at(axis));
        inside.push_back(std::find(named.axes.begin(), named.axes.end(), axis) != named.axes.end());
      }
      INFO("group " << named.name);
      const Groups expected = enumerate_groups(sizes, inside);
      REQUIRE(mesh.groups(named.name) == expected);
      for (const auto& members : expected) REQUIRE(mesh.group(named.name, members.back()) == members);
    }
    // Every rank is (gtp, data, ...) of exactly one place: data ranks are 0..G*D-1, each read by T*C*P ranks.
    std::map<std::int64_t, std::int64_t> readers;
    for (std::int64_t rank = 0; rank < d.world; ++rank) ++readers[mesh.data_rank(rank)];
    REQUIRE(static_cast<std::int64_t>(readers.size()) == g * data);
    for (const auto& [index, count] : readers) {
      REQUIRE((index >= 0 && index < g * data));
      REQUIRE(count == t * c * p);
    }
  }
  CHECK(pipeline_first == 100);
}

TEST_CASE("a mesh that cannot exist is refused with all its factors", "[cpu][mesh]") {
  const std::string dense = error_of(degrees(6, 2, 1, 1, 2));
  CHECK(contains(dense, "world size 6"));
  CHECK(contains(dense, "tensor parallel 2 x GTP 2 x context parallel 1 x pipeline parallel 1 = 4"));
  const std::string expert = error_of(degrees(4, 1, 1, 1, 2, 3));
  CHECK(expert.find("expert tensor parallel 1 x expert parallel 3 x expert GTP 1 x pipeline parallel 1 = 3") !=
        std::string::npos);
  Degrees order = degrees(8, 1, 2, 1, 2);
  CHECK(error_of(order).empty());
  order.pipeline_before_data = true;
  CHECK(contains(error_of(order), "--use-tp-pp-dp-mapping"));
  CHECK(contains(error_of(order), "it is 2 for dense weights"));
  order.expert_gtp = 2;
  CHECK(error_of(order).empty());
  CHECK(contains(error_of(degrees(2, 0, 1, 1, 1, 1, 1)), "--tensor-model-parallel-size"));
  CHECK(contains(error_of(degrees(0, 1, 1, 1, 1)), "world size is 0"));
}

TEST_CASE("the description lists degrees and groups", "[cpu][mesh]") {
  const std::string text = Mesh(degrees(4, 1, 1, 1, 2)).describe();
  CHECK(contains(text, "dense grid:  tensor 1 x gtp 2 x context 1 x data 2 x pipeline 1"));
  CHECK(contains(text, "data ranks (read different samples): 4, replicate data parallel size: 2"));
  CHECK(contains(text, "gtp                      2     2      [0 1] [2 3]\n"));
  CHECK(contains(text, "context                  1     4      (single ranks)\n"));
  // Lists that do not fit a line are cut, and say so.
  CHECK(contains(Mesh(degrees(512, 1, 1, 1, 2)).describe(), " ...\n"));
}
