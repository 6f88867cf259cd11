"""Batch sizes, schedules and optimizers, once more, in Python's own doubles and torch's fp64."""

import math

import torch


def float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def batch_size_at(options, consumed, ranks):
    """Samples of the step that starts after consumed samples, and those that it leaves out."""
    unit = options["micro-batch-size"] * ranks
    schedule = options["step-batch-size-schedule"]
    if schedule:
        size = 0
        for entry in schedule.replace(",", " ").split():
            threshold, value = entry.split(":")
            scale = {"K": 10**3, "M": 10**6}.get(threshold[-1], 1)
            if int(float(threshold.rstrip("KM")) * scale) // options["seq-length"] <= consumed:
                size = int(value)
    else:
        size = options["global-batch-size"] or unit
    running = size // unit * unit if options["decrease-batch-size-if-needed"] else size
    return running, size - running


class Schedule:
    """Learning rate and weight decay by the number of samples so far."""

    def __init__(self, options, ranks):
        self.options = options
        if options["train-samples"]:
            self.decay = options["lr-decay-samples"] or options["train-samples"]
            self.warmup = options["lr-warmup-samples"]
            self.decay_weight_until = options["train-samples"]
            self.tail = options["lr-wsd-decay-samples"]
        else:
            size = options["global-batch-size"] or options["micro-batch-size"] * ranks
            self.decay = (options["lr-decay-iters"] or options["train-iters"]) * size
            self.warmup = options["lr-warmup-iters"] * size
            self.decay_weight_until = options["train-iters"] * size
            self.tail = (options["lr-wsd-decay-iters"] or 0) * size
        if options["lr-warmup-fraction"] is not None:
            self.warmup = options["lr-warmup-fraction"] * self.decay

    def learning_rate(self, n, decoupled=False):
        options = self.options
        most, least, style = options["lr"], options["min-lr"], options["lr-decay-style"]
        if decoupled and options["decoupled-lr"] is not None:
            most = options["decoupled-lr"]
            least = least if options["decoupled-min-lr"] is None else options["decoupled-min-lr"]
        if self.warmup > 0 and n <= self.warmup:
            start = options["lr-warmup-init"]
            return start + (most - start) * n / self.warmup
        if style == "constant":
            return most
        if n > self.decay:
            return least
        if style == "inverse-square-root":
            return max(least, most * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)))
        ratio = (n - self.warmup) / (self.decay - self.warmup)
        if style == "WSD":
            return least + self.wsd(n) * (most - least)
        share = 1 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1)
        return least + share * (most - least)

    def wsd(self, n):
        start = self.decay - self.tail
        if n <= start:
            return 1.0
        q = (n - start) / self.tail
        return {
            "linear": 1 - q,
            "cosine": 0.5 * (math.cos(math.pi * q) + 1),
            "exponential": 2 * 0.5**q - 1,
            "minus_sqrt": 1 - math.sqrt(q),
        }[self.options["lr-wsd-decay-style"]]

    def weight_decay(self, n):
        options = self.options
        style = options["weight-decay-incr-style"]
        if style == "constant":
            return options["weight-decay"]
        first, last = options["start-weight-decay"], options["end-weight-decay"]
        if n > self.decay_weight_until:
            return last
        k = n / self.decay_weight_until
        return first + (k if style == "linear" else 0.5 * (math.cos(math.pi * (1 - k)) + 1)) * (last - first)


class LossScaler:
    """The factor of the loss: constant, or adapted to fp16's range."""

    def __init__(self, options):
        self.options, self.good, self.patience = options, 0, options["hysteresis"]
        self.dynamic = options["fp16"] and not options["loss-scale"]
        self.scale = options["initial-loss-scale"] if self.dynamic else options["loss-scale"] or 1.0

    def update(self, overflow):
        if self.dynamic and overflow:
            self.good, self.patience = 0, self.patience - 1
            if self.patience <= 0:
                self.scale = max(self.scale / 2, self.options["min-loss-scale"])
        elif self.dynamic:
            self.good += 1
            if self.good == self.options["loss-scale-window"]:
                self.good, self.patience, self.scale = 0, self.options["hysteresis"], self.scale * 2


def decays(options, name, shape):
    """Whether weight decay applies to a parameter."""
    if options["apply-wd-to-qk-layernorm"] and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return len(shape) > 1 and not name.endswith(".bias")


def is_decoupled(name):
    """Whether --decoupled-lr applies to a parameter."""
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def momentum(options, gradient, old, first):
    """SGD's momentum after a step, and the magnitude that its rounding is a part of."""
    kept = 0.0 * gradient if first else options["sgd-momentum"] * old["momentum_buffer"]
    return kept + gradient, kept.abs()


def adam_moments(options, gradient, old):
    """Adam's two moments after a step, and the magnitude that the rounding of the first is a part of."""
    beta1, beta2 = float32(options["adam-beta1"]), float32(options["adam-beta2"])
    first = beta1 * old["exp_avg"] + (1 - beta1) * gradient
    second = beta2 * old["exp_avg_sq"] + (1 - beta2) * gradient * gradient
    return first, second, beta1 * old["exp_avg"].abs() + (1 - beta1) * gradient.abs()


def adam_change(options, weight, state, step, rate, decay):
    """What Adam adds to a weight, for moments after the step; and the magnitude that its rounding is a part of."""
    first = state["exp_avg"] / (1 - float32(options["adam-beta1"]) ** step)
    second = state["exp_avg_sq"] / (1 - float32(options["adam-beta2"]) ** step)
    direction = first / (second.sqrt() + options["adam-eps"])
    return -rate * (direction + decay * weight), rate * (direction.abs() + decay * weight.abs())
