"""A train step, followed with a debugger: the files that it runs through."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from tests.parity.runs import trainer_of
from tests.unit.packaging_builds import ROOT

# The files that a step of GPT-2 runs through on one process. Add a file if the step needs another subject, and not in
# order to split one; remove a file that is gone.
FILES = """
data/loading/loader
layers/attention layers/block layers/norm
models/gpt
ops/activation ops/attention ops/dispatch ops/loss ops/norm
optim/adamw optim/lr_schedules optim/optimizer optim/spikes optim/update
parallel/sequence parallel/tensor
pipeline/runtime pipeline/stage
train/callbacks train/gpt_task train/step train/stopping train/task train/trainer
parallel/heartbeat
zero/bucket zero/data_parallel
"""


def test_a_steady_step_runs_through_these_files(tmp_path: Path) -> None:
    trainer, package, files = trainer_of((1, 1, 1), tmp_path), str(ROOT / "megacore") + "/", set[Path]()
    trainer.train_step(next(trainer.batches))  # the first makes the schedule, buffers and state

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(Path(frame.f_code.co_filename).relative_to(package))

    sys.setprofile(note)
    try:
        trainer.train_step(next(trainer.batches))
    finally:
        sys.setprofile(None)
    assert {file.with_suffix("").as_posix() for file in files} == set(FILES.split()), "see the comment at FILES"
