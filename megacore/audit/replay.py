"""Computes steps of a run again, on this process or on the ranks of a launcher, and compares each with the ledger."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from megacore.audit.check import History, different_facts, first_difference, in_ranges
from megacore.audit.ledger import Line
from megacore.audit.recorder import StepRecords
from megacore.checkpoint.directory import published
from megacore.checkpoint.manifest import Manifest, read_manifest
from megacore.commands.pretrain_gpt import read_config, trainer_of
from megacore.config import SECTIONS, ResolvedConfig
from megacore.config.fields import field_infos
from megacore.config.spelling import flag
from megacore.errors import UserError
from megacore.parallel.mesh import Mesh
from megacore.remote import Location
from megacore.train.launch import launch
from megacore.train.same_run import facts

_LAYOUT = ("parallel", "checkpoint", "start", "logging", "watch")
"""Tables of a run's configuration that a replay does not take over."""


def replay(history: History, step: int, run: Location, flags: Sequence[str]) -> tuple[int, list[str]]:
    """Take the steps after the nearest checkpoint, to the given one, and compare them. `step`: the last that is taken.
    `run`: the checkpoint to begin with, or the directory of a run that has it. `flags`: of the layout, and others that
    differ from those of the run. Returns the exit status of the computation, and what differs; on the first rank.
    Raises UserError where the ledger lacks the step, or there is no checkpoint before it."""
    if step not in history.steps:
        raise UserError(f"{history.path} has no line of step {step} that counts: use one of {in_ranges(history.steps)}")
    directory, manifest = _nearest(run, step, history)
    if "bert" in manifest.config:
        raise UserError(f"{directory} is of BERT, which is not replayed yet: check it without --replay")
    save, local_rank = history.saves[manifest.manifest_sha256], os.environ.get("LOCAL_RANK", "0")
    if changed := [each for each in _settings_since(history, save, step) if each.split()[0] not in flags]:
        raise UserError(f"the run went on from {directory.name} with other settings: add {' '.join(changed)}")
    work = Path(tempfile.gettempdir(), f"megacore-replay-{os.environ.get('MASTER_PORT', os.getpid())}")
    problems: list[str] = []

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer = trainer_of(config, mesh)
        records = StepRecords(trainer)
        problems.extend(_wrongly_loaded(save, records))
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
    settings = work / f"run_{local_rank}.toml"
    try:
        settings.write_text(tomli_w.dumps(_settings(manifest)))
        words = ["--config", str(settings), "--load", str(directory), "--output-dir", str(work / "output")]
        status = launch(read_config([*words, *flags], prog="audit.py"), body)
    finally:
        if local_rank == "0":
            shutil.rmtree(work, ignore_errors=True)
    return status, problems


def _wrongly_loaded(save: Line, records: StepRecords) -> Iterator[str]:
    """The first tensor that is not as it was saved; all ranks call this together."""
    loaded = records.state.hashes()
    for kind, names in save.record["state"].items():
        for name, said in names.items():
            if loaded.get(kind, {}).get(name) != said:
                yield f"{save.record['checkpoint']}: {kind} of {name} is not what line {save.number} says"
                return


def _nearest(run: Location, step: int, history: History) -> tuple[Location, Manifest]:
    """The last checkpoint before a step, of those that the run saved and has not gone back behind."""
    kept = history.saves.keys() - history.gone
    found = [(directory, read_manifest(directory)) for directory in (published(run) or [run])]
    before = [pair for pair in found if pair[1].step < step and pair[1].manifest_sha256 in kept]
    if not before:
        steps = in_ranges(history.saves[digest].step for digest in kept) or "none"
        raise UserError(f"{run} has no checkpoint before step {step} as the run saved it: the ledger has steps {steps}")
    return max(before, key=lambda pair: pair[1].step)


def _settings_since(history: History, save: Line, step: int) -> list[str]:
    """The settings with which a step was taken, and a checkpoint not, as flags."""
    there, here = (history.start_of(line).record["facts"] for line in (save, history.steps[step]))
    of_run = {
        flag(name) for table, section in SECTIONS.items() if table not in _LAYOUT for name in field_infos(section)
    }
    names = sorted(of_run & here.keys() - {"--output-dir"})
    return [f"{name} {here[name]}" for name in names if here[name] != there.get(name)]


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
