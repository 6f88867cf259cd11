#!/usr/bin/env python3
"""The calls of the speed floor in the order of a training step: what is left of the floor at a step's own clocks.

    scripts/bench/replay.py --model llama-7b [--micro-batch-size N] [--optimizer-share 0.5] [--warm-up 10] [--steps 20]

floor.py times each call in a short burst. A chip at its power limit holds one clock over a whole step, so that calls
which draw little are as slow as its hungriest ones. Here the same matrix products, attention calls and, as copies, bytes
of elementwise, loss and optimizer kernels run back to back in the order of a step, `--warm-up` steps before the measured
ones; no data depends on other data and nothing communicates. Under torchrun each rank measures its own GPU.
"""

import argparse
import os
import time

import floor
import models
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

COPY_BYTES = 2**30  # read and written by one copy


class Step:
    """One step's calls. Every layer uses the same weights, which do not fit a cache."""

    def __init__(self, model, optimizer_share):
        self.model, self.optimizer_share = model, optimizer_share
        random = floor.Clock.random
        shapes = [*model.matrices, (model.padded_vocab, model.hidden)]
        self.x = [random(model.tokens, columns) for _, columns in shapes]
        self.dy = [random(model.tokens, rows) for rows, _ in shapes]
        self.weights = [random(rows, columns).mul_(0.02) for rows, columns in shapes]
        self.main = [torch.zeros(rows, columns, device="cuda") for rows, columns in shapes]
        heads = [model.heads, model.kv_heads, model.kv_heads]
        self.qkv = [random(model.micro_batch, h, model.seq, model.head_dim, grad=True) for h in heads]
        self.dout = random(model.micro_batch, model.heads, model.seq, model.head_dim)
        self.source = random(COPY_BYTES // 4)  # moving zeros would draw a third less power
        self.target = torch.empty_like(self.source)

    def move(self, size):
        """Copies that read and write `size` bytes together."""
        while size > 0:
            part = min(int(size) // 4 + 1, self.source.numel())
            self.target[:part].copy_(self.source[:part])
            size -= 4 * part

    def forward(self, index):
        self.x[index] @ self.weights[index].t()

    def backward(self, index):
        self.dy[index] @ self.weights[index]
        torch.addmm(self.main[index], self.dy[index].t(), self.x[index], out_dtype=torch.float32)

    def __call__(self):
        model, output = self.model, len(self.weights) - 1
        grouped = model.kv_heads != model.heads
        elementwise = model.tokens * floor.elementwise_bytes(model)
        outs = []
        for _ in range(model.layers):
            self.forward(0)
            outs.append(F.scaled_dot_product_attention(*self.qkv, is_causal=True, enable_gqa=grouped))
            for index in range(1, output):
                self.forward(index)
            self.move(elementwise * 0.4)
        self.forward(output)
        self.move(model.tokens * model.padded_vocab * 2 * 3)
        self.backward(output)
        for out in reversed(outs):
            self.move(elementwise * 0.6)
            for index in range(output - 1, 0, -1):
                self.backward(index)
            torch.autograd.grad(out, self.qkv, self.dout)
            self.backward(0)
        self.move(model.parameters * 30 * self.optimizer_share)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_arguments(parser)
    parser.add_argument("--optimizer-share", type=float, default=1.0, help="share of the weights that a rank updates")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    model = models.from_arguments(arguments)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    step = Step(model, arguments.optimizer_share)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        for _ in range(arguments.warm_up):
            step()
        torch.cuda.synchronize()
        started = time.time()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(arguments.steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
    step_ms = [first.elapsed_time(second) for first, second in zip(events, events[1:])]
    models.print_result(step_ms=step_ms, started=started, ended=time.time())


if __name__ == "__main__":
    main()
