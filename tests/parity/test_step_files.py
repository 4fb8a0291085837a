"""How many files a train step runs through: what a newcomer has to look into who follows one with a debugger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from megacore.parallel.mesh import build_mesh
from tests.parity.runs import make_config, make_trainer
from tests.unit.packaging_builds import ROOT

# The step of GPT-2 on one process. A new file belongs here if the step needs another subject, and not if an old one is
# split; a file that is gone belongs away.
FILES = """
data/loading/loader
layers/attention layers/block layers/norm
models/gpt
ops/activation ops/attention ops/dispatch ops/loss ops/norm
optim/adamw optim/lr_schedules optim/optimizer optim/update
parallel/collectives parallel/cross_entropy parallel/mesh parallel/products parallel/random parallel/sharding
parallel/tensor
pipeline/runtime pipeline/stage
train/callbacks train/gpt_task train/sinks train/step train/stopping train/trainer
zero/bucket zero/data_parallel
"""


def files_run_by(body: Callable[[], Any]) -> set[str]:
    """Files of megacore/ with a function that this thread enters while `body` runs, without folder and ending."""
    package, files = str(ROOT / "megacore") + "/", set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename.removeprefix(package).removesuffix(".py"))

    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(None)
    return files


def test_a_steady_step_runs_through_these_files(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))  # the first makes the schedule, buffers and state
    files = files_run_by(lambda: trainer.train_step(next(trainer.batches)))
    assert files == set(FILES.split()), "a step runs through other files: see the comment at FILES"
