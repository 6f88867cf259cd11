"""Whole runs of pretrain_gpt against a second, plain implementation (plain_*.py) that shares no code with it.

Samples, losses, gradients, norms, schedules, updates, training lines and evaluations. Each step starts from what the
program itself wrote before it, so a difference belongs to the step and part that shows it, and bounds need no room for
drift. Other combinations of options, as many as you like:

    PGPT_PLAIN_TRIALS=200 PGPT_PLAIN_SEED=7 tests/python/run.py test_against_plain
"""

import os
import random
import tempfile
import unittest

try:
    import plain_cases
    import plain_gpt
    import plain_run
    import torch
except ImportError:
    torch = None

SMALL = (
    "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 18 "
    "--vocab-size 61 --make-vocab-size-divisible-by 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --eval-iters 0 --log-interval 1 --num-workers 0 --init-method-std 0.05 --data-path @one "
)
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --group-query-attention --num-query-groups 2 --ffn-hidden-size 80 "
)


@unittest.skipUnless(torch, "torch, numpy or safetensors is not installed; run scripts/setup.sh --with-tests")
class AgainstPlain(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # tensors of a few kilobytes

    def agrees(self, flags, ranks=1):
        run = plain_run.Run(plain_gpt.Options.parse(SMALL + flags), ranks, self.folder)
        run.compare()
        return run

    def test_gpt2_with_one_learning_rate_for_tables_and_another_for_the_rest(self):
        self.agrees(
            "--decoupled-lr 2e-2 --decoupled-min-lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 "
            "--lr-warmup-init 1e-3 --clip-grad 0.3 --eod-mask-loss --reset-position-ids --log-params-norm "
            "--log-num-zeros-in-grad --embedding-init-method-std 0.2"
        )

    def test_llama_with_scaled_rotary_positions_and_a_wsd_schedule(self):
        self.agrees(
            LLAMA + "--use-rope-scaling --rotary-base 500000 --lr-decay-style WSD --lr-wsd-decay-iters 2 "
            "--lr-wsd-decay-style minus_sqrt --adam-beta2 0.95 --weight-decay 0.1 --seq-length 32 "
            "--max-position-embeddings 32 --kv-channels 10"
        )

    def test_norms_of_queries_and_keys_that_decay_gains_and_biases(self):
        self.agrees(
            "--qk-layernorm --apply-wd-to-qk-layernorm --disable-bias-linear --add-qkv-bias "
            "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved "
            "--rotary-seq-len-interpolation-factor 3 --reset-attention-mask "
            "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.6"
        )

    def test_squared_relu_without_positions_by_sgd(self):
        self.agrees(
            "--squared-relu --no-bias-gelu-fusion --position-embedding-type none --apply-layernorm-1p "
            "--norm-epsilon 0.1 --optimizer sgd --sgd-momentum 0.5 --weight-decay 0.2 "
            "--lr-decay-style inverse-square-root --lr-warmup-iters 1"
        )

    def test_quick_geglu_on_samples_cut_at_documents(self):
        self.agrees(
            "--quick-geglu --activation-func-clamp-value 0.2 --glu-linear-offset 1.0 "
            "--dataloader-inter-document-masking --calculate-per-token-loss --null-tokenizer-pad-id 5 "
            "--adam-beta1 0.8 --adam-eps 1e-3 --loss-scale 128 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        )

    def test_xavier_weights_of_local_modules_and_a_shuffling_loader(self):
        local = "--init-method-xavier-uniform --transformer-impl local --dataloader-type cyclic --data-path @two "
        self.agrees(local + "--split 1,1,1 --lr-decay-style constant --num-workers 2")

    def test_xavier_weights_beside_tables_with_a_spread_of_their_own(self):
        self.agrees("--init-method-xavier-uniform --embedding-init-method-std 0.2 --train-iters 1")

    def test_growing_batches_of_a_run_counted_in_samples(self):
        options = plain_gpt.Options.parse(
            SMALL + "--train-samples 18 --lr-decay-samples 14 --lr-warmup-fraction 0.2 --lr-decay-style cosine "
            "--loss-window megatron --log-interval 2"
        )
        options["step-batch-size-schedule"] = f"0:2 {16 * 4}:4"
        for name in ("train-iters", "global-batch-size"):
            del options[name]
        plain_run.Run(options, 1, self.folder).compare()

    def test_gtp_2_with_padded_shards_biases_and_a_tied_table(self):
        run = self.agrees(
            "--tensor-parallel-num-weight-shards 2 --hidden-size 40 --micro-batch-size 1 --log-num-zeros-in-grad", 2
        )
        self.assertGreater(run.padding, 0)

    def test_two_replicas_that_skip_an_iteration_round_batches_and_evaluate(self):
        self.agrees(
            LLAMA + "--overlap-grad-reduce --ddp-bucket-size 2000 --micro-batch-size 1 --global-batch-size 5 "
            "--decrease-batch-size-if-needed --iterations-to-skip 3 --eval-iters 2 --eval-interval 2 "
            "--eval-global-batch-size 4 --split 80,15,5",
            2,
        )

    def test_two_replicas_of_gtp_2_that_count_tokens(self):
        self.agrees(
            "--tensor-parallel-num-weight-shards 2 --weight-init layout-invariant --micro-batch-size 1 --eod-mask-loss "
            "--calculate-per-token-loss --gtp-weight-gradients split --log-params-norm",
            4,
        )

    def test_bf16_with_gtp_2(self):
        self.agrees(LLAMA + "--bf16 --tensor-parallel-num-weight-shards 2 --micro-batch-size 1", 2)

    def test_fp16_that_overflows_until_the_scale_fits(self):
        run = self.agrees(
            "--fp16 --initial-loss-scale 1073741824 --hysteresis 1 --loss-scale-window 2 --train-iters 18 "
            "--log-interval 5 --ffn-hidden-size 48 --num-layers 1"
        )
        skipped = [record["skipped"] for record in run.steps]
        self.assertTrue(skipped[0] and not all(skipped))

    def test_random_combinations_agree(self):
        seed, trials = int(os.environ.get("PGPT_PLAIN_SEED", "1")), int(os.environ.get("PGPT_PLAIN_TRIALS", "4"))
        for trial in range(seed, seed + trials):
            options, ranks = plain_cases.random_case(random.Random(trial))
            with self.subTest(seed=trial, ranks=ranks, options=" ".join(options.words())):
                with tempfile.TemporaryDirectory() as folder:
                    plain_run.Run(options, ranks, folder).compare()

    def test_the_comparison_notices_what_is_not_as_told(self):
        run = self.agrees("--position-embedding-type rope --lr-warmup-iters 1 --eod-mask-loss --clip-grad 0.5")
        for name, value in (
            ("rotary-base", 9000),
            ("norm-epsilon", 1.02e-5),
            ("no-bias-gelu-fusion", True),
            ("eod-mask-loss", None),
            ("seed", 1235),
            ("lr-warmup-init", 1e-6),
            ("lr-decay-style", "cosine"),
            ("clip-grad", 0.50001),
            ("adam-beta1", 0.90001),
            ("adam-beta2", 0.99901),
            ("adam-eps", 1.1e-8),
            ("weight-decay", 0.0101),
            ("calculate-per-token-loss", True),
            ("init-method-std", 0.06),
        ):
            told = run.options[name]
            run.options[name] = value
            with self.subTest(option=name), self.assertRaises(plain_run.Difference):
                run.compare()
            run.options[name] = told


if __name__ == "__main__":
    unittest.main()
