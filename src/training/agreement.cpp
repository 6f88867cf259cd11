#include "pgpt/training/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "pgpt/base/error.h"
#include "pgpt/config/option_table.h"
#include "pgpt/training/library_errors.h"

namespace pgpt::training {

void together(comm::Communicator& all, at::Device device, const std::function<void()>& work) {
  std::optional<std::string> failure;
  auto code = ExitCode::kDone;
  try {
    work();
  } catch (const std::exception& error) {
    const Error translated = translate(error);  // it may come from the file system, libtorch or the allocator
    failure = translated.what();
    code = translated.code();
  }
  // Lowest failing rank and its exit code in one number, so that every rank ends alike.
  constexpr std::int64_t kCodes = 16;
  const std::int64_t none = all.size() * kCodes;
  at::Tensor first = at::full({1}, failure ? all.rank() * kCodes + static_cast<std::int64_t>(code) : none,
                              at::TensorOptions(device).dtype(at::kLong));
  all.all_reduce(first, comm::ReduceOp::kMin).wait();
  const auto found = first.item<std::int64_t>();
  if (found == none) return;
  const std::int64_t rank = found / kCodes;
  throw AgreedError(static_cast<ExitCode>(found % kCodes), failure.value_or(concat("rank ", rank, " failed")),
                    rank == all.rank());
}

std::vector<std::int64_t> agree_max(comm::Communicator& all, at::Device device,
                                    const std::vector<std::int64_t>& values) {
  if (all.size() == 1) return values;
  const auto count = static_cast<std::int64_t>(values.size());
  at::Tensor tensor = at::empty({count}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.data_ptr<std::int64_t>());
  tensor = tensor.to(device);
  all.all_reduce(tensor, comm::ReduceOp::kMax).wait();
  const at::Tensor host = tensor.to(at::kCPU);
  const auto* data = host.data_ptr<std::int64_t>();
  return {data, data + count};
}

std::vector<std::string> gather_texts(comm::Communicator& all, at::Device device, const std::string& text) {
  const std::int64_t width = agree_max(all, device, {static_cast<std::int64_t>(text.size())})[0] +
                             static_cast<std::int64_t>(sizeof(std::int64_t));
  at::Tensor mine = at::zeros({width}, at::kByte);
  const auto length = static_cast<std::int64_t>(text.size());
  std::memcpy(mine.data_ptr(), &length, sizeof length);
  std::memcpy(static_cast<char*>(mine.data_ptr()) + sizeof length, text.data(), text.size());
  at::Tensor everyone = at::empty({all.size() * width}, at::TensorOptions(device).dtype(at::kByte));
  all.all_gather(everyone, mine.to(device)).wait();
  const at::Tensor host = everyone.to(at::kCPU);
  std::vector<std::string> texts;
  for (std::int64_t rank = 0; rank < all.size(); ++rank) {
    const char* row = static_cast<const char*>(host.data_ptr()) + rank * width;
    std::int64_t size = 0;
    std::memcpy(&size, row, sizeof size);
    texts.emplace_back(row + sizeof size, static_cast<std::size_t>(size));
  }
  return texts;
}

void check_same_options(const config::Config& config, comm::World& world) {
  nlohmann::json mine = nlohmann::json::object();
  for (const auto& [name, value] : config.arguments) {
    const config::Option* option = config::find_destination(name);
    if (name != "local_rank" && (option == nullptr || !option->place)) mine[name] = value;
  }
  const nlohmann::json first = nlohmann::json::parse(world.share("options", mine.dump()));
  if (first == mine) return;
  // All of them, since one option changes others that were not given.
  std::string differences;
  for (const auto& [name, value] : mine.items()) {
    const std::string theirs = first.value(name, std::string("unknown"));
    if (value == theirs) continue;
    const config::Option* option = config::find_destination(name);
    differences += concat(differences.empty() ? "" : ", ", option == nullptr ? name : option->names.front(), " is ",
                          value.get<std::string>(), " and not ", theirs);
  }
  throw ConfigError(concat("rank ", world.rank(), " was started with other options than rank 0: ",
                           differences.empty() ? "it knows fewer" : differences,
                           "; give all ranks the same program and options"));
}

}  // namespace pgpt::training
