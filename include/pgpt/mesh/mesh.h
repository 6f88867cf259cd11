#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pgpt::mesh {

/// Mesh axes. Dense grid: tensor, gtp, context, data, pipeline; expert grid: tensor (= ETP), expert, gtp (= EGTP),
/// data (= EDP), pipeline.
enum class Axis { kTensor, kGtp, kContext, kExpert, kData, kPipeline };

/// Degrees of a job. Data degrees are derived from the world size.
struct Degrees {
  std::int64_t world = 1, tensor = 1, pipeline = 1, context = 1, gtp = 1;
  std::int64_t expert = 1, expert_tensor = 1, expert_gtp = 1;
  bool pipeline_before_data = false;  ///< --use-tp-pp-dp-mapping
};

/// A rank grid: axes from fastest to slowest with their sizes.
class Grid {
 public:
  /// Throws std::logic_error unless every axis is named once and has a positive size.
  Grid(std::vector<Axis> order, std::vector<std::int64_t> sizes);
  [[nodiscard]] std::int64_t size(Axis axis) const;  ///< 1 when the grid lacks the axis
  /// Product of all sizes.
  [[nodiscard]] std::int64_t world() const;
  /// Coordinate of a rank along an axis; 0 when the grid lacks the axis. Throws std::logic_error for a rank outside.
  [[nodiscard]] std::int64_t coordinate(std::int64_t rank, Axis axis) const;
  /// Members of rank's group over `axes`, ordered with the grid's fastest axis first (spec/gtp.md 3).
  [[nodiscard]] std::vector<int> group(std::int64_t rank, const std::vector<Axis>& axes) const;
  /// All groups over `axes`, in the order in which the coordinates of the other axes count up.
  [[nodiscard]] std::vector<std::vector<int>> groups(const std::vector<Axis>& axes) const;

 private:
  std::vector<Axis> order_;
  std::vector<std::int64_t> sizes_;
};

/// One kind of collective group. `Mesh::named_groups()` lists them in the reference's creation order (spec/gtp.md 3):
///
/// dense grid                                        | expert grid
/// --------------------------------------------------|------------------------------------------------
/// gtp                GTP peers                      | expert_gtp                EGTP
/// replicate_dp_cp    data x context, without GTP    | expert                    expert
/// replicate_dp       data, without GTP              | expert_tensor             ETP
/// data               gtp x data                     | tensor_expert             ETP x expert
/// data_cp            gtp x context x data           | tensor_expert_pipeline    ETP x expert x pipeline
/// context            context                        | expert_model              ETP x expert x EGTP x pipeline
/// model              tensor x gtp x pipeline        | expert_replicate_dp       expert data, without EGTP
/// tensor, pipeline   one axis                       | expert_data               EGTP x expert data
/// embedding          first and last pipeline stage  |
/// position_embedding first pipeline stage           |
/// tensor_data_cp     tensor x gtp x context x data  |
/// tensor_data        tensor x gtp x data            |
/// tensor_context     tensor x context               | world (last): all ranks
///
/// A name that starts with `replicate` or `expert_replicate` leaves the weight-shard axis out: its ranks hold equal
/// weights.
struct NamedGroup {
  std::string name;
  bool expert_grid = false;
  std::vector<Axis> axes;  ///< for the two embedding groups the pipeline axis, of which they take some members
};

/// Dense and expert grid of one job.
class Mesh {
 public:
  /// Throws ConfigError with all factors when a product does not divide the world size, when the pipeline groups of
  /// both grids differ, or when the order is not pipeline-last and the data sizes of both grids differ.
  explicit Mesh(const Degrees& degrees);
  /// The degrees it was built from.
  [[nodiscard]] const Degrees& degrees() const { return degrees_; }
  [[nodiscard]] const Grid& dense() const { return dense_; }
  [[nodiscard]] const Grid& expert() const { return expert_; }
  /// Data parallel size without GTP.
  [[nodiscard]] std::int64_t replicate_data() const { return dense_.size(Axis::kData); }
  /// Every collective group in creation order.
  [[nodiscard]] static const std::vector<NamedGroup>& named_groups();
  /// Members of `rank`'s group of that name. Middle pipeline stages are not among the members of their embedding
  /// groups. Throws std::logic_error for an unknown name.
  [[nodiscard]] std::vector<int> group(const std::string& name, std::int64_t rank) const;
  /// All groups of that name, in creation order. Throws std::logic_error for an unknown name.
  [[nodiscard]] std::vector<std::vector<int>> groups(const std::string& name) const;
  /// Index of the rank among those that read different samples: gtp + GTP * data.
  [[nodiscard]] std::int64_t data_rank(std::int64_t rank) const;
  /// A table of degrees and groups for people, as --dry-run prints it.
  [[nodiscard]] std::string describe() const;

 private:
  Degrees degrees_;
  Grid dense_;
  Grid expert_;
};

}  // namespace pgpt::mesh
