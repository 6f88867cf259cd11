"""Runs pretrain_gpt with --evidence-dir and compares all that it wrote with the plain implementation."""

import json
import pathlib
import random
import re

import plain_data
import plain_gpt
import plain_training
import torch
from conversion_support import train
from safetensors.torch import load_file

UNIT, BF16_UNIT, FP16_UNIT = 2.0**-24, 2.0**-8, 2.0**-11  # largest relative error of one rounding
TINY = 2.0**-140  # around the smallest fp32 numbers, which round absolutely
ALWAYS = "--tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo"
CONTENT = "inputs logits token-losses main-gradients parameters optimizer"


class Difference(Exception):
    """What the program and the plain implementation disagree about."""


def write_corpora(folder):
    """Documents by prefix: two corpora of short documents that end with token 60."""
    draw = random.Random(5)
    result = {}
    for name, count in (("one", 90), ("two", 41)):
        documents = [[draw.randrange(0, 60) for _ in range(draw.randrange(1, 40))] + [60] for _ in range(count)]
        prefix = str(pathlib.Path(folder) / name)
        plain_data.write_corpus(prefix, documents)
        result[prefix] = documents
    return result


def read_evidence(folder, ranks, iteration):
    """Tensors of each rank, whole parameters' tensors by kind and name, and the elements of GTP's padding."""
    place = pathlib.Path(folder) / f"iter_{iteration:07d}"
    manifests = [json.loads((place / f"rank_{rank:05d}.json").read_text())["parameters"] for rank in range(ranks)]
    tensors = [load_file(place / f"rank_{rank:05d}.safetensors") for rank in range(ranks)]
    whole = {}
    for key in tensors[0]:
        kind, _, name = key.partition(".")
        if kind.startswith("mb"):
            continue
        parts = {}
        for manifest, tensor in zip(manifests, (one[key] for one in tensors)):
            cuts = manifest[name]["cuts"]
            copy = parts.setdefault(cuts[0]["index"] if cuts else 0, tensor)
            if not torch.equal(copy.nan_to_num(), tensor.nan_to_num()):
                raise Difference(f"{key}: ranks hold different copies")
        rows = manifests[0][name]["logical_shape"][0]
        whole.setdefault(kind, {})[name] = torch.cat([parts[index] for index in sorted(parts)])[:rows]
    padding = sum(cut["padding"] * one["logical_shape"][1] for one in manifests[0].values() for cut in one["cuts"])
    return tensors, whole, padding


