"""A run that fails while it runs: every process ends at once, and the first cause is said once, by name.

Whatever comes after the first cause is its echo: collectives that fail because a peer is gone say nothing of their own.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megacore.checkpoint.manifest import find_checkpoint, read_manifest
from tests.e2e.launching import END, PROGRAM, START, environment, needs_proc, patched_program, small_run, under_torchrun
from tests.patience import patience, until
from tests.warm import start

pytestmark = needs_proc
ENDLESS = {"train_iters": 1_000_000, "global_batch_size": 4}


def test_a_killed_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *small_run(tmp_path / "out", pp=2, **ENDLESS)) as job:
        job.wait_for_step(3)
        victim = job.pid_of(1)
        os.kill(victim, signal.SIGKILL)
        status, launcher = job.ends(END)
        said = job.said()
    assert status == 1
    line = rf"megacore: rank 1 \(pp 1, dp 0, tp 0; pid {victim} on \S+\) has died; stopping the others"
    assert re.fullmatch(line, said.strip())
    assert "Traceback" not in said
    assert "-9" in launcher or "has died" in launcher


def test_the_death_of_the_launcher_ends_the_ranks(tmp_path: Path) -> None:
    flags = small_run(tmp_path / "out", dp=2, num_workers=1, **ENDLESS)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        job.wait_for_step(3)
        job.torchrun.kill()
        job.ends(END)
        said = job.said()
    line = rf"megacore: the launcher \(torchrun; pid {job.torchrun.pid} on \S+\) has died; stopping the others"
    assert re.fullmatch(line, said.strip())


def test_a_killed_data_worker_is_named_and_ends_all(tmp_path: Path) -> None:
    flags = small_run(tmp_path / "out", dp=2, num_workers=2, **ENDLESS)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        job.wait_for_step(3)
        of_rank_1 = {pid for pid, rank in job.pids().items() if rank == 1}
        victim = next(pid for pid in of_rank_1 if parent(pid) in of_rank_1)
        os.kill(victim, signal.SIGKILL)
        status, launcher = job.ends(END)
        said = job.said()
    assert status == 1
    rank = r"rank 1 \(pp 0, dp 1, tp 0; pid \d+ on \S+\)"
    line = rf"megacore: {rank} failed: a data worker \(pid {victim}\) was ended by SIGKILL, perhaps .*"
    assert re.fullmatch(line, said.strip())
    assert f"a data worker (pid {victim})" in launcher


# Losses are NaN from the fourth step on, on a disk where a manifest is slow to replace.
DIVERGING = """
import math, time
from megacore.checkpoint.storage import LocalRun
from megacore.train.gpt_task import GPTTask

replace, loss, computed = LocalRun.replace_manifest, GPTTask.loss, []

def slowly(*given):
    time.sleep(2.0)
    replace(*given)

def diverging(*given):
    computed.append(1)
    return loss(*given) * (math.nan if len(computed) > 3 else 1.0)

LocalRun.replace_manifest, GPTTask.loss = slowly, diverging
"""


def test_the_first_rank_marks_what_is_in_doubt_before_the_others_end(tmp_path: Path) -> None:
    changes = {"train_iters": 9, "save_interval": 1, "max_bad_steps": 2, "micro_batch_size": 1, "global_batch_size": 2}
    script, flags = patched_program(tmp_path, DIVERGING), small_run(tmp_path / "out", dp=2, **changes)
    with under_torchrun(tmp_path / "logs", 2, script, *flags) as job:
        job.ends(START)
        said, printed = job.said(), job.said("stdout")
    assert re.match(r"megacore: stopped: the loss .*was not finite for 2 steps in a row", said)
    assert "has died" not in said
    assert f"now passes over {tmp_path}/out/step_00000003" in printed
    assert read_manifest(tmp_path / "out" / "step_00000003").is_in_doubt
    assert (tmp_path / "out" / "latest").read_text() == "step_00000002\n"


def parent(pid: int) -> int:
    """The process that started a process."""
    return int(re.findall(r"^PPid:\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])


# A dataset that fails on one data-parallel rank at its third step.
FAILING = """
from megacore.commands import pretrain_gpt as command
from megacore.data.gpt.build import Datasets
from megacore.errors import DataError

