"""A run on a file system that is filled to its last byte trains on, and leaves no rest."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import published, step_of
from megacore.parallel.mesh import ALONE, Mesh
from megacore.train.trainer import Trainer
from tests.parallel.test_stopping import Calling
from tests.parity.runs import BATCH, RaggedData, make_config, make_trainer

STEPS, FULL, FREE = 34, 8, 28  # the disk is full in the steps from FULL on, and before FREE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB: room for a few checkpoints."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(place)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            yield place
            subprocess.run(["umount", "--lazy", str(place)], check=True)  # a run that failed holds files open
            return
    pytest.skip("needs the right to mount a tmpfs: run as root")


def filling(disk: Path, **options: Any) -> Trainer:
    """A run on whose disk there is no room for some steps."""

    def fill() -> None:
        trainer.saving.finish()  # a save in the background would delete the checkpoint before it, which makes room
        with contextlib.suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    samples = Calling(RaggedData(BATCH * STEPS), (FULL - 1) * BATCH, fill)
    samples = Calling(samples, (FREE - 1) * BATCH, (disk / "fill").unlink)
    sizes = {"train_iters": STEPS, "save_interval": 2, "keep_last": 1, "log_interval": 1, **options}
    config = make_config((1, 1, 1), disk / "run", **sizes)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")), samples)
    return trainer


def logged(disk: Path) -> list[int]:
    """The steps in the metrics; every line must be whole."""
    return [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_warns_trains_on(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filling(disk, async_save=True, on_save_error="warn").run()
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl: No space left on device") == 1
    assert said.count("warning: the checkpoint cannot be written") >= 2
    lacking = int(said.split("metrics.jsonl lacks ")[1].split()[0])
    assert 0 < lacking <= FREE - FULL
    steps = logged(disk)
    assert len(steps) == STEPS - lacking
    assert steps[:3] == [1, 2, 3]
    assert steps[-5:] == list(range(STEPS - 4, STEPS + 1))
    assert step_of(published(disk / "run")[0]) == STEPS
    assert all(whole(path, ALONE) is None for path in published(disk / "run"))
    assert not list((disk / "run").glob("*.tmp-*"))
