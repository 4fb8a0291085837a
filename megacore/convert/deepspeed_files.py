"""DeepSpeed's checkpoints: the weights of ZeRO stages 0 to 3, and of pipelines, from files that are pickles.

    latest                                          the name of the directory, global_stepN
    global_stepN/mp_rank_MM_model_states.pt         16-bit weights, and the shapes of the sharded ones
    global_stepN/zero_pp_rank_DDD_mp_rank_MM_model_states.pt     the same of ZeRO-3, by data-parallel rank
    global_stepN/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   fp32 weights, flat and sharded
    global_stepN/layer_LL[-model_MM]-model_states.pt    the weights of a layer of a pipeline

Where the flat fp32 weights are there, they are taken; otherwise those of the model. Only data is read (pickled.py).
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config.messages import counted
from megacore.convert.hf_directory import inside
from megacore.convert.megatron_files import RankFile, flat
from megacore.convert.pickled import load
from megacore.errors import CheckpointError

_POINTER = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,4})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,4})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{2,4})(?:-model_(\d{2,4}))?-model_states\.pt")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DeepSpeedCheckpoint:
    """A checkpoint of DeepSpeed's."""

    path: Path
    model: dict[int, list[Mapping[str, Any]]]  # what the model files hold, [mp rank][data-parallel rank]
    layers: dict[int, dict[int, dict[str, Tensor]]]  # the weights of a pipeline's layers, by number and mp rank
    optimizer: dict[int, list[Path]]  # the files of the optimizer's state, [mp rank][data-parallel rank]

    @property
    def args(self) -> argparse.Namespace | None:
        """Megatron-LM's flags, which Megatron-DeepSpeed saves; None: another program wrote the checkpoint."""
        found = self.model[0][0].get("args") if self.model else None
        return found if isinstance(found, argparse.Namespace) else None

    def weights(self) -> dict[str, Tensor]:
        """The weights of a model that is not divided, by the names that the program gave them. Raises CheckpointError
        where it is divided, or files contradict each other."""
        if self.layers:
            names = [f"layer {number}: {next(iter(ranks[min(ranks)]), '')}" for number, ranks in self.layers.items()]
            raise CheckpointError(
                f"{self.path} is of a PipelineModule with {counted(len(names), 'layer')} ({'; '.join(names[:2])}), and "
                "has no flags of Megatron-DeepSpeed's that say which layer of a model each is: load it in the program "
                "that wrote it, save the weights under the names of transformers, and use --from hf"
            )
        if len(self.model) != 1:
            raise CheckpointError(
                f"{self.path} is of a model that is divided over {len(self.model)} tensor-parallel ranks, and has no "
                "flags of Megatron-DeepSpeed's that say how: save it from one rank"
            )
        (ranks,) = self.model.values()
        first = ranks[0]
        module = first.get("module")
        if not isinstance(module, Mapping):
            raise CheckpointError(f"{self.path} has no module")
        stored = dict(flat(dict(module), "", set()))
        files = self.optimizer.get(next(iter(self.model)), [])
        sharded = self._fp32(first, files) if files else {}
        fragments = any(value.numel() == 0 for value in stored.values())
        if not sharded and (len(ranks) > 1 or fragments):
            raise CheckpointError(f"{self.path} is of ZeRO stage 3, and lacks the files of its optimizer's state")
        frozen = _frozen(ranks)
        buffers = {name: stored[name] for name in first.get("buffer_names") or () if name in stored}
        if not sharded:
            return stored
        weights = {**(stored if len(ranks) == 1 else buffers), **frozen, **sharded}
        shared = first.get("shared_params")
        for name, other in shared.items() if isinstance(shared, Mapping) else ():
            if other in sharded:
                weights[name] = sharded[other]
        return weights

    def _fp32(self, first: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Tensor]:
        states = [_state(path) for path in files]
        stage, count = states[0].get("zero_stage", 0), states[0].get("partition_count", len(files))
        count = max(count) if isinstance(count, list) else count
        stage = stage if isinstance(stage, int) else 3 if "fp32_flat_groups" in states[0] else 2
        if count != len(files):
            raise CheckpointError(f"{self.path} has {len(files)} files of the optimizer's state of {count} ranks")
        shapes = first.get("param_shapes")
        given = shapes if isinstance(shapes, list | tuple) else [shapes]
        groups: list[Mapping[str, Any]] = [group for group in given if isinstance(group, Mapping)]
        if len(groups) != len(given):
            raise CheckpointError(f"{self.path} has no param_shapes")
        is_whole = stage == 3 or "single_partition_of_fp32_groups" not in states[0]
        key = "fp32_flat_groups" if is_whole else "single_partition_of_fp32_groups"
        parts = [_tensors(state.get(key), path) for state, path in zip(states, files, strict=True)]
        if is_whole:
            return dict(_of_stage_3(groups, parts, self.path))
        return dict(_of_stage_2(groups, parts, self.path))

    def megatron_ranks(self) -> list[list[RankFile]]:
        """The weights as Megatron-LM's files have them, [0][tp]; a pipeline's layers as one stage. Raises
        CheckpointError where it is not of Megatron-DeepSpeed's."""
        args = self.args
        assert args is not None
        version = self.model[0][0].get("checkpoint_version", 3.0)
        found = []
        for rank, model in sorted(self.model.items()):
            chunk = self._layers_of(rank) if self.layers else dict(flat(dict(model[0].get("module") or {}), "", set()))
            found.append(
                RankFile(
                    path=self.path,
                    tp=rank,
                    pp=0,
                    args=vars(args),
                    version=float(version) if type(version) in (int, float) else 3.0,
                    iteration=0,
                    chunks=[chunk],
                )
            )
        return [found]

    def _layers_of(self, rank: int) -> dict[str, Tensor]:
        """A pipeline's layers under the names that Megatron-LM gives them: the embedding first, then blocks, the final
        norm, and a head that is not tied; layers without weights have no file."""
        chunk: dict[str, Tensor] = {}
        block = 0
        for number in sorted(self.layers):
            tensors = self.layers[number].get(rank)
            if tensors is None:
                raise CheckpointError(f"{self.path} lacks the file of layer {number}, mp rank {rank}")
            is_block = any(name.startswith(("self_attention.", "attention.")) for name in tensors)
            for name, value in tensors.items():
                if is_block:
                    chunk[f"language_model.encoder.layers.{block}.{name}"] = value
                elif name.startswith(("word_embeddings.", "position_embeddings.")):
                    place = "language_model.embedding" if not block else "word_embeddings_for_head"
                    chunk[f"{place}.{name}" if not block else "word_embeddings_for_head.weight"] = value
                elif name in ("lm_head.weight", "weight") and value.dim() == 2:
                    chunk["language_model.output_layer.weight"] = value
                else:
                    chunk[f"language_model.encoder.final_layernorm.{name.removeprefix('final_layernorm.')}"] = value
            block += is_block
        return chunk


