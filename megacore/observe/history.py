"""events.jsonl: what happened to a run besides its metrics, for tools/report.py and for whoever looks later.

One JSON object per line, with `event`, `time` (UTC) and `step`:

    launch   version, git, command, host, platform, device, packages, degrees of the mesh, the checkpoint it loads
    memory   peak and predicted bytes of every rank, after the first logged step and at the end
    skip     why a step left the weights unchanged
    spike    the limit that the loss or the gradient norm exceeded, where the weights were updated nevertheless
    rollback the spike, the step to which the run returned, and the samples that it skips
    save     the checkpoint's directory
    end      why the run ended before --train-iters, or null
    error    the exception that ended the run

A resumed run appends. A fresh run sets the file of an earlier one aside, as events.jsonl.1 and so on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megacore.checkpoint import Saved
from megacore.files import GrowingFile
from megacore.observe.provenance import Provenance
from megacore.observe.sinks import set_aside
from megacore.observe.trackers.background import warn
from megacore.parallel.collectives import all_gather_objects
from megacore.train.callbacks import Callback, Run
from megacore.train.metrics import peak_memory_bytes
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult

NAME = "events.jsonl"


class History(Callback):
    """Writes events.jsonl on rank 0. A file that cannot be written ends nothing.

    Args:
        output_dir: of the run.
        first_step: steps done before this start.
        provenance: of this start; None on ranks that write nothing.
        degrees: of the mesh.
        load: the checkpoint that the run resumes from.
        predicted_peak: bytes that this rank is expected to take at its peak; None: not known.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        first_step: int,
        provenance: Provenance | None,
        degrees: Mapping[str, int],
        load: str | None,
        predicted_peak: float | None,
    ) -> None:
        self._path, self._is_first_log, self._warned = output_dir / NAME, True, False
        self._predicted_peak = None if predicted_peak is None else round(predicted_peak)
        self._file: GrowingFile | None = None
        self._writes = provenance is not None
        if provenance is not None:
            if first_step == 0:
                set_aside(self._path)
            about = dataclasses.asdict(provenance) | {"degrees": dict(degrees), "load": load}
            self._add("launch", first_step, **about)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Note a skipped step, or a spike."""
        if result.skipped is not None:
            cause = (
                {}
                if result.diagnosis is None
                else {"cause": result.diagnosis.cause, "diagnosis": str(result.diagnosis)}
            )
            self._add("skip", result.step, reason=result.skipped, **cause)
        elif result.spike is not None:
            self._add("spike", result.step, reason=result.spike)

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        """Note the memory of all ranks once, after the first steps."""
        if self._is_first_log:
            self._note_memory(run)
        self._is_first_log = False

    def on_save(self, run: Run, saved: Saved) -> None:
        """Note a checkpoint."""
        self._add("save", saved.step, path=str(saved.path))

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Note the rollback."""
        samples = [rollback.first_sample, rollback.stop_sample]
        self._add("rollback", rollback.from_step, to_step=rollback.to_step, reason=reason, skipped_samples=samples)

    def on_stop(self, run: Run, reason: str | None) -> None:
        """Note the end."""
        self._note_memory(run)
        self._add("end", run.step, reason=reason)

    def on_error(self, run: Run, error: BaseException) -> None:
        """Note what ended the run."""
        self._add("error", run.step, error=f"{type(error).__name__}: {error}"[:2000])

    def _note_memory(self, run: Run) -> None:
        mesh = run.mesh
        ranks = all_gather_objects((peak_memory_bytes(mesh.device), self._predicted_peak), mesh.world)
        peaks = [
            {"rank": rank, **mesh.coordinates(rank), "peak_bytes": peak, "predicted_bytes": predicted}
            for rank, (peak, predicted) in enumerate(ranks)
        ]
        self._add("memory", run.step, ranks=peaks)

    def _add(self, event: str, step: int, **about: Any) -> None:
        if not self._writes:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"event": event, "time": now, "step": step, **about})
        try:
            self._file = self._file or GrowingFile(self._path)
            self._file.append(f"{line}\n".encode())
        except OSError as error:
            if not self._warned:
                warn(f"{self._path}: {error.strerror}; training continues without this record of events")
            self._warned = True
