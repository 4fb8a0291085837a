"""Callbacks watch, record or guard a run: the trainer calls their methods, and knows none by name.

    class Losses(Callback):
        def __init__(self) -> None:
            self.by_step: dict[int, float] = {}

        def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
            self.by_step[record["step"]] = record["train/loss"]

    Trainer(config, mesh, task, train_data, valid_data, callbacks=[Losses()]).run()

Every rank calls its callbacks: first the observers (observe/for_training.py lists them), then the others in order.
A step calls `on_step_begin`, computes, and calls `on_step_end`; then `figures`, `on_log`, `on_evaluate`, `before_save`
and `on_save` if they are due. Where a spike takes the run back (--on-spike rollback), `on_rollback` follows instead. A
run ends with `on_stop` or with `on_error`.

An exception in a callback ends the run like one in the trainer: this rank reports it, and all ranks end. A callback
that communicates must do so on every rank. Reading the value of a tensor on an accelerator (`float(result.loss)`) waits
for the accelerator: do it in `on_log`, not in every step.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol

if TYPE_CHECKING:
    from megacore.checkpoint import Saved
    from megacore.config import ResolvedConfig
    from megacore.parallel.mesh import Mesh
    from megacore.train.parallelize import ParallelModel
    from megacore.train.rollback import Rollback
    from megacore.train.step import StepResult

P = ParamSpec("P")


TRAINERS_KINDS = ("log", "evaluate", "message")
"""Kinds of events that `Run.emit` does not take: figures, with callbacks of their own, and what `Run.say` says."""


class Event(NamedTuple):
    """Something that happened to a run (megacore/observe/events.py lists the kinds)."""

    step: int
    kind: str  # `message`, or another
    values: Mapping[str, Any]  # by name, such as the `text` of a message


class Run(Protocol):
    """The part of the trainer that callbacks may use."""

    @property
    def config(self) -> ResolvedConfig:
        """The resolved configuration."""

    @property
    def mesh(self) -> Mesh:
        """This rank's groups and device."""

    @property
    def model(self) -> ParallelModel:
        """This rank's part of the model."""

    @property
    def step(self) -> int:
        """Steps taken."""

    def emit(self, kind: str, **values: Any) -> None:
        """Let every callback of this rank know of an `Event` of this step, of a kind that is none of `TRAINERS_KINDS`;
        what rank 0 of a trainer emits is a line of events.jsonl."""

    def say(self, text: str) -> None:
        """Tell the user something: emit a message."""

    def request_stop(self, reason: str) -> None:
        """End the run after the next step, on all ranks, with a checkpoint; any rank may ask."""

    def unclocked(self) -> AbstractContextManager[None]:
        """A context whose duration does not count as time of a step."""


class Callback:
    """Methods that the trainer calls during a run. They do nothing here: override those of interest."""

    def on_step_begin(self, run: Run, step: int) -> None:
        """Step number `step`, counted from 1, is about to be computed."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """The weights are updated, or `result.skipped` says why not."""

    def figures(self, run: Run) -> Mapping[str, float]:
        """Further figures of a step that is to be logged, by their keys in metrics.jsonl; the same on every rank."""
        return {}

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        """A step is logged (--log-interval); `record` is the line of metrics.jsonl, the same on every rank."""

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        """An evaluation is done (--eval-interval); `record` is the line of metrics.jsonl, the same on every rank."""

    def before_save(self, run: Run) -> None:
        """A checkpoint of this step is about to be written; an exception prevents it."""

    def on_save(self, run: Run, saved: Saved) -> None:
        """A checkpoint is published; with --async-save some steps after the one that it holds."""

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """The run is back at an earlier step, and takes the steps after it again with other samples; `reason` is the
        spike."""

    def on_event(self, run: Run, event: Event) -> None:
        """Something else happened, such as a message to the user."""

    def on_stop(self, run: Run, reason: str | None) -> None:
        """The run is over, everything is saved; `reason` says why it ended before --train-iters, or is None."""

    def on_error(self, run: Run, error: BaseException) -> None:
        """The run ends with this exception. Other ranks may be gone: do not communicate."""


class Callbacks:
    """Calls several callbacks, in order."""

    def __init__(self, run: Run, members: Sequence[Callback]) -> None:
        self._run, self.members = run, list(members)

    def call(self, moment: Callable[Concatenate[Any, Run, P], None], *about: P.args, **named: P.kwargs) -> None:
        """Call a method of every member: `callbacks.call(Callback.on_save, saved)`."""
        for member in self.members:
            getattr(member, moment.__name__)(self._run, *about, **named)

    def end_step(self, result: StepResult) -> None:
        """A step is done; that it was skipped, or a spike, is an event too."""
        self.call(Callback.on_step_end, result)
        if result.skipped is not None:
            found = result.diagnosis
            cause = {} if found is None else {"cause": found.cause, "diagnosis": str(found)}
            self.emit("skip", reason=result.skipped, **cause)
        elif result.spike is not None:
            self.emit("spike", reason=result.spike)

    def figures(self) -> dict[str, float]:
        return {key: figure for member in self.members for key, figure in member.figures(self._run).items()}

    def emit(self, kind: str, **values: Any) -> None:
        if kind in TRAINERS_KINDS:
            raise ValueError(f"the kind {kind!r} of events is the trainer's: use a name of your own, or run.say")
        self.call(Callback.on_event, Event(self._run.step, kind, values))

    def say(self, text: str) -> None:
        self.call(Callback.on_event, Event(self._run.step, "message", {"text": text}))

    def on_error(self, error: BaseException) -> None:
        """The run ends with an exception, which no other one hides: an exception in a callback is printed."""
        for member in self.members:
            try:
                member.on_error(self._run, error)
            except Exception:
                print(f"megacore: {type(member).__name__}.on_error failed:", file=sys.stderr)
                traceback.print_exc()
