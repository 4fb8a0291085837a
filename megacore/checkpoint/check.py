"""Looks at the checkpoint of `--load` before torch is loaded: a damaged one, or one of another model, is refused within
a second, once, instead of by every rank after the model is built."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.files import refuse_unlisted, verified_tokenizer, verify
from megacore.checkpoint.manifest import (
    Manifest,
    base_of,
    checkpoints_of,
    find_checkpoint,
    read_manifest,
    sound,
    way_from_another_trainer,
)
from megacore.config import SECTIONS, ExpertsConfig, ModelConfig, ResolvedConfig, TrainingConfig
from megacore.config.checkpoint import AUTO, OR_AUTO
from megacore.config.experts import differing_experts
from megacore.config.fields import Section, field_infos
from megacore.config.model import differing
from megacore.config.schema import UNKNOWN_VOCAB_SIZE
from megacore.config.spelling import flag, with_value
from megacore.data.gpt.build import tokenizer_of
from megacore.data.tokenizers.same_ids import same_ids
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.errors import CheckpointError
from megacore.remote import Location, location

S = TypeVar("S", bound=Section)

# The content of files is compared with the manifest at the start up to this many bytes; the rest as it is read.
_READ_BYTES = 1 << 30
# The settings whose change is no news: where results go, what is reported, when the run saves and ends.
_UNREPORTED = frozenset(("checkpoint", "logging", "watch"))
# Settings of the training itself that a run without their flags takes from its version, preset, device or length.
_CONTINUED = (
    *("hidden_dropout", "attention_dropout", "precision"),
    *("adam_beta2", "weight_decay", "min_lr", "eval_iters"),
)
_OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_dora", "lora_targets", "pretrained_checkpoint")
_OF_SCHEDULE = ("--lr", "--min-lr", "--decoupled-", "--weight-decay")
_RESETS = ("reset_position_ids", "reset_attention_mask")
_ARCHITECTURE_OF_BERT = ("bert_style", "sentence_task", "global_attention_interval", "local_rotary_base")


def check_load(config: ResolvedConfig) -> None:
    """Check the checkpoint that the run continues from, if any. Raises CheckpointError where it is missing, incomplete,
    or of another model."""
    load = config.checkpoint.load
    if (source := config.start.pretrained_checkpoint) is not None:
        try:
            directory = find_checkpoint(location(source))
        except CheckpointError as error:
            raise CheckpointError(f"--pretrained-checkpoint {error}") from error
        manifest = read_manifest(directory)
        if manifest.settings.get("lora_rank") is not None:
            raise CheckpointError(
                f"--pretrained-checkpoint {source}: {directory} has adapters, and not the weights of the model: use "
                "--load, or merge it with tools/convert_checkpoint.py --merge first"
            )
        _check_model(config, f"--pretrained-checkpoint {source}", directory, manifest)
    if load is None:
        return
    run = location(config.checkpoint_dir if load == AUTO else load)
    if (run / MANIFEST_NAME).is_file():
        _check_files(run)
        check_settings(config, run, read_manifest(run))
        return
    candidates = checkpoints_of(run)
    if not candidates and load != AUTO:
        try:
            find_checkpoint(run)
        except CheckpointError as error:
            raise CheckpointError(f"--load {error}, {OR_AUTO}") from error
    # A run that starts from other weights is meant to find none of its own.
    begins_anew = config.start.pretrained_checkpoint is None and config.checkpoint.init_from_hf is None
    if not candidates and begins_anew and (way := way_from_another_trainer(run, "--pretrained-checkpoint DIR")):
        raise CheckpointError(f"--load {AUTO} finds no checkpoint of megacore in {run}: {way}")
    # Only the newest that may be taken is compared; which are whole is seen at the start, by all ranks together.
    for directory, manifest in sound(candidates):
        try:
            verified_tokenizer(directory, manifest.files)
        except CheckpointError:
            continue
        check_settings(config, directory, manifest)
        return


def settings_to_continue(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run takes from the checkpoint that it starts from: the shape of its model, and after `--load` the fields
    whose default may be another than when it started: the same command continues the same training, whatever the
    version. Empty where there is no checkpoint, whose problems `check_load` reports."""
    load = given.get("load")
    default = field_infos(TrainingConfig)["output_dir"].default
    run = (given.get("save") or given.get("output_dir", default)) if load == AUTO else load
    manifest = _newest(run)
    if manifest is None:
        source = _newest(given.get("pretrained_checkpoint"))
        return {} if source is None else _shape_of(source, given)
    shape, has_adapters = _shape_of(manifest, given), manifest.settings.get("lora_rank") is not None
    names = _OF_ADAPTERS if has_adapters else ()
    if manifest.updates > 0:  # trained here, not converted
        names = (*names, *_CONTINUED)
    infos = {name: info for section in SECTIONS.values() for name, info in field_infos(section).items()}
    there = {name: manifest.settings.get(name) for name in names}
    kept = {name: value for name, value in there.items() if type(value) is infos[name].kind}
    if "min_lr" in kept and "lr" in given and given["lr"] != manifest.settings.get("lr"):
        del kept["min_lr"]  # it belongs to the other learning rate
    if "init_from_hf" in given:
        kept.pop("pretrained_checkpoint", None)
    return shape | kept


