"""Adapters in PEFT's format, both ways, and merged into the weights that they were trained beside.

PEFT has one adapter for each linear layer of transformers' model. Where that is one of megacore's projections, both are
the same numbers. Where a family stores several projections as one layer, and each has an adapter here, theirs is one of
a multiple of the rank: A one below the other, and B side by side, with zeros elsewhere. The other way, the adapter of
one layer of theirs becomes that of each projection in it. The products are equal in any case.

Shape legend: i input and o output features, r rank, p projections.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.files import verify
from megacore.checkpoint.manifest import adapters_of
from megacore.checkpoint.tensor_file import read_tensor
from megacore.checkpoint.tensor_header import StoredTensor, read_header
from megacore.config import Config, LoraConfig, ResolvedModel, StartConfig
from megacore.config.lora import adapted_parts, known_targets
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_shards, write_weights
from megacore.convert.from_hf import KEPT_CONFIG
from megacore.convert.hf_directory import inside, read_config
from megacore.convert.plan import Step, make_plan, their_shapes, whole_config
from megacore.errors import CheckpointError
from megacore.layers.lora import IN, MAGNITUDE, OUT, lengths_of, projection_of_rows
from megacore.models.hf.families import describe_model, family_of
from megacore.models.hf.family import Family
from megacore.safe_json import read_object

CONFIG, STEM = "adapter_config.json", "adapter_model"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None, True),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of a layer, or of one of its projections, as megacore has it.

    Attributes:
        part: which projection; None: the whole layer.
        a: [r, i]
        b: [o, r], with zeros in the rows of other projections.
    """

    part: int | None
    a: Tensor
    b: Tensor


def lora_of(tensors: CheckpointTensors) -> LoraConfig:
    """The adapters' section of a checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    lora = adapters_of(tensors.manifest, tensors.directory)
    if lora.lora_rank is None:
        raise CheckpointError(f"{tensors.directory} has no adapters: give a checkpoint of a run with --lora-rank")
    return lora


def _adapters(
    read: Callable[[str], Tensor], model: ResolvedModel, lora: LoraConfig, name: str, parts: list[int]
) -> Iterator[Adapter]:
    """Those of a linear layer, by its global name; `read` gives a tensor by its own."""
    a, b = (read(f"{name}.{part}.weight") for part in (IN, OUT))
    if not parts:
        yield Adapter(part=None, a=a, b=b)
        return
    of_row = projection_of_rows(model, torch.arange(len(b))).unsqueeze(1)
    for part, of_part in zip(parts, a.split(lora.lora_rank or 1), strict=True):
        yield Adapter(part=part, a=of_part, b=b * (of_row == part))


def _layers(lora: LoraConfig, model: ResolvedModel) -> Iterator[tuple[str, list[int]]]:
    """The linear layers with adapters, by their global names, each with its projections that have one each."""
    for number in range(model.num_layers):
        for path, parts in adapted_parts(lora, model).items():
            yield f"blocks.{number}.{path}", parts


def _adapted_rows(model: ResolvedModel, parts: list[int], rows: int) -> Tensor:
    """Which rows of a layer have an adapter: all, or those of some projections. The others' magnitudes mean nothing."""
    whole = torch.ones(rows, dtype=torch.bool)
    return torch.isin(projection_of_rows(model, torch.arange(rows)), torch.tensor(parts)) if parts else whole


# ---- merged ----------------------------------------------------------------------------------------------------------


def _merged(
    adapters: CheckpointTensors, base: CheckpointTensors | None, lora: LoraConfig, layer: str, parts: list[int]
) -> Tensor:
    """The weights of a layer with what its adapters make of them, [o, i] in fp64. `base`: None: of weights of zeros."""
    pairs = _adapters(adapters.read, adapters.config, lora, layer, parts)
    added = lora.lora_scale * sum(one.b.double() @ one.a.double() for one in pairs)
    whole = torch.as_tensor(added if base is None else base.read(f"{layer}.weight").double() + added)
    if lora.lora_dora:
        ratio = adapters.read(f"{layer}.{MAGNITUDE}").double() / lengths_of(whole.square().sum(1))
        adapted = _adapted_rows(adapters.config, parts, len(whole))
        whole = torch.where(adapted, ratio, 1.0).unsqueeze(1) * whole
    return whole


