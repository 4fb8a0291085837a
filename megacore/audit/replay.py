"""Computes steps of a run again, on this process or on the ranks of a launcher, and compares each with the ledger."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from megacore.audit.check import History, different_facts, first_difference
from megacore.audit.recorder import StepRecords
from megacore.checkpoint.directory import published
from megacore.checkpoint.manifest import Manifest, read_manifest
from megacore.commands.pretrain_gpt import read_config, trainer_of
from megacore.config import ResolvedConfig
from megacore.errors import UserError
from megacore.parallel.mesh import Mesh
from megacore.remote import Location
from megacore.train.launch import launch
from megacore.train.same_run import facts

_LAYOUT = ("parallel", "checkpoint", "start", "logging", "watch")
"""Tables of a run's configuration that a replay does not take over."""


def replay(history: History, step: int, run: Location, flags: Sequence[str]) -> tuple[int, list[str]]:
    """Take the steps after the nearest checkpoint, to the given one, and compare them.

    Args:
        history: of the ledger.
        step: the last that is taken.
        run: the checkpoint to begin with, or the directory of a run that has it.
        flags: of the layout, and others that differ from those of the run.

    Returns:
        The exit status of the computation, and what differs; on the first rank.

    Raises:
        UserError: the ledger lacks the step, or there is no checkpoint before it.
    """
    if step not in history.steps:
        raise UserError(
            f"{history.path} has no line of step {step} that counts: use one of {min(history.steps)} or more"
        )
    directory, manifest = _nearest(run, step)
    if "bert" in manifest.config:
        raise UserError(f"{directory} is of BERT, which is not replayed yet: check it without --replay")
    work = Path(tempfile.gettempdir(), f"megacore-replay-{os.environ.get('MASTER_PORT', os.getpid())}")
    problems: list[str] = []

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer = trainer_of(config, mesh)
        records = StepRecords(trainer)
        problems.extend(_wrongly_loaded(history, directory, manifest, records))
        while trainer.step < step and not problems:
            result = trainer.train_step(next(trainer.batches))
            line = history.steps[result.step]
            record = records.completed(*records.of(result, with_state="state" in line.record))
            if different := first_difference(history, line, record):
                problems.append(f"step {result.step} (line {line.number}): {different[1]}")
        trainer.model.data_parallel.ready()
        if problems and mesh.world.is_first:
            problems.extend(f"  {each}" for each in _changes(history, facts(config)))

    work.mkdir(parents=True, exist_ok=True)
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            (work / "run.toml").write_text(tomli_w.dumps(_settings(manifest)))
        words = ["--config", str(work / "run.toml"), "--load", str(directory), "--output-dir", str(work / "output")]
        status = launch(read_config([*words, *flags], prog="audit.py"), body)
    finally:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(work, ignore_errors=True)
    return status, problems


def _wrongly_loaded(history: History, directory: Location, manifest: Manifest, records: StepRecords) -> Iterator[str]:
    """The first tensor that is not as it was saved; all ranks call this together."""
    loaded = records.state.hashes()
    save = history.saves.get(manifest.manifest_sha256)
    if save is None:
        yield f"{directory.name}: its manifest.json is not one that the run saved"
        return
    for kind, names in save.record["state"].items():
        for name, said in names.items():
            if loaded.get(kind, {}).get(name) != said:
                yield f"{directory.name}: {kind} of {name} is not what line {save.number} says"
                return


def _nearest(run: Location, step: int) -> tuple[Location, Manifest]:
    found = [(directory, read_manifest(directory)) for directory in (published(run) or [run])]
    before = [pair for pair in found if pair[1].step < step]
    if not before:
        steps = ", ".join(str(manifest.step) for _, manifest in found)
        raise UserError(f"--checkpoint {run} has steps {steps}, but --replay {step} needs one before it: give another")
    return max(before, key=lambda pair: pair[1].step)


def _settings(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The configuration of the run, but for its layout and what it wrote."""
    tables = {name: table for name, table in manifest.config.items() if name not in _LAYOUT}
    return {
        name: {key: value for key, value in table.items() if value is not None and key != "output_dir"}
        for name, table in tables.items()
    }


def _changes(history: History, here: Mapping[str, str]) -> list[str]:
    """What of code, libraries and machine is not what it was; settings may be others."""
    there = history.start.record["facts"]
    return [line for line in different_facts(there, here) if not line.startswith("--")]
