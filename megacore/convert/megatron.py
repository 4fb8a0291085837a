"""From a checkpoint of Megatron-LM's torch format to one of megacore: ranks merged, rows put into megacore's order.
Legend: t tensor-parallel ranks; n heads of a rank, of d dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_weights
from megacore.convert.megatron_config import model_of
from megacore.convert.megatron_experts import expert_matrices, is_of_expert, stacked_names
from megacore.convert.megatron_files import RankFile, open_ranks
from megacore.convert.megatron_rows import Split, our_name
from megacore.convert.plan import buffer_shapes, model_shapes, whole_config
from megacore.convert.torch_dist import is_torch_dist, open_torch_dist
from megacore.errors import CheckpointError

_BLOCK = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder)\.layers\.(\d+)\.(.+)")
_CONSTANTS = ("inv_freq", "_extra_state")
_TIED_COPY = re.compile(r"word_embeddings_for_head\.weight")


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """A tensor of megacore's and its parts on the tensor-parallel ranks."""

    split: Split
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """A checkpoint of Megatron-LM's that megacore can represent."""

    path: Path
    config: ResolvedModel  # the model, resolved
    version: float  # of the order of query, key and value
    ranks: int
    stages: int
    padded: int  # rows of the embedding in the files
    # Its tensors by megacore's names, a gated MLP's two still as one, and every expert's apart.
    merged: dict[str, _Merged]
    shapes: dict[str, tuple[int, ...]]  # what megacore's model has
    buffers: frozenset[str]  # which of these are no weights, and fp32

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, one at a time. Raises CheckpointError where copies that should be equal differ, or
        a shape is not the model's."""
        for name, shape in self.shapes.items():
            names = stacked_names(name, shape)
            is_stack = names != [name]
            wanted, parts = shape[1:] if is_stack else shape, list[Tensor]()
            for part in names:
                tensor = self._tensor(part)
                if name in ("embedding.tokens.weight", "head.weight"):
                    tensor = tensor[: shape[0]]  # without the padding of the vocabulary
                if tuple(tensor.shape) != wanted:
                    raise CheckpointError(
                        f"{self.path}: {part} is {tuple(tensor.shape)}, but its args make it {wanted}"
                    )
                parts.append(tensor)
            whole = torch.stack(parts) if is_stack else parts[0].contiguous()
            yield name, whole.float() if name in self.buffers else whole

    def dtype(self, name: str) -> torch.dtype:
        if name in self.buffers:
            return torch.float32
        return self.merged[_merged_name(stacked_names(name, self.shapes[name])[0])].parts[0].dtype

    def _tensor(self, name: str) -> Tensor:
        half = {"gate": 0, "up": 1}.get(name.split(".")[-2]) if self.config.gated and ".mlp." in name else None
        merged = self.merged[_merged_name(name)]
        parts = merged.parts
        if merged.split == "whole":
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise CheckpointError(f"{self.path}: the copies of {name} on the tensor-parallel ranks differ")
            return parts[0]
        if half is not None:
            parts = [part.chunk(2)[half] for part in parts]
        elif ".attention.qkv." in name:
            parts = [self._by_head(part) for part in parts]
        dim = 1 if merged.split == "columns" else 0
        if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise CheckpointError(f"{self.path}: the tensor-parallel parts of {name} do not fit together: {shapes}")
        return torch.cat(parts, dim=dim)

    def _by_head(self, rows: Tensor) -> Tensor:
        """A rank's query, key and value rows in megacore's order, [n][q, k, v][d]."""
        if self.version >= 2.0:
            return rows
        d, rest = self.config.head_size, rows.shape[1:]
        if self.version >= 1.0:  # [n][d][q, k, v]
            return rows.view(-1, d, 3, *rest).transpose(1, 2).reshape(rows.shape)
        return rows.view(3, -1, d, *rest).transpose(0, 1).reshape(rows.shape)  # [q, k, v][n][d]


def open_megatron(path: Path, vocab_size: int | None = None) -> MegatronModel:
    """Look at a checkpoint of Megatron-LM's, torch or torch_dist: an iter_NNNNNNN directory, or the one above it.
    `vocab_size`: the true size; None: as its args say, and else with padding. Raises CheckpointError."""
    files = open_torch_dist(path) if is_torch_dist(path) else open_ranks(path)
    return merge(files, path, vocab_size)


def merge(files: list[list[RankFile]], path: Path, vocab_size: int | None = None) -> MegatronModel:
    """A model from what its ranks have, [pp][tp]; else as `open_megatron`."""
    first = files[0][0]
    merged: dict[str, _Merged] = {}
    copies: list[list[Tensor]] = []
    for stage in files:
        _require_alike(stage, first)
        for rank in stage:
            _take(rank, files, merged, copies)
    words = merged.get("embedding.tokens.weight")
    padded = sum(part.shape[0] for part in words.parts if part.dim()) if words else 0
    config = model_of(first.args, padded, vocab_size, str(path))
    if first.version < 2.0 and config.query_groups != config.num_attention_heads:
        raise CheckpointError(f"{path}: checkpoint_version {first.version:g} knows no grouped queries")
    buffers = buffer_shapes(config)
    shapes = model_shapes(config) | buffers
    if "head.weight" not in shapes and "head.weight" in merged:  # the last stage's copy of a tied embedding
        copies += [[part] for part in merged.pop("head.weight").parts]
    _require_complete(merged, shapes, path)
    for parts in copies:
        embedding = merged["embedding.tokens.weight"].parts
        if not any(torch.equal(parts[0], part) for part in embedding):
            raise CheckpointError(f"{path}: word_embeddings_for_head differs from the embedding it is tied to")
    return MegatronModel(
        path=path,
        config=config,
        version=first.version,
        ranks=max(rank.tp for rank in files[0]) + 1,
        stages=len(files),
        padded=padded,
        merged=merged,
        shapes=shapes,
        buffers=frozenset(buffers),
    )


