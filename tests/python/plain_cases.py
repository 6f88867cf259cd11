"""Random combinations of the options that dense models support."""

import plain_gpt

# They choose rounding points and kernels, not formulas.
SAME_NUMBERS = (
    "no-bias-swiglu-fusion",
    "no-bias-dropout-fusion",
    "no-rope-fusion",
    "no-masked-softmax-fusion",
    "no-gradient-accumulation-fusion",
    "cross-entropy-loss-fusion",
    "attention-softmax-in-fp32",
    "no-persist-layer-norm",
    "accumulate-allreduce-grads-in-fp32",
    "apply-query-key-layer-scaling",
)


def random_case(draw):
    """Options that the program supports together, and the number of ranks."""
    pick, maybe = draw.choice, lambda chance=0.3: draw.random() < chance
    heads = pick([2, 3, 4, 6])
    o = plain_gpt.Options({"num-layers": pick([1, 2, 2, 3]), "num-attention-heads": heads})
    o["hidden-size"] = heads * pick([8, 12, 16])
    o["seq-length"] = pick([13, 16, 24, 32])
    hidden = o["hidden-size"]
    o["max-position-embeddings"] = o["seq-length"] + pick([0, 0, 3])
    o["vocab-size"] = 61
    if maybe(0.15):
        o["no-pad-vocab-size"] = True
    elif maybe(0.15):
        o["padded-vocab-size"] = 67
    else:
        o["make-vocab-size-divisible-by"] = pick([1, 8, 16, 128])
    if maybe():
        o["kv-channels"] = pick([6, 8, 10, 20])
    if maybe(0.4):
        o["group-query-attention"] = True
        o["num-query-groups"] = pick([g for g in range(1, heads + 1) if heads % g == 0])
    kind = pick(["gelu", "gelu", "swiglu", "swiglu", "squared-relu", "quick-geglu"])
    if kind != "gelu":
        o[kind] = True
    if kind == "quick-geglu":
        # An activation within a rounding of the clamp gets its gradient on one side only: one run in a hundred.
        if maybe(0.3):
            o["activation-func-clamp-value"] = pick([0.2, 1.0])
        if maybe(0.5):
            o["glu-linear-offset"] = pick([1.0, -0.3])
    if kind != "swiglu" or 4 * hidden * 2 / 3 < 64 or maybe():
        o["ffn-hidden-size"] = pick([24, 48, 80])
    if maybe(0.4):
        o["disable-bias-linear"] = True
        if maybe(0.4):
            o["add-qkv-bias"] = True
    if (kind == "squared-relu" and not o["disable-bias-linear"]) or maybe(0.15):
        o["no-bias-gelu-fusion"] = True
    for name in SAME_NUMBERS:
        if maybe(0.12):
            o[name] = True
    if maybe(0.15):
        o["attention-backend"] = pick(["flash", "fused", "unfused"])
    if maybe(0.15):
        o["transformer-impl"] = "local"
    if maybe(0.1):
        o["recompute-granularity"] = "selective"
        o["recompute-modules"] = draw.sample(["core_attn", "layernorm", "mlp"], draw.randrange(1, 4))
    elif maybe(0.1):
        o.update({"recompute-granularity": "full", "recompute-method": pick(["uniform", "block"])})
        o["recompute-num-layers"] = 1
    if maybe(0.5):
        o["normalization"] = "RMSNorm"
    if maybe(0.5):
        o["norm-epsilon"] = pick([1e-6, 1e-3, 0.1])
    if maybe() and o["transformer-impl"] != "local":
        o["apply-layernorm-1p"] = True
    if maybe():
        o["qk-layernorm"] = True
        if maybe(0.4):
            o["apply-wd-to-qk-layernorm"] = True
    positions = pick(["learned", "rope", "rope", "none"])
    if positions == "rope":
        if maybe(0.3):
            o["use-rotary-position-embeddings"] = True
            if maybe(0.5):
                o["no-position-embedding"] = True
        else:
            o["position-embedding-type"] = "rope"
        if maybe(0.4):
            o["rotary-percent"] = pick([0.5, 0.25, 0.75])
            if int(o.head_size() * o["rotary-percent"]) % 2 or not int(o.head_size() * o["rotary-percent"]):
                o["rotary-percent"] = 1.0
        if maybe(0.4):
            o["rotary-base"] = pick([100, 500000, 7])
        if maybe(0.3):
            o["rotary-interleaved"] = True
        if maybe(0.3):
            o["rotary-seq-len-interpolation-factor"] = pick([2, 5])
        if maybe(0.3):
            o["use-rope-scaling"] = True
            o["rotary-base"] = 500000
    elif positions == "none":
        o["position-embedding-type"] = "none"
    if maybe(0.5):
        o["untie-embeddings-and-output-weights"] = True
    o["init-method-std"] = pick([0.02, 0.05, 0.1])
    if maybe():
        o["embedding-init-method-std"] = pick([0.03, 0.2])
    if maybe(0.15):
        o["init-method-xavier-uniform"] = True
    if maybe(0.15):
        o["use-cpu-initialization"] = True
    o["seed"] = draw.randrange(1, 5000)

    ranks = pick([1, 1, 1, 2, 2, 4])
    gtp = ranks == 4 or (ranks == 2 and maybe(0.6))
    if ranks > 1:
        if maybe(0.5):
            o["weight-init"] = "layout-invariant"
        if gtp:
            o["tensor-parallel-num-weight-shards"] = pick([2, ranks])
            if maybe(0.2):
                o["gtp-remat-reduce-scatter-with-fp32-accumulation"] = True
            if maybe(0.2):
                o["gtp-communicators"] = 1
            if maybe(0.3):
                o["no-gtp-prefetch"] = True
            if maybe(0.3):
                o["no-gtp-async-reduce-scatter"] = True
            if maybe(0.3):
                o["gtp-weight-gradients"] = "split"
            if maybe(0.3):
                o["gtp-keep-gathered-layers"] = 1
        if o["tensor-parallel-num-weight-shards"] != ranks and maybe(0.3):
            o["overlap-grad-reduce"] = True
            if maybe(0.5):
                o["ddp-bucket-size"] = 2000
    precision = pick(["fp32"] * 6 + ["bf16", "fp16"])
    if precision != "fp32":
        o[precision] = True
        o["init-method-std"] = 0.05
        if maybe(0.2):
            o["fp32-residual-connection"] = True
        if maybe(0.2):
            o["grad-reduce-in-bf16"] = True
            o.pop("accumulate-allreduce-grads-in-fp32", None)
        if precision == "fp16":
            if maybe(0.3):
                o["loss-scale"] = pick([64, 1024])
            else:
                o["initial-loss-scale"] = pick([2**30, 2**16, 1024])
                if maybe(0.5):
                    o["loss-scale-window"] = 2
                if maybe(0.5):
                    o["hysteresis"] = pick([1, 3])
    o["micro-batch-size"] = pick([1, 2, 3])
    unit = o["micro-batch-size"] * ranks
    if maybe(0.9):
        o["global-batch-size"] = unit * pick([1, 2, 3])
    size = o["global-batch-size"] or unit
    if maybe(0.15) and o["global-batch-size"]:
        o["global-batch-size"] = size = size + (unit - 1)
        o["decrease-batch-size-if-needed"] = True
    iterations = pick([3, 4, 5])
    samples = maybe(0.25)
    if samples:
        o["train-samples"] = iterations * size + pick([0, 0, 1])
        if maybe(0.5) and not o["decrease-batch-size-if-needed"]:
            o.pop("global-batch-size", None)
            o["step-batch-size-schedule"] = f"0:{unit} {unit * 2 * o['seq-length'] + 3}:{2 * unit}"
            o["train-samples"] = unit * pick([8, 9])
        if maybe(0.5):
            o["lr-decay-samples"] = pick([3, 8, 12, 30])
        if maybe(0.4):
            o["lr-warmup-samples"] = pick([1, 2])
    else:
        o["train-iters"] = iterations
        if maybe(0.5):
            o["lr-decay-iters"] = pick([2, 3, 6])
        if maybe(0.5):
            o["lr-warmup-iters"] = pick([1, 1, 2]) if (o["lr-decay-iters"] or 9) > 2 else 1
    if maybe(0.2):
        for name in ("lr-warmup-iters", "lr-warmup-samples"):
            o.pop(name, None)
        o["lr-warmup-fraction"] = pick([0.1, 0.35, 0.5])
    o["lr"] = pick([1e-3, 1e-2, 3e-2])
    if maybe():
        o["lr-warmup-init"] = o["lr"] * pick([0.1, 0.5])
    if maybe(0.5):
        o["min-lr"] = o["lr"] * pick([0.1, 0.3])
    style = pick(["linear", "cosine", "constant", "inverse-square-root", "WSD", None])
    if style:
        o["lr-decay-style"] = style
    if style == "WSD":
        o["lr-wsd-decay-" + ("samples" if samples else "iters")] = pick([1, 2])
        o["lr-wsd-decay-style"] = pick(["exponential", "linear", "cosine", "minus_sqrt"])
    if maybe(0.2):
        o["decoupled-lr"] = o["lr"] * pick([0.5, 2])
        if maybe(0.5):
            o["decoupled-min-lr"] = o["lr"] * 0.2
    if maybe(0.25):
        o["optimizer"] = "sgd"
        if maybe(0.6):
            o["sgd-momentum"] = pick([0.0, 0.5])
    else:
        if maybe():
            o["adam-beta1"] = pick([0.0, 0.8, 0.95])
        if maybe():
            o["adam-beta2"] = pick([0.95, 0.5, 0.99])
        if maybe():
            o["adam-eps"] = pick([1e-5, 1e-15, 1e-3])
    if maybe(0.5):
        o["weight-decay"] = pick([0.0, 0.1, 0.5])
    if maybe(0.25):
        o["weight-decay-incr-style"] = pick(["linear", "cosine"])
        o["start-weight-decay"], o["end-weight-decay"] = pick([(0.0, 0.4), (0.1, 0.2)])
    if maybe(0.6):
        o["clip-grad"] = pick([0.0, 0.3, 100.0])
    o["log-interval"] = pick([1, 1, 2, 3])
    if maybe():
        o["loss-window"] = "megatron"
    if precision != "fp16" and maybe(0.1):
        o["loss-scale"] = 128
    for name in ("calculate-per-token-loss", "log-params-norm", "log-num-zeros-in-grad"):
        if maybe(0.25):
            o[name] = True

    o["data-path"] = pick(["@one", "@two"])
    if maybe(0.4):
        o["split"] = pick(["80,15,5", "100", "1,1,1", "0.7,0.2,0.1"])
    if maybe(0.3):
        o["dataloader-type"] = "cyclic"
        if maybe():
            o["no-data-sharding"] = True
    if maybe():
        o["eod-mask-loss"] = True
    if maybe(0.2):
        o["null-tokenizer-eod-id"] = pick([7, 60])
    if maybe(0.2):
        o["null-tokenizer-pad-id"] = pick([5, 60])
        if maybe(0.5):
            o["allow-ambiguous-pad-tokens"] = True
    if maybe(0.15):
        o["dataloader-inter-document-masking"] = True
    else:
        if maybe(0.3):
            o["reset-position-ids"] = True
        if maybe(0.3):
            o["reset-attention-mask"] = True
        if maybe(0.1):
            o["no-create-attention-mask-in-dataloader"] = True
    o["num-workers"] = pick([0, 2])
    if maybe(0.15) and not samples:
        o["iterations-to-skip"] = draw.randrange(2, iterations + 1)
    o["eval-iters"] = 0
    if maybe(0.2) and o["split"] not in ("100", "969, 30, 1") and not o["step-batch-size-schedule"]:
        o["eval-iters"], o["eval-interval"] = pick([1, 2]), pick([2, 3])
        if maybe(0.4):
            o["eval-micro-batch-size"] = 1
            o["eval-global-batch-size"] = ranks * pick([1, 3])
        elif o["decrease-batch-size-if-needed"]:
            o["eval-global-batch-size"] = unit
    return o, ranks
