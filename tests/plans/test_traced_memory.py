"""Traced memory of ranks against whole steps of them, and the estimate of it against the trace.

A trace runs few layers and microbatches of a stage. Here the first rank of every stage takes a second step, whole, on
fake tensors, by the code of a run; what exists at its peak is counted storage by storage.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.models.outline import outline
from megacore.plan.memory import plan_memory
from megacore.tracer import dry_run
from megacore.tracer.dry_run import RankReport, run_rank
from megacore.tracer.fake_job import absent_accelerator
from tests.distributed import run_distributed
from tests.plans.published import traced

# Models with more blocks than are traced, and small ones with every kind of block, layout and optimizer.
LLAMA = "--preset llama-3-8b --precision bf16 --num-layers 6 --seq-length 2048 --vocab-size 32000"
MIXTURE = "--preset qwen3-30b-a3b --precision bf16 --num-layers 6 --seq-length 1024"
_SMALL = (
    "--hidden-size 256 --num-attention-heads 4 --num-layers 4 --vocab-size 1024 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --bucket-size-mb 0.02"
)
GPT = f"{_SMALL} --precision fp32"
BF16 = f"{_SMALL} --precision bf16"
BERT = f"bert {GPT}"
TABLE = "--num-attention-heads 8 --vocab-size 8192 --seq-length 64"
TWO_TABLES = f"{TABLE} --untie-embeddings-and-output-weights"
UPDATED = f"{BF16} {TABLE} --vocab-size 32768 --micro-batch-size 1 --global-batch-size 4"
GATED = "--normalization RMSNorm --activation swiglu --disable-bias-linear --position-embedding-type rope"
EXPERTS = "--num-experts 8 --activation swiglu --disable-bias-linear"
LATENT = (
    f"{GATED} --multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-nope-head-dim 32 --qk-rope-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm"
)
SCORES = f"{BF16} --attention fused-softmax --num-layers 2 --num-attention-heads 16 --seq-length 512"
HOST = f"{BF16} --offload-activations --micro-batch-size 8 --global-batch-size 48"

DEFAULT = {
    "ZeRO 3": f"{LLAMA} --dp 4 --zero-stage 3 --global-batch-size 20",
    "activations in host memory, stages of one block": f"{HOST} --pp 2 --schedule interleaved --virtual-stages 2",
    "experts of one rank, tp 2, gradients anew": (
        f"{BF16} {GATED} {EXPERTS} --tp 2 --dp 4 --ep 4 --zero-stage 3 --micro-batch-size 1 --global-batch-size 4"
    ),
}
SLOW = {
    "1F1B": f"{LLAMA} --num-layers 8 --pp 2 --tp 2 --global-batch-size 5 --schedule 1f1b",
    "GPipe": f"{GPT} --pp 2 --schedule gpipe",
    "experts, ZeRO 1": f"{GPT} {EXPERTS} --dp 4 --ep 2 --zero-stage 1 --micro-batch-size 1",
    # Many blocks.
    "dense": f"{LLAMA} --global-batch-size 4",
    "ZeRO 1, tp 2": f"{LLAMA} --dp 4 --zero-stage 1 --tp 2 --global-batch-size 16",
    "ZeRO 2, one microbatch": f"{LLAMA} --dp 2 --zero-stage 2 --global-batch-size 2",
    "zero bubble, tp 2": f"{LLAMA} --pp 2 --tp 2 --global-batch-size 5 --schedule zero-bubble",
    "recomputed pattern": (
        f"{LLAMA} --recompute full --recompute-num-layers 5 --attention-pattern w,f --window-size 512 "
        "--global-batch-size 2"
    ),
    "small layers": (
        f"{LLAMA} --hidden-size 512 --ffn-hidden-size 1024 --dp 64 --zero-stage 2 --global-batch-size 320"
    ),
    "light, 1F1B": f"{LLAMA} --recompute light --pp 2 --global-batch-size 4 --schedule 1f1b",
    "state in host memory": f"{LLAMA} --offload-optimizer --dp 2 --zero-stage 1 --global-batch-size 4",
    "many experts, ZeRO 1": f"{MIXTURE} --dp 4 --ep 4 --zero-stage 1 --global-batch-size 8",
    # Schedules: backwards of several stages and in halves.
    "interleaved, logits on one stage only": (
        f"{GPT} --pp 2 --schedule interleaved --virtual-stages 2 --num-layers 8 --vocab-size 8192 --seq-length 256"
    ),
    "interleaved, tied table, ZeRO 3": (
        f"{BF16} {TABLE} --pp 2 --dp 2 --schedule interleaved --virtual-stages 2 --zero-stage 3 --recompute full "
        "--micro-batch-size 1"
    ),
    "zero bubble, one stage": f"{BF16} {TABLE} --schedule zero-bubble",
    "zero bubble, light": f"{BF16} --pp 2 --schedule zero-bubble --recompute light --global-batch-size 16",
    "zero bubble, recomputed, which is 1F1B": f"{BF16} --pp 2 --schedule zero-bubble --recompute full",
    "zero bubble, a block of each stage recomputed": (
        f"{BF16} --pp 2 --schedule zero-bubble --num-layers 8 --recompute full --recompute-num-layers 1"
    ),
    "zero bubble, tied table, bf16 sums, ZeRO 2": (
        f"{BF16} {TABLE} --pp 2 --dp 2 --schedule zero-bubble --zero-stage 2 --grad-reduce-dtype bf16 "
        "--micro-batch-size 4 --global-batch-size 32"
    ),
    # Shards, and buckets that are unequal.
    "ZeRO 3, shards of 2": f"{GPT} --dp 4 --zero-stage 3 --zero-shard-size 2 --micro-batch-size 1",
    "tp 2, sequence parallel, ZeRO 3, zero bubble": (
        f"{GPT} --tp 2 --pp 2 --dp 2 --sequence-parallel --zero-stage 3 --schedule zero-bubble"
    ),
    "two tables, ZeRO 2": f"{GPT} {TWO_TABLES} --dp 2 --zero-stage 2 --micro-batch-size 8 --global-batch-size 64",
    "tied table and positions, ZeRO 3": f"{BF16} {TABLE} --dp 2 --zero-stage 3 --micro-batch-size 1",
    "tied table, tp 2, ZeRO 3, gradients anew": (
        f"{BF16} {GATED} {TABLE} --tp 2 --dp 3 --zero-stage 3 --micro-batch-size 1 --global-batch-size 3"
    ),
    "table of the last stage, recomputed, ZeRO 3": (
        f"{BF16} {TABLE} --vocab-size 32768 --pp 2 --dp 2 --zero-stage 3 --recompute full"
    ),
    "tied table, bf16 sums, ZeRO 2": f"{BF16} {TABLE} --dp 4 --zero-stage 2 --grad-reduce-dtype bf16",
    "loss in two chunks": (
        f"{GPT} {TWO_TABLES} --vocab-size 32768 --loss-chunks 2 --micro-batch-size 8 --global-batch-size 16 "
        "--optimizer sgd"
    ),
    # Tensor parallelism and divided sequences.
    "tp 2, recomputed": f"{GPT} --tp 2 --no-sequence-parallel --recompute full",
    "tp 2, canonical blocks": f"{BF16} --tp 2 --reproducible",
    "inputs of blocks in shards": (
        f"{BF16} --tp 4 --no-sequence-parallel --recompute full --distribute-saved-activations --num-layers 8"
    ),
    "cp 2, canonical blocks": f"{GPT} --cp 2 --reproducible --micro-batch-size 4",
    "cp 4, ring, recomputed, pp 2": (
        f"{BF16} --pp 2 --cp 4 --cp-comm ring --recompute full --micro-batch-size 8 --global-batch-size 32 "
        "--vocab-size 512 --schedule 1f1b --seq-length 256"
    ),
    "cp 2, allgather, tp 2, selective": (
        f"{GPT} --cp 2 --cp-comm allgather --tp 2 --sequence-parallel --recompute selective --num-query-groups 2"
    ),
    "cp 2, Ulysses, pp 2": f"{BF16} --pp 2 --cp 2 --cp-comm ulysses --micro-batch-size 8 --global-batch-size 32",
    # Experts.
    "experts, recomputed, ZeRO 3": (
        f"{GPT} {EXPERTS} --dp 2 --ep 2 --zero-stage 3 --recompute full --moe-aux-loss-coeff 0.01"
    ),
    "shared expert, dense first block, tp 2": (
        f"{GPT} {EXPERTS} --tp 2 --moe-shared-expert-size 64 --moe-shared-expert-gate --moe-first-dense-layers 1"
    ),
    "whole experts, tp 2": f"{GPT} {EXPERTS} --tp 2 --sequence-parallel --ep 2 --etp 1 --recompute full",
    "experts, zero bubble": f"{GPT} {EXPERTS} --pp 2 --dp 2 --ep 2 --schedule zero-bubble",
    "rows of experts, ZeRO 2": (
        f"{BF16} --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64 --disable-bias-linear --vocab-size 512 "
        "--dp 4 --ep 2 --zero-stage 2 --micro-batch-size 8 --global-batch-size 64 --seq-length 64"
    ),
    "wide experts, light": (
        f"{BF16} {EXPERTS} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --vocab-size 512 --dp 4 "
        "--ep 2 --zero-stage 2 --recompute light --micro-batch-size 8 --global-batch-size 32 --seq-length 64"
    ),
    # What attention keeps.
    "scores, both dropouts": f"{SCORES} --pp 2 --attention-dropout 0.1 --hidden-dropout 0.1",
    "scores, ALiBi": f"{SCORES} --position-embedding-type alibi",
    "scores, grouped queries, light": (
        f"{SCORES} --num-attention-heads 4 --num-query-groups 1 --position-embedding-type rope --recompute light"
    ),
    "tiles of scores, soft caps": f"{GPT} --attn-logit-softcapping 50 --final-logit-softcapping 30 --seq-length 1024",
    "packed": f"{GPT} --pp 2 --reset-attention-mask --reset-position-ids",
    # What is in host memory.
    "activations in host memory, 1F1B, ZeRO 2": (
        f"{HOST} --pp 2 --dp 2 --schedule 1f1b --zero-stage 2 --hidden-dropout 0.1 --global-batch-size 80"
    ),
    "activations in host memory, a last stage of one block": f"{HOST} --pp 4 --num-layers 7 --schedule 1f1b",
    "activations in host memory, zero bubble": f"{HOST} --pp 4 --tp 2 --num-layers 8 --schedule zero-bubble",
    "activations in host memory, tied table, ZeRO 3": f"{HOST} {TABLE} --dp 2 --zero-stage 3 --micro-batch-size 4",
    "optimizer in host memory, bf16 sums": (
        f"{UPDATED} --offload-optimizer --grad-reduce-dtype bf16 --global-batch-size 1"
    ),
    # Blocks.
    "latent attention, experts": (
        f"{BF16} {LATENT} --tp 2 --dp 2 --sequence-parallel --num-experts 8 --ep 4 --etp 1 --zero-stage 1"
    ),
    "parallel blocks of one norm, light": (f"{GPT} --parallel-residual --shared-parallel-norm --recompute light"),
    "four norms": f"{BF16} --norm-placement both --normalization RMSNorm --activation geglu-exact",
    "norms without weights after the layers, clipping": (
        f"{BF16} --norm-placement after --no-norm-affine --clip-qkv 8 --position-embedding-type rope"
    ),
    "squared ReLU, muP, soft caps, recomputed": (
        f"{BF16} --activation relu2 --mup-base-width 64 --attn-logit-softcapping 50 --recompute full"
    ),
    "BERT, tp 2, light": f"{BERT} --tp 2 --sequence-parallel --recompute light",
    "BERT, bf16, no sentence task": f"{BERT} --precision bf16 --sentence-task none --dp 2 --zero-stage 2",
    "ModernBERT, pp 2, dp 2": f"{BERT} --bert-style modern --pp 2 --dp 2",
    # Optimizers: updates that take more than the backward before, and matrices that are taken whole.
    "average, ZeRO 2": f"{BF16} --ema-decay 0.9 --dp 2 --zero-stage 2",
    "AdamW, moments and sums in bf16, tp 2, ZeRO 1": (
        f"{UPDATED} --moments-dtype bf16 --grad-reduce-dtype bf16 --tp 2 --dp 2 --zero-stage 1"
    ),
    "Muon, tied table, ZeRO 2": f"{BF16} {TABLE} --optimizer muon --dp 2 --zero-stage 2 --micro-batch-size 1",
    "Muon, wide, bf16 sums, pp 2": (
        f"{BF16} {TWO_TABLES} --hidden-size 1024 --optimizer muon --grad-reduce-dtype bf16 --recompute full --pp 2 "
        "--dp 2 --micro-batch-size 1 --bucket-size-mb 25"
    ),
    "Muon, experts, ZeRO 2": (
        f"{BF16} {GATED} {EXPERTS} --optimizer muon --dp 4 --ep 2 --zero-stage 2 --micro-batch-size 1"
    ),
    "Muon, a part of the matrices": (
        f"{BF16} {TABLE} --optimizer muon --muon-parameters blocks.*.mlp.* --dp 2 --zero-stage 2 --micro-batch-size 1"
    ),
    "Adafactor, two tables, ZeRO 1": f"{UPDATED} {TWO_TABLES} --optimizer adafactor --pp 2 --dp 2 --zero-stage 1",
    "Adafactor, experts, ZeRO 3": (
        f"{BF16} {GATED} {EXPERTS} --optimizer adafactor --dp 4 --ep 2 --zero-stage 3 --micro-batch-size 1"
    ),
    "LAMB, pp 2": f"{UPDATED} --optimizer lamb --pp 2",
    "Lion, two tables, bf16 sums": f"{UPDATED} {TWO_TABLES} --optimizer lion --grad-reduce-dtype bf16",
    "SGD, Nesterov's momentum": f"{UPDATED} --optimizer sgd --sgd-nesterov",
}
# Traced 2 to 4 % too high.
ABOVE = {
    "an input ahead of the last stage": (
        f"{BF16} --tp 4 --pp 4 --no-sequence-parallel --recompute full --num-layers 8 --micro-batch-size 8 "
        "--global-batch-size 40 --vocab-size 512 --schedule 1f1b"
    ),
    "1-bit Adam": f"{BF16} --optimizer onebitadam --dp 4 --micro-batch-size 1",
}
KNOWN = [pytest.mark.slow, pytest.mark.xfail(strict=True, reason="traced 2 to 4 % too high")]


def config_of(words: str) -> ResolvedConfig:
    is_bert = words.startswith("bert ")
    argv = ["--mock-data", "--train-iters", "9", *words.removeprefix("bert ").split()]
    kind = BertConfig if is_bert else Config
    return parse_config(argv, prog="test", description="", kind=kind, planned=True)


def whole_steps(_: int, __: int, config: ResolvedConfig) -> list[RankReport]:
    """Of the first rank of each stage, with all microbatches."""
    absent_accelerator()
    of_stage = config.parallel.ranks // config.parallel.pp
    config = config.for_device(on_cpu=False)
    with mock.patch.object(dry_run, "_counts", lambda config, rank: [1, config.microbatches]):
        return [run_rank(config, rank, on_cpu=False) for rank in range(0, config.parallel.ranks, of_stage)]


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, id=name) for name, words in DEFAULT.items()),
        *(pytest.param(words, id=name, marks=pytest.mark.slow) for name, words in SLOW.items()),
        *(pytest.param(words, id=name, marks=KNOWN) for name, words in ABOVE.items()),
    ],
)
def test_traced_peak_is_that_of_whole_steps(words: str) -> None:
    bound = 0.01 if words.startswith(LLAMA) else 0.015
    for report in run_distributed(whole_steps, 1, config_of(words), init=False, timeout=120)[0]:
        assert report.problem is None
        assert report.planned.expected_tensors == pytest.approx(report.peak, rel=bound), report.rank


@pytest.mark.slow
def test_ranks_with_equal_layers_and_other_actions(tmp_path: Path) -> None:
    schedule = tmp_path / "mixed.csv"
    rows = ["{0}F0,{0}F1,{0}B0,{0}B1"] * 4
    rows[2] = "{0}F0,{0}F1,{0}I0,{0}W0,{0}I1,{0}W1"
    schedule.write_text("\n".join(row.format(rank) for rank, row in enumerate(rows)), encoding="utf-8")
    model = "--preset gpt2-tiny --vocab-size 512 --num-layers 8 --micro-batch-size 1 --global-batch-size 2"
    config = config_of(f"{model} --pp 4 --dp 1 --schedule-csv {schedule}")
    ranks = traced(config, outline(config), on_cpu=True)
    assert ranks[1].expected_tensors != ranks[2].expected_tensors
    assert all(rank.is_traced for rank in ranks)


DEEP = f"{LLAMA} --num-layers 12"
ESTIMATED = [
    f"{DEEP} --global-batch-size 4",
    f"{DEEP} --dp 4 --zero-stage 2 --global-batch-size 16",
    f"{DEEP} --pp 3 --tp 2 --global-batch-size 8 --schedule 1f1b",
    f"{DEEP} --tp 4 --recompute full --global-batch-size 2",
    "--preset gpt2-medium --precision bf16 --global-batch-size 8 --micro-batch-size 4",
]


@pytest.mark.parametrize(
    "words", [*ESTIMATED[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in ESTIMATED[1:])]
)
def test_the_estimate_is_near_the_trace(words: str) -> None:
    config = config_of(words)
    found = (find(config, outline(config), on_cpu=False) for find in (plan_memory, traced))
    for one, other in zip(*found, strict=True):
        assert one.state == other.state
        assert one.expected == pytest.approx(other.expected, rel=0.1)
        assert one.certain <= 1.01 * other.expected_tensors


OWN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import signum
from pretrain_gpt import main
signum.register()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", ["--dry-run", pytest.param("--dry-run=full", marks=pytest.mark.slow)])
def test_what_a_program_registers_is_traced_and_not_kept(kind: str, tmp_path: Path) -> None:
    """Configurations with sections of their own cannot be pickled, and their sources are in no key of the cache."""
    words = "--preset gpt2-tiny --vocab-size 512 --mock-data --train-iters 9 --pp 2 --dp 1 --optimizer signum"
    example = str(Path(__file__).parents[2] / "examples" / "custom_optimizer")
    command = [sys.executable, "-c", OWN, example, kind, *words.split(), "--global-batch-size", "2"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("bytes: traced" if kind == "--dry-run" else "2 of them OK") in done.stdout
    assert not list(tmp_path.rglob("*.json"))
