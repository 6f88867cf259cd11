#pragma once

// Which cuBLASLt algorithm computes which matrix product, and the file that keeps the choices of one run for the next
// ones, so that they have the same bits. Neither torch nor CUDA here; the products themselves are in
// src/kernels/gemm.cpp.

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace pgpt::kernels {

enum class GemmType { kBFloat16, kFloat16, kFloat32 };

/// One kind of product: D [rows, columns] = alpha * op(A) [rows, inner] * op(B) [inner, columns] (+ bias) (+ D), all
/// contiguous and row-major.
struct GemmShape {
  std::int64_t rows = 0, columns = 0, inner = 0;
  bool transpose_a = false;  ///< A is stored as [inner, rows]
  bool transpose_b = false;  ///< B is stored as [columns, inner]
  GemmType input = GemmType::kBFloat16;
  GemmType output = GemmType::kBFloat16;
  bool bias = false;             ///< bias [columns] in the output type is added before the rounding
  bool accumulate = false;       ///< D is added to what it holds
  std::int64_t alignment = 128;  ///< all addresses are multiples of these bytes: 16 or 128
  auto operator<=>(const GemmShape&) const = default;
};

/// "[4096,6144] = [4096,2048] * [6144,2048]^T, bf16 to bf16", for messages.
[[nodiscard]] std::string describe(const GemmShape& shape);

/// A choice of cuBLASLt. The attributes are what its documentation names; `words` are the library's own complete form,
/// which only the same version reads.
struct GemmAlgorithm {
  std::array<std::uint64_t, 8> words{};
  std::int64_t id = 0, tile = 0, stages = 0, split_k = 0, reduction_scheme = 0, swizzle = 0, custom_option = 0,
               inner_shape = 0, cluster_shape = 0;
  std::int64_t workspace = 0;         ///< bytes it needs
  double microseconds = 0;            ///< measured when it was chosen; 0 when nothing was measured
  double heuristic_microseconds = 0;  ///< of the library's first suggestion in the same measurement
  bool operator==(const GemmAlgorithm&) const = default;
};

/// What choices depend on: they are valid for this device name and library version only.
struct GemmLibrary {
  std::string device;
  std::int64_t version = 0;
  bool operator==(const GemmLibrary&) const = default;
};

/// The choices of one run. Without `tune` nothing is ever timed: a new shape takes the library's first suggestion.
///
/// Used by one thread. Pointers that `find` returns stay valid.
class GemmAlgorithms {
 public:
  /// Sends one text to all ranks and returns rank 0's.
  using Agree = std::function<std::string(const std::string&)>;

  /// From now on a new shape is timed when it is first used, each algorithm for `sample_ms` at a stretch: on the rank
  /// with `chooser`, whose choice `agree` (empty with one rank) brings to all. Every rank must meet new shapes in the
  /// same order.
  void tune(bool chooser, Agree agree, double sample_ms = 0.2);
  [[nodiscard]] bool tunes() const noexcept { return tunes_; }
  [[nodiscard]] bool chooser() const noexcept { return chooser_; }
  [[nodiscard]] double sample_ms() const noexcept { return sample_ms_; }

  [[nodiscard]] const GemmAlgorithm* find(const GemmShape& shape) const;
  /// Stores a choice; `keep` puts it into the file as well.
  const GemmAlgorithm& add(const GemmShape& shape, const GemmAlgorithm& algorithm, bool keep);
  /// Stores the choice that all ranks agree on and that goes into the file: this rank's when it is the chooser.
  const GemmAlgorithm& add_agreed(const GemmShape& shape, const GemmAlgorithm& mine);

  /// The choices that the file keeps, in its order.
  [[nodiscard]] std::map<GemmShape, GemmAlgorithm> kept() const;
  /// All shapes met so far.
  [[nodiscard]] std::size_t size() const noexcept { return choices_.size(); }
  /// True when a kept choice was added since `read` or the last `clear_grown`.
  [[nodiscard]] bool grown() const noexcept { return grown_; }
  void clear_grown() noexcept { grown_ = false; }

  /// Text of the file.
  [[nodiscard]] std::string to_json(const GemmLibrary& library) const;
  /// Adds the choices of a file's text. Throws DataError naming `file` when it is damaged or belongs to another device
  /// or library version.
  void read(const std::string& text, const std::string& file, const GemmLibrary& library);

 private:
  struct Choice {
    GemmAlgorithm algorithm;
    bool kept = false;
  };
  std::map<GemmShape, Choice> choices_;
  bool tunes_ = false;
  bool chooser_ = true;
  bool grown_ = false;
  double sample_ms_ = 0;
  Agree agree_;
};

/// Name and cuBLASLt version of the current CUDA device; nothing in a build without CUDA.
[[nodiscard]] std::optional<GemmLibrary> gemm_library();
/// Throws DataError naming `file` and the shape when the current device does not take one of the kept choices.
void check_gemm_algorithms(const GemmAlgorithms& algorithms, const std::string& file);

}  // namespace pgpt::kernels
