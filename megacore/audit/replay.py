"""Computes steps of a run again, on this process or on the ranks of a launcher, and compares each with the ledger."""

from __future__ import annotations

import ast
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import tomli_w

from megacore.audit.check import History, different_facts, first_difference, in_ranges
from megacore.audit.ledger import Line
from megacore.audit.narrow import Narrowing
from megacore.audit.recorder import StepRecords
from megacore.checkpoint.directory import published
from megacore.checkpoint.manifest import Manifest, read_manifest
from megacore.commands.pretrain_gpt import read_config, trainer_of
from megacore.config import SECTIONS, ResolvedConfig
from megacore.config.fields import field_infos
from megacore.config.reproducible import canonical_blocks
from megacore.config.spelling import flag
from megacore.errors import UserError
from megacore.job_directory import job_directory, make
from megacore.parallel.mesh import Mesh
from megacore.parallel.processors import computes_on_cpu
from megacore.remote import Location
from megacore.train.launch import launch
from megacore.train.same_run import facts
from megacore.verify.masks import masks_of_shards

_LAYOUT = ("parallel", "checkpoint", "start", "logging", "watch")
"""Tables of a run's configuration that a replay does not take over."""
_OF_PATHS = ("given", "not given", "")  # what facts say of paths, and of settings that they lack


@dataclass
class Replayed:
    """Steps that were taken again."""

    problems: list[str]  # what differs, on the first rank; none where all agrees
    step: int  # the last one that was taken
    status: int = 0  # exit status of the computation


def replay(history: History, steps: range, run: Location, flags: Sequence[str], *, narrows: bool = False) -> Replayed:
    """Take steps again, and compare each up to the first that differs. They begin after the nearest checkpoint before
    `steps`, or with the initial weights. `run`: the checkpoint to begin with, or the directory of a run that has it.
    `flags`: of the layout, and others that differ from those of the run. `narrows`: whether to compare the layout with
    one process, and to look for what of a step is wrong. Raises UserError where the ledger lacks a step, or there is no
    checkpoint."""
    step = steps[-1]
    for number in (steps[0], step):
        if number not in history.steps:
            there = in_ranges(history.steps)
            raise UserError(f"{history.path} has no line of step {number} that counts: use one of {there}")
    directory, manifest, save = _nearest(run, steps[0], history)
    if "bert" in manifest.config:
        raise UserError(f"{directory} is of BERT, which is not replayed yet: check it without --replay")
    local_rank = os.environ.get("LOCAL_RANK", "0")
    work = job_directory("replay", os.environ, os.getcwd())
    done = Replayed([], save.step)

    def masks(line: Line, config: ResolvedConfig) -> AbstractContextManager[None]:
        return _masks(history.start_of(line).record["facts"], config)

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer, problems = trainer_of(config, mesh), done.problems
        records = StepRecords(trainer)
        problems.extend(_wrongly_loaded(save, records))
        narrowing = Narrowing(trainer, records, history) if narrows else None
        while trainer.step < step and not problems:
            done.step = trainer.step + 1
            line = history.steps[done.step]
            if narrowing is None:
                with masks(line, config):
                    result = trainer.train_step(next(trainer.batches))
            else:
                result = narrowing.train_step(done.step, partial(masks, line))
            record = records.completed(*records.of(result, with_state="state" in line.record))
            different = first_difference(history, line, record)
            causes = [] if narrowing is None else narrowing.causes(line, record, different is not None)
            if different or causes:
                what = different[1] if different else "agrees with the layout, which does not agree with one process"
                problems.append(f"step {done.step} (line {line.number}): {what}")
                problems.extend(f"  {cause}" for cause in causes)
        trainer.model.data_parallel.ready()
        if problems and mesh.world.is_first:
            problems.extend(f"  {each}" for each in _changes(history, facts(config)))

    make(work)
    settings, before, since = work / f"run_{local_rank}.toml", *map(history.start_of, (save, history.steps[step]))
    try:
        settings.write_text(tomli_w.dumps(_settings(manifest, before.record["facts"], since.record["facts"])))
        words = ["--config", str(settings), "--output-dir", str(work / "output")]
        if save.kind != "start" or save.record["loaded"]:  # a start stands for a checkpoint whose own line was lost
            words += ["--load", str(directory)]
        config = read_config([*words, *flags], prog="audit.py")
        for number in range(save.step + 1, step + 1):
            masks(history.steps[number], config)
        done.status = launch(config, body)
    finally:
        if local_rank == "0":
            shutil.rmtree(work, ignore_errors=True)
    return done


