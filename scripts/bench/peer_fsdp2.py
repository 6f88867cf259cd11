#!/usr/bin/env python3
"""Peer: the same model trained by PyTorch FSDP2 (fully_shard): bf16 compute, fp32 parameters and reduction, fused
AdamW, gradient clipping, torch.compile of each block.

    torchrun --nproc-per-node N scripts/bench/peer_fsdp2.py --model llama-1.3b [--micro-batch-size N] [--compile]

Tokens are uniform over the vocabulary. One micro-batch a step and rank.
"""

import argparse
import os
import time

import models
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """One layer: RMSNorm, rotary positions and SwiGLU, or LayerNorm, biases and tanh GELU."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        h, d, bias = model.hidden, model.head_dim, model.biases
        norm = nn.RMSNorm if model.gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(h), norm(h)
        self.qkv = nn.Linear(h, (model.heads + 2 * model.kv_heads) * d, bias=bias)
        self.proj = nn.Linear(model.heads * d, h, bias=bias)
        self.fc1 = nn.Linear(h, (2 if model.gated else 1) * model.ffn, bias=bias)
        self.fc2 = nn.Linear(model.ffn, h, bias=bias)

    def attention(self, x, cos, sin):
        m, d = self.model, self.model.head_dim
        b, s, _ = x.shape
        sizes = [m.heads * d, m.kv_heads * d, m.kv_heads * d]
        q, k, v = (part.view(b, s, -1, d).transpose(1, 2) for part in self.qkv(x).split(sizes, -1))
        if m.positions == 0:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m.kv_heads != m.heads)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))

    def feed_forward(self, x):
        if not self.model.gated:
            return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embedding = nn.Embedding(model.padded_vocab, model.hidden)
        self.positions = nn.Embedding(model.positions, model.hidden) if model.positions else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.final_norm = (nn.RMSNorm if model.gated else nn.LayerNorm)(model.hidden)
        self.output = nn.Linear(model.hidden, model.padded_vocab, bias=False)
        if model.tied:
            self.output.weight = self.embedding.weight
        frequency = 1.0 / (10000 ** (torch.arange(0, model.head_dim, 2).float() / model.head_dim))
        angle = torch.outer(torch.arange(model.seq).float(), frequency)
        angle = torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos().bfloat16(), False)
        self.register_buffer("sin", angle.sin().bfloat16(), False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.output(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(model, compiled):
    with torch.device("cuda"):
        gpt = Gpt(model)
    for parameter in gpt.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.02)
    if compiled:
        for index, block in enumerate(gpt.blocks):
            gpt.blocks[index] = torch.compile(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in gpt.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(gpt, mp_policy=policy)
    return gpt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models.add_arguments(parser)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    model = models.from_arguments(arguments)

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    gpt = build(model, arguments.compile)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4, fused=True, weight_decay=0.1)
    tokens = torch.randint(0, model.vocab, (model.micro_batch, model.seq + 1), device="cuda")
    step_ms, started = [], 0.0
    for step in range(arguments.warm_up + arguments.steps):
        torch.cuda.synchronize()
        begin = time.time()
        if step == arguments.warm_up:
            started = begin
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            loss = gpt(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        step_ms.append((time.time() - begin) * 1e3)
    if dist.get_rank() == 0:
        models.print_result(
            step_ms=step_ms[arguments.warm_up :],
            peak_bytes=torch.cuda.max_memory_allocated(),
            loss=loss.item(),
            started=started,
            ended=time.time(),
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
