"""From a checkpoint of megacore, of any layout, to a directory of transformers. A checkpoint that came from such a
directory gives it back as it was: config.json where it still describes the model, the names under which tensors were
stored, and what was carried."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.files import verify
from megacore.config import ResolvedModel
from megacore.config.experts import differing_experts
from megacore.config.model import differing
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_shards
from megacore.convert.export_tokenizer import ExportTokenizer, export_tokenizer
from megacore.convert.from_hf import KEPT_CONFIG, KEPT_GENERATION_CONFIG, KEPT_SOURCE
from megacore.convert.hf_directory import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    carried_tokenizer,
    carry,
    present,
    read_config,
)
from megacore.convert.plan import Step, make_plan, their_shapes
from megacore.convert.special_tokens import generation_config, special_ids
from megacore.errors import CheckpointError
from megacore.models.hf.families import describe_model, family_of
from megacore.models.hf.family import Family, same_bert
from megacore.safe_json import read_object

_DTYPE_FIELDS = ("dtype", "torch_dtype")


@dataclass(frozen=True, kw_only=True)
class Export:
    """What will be written."""

    tensors: CheckpointTensors
    family: Family  # what the model becomes
    config: dict[str, Any] | None  # its config.json; None where the kept one is handed back byte for byte
    kept: Path | None  # where the kept one, and what goes with it, lies: the checkpoint, or a directory of transformers
    tokenizer: ExportTokenizer  # what goes beside it
    plan: list[Step]
    names: dict[str, str]  # name in the family -> stored name, where they differ
    # Names under which a tied tensor is stored again -> the name in the family of the one that it is.
    copies: dict[str, str]
    # Fields of config.json that were left out when the model was converted from such a directory.
    ignored: tuple[str, ...]
    dtype: torch.dtype | None  # of what is written; None: as stored
    notes: list[str]  # what a user should know


def plan_export(
    path: Path, *, like: Path | None = None, dtype: torch.dtype | None = None, averaged: bool = False
) -> Export:
    """Look at a checkpoint or a run's newest and decide what it becomes; no tensor is read. `like`: a directory of
    transformers whose config.json and other files to take over. `dtype`: None: as stored. Raises CheckpointError where
    it is damaged, no family represents it exactly, or `like` is another model; DataError where a tokenizer cannot be
    read."""
    tensors = CheckpointTensors(path, averaged=averaged)
    model = tensors.config
    source = like or tensors.directory
    tokenizer = export_tokenizer(tensors, like)
    values = _described(tensors, like)
    names: dict[str, str] = {}
    copies: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    notes = [tokenizer.note] if tokenizer.note is not None else []
    if values is not None:
        if like is None:
            names, copies, ignored = _kept_source(tensors)
        family = family_of(values, str(source / CONFIG))
        read = {name: value for name, value in values.items() if name not in ignored}
        problem = _of_another_model(family, read, source, tensors)
        if problem and like is not None:
            raise CheckpointError(problem)
        values = None if problem else values
    if values is None:
        names, copies, ignored = {}, {}, ()
        try:
            family, config = describe_model(model, tensors.bert)
        except CheckpointError:
            if not model.mtp_num_layers:
                raise
            model = dataclasses.replace(model, mtp_num_layers=0)
            family, config = describe_model(model, tensors.bert)
            notes.append(f"transformers' {family.model_type} has no blocks for --mtp-num-layers: they are left out")
        ids = special_ids(carried_tokenizer(tokenizer.directory), model.vocab_size, bert=tensors.bert is not None)
        config |= {name: id for name, id in ids.items() if config.get(name) is None}  # RoBERTa's pad decides positions
        kept = None
    else:
        kept, config = source, None
        if dtype is not None:
            config = values | dict.fromkeys([n for n in _DTYPE_FIELDS if n in values] or ["dtype"], _name(dtype))
        elif like is not None:
            config = _with_dtype(values, tensors, notes)
    if model.untie_embeddings_and_output_weights:
        copies = {**family.unused, **copies}
    if values is None or like is not None:
        copies |= family.prediction_copies(model)
    plan = make_plan(family, model, tensors.bert)
    _require_same_tensors(plan, tensors, model)
    return Export(
        tensors=tensors,
        family=family,
        config=config,
        kept=kept,
        tokenizer=tokenizer,
        plan=plan,
        names=names,
        copies=copies,
        ignored=ignored,
        dtype=dtype,
        notes=notes,
    )


def _described(tensors: CheckpointTensors, like: Path | None) -> dict[str, Any] | None:
    if like is not None:
        return read_config(like)
    if KEPT_CONFIG not in tensors.manifest.files:
        return None
    verify(tensors.directory / KEPT_CONFIG, tensors.manifest.files[KEPT_CONFIG])
    return read_object(tensors.directory / KEPT_CONFIG)


def _kept_source(tensors: CheckpointTensors) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Names, copies and ignored fields of the directory that the checkpoint was converted from; see `Export`."""
    if KEPT_SOURCE not in tensors.manifest.files:
        return {}, {}, ()
    path = tensors.directory / KEPT_SOURCE
    verify(path, tensors.manifest.files[KEPT_SOURCE])
    about = read_object(path)
    names, copies, ignored = about.get("names"), about.get("copies"), about.get("ignored", [])
    if not isinstance(names, dict) or not isinstance(copies, dict) or not isinstance(ignored, list):
        raise CheckpointError(f"{path} does not say which names the tensors had: the checkpoint is damaged")
    return (
        {str(name): str(stored) for name, stored in names.items()},
        {str(copy): str(name) for copy, name in copies.items()},
        tuple(str(name) for name in ignored),
    )


