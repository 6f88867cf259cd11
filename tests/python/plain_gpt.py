"""The options of a run and the model once more, in plain PyTorch and fp64.

For tests that compare the program with something that shares no code with it. It knows formulas, not rounding points.
"""

import math

import torch
from torch.nn import functional

DEFAULTS = {
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "dataloader-type": "single",
    "glu-linear-offset": 0.0,
    "hysteresis": 2,
    "init-method-std": 0.02,
    "initial-loss-scale": 2.0**32,
    "log-interval": 100,
    "loss-scale-window": 1000,
    "lr-decay-style": "linear",
    "lr-warmup-init": 0.0,
    "lr-warmup-iters": 0,
    "lr-warmup-samples": 0,
    "lr-wsd-decay-style": "exponential",
    "make-vocab-size-divisible-by": 128,
    "min-loss-scale": 1.0,
    "min-lr": 0.0,
    "norm-epsilon": 1e-5,
    "normalization": "LayerNorm",
    "optimizer": "adam",
    "position-embedding-type": "learned_absolute",
    "rotary-base": 10000,
    "rotary-percent": 1.0,
    "seed": 1234,
    "sgd-momentum": 0.9,
    "split": "969, 30, 1",
    "weight-decay": 0.01,
    "weight-decay-incr-style": "constant",
}


