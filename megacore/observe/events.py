"""The one stream of what happens to a run: every moment becomes an `Event`, which all sinks take in order.

Guards, the watchdog and whatever else observes a run write to it with `run.emit` and `run.say`, also events of kinds of
their own. The kinds of the trainer:

    log       the figures of a step              evaluate  those of an evaluation
    launch    version, git, command, host, platform, device, packages, degrees of the mesh, the checkpoint it loads
    memory    peak and predicted bytes of every rank, after the first logged step and at the end
    skip      why a step left the weights unchanged
    spike     the limit that the loss or the gradient norm exceeded, where the weights were updated nevertheless
    recovery  what a failure that --survive has outlived has cost; `switch`: a change of settings by --retune
    retune    the settings that --retune has tried, with expected and measured seconds of a step, and the gain
    rollback  the spike, the step to which the run returned, and the samples that it skips
    save      the checkpoint's directory
    message   a text for the user
    load      the checkpoint that an engine continues from
    end       why the run ended before --train-iters, or null
    error     the exception that ended the run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.checkpoint import Saved
from megacore.observe.sinks import Sink, finish
from megacore.observe.trackers.background import background_sinks
from megacore.observe.trackers.tracker import RunInfo
from megacore.parallel.collectives import all_gather_objects
from megacore.train.callbacks import Callback, Event, Run
from megacore.train.metrics import peak_memory_bytes
from megacore.train.rollback import Rollback


class Events(Callback):
    """Passes the events of a run on to the sinks of this rank. `sinks`: in the order in which they take an event."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def on_event(self, run: Run, event: Event) -> None:
        for sink in self.sinks:
            if sink.takes(event.kind):
                sink.take(event)

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        self.on_event(run, Event(record["step"], "log", record))

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        self.on_event(run, Event(record["step"], "evaluate", record))

    def on_save(self, run: Run, saved: Saved) -> None:
        self.on_event(run, Event(saved.step, "save", {"path": str(saved.path)}))

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Note the rollback; what comes after is of the steps that the run takes again."""
        samples = [rollback.first_sample, rollback.stop_sample]
        values = {"to_step": rollback.to_step, "reason": reason, "skipped_samples": samples}
        self.on_event(run, Event(rollback.from_step, "rollback", values))
        for sink in self.sinks:
            sink.rewind(rollback.to_step)

    def on_stop(self, run: Run, reason: str | None) -> None:
        self.on_event(run, Event(run.step, "end", {"reason": reason}))
        finish(self.sinks)

    def on_error(self, run: Run, error: BaseException) -> None:
        """Note what ended the run, and close the sinks; other ranks wait for this one to end."""
        self.on_event(run, Event(run.step, "error", {"error": f"{type(error).__name__}: {error}"[:2000]}))
        finish(self.sinks, failed=True)


class EngineEvents(Events):
    """Those of an engine's `log`, for its trackers. The first one knows the step that the run begins with."""

    def __init__(self) -> None:
        super().__init__([])
        self._is_open = False

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        if not self._is_open:
            self._is_open = True
            directory = Path(run.config.training.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            info = RunInfo(output_dir=directory, first_step=max(run.step - 1, 0), config=run.config)
            self.sinks = background_sinks(info)
        super().on_log(run, record)

    def on_evaluate(self, run: Run, record: Mapping[str, Any]) -> None:
        """Nothing: the program logs what it evaluates."""

    def on_event(self, run: Run, event: Event) -> None:
        """Pass the event on; drop what comes after a checkpoint that is loaded."""
        if event.kind == "load":
            for sink in self.sinks:
                sink.rewind(run.step)
        super().on_event(run, event)

    def on_error(self, run: Run, error: BaseException) -> None:
        """Nothing: the program may go on."""


class MemoryOfRanks(Callback):
    """Notes the memory of all ranks after the first logged step, and at the end. `predicted_peak`: bytes that this rank
    is expected to take at its peak; None: not known."""

    def __init__(self, predicted_peak: float | None) -> None:
        self._predicted = None if predicted_peak is None else round(predicted_peak)
        self._is_first_log = True

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        if self._is_first_log:
            self._note(run)
        self._is_first_log = False

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._note(run)

    def _note(self, run: Run) -> None:
        mesh = run.mesh
        ranks = all_gather_objects((peak_memory_bytes(mesh.device), self._predicted), mesh.world)
        peaks = [
            {"rank": rank, **mesh.coordinates(rank), "peak_bytes": peak, "predicted_bytes": predicted}
            for rank, (peak, predicted) in enumerate(ranks)
        ]
        run.emit("memory", ranks=peaks)