def _require_alike(stage: list[RankFile], first: RankFile) -> None:
    for rank in stage:
        if (rank.version, rank.iteration) != (first.version, first.iteration):
            raise CheckpointError(f"{rank.path} is of another step or format than {first.path}")


def _take(rank: RankFile, files: list[list[RankFile]], merged: dict[str, _Merged], copies: list[list[Tensor]]) -> None:
    for number, chunk in enumerate(rank.chunks):
        offset = _layers_before(rank, files, number)
        for name, tensor in _one_by_one(rank, chunk):
            if name.endswith(_CONSTANTS):
                continue
            if _TIED_COPY.search(name):
                copies.append([tensor])
                continue
            ours, split = _our_name(name, offset, rank)
            if rank.ep and not is_of_expert(ours):
                _require_copy(name, tensor, files[rank.pp][rank.tp].chunks[number], rank)
                continue
            merged.setdefault(ours, _Merged(split=split)).parts.append(tensor)


def _one_by_one(rank: RankFile, chunk: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A stage's tensors, the matrices of experts by the experts' numbers in the model."""
    experts = rank.args.get("num_experts") or rank.args.get("num_moe_experts")
    ep, hidden = rank.args.get("expert_model_parallel_size") or 1, rank.args.get("hidden_size")
    if type(experts) is not int or type(hidden) is not int or hidden < 1:  # of which `model_of` says what is wrong
        return iter(chunk.items())
    if type(ep) is not int or ep < 1 or experts % ep:
        raise CheckpointError(f"{rank.path}: expert_model_parallel_size is {str(ep)[:40]!r}, and num_experts {experts}")
    split, tp = rank.args.get("expert_tensor_parallel_size"), rank.args.get("tensor_model_parallel_size")
    if split not in (None, tp):
        raise CheckpointError(
            f"{rank.path}: expert_tensor_parallel_size is {split!r}, and tensor_model_parallel_size {tp!r}: megacore "
            "reads such experts in the torch_dist format only"
        )
    try:
        return iter([*expert_matrices(chunk, rank.ep * (experts // ep), experts // ep, hidden)])
    except ValueError as error:
        raise CheckpointError(f"{rank.path}: {error}") from None


def _require_copy(name: str, tensor: Tensor, first: dict[str, Tensor], rank: RankFile) -> None:
    """Expert-parallel ranks hold other experts, and copies of all other tensors."""
    if name not in first or not torch.equal(tensor, first[name]):
        raise CheckpointError(f"{rank.path}: {name[:120]} differs from that of the first expert-parallel rank")


def _our_name(name: str, offset: int, rank: RankFile) -> tuple[str, Split]:
    block = _BLOCK.fullmatch(name)
    if (found := our_name(block[2] if block else name, in_block=block is not None)) is None:
        raise CheckpointError(f"{rank.path}: megacore does not know the tensor {name[:120]}")
    prefix = f"blocks.{int(block[1]) + offset}." if block else ""
    return prefix + found[0], found[1]


def _layers_before(rank: RankFile, files: list[list[RankFile]], chunk: int) -> int:
    """Layers that come before a virtual stage: the stages of all ranks go round, chunk after chunk."""
    counts = [[_layers(one) for one in stage[rank.tp].chunks] for stage in files]
    earlier = sum(count for stage in counts for count in stage[:chunk])
    return earlier + sum(stage[chunk] for stage in counts[: rank.pp])


def _layers(chunk: dict[str, Tensor]) -> int:
    return len({match[1] for name in chunk if (match := _BLOCK.fullmatch(name))})


def _require_complete(merged: dict[str, _Merged], shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    wanted = {_merged_name(part) for name, shape in shapes.items() for part in stacked_names(name, shape)}
    for name in sorted(wanted - merged.keys()):
        raise CheckpointError(f"{path} lacks {name} (in megacore's words)")
    for name in sorted(merged.keys() - wanted):
        raise CheckpointError(f"{path} has {name} (in megacore's words), which the model of its args has not")


def _merged_name(name: str) -> str:
    """The tensor that has a gated MLP's two."""
    return re.sub(r"\.gate\.(weight|bias)$", r".up.\1", name)


def write_megatron(model: MegatronModel, target: Path, *, most_bytes: int) -> None:
    """Write a checkpoint of the weights, and compare what was written with what was read. Raises CheckpointError where
    they differ, or the files do not fit each other."""
    types_of = {name: (model.dtype(name), shape) for name, shape in model.shapes.items()}
    config = whole_config(model.config, None)
    write_weights(target, config, types_of, model.tensors(), most_bytes=most_bytes, buffers=model.buffers)
    written = CheckpointTensors(target)
    for name, tensor in model.tensors():
        if not torch.equal(written.read(name).view(torch.uint8), tensor.view(torch.uint8)):
            raise CheckpointError(f"{target}: {name} was not written as it was read; nothing was published")


def describe(model: MegatronModel) -> str:
    """A line about it."""
    layers, vocabulary, experts = model.config.num_layers, model.config.vocab_size, model.config.experts
    cut = model.padded - vocabulary
    rest = f": {cut} of {model.padded} rows are cut off as padding (--vocab-size says otherwise)" if cut else ""
    return (
        f"{model.path}: Megatron-LM, tp {model.ranks}, pp {model.stages}, checkpoint_version {model.version:g}, "
        f"{layers} layers, {'' if experts is None else f'{experts.num_experts} experts, '}vocabulary {vocabulary}{rest}"
    )
