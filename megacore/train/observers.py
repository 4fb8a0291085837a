"""What a run asks its observers: to record and to guard it, and why a step was not finite. The observers,
`megacore.observe`, are optional: a tree without them trains as `Observers` says, prints the run's messages, and records
nothing. This module alone knows where they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from megacore import has_ring
from megacore.errors import OutputClosed, StorageError
from megacore.train.callbacks import Callback, Event, Run

if TYPE_CHECKING:
    from megacore.config import ResolvedConfig
    from megacore.data import SampleDataset
    from megacore.optim.nonfinite import NonFinite
    from megacore.parallel.mesh import Mesh
    from megacore.train.engine import PipelineEngine
    from megacore.train.parallelize import ParallelModel
    from megacore.train.step import BatchLossWeight, Diagnosis, TrainStep
    from megacore.train.step_hooks import StepHook
    from megacore.train.trainer import Trainer


class Observers:
    """What a run asks, with the answers of a tree without observers."""

    def announce(self, trainer: Trainer, train_data: SampleDataset, valid_data: SampleDataset | None) -> None:
        """Say what is about to be built, and by what. `trainer`: has no model yet."""
        if trainer.mesh.world.is_first:
            note = "megacore/observe is not installed: nothing of the run is recorded, traced, replayed or compared"
            print(f"megacore: note: {note}", file=sys.stderr)

    def of_trainer(self, trainer: Trainer) -> list[Callback]:
        """The callbacks of a run, before its first step; all ranks call this together."""
        return [_Messages()]

    def of_engine(self, engine: PipelineEngine) -> list[Callback]:
        return []

    def step_hooks(self, model: ParallelModel, config: ResolvedConfig, mesh: Mesh) -> list[StepHook]:
        return []

    def diagnose(
        self, steps: TrainStep, microbatches: Sequence[Any], weight: BatchLossWeight, *, last_loss: float
    ) -> Diagnosis | None:
        """Why a step was skipped as not finite; all ranks call this together. `last_loss`: mean, of the last update."""
        return None

    def fault_in_words(self, steps: TrainStep, non_finite: Sequence[NonFinite]) -> str | None:
        """Why a machine's fault made weights or moments not finite; None: open. All ranks call this together."""
        return None


class _Messages(Callback):
    def on_event(self, run: Run, event: Event) -> None:
        if event.kind == "message" and run.mesh.world.is_first:
            say(event.values["text"], may_fail=run.config.checkpoint.on_save_error == "warn")


def observers() -> Observers:
    """Those of `megacore.observe`, where it is installed."""
    if not has_ring("observe"):
        return Observers()
    return cast(Observers, importlib.import_module("megacore.observe.for_training").OBSERVERS)


def say(text: str, *, may_fail: bool = False) -> None:
    """Print at once. `may_fail`: ignore text that cannot be written. Raises OutputClosed where nobody reads it;
    StorageError where it cannot be written, and must not be lost."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise OutputClosed("what read the output has closed it") from None
    except OSError as error:  # its file may be on the same full disk
        if not may_fail:
            raise StorageError(f"what the run says cannot be written: {error.strerror}") from None
