"""Models go to the transformers library and come back; its own logits are the judge.

Needs the `transformers` package; without it these tests are skipped (scripts/setup.sh --with-tests installs it).
"""

import json
import pathlib
import shutil
import struct
import tempfile
import unittest

from conversion_support import TRAINING, step_losses, tool, train

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.utils.logging.disable_progress_bar()
except ImportError:
    transformers = None

# Both sides compute in fp32 (unit roundoff 6e-8) through some twenty matrix products of at most 176 terms, summed in
# other orders; 1e-5 is the bound that the project promises.
LOGITS_BOUND = 1e-5
VOCABULARY = 100  # padded to 128 here
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 "
    f"--vocab-size {VOCABULARY}"
)
LLAMA = SIZES + " --ffn-hidden-size 176 --swiglu --normalization RMSNorm --position-embedding-type rope "
NO_BIAS = "--disable-bias-linear "
GROUPED = "--group-query-attention --num-query-groups 2 "
UNTIED = "--untie-embeddings-and-output-weights "

# name: (flags here, model type there, arguments of export)
EXPORTED = {
    "llama": (LLAMA + NO_BIAS + GROUPED + UNTIED, "llama", ""),
    "llama, tied, scaled rotary frequencies": (
        LLAMA + NO_BIAS + "--use-rope-scaling --rotary-base 500000",
        "llama",
        "",
    ),
    "llama, interpolated positions, other epsilon": (
        LLAMA + NO_BIAS + "--rotary-seq-len-interpolation-factor 4 --norm-epsilon 1e-6",
        "llama",
        "",
    ),
    "llama with all biases": (LLAMA + GROUPED + UNTIED, "llama", ""),
    "mistral with wide heads": (
        LLAMA + NO_BIAS + GROUPED + UNTIED + "--kv-channels 24",
        "mistral",
        "--architecture mistral",
    ),
    "qwen2": (LLAMA + NO_BIAS + GROUPED + "--add-qkv-bias", "qwen2", ""),
    "qwen3": (LLAMA + NO_BIAS + GROUPED + UNTIED + "--qk-layernorm --kv-channels 32", "qwen3", ""),
    "qwen3, local layers": (LLAMA + NO_BIAS + GROUPED + "--qk-layernorm --transformer-impl local", "qwen3", ""),
    "gpt2": (SIZES, "gpt2", ""),
    "gpt2 with exact GELU, untied": (SIZES + " --no-bias-gelu-fusion --ffn-hidden-size 96 " + UNTIED, "gpt2", ""),
}


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@unittest.skipUnless(transformers, "the transformers package is not installed; run scripts/setup.sh --with-tests")
class HuggingFace(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_ok(self, *parts, ranks=1):
        codes, printed = train(TRAINING, *parts, ranks=ranks)
        self.assertEqual(codes, [0] * ranks, printed)
        return printed

    def tool_ok(self, *parts):
        finished = tool(*parts)
        self.assertEqual(finished.returncode, 0, finished.stdout + finished.stderr)
        return finished.stdout

    def our_logits(self, *parts, ranks=1):
        """Tokens [b, s] and logits [b, s, vocabulary] of the first step of a run, for each rank."""
        evidence = self.folder / "evidence"
        self.run_ok(
            *parts,
            "--train-iters 1 --evidence-dir",
            [evidence],
            "--evidence-iterations 1 --evidence-content inputs logits",
            ranks=ranks,
        )
        result = []
        for rank in range(ranks):
            tensors = load_file(evidence / "iter_0000001" / f"rank_{rank:05d}.safetensors")
            tokens = tensors["mb0.tokens"]
            result.append((tokens, tensors["mb0.logits"].view(*tokens.shape, -1)[..., :VOCABULARY]))
        return result

    def their_logits(self, folder, tokens):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        self.assertFalse(report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"], report)
        with torch.no_grad():
            return model.eval()(tokens).logits

    def their_model(self, kind, **changes):
        """A model that the library initialises, every parameter moved so that none is zero or one."""
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if kind == "gpt2":
            sizes = {
                "vocab_size": VOCABULARY,
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "bos_token_id": None,
                "eos_token_id": None,
                "attn_pdrop": 0.0,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
            }
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    def test_an_exported_model_has_our_logits(self):
        for number, (name, (flags, kind, arguments)) in enumerate(EXPORTED.items()):
            with self.subTest(name):
                saved, exported = self.folder / f"saved{number}", self.folder / f"exported{number}"
                self.run_ok(flags, "--train-iters 4 --save-interval 4 --save", [saved])
                self.tool_ok("export --format hf --load", [saved], "--output", [exported], arguments)
                config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
                self.assertEqual((config["model_type"], config["vocab_size"]), (kind, VOCABULARY))
                self.assertEqual(
                    json.loads((exported / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"],
                    VOCABULARY - 1,
                )
                [(tokens, ours)] = self.our_logits(flags, "--finetune --load", [saved])
                theirs = self.their_logits(exported, tokens)
                self.assertEqual(theirs.shape[-1], VOCABULARY)
                self.assertLess(relative(theirs, ours), LOGITS_BOUND)
                # The way back gives the very same files.
                self.tool_ok(
                    "import --format hf --input",
                    [exported],
                    "--output",
                    [self.folder / f"back{number}"],
                    "--transformer-impl local" if "local" in flags else "",
                )
                again = self.folder / f"again{number}"
                self.tool_ok(
                    "export --format hf --load",
                    [self.folder / f"back{number}"],
                    "--output",
                    [again],
                    arguments,
                    "--eos-token-id",
                    str(VOCABULARY - 1),
                )
                for file in exported.iterdir():
                    self.assertEqual(file.read_bytes(), (again / file.name).read_bytes(), file.name)

    def test_a_model_of_the_library_comes_here_trains_a_step_and_returns(self):
        cases = {
            "llama": (LLAMA + NO_BIAS + GROUPED + UNTIED + "--norm-epsilon 1e-6", {}),
            "llama with biases": (
                LLAMA + GROUPED + "--norm-epsilon 1e-6",
                {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            ),
            "mistral": (LLAMA + NO_BIAS + GROUPED + UNTIED + "--norm-epsilon 1e-6", {"sliding_window": None}),
            "qwen2": (LLAMA + NO_BIAS + GROUPED + "--add-qkv-bias --norm-epsilon 1e-6", {"tie_word_embeddings": True}),
            "qwen3": (
                LLAMA + NO_BIAS + GROUPED + UNTIED + "--qk-layernorm --kv-channels 24 --norm-epsilon 1e-6",
                {"head_dim": 24},
            ),
            "gpt2": (SIZES, {}),
        }
        for number, (name, (flags, changes)) in enumerate(cases.items()):
            with self.subTest(name):
                given, saved, returned = (self.folder / f"{what}{number}" for what in ("given", "saved", "returned"))
                kind = name.split()[0]
                model = self.their_model(kind, **changes)
                model.save_pretrained(given, max_shard_size="60KB")
                self.assertTrue((given / "model.safetensors.index.json").exists())
                # Imported into a checkpoint.
                self.tool_ok("import --format hf --input", [given], "--output", [self.folder / f"native{number}"])
                [(tokens, ours)] = self.our_logits(flags, "--load", [self.folder / f"native{number}"])
                self.assertLess(relative(self.their_logits(given, tokens), ours), LOGITS_BOUND)
                # Loaded directly, on two GTP shards with padding rows, which read different samples.
                both = self.our_logits(flags, "--tensor-parallel-num-weight-shards 2 --load-hf", [given], ranks=2)
                for tokens, ours in both:
                    self.assertLess(relative(self.their_logits(given, tokens), ours), LOGITS_BOUND)
                # One step, and back.
                self.run_ok(flags, "--train-iters 1 --save-interval 1 --load-hf", [given], "--save", [saved])
                self.tool_ok("export --format hf --load", [saved], "--output", [returned], "--architecture", kind)
                [(tokens, after)] = self.our_logits(flags, "--finetune --load", [saved])
                self.assertLess(relative(self.their_logits(returned, tokens), after), LOGITS_BOUND)
                # The step changed the weights by more than the bound could hide.
                self.assertGreater(relative(self.their_logits(given, tokens), after), 100 * LOGITS_BOUND)

    def test_the_loss_of_the_first_step_is_the_librarys(self):
        model = self.their_model("llama")
        model.save_pretrained(self.folder / "given")
        metrics = self.folder / "metrics.jsonl"
        self.run_ok(
            LLAMA + NO_BIAS + GROUPED + UNTIED + "--norm-epsilon 1e-6",
            "--train-iters 1 --load-hf",
            [self.folder / "given"],
            "--metrics-file",
            [metrics],
            "--evidence-dir",
            [self.folder / "evidence"],
            "--evidence-content inputs",
        )
        tensors = load_file(self.folder / "evidence" / "iter_0000001" / "rank_00000.safetensors")
        losses = []
        for micro_batch in range(2):
            with torch.no_grad():
                logits = model.eval()(tensors[f"mb{micro_batch}.tokens"]).logits
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.view(-1, VOCABULARY).double(), tensors[f"mb{micro_batch}.labels"].view(-1)
                )
            )
        # Here padded rows take part in the softmax, with zero logits: log(sum over 128) against log(sum over 100).
        padded = []
        for micro_batch in range(2):
            with torch.no_grad():
                logits = model(tensors[f"mb{micro_batch}.tokens"]).logits.view(-1, VOCABULARY).double()
            wide = torch.cat([logits, torch.zeros(len(logits), 28, dtype=torch.float64)], dim=1)
            padded.append(torch.nn.functional.cross_entropy(wide, tensors[f"mb{micro_batch}.labels"].view(-1)))
        expected = (sum(padded) / 2).item()
        self.assertGreater(abs(expected - (sum(losses) / 2).item()), 0.1)
        # 64 token losses of about 5, each with an error of some units of 6e-8 times the logits' size.
        self.assertAlmostEqual(step_losses(metrics)[0], expected, delta=5e-6)

    def write_llmc(self, model, path, version):
        """The library's GPT-2 model as a model file of llm.c: header, then each kind of tensor over all layers."""
        weights = model.state_dict()
        dtype = {3: torch.float32, 5: torch.bfloat16}[version]
        rows = 112  # llm.c pads to 128; any padding must do
        with open(path, "wb") as file:
            file.write(struct.pack("<256i", 20240326, version, 64, VOCABULARY, 2, 4, 64, rows, *([0] * 248)))

            def write(tensor):
                file.write(tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())

            table = weights["transformer.wte.weight"]
            write(torch.cat([table, torch.full((rows - VOCABULARY, 64), 7.0)]))
            write(weights["transformer.wpe.weight"])
            for part in (
                "ln_1.weight",
                "ln_1.bias",
                "attn.c_attn.weight",
                "attn.c_attn.bias",
                "attn.c_proj.weight",
                "attn.c_proj.bias",
                "ln_2.weight",
                "ln_2.bias",
                "mlp.c_fc.weight",
                "mlp.c_fc.bias",
                "mlp.c_proj.weight",
                "mlp.c_proj.bias",
            ):
                for layer in range(2):
                    tensor = weights[f"transformer.h.{layer}.{part}"]
                    write(tensor.t() if tensor.dim() == 2 else tensor)
            write(weights["transformer.ln_f.weight"])
            write(weights["transformer.ln_f.bias"])

    def test_models_of_llmc_come_here(self):
        model = self.their_model("gpt2")
        model.save_pretrained(self.folder / "given")
        for version, bound in ((3, LOGITS_BOUND), (5, None)):
            path = self.folder / f"gpt2_{version}.bin"
            self.write_llmc(model, path, version)
            self.tool_ok("import --format llmc --input", [path], "--output", [self.folder / f"native{version}"])
            self.tool_ok(
                "export --format hf --load",
                [self.folder / f"native{version}"],
                "--output",
                [self.folder / f"out{version}"],
            )
            dtype = torch.float32 if version == 3 else torch.bfloat16
            given, found = (load_file(self.folder / name / "model.safetensors") for name in ("given", f"out{version}"))
            self.assertEqual(set(given), set(found))
            for name, tensor in given.items():
                self.assertTrue(torch.equal(tensor.to(dtype), found[name]), name)
            if bound is not None:
                [(tokens, ours)] = self.our_logits(SIZES, "--load", [self.folder / f"native{version}"])
                self.assertLess(relative(self.their_logits(self.folder / "given", tokens), ours), bound)
        content = path.read_bytes()
        for damaged, message in (
            (content[:-2], "truncated"),
            (struct.pack("<i", 1) + content[4:], "is no llm.c model"),
            (content[:4] + struct.pack("<i", 1) + content[8:], "version 1"),
        ):
            path.write_bytes(damaged)
            finished = tool("import --format llmc --input", [path], "--output", [self.folder / "never"])
            self.assertEqual(finished.returncode, 2)
            self.assertIn(message, finished.stderr)

    def test_the_export_does_not_depend_on_the_layout(self):
        flags = LLAMA + NO_BIAS + GROUPED + UNTIED + "--global-batch-size 4 "
        self.run_ok(
            flags,
            "--tensor-parallel-num-weight-shards 2 --train-iters 3 --save-interval 3 --save",
            [self.folder / "gtp2"],
            ranks=4,
        )
        files = {}
        for name, ranks, degrees in (
            ("one", 1, ""),
            ("data2", 2, ""),
            ("gtp4", 4, "--tensor-parallel-num-weight-shards 4"),
        ):
            # Loaded into another layout, and saved from there: a step at learning rate zero changes no weight.
            self.run_ok(
                flags,
                degrees,
                "--lr 0 --min-lr 0 --train-iters 1 --save-interval 1 --finetune --load",
                [self.folder / "gtp2"],
                "--save",
                [self.folder / name],
                ranks=ranks,
            )
        for name in ("gtp2", "one", "data2", "gtp4"):
            self.tool_ok(
                "export --format hf --max-shard-size 100KB --load",
                [self.folder / name],
                "--output",
                [self.folder / f"{name}-hf"],
            )
            files[name] = {path.name: path.read_bytes() for path in (self.folder / f"{name}-hf").iterdir()}
        self.assertGreater(len(files["one"]), 4)
        for name in ("gtp2", "data2", "gtp4"):
            self.assertEqual(files[name], files["one"], name)

    def test_weights_keep_their_type_or_take_another(self):
        model = self.their_model("llama").to(torch.bfloat16)
        model.save_pretrained(self.folder / "given")
        self.tool_ok("import --format hf --input", [self.folder / "given"], "--output", [self.folder / "native"])
        self.tool_ok("export --format hf --load", [self.folder / "native"], "--output", [self.folder / "same"])
        self.tool_ok(
            "export --format hf --dtype float32 --load", [self.folder / "native"], "--output", [self.folder / "wide"]
        )
        given, same, wide = (load_file(self.folder / name / "model.safetensors") for name in ("given", "same", "wide"))
        self.assertEqual(set(given), set(same))
        for name, tensor in given.items():
            self.assertEqual(same[name].dtype, torch.bfloat16)
            self.assertTrue(torch.equal(tensor, same[name]), name)
            self.assertTrue(torch.equal(tensor.float(), wide[name]), name)

    def test_models_without_an_output_layer_and_old_buffers_are_understood(self):
        for kind, prefix, buffer in (
            ("gpt2", "transformer.", "h.0.attn.bias"),
            ("qwen2", "model.", "layers.0.self_attn.rotary_emb.inv_freq"),
        ):
            with self.subTest(kind):
                whole, bare = self.folder / kind, self.folder / f"{kind}-bare"
                self.their_model(kind, tie_word_embeddings=True).save_pretrained(whole)
                shutil.copytree(whole, bare)
                tensors = {
                    name.removeprefix(prefix): tensor for name, tensor in load_file(whole / "model.safetensors").items()
                }
                save_file({**tensors, buffer: torch.ones(8)}, bare / "model.safetensors")
                for folder in (whole, bare):
                    self.tool_ok("import --format hf --input", [folder], "--output", [folder / "native"])
                self.tool_ok("diff", [whole / "native"], [bare / "native"])

    def test_an_imported_checkpoint_knows_its_options(self):
        self.their_model("qwen3", head_dim=24).save_pretrained(self.folder / "given")
        printed = self.tool_ok(
            "import --format hf --input", [self.folder / "given"], "--output", [self.folder / "native"]
        )
        printed_flags = printed.partition("train it with: ")[2].partition(" --load")[0]
        [(_, spelled)] = self.our_logits(printed_flags, "--seq-length 32 --load", [self.folder / "native"])
        [(_, taken)] = self.our_logits("--seq-length 32 --use-checkpoint-args --load", [self.folder / "native"])
        self.assertTrue(torch.equal(spelled, taken))
        codes, printed = train(
            TRAINING,
            printed_flags,
            "--seq-length 32 --train-iters 1 --norm-epsilon 1e-5 --load",
            [self.folder / "native"],
        )
        self.assertEqual(codes, [2], printed)
        self.assertIn("--norm-epsilon", printed)

    def test_tokenizer_files_go_along(self):
        tokenizer = self.folder / "tokenizer"
        tokenizer.mkdir()
        vocabulary = {f"t{i}": i for i in range(98)}
        (tokenizer / "tokenizer.json").write_text(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [
                        {"id": 98, "content": "</s>", "special": True},
                        {"id": 99, "content": "<pad>", "special": True},
                    ],
                    "model": {"type": "WordLevel", "vocab": {**vocabulary, "</s>": 98, "<pad>": 99}, "unk_token": "t0"},
                }
            ),
            encoding="utf-8",
        )
        (tokenizer / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}),
            encoding="utf-8",
        )
        self.their_model("llama").save_pretrained(self.folder / "given")
        self.tool_ok("import --format hf --input", [self.folder / "given"], "--output", [self.folder / "native"])
        self.tool_ok(
            "export --format hf --load",
            [self.folder / "native"],
            "--output",
            [self.folder / "out"],
            "--tokenizer-model",
            [tokenizer],
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            self.assertEqual((self.folder / "out" / name).read_bytes(), (tokenizer / name).read_bytes())
        config = transformers.AutoConfig.from_pretrained(self.folder / "out")
        self.assertEqual((config.eos_token_id, config.pad_token_id, config.bos_token_id), (98, 99, None))
        self.assertEqual(transformers.GenerationConfig.from_pretrained(self.folder / "out").eos_token_id, 98)

    def test_what_has_no_counterpart_is_refused_with_the_reason(self):
        for flags, reason in (
            (SIZES + " " + NO_BIAS, "--disable-bias-linear"),
            (LLAMA + NO_BIAS + "--rotary-percent 0.5", "--rotary-percent 1.0"),
            (SIZES + " --position-embedding-type rope", "--normalization RMSNorm"),
        ):
            with self.subTest(flags):
                saved = self.folder / str(abs(hash(flags)))
                self.run_ok(flags, "--train-iters 1 --save-interval 1 --save", [saved])
                finished = tool("export --format hf --load", [saved], "--output", [self.folder / "never"])
                self.assertEqual(finished.returncode, 2)
                self.assertIn(reason, finished.stderr)
                self.assertFalse((self.folder / "never").exists())

    def test_contradicting_flags_name_both_values(self):
        self.their_model("llama").save_pretrained(self.folder / "given")
        good = LLAMA + NO_BIAS + GROUPED + UNTIED + "--norm-epsilon 1e-6 "
        for change, message in (
            ("--num-layers 3", "--num-layers 3"),
            ("--norm-epsilon 1e-5", "--norm-epsilon 1e-06"),
            ("--rotary-base 5000", "--rotary-base 10000"),
            ("--add-qkv-bias", "no --add-qkv-bias"),
            ("--num-query-groups 4", "--group-query-attention"),
            ("--vocab-size 300", "vocab_size 100"),
        ):
            with self.subTest(change):
                codes, printed = train(TRAINING, good, change, "--train-iters 1 --load-hf", [self.folder / "given"])
                self.assertEqual(codes, [2], printed)
                self.assertIn(message, printed)
        # A broken folder stops every rank with one message.
        weights = self.folder / "given" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        codes, printed = train(TRAINING, good, "--train-iters 1 --load-hf", [self.folder / "given"], ranks=2)
        self.assertEqual(codes, [2, 2], printed)
        self.assertEqual(printed.count("claims bytes"), 1, printed)

    def test_unknown_things_in_a_model_are_refused(self):
        self.their_model("llama").save_pretrained(self.folder / "given")
        path = self.folder / "given" / "config.json"
        original = json.loads(path.read_text(encoding="utf-8"))
        for changes, message in (
            ({"hidden_act": "gelu"}, "hidden_act gelu"),
            ({"model_type": "bloom"}, "bloom"),
            ({"attention_bias": True}, "attention_bias true"),
            ({"intermediate_size": 180}, "has shape [176, 64]"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}, "rope_type yarn"),
            ({"quantization_config": {"quant_method": "x"}}, "quantization_config"),
            ({"num_hidden_layers": 1}, "has no place"),
            ({"num_hidden_layers": 3}, "has no tensor"),
        ):
            with self.subTest(changes):
                path.write_text(json.dumps({**original, **changes}), encoding="utf-8")
                finished = tool(
                    "import --format hf --input", [self.folder / "given"], "--output", [self.folder / "never"]
                )
                self.assertEqual(finished.returncode, 2, finished.stdout)
                self.assertIn(message, finished.stderr)
                self.assertFalse((self.folder / "never" / "latest_checkpointed_iteration.txt").exists())


if __name__ == "__main__":
    unittest.main()