def open_deepspeed(path: Path) -> DeepSpeedCheckpoint:
    """Look at a checkpoint of DeepSpeed's. `path`: a global_stepN directory, or the one above it, whose file `latest`
    names it. Raises CheckpointError where files are missing, or hold what megacore does not load."""
    directory = _directory(path)
    model: dict[tuple[int, int], Path] = {}
    optimizer: dict[tuple[int, int], Path] = {}
    layers: dict[int, dict[int, dict[str, Tensor]]] = {}
    for entry in sorted(directory.iterdir()):
        if match := _MODEL.fullmatch(entry.name):
            model[int(match[2]), int(match[1] or 0)] = inside(directory, entry.name)
        elif match := _OPTIMIZER.fullmatch(entry.name):
            optimizer[int(match[2]), int(match[1])] = inside(directory, entry.name)
        elif match := _LAYER.fullmatch(entry.name):
            state = _loaded(inside(directory, entry.name))
            layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = dict(flat(state, "", set()))
    if not model:
        raise CheckpointError(f"{directory} has no mp_rank_MM_model_states.pt: it is no checkpoint of DeepSpeed's")
    pipelined = len(layers) > 0
    states = {key: _loaded(file) for key, file in model.items()}
    if pipelined:  # one file for each rank of a layer's group is enough: the weights are in the layers' files
        ranks = {rank for by_rank in layers.values() for rank in by_rank}
        states = {(rank, 0): next(iter(states.values())) for rank in ranks}
    by_rank = {rank: _in_order(states, rank, directory) for rank in sorted({rank for rank, _ in states})}
    files = {rank: _in_order(optimizer, rank, directory) for rank in {rank for rank, _ in optimizer}}
    return DeepSpeedCheckpoint(path=directory, model=by_rank, layers=layers, optimizer=files)


def _in_order(found: Mapping[tuple[int, int], Any], rank: int, directory: Path) -> list[Any]:
    """What the data-parallel ranks of an mp rank have."""
    numbers = sorted(data for mp, data in found if mp == rank)
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - set(numbers))
        raise CheckpointError(f"{directory} lacks the file of data-parallel rank {missing}, mp rank {rank}")
    return [found[rank, number] for number in numbers]


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if not (path / _POINTER).is_file():
        return path
    tag = inside(path, _POINTER).read_bytes()[:200].decode("utf-8", "replace").strip()
    directory = path / tag
    if not tag or "/" in tag or "\\" in tag or tag in (".", "..") or directory.is_symlink() or not directory.is_dir():
        raise CheckpointError(f"{path / _POINTER} says {tag[:80]!r}, which is no directory beside it")
    return directory


