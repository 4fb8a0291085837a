"""Computes steps of a run again, on this process or on the ranks of a launcher, and compares each with the ledger."""

from __future__ import annotations

import ast
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from megacore.audit.check import History, different_facts, first_difference, in_ranges
from megacore.audit.ledger import Line
from megacore.audit.narrow import Narrowing, trainer_of
from megacore.audit.recorder import StepRecords
from megacore.checkpoint.directory import MANIFEST_NAME, published
from megacore.checkpoint.manifest import Manifest, read_manifest
from megacore.commands import pretrain_bert, pretrain_gpt
from megacore.config import ResolvedConfig, sections_of
from megacore.config.bert import BertConfig
from megacore.config.compression import format_of
from megacore.config.fields import field_infos
from megacore.config.reproducible import canonical_blocks
from megacore.config.spelling import flag
from megacore.errors import ConfigError, UserError
from megacore.job_directory import job_directory, make
from megacore.parallel.mesh import Mesh
from megacore.parallel.processors import computes_on_cpu
from megacore.remote import Location
from megacore.train.launch import launch
from megacore.train.same_run import facts
from megacore.verify.masks import masks_of_shards
from megacore.verify.narrow import one_process

SECTIONS = sections_of(BertConfig)  # it has those of a GPT, and one more
_LAYOUT = ("parallel", "checkpoint", "start", "logging", "watch")
"""Tables of a run's configuration that a replay does not take over."""
_WEIGHTS = ("pretrained_checkpoint", "init_from_hf")
"""Where a run without a checkpoint may have had its weights from."""
# Settings of other tables that change no number of a step.
_INERT = ("eval_interval", "eval_iters", "recompute", "recompute_num_layers", "memory_check", "num_workers")
_OF_PATHS = ("given", "not given", "")  # what facts say of paths, and of settings that they lack


@dataclass
class Replayed:
    """Steps that were taken again."""

    problems: list[str]  # what differs, on the first rank; none where all agrees
    step: int  # the last one that was taken; where what it begins with is wrong, the first one
    status: int = 0  # exit status of the computation
    compared: list[int] = field(default_factory=list)  # after which steps the state was compared, bit for bit
    not_narrowed: str = ""  # why the layout was not compared with one process, if it was asked for


@dataclass(frozen=True)
class _Part:
    """Steps that were taken with the same settings, and what a replay of them begins with."""

    steps: range
    settings: Mapping[str, str]
    directory: Location  # of a checkpoint, which has the configuration
    manifest: Manifest
    save: Line


def replay(history: History, steps: range, run: Location, flags: Sequence[str], *, narrows: bool = False) -> Replayed:
    """Take steps again, and compare each up to the first that differs. They begin after the nearest checkpoint before
    `steps`, or with the initial weights; where the run went on with other settings, after a checkpoint before these.
    `run`: the checkpoint to begin with, or the directory of a run that has it. `flags`: of the layout, and others that
    differ from those of the run. `narrows`: whether to compare the layout with one process, and to look for what of a
    step is wrong. Raises UserError where the ledger lacks a step, or there is no checkpoint."""
    parts = _parts(history, steps, run)
    work = job_directory("replay", os.environ, os.getcwd())
    done = Replayed([], parts[0].save.step + 1)
    make(work)
    try:
        configs = [_config_of(part, history, work, flags) for part in parts]
        for before, part, config in zip([None, *parts], parts, configs, strict=False):
            if before is not None:
                other = "; ".join(different_facts(before.settings, part.settings))
                what = f"other settings ({other})" if other else "other samples"
                print(f"  steps up to {before.steps[-1]} agree; from step {part.steps[0]} on with {what}")
            _take(part, history, config, done, narrows=narrows)
            if done.problems or done.status:
                break
    finally:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(work, ignore_errors=True)
    return done


