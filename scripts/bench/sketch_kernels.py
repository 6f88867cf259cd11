"""Triton kernels of sketch_step.py: fused residual and RMSNorm, rotary positions in the packed layout, SwiGLU, cross
entropy in place, Adam over flat buffers. One program handles one row (token) unless said otherwise."""

import triton
import triton.language as tl


@triton.jit
def add_norm(x, delta, weight, out_x, y, rstd, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """out_x = x + delta (with ADD), y = RMSNorm(out_x)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < H
    value = tl.load(x + row * H + c, inside, 0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(delta + row * H + c, inside, 0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(out_x + row * H + c, value, inside)
        value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / H + 1e-5)
    gain = tl.load(weight + c, inside, 0.0).to(tl.float32)
    tl.store(y + row * H + c, (value * scale * gain).to(tl.bfloat16), inside)
    tl.store(rstd + row, scale)


@triton.jit
def norm_backward(
    dy, x, weight, rstd, skip, dx, dweight, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr
):
    """dx = gradient through RMSNorm (+ skip with ADD); one program sums its ROWS rows of dweight [parts, H]."""
    part = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < H
    total = tl.zeros((BLOCK,), tl.float32)
    gain = tl.load(weight + c, inside, 0.0).to(tl.float32)
    for i in range(ROWS):
        row = (part * ROWS + i).to(tl.int64)
        value = tl.load(x + row * H + c, inside, 0.0).to(tl.float32)
        gradient = tl.load(dy + row * H + c, inside, 0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normal = value * scale
        total += gradient * normal
        gained = gradient * gain
        mean = tl.sum(gained * normal, 0) / H
        out = scale * (gained - normal * mean)
        if ADD:
            out += tl.load(skip + row * H + c, inside, 0.0).to(tl.float32)
        tl.store(dx + row * H + c, out.to(tl.bfloat16), inside)
    tl.store(dweight + part * H + c, total, inside)


@triton.jit
def rope(qkv, cos, sin, S, NH: tl.constexpr, D: tl.constexpr):
    """Rotates queries and keys of the packed [T, 3*NH*D] in place; one program handles 8 heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * 8 + tl.arange(0, 8)
    position = token % S
    c = tl.arange(0, D // 2)
    co = tl.load(cos + position * (D // 2) + c)[None, :]
    si = tl.load(sin + position * (D // 2) + c)[None, :]
    first = qkv + token * 3 * NH * D + head[:, None] * D + c[None, :]
    a = tl.load(first).to(tl.float32)
    b = tl.load(first + D // 2).to(tl.float32)
    tl.store(first, (a * co - b * si).to(tl.bfloat16))
    tl.store(first + D // 2, (b * co + a * si).to(tl.bfloat16))


@triton.jit
def pack_gradient(
    dq, dk, dv, out, cos, sin, S, batch_stride, head_stride, position_stride, NH: tl.constexpr, D: tl.constexpr
):
    """Gradients of q, k and v into the packed layout; those of q and k are turned back."""
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    head = tl.program_id(2) * 8 + tl.arange(0, 8)
    position = token % S
    batch = token // S
    c = tl.arange(0, D // 2)
    source = dq if which == 0 else (dk if which == 1 else dv)
    first = source + batch * batch_stride + head[:, None] * head_stride + position * position_stride + c[None, :]
    a = tl.load(first).to(tl.float32)
    b = tl.load(first + D // 2).to(tl.float32)
    if which < 2:
        co = tl.load(cos + position * (D // 2) + c)[None, :]
        si = tl.load(sin + position * (D // 2) + c)[None, :]
        turned = a * co + b * si
        b = b * co - a * si
        a = turned
    target = out + token * 3 * NH * D + which * NH * D + head[:, None] * D + c[None, :]
    tl.store(target, a.to(tl.bfloat16))
    tl.store(target + D // 2, b.to(tl.bfloat16))


@triton.jit
def swiglu(x, y, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < F
    gate = tl.load(x + row * 2 * F + c, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + c, inside, 0.0).to(tl.float32)
    tl.store(y + row * F + c, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), inside)


@triton.jit
def swiglu_backward(x, dy, F: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient takes the place of x."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < F
    gate = tl.load(x + row * 2 * F + c, inside, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + c, inside, 0.0).to(tl.float32)
    gradient = tl.load(dy + row * F + c, inside, 0.0).to(tl.float32)
    sig = tl.sigmoid(gate)
    tl.store(x + row * 2 * F + c, (gradient * up * sig * (1 + gate * (1 - sig))).to(tl.bfloat16), inside)
    tl.store(x + row * 2 * F + F + c, (gradient * gate * sig).to(tl.bfloat16), inside)


@triton.jit
def cross_entropy(logits, labels, loss, scale, V: tl.constexpr, BLOCK: tl.constexpr):
    """Loss of a row; its logits become their gradient times `scale`."""
    row = tl.program_id(0).to(tl.int64)
    largest = -1e30
    total = 0.0
    for i in range(0, V, BLOCK):
        c = i + tl.arange(0, BLOCK)
        value = tl.load(logits + row * V + c, c < V, -1e30).to(tl.float32)
        new = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(value - new), 0)
        largest = new
    label = tl.load(labels + row)
    tl.store(loss + row, tl.log(total) + largest - tl.load(logits + row * V + label).to(tl.float32))
    for i in range(0, V, BLOCK):
        c = i + tl.arange(0, BLOCK)
        value = tl.load(logits + row * V + c, c < V, 0.0).to(tl.float32)
        probability = tl.exp(value - largest) / total - tl.where(c == label, 1.0, 0.0)
        tl.store(logits + row * V + c, (probability * scale).to(tl.bfloat16), c < V)


@triton.jit
def adam(weight, master, m, v, gradient, count, scale, BLOCK: tl.constexpr):
    """AdamW over flat buffers; clears the gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gradient + at, inside, 0.0) * tl.load(scale)
    first = 0.9 * tl.load(m + at, inside, 0.0) + 0.1 * g
    second = 0.95 * tl.load(v + at, inside, 0.0) + 0.05 * g * g
    value = tl.load(master + at, inside, 0.0) * (1 - 3e-5) - 3e-4 * (first / (tl.sqrt(second) + 1e-8))
    tl.store(m + at, first, inside)
    tl.store(v + at, second, inside)
    tl.store(master + at, value, inside)
    tl.store(weight + at, value.to(tl.bfloat16), inside)
    tl.store(gradient + at, tl.zeros((BLOCK,), tl.float32), inside)