def write_merged(adapters: CheckpointTensors, base: CheckpointTensors, target: Path, *, most_bytes: int) -> None:
    """Write a checkpoint of the base's weights with what the adapters add to them, in the base's dtypes.

    Args:
        adapters: of the run.
        base: what they were trained beside.
        target: an empty directory.
        most_bytes: of a file.
    """
    lora = lora_of(adapters)
    layers = dict(_layers(lora, adapters.config))
    _require_shapes(adapters, base, layers)
    used = base.manifest.files_of()
    kept = sorted(base.manifest.files.keys() - used)
    for name in kept:
        verify(base.directory / name, base.manifest.files[name])
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes((base.directory / name).read_bytes())

    def merged(name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if layer not in layers:
            return base.read(name)
        return _merged(adapters, base, lora, layer, layers[layer]).to(base.dtype(name))

    write_weights(
        target,
        whole_config(base.config, base.bert),
        {name: (base.dtype(name), shape) for name, shape in base.shapes.items()},
        ((name, merged(name)) for name in base.shapes),
        most_bytes=most_bytes,
        others=kept,
        tokenizer=base.manifest.tokenizer,
        buffers=[name for name in base.manifest.tensors.get("buffers", {}) if name in base.shapes],
    )


def _require_shapes(adapters: CheckpointTensors, base: CheckpointTensors, layers: Mapping[str, list[int]]) -> None:
    for layer in layers:
        wanted = (adapters.shapes[f"{layer}.{OUT}.weight"][0], adapters.shapes[f"{layer}.{IN}.weight"][1])
        if (there := base.shapes.get(f"{layer}.weight")) != wanted:
            raise CheckpointError(
                f"{base.directory}: {layer}.weight is {there or 'missing'}, and the adapters of {adapters.directory} "
                f"are of one of {wanted}: use --base with the checkpoint that they were trained beside"
            )


# ---- to PEFT ---------------------------------------------------------------------------------------------------------


def family_for(model: ResolvedModel, directory: Path, like: Path | None) -> Family:
    """The family whose names a model's adapters get.

    Args:
        model: the base.
        directory: its checkpoint, which may have the config.json that it was converted from.
        like: a directory of transformers that says it; None: that checkpoint, or the first family that computes what
            the model does.
    """
    if like is not None:
        return family_of(read_config(like), str(like))
    if (directory / KEPT_CONFIG).is_file():
        return family_of(read_object(directory / KEPT_CONFIG), str(directory / KEPT_CONFIG))
    return describe_model(model)[0]


def write_peft(
    tensors: CheckpointTensors, base: CheckpointTensors | None, family: Family, target: Path, *, like: Path | None
) -> None:
    """Write a directory that PEFT loads.

    Args:
        tensors: the adapters.
        base: what they were trained beside; DoRA needs it, as PEFT has a length for rows without an adapter too.
        family: of the base model.
        target: an empty directory.
        like: the directory of the base model, if it is known.
    """
    lora, steps = lora_of(tensors), _steps(family, tensors.config)
    layers, shapes = dict(_layers(lora, tensors.config)), their_shapes(list(steps.values()))
    if base is not None:
        _require_shapes(tensors, base, layers)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, parts in layers.items():
        step = steps[name]
        for adapter in _adapters(tensors.read, tensors.config, lora, name, parts):
            for source, theirs in enumerate(step.theirs):
                if adapter.part in (None, source) or len(step.theirs) == 1:
                    b = torch.zeros(shapes[theirs][step.transposed], adapter.b.shape[1], dtype=adapter.b.dtype)
                    _of_width(step, adapter.b.shape[1]).take_apart(adapter.b, source, b)
                    found.setdefault(_module(step, source), []).append((adapter.a, b))
    made = dict[str, Tensor]()
    if base is not None and lora.lora_dora:
        rows_of = {module: pairs[0][1][:, 0] for module, pairs in found.items()}
        made = _lengths(tensors, base, layers, steps, rows_of)
    for module, pairs in found.items():
        a, b = (torch.cat(list(each), dim) for dim, each in enumerate(zip(*pairs, strict=True)))
        made |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    types_of = {name: (value.dtype, tuple(value.shape)) for name, value in made.items()}
    write_shards(target, STEM, types_of, iter(made.items()), most_bytes=1 << 62)
    rank, alpha = lora.lora_rank or 1, lora.lora_scale * (lora.lora_rank or 1)
    several = {_end(module): len(pairs) for module, pairs in found.items() if len(pairs) > 1}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if like is None else str(like),
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora.lora_dropout,
        "use_dora": lora.lora_dora,
        "target_modules": sorted({_end(module) for module in found}),
        "rank_pattern": {end: count * rank for end, count in several.items()},
        "alpha_pattern": {end: count * alpha for end, count in several.items()},
        "fan_in_fan_out": any(steps[name].transposed for name in layers),
        "bias": "none",
        "inference_mode": True,
    }
    (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _lengths(
    tensors: CheckpointTensors,
    base: CheckpointTensors,
    layers: Mapping[str, list[int]],
    steps: Mapping[str, Step],
    rows_of: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """DoRA's lengths of every row of the layers of theirs in `rows_of`, by key: the learned ones where a row has an
    adapter, and the base's elsewhere. `rows_of`: of each, any tensor of as many rows, in the dtype of the result."""
    made = {module: torch.full_like(rows, math.nan).unsqueeze(1) for module, rows in rows_of.items()}
    for name, step in steps.items():
        modules = {source: one for source in range(len(step.theirs)) if (one := _module(step, source)) in made}
        if not modules:
            continue
        lengths = lengths_of(base.read(f"{name}.weight").double().square().sum(1))
        if name in layers:
            adapted = _adapted_rows(tensors.config, layers[name], len(lengths))
            lengths = torch.where(adapted, tensors.read(f"{name}.{MAGNITUDE}").double(), lengths)
        for source, module in modules.items():
            _of_width(step, 1).take_apart(lengths.unsqueeze(1), source, made[module])
    return {_magnitude(module): rows.squeeze(1) for module, rows in made.items()}


def _steps(family: Family, model: ResolvedModel) -> dict[str, Step]:
    """The matrices of blocks by the names of their layers."""
    steps = [step for step in make_plan(family, model) if step.ours.startswith("blocks.") and len(step.shape) == 2]
    return {step.ours.removesuffix(".weight"): step for step in steps}


def _module(step: Step, source: int) -> str:
    """The layer of theirs that one of the sources of a matrix is."""
    return step.theirs[source].removesuffix(".weight")


def _magnitude(module: str) -> str:
    """The key of DoRA's lengths of a layer of theirs."""
    return f"base_model.model.{module}.lora_magnitude_vector"


def _of_width(step: Step, columns: int) -> Step:
    """The same order of rows, of a matrix with so many columns that is stored as [out, in]."""
    return dataclasses.replace(step, shape=(step.shape[0], columns), transposed=False)


def _end(module: str) -> str:
    """What follows the number of the block in the name of a layer."""
    return re.split(r"\.\d+\.", module, maxsplit=1)[1]


def require_same_adapters(
    path: Path, tensors: CheckpointTensors, base: CheckpointTensors | None, family: Family
) -> float:
    """Read a directory back, and compare the matrices that its adapters make of the base's, by PEFT's formula, with
    those that `write_merged` makes. Without a base, what adapters add is compared.

    Returns:
        The largest difference of two entries, relative to the largest entry of the matrix.

    Raises:
        CheckpointError: it is more than rounding.
    """
    lora, steps = lora_of(tensors), _steps(family, tensors.config)
    layers, shapes, theirs = dict(_layers(lora, tensors.config)), their_shapes(list(steps.values())), _open(path, steps)
    found, limits = list[Tensor](), list[Tensor]()
    for name, step in steps.items():
        if name not in layers and not any(_module(step, i) in theirs.adapters for i in range(len(step.theirs))):
            continue
        zeros = torch.zeros(step.shape, dtype=torch.float64)
        weight = zeros if base is None else base.read(f"{name}.weight").double()

        def read(source: int, step: Step = step, weight: Tensor = weight) -> Tensor:
            module, columns = _module(step, source), step.shape[1]
            whole = weight.new_zeros(shapes[step.theirs[source]][step.transposed], columns)
            _of_width(step, columns).take_apart(weight, source, whole)
            if (adapter := theirs.adapters.get(module)) is not None:
                a, b, scale = adapter
                whole += scale * (b.double() @ a.double())
            if (lengths := theirs.lengths.get(module)) is not None:
                whole *= (lengths.double() / whole.norm(dim=1).clamp(min=1e-19)).unsqueeze(1)
            return whole

        adapted, expected, rounding = torch.zeros(len(weight), dtype=torch.bool), weight, 1e-12
        if name in layers:
            adapted = _adapted_rows(tensors.config, layers[name], len(weight))
            expected = _merged(tensors, base, lora, name, layers[name])
        if lora.lora_dora:  # elsewhere the length of a row is rounded, and PEFT divides by it
            rounding = max(torch.finfo(lengths.dtype).eps for lengths in theirs.lengths.values())
        difference = _of_width(step, step.shape[1]).assemble(read) - expected
        found.append(difference.abs().amax(1) / expected.abs().max().clamp(min=1e-30))
        limits.append(torch.where(adapted, 1e-12, rounding))
    differences = torch.cat(found)
    worst = float(differences.max())
    if not bool((differences <= torch.cat(limits)).all()):  # nor is NaN
        raise CheckpointError(
            f"{path}: what its adapters make of the weights differs by {worst:.1e}; nothing was published"
        )
    return worst


# ---- from PEFT -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Theirs:
    """The adapters of a directory: the values of its configuration, and A, B and the scale by layer, and DoRA's lengths
    of rows."""

    values: Mapping[str, Any]
    adapters: Mapping[str, tuple[Tensor, Tensor, float]]
    lengths: Mapping[str, Tensor]


def _open(path: Path, steps: Mapping[str, Step]) -> _Theirs:
    """`steps`: the matrices of the base, which adapters have to fit."""
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}: give a directory that PEFT has saved")
    values = read_object(inside(path, CONFIG))
    problems = [
        f"{name} is {json.dumps(values[name])[:80]}, and megacore's adapters have {json.dumps(usual[0])}"
        for name, usual in _USUAL.items()
        if name in values and values[name] not in usual
    ]
    stored = read_header(inside(path, f"{STEM}.safetensors"))
    layers = {match[1] for name in stored if (match := _KEY.fullmatch(name))}
    known = {f"base_model.model.{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    known |= {_magnitude(layer) for layer in layers} if values.get("use_dora") else set()
    problems += [f"{name[:120]} is missing" for name in sorted(known - stored.keys())]
    problems += [f"{name[:120]} is none of the A and B of a linear layer" for name in sorted(stored.keys() - known)]
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems[:6])}: save adapters without this, or merge them with PEFT")
    if problems := list(_misshapen(stored, sorted(layers), steps)):
        raise CheckpointError(
            f"{path}: {'; '.join(problems[:6])}: use --base with the model that they were trained beside"
        )
    adapters = {}
    for layer in sorted(layers):
        a, b = (read_tensor(stored[f"base_model.model.{layer}.lora_{part}.weight"]) for part in "AB")
        adapters[layer] = a, b, _scale(values, layer, len(a))
    lengths = {layer: read_tensor(stored[_magnitude(layer)]) for layer in layers} if values.get("use_dora") else {}
    return _Theirs(values=values, adapters=adapters, lengths=lengths)