def _config_of(part: _Part, history: History, work: Path, flags: Sequence[str]) -> ResolvedConfig:
    """Raises UserError where this layout does not compute the part's steps. `work`: a directory of all ranks."""
    name, save = f"{part.steps[0]}_{os.environ.get('LOCAL_RANK', '0')}", part.save
    settings, before, since = work / f"{name}.toml", *map(history.facts_of, (save, history.steps[part.steps[-1]]))
    of_line = f"line {history.start_of(history.steps[part.steps[-1]]).number} of {history.path}"
    settings.write_text(tomli_w.dumps(_settings(part.manifest, before, since, of_line)))
    words = ["--config", str(settings), "--output-dir", str(work / f"output_{part.steps[0]}")]
    if save.kind != "start" or save.record["loaded"]:  # a start stands for a checkpoint whose own line was lost
        words += ["--load", str(part.directory)]
    else:
        given = {name: value for name in _WEIGHTS if (value := part.manifest.settings.get(name))}
        words += [word for name, value in given.items() for word in (flag(name), str(value))]
    program = pretrain_bert if "bert" in part.manifest.config else pretrain_gpt
    try:
        config = program.read_config([*words, *flags], prog="audit.py", exits=False)
    except ConfigError as error:
        why = "; ".join(error.problems)
        raise UserError(f"with the settings of {of_line}, no step is computed: {why}") from None
    for number in range(save.step + 1, part.steps.stop):
        _masks(history.facts_of(history.steps[number]), config)
        _require_layout(history, history.steps[number], config)
    return config


def _take(part: _Part, history: History, config: ResolvedConfig, done: Replayed, *, narrows: bool) -> None:
    """Take the steps of a part again, and write into `done` what differs."""
    save, last, why = part.save, part.steps[-1], ""
    if narrows and config.parallel.ranks > 1:
        why = _why_not_narrowed(history, range(save.step + 1, last + 1), config)
    done.not_narrowed = done.not_narrowed or why
    kept = {each.step: each for digest, each in history.saves.items() if digest not in history.gone}

    def masks(line: Line, config: ResolvedConfig) -> AbstractContextManager[None]:
        return _masks(history.facts_of(line), config)

    def body(config: ResolvedConfig, mesh: Mesh) -> None:
        trainer, problems = trainer_of(config, mesh), done.problems
        records = StepRecords(trainer)
        problems.extend(_otherwise(save, records))
        narrowing = Narrowing(trainer, records, history, compares=not why) if narrows else None
        while trainer.step < last and not problems:
            done.step = trainer.step + 1
            line = history.steps[done.step]
            if narrowing is None:
                with masks(line, config):
                    result = trainer.train_step(next(trainer.batches))
            else:
                result = narrowing.train_step(done.step, partial(masks, line))
            record = records.completed(*records.of(result, with_state="state" in line.record))
            different = first_difference(history, line, record, save.step)
            causes = [] if narrowing is None else narrowing.causes(line, record, different is not None)
            if different or causes:
                what = different[1] if different else "agrees with the layout, which does not agree with one process"
                problems.append(f"step {done.step} (line {line.number}): {what}")
                problems.extend(f"  {cause}" for cause in causes)
            elif not history.rounding_of(line) and (done.step in kept or "state" in line.record):
                problems.extend(_otherwise(kept[done.step], records) if done.step in kept else ())
                done.compared.append(done.step)
        trainer.model.data_parallel.ready()
        if problems and mesh.world.is_first:
            # What of code, libraries and machine is not what it was. Settings may be others, and the program is.
            changes = different_facts(history.facts_of(history.steps[last]), facts(config))
            problems.extend(f"  {each}" for each in changes if not each.startswith(("--", "the program's source")))

    done.step = save.step + 1
    done.status = launch(config, body)


