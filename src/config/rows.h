#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pgpt/config/option_table.h"

namespace pgpt::config::rows {

/// Builds one Option; every call returns the row again, so that a row reads as one sentence.
class Row {
 public:
  Row(OptionType type, std::string_view name, std::optional<std::string> default_text, std::string_view help);

  Row&& alias(std::string_view name) &&;
  Row&& to(std::string_view destination) &&;
  Row&& list() &&;        ///< one or more values
  Row&& any_number() &&;  ///< zero or more values
  Row&& exactly(std::size_t count) &&;
  Row&& default_none() &&;  ///< a switch whose default is None instead of a truth value
  Row&& starts_true() &&;   ///< an on switch whose destination is true by default (the other half of a pair)
  Row&& no_effect(std::string_view why) &&;
  Row&& refused(std::string_view what_to_do) &&;
  Row&& refuse(std::string_view choices, std::string_view what_to_do) &&;  ///< choices separated by '|'
  Row&& choice_no_effect(std::string_view choices, std::string_view why) &&;
  Row&& model_size() &&;  ///< belongs to the architecture; from a checkpoint where it is unset
  Row&& model_kind() &&;  ///< belongs to the architecture; from a checkpoint always
  Row&& imported() &&;
  Row&& taken(Taken when) &&;
  Row&& own() &&;
  Row&& action() &&;
  Row&& hidden() &&;
  operator Option() const { return option_; }

 private:
  Row&& mark(std::string_view choices, Status status, std::string_view note);
  friend Row choice(std::string_view, std::optional<std::string>, std::string_view, std::string_view);
  friend Row off(std::string_view, std::string_view);
  friend Row place(std::string_view, std::string_view);
  Option option_;
};

inline const std::optional<std::string> kNone = std::nullopt;

Row on(std::string_view name, std::string_view help);
/// A switch that stores false; the destination is the name without "--no-" or "--disable-".
Row off(std::string_view name, std::string_view help);
/// The same for switches generated from configuration classes: --no-x is also spelled --disable-x.
Row off_pair(std::string_view name, std::string_view help);
Row integer(std::string_view name, std::optional<std::string> default_text, std::string_view help);
Row real(std::string_view name, std::optional<std::string> default_text, std::string_view help);
Row text(std::string_view name, std::optional<std::string> default_text, std::string_view help);
/// A file or folder, which may be another one on every rank.
Row place(std::string_view name, std::string_view help);
Row pattern(std::string_view name, std::optional<std::string> default_text, std::string_view help);
/// `choices` are separated by '|'.
Row choice(std::string_view name, std::optional<std::string> default_text, std::string_view choices,
           std::string_view help);

using Rows = std::vector<Option>;
Rows model_rows();
Rows regularisation_rows();
Rows optimizer_rows();
Rows training_rows();
Rows precision_rows();
Rows distributed_rows();
Rows moe_rows();
Rows data_rows();
Rows validation_rows();
Rows checkpoint_rows();
Rows logging_rows();
Rows own_rows();

/// Splits at a character; "a||b" gives an empty middle part.
std::vector<std::string> split(std::string_view text, char separator);

}  // namespace pgpt::config::rows