def _misshapen(stored: Mapping[str, StoredTensor], layers: list[str], steps: Mapping[str, Step]) -> Iterator[str]:
    """What is not of the shape that the base, or the other part of an adapter, makes it."""
    shapes = their_shapes(list(steps.values()))
    transposed = {name for step in steps.values() if step.transposed for name in step.theirs}
    for layer in layers:
        names = [f"base_model.model.{layer}.lora_{part}.weight" for part in "AB"]
        a, b = ((*stored[name].shape, 1, 1) for name in names)
        base = shapes.get(f"{layer}.weight", (b[0], a[1]))  # a layer that no target is gets a refusal of its own
        outputs, inputs = base[::-1] if f"{layer}.weight" in transposed else base
        rank = max(a[0], 1)
        wanted = {names[0]: (rank, inputs), names[1]: (outputs, rank), _magnitude(layer): (outputs,)}
        for name, shape in wanted.items():
            if name in stored and stored[name].shape != shape:
                yield f"{name[:120]} is {list(stored[name].shape)}, and has to be {list(shape)}"


def _scale(values: Mapping[str, Any], layer: str, rank: int) -> float:
    """What a layer's adapter is multiplied by."""
    patterns = values.get("alpha_pattern") or {}
    alpha = next(
        (each for end, each in patterns.items() if re.search(rf"(^|\.){end}$", layer)), values.get("lora_alpha")
    )
    return float(alpha or 8) / (math.sqrt(rank) if values.get("use_rslora") else rank)