def _parts(history: History, steps: range, run: Location) -> list[_Part]:
    """The steps of each settings. Raises UserError where a line is missing, or a checkpoint to begin with."""
    stretches = _stretches(history)
    cuts = [(range(max(each.start, steps.start), min(each.stop, steps.stop)), each, said) for each, said in stretches]
    if missing := [*_gaps(steps, history.steps)]:
        ways = " or ".join(f"--replay {part.start}-{part[-1]}" for part, _, _ in cuts if part)
        way = ways or f"one of {in_ranges(history.steps)}"
        raise UserError(f"{history.path} has no line of step {', '.join(missing)} that counts: use {way}")
    parts = list[_Part]()
    for part, stretch, settings in cuts:
        if not part:
            continue
        directory, manifest, save = _nearest(run, part.start, history)
        if manifest.has_own_layers:
            why = "was trained by a program that describes its own layers, which is not replayed"
            raise UserError(f"{directory} {why}: leave out --replay and --bisect")
        if (first := stretch.start) > save.step + 1:  # what lies between cannot be computed
            why = f"has no line of step {first - 1} that counts"
            if before := next((said for each, said in stretches if first - 1 in each), None):
                other = "; ".join(different_facts(before, settings))
                why = f"has other {f'settings ({other})' if other else 'samples'} from step {first} on"
            way = f"give a checkpoint of step {in_ranges(range(first - 1, part.start))} with --checkpoint"
            ends = f"use --replay {steps.start}-{part.start - 1}" if parts else "leave out --replay"
            raise UserError(f"{history.path} {why}: {way}, or {ends}")
        parts.append(_Part(part, settings, directory, manifest, save))
    return parts


def _gaps(steps: range, known: Mapping[int, Line]) -> Iterator[str]:
    """Those of `steps` that are not known, in words."""
    start = steps.start
    for number in [*sorted(filter(steps.__contains__, known)), steps.stop]:
        if number > start:
            yield f"{start} to {number - 1}" if number > start + 1 else f"{start}"
        start = number + 1


def _stretches(history: History) -> list[tuple[range, Mapping[str, str]]]:
    """Steps one after another that were taken with the same settings, on samples one after another, and these."""
    names = {flag(name) for table in SECTIONS.keys() - {*_LAYOUT} for name in field_infos(SECTIONS[table])}
    names -= {flag(name) for name in _INERT}
    found, settings, of = list[tuple[range, Mapping[str, str]]](), dict[str, str](), dict[int, Mapping[str, str]]()
    for line in history.lines:
        if line.kind == "start":
            said = history.facts_of(line).items()
            settings = {name: text for name, text in said if name in names and text not in _OF_PATHS}
        of[line.number] = settings
    position = -1
    for number, line in sorted(history.steps.items()):
        goes_on = bool(found) and number == found[-1][0].stop and line.record["samples"][0] == position
        position = line.record["samples"][1]
        if goes_on and of[line.number] == found[-1][1]:
            found[-1] = range(found[-1][0].start, number + 1), found[-1][1]
        else:
            found.append((range(number, number + 1), of[line.number]))
    return found


def _masks(run: Mapping[str, str], config: ResolvedConfig) -> AbstractContextManager[None]:
    """The dropout masks of the run are drawn inside. Where sums are not in canonical blocks, a mask depends on which
    part of its tensor a rank holds. `run`: facts of the run. Raises UserError where this layout cannot draw them."""
    model, parallel = config.model, config.parallel
    tp, cp, split = int(run["--tp"]), int(run["--cp"]), run["--sequence-parallel"] == "True"
    drops = model.hidden_dropout or model.attention_dropout or config.lora.lora_dropout
    same = (tp, cp, split or tp == 1) == (parallel.tp, parallel.cp, parallel.sequence_parallel or parallel.tp == 1)
    if not drops or same or canonical_blocks(config) > 1:
        return nullcontext()
    alone = "" if config.training.compile else ", or on one process with --device cpu"
    if alone and parallel.ranks == 1 and computes_on_cpu(parallel.device):
        return masks_of_shards(tp, cp=cp, sequence_parallel=split)
    layout = f"--tp {tp} --cp {cp}{' --sequence-parallel' * split}"
    raise UserError(f"the dropout masks of the run are those of {layout}: replay it with these under torchrun{alone}")


