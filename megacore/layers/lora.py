"""Low-rank adapters, LoRA (Hu et al. 2021, arXiv 2106.09685), beside the linear layers of blocks: y = W x + s B A x,
with W frozen. A begins as a new linear layer does, and B as zero. DoRA (Liu et al. 2024, arXiv 2402.09353) also learns
the length of each row of W + s B A, apart from its direction.

An adapter is two linear layers that are split as W's input and output are, so that the wide vectors are not exchanged
once more: beside a column-parallel layer A is whole on every rank and B split, beside a row-parallel one A is split and
B whole. What ranks exchange has the width of the adapter.

Query, key and value are one matrix W, and have an adapter each, as PEFT's do: A is theirs one below the other, and a
row of B reads that of its projection only.

Shape legend: b micro-batch, s sequence, i input and o output features, t tensor-parallel ranks, r rank, p projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacore.config import LoraConfig, ResolvedModel
from megacore.config.lora import adapted_parts
from megacore.errors import ConfigError
from megacore.layers.block import GatedMLP
from megacore.layers.context import BuildContext
from megacore.layers.linear import ReplicatedLinear
from megacore.parallel.collectives import reduce_from_group
from megacore.parallel.random import Dropout
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear

IN, OUT, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
"""The parts of an adapter, in the names of its parameters."""


class StackedColumns(ColumnParallelLinear):
    """B of several projections, whose rows are those of one column-parallel layer. `reads`: [o/t, p], of this rank's
    rows which projection each belongs to: 1 there and 0 elsewhere. `parallel`: arguments of `ColumnParallelLinear`."""

    def __init__(self, rank: int, out_features: int, reads: Tensor, **parallel: Any) -> None:
        super().__init__(rank, out_features, bias=False, **parallel)
        self.reads = reads

    def forward(self, x: Tensor, *, with_bias: bool = True) -> Tensor:
        """[b, s, p r] (or [b, s/t, p r]) -> [b, s, o/t]"""
        return self.columns(x, (self.stacked(), None))[0]

    def stacked(self) -> Tensor:
        """[o/t, p r], with zeros where a row reads nothing."""
        return (self.weight.unsqueeze(1) * self.reads.to(self.weight.dtype).unsqueeze(2)).flatten(1)


class Adapted(nn.Module):
    """A linear layer with an adapter; it is put before the layer's own class."""

    lora_a: ReplicatedLinear | RowParallelLinear
    lora_b: ReplicatedLinear | ColumnParallelLinear
    lora_dropout: Dropout | None
    lora_scale: float
    lora_magnitude: ShardedParameter | None  # [o/t], or [o] where rows are whole: their lengths; None: not DoRA
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor, **choices: Any) -> Tensor:
        return self.adapted(x, super().forward(x, **choices), **choices)

    def adapted(self, x: Tensor, y: Tensor, *, with_bias: bool = True) -> Tensor:
        """What the adapter makes of the layer's output y for its input x."""
        dropped = x if self.lora_dropout is None else self.lora_dropout(x)
        added: Tensor = self.lora_b(self.lora_a(dropped) * self.lora_scale)
        if self.lora_magnitude is None:
            return y + added
        ratio = self.lora_magnitude / self.lengths()
        if isinstance(self.lora_b, StackedColumns):  # rows of projections without an adapter stay as they are
            ratio = torch.where(self.lora_b.reads.any(1), ratio, 1.0)
        ratio = ratio.to(y.dtype)
        bias = self.bias if with_bias else None
        return ratio * (y + added) if bias is None else ratio * (y - bias + added) + bias

    @torch.no_grad()
    def lengths(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of the rows of W + s B A, [o/t]: constants for the gradient, as in section 4.3 of DoRA."""
        b = self.lora_b.stacked() if isinstance(self.lora_b, StackedColumns) else self.lora_b.weight
        whole = self.weight.to(dtype) + self.lora_scale * (b.to(dtype) @ self.lora_a.weight.to(dtype))
        squares = whole.square().sum(1)
        if isinstance(self.lora_a, RowParallelLinear):  # a rank has some of the columns
            squares = reduce_from_group(squares, self.lora_a.group)
        return lengths_of(squares)


def lengths_of(squares: Tensor) -> Tensor:
    """Lengths of rows from their sums of squares, at least so long that a row of zeros stays one when divided."""
    return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def adapted(
    build: Callable[[], nn.Module], name: str, lora: LoraConfig, model: ResolvedModel, context: BuildContext
) -> nn.Module:
    """A layer of a model, frozen; and with adapters beside the linear layers of a block. Raises ConfigError where the
    block has no layer of a target's name."""
    layer = build().requires_grad_(False)
    if not name.startswith("blocks."):
        return layer
    modules = dict(layer.named_modules())
    for path, stacked in adapted_parts(lora, model).items():
        if not isinstance(modules.get(path), ColumnParallelLinear | RowParallelLinear | ReplicatedLinear):
            raise ConfigError([f"--lora-rank targets: {name} has no linear layer {path}: leave it out of the targets"])
        _add(modules[path], f"{name}.{path}", stacked, lora, model, context)
    for module in layer.modules():
        if isinstance(module, GatedMLP):  # one product would leave the adapters out
            module.joins = module.joins and not any(isinstance(one, Adapted) for one in (module.gate, module.up))
    return layer


def _add(
    module: Any, name: str, parts: Sequence[int], lora: LoraConfig, model: ResolvedModel, context: BuildContext
) -> None:
    """Give a linear layer its adapter. `name`: its global name. `parts`: numbers of the stacked projections that have
    one; none: the layer has one as a whole. `lora, model, context`: as for `adapted`."""
    out_features, in_features = module.weight.spec.shape
    rank, device = lora.lora_rank, context.device
    assert rank is not None
    whole: dict[str, Any] = {"bias": False, "blocks": context.blocks, "device": device}
    split: dict[str, Any] = {**context.parallel_arguments, "split_backward": context.split_backward}
    positions = context.layer_group.rank if context.sequence_parallel else 0
    if isinstance(module, RowParallelLinear):
        module.lora_a = RowParallelLinear(in_features, rank, bias=False, **split)
        module.lora_b = ReplicatedLinear(rank, out_features, **whole)
        positions = context.layer_group.rank
    elif isinstance(module, ColumnParallelLinear):
        module.lora_a = ReplicatedLinear(in_features, rank * max(len(parts), 1), **whole)
        if parts:
            start, stop = module.weight.spec.slices[0]
            of_row = projection_of_rows(model, torch.arange(start, stop, device=device))
            reads = of_row.unsqueeze(1) == torch.tensor(parts, device=device)
            module.lora_b = StackedColumns(rank, out_features, reads, **split)
        else:
            module.lora_b = ColumnParallelLinear(rank, out_features, bias=False, **split)
    else:
        module.lora_a = ReplicatedLinear(in_features, rank, **whole)
        module.lora_b = ReplicatedLinear(rank, out_features, **whole)
    module.lora_scale, module.lora_dropout = lora.lora_scale, None
    if lora.lora_dropout:
        shard = context.sequence.group.rank * context.layer_group.size + positions
        module.lora_dropout = Dropout(lora.lora_dropout, context.streams, f"{name}.lora_dropout", shard=shard)
    module.lora_magnitude = None
    if lora.lora_dora:
        rows = {0: module.weight.spec.slices[0]} if isinstance(module, ColumnParallelLinear) else {}
        spec = ShardSpec.split((out_features,), rows) if rows else ShardSpec(shape=(out_features,))
        module.lora_magnitude = ShardedParameter(torch.empty(spec.local_shape, device=device), spec)
    kind = type(module)
    module.__class__ = type(f"Adapted{kind.__name__}", (Adapted, kind), {})


@torch.no_grad()
def begin_magnitudes(layer: nn.Module) -> None:
    """Give DoRA's magnitudes of a layer, whose other parameters have their values, those with which it changes nothing;
    all ranks of the layer group call this together."""
    for module in layer.modules():
        if isinstance(module, Adapted) and module.lora_magnitude is not None:
            module.lora_magnitude.copy_(module.lengths(torch.float64))  # the same bits on every layout


def projection_of_rows(model: ResolvedModel, rows: Tensor) -> Tensor:
    """Whether each row of the joint projection is of query (0), key (1) or value (2): by head group, queries first."""
    shared_by = model.num_attention_heads // model.query_groups
    return (rows // model.head_size % (shared_by + 2) - shared_by + 1).clamp(min=0)


def is_adapter(name: str) -> bool:
    """Whether a global name is that of an adapter's parameter."""
    return f".{IN}." in name or f".{OUT}." in name or name.endswith(MAGNITUDE)
