#!/usr/bin/env python3
"""Sketch of the design in Python and Triton: one training step of a Llama-shaped model with explicit forward and
backward, fused kernels, libtorch matrix products, cuDNN attention, fp32 main gradients accumulated inside the products,
one Adam kernel over flat buffers, and the whole step in a CUDA graph.

    scripts/bench/sketch_step.py --model llama-1.3b [--micro-batch-size N] [--warm-up N] [--steps N]

It exists to be outrun: it shows what simple kernels reach. Only untied models with RMSNorm, SwiGLU and as many key as
query heads.
"""

import argparse
import time

import models
import sketch_kernels as kernels
import torch
import triton

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 32  # rows that one program of the norm backward sums


def empty(*shape, dtype=BF16):
    return torch.empty(shape, device="cuda", dtype=dtype)


class Parameters:
    """Flat buffers and named views of weights and main gradients."""

    def __init__(self, model):
        h = model.hidden
        shapes = {"embedding": (model.padded_vocab, h), "output": (model.padded_vocab, h), "final_norm": (h,)}
        for layer in range(model.layers):
            for name, shape in zip(("qkv", "proj", "fc1", "fc2"), model.matrices):
                shapes[f"{name}.{layer}"] = shape
            shapes[f"norm1.{layer}"] = shapes[f"norm2.{layer}"] = (h,)
        self.count = sum(torch.Size(shape).numel() for shape in shapes.values())
        self.flat_weight = torch.zeros(self.count, device="cuda", dtype=BF16)
        self.master, self.m, self.v, self.flat_gradient = (
            torch.zeros(self.count, device="cuda", dtype=FP32) for _ in range(4)
        )
        self.weight, self.gradient, offset = {}, {}, 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            self.weight[name] = self.flat_weight[offset : offset + size].view(shape)
            self.gradient[name] = self.flat_gradient[offset : offset + size].view(shape)
            offset += size
            if len(shape) == 1:
                self.weight[name].fill_(1)
            else:
                self.weight[name].normal_(0, 0.02)
        self.master.copy_(self.flat_weight)


