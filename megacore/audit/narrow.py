"""Narrows a wrong step down: which tensor is the first to differ from what one process computes, in the order of the
computation, on which ranks and for which samples; and, where a single element of the state is not what the ledger says,
which one, what it was, and on which rank."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megacore.audit.check import History, in_ranges
from megacore.audit.ledger import Line
from megacore.audit.recorder import StepRecords
from megacore.audit.state_hash import name_factor
from megacore.checkpoint.save import CheckpointSaver
from megacore.commands import pretrain_bert, pretrain_gpt
from megacore.config import ResolvedConfig
from megacore.config.bert import ResolvedBertConfig
from megacore.config.messages import ranks_in_words
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.train.step import StepResult
from megacore.train.trainer import Trainer
from megacore.verify.narrow import one_process
from megacore.verify.run import EXACT_KINDS, KINDS, Array, Key, Piece, Record, Recorder, assemble

Masks = Callable[[ResolvedConfig], AbstractContextManager[None]]
"""Draws the dropout masks of a run in a layout."""
# Without --reproducible: what rounding changes little. An update may divide a gradient that is zero but for rounding.
_NEAR = {*EXACT_KINDS, "output", "loss", "gradient", "gradient norm"}
_SMALL = 0.01  # without --reproducible, what is smaller than the largest tensor of its kind by this counts as large


def trainer_of(config: ResolvedConfig, mesh: Mesh) -> Trainer:
    """What trains a GPT or a BERT."""
    if isinstance(config, ResolvedBertConfig):
        return pretrain_bert.trainer_of(config, mesh)
    return pretrain_gpt.trainer_of(config, mesh)


class Narrowing:
    """Observes the steps that a replay takes; all ranks call each method together. `compares`: of several ranks the
    first one takes each step alone too."""

    def __init__(self, trainer: Trainer, records: StepRecords, history: History, *, compares: bool) -> None:
        self._trainer, self._records, self._history = trainer, records, history
        mesh = trainer.mesh
        self._rounding = history.rounding_of(history.steps[trainer.step + 1])
        self._compares = compares and mesh.world.size > 1
        is_alone = self._compares and mesh.world.is_first
        self._alone = trainer_of(one_process(trainer.config), Mesh(device=mesh.device)) if is_alone else None
        self._saver = CheckpointSaver(trainer.config, mesh)
        self._start = trainer.step
        self._pieces: Sequence[Piece] = ()
        self._expected = Record()  # of one process

    def train_step(self, number: int, masks: Masks) -> StepResult:
        """Take the next step, and keep what it computes."""
        if self._compares and self._rounding and self._trainer.step > self._start:
            self._catch_up()
        if (alone := self._alone) is not None:
            recorder = Recorder(alone.train_steps)
            with masks(alone.config), recorder.watching():
                recorder.keep_step(number, partial(recorder.train_step, next(alone.batches)))
            self._expected = assemble({0: recorder.pieces})
        take = partial(self._trainer.train_step, next(self._trainer.batches))
        if not self._compares:
            with masks(self._trainer.config):
                return take()
        recorder = Recorder(self._trainer.train_steps)
        with masks(self._trainer.config), recorder.watching():
            result = recorder.keep_step(number, take)
        self._pieces = recorder.pieces
        return result

    def _catch_up(self) -> None:
        """Give one process the state of the layout, from which rounding would lead it further with each step."""
        self._trainer.model.data_parallel.ready()
        self._saver.begin(self._trainer.state())
        saved = self._saver.finish()
        assert saved is not None
        if self._alone is not None:
            self._alone.train_steps.load(saved.path)
            shutil.rmtree(str(saved.path))

    def causes(self, line: Line, record: Mapping[str, Any], different: bool) -> list[str]:
        """What of the last step is wrong, in lines; none where all agrees. `line`: the ledger's. `record`: of the step
        as it was taken now. `different`: whether they differ."""
        world = self._trainer.mesh.world
        found = list(self._elements(line, record)) if different else []
        pieces = all_gather_objects(self._pieces, world)  # none without `compares`
        if self._alone is not None:
            first = self._first_that_differs(pieces)
            if first is not None:
                found.append(f"on this layout {first}")
            elif different:
                found.append("this layout and one process agree now: code, data or a computer was another then")
        return all_gather_objects(found, world)[0]

    def _elements(self, line: Line, record: Mapping[str, Any]) -> Iterator[str]:
        """The elements that differ from the run's state, if one tensor of a kind does, and in one element."""
        names = self._history.different_tensors(line.record, record)
        for kind in record.get("state", ()):
            of_kind = [name for name in names if name[0] == kind]
            if len(of_kind) != 1:
                continue
            there, here = (int(each["state"][kind], 16) for each in (line.record, record))
            difference = (there - here) * pow(name_factor(*of_kind[0]), -1, 1 << 64) % (1 << 64)
            own = self._records.state.elements_that_explain(of_kind[0], difference)
            everyone = all_gather_objects(own, self._trainer.mesh.world)
            if sum(map(len, everyone)) == 1:
                rank = next(rank for rank, elements in enumerate(everyone) if elements)
                element = everyone[rank][0]
                where = f"{kind} of {of_kind[0][1]}{[*element.place] if element.place else ''}"
                is_same = self._history.start_of(line).record["layout"] == dict(self._trainer.mesh.degrees)
                who = f", on rank {rank}" if is_same else ""
                values = f"was {element.there:.9g} and is {element.here:.9g}"
                yield f"{where} {values}{who}; no other element of {kind} differs"

    def _first_that_differs(self, pieces: Sequence[Sequence[Piece]]) -> str | None:
        """What the layout computes otherwise than one process first, in words."""
        expected, whole = self._expected.tensors, assemble(dict(enumerate(pieces)))
        keys = [key for key in expected if key in whole.tensors and (key.kind in _NEAR or not self._rounding)]
        wrong = [key for key in keys if key in whole.disagreements or self._differ(key, whole.tensors[key]).any()]
        if not wrong:
            return None
        kind = min((key.kind for key in wrong), key=KINDS.index)
        of_kind = [key for key in wrong if key.kind == kind]
        first = of_kind[-1 if kind == "gradient" else 0]  # backward meets the last layers first
        holders = []
        for rank, own in enumerate(pieces):
            of_rank = [piece for piece in own if piece.key == first]
            places = [replace(piece, values=np.ones_like(piece.values)) for piece in of_rank]
            part, held = (assemble({0: each}).tensors.get(first) for each in (of_rank, places))
            if part is not None and held is not None and (self._differ(first, part) & ~np.isnan(held)).any():
                holders.append(rank)
        said = f"{first} is the first that one process computes otherwise"
        if holders:
            said += f", on {ranks_in_words(holders)}"
        if kind == "output":
            microbatch = int(re.findall(r"microbatch (\d+)", first.name)[0])
            rows: Array = np.asarray(self._differ(first, whole.tensors[first]).any(axis=(1, 2)))
            samples = in_ranges(microbatch * len(rows) + row for row in np.flatnonzero(rows).tolist())
            said += f", of samples {samples}" if samples else ""
        return said

    def _differ(self, key: Key, values: Array) -> Array:
        """Which elements differ from those of one process; also those that are NaN in one of them."""
        expected, rounding = self._expected.tensors[key], self._rounding
        if values.shape != expected.shape:
            return np.ones(values.shape, dtype=bool)
        same = (values == expected) | (np.isnan(values) & np.isnan(expected))
        if rounding is None or key.kind in EXACT_KINDS:
            return np.asarray(~same)
        alike = (np.abs(other).max(initial=0.0) for k, other in self._expected.tensors.items() if k.kind == key.kind)
        size = max(float(np.abs(expected).max(initial=0.0)), _SMALL * max(alike))
        return ~np.asarray(same | (np.abs(values - expected) <= rounding["norm"] * size))