class Run:
    """One run of the program. `worst` holds, by kind of check, the largest error as a part of its bound."""

    def __init__(self, options, ranks, folder):
        self.options, self.ranks, self.folder, self.worst = options, ranks, pathlib.Path(folder), {}
        corpora = write_corpora(folder)
        options["data-path"] = options["data-path"].replace("@", f"{folder}/")
        self.documents = corpora[options["data-path"]]
        files = ["--evidence-dir", self.folder / "evidence", "--metrics-file", self.folder / "metrics.jsonl"]
        command = [*options.words(), *ALWAYS.split(), *files, "--evidence-content", *CONTENT.split()]
        self.codes, self.printed = train(command, ranks=ranks)

    def compare(self):
        """Throws Difference at the first thing that differs."""
        if any(self.codes):
            raise Difference(f"exit codes {self.codes}: {self.printed[-600:]}")
        options = self.options
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        self.steps = [record for record in self.records if record["kind"] == "step"]
        self.half = torch.bfloat16 if options["bf16"] else torch.float16 if options["fp16"] else None
        self.masters = "fp32_param" if self.half else "param"
        self.schedule = plain_training.Schedule(options, self.ranks)
        self.scaler = plain_training.LossScaler(options)
        self.scales = []  # after each step
        self.updates = self.scheduled_samples = 0
        before = read_evidence(self.folder / "evidence", self.ranks, 0)[1]
        self.check_initial(before["param"])
        self.check_plan()
        for record, plan in zip(self.steps, self.plan):
            tensors, after, self.padding = read_evidence(self.folder / "evidence", self.ranks, record["iteration"])
            self.check_step(record, self.read_batches(plan[4], tensors), before, after)
            before = after
        self.check_log()
        self.check_evaluations()

    def note(self, kind, error, bound, where):
        """Keeps the error as a part of its bound, of which more than all is a difference."""
        error, bound = float(error), float(bound)
        part = error / bound if bound else (0.0 if error == 0 else float("inf"))
        self.worst[kind] = max(self.worst.get(kind, 0.0), part)
        if not part <= 1:
            raise Difference(f"{where}: {kind} is off by {error:.3e}, bound {bound:.3e}")

    def note_each(self, kind, found, expected, bound, where):
        """The same for each element of tensors."""
        self.note(kind, ((found.double() - expected).abs() / (bound + TINY)).max(), 1.0, where)

    def same(self, kind, found, expected):
        if found != expected:
            raise Difference(f"{kind}: the program says {found}, expected {expected}")

    def precision(self):
        """Relative error of a logit in the working precision.

        A layer is two branches of at most 8 roundings in a row (norm, two products, softmax or activation, sums). In
        fp32 a product of K terms adds about sqrt(K) roundings to its one; in 16 bits sums stay in fp32.
        """
        layers = self.options["num-layers"]
        if self.half is None:
            return UNIT * (16 * layers + 8 + 4 * layers * max(self.options.ffn_size(), 64) ** 0.5)
        return (16 * layers + 8) * (BF16_UNIT if self.half == torch.bfloat16 else FP16_UNIT)

    def check_initial(self, weights):
        """Shapes and constants exactly; the spread and mean of drawn weights within six standard errors."""
        options = self.options
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.same("shapes", sorted(shapes.items()), sorted(plain_gpt.parameter_shapes(options).items()))
        for name, weight in weights.items():
            if weight.dim() == 1:
                gain = name.endswith(("norm_weight", "norm.weight")) and not options["apply-layernorm-1p"]
                self.same(name, weight.unique().tolist(), [1.0 if gain else 0.0])
                continue
            std = options["init-method-std"]
            table = options["embedding-init-method-std"] if name.startswith("embedding.") else None
            if options["init-method-xavier-uniform"] and table in (None, std):
                limit = (6 / sum(weight.shape)) ** 0.5
                self.note("xavier limit", weight.abs().max(), limit * (1 + BF16_UNIT), name)
                std = limit / 3**0.5
            elif "linear_proj" in name or "linear_fc2" in name:
                std /= (2 * options["num-layers"]) ** 0.5
            elif table is not None:
                std = table
            count, weight = weight.numel(), weight.double()
            self.note("spread", abs(weight.std() - std), (6 / (2 * count) ** 0.5 + BF16_UNIT) * std, f"initial {name}")
            self.note("mean", abs(weight.mean()), 6 * std / count**0.5, f"initial {name}")

    def check_plan(self):
        """Iterations, batch sizes and samples; keeps which samples each micro-batch of each rank reads."""
        options, micro = self.options, self.options["micro-batch-size"]
        total = options["train-samples"]
        wanted = total or options["train-iters"] * (options["global-batch-size"] or micro * self.ranks)
        iterations = options["train-iters"] or total // (options["global-batch-size"] or micro * self.ranks)
        self.training = plain_data.build_set(options, self.documents, 0, wanted)
        size, ranks = len(self.training), self.ranks
        readers = [plain_data.sample_numbers(options, size, micro, ranks, rank, 0) for rank in range(ranks)]
        consumed = skipped = iteration = 0
        self.plan = []
        while True:
            size, left = plain_training.batch_size_at(options, consumed, self.ranks)
            if (consumed + size > total) if options["step-batch-size-schedule"] else iteration == iterations:
                break
            iteration += 1
            count = size // (micro * self.ranks)
            numbers = [[next(reader) for _ in range(count)] for reader in readers]
            consumed += size
            if iteration == options["iterations-to-skip"]:
                skipped += size
                continue
            skipped += left
            self.plan.append((iteration, size, consumed, skipped, numbers))
        found = [(r["iteration"], r["batch_size"], r["consumed_samples"], r["skipped_samples"]) for r in self.steps]
        self.same("iteration, batch size, consumed, skipped", found, [step[:4] for step in self.plan])

    def read_batches(self, numbers, tensors):
        """Micro-batches of all ranks, each with the program's token losses and logits."""
        result = []
        for rank, own in enumerate(numbers):
            for index, samples in enumerate(own):
                batch = plain_data.batch_of(self.options, [self.training.pieces(number) for number in samples])
                for field in ("tokens", "labels", "loss_mask"):
                    found, expected = tensors[rank][f"mb{index}.{field}"], getattr(batch, field)
                    if not torch.equal(found.reshape(expected.shape).double(), expected.double()):
                        raise Difference(f"samples {samples}: {field} {found} instead of {expected}")
                result.append((batch, tensors[rank][f"mb{index}.token_losses"], tensors[rank][f"mb{index}.logits"]))
        return result

    def check_step(self, record, batches, before, after):
        options, where = self.options, f"step {record['iteration']}"
        rate = self.schedule.learning_rate(self.scheduled_samples)
        self.note("learning rate", abs(record["learning_rate_applied"] - rate), 1e-12 * rate, where)
        weights = {name: weight.double() for name, weight in before["param"].items()}
        precision, largest = self.precision(), 0.0
        for batch, found_losses, found_logits in batches:
            with torch.no_grad():
                logits, losses = plain_gpt.token_losses(options, weights, batch)
            largest = max(largest, logits.abs().max().item())
            # All logits of a token carry errors of the size of the largest; a loss has those of two logits and a sum.
            self.note_each("logits", found_logits.view(logits.shape), logits, 2 * precision * largest, where)
            bound = 4 * precision * largest + 8 * UNIT * losses
            self.note_each("token losses", found_losses.view(losses.shape), losses, bound, where)
        total, count, gradient = plain_gpt.gradients(options, weights, [batch for batch, _, _ in batches])
        loss = total / max(count, 1)
        self.note("loss", abs(record["lm_loss"] - loss), 4 * precision * largest + 8 * UNIT * loss, where)
        scale = self.scaler.scale
        self.same(f"{where}: loss scale", record["loss_scale"], scale)
        self.scaler.update(record["skipped"])
        self.scales.append(self.scaler.scale)
        if record["skipped"]:
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                for name, tensor in after.get(kind, {}).items():
                    if not torch.equal(tensor, before[kind][name] if kind in before else torch.zeros_like(tensor)):
                        raise Difference(f"{where}: {kind} {name} changed in a skipped step")
            return
        found = {name: part.double() / scale for name, part in after["main_grad"].items()}
        self.check_gradient(record, gradient, found, where)
        self.check_update(record, before, after, found, where)
        self.updates += 1
        self.scheduled_samples += record["batch_size"]
        rate = self.schedule.learning_rate(self.scheduled_samples)
        self.note("next learning rate", abs(record["learning_rate_printed"] - rate), 1e-12 * rate, where)

    def check_gradient(self, record, expected, found, where):
        whole = sum(part.square().sum() for part in expected.values()).sqrt()
        for name, part in expected.items():
            # Backward is twice the forward chain; errors of a part that cancels are a small part of the whole.
            bound = self.precision() * (2 * part.norm() + 0.25 * whole)
            self.note("gradient", (found[name] - part).norm(), bound, f"{where} {name}")
        norm = sum(part.square().sum() for part in found.values()).sqrt()
        self.note("gradient norm", abs(record["grad_norm"] - norm), 32 * UNIT * norm, where)
        if record["num_zeros"] is not None:
            zeros = sum(int((part == 0).sum()) for part in found.values()) + self.padding
            self.same(f"{where}: zeros", record["num_zeros"], zeros)

    def check_update(self, record, before, after, gradients, where):
        """From the program's own gradients, norm and state; bounds count the roundings of a step."""
        options, at = self.options, self.scheduled_samples
        clip = min(1.0, options["clip-grad"] / (record["grad_norm"] + 1e-6)) if options["clip-grad"] > 0 else 1.0
        for name, gradient in gradients.items():
            place, gradient = f"{where} {name}", gradient * clip
            start = before.get(self.masters, before["param"])[name].double()
            state = {kind: tensors[name].double() for kind, tensors in after.items()}
            old = {kind: before[kind][name].double() if kind in before else 0.0 * start for kind in state}
            rate = self.schedule.learning_rate(at, plain_training.is_decoupled(name))
            decay = self.schedule.weight_decay(at) if plain_training.decays(options, name, start.shape) else 0.0
            if options["optimizer"] == "sgd":
                expected, size = plain_training.momentum(options, gradient + decay * start, old, self.updates == 0)
                size = size + gradient.abs() + decay * start.abs()
                self.note_each("momentum", state["momentum_buffer"], expected, 8 * UNIT * size, place)
                change = -rate * state["momentum_buffer"]
                size = change.abs()
            else:
                first, second, size = plain_training.adam_moments(options, gradient, old)
                self.note_each("first moment", state["exp_avg"], first, 8 * UNIT * size, place)
                self.note_each("second moment", state["exp_avg_sq"], second, 12 * UNIT * second, place)
                change, size = plain_training.adam_change(options, start, state, self.updates + 1, rate, decay)
            bound = 16 * UNIT * size + 2 * UNIT * (start + change).abs()
            self.note_each("update", state[self.masters], start + change, bound, place)
            if self.half and not torch.equal(after["param"][name], after[self.masters][name].to(self.half)):
                raise Difference(f"{place}: the 16-bit weight is not the rounded master")
        # Padding rows that the default initialisation draws count in the norm; evidence leaves them out.
        if record["params_norm"] is not None and (self.padding == 0 or options["weight-init"] == "layout-invariant"):
            norm = sum(part.double().square().sum() for part in after[self.masters].values()).sqrt()
            self.note("params norm", abs(record["params_norm"] - norm), 32 * UNIT * norm, where)

    def check_log(self):
        """The training lines: which are printed, and what their loss averages. Six digits are printed."""
        every, reference = self.options["log-interval"], self.options["loss-window"] == "megatron"
        expected, losses, advanced = [], [], False
        for number, record in enumerate(self.steps):
            losses += [] if record["skipped"] else [record["lm_loss"]]
            advanced = advanced or not record["skipped"]
            if number == 0 or record["iteration"] % every == 0:
                mean = sum(losses) / max(1, len(losses)) if advanced else None  # no loss so far: none in the line
                rate = record["learning_rate_printed"]
                expected.append((record["iteration"], mean, rate, self.scales[number]))
                losses = losses if reference and number == 0 else []
        pattern = r"iteration +(\d+)/.*learning rate: (\S+) \|.*?(?: lm loss: (\S+) \|)? loss scale: (\S+)"
        lines = [match.groups() for match in re.finditer(pattern, self.printed)]
        found = [(int(line[0]), line[2] and float(line[2]), float(line[1]), float(line[3])) for line in lines]
        self.same("iterations printed", [line[0] for line in found], [line[0] for line in expected])
        for line, wanted in zip(found, expected):
            for name, one, two in zip(("loss", "learning rate", "loss scale"), line[1:], wanted[1:]):
                if one is None or two is None:
                    self.same(f"training line {line[0]}: {name}", one, two)
                else:
                    self.note(f"printed {name}", abs(one - two), 1e-6 * two, f"training line {line[0]}")

    def check_evaluations(self):
        """Validation reads on through its set; each evaluation uses the weights of its iteration."""
        options, used = self.options, 0
        micro = options["eval-micro-batch-size"] or options["micro-batch-size"]
        size = options["global-batch-size"] or options["micro-batch-size"] * self.ranks
        size = options["eval-global-batch-size"] or size
        iterations = options["train-iters"] or len(self.plan)
        rounds = {"test": 1, "validation": iterations // (options["eval-interval"] or iterations + 1) + 1}
        found = [record for record in self.records if record["kind"] == "evaluation"]
        every = options["eval-interval"] if options["eval-iters"] else None
        wanted = [(r["iteration"], "validation") for r in self.steps if every and r["iteration"] % every == 0]
        wanted += [(iterations, name) for name in ("validation", "test")] if options["eval-iters"] else []
        self.same("evaluations", [(record["iteration"], record["set"]) for record in found], wanted)
        for record in found:
            name = record["set"]
            count = rounds[name] * options["eval-iters"] * size
            samples = plain_data.build_set(options, self.documents, 1 if name == "validation" else 2, count)
            newest = max(step["iteration"] for step in self.steps if step["iteration"] <= record["iteration"])
            weights = read_evidence(self.folder / "evidence", self.ranks, newest)[1]["param"]
            weights = {key: weight.double() for key, weight in weights.items()}
            total = tokens = 0.0
            for rank in range(self.ranks):
                start = used if name == "validation" else 0
                reader = plain_data.sample_numbers(options, len(samples), micro, self.ranks, rank, start)
                for _ in range(options["eval-iters"] * (size // (micro * self.ranks))):
                    batch = plain_data.batch_of(options, [samples.pieces(number) for number in next(reader)])
                    with torch.no_grad():
                        losses = plain_gpt.token_losses(options, weights, batch)[1]
                    total += (losses * batch.loss_mask).sum().item()
                    tokens += batch.loss_mask.sum().item()
            used += options["eval-iters"] * size if name == "validation" else 0
            loss = total / tokens
            self.note("evaluation", abs(record[f"{name}_lm_loss"] - loss), 4 * self.precision() * loss, f"{name} loss")
