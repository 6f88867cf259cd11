// gpt_tool import: a checkpoint from another program's weights.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

#include "conversion.h"
#include "pgpt/checkpoint/architecture.h"
#include "pgpt/checkpoint/hugging_face.h"
#include "pgpt/checkpoint/manifest.h"
#include "pgpt/checkpoint/safetensors.h"
#include "pgpt/config/parse.h"
#include "pgpt/training/tool_commands.h"
#include "tool_arguments.h"

namespace pgpt::training {
namespace {

namespace fs = std::filesystem;

ImportedModel open_hugging_face(const fs::path& folder, std::int64_t divisor, config::TransformerImpl implementation) {
  checkpoint::HfConfig source = checkpoint::read_hf_config(folder);
  config::ModelConfig& model = source.model;
  PGPT_CHECK(DataError, !source.sliding_window || *source.sliding_window >= model.max_position_embeddings,
             folder.string(), "/config.json has sliding_window ", source.sliding_window.value_or(0),
             ", shorter than its max_position_embeddings ", model.max_position_embeddings,
             "; attention here always sees the whole sequence, so train it with pretrain_gpt --load-hf and a "
             "--seq-length up to ",
             source.sliding_window.value_or(0));
  model.transformer_impl = implementation;
  model.padded_vocab_size = config::padded_vocab_size(model.vocab_size, divisor, 1);
  const auto weights = std::make_shared<checkpoint::HfWeights>(folder);
  const std::vector<checkpoint::HfLink> links = checkpoint::hf_links(source.family, model, model.vocab_size);
  weights->check(links, source.family, model);
  ImportedModel result{model, weights->dtype(), {}};
  for (const checkpoint::HfLink& link : links) {
    result.tensors.push_back(
        {link.native, link.native_shape, [weights, link, model] { return weights->read_native(link, model); }});
  }
  return result;
}

/// What scripts/convert_megatron_checkpoint.py leaves: state.json, a manifest without tensors, and safetensors files of
/// whole tensors.
ExitCode import_state(const fs::path& folder, const fs::path& output) {
  const checkpoint::Manifest manifest =
      checkpoint::parse_manifest(read_text(folder / "state.json"), (folder / "state.json").string());
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") paths.push_back(it->path());
  }
  PGPT_CHECK(DataError, !error && !paths.empty(), "import: ", folder.string(), " holds no safetensors files");
  std::sort(paths.begin(), paths.end());
  std::vector<ImportedTensor> tensors;
  for (const fs::path& path : paths) {
    const auto file = std::make_shared<checkpoint::SafetensorsFile>(path.string());
    for (const auto& [name, entry] : file->entries()) {
      tensors.push_back({name, entry.shape, [file, name = name] { return file->read(name); }});
    }
  }
  write_imported(output, manifest, tensors, ImportKind::kIteration);
  std::printf("imported %s to %s: iteration %lld, %zu tensors\n", folder.c_str(), output.c_str(),
              static_cast<long long>(manifest.state.iteration), tensors.size());
  return ExitCode::kDone;
}

}  // namespace

ExitCode tool_import(const std::vector<std::string>& words) {
  const ToolArguments arguments(
      "import", words, {},
      {"--format", "--input", "--output", "--make-vocab-size-divisible-by", "--dtype", "--transformer-impl"}, 0);
  arguments.require({"--format", "--input", "--output"});
  const std::string format = *arguments.text("--format");
  const fs::path input = *arguments.text("--input");
  PGPT_CHECK(ConfigError, format == "hf" || format == "llmc" || format == "state", "import: --format ", format,
             " is unknown; use hf or llmc (for Megatron-LM see scripts/convert_megatron_checkpoint.py)");
  std::error_code error;
  const bool exists = fs::exists(input, error);
  PGPT_CHECK(DataError, exists || error, "import: --input ", input.string(), " does not exist; give ",
             format == "llmc" ? "the .bin file of an llm.c model" : "the folder that holds the model");
  if (format == "state") return import_state(input, *arguments.text("--output"));
  const std::string implementation = arguments.text("--transformer-impl").value_or("transformer_engine");
  PGPT_CHECK(ConfigError, implementation == "transformer_engine" || implementation == "local",
             "import: --transformer-impl ", implementation, " is unknown; use transformer_engine or local");
  const auto impl =
      implementation == "local" ? config::TransformerImpl::kLocal : config::TransformerImpl::kTransformerEngine;
  const std::int64_t divisor = arguments.integer("--make-vocab-size-divisible-by").value_or(128);
  PGPT_CHECK(ConfigError, divisor > 0, "import: --make-vocab-size-divisible-by is 0; it must be above 0");
  ImportedModel source = format == "hf" ? open_hugging_face(input, divisor, impl) : open_llmc(input, divisor, impl);
  const at::ScalarType dtype =
      arguments.has("--dtype") ? weight_type("import", *arguments.text("--dtype")) : source.dtype;
  for (ImportedTensor& tensor : source.tensors) {
    tensor.read = [read = tensor.read, name = tensor.name, dtype] {
      at::Tensor values = read().to(dtype);
      PGPT_CHECK(DataError, dtype != at::kHalf || values.isfinite().all().item<bool>(), "import: tensor ", name,
                 " does not fit into float16; use --dtype bfloat16 or float32");
      return values;
    };
  }
  checkpoint::Manifest manifest;
  manifest.arguments = checkpoint::arguments_of_model(source.model);
  write_imported(*arguments.text("--output"), manifest, source.tensors, ImportKind::kRelease);
  std::printf("imported %s to %s/release: %zu tensors of type %s, vocabulary %lld in %lld rows\n", input.c_str(),
              arguments.text("--output")->c_str(), source.tensors.size(), checkpoint::dtype_name(dtype).c_str(),
              static_cast<long long>(source.model.vocab_size), static_cast<long long>(source.model.padded_vocab_size));
  std::printf("train it with:");
  for (const std::string& word : checkpoint::architecture_flags(source.model)) std::printf(" %s", word.c_str());
  if (divisor != 128) std::printf(" --make-vocab-size-divisible-by %lld", static_cast<long long>(divisor));
  if (impl == config::TransformerImpl::kLocal) std::printf(" --transformer-impl local");
  std::printf("%s --load %s\n",
              dtype == at::kBFloat16 ? " --bf16"
              : dtype == at::kHalf   ? " --fp16"
                                     : "",
              arguments.text("--output")->c_str());
  return ExitCode::kDone;
}

}  // namespace pgpt::training
