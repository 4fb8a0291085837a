"""The real program is killed, interrupted, restarted by its launcher, and started twice: it goes on by itself as if
nothing had happened, or says what is in the way.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megacore.checkpoint.directory import published, step_of
from megacore.checkpoint.lock import WriterLock
from tests.e2e.launching import alone, losses, needs_proc, patched_program, small_run, started, under_torchrun
from tests.patience import patience

pytestmark = needs_proc
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