def _newest(run: Any) -> Manifest | None:
    """The manifest of a checkpoint, or of the newest that can be read in a run's output directory; None for a value
    that is no path."""
    if not isinstance(run, str):
        return None
    path = location(run)
    with contextlib.suppress(CheckpointError, OSError, ValueError, ImportError):
        if (path / MANIFEST_NAME).is_file():
            return read_manifest(path)
        return next((manifest for _, manifest in sound(checkpoints_of(path))), None)
    return None


def _shape_of(manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a checkpoint's model, where neither a preset nor a directory of transformers sets it."""
    if given.keys() & {"preset", "init_from_hf"}:
        return {}
    values = {**manifest.config.get("model", {}), **manifest.config.get("experts", {})}
    infos = {**field_infos(ModelConfig), **field_infos(ExpertsConfig)}
    del infos["preset"]
    if values.get("position_embedding_type") != "learned":
        del infos["max_position_embeddings"]  # a limit of use, not the size of a table
    if given.get("tokenizer") is not None:
        del infos["vocab_size"]
    return {
        name: float(values[name]) if info.kind is float else values[name]
        for name, info in infos.items()
        if type(values.get(name)) in ((int, float) if info.kind is float else (info.kind,))
    }


def check_settings(config: ResolvedConfig, directory: Location, manifest: Manifest) -> None:
    """Refuse a checkpoint that this run cannot continue from: of another model, optimizer or tokenizer, or finished.
    Raises CheckpointError where it is."""
    load = f"--load {config.checkpoint.load}"
    trained_with = manifest.config.get("optimizer", {}).get("optimizer")
    if not isinstance(trained_with, str) or "model" not in manifest.config:
        raise CheckpointError(
            f"{load}: the manifest of {directory} does not say which model and optimizer it is "
            "of: it is damaged: use another step's directory"
        )
    if (rank := manifest.settings.get("lora_rank")) != config.lora.lora_rank:
        ways = "use --pretrained-checkpoint with it, or leave --lora-rank out" if rank is None else f"use {rank}"
        raise CheckpointError(
            f"{load}: {directory} has {'no adapters' if rank is None else f'adapters of rank {rank}'}, and --lora-rank "
            f"is {config.lora.lora_rank}: {ways}"
        )
    for name in ("alpha", "targets", "dora"):
        there, here = manifest.settings.get(f"lora_{name}"), getattr(config.lora, f"lora_{name}")
        if rank is not None and (there or None) != (here or None):
            flag = f"--lora-rank {name}"
            with_it, run = (flag if one is True else f"{flag}={one}" if one else f"no {flag}" for one in (there, here))
            way = f"use {with_it}" if there else f"leave {name} out"
            raise CheckpointError(f"{load}: {directory} was trained with {with_it}, and this run has {run}: {way}")
    if rank is not None and config.start.pretrained_checkpoint is not None:
        base_of(manifest, directory, config.start.pretrained_checkpoint)
    has_state = manifest.updates > 0  # a converted checkpoint has none
    loads_state = config.start.load_optim and not config.training.skip_train
    if has_state and loads_state and trained_with != config.optimizer.optimizer:
        raise CheckpointError(
            f"{load}: {directory} holds the state of --optimizer {trained_with}, "
            f"not of {config.optimizer.optimizer}: use --optimizer {trained_with}"
        )
    _check_model(config, load, directory, manifest)
    if config.training.skip_train:
        return
    if manifest.step > config.training.train_iters or (
        manifest.step == config.training.train_iters and config.checkpoint.load != AUTO
    ):
        raise CheckpointError(
            f"{load}: {directory} is at step {manifest.step} already: use --train-iters {manifest.step + 1} or more"
        )
    of_schedule = [change for change in changed_settings(config, manifest) if change.startswith(_OF_SCHEDULE)]
    if config.checkpoint.same_schedule and has_state and loads_state and of_schedule:
        raise CheckpointError(
            f"--same-schedule: the schedule of {directory} and of the flags differ (there -> here): "
            f"{', '.join(of_schedule)}: use the values of the checkpoint, or leave --same-schedule out"
        )


def _check_model(config: ResolvedConfig, given: str, directory: Location, manifest: Manifest) -> None:
    """Refuse a checkpoint of another model or tokenizer; `given` is the flag that names it, with its value."""
    leave_out = f"leave {given.split()[0]} out"
    if differences := list(_differences(manifest, config)):
        raise CheckpointError(
            f"{given}: {directory} is of another model: {', '.join(differences)}: "
            f"use the flags that it was made with, or {leave_out}"
        )
    if (tokenizer := tokenizer_of(config)) is not None:
        stored = verified_tokenizer(directory, manifest.files)
        refuse_other_tokenizer(stored, tokenizer, str(config.data.tokenizer), way_out=leave_out)


def changed_settings(config: ResolvedConfig, manifest: Manifest) -> list[str]:
    """What is set otherwise than in the run that wrote a checkpoint, and changes what follows: a line for the log."""
    changes, there = [], _with_resets(manifest.settings)
    for section, values in dataclasses.asdict(config).items():
        for name, here in _with_resets(values).items():
            here = list(here) if isinstance(here, tuple) else here
            if section not in _UNREPORTED and name in there and there[name] != here and name != "output_dir":
                old, new = ("unset" if value is None else value for value in (there[name], here))
                changes.append(f"{with_value(flag(name), str(old))} -> {new}")
    return changes


def _with_resets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which what follows from --packing is filled in."""
    followed = {name: settings.get("packing") == "best-fit" for name in _RESETS if name in settings}
    return {**settings, **{name: default for name, default in followed.items() if settings[name] is None}}


def _check_files(directory: Location) -> None:
    budget, manifest = _READ_BYTES, read_manifest(directory)
    refuse_unlisted(directory, manifest.files)
    for name, entry in manifest.files.items():
        whole = entry.bytes <= budget
        verify(directory / name, entry, content=whole)
        budget -= entry.bytes if whole else 0


def refuse_other_tokenizer(stored: Path | None, tokenizer: Tokenizer, path: str, *, way_out: str) -> None:
    """Refuse a tokenizer that gives other ids than the one a checkpoint was trained with. `stored`: that one's
    directory, verified; None: nothing is compared. `path` and `way_out`: for the message. Raises CheckpointError where
    they differ, DataError where the checkpoint's cannot be read."""
    if stored is not None and not same_ids(load_tokenizer(stored), tokenizer):
        raise CheckpointError(
            f"--tokenizer {path} is not the one that {stored.parent} was trained with, and its ids mean other texts: "
            f"use --tokenizer {stored}, or {way_out}"
        )


def samples_of_run(config: ResolvedConfig) -> int:
    """Training samples from the first to the last that a run reads, those before its checkpoint included, and those
    that rollbacks may skip."""
    sizes, load, spare = config.batch_sizes, config.checkpoint.load, _skipped_at_most(config)
    # The dataset must hold what rollbacks may skip as well.
    of_run = sizes.samples(config.training.train_iters)
    if load is None:
        return of_run + spare
    manifest = read_manifest(find_checkpoint(location(load)))
    return manifest.consumed_samples + of_run - sizes.samples(manifest.step) + spare


def _skipped_at_most(config: ResolvedConfig) -> int:
    """Training samples that the rollbacks of a run may skip: each those since a checkpoint, and some more."""
    spikes, interval = config.spikes, config.checkpoint.save_interval
    if spikes.on_spike != "rollback" or interval is None:
        return 0
    return spikes.max_rollbacks * (interval + spikes.spike_skip_batches) * config.training.global_batch_size


def _differences(manifest: Manifest, config: ResolvedConfig) -> Iterator[str]:
    if ("bert" in manifest.config) != hasattr(config, "bert"):
        yield "a BERT there, a GPT here" if "bert" in manifest.config else "a GPT there, a BERT here"
        return
    model = _stored(ModelConfig, manifest.config["model"])
    # The vocabulary of a tokenizer that cannot be read, which is reported by itself.
    unknown = ("vocab_size",) if config.model.vocab_size == UNKNOWN_VOCAB_SIZE else ()
    yield from _differences_of(
        model, config.model, (name for name in differing(model, config.model) if name not in unknown)
    )
    experts = _stored(ExpertsConfig, manifest.config.get("experts", {}))
    yield from _differences_of(experts, config.experts, differing_experts(experts, config.experts))
    if isinstance(section := getattr(config, "bert", None), Section):
        bert = _stored(type(section), manifest.config["bert"])
        style = (name for name in _ARCHITECTURE_OF_BERT if getattr(bert, name) != getattr(section, name))
        yield from _differences_of(bert, section, style)


def _stored(kind: type[S], values: Mapping[str, Any]) -> S:
    """A section as a manifest has it; what this version adds has its default."""
    return kind(**{name: value for name, value in values.items() if name in field_infos(kind)})


def _differences_of(theirs: Section, here: Section, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield f"{with_value(flag(name), str(getattr(theirs, name)))} there, {getattr(here, name)} here"
