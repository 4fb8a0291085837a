"""The parallel layers of --reproducible, which `parallelize()` puts in the place of the plain ones. Each computes in
canonical blocks (canonical.py), so that no layout changes a bit. The plain layers know nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from megacore.ops.grouped import RowGroups
from megacore.parallel.canonical import Blocks
from megacore.parallel.experts import GroupedLinear, GroupedProducts
from megacore.parallel.products import Parameters
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


class ColumnParallelLinearOfBlocks(ColumnParallelLinear):
    """Output features, and the sum over them that is the input's gradient, in blocks."""

    blocks: Blocks

    def forward(self, x: Tensor, *, with_bias: bool = True) -> Tensor:
        """[b, s', i] -> [b, s, o/(t p)]"""
        return self.columns(x, (self.weight, self.bias if with_bias else None))[0]

    def columns(self, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        return self.blocks.columns(x, parameters, self.products)


class RowParallelLinearOfBlocks(RowParallelLinear):
    """Input features, and the sum over them, in blocks."""

    blocks: Blocks

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, i/(t p)] -> [b, s', o]"""
        return self.blocks.row(x, self.weight, self.bias, self.products)


class VocabParallelEmbeddingOfBlocks(VocabParallelEmbedding):
    """Gradients of rows are summed over whole sequences, whoever holds which positions."""

    blocks: Blocks

    def look_up(self, rows: Tensor) -> Tensor:
        return self.blocks.looked_up(rows, self.weight)


class GroupedLinearOfBlocks(GroupedLinear):
    """The linear layers of experts; every rank that splits an expert has all its rows."""

    blocks: Blocks

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """[r, i] -> [r, o], the sum over all ranks where they split input features."""
        products = GroupedProducts(self.products, groups)
        if self.split == 1:
            return self.blocks.columns(x, (self.weight, None), products)[0]
        return self.blocks.row(x, self.weight, None, products)


OF_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    ColumnParallelLinear: ColumnParallelLinearOfBlocks,
    RowParallelLinear: RowParallelLinearOfBlocks,
    VocabParallelEmbedding: VocabParallelEmbeddingOfBlocks,
    GroupedLinear: GroupedLinearOfBlocks,
}


def exchange(layer: nn.Module, blocks: Blocks, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Let modules inside a layer of a model compute in blocks. Their parameters stay theirs. `kinds`: by a plain class,
    the one that computes in blocks. It differs in methods only."""
    for module in layer.modules():
        plain = next((kind for kind in type(module).__mro__ if kind in kinds), None)
        if plain is None:
            continue
        # The methods of a subclass come first.
        kind, exchanged = kinds[plain], cast(Any, module)
        exchanged.__class__ = kind if type(module) is plain else type(kind.__name__, (type(module), kind), {})
        exchanged.blocks = blocks
        if isinstance(module, GroupedLinear):
            exchanged.blocks = replace(blocks, group=module.group, sequence_parallel=False, everywhere=True)
        if isinstance(module, VocabParallelEmbedding):
            module.weight.takes_rows = blocks.sequence.group.size == 1