class Step:
    """One training step on fixed inputs; calling it enqueues the step."""

    def __init__(self, model):
        self.model, self.p = model, Parameters(model)
        tokens = model.tokens
        self.ids = torch.randint(0, model.vocab, (tokens,), device="cuda")
        self.labels = torch.randint(0, model.vocab, (tokens,), device="cuda")
        frequency = 1.0 / (10000 ** (torch.arange(0, model.head_dim, 2, device="cuda").float() / model.head_dim))
        angle = torch.outer(torch.arange(model.seq, device="cuda").float(), frequency)
        self.cos, self.sin = angle.cos().contiguous(), angle.sin().contiguous()
        self.loss = empty(tokens, dtype=FP32)
        self.clip = torch.ones(1, device="cuda")
        self.norm_block = triton.next_power_of_2(model.hidden)
        # Tokens whose logits exist at once: half a GiB.
        self.chunk = min(tokens, max(2048, 2**29 // model.padded_vocab // 2 // 1024 * 1024))

    def add_norm(self, x, delta, name):
        m, weight = self.model, self.p.weight[name]
        y, rstd = empty(m.tokens, m.hidden), empty(m.tokens, dtype=FP32)
        add = delta is not None
        out = empty(m.tokens, m.hidden) if add else x
        kernels.add_norm[(m.tokens,)](
            x, delta if add else x, weight, out, y, rstd, m.hidden, self.norm_block, add, num_warps=8
        )
        return out, y, rstd

    def norm_backward(self, dy, x, rstd, skip, name):
        m, weight, parts = self.model, self.p.weight[name], self.model.tokens // ROWS
        dx, dweight = empty(m.tokens, m.hidden), empty(parts, m.hidden, dtype=FP32)
        add = skip is not None
        kernels.norm_backward[(parts,)](
            dy, x, weight, rstd, skip if add else dy, dx, dweight, m.hidden, self.norm_block, ROWS, add, num_warps=8
        )
        self.p.gradient[name] += dweight.sum(0)
        return dx

    def linear(self, x, name):
        return x @ self.p.weight[name].t()

    def linear_backward(self, dy, x, name):
        gradient = self.p.gradient[name]
        torch.addmm(gradient, dy.t(), x, out_dtype=FP32, out=gradient)
        return dy @ self.p.weight[name]

    def layer_forward(self, x, delta, layer):
        m = self.model
        x1, y1, rstd1 = self.add_norm(x, delta, f"norm1.{layer}")
        qkv = self.linear(y1, f"qkv.{layer}")
        kernels.rope[(m.tokens, 2 * m.heads // 8)](qkv, self.cos, self.sin, m.seq, m.heads, m.head_dim, num_warps=4)
        packed = qkv.view(m.micro_batch, m.seq, 3, m.heads, m.head_dim)
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
        out, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        context = out.transpose(1, 2).reshape(m.tokens, m.hidden)
        x2, y2, rstd2 = self.add_norm(x1, self.linear(context, f"proj.{layer}"), f"norm2.{layer}")
        hidden = self.linear(y2, f"fc1.{layer}")
        activated = empty(m.tokens, m.ffn)
        kernels.swiglu[(m.tokens, triton.cdiv(m.ffn, 1024))](hidden, activated, m.ffn, 1024, num_warps=4)
        saved = (x1, y1, rstd1, q, k, v, out, rest, context, x2, y2, rstd2, hidden, activated)
        return x2, self.linear(activated, f"fc2.{layer}"), saved

    def layer_backward(self, gradient, layer, saved):
        m = self.model
        x1, y1, rstd1, q, k, v, out, rest, context, x2, y2, rstd2, hidden, activated = saved
        dactivated = self.linear_backward(gradient, activated, f"fc2.{layer}")
        kernels.swiglu_backward[(m.tokens, triton.cdiv(m.ffn, 1024))](hidden, dactivated, m.ffn, 1024, num_warps=4)
        dy2 = self.linear_backward(hidden, y2, f"fc1.{layer}")
        gradient = self.norm_backward(dy2, x2, rstd2, gradient, f"norm2.{layer}")
        dcontext = self.linear_backward(gradient, context, f"proj.{layer}")
        dout = dcontext.view(m.micro_batch, m.seq, m.heads, m.head_dim).transpose(1, 2)
        lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        )
        assert dq.stride() == dk.stride() == dv.stride(), "the packing kernel takes one set of strides"
        dqkv = empty(m.tokens, 3 * m.hidden)
        kernels.pack_gradient[(m.tokens, 3, m.heads // 8)](
            dq, dk, dv, dqkv, self.cos, self.sin, m.seq, *dq.stride()[:3], m.heads, m.head_dim, num_warps=4
        )
        dy1 = self.linear_backward(dqkv, y1, f"qkv.{layer}")
        return self.norm_backward(dy1, x1, rstd1, gradient, f"norm1.{layer}")

    def head(self, y):
        """Losses, and the gradient of y, a chunk of tokens at a time."""
        m = self.model
        dy = empty(m.tokens, m.hidden)
        for begin in range(0, m.tokens, self.chunk):
            rows = slice(begin, begin + self.chunk)
            logits = self.linear(y[rows], "output")
            kernels.cross_entropy[(logits.shape[0],)](
                logits, self.labels[rows], self.loss[rows], 1.0 / m.tokens, m.padded_vocab, 4096, num_warps=8
            )
            gradient = self.p.gradient["output"]
            torch.addmm(gradient, logits.t(), y[rows], out_dtype=FP32, out=gradient)
            torch.mm(logits, self.p.weight["output"], out=dy[rows])
        return dy

    def update(self):
        p = self.p
        norm = torch.linalg.vector_norm(p.flat_gradient)
        self.clip.copy_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        kernels.adam[(triton.cdiv(p.count, 2048),)](
            p.flat_weight, p.master, p.m, p.v, p.flat_gradient, p.count, self.clip, 2048, num_warps=8
        )

    def __call__(self):
        x, delta, saved = self.p.weight["embedding"][self.ids], None, []
        for layer in range(self.model.layers):
            x, delta, kept = self.layer_forward(x, delta, layer)
            saved.append(kept)
        x, y, rstd = self.add_norm(x, delta, "final_norm")
        gradient = self.norm_backward(self.head(y), x, rstd, None, "final_norm")
        for layer in reversed(range(self.model.layers)):
            gradient = self.layer_backward(gradient, layer, saved.pop())
        self.p.gradient["embedding"].index_add_(0, self.ids, gradient.float())
        self.update()


def time_steps(step, count):
    milliseconds = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return milliseconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_arguments(parser)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="do not capture a graph")
    arguments = parser.parse_args()
    model = models.from_arguments(arguments)
    if model.tied or not model.gated or model.kv_heads != model.heads or model.heads % 8 != 0:
        raise SystemExit("error: the sketch takes untied Llama shapes without grouped queries, heads in multiples of 8")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    step = Step(model)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    run = step
    if not arguments.eager:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    time_steps(run, arguments.warm_up)
    started = time.time()
    step_ms = time_steps(run, arguments.steps)
    models.print_result(
        step_ms=step_ms,
        peak_bytes=torch.cuda.max_memory_allocated(),
        loss=step.loss.mean().item(),
        started=started,
        ended=time.time(),
    )


if __name__ == "__main__":
    main()
