"""Traced memory of deep models against whole steps of a rank, and the estimate of it against the trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.plan.memory import plan_memory
from megacore.tracer import dry_run
from megacore.tracer.dry_run import RankReport, run_rank
from megacore.tracer.fake_job import absent_accelerator
from tests.distributed import run_distributed
from tests.plans.published import traced
from tests.unit.refusals import parse

LLAMA = "--preset llama-3-8b --precision bf16 --num-layers 12 --seq-length 2048 --vocab-size 32000"
MIXTURE = "--preset qwen3-30b-a3b --precision bf16 --num-layers 8 --seq-length 1024"
ROWS = {
    "dense": "--global-batch-size 4",
    "ZeRO 1": "--dp 4 --zero-stage 1 --tp 2 --global-batch-size 16",
    "ZeRO 2": "--dp 4 --zero-stage 2 --global-batch-size 16",
    "ZeRO 3": "--dp 4 --zero-stage 3 --global-batch-size 16",
    "one microbatch": "--dp 2 --zero-stage 2 --global-batch-size 2",
    "1F1B": "--pp 3 --tp 2 --global-batch-size 8 --schedule 1f1b",
    "GPipe": "--pp 2 --global-batch-size 4 --schedule gpipe",
    "zero bubble": "--pp 2 --tp 2 --global-batch-size 6 --schedule zero-bubble",
    "recomputed": "--recompute full --recompute-num-layers 7 --tp 2 --global-batch-size 2",
    "recomputed pattern": "--recompute full --recompute-num-layers 9 --attention-pattern w,f --window-size 512",
    "small layers": "--hidden-size 512 --ffn-hidden-size 1024 --dp 64 --zero-stage 2 --global-batch-size 256",
    "light": "--recompute light --pp 2 --global-batch-size 4 --schedule 1f1b",
    "context": "--cp 2 --pp 2 --global-batch-size 4 --schedule 1f1b",
    "activations offloaded": "--offload-activations --dp 2 --global-batch-size 4",
    "state offloaded": "--offload-optimizer --dp 2 --zero-stage 1 --global-batch-size 4",
}
DEFAULT = ("ZeRO 3", "1F1B")


def config_of(model: str, layout: str) -> ResolvedConfig:
    return parse("--mock-data", "--train-iters", "9", *model.split(), *layout.split(), planned=True)


def whole_steps(_: int, __: int, config: ResolvedConfig) -> list[RankReport]:
    """Of the first rank of each stage, with all microbatches."""
    absent_accelerator()
    of_stage = config.parallel.ranks // config.parallel.pp
    config = config.for_device(on_cpu=False)
    with mock.patch.object(dry_run, "_counts", lambda config, rank: [config.microbatches] * 2):
        return [run_rank(config, rank, on_cpu=False) for rank in range(0, config.parallel.ranks, of_stage)]


def require_whole_steps(config: ResolvedConfig, *, rel: float = 0.01) -> None:
    for report in run_distributed(whole_steps, 1, config, init=False, timeout=300)[0]:
        assert report.problem is None
        assert report.planned.expected_tensors == pytest.approx(report.peak, rel=rel), report.rank


@pytest.mark.parametrize(
    "layout", [pytest.param(ROWS[name], marks=[pytest.mark.slow] * (name not in DEFAULT), id=name) for name in ROWS]
)
def test_few_layers_stand_for_all(layout: str) -> None:
    require_whole_steps(config_of(LLAMA, layout))


SMALL = "--preset gpt2-tiny --vocab-size 512 --precision bf16 --micro-batch-size 16 --offload-activations"
OFFLOADED = {
    "a first, a steady and a last part": "--pp 2 --num-layers 6 --schedule 1f1b --global-batch-size 128",
    "few": "--pp 4 --num-layers 8 --schedule 1f1b --global-batch-size 32",
    "many": "--pp 4 --num-layers 16 --schedule 1f1b --global-batch-size 512",
    "one block a stage": "--pp 2 --num-layers 4 --schedule interleaved --virtual-stages 2 --global-batch-size 128",
    "one after the other": "--num-layers 6 --global-batch-size 128",
    "GPipe": "--pp 2 --num-layers 8 --schedule gpipe --global-batch-size 128",
    "zero bubble": "--pp 4 --num-layers 16 --schedule zero-bubble --global-batch-size 128",
    "interleaved": "--pp 2 --num-layers 8 --schedule interleaved --virtual-stages 2 --global-batch-size 256",
}
FAST = ("one block a stage",)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(OFFLOADED[name], marks=[pytest.mark.slow] * (name not in FAST), id=name) for name in OFFLOADED],
)
def test_few_microbatches_stand_for_all(layout: str) -> None:
    """What the last blocks of an action leave on the device the next one frees."""
    require_whole_steps(config_of(SMALL, layout), rel=0.02)


def test_ranks_with_equal_layers_and_other_actions(tmp_path: Path) -> None:
    schedule = tmp_path / "mixed.csv"
    rows = ["{0}F0,{0}F1,{0}B0,{0}B1"] * 4
    rows[2] = "{0}F0,{0}F1,{0}I0,{0}W0,{0}I1,{0}W1"
    schedule.write_text("\n".join(row.format(rank) for rank, row in enumerate(rows)), encoding="utf-8")
    model = "--preset gpt2-tiny --vocab-size 512 --num-layers 8 --micro-batch-size 1 --global-batch-size 2"
    config = config_of(model, f"--pp 4 --dp 1 --schedule-csv {schedule}")
    ranks = traced(config, outline(config), on_cpu=True)
    assert ranks[1].expected_tensors != ranks[2].expected_tensors
    assert all(rank.is_traced for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["--dp 4 --ep 4 --zero-stage 1 --global-batch-size 8", "--pp 2 --tp 2 --ep 2 --etp 1 --global-batch-size 4"],
)
def test_few_layers_of_experts_stand_for_all(layout: str) -> None:
    require_whole_steps(config_of(MIXTURE, layout))


ESTIMATED = [
    f"{LLAMA} {ROWS['dense']}",
    f"{LLAMA} {ROWS['ZeRO 2']}",
    f"{LLAMA} {ROWS['1F1B']}",
    f"{LLAMA} --tp 4 --recompute full --global-batch-size 2",
    "--preset gpt2-medium --precision bf16 --global-batch-size 8 --micro-batch-size 4",
]


@pytest.mark.parametrize(
    "words", [*ESTIMATED[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in ESTIMATED[1:])]
)
def test_the_estimate_is_near_the_trace(words: str) -> None:
    config = config_of(words, "")
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