def write_adapters(path: Path, base: CheckpointTensors, family: Family, target: Path, *, most_bytes: int) -> None:
    """Write a checkpoint of adapters, from which a run goes on, from a directory that PEFT has saved.

    Args:
        path: the directory.
        base: what the adapters are of.
        family: of the base, whose names they have.
        target: an empty directory.
        most_bytes: of a file.

    Raises:
        CheckpointError: every part of it that is no adapter of a linear layer of a block.
    """
    model = base.config
    steps = _steps(family, model)
    theirs = _open(path, steps)
    if not theirs.adapters:
        raise CheckpointError(f"{path} has no adapters of linear layers: give the directory that PEFT saved")
    rank = max(len(a) for a, _, _ in theirs.adapters.values())
    scales = {scale for _, _, scale in theirs.adapters.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    known = known_targets(model, has_experts=model.experts is not None)
    names = {(target.path, target.part): name for name, target in known.items()}
    targets, used = set[str](), set[str]()
    for layer, step in steps.items():
        for part in range(len(step.theirs)):
            name = names.get((layer.split(".", 2)[2], part if len(step.theirs) > 1 else None))
            if (module := _module(step, part)) in theirs.adapters and name is not None:
                targets.add(name)
                used.add(module)
    if unknown := sorted(theirs.adapters.keys() - used):
        raise CheckpointError(
            f"{path} has adapters of {', '.join(unknown[:4])}, and megacore has some of {', '.join(known)}: save "
            "adapters of these only, or merge them with PEFT"
        )
    lora = LoraConfig(
        lora_rank=rank, lora_alpha=scale * rank, lora_dropout=float(theirs.values.get("lora_dropout") or 0.0),
        lora_targets=",".join(name for name in known if name in targets), lora_dora=bool(theirs.lengths),
    )  # fmt: skip
    made = dict(_made(theirs, steps, lora, base, scale))
    config: Config = dataclasses.replace(
        whole_config(model, None), lora=lora, start=StartConfig(pretrained_checkpoint=str(base.directory))
    )
    types_of = {name: (value.dtype, tuple(value.shape)) for name, value in made.items()}
    write_weights(target, config, types_of, iter(made.items()), most_bytes=most_bytes)


def _made(
    theirs: _Theirs, steps: Mapping[str, Step], lora: LoraConfig, base: CheckpointTensors, scale: float
) -> Iterator[tuple[str, Tensor]]:
    rank = lora.lora_rank or 1
    for name, parts in _layers(lora, base.config):
        step = steps[name]
        found = [theirs.adapters.get(_module(step, source)) for source in range(len(step.theirs))]
        dtype = next((each[0].dtype for each in found if each is not None), torch.float32)
        a = torch.zeros(max(len(parts), 1), rank, step.shape[1], dtype=dtype)
        for number, part in enumerate(parts or [0]):
            if (each := found[part]) is not None:
                a[number, : len(each[0])] = each[0]

        def read(source: int, step: Step = step, found: Any = found, dtype: torch.dtype = dtype) -> Tensor:
            if found[source] is None:
                return torch.zeros(step.sizes[source], rank, dtype=dtype)
            _, b, own = found[source]
            widened = torch.zeros(len(b), rank, dtype=dtype)
            widened[:, : b.shape[1]] = b if own == scale else b * (own / scale)
            return widened

        yield f"{name}.{IN}.weight", a.flatten(0, 1)
        yield f"{name}.{OUT}.weight", _of_width(step, rank).assemble(read)
        if lora.lora_dora:
            own = base.read(f"{name}.weight").to(dtype).norm(dim=1, keepdim=True)  # where they have no adapter

            def length(source: int, step: Step = step, own: Tensor = own) -> Tensor:
                if (found := theirs.lengths.get(_module(step, source))) is not None:
                    return found.unsqueeze(1)
                _of_width(step, 1).take_apart(own, source, rows := torch.zeros(step.sizes[source], 1, dtype=own.dtype))
                return rows

            yield f"{name}.{MAGNITUDE}", _of_width(step, 1).assemble(length).squeeze(1)