def _masks(run: Mapping[str, str], config: ResolvedConfig) -> AbstractContextManager[None]:
    """The dropout masks of the run are drawn inside. Where sums are not in canonical blocks, a mask depends on which
    part of its tensor a rank holds. `run`: facts of the run. Raises UserError where this layout cannot draw them."""
    model, parallel = config.model, config.parallel
    tp, cp, split = int(run["--tp"]), int(run["--cp"]), run["--sequence-parallel"] == "True"
    drops = model.hidden_dropout or model.attention_dropout or config.lora.lora_dropout
    same = (tp, cp, split or tp == 1) == (parallel.tp, parallel.cp, parallel.sequence_parallel or parallel.tp == 1)
    if not drops or same or canonical_blocks(config) > 1:
        return nullcontext()
    alone = "" if config.training.compile or config.lora.lora_dropout else ", or on one process with --device cpu"
    if alone and parallel.ranks == 1 and computes_on_cpu(parallel.device):
        return masks_of_shards(tp, cp=cp, sequence_parallel=split)
    layout = f"--tp {tp} --cp {cp}{' --sequence-parallel' * split}"
    raise UserError(f"the dropout masks of the run are those of {layout}: replay it with these under torchrun{alone}")


def _wrongly_loaded(save: Line, records: StepRecords) -> Iterator[str]:
    """The first tensor that is not as it was saved; all ranks call this together."""
    loaded = records.state.hashes()
    for kind, names in save.record["state"].items():
        for name, said in names.items():
            if loaded.get(kind, {}).get(name) != said:
                where = save.record.get("checkpoint", "the initial weights")
                yield f"{where}: {kind} of {name} is not what line {save.number} says"
                return


def _nearest(run: Location, step: int, history: History) -> tuple[Location, Manifest, Line]:
    """The last checkpoint before a step, of those that the run saved and has not gone back behind, with its line. If
    there is none, and the run began with initial weights: any of its checkpoints, which has the settings, and the line
    of the start."""
    kept = history.saves.keys() - history.gone
    found = [(directory, read_manifest(directory)) for directory in (published(run) or [run])]
    own = [(directory, manifest) for directory, manifest in found if manifest.manifest_sha256 in kept]
    before = [pair for pair in own if pair[1].step < step]
    first = history.start_of(history.steps[step])
    if own and not before and first.record["loaded"] is None and first.step == 0:
        return *own[0], first
    if not before:
        steps = in_ranges(history.saves[digest].step for digest in kept) or "none"
        raise UserError(f"{run} has no checkpoint before step {step} as the run saved it: the ledger has steps {steps}")
    directory, manifest = max(before, key=lambda pair: pair[1].step)
    return directory, manifest, history.saves[manifest.manifest_sha256]


def _settings(manifest: Manifest, before: Mapping[str, str], since: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The configuration with which a step was taken, but for its layout and what it wrote.

    Args:
        manifest: of the checkpoint before it.
        before: the facts of the start that saved it.
        since: those of the start that took the step, which may have had other settings.
    """
    # Nothing is saved; that the run saved is what --on-spike rollback asks for.
    tables: dict[str, dict[str, Any]] = {"checkpoint": {"save_interval": 1}}
    # Optimizers have fields of their own for one flag, of which the facts have one.
    shared = Counter(flag(name) for section in SECTIONS.values() for name in field_infos(section))
    for table, there in manifest.config.items():
        if table in _LAYOUT or table not in SECTIONS:
            continue
        tables[table] = {name: value for name, value in there.items() if value is not None and name != "output_dir"}
        for name, info in field_infos(SECTIONS[table]).items():
            text, was = (each.get(flag(name), "") for each in (since, before))
            saved = str(there[name]) if name in there and shared[flag(name)] == 1 else was
            if text not in (saved, *_OF_PATHS):
                tables[table].pop(name, None)
                if text != "None":
                    tables[table][name] = text if info.kind is str else ast.literal_eval(text)
    return tables


def _changes(history: History, here: Mapping[str, str]) -> list[str]:
    """What of code, libraries and machine is not what it was; settings may be others."""
    there = history.start.record["facts"]
    return [line for line in different_facts(there, here) if not line.startswith("--")]
