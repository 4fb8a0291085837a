"""Traced memory of ranks against whole steps of them, and the estimate of it against the trace.

A trace runs few layers and microbatches of a stage. Here the first rank of every stage takes a second step, whole, on
fake tensors, by the code of a run; what exists at its peak is counted storage by storage.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
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
from tests.e2e.launching import environment, run_cold, run_warm
from tests.pages import ROOT, write_files
from tests.patience import patience, until
from tests.plans.published import traced, whole

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("traced_memory.toml").read_text(encoding="utf-8"))
PARTS = TABLE["parts"]
LLAMA = PARTS["llama"]
KNOWN = pytest.mark.xfail(strict=True, reason="traced 2 to 4 % too high")
MARKS = {"usual": [], "slow": [pytest.mark.slow], "above": [pytest.mark.slow, KNOWN]}


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
    with mock.patch.object(dry_run, "microbatch_counts", lambda config, rank: [1, config.microbatches]):
        return [run_rank(config, rank, on_cpu=False) for rank in range(0, config.parallel.ranks, of_stage)]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(whole(words, PARTS), id=name, marks=marks)
        for kind, marks in MARKS.items()
        for name, words in TABLE[kind].items()
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


ESTIMATED = [whole(words, PARTS) for words in TABLE["estimated"]["words"]]


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


@pytest.mark.parametrize("kind", ["--dry-run", pytest.param("--dry-run=full", marks=pytest.mark.slow)])
def test_own_optimizers_are_traced_and_not_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations with sections of their own cannot be pickled, and their sources are in no key of the cache."""
    words = "--preset gpt2-tiny --vocab-size 512 --mock-data --train-iters 9 --pp 2 --dp 1 --optimizer signum"
    write_files(ROOT / "docs" / "extend" / "optimizer.md", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run_warm(tmp_path / "pretrain_signum.py", kind, *words.split(), "--global-batch-size", 2, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("bytes: traced" if kind == "--dry-run" else "2 of them OK") in done.stdout
    assert not list(tmp_path.rglob("*.json"))


# ---- processes that trace --------------------------------------------------------------------------------------------


SLEEPING = """
import os, time
from megacore.tracer.workers import in_processes

def step(rank):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)

list(in_processes(step, [0, 1], 2))
"""

# Plans of a process that has computed gradients.
LATE = """
import torch
from megacore.models.outline import outline
from megacore.tracer.memory import traced_memory
from tests.unit.refusals import parse

if __name__ == "__main__":
    torch.ones(3, requires_grad=True).sum().backward()
    words = "--mock-data --train-iters 9 --vocab-size 512 --preset gpt2-tiny --pp 2 --global-batch-size 4"
    config = parse(*words.split(), planned=True)
    assert all(rank.is_traced for rank in traced_memory(config, outline(config), on_cpu=False))
"""


def lives(pid: str) -> bool:
    """Whether a process runs; one that has ended may still have its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and asked for by number, on Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_process_outlives_the_one_that_traces(number: signal.Signals) -> None:
    """Only that one gets the signal."""
    command = [sys.executable, "-c", SLEEPING]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        children = [parent.stdout.readline().strip() for _ in range(2)]
        assert all(map(lives, children))
        parent.send_signal(number)
        parent.wait(patience(10))
        until(lambda: not any(map(lives, children)), 5, "a process that traces is left")
        assert parent.stderr.read().count("Traceback") == (1 if number == signal.SIGINT else 0)


@pytest.mark.slow
def test_a_process_that_has_computed_gradients_traces(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE, encoding="utf-8")
    done = run_cold(sys.executable, script, XDG_CACHE_HOME=tmp_path)
    assert done.returncode == 0, done.stderr