def _with_dtype(values: dict[str, Any], tensors: CheckpointTensors, notes: list[str]) -> dict[str, Any] | None:
    """A config.json that names the dtype of the checkpoint's weights; None where it does already, or names none.
    transformers loads a model in the dtype that its config.json names, and would round weights that have another."""
    written = _name(_widest({tensors.dtype(name) for name in tensors.shapes}))
    wrong = {name: values[name] for name in _DTYPE_FIELDS if values.get(name) not in (None, written)}
    if not wrong:
        return None
    notes += [
        f"config.json said {name} {said}, which transformers would round to: it says {written}, as stored"
        for name, said in wrong.items()
    ]
    return values | dict.fromkeys(wrong, written)


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """One that holds the values of all."""
    return functools.reduce(torch.promote_types, dtypes)


def _of_another_model(family: Family, values: dict[str, Any], source: Path, tensors: CheckpointTensors) -> str | None:
    """How the model of a config.json differs from the checkpoint's, if it does."""
    here, where = tensors.config, str(source / CONFIG)
    there = family.describe(values, where).model
    if not here.mtp_num_layers:  # those blocks are of no use to transformers' model
        there = dataclasses.replace(there, mtp_num_layers=0)
    different = [*differing(there, here), *differing_experts(there.experts, here.experts)]
    paired = tensors.bert is not None and tensors.bert.sentence_task != "none"
    if not same_bert(family.to_bert(values, where, paired=paired), tensors.bert, here):
        different = ["bert_style"]
    shown = ", ".join(
        f"{name} {getattr(there, name, 'other')} there, {getattr(here, name, 'other')} here" for name in different
    )
    return f"--like {source} is of another model than the checkpoint: {shown}" if different else None


def _require_same_tensors(plan: list[Step], tensors: CheckpointTensors, model: ResolvedModel) -> None:
    wanted = {step.ours: step.shape for step in plan}
    depths = range(model.mtp_num_layers, tensors.config.mtp_num_layers)
    left_out = tuple(f"blocks.{model.num_layers + depth}." for depth in depths)
    for name in sorted(wanted.keys() | tensors.shapes.keys()):
        if not name.startswith(left_out) and wanted.get(name) != tensors.shapes.get(name):
            there = tensors.shapes.get(name, "missing")
            raise CheckpointError(
                f"{tensors.directory}: {name} is {there}, but the model of its manifest has {wanted.get(name, 'none')}"
            )


def write_directory(export: Export, target: Path, *, most_bytes: int) -> None:
    """Write a directory that transformers loads. `target`: an empty directory."""
    types_of = dict(_types_of(export))
    where = write_shards(target, "model", types_of, _converted(export), most_bytes=most_bytes)
    if len(set(where.values())) > 1:
        size = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in types_of.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        _write_json(target / INDEX, index)
    _write_config(export, target)


def _types_of(export: Export) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    for name, shape in their_shapes(export.plan).items():
        dtype = _written(export, _parts(export, name)[0][0])
        yield export.names.get(name, name), (dtype, shape)
        yield from ((copy, (dtype, shape)) for copy, original in export.copies.items() if original == name)


def _converted(export: Export) -> Iterator[tuple[str, Tensor]]:
    last: tuple[str, Tensor] | None = None
    for name, shape in their_shapes(export.plan).items():
        result: Tensor | None = None
        for step, source in _parts(export, name):
            if last is None or last[0] != step.ours:
                last = None  # before the next is read: one of ours at a time
                last = (step.ours, export.tensors.read(step.ours, _written(export, step)))
            if step.is_copy:
                result = last[1]
            else:
                result = torch.empty(shape, dtype=last[1].dtype) if result is None else result
                step.take_apart(last[1], source, result)
        assert result is not None
        yield export.names.get(name, name), result
        yield from ((copy, result) for copy, original in export.copies.items() if original == name)


def _written(export: Export, step: Step) -> torch.dtype:
    return export.tensors.dtype(step.ours) if export.dtype is None or step.is_buffer else export.dtype


def _parts(export: Export, name: str) -> list[tuple[Step, int]]:
    """The tensors of megacore's that one of theirs consists of, and which of their sources it is."""
    return [(step, step.theirs.index(name)) for step in export.plan if name in step.theirs]


def _write_config(export: Export, target: Path) -> None:
    tensors, kept = export.tensors, export.kept
    if export.config is not None:
        config = export.config
        if kept is None:
            config = config | {"dtype": _name(_widest({dtype for dtype, _ in dict(_types_of(export)).values()}))}
        _write_json(target / CONFIG, config)
    elif kept == tensors.directory:
        (target / CONFIG).write_bytes((kept / KEPT_CONFIG).read_bytes())
    elif kept is not None:
        carry(present(kept, (CONFIG,)), target)
    if KEPT_GENERATION_CONFIG in tensors.manifest.files and kept == tensors.directory:
        verify(tensors.directory / KEPT_GENERATION_CONFIG, tensors.manifest.files[KEPT_GENERATION_CONFIG])
        (target / GENERATION_CONFIG).write_bytes((tensors.directory / KEPT_GENERATION_CONFIG).read_bytes())
    elif kept is not None and kept != tensors.directory:
        carry(present(kept, (GENERATION_CONFIG,)), target)
    elif kept is None and tensors.bert is None and (generation := generation_config(config)):
        _write_json(target / GENERATION_CONFIG, generation)
    carry(export.tokenizer.files, target)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