def _loaded(path: Path) -> Mapping[str, Any]:
    state = load(path, deepspeed=True)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds no table")
    _require_fields(state, path)
    return state


def _state(path: Path) -> Mapping[str, Any]:
    state = _loaded(path).get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} has no optimizer_state_dict")
    _require_fields(state, path)
    return state


def _require_fields(state: Mapping[str, Any], path: Path) -> None:
    """Refuse a field that is there, and is not of the kind that DeepSpeed writes."""
    for name, (fits, kind) in _FIELDS.items():
        if (value := state.get(name)) is not None and not fits(value):
            raise CheckpointError(f"{path}: its {name} is not {kind}: it is damaged")


def _is_table(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and fits(value[name]) for name in value)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_shapes(value: Any) -> bool:
    return _is_table(value, lambda shape: _is_list(shape, lambda size: type(size) is int and size >= 0))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MOST_RANKS


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "module": (lambda value: isinstance(value, Mapping), "a table"),
    "buffer_names": (lambda value: _is_list(value, _is_name), "a list of names"),
    "shared_params": (
        lambda value: not isinstance(value, Mapping) or _is_table(value, _is_name),
        "a table of names",
    ),
    "param_shapes": (lambda value: _is_shapes(value) or _is_list(value, _is_shapes), "tables of shapes"),
    "frozen_param_shapes": (_is_shapes, "a table of shapes"),
    "frozen_param_fragments": (
        lambda value: _is_table(value, lambda part: isinstance(part, Tensor)),
        "a table of tensors",
    ),
    "partition_count": (lambda value: _is_count(value) or (_is_list(value, _is_count) and value), "numbers of ranks"),
}


def _tensors(value: Any, path: Path) -> list[Tensor]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(tensor, Tensor) and tensor.dim() == 1 for tensor in values):
        raise CheckpointError(f"{path} has no flat fp32 weights: the optimizer is not of ZeRO")
    return values


def _of_stage_2(
    groups: Sequence[Mapping[str, Any]], parts: Sequence[Sequence[Tensor]], path: Path
) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(groups):
        if any(number >= len(part) for part in parts):
            raise CheckpointError(f"{path} has {len(groups)} groups of parameters, and ranks with fewer")
        whole = torch.cat([part[number] for part in parts])
        offset = 0
        for name, shape in group.items():
            size = math.prod(shape)
            if offset + size > whole.numel():
                raise CheckpointError(f"{path}: the flat weights end before {name[:120]}")
            yield name, whole[offset : offset + size].view(tuple(shape))
            offset += size
        most = 2 * len(parts) * max(2, len(parts)) + 2 * len(parts)
        if whole.numel() - offset > most:
            raise CheckpointError(
                f"{path}: the flat weights have {whole.numel() - offset} elements more than the shapes say: "
                "zero_optimization.parameter_alignment pads between parameters, which is not read"
            )


def _of_stage_3(
    groups: Sequence[Mapping[str, Any]], parts: Sequence[Sequence[Tensor]], path: Path
) -> Iterator[tuple[str, Tensor]]:
    ranks, offset = [torch.cat(list(part)) for part in parts], 0
    for group in groups:
        for name, shape in group.items():
            size = math.prod(shape)
            share = math.ceil(size / len(ranks))
            if any(offset + share > rank.numel() for rank in ranks):
                raise CheckpointError(f"{path}: the flat weights end before {name[:120]}")
            whole = torch.cat([rank[offset : offset + share] for rank in ranks])
            yield name, whole[:size].view(tuple(shape))
            offset += share


def _frozen(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Parameters that did not learn, which ZeRO-3 divides too."""
    frozen = {}
    for name, shape in (ranks[0].get("frozen_param_shapes") or {}).items():
        parts = [part for rank in ranks if (part := (rank.get("frozen_param_fragments") or {}).get(name)) is not None]
        if len(parts) != len(ranks):
            raise CheckpointError(f"the frozen parameter {name[:120]} is not on every rank")
        whole = torch.cat([part.reshape(-1) for part in parts])
        if whole.numel() < math.prod(shape):
            raise CheckpointError(f"the frozen parameter {name[:120]} has fewer numbers than its shape says")
        frozen[name] = whole[: math.prod(shape)].view(tuple(shape))
    return frozen
