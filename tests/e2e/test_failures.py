"""A run that fails while it runs: every process ends at once, and the first cause is said once, by name. One that is
killed, interrupted, restarted by its launcher or started twice goes on.

Whatever comes after the first cause is its echo: collectives that fail because a peer is gone say nothing of their own.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megacore.checkpoint.directory import published, step_of
from megacore.checkpoint.lock import WriterLock
from megacore.checkpoint.manifest import find_checkpoint, read_manifest
from tests.e2e.launching import (
    END,
    PROGRAM,
    START,
    alone,
    environment,
    losses,
    needs_proc,
    patched_program,
    small_run,
    started,
    under_torchrun,
)
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


# ---- continued


PATIENCE = 120.0
STEPS = 12
OPTIONS: dict[str, object] = {"train_iters": STEPS, "global_batch_size": 4, "load": "auto", "save_interval": 2}
OPTIONS |= {"reproducible": True}  # so that two ranks give the bits of one


def first_of(steps: int, output: Path) -> dict[int, tuple[float, ...]]:
    """The losses of a run's first steps."""
    return {step: loss for step, loss in losses(output).items() if step <= steps}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of the run that nothing happens to, in one process."""
    directory = tmp_path_factory.mktemp("straight")
    done = alone(*small_run(directory, **OPTIONS), timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return directory


# The run is killed as soon as this checkpoint is there.
KILLED = """
from pathlib import Path
from megacore.train.trainer import Trainer

checkpoint, step = Path(sys.argv.pop(1)), Trainer.train_step
def killed(self, batch):
    if checkpoint.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch)
Trainer.train_step = killed
"""


def test_a_run_that_is_killed_again_and_again_is_the_uninterrupted_one(straight: Path, tmp_path: Path) -> None:
    script, flags = patched_program(tmp_path, KILLED), small_run(tmp_path, **OPTIONS, num_workers=2, async_save=True)
    for least in (4, 8):
        with started(script, tmp_path / "said", tmp_path / f"step_{least:08d}", *flags) as run:
            assert run.wait(patience(PATIENCE)) == -signal.SIGKILL
        assert least <= newest(tmp_path) < STEPS
    done = alone(*small_run(tmp_path, **OPTIONS), timeout=PATIENCE)
    assert done.returncode == 0
    assert f"step {newest(tmp_path)}/{STEPS} | saved" in done.stdout
    assert losses(tmp_path) == losses(straight)
    again = alone(*small_run(tmp_path, **OPTIONS), timeout=PATIENCE)  # there is nothing left to do
    assert (again.returncode, again.stderr) == (0, "")
    assert losses(tmp_path) == losses(straight)


def newest(directory: Path) -> int:
    return max((step_of(path) or 0 for path in published(directory)), default=0)


# A rank dies in its fifth step of the first attempt.
DYING = """
from megacore.train.trainer import Trainer

step = Trainer.train_step
def dying(self, batch):
    if self.step == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch)
Trainer.train_step = dying
"""


def test_the_launcher_restarts_a_run_and_it_goes_on_by_itself(straight: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "exit_interval": 8, "dp": 2, "zero_stage": 1, "num_workers": 1}
    script, flags = patched_program(tmp_path, DYING), small_run(tmp_path / "run", **options)
    with under_torchrun(tmp_path / "a", 2, script, *flags, max_restarts=1) as job:
        status, _ = job.ends(PATIENCE)
        said = job.said()
    assert status == 0
    assert "has died; stopping the others" in said
    assert losses(tmp_path / "run") == first_of(8, straight)


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "run"
    lock = WriterLock(output)
    (output / "config.toml").write_text("the first run's")
    done = alone(*small_run(output, **OPTIONS), timeout=PATIENCE)
    lock.release()
    assert done.returncode == 2
    assert f"is being written by another run (pid {os.getpid()} on " in done.stderr
    assert "Traceback" not in done.stderr
    assert (output / "config.toml").read_text() == "the first run's"


def test_a_damaged_checkpoint_is_passed_over_with_a_word_and_settings_may_change(
    straight: Path, tmp_path: Path
) -> None:
    first = alone(*small_run(tmp_path, **{**OPTIONS, "exit_interval": 5}), timeout=PATIENCE)
    assert first.returncode == 0
    assert [step_of(path) for path in published(tmp_path)] == [5, 4, 2]
    file = tmp_path / "step_00000005" / "model-pp0-tp0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (tmp_path / "step_00000006.tmp-0123abcd").mkdir()
    changed = {**OPTIONS, "train_iters": 6, "lr": 1e-5, "lr_decay_iters": STEPS, "eval_iters": 4}
    done = alone(*small_run(tmp_path, **changed), timeout=PATIENCE)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(f"removed what an interrupted save had left in {tmp_path}: step_00000006.tmp-0123abcd")
    assert lines[1].startswith(f"megacore: warning: passed over a checkpoint: {file} does not have the XXH3")
    expected = f"continues {tmp_path}/step_00000004, step 4; changed: --lr 0.0003 -> 1e-05, --train-iters {STEPS} -> 6"
    assert expected in done.stdout
    assert first_of(4, tmp_path) == first_of(4, straight)
    options = {**OPTIONS, "load": None, "exit_interval": 1, "keep_last": 1}
    anew = alone(*small_run(tmp_path, **options), timeout=PATIENCE)
    (warning,) = anew.stderr.splitlines()
    assert warning == (
        f"megacore: warning: {tmp_path} holds checkpoints of an earlier run, and this run begins at step 0: "
        "--keep-last 1 deletes them as this run saves. --load auto continues from the newest valid one"
    )
    refused = alone(*small_run(tmp_path, **{**OPTIONS, "optimizer": "sgd", "num_layers": 3}), timeout=PATIENCE)
    assert refused.returncode == 2
    assert "holds the state of --optimizer adamw, not of sgd" in refused.stderr
