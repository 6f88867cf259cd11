#!/usr/bin/env python3
"""Speed floor of one training step on one GPU.

    scripts/bench/floor.py --model llama-1.3b [--micro-batch-size N]

The floor is the sum of the step's own matrix products and attention calls, each timed at its shape through libtorch,
and of the bytes that the best-fused elementwise, loss and optimizer kernels must move, at the measured copy rate. Every
measurement follows 20 products at full power, so that clocks are those of a long run. Under torchrun each rank measures
its own GPU.
"""

import argparse
import os
import time

import models
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16 = torch.bfloat16


class Clock:
    """Times calls on a GPU that is kept hot."""

    def __init__(self):
        self.hot = self.random(8192, 8192)
        for _ in range(1500):  # 2 s: the power limit takes effect
            self.hot @ self.hot

    @staticmethod
    def random(*shape, grad=False):
        return torch.randn(*shape, device="cuda", dtype=BF16, requires_grad=grad)

    def seconds(self, call, repeats=12, warm_up=3):
        for _ in range(20):
            self.hot @ self.hot
        for _ in range(warm_up):
            call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats / 1e3

    def copy_rate(self):
        """Bytes a second of a device copy, reads and writes counted."""
        size = 2**30
        source = torch.empty(size, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))


def matrix_seconds(clock, tokens, rows, columns, copy_rate):
    """Forward, input gradient and weight gradient (summed in fp32) of one matrix."""
    x, w, dy = clock.random(tokens, columns), clock.random(rows, columns), clock.random(tokens, rows)
    main = torch.zeros(rows, columns, device="cuda", dtype=torch.float32)
    both = clock.seconds(lambda: x @ w.t()) + clock.seconds(lambda: dy @ w)
    fused = clock.seconds(lambda: torch.addmm(main, dy.t(), x, out_dtype=torch.float32))
    # The alternative: a bf16 gradient, then one pass that adds it (2 + 4 + 4 bytes an element).
    separate = clock.seconds(lambda: dy.t() @ x) + 10 * main.numel() / copy_rate
    return both + min(fused, separate)


def attention_seconds(clock, model):
    """Forward and backward of causal attention, the faster of cuDNN and FlashAttention."""
    shape = (model.micro_batch, model.heads, model.seq, model.head_dim)
    kv_shape = (model.micro_batch, model.kv_heads, model.seq, model.head_dim)
    q, k, v = (clock.random(*s, grad=True) for s in (shape, kv_shape, kv_shape))
    dout = clock.random(*shape)
    grouped = model.kv_heads != model.heads

    def forward_backward():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        torch.autograd.grad(out, (q, k, v), dout)

    best = float("inf")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            best = min(best, clock.seconds(forward_backward))
    return best


def elementwise_bytes(model):
    """Of one layer and token, 2 bytes an element: two norms (forward reads 2 and writes 2, backward reads 4 and writes
    2), the activation (forward and backward), rotary positions of queries and keys in place, twice."""
    norms = 2 * (4 + 6) * model.hidden * 2
    activation = ((3 + 5) if model.gated else (2 + 3)) * model.ffn * 2
    rope = 2 * 2 * 2 * (model.heads + model.kv_heads) * model.head_dim * 2
    return norms + activation + rope


def measure(model):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    clock = Clock()
    copy_rate = clock.copy_rate()
    layers = model.layers
    parts = {
        "layer products": layers * sum(matrix_seconds(clock, model.tokens, *m, copy_rate) for m in model.matrices),
        "output product": matrix_seconds(clock, model.tokens, model.padded_vocab, model.hidden, copy_rate),
        "attention": layers * attention_seconds(clock, model),
        "elementwise": layers * model.tokens * elementwise_bytes(model) / copy_rate,
        "loss": model.tokens * model.padded_vocab * 2 * 3 / copy_rate,
        "optimizer": model.parameters * 30 / copy_rate,
    }
    return parts, copy_rate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_arguments(parser)
    model = models.from_arguments(parser.parse_args())
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    started = time.time()
    parts, copy_rate = measure(model)
    total = sum(parts.values())
    models.print_result(
        ms=total * 1e3,
        parts_ms={name: seconds * 1e3 for name, seconds in parts.items()},
        copy_tb_per_s=copy_rate / 1e12,
        started=started,
        ended=time.time(),
    )


if __name__ == "__main__":
    main()