def value_of(text):
    """A number where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class Options(dict):
    """Options of one run by their names on the command line; a switch that is given has the value True."""

    def __missing__(self, name):
        return DEFAULTS.get(name)

    @classmethod
    def parse(cls, text):
        """From a command line; the last occurrence of an option wins."""
        options, words = cls(), text.split()
        for word, value in zip(words, [*words[1:], "--"]):
            if word.startswith("--"):
                options[word[2:]] = True if value.startswith("--") else value_of(value)
        return options

    def words(self):
        """The command line."""
        result = []
        for name, value in self.items():
            result.append("--" + name)
            if value is not True:
                result += [str(word) for word in value] if isinstance(value, (list, tuple)) else [str(value)]
        return result

    def rotary(self):
        return self["position-embedding-type"] == "rope" or self["use-rotary-position-embeddings"]

    def learned_positions(self):
        return self["position-embedding-type"] == "learned_absolute" and not self.rotary()

    def gated(self):
        return bool(self["swiglu"] or self["quick-geglu"])

    def ffn_size(self):
        if self["ffn-hidden-size"]:
            return self["ffn-hidden-size"]
        wide = 4 * self["hidden-size"]
        return int(wide * 2 / 3 / 64) * 64 if self["swiglu"] else wide

    def head_size(self):
        return self["kv-channels"] or self["hidden-size"] // self["num-attention-heads"]

    def query_groups(self):
        return (self["num-query-groups"] or 1) if self["group-query-attention"] else self["num-attention-heads"]

    def padded_vocabulary(self):
        if self["padded-vocab-size"]:
            return self["padded-vocab-size"]
        unit = 1 if self["no-pad-vocab-size"] else self["make-vocab-size-divisible-by"]
        return -(-self["vocab-size"] // unit) * unit


def norm_names(options, layer):
    """Prefixes of the two norms of a layer, which Transformer Engine keeps inside the following linear."""
    prefix = f"decoder.layers.{layer}."
    if options["transformer-impl"] == "local":
        return prefix + "input_layernorm.", prefix + "pre_mlp_layernorm."
    return prefix + "self_attention.linear_qkv.layer_norm_", prefix + "mlp.linear_fc1.layer_norm_"


def parameter_shapes(options):
    """Name and whole shape of every parameter."""
    hidden, ffn, head = options["hidden-size"], options.ffn_size(), options.head_size()
    heads, groups, vocabulary = options["num-attention-heads"], options.query_groups(), options.padded_vocabulary()
    biases = not options["disable-bias-linear"]
    shapes = {"embedding.word_embeddings.weight": (vocabulary, hidden)}

    def norm(prefix, size):
        shapes[prefix + "weight"] = (size,)
        if options["normalization"] == "LayerNorm":
            shapes[prefix + "bias"] = (size,)

    def linear(prefix, rows, columns, bias):
        shapes[prefix + "weight"] = (rows, columns)
        if bias:
            shapes[prefix + "bias"] = (rows,)

    if options.learned_positions():
        shapes["embedding.position_embeddings.weight"] = (options["max-position-embeddings"], hidden)
    for layer in range(options["num-layers"]):
        prefix = f"decoder.layers.{layer}."
        attention_norm, mlp_norm = norm_names(options, layer)
        norm(attention_norm, hidden)
        norm(mlp_norm, hidden)
        linear(prefix + "self_attention.linear_proj.", hidden, heads * head, biases)
        qkv_bias = biases or options["add-qkv-bias"]
        linear(prefix + "self_attention.linear_qkv.", (heads + 2 * groups) * head, hidden, qkv_bias)
        if options["qk-layernorm"]:
            norm(prefix + "self_attention.q_layernorm.", head)
            norm(prefix + "self_attention.k_layernorm.", head)
        linear(prefix + "mlp.linear_fc1.", ffn * (2 if options.gated() else 1), hidden, biases)
        linear(prefix + "mlp.linear_fc2.", hidden, ffn, biases)
    norm("decoder.final_layernorm.", hidden)
    if options["untie-embeddings-and-output-weights"]:
        shapes["output_layer.weight"] = (vocabulary, hidden)
    return shapes


def rotate(options, x, positions):
    """Rotary positions on [b, s, heads, head size]; positions [b, s]."""
    width = int(x.shape[-1] * options["rotary-percent"])
    frequency = options["rotary-base"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if options["use-rope-scaling"]:
        wavelength = 2 * math.pi / frequency
        blend = (8192 / wavelength - 1) / 3
        mixed = torch.where(wavelength > 8192, frequency / 8, frequency * ((1 - blend) / 8 + blend))
        frequency = torch.where(wavelength < 2048, frequency, mixed)
    angle = (positions / (options["rotary-seq-len-interpolation-factor"] or 1)).unsqueeze(-1) * frequency
    cosine, sine = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
    turned, rest = x[..., :width], x[..., width:]
    if options["rotary-interleaved"]:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    pair = first * cosine - second * sine, second * cosine + first * sine
    turned = torch.stack(pair, -1).flatten(-2) if options["rotary-interleaved"] else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1)


def activation(options, y):
    if options["squared-relu"]:
        return functional.relu(y) ** 2
    if options["swiglu"]:
        gate, linear = y.chunk(2, -1)
        return functional.silu(gate) * linear
    if options["quick-geglu"]:
        gate, linear = y.chunk(2, -1)
        limit = options["activation-func-clamp-value"]
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (linear + options["glu-linear-offset"])
    tanh = not (options["disable-bias-linear"] or options["no-bias-gelu-fusion"])
    return functional.gelu(y, approximate="tanh" if tanh else "none")


def token_losses(options, weights, batch):
    """Logits [b, s, V] and losses [b, s] of a micro-batch (see plain_data.py), for weights by name in fp64."""

    def norm(x, prefix):
        gain = weights[prefix + "weight"] + (1 if options["apply-layernorm-1p"] else 0)
        if options["normalization"] == "RMSNorm":
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + options["norm-epsilon"]) * gain
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + options["norm-epsilon"])
        return x * gain + weights[prefix + "bias"]

    def linear(x, prefix):
        return functional.linear(x, weights[prefix + "weight"], weights.get(prefix + "bias"))

    heads, groups, head = options["num-attention-heads"], options.query_groups(), options.head_size()
    x = weights["embedding.word_embeddings.weight"][batch.tokens]
    if options.learned_positions():
        x = x + weights["embedding.position_embeddings.weight"][batch.positions]
    for layer in range(options["num-layers"]):
        prefix = f"decoder.layers.{layer}."
        attention_norm, mlp_norm = norm_names(options, layer)
        qkv = linear(norm(x, attention_norm), prefix + "self_attention.linear_qkv.")
        qkv = qkv.view(*x.shape[:2], groups, heads // groups + 2, head)
        q, k, v = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]
        if options["qk-layernorm"]:
            q = norm(q, prefix + "self_attention.q_layernorm.")
            k = norm(k, prefix + "self_attention.k_layernorm.")
        if options.rotary():
            q, k = rotate(options, q, batch.rotary_positions), rotate(options, k, batch.rotary_positions)
        k, v = (part.repeat_interleave(heads // groups, dim=2) for part in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(head)
        scores = scores.masked_fill(batch.masked.unsqueeze(1), -math.inf).softmax(-1)
        context = torch.einsum("bhij,bjhd->bihd", scores, v).flatten(2)
        x = x + linear(context, prefix + "self_attention.linear_proj.")
        inner = activation(options, linear(norm(x, mlp_norm), prefix + "mlp.linear_fc1."))
        x = x + linear(inner, prefix + "mlp.linear_fc2.")
    x = norm(x, "decoder.final_layernorm.")
    output = "output_layer." if options["untie-embeddings-and-output-weights"] else "embedding.word_embeddings."
    logits = functional.linear(x, weights[output + "weight"])
    losses = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return logits, losses.view(batch.labels.shape)


def gradients(options, weights, micro_batches):
    """Sum of masked losses, counted tokens, and the gradient of one step, of the micro-batches of all data ranks."""
    leaves = {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}
    per_token = bool(options["calculate-per-token-loss"])
    total, loss_sum, count = 0.0, 0.0, 0.0
    for batch in micro_batches:
        masked = (token_losses(options, leaves, batch)[1] * batch.loss_mask).sum()
        tokens = batch.loss_mask.sum().item()
        total = total + masked / (1 if per_token else max(tokens, 1) * len(micro_batches))
        loss_sum, count = loss_sum + masked.item(), count + tokens
    found = torch.autograd.grad(total / (max(count, 1) if per_token else 1), list(leaves.values()), allow_unused=True)
    zero = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return loss_sum, count, {name: zero[name] if part is None else part for name, part in zip(leaves, found)}