class Failing:
    def __init__(self, samples): self.samples = samples
    def __len__(self): return len(self.samples)
    def __getitem__(self, k):
        if k >= 2 * 4 and os.environ["RANK"] in "{ranks}":
            raise {error}("sample %d cannot be read" % k)
        return self.samples[k]

build = command.build_datasets
command.build_datasets = lambda *given, **named: Datasets(Failing(build(*given, **named).train), None)
"""


@pytest.mark.parametrize(("error", "ranks"), [("RuntimeError", "1"), ("DataError", "01")])
def test_an_exception_is_told_once_and_ends_the_others(tmp_path: Path, error: str, ranks: str) -> None:
    script = patched_program(tmp_path, FAILING.replace("{error}", error).replace("{ranks}", ranks))
    flags = small_run(tmp_path / "out", dp=2, **ENDLESS)
    with under_torchrun(tmp_path / "logs", 2, script, *flags) as job:
        job.wait_for_step(2)
        status, launcher = job.ends(END)
        said = job.said()
    assert status == 1
    assert "step 3/" not in job.said("stdout")
    rank = rf"rank [{ranks}] \(pp 0, dp [01], tp 0; pid \d+ on \S+\)"
    head = rf"refused on {rank}:" if error == "DataError" else rf"{rank} failed:"
    assert re.match(f"megacore: {head}\n", said)
    message = re.compile(r"sample \d+ cannot be read")
    assert said.count("megacore: ") == len(message.findall(said)) == len(message.findall(launcher)) == 1
    assert said.count("Traceback") == (0 if error == "DataError" else 1)


def test_too_little_memory_is_told_once_without_a_traceback(tmp_path: Path) -> None:
    large = {"hidden_size": 1_000_000, "ffn_hidden_size": 8, "no_memory_check": True}
    flags = small_run(tmp_path / "out", dp=2, seq_length=8, **large)  # its embeddings fit
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags) as job:
        status, _ = job.ends(START)
        said = job.said()
    assert status == 1
    assert re.fullmatch(r"megacore: rank [01] \(.*\) failed: there is not enough memory \(.*\): use .*", said.strip())


@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_an_output_that_nobody_reads_ends_the_run_quietly(tmp_path: Path, closed: str) -> None:
    flags = small_run(tmp_path / "out", **ENDLESS)
    output, errors = tmp_path / "stdout", tmp_path / "stderr"
    os.mkfifo(output)
    run = start(
        PROGRAM, *flags, stdout=output, stderr=output if closed == "both" else errors, environment=environment()
    )
    try:
        with output.open() as reader:
            reader.readline()
        assert run.wait(patience(START)) == 1
    finally:
        run.kill_all()
    if closed == "stdout":
        assert errors.read_text() == "megacore: stopped: what read the output has closed it\n"


@pytest.mark.parametrize(
    ("number", "cold"),
    [
        (signal.SIGINT, False),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),  # with the signal handlers of new interpreters
    ],
)
def test_a_signal_to_the_launcher_saves_and_ends_everything_quietly(
    tmp_path: Path, number: signal.Signals, cold: bool
) -> None:
    flags = small_run(tmp_path / "out", pp=2, num_workers=2, **ENDLESS)
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags, cold=cold) as job:
        job.wait_for_step(3)
        job.torchrun.send_signal(number)
        job.ends(END)
        errors, said = job.said(), job.said("stdout")
    assert errors.strip() == ""
    step = int(re.findall(rf"^stopped by {number.name}: (\d+) of 1000000 steps", said, re.MULTILINE)[0])
    assert find_checkpoint(tmp_path / "out") == tmp_path / "out" / f"step_{step:08d}"


def loads_torch(pid: int) -> bool:
    """Whether a process has begun to load torch's libraries."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_everything_quietly(tmp_path: Path) -> None:
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *small_run(tmp_path / "out", **ENDLESS), cold=True) as job:
        until(lambda: {0, 1} <= set(job.pids().values()), START, "no ranks")
        until(lambda: all(loads_torch(pid) for pid, rank in job.pids().items() if rank is not None), START, "no torch")
        job.torchrun.send_signal(signal.SIGINT)
        job.ends(END)
        assert job.said().strip() in ("", "megacore: stopped by SIGINT")