def _require_layout(history: History, line: Line, config: ResolvedConfig) -> None:
    """Raises UserError where only the run's own layout computes what it did."""
    layout = history.start_of(line).record["layout"]
    if layout == dict(config.parallel.degrees):
        return
    if format_of(config) is not None:
        why = "compresses what its ranks sum"
    elif history.rounding_of(line) and config.model.experts is not None and config.precision.precision != "fp32":
        why = "rounds to 16 bits, which sends tokens to other experts"
    else:
        return
    degrees = " ".join(f"--{name} {degree}" for name, degree in layout.items() if degree > 1)
    way = f"with {degrees} under torchrun" if degrees else "on one process"
    raise UserError(f"step {line.step} of the run {why}: replay it {way}")


def _why_not_narrowed(history: History, steps: range, config: ResolvedConfig) -> str:
    """Why one process does not compute in these steps what a layout must; empty where it does."""
    if history.rounding_of(history.steps[steps[-1]]) and config.model.experts is not None:
        return "rounding sends tokens to other experts, in a run without --reproducible"
    if format_of(config) is not None:
        return "it has no sums to compress"
    try:
        for number in steps:
            _masks(history.facts_of(history.steps[number]), one_process(config))
    except UserError:
        return "it draws the dropout masks only with --device cpu, and without --compile"
    return ""


def _otherwise(save: Line, records: StepRecords) -> Iterator[str]:
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
    found = [(directory, read_manifest(directory)) for directory in checkpoints_in(run)]
    if not found:
        raise UserError(f"{run} holds no checkpoint, with which a replay begins: give one with --checkpoint DIR")
    own = [(directory, manifest) for directory, manifest in found if manifest.manifest_sha256 in kept]
    before = [pair for pair in own if pair[1].step < step and _leads_on(pair[1], history)]
    first = history.start_of(history.steps[step])
    if own and not before and first.record["loaded"] is None and first.step == 0:
        return *own[0], first
    if not before:
        steps = in_ranges(history.saves[digest].step for digest in kept) or "none"
        raise UserError(f"{run} has no checkpoint before step {step} as the run saved it: the ledger has steps {steps}")
    directory, manifest = max(before, key=lambda pair: pair[1].step)
    return directory, manifest, history.saves[manifest.manifest_sha256]


def _leads_on(manifest: Manifest, history: History) -> bool:
    """Whether the step after a checkpoint took the samples after it: a run that went back may have left some out."""
    after = history.steps.get(manifest.step + 1)
    return after is None or after.record["samples"][0] == manifest.consumed_samples


def checkpoints_in(given: Location) -> list[Location]:
    """The checkpoint itself, or those of a run, the last published first; none where there is none."""
    if (given / MANIFEST_NAME).is_file():
        return [given]
    return published(given) if given.is_dir() else []


def _settings(
    manifest: Manifest, before: Mapping[str, str], since: Mapping[str, str], of_line: str
) -> dict[str, dict[str, Any]]:
    """The configuration with which a step was taken, but for its layout and what it wrote.

    Args:
        manifest: of the checkpoint before it.
        before: the facts of the start that saved it.
        since: those of the start that took the step, which may have had other settings.
        of_line: where these stand, for messages. Raises UserError where one of them is no value.
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
                    tables[table][name] = _value(text, info.kind, f"{flag(name)} of {of_line}")
    return tables


def _value(text: str, kind: Any, what: str) -> Any:
    """The value of a setting that facts show as a text. Raises UserError where it is none of TOML."""
    try:
        value = text if kind is str else ast.literal_eval(text)
        tomli_w.dumps({"value": value}).encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise UserError(f"{what} is no value: {shown!r}") from None
    return value
