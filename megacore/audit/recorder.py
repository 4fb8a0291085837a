"""Writes the ledger of a run (--ledger): a line for each start, step, rollback and save.

A step's line has the numbers of its samples, the loss and the gradient norm bit by bit, and the learning rate. Every
--ledger interval steps it also has the hashes of the state and of the samples themselves; a save's line has those of
each tensor. On an accelerator a line is written one step later, so that nothing waits for it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.audit.ledger import FILE, Ledger
from megacore.audit.state_hash import Hashes, StateHash, batch_hash, in_hex, shortened, totals
from megacore.checkpoint import Saved, read_manifest
from megacore.observe.sinks import set_aside
from megacore.train.callbacks import Callback, Run
from megacore.train.rollback import Rollback
from megacore.train.same_run import facts
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer

Record = dict[str, Any]


class StepRecords:
    """What a ledger says of the steps of a trainer; all ranks call each method together."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.state = StateHash(trainer.train_steps, trainer.mesh)
        self._batch: object = None  # that is being hashed: its memory is another stream's, which may write to it again

    def of(self, result: StepResult, *, with_state: bool) -> tuple[Record, Tensor]:
        """The line of the last step, but for the numbers that lie on the device: the bits of the loss, and with the
        state its hashes and that of the samples, int64."""
        trainer, numbers = self._trainer, [result.loss.double().view(torch.int64).reshape(1)]
        stop = trainer.consumed_samples
        record: Record = {
            "line": "step",
            "step": result.step,
            "samples": [stop - trainer.config.batch_sizes.of_step(result.step), stop],
            "lr": result.lr.hex(),
            "norm": float(result.grad_norm).hex(),
        }
        if result.skipped is not None:
            record["skipped"] = result.skipped
        if with_state:
            mesh, current = trainer.mesh, trainer.batches.current
            assert current is not None
            self._batch = current  # until the next one: by then something later has been waited for
            counts = all(group.is_first for group in (mesh.layer, mesh.sequence, mesh.pipeline, mesh.copies))
            batch = batch_hash(current.microbatches) if counts else numbers[0].new_zeros(())
            numbers.append(self.state.sums(batch))
        return record, torch.cat(numbers)

    def completed(self, record: Record, numbers: Tensor) -> Record:
        """The whole line, from its numbers in host memory."""
        record["loss"] = float(numbers[0].view(torch.float64)).hex()
        if len(numbers) > 1:
            hashes = self.state.hashes(numbers[1:])
            record |= {"data": in_hex(int(numbers[-1])), "state": totals(hashes), "tensors": shortened(hashes)}
        return record


class Recorder(Callback):
    """Keeps the ledger of a trainer. `trainer`: of this rank, before its first step. Raises UserError where the ledger
    of the run that is continued is damaged; StorageError where it cannot be written."""

    def __init__(self, trainer: Trainer) -> None:
        self._interval = trainer.config.watch.ledger_interval
        self._records = StepRecords(trainer)
        self._ledger: Ledger | None = None
        self._waiting: tuple[Record, Tensor] | None = None  # a line whose numbers are on the way to host memory
        self._to_save: dict[int, Hashes] = {}  # hashes by the step of saves that are under way
        hashes = self._hashes()
        if not trainer.mesh.world.is_first:
            return
        path = Path(trainer.config.training.output_dir, FILE)
        if trainer.step == 0:
            set_aside(path)
        self._ledger, loaded = Ledger(path), trainer.loaded
        start = {
            "line": "start",
            "step": trainer.step,
            "samples": trainer.consumed_samples,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "loaded": None if loaded is None else loaded.manifest_sha256,
            "layout": dict(trainer.mesh.degrees),
            "state": hashes,
            "facts": facts(trainer.config),
        }
        self._ledger.append(start)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Write the step's line, or on an accelerator that of the step before."""
        is_hashed = result.step % self._interval == 0
        if self._ledger is None and not is_hashed:
            return
        record, numbers = self._records.of(result, with_state=is_hashed)
        if self._ledger is None:
            return
        self._write_waiting()
        if numbers.device.type == "cpu":
            self._ledger.append(self._records.completed(record, numbers))
            return
        on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
        self._waiting = record, on_host.copy_(numbers, non_blocking=True)

    def before_save(self, run: Run) -> None:
        hashes = self._hashes()
        if self._ledger is not None:
            self._to_save[run.step] = hashes

    def on_save(self, run: Run, saved: Saved) -> None:
        if self._ledger is None:
            return
        state = self._to_save.pop(saved.step)
        for failed in [step for step in self._to_save if step < saved.step]:
            del self._to_save[failed]
        manifest = read_manifest(saved.path)
        self._ledger.append(
            {
                "line": "save",
                "step": saved.step,
                "checkpoint": saved.path.name,
                "manifest": manifest.manifest_sha256,
                "samples": manifest.consumed_samples,
                "updates": manifest.updates,
                "state": state,
            }
        )

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        hashes = self._hashes()
        if self._ledger is not None:
            of_rollback = {"step": run.step, "samples": rollback.stop_sample, "from_step": rollback.from_step}
            self._ledger.append({"line": "rollback", **of_rollback, "reason": reason, "state": hashes})

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._hashes()
        if self._ledger is not None:
            self._ledger.close()

    def _hashes(self) -> Hashes:
        """Of the state as it is now; a line that waits is written."""
        hashes = self._records.state.hashes()
        self._write_waiting()
        return hashes

    def _write_waiting(self) -> None:
        """Write the line of the step before. Its numbers have arrived: something later has been waited for."""
        if self._waiting is not None and self._ledger is not None:
            self._ledger.append(self._records.completed(*self._waiting))
        self._waiting = None
