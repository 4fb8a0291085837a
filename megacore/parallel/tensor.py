"""Tensor parallelism: the linear layers and the embedding, split over a group (Shoeybi et al. 2019, arXiv
1909.08053, section 3).

A column-parallel layer splits its output features and a row-parallel one its input features, so that a pair of them
needs one all-reduce forward (after the second) and one backward (before the first). On a group of one each is its
torch.nn twin.

With sequence parallelism (sequence.py) a column-parallel layer keeps only this rank's positions of its input for
backward and gathers the input again there, while the input gradient is computed; the reduce-scatter of that gradient
runs while the weight's is computed.

Shape legend: s sequence, b micro-batch, i input features, o output features, h hidden size, V vocabulary, t group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacore.config.model import padded_rows
from megacore.ops import on_accelerator
from megacore.ops.dispatch import Node
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.collectives import Sum, copy_to_group, reduce_from_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import (
    TORCH,
    LinearLayers,
    Parameters,
    Products,
    gradient_sum,
    input_saved,
    joined,
    linears,
    looked_up,
    save_operands,
    saved_operands,
)
from megacore.parallel.sequence import (
    SampleGathers,
    SampleScatters,
    gather_sequence,
    reduce_scatter_sequence,
    start_gather,
)
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly

# ---- linear layers


class _Linears(Node):
    """Linear layers of an input that every rank holds: the all-reduce of the input's gradient runs while the weight
    gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any, layers: LinearLayers, x: Tensor, group: Group, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        save_operands(ctx, layers, x, *parameters[::2])
        ctx.group = group
        return layers.outputs(x, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = saved_operands(ctx)
        dx = ctx.layers.input_gradient(grads, weights) if ctx.needs_input_grad[1] else None
        if dx is None or ctx.group.size == 1:
            return None, dx, None, *ctx.layers.parameter_gradients(x, grads)
        summing = Sum(dx, ctx.group)
        gradients = ctx.layers.parameter_gradients(x, grads)
        return None, summing.wait(), None, *gradients


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the output features split over the group.

    Args:
        in_features: input features, whole on every rank.
        out_features: output features of the whole layer; the group's size must divide it.
        group: the tensor-parallel group.
        bias: whether there is a bias (split like the output).
        sequence_parallel: the input is split along the sequence, [b, s/t, i], and gathered here.
        split_backward: as for `column_parallel`.
        products: computes the layer's matrix products.
        blocks: where sums over features are cut, so that no layout changes a bit of them.

    Raises:
        ValueError: the group's size does not divide `out_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group = ALONE,
        bias: bool = True,
        sequence_parallel: bool = False,
        split_backward: bool = False,
        products: Products = TORCH,
        blocks: Blocks = ONE_BLOCK,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _require_divisible("out_features", out_features, group)
        self.group, self.sequence_parallel, self.split_backward = group, sequence_parallel, split_backward
        self.products, self.blocks = products, blocks
        start, stop = split_evenly(out_features, group.rank, group.size)
        self.weight = ShardedParameter(
            torch.empty(stop - start, in_features, device=device),
            ShardSpec.split((out_features, in_features), {0: (start, stop)}),
        )
        self.bias: ShardedParameter | None = None
        if bias:
            spec = ShardSpec.split((out_features,), {0: (start, stop)})
            self.bias = ShardedParameter(torch.empty(stop - start, device=device), spec)

    def forward(self, x: Tensor, *, with_bias: bool = True) -> Tensor:
        """[b, s, i] (or [b, s/t, i]) -> [b, s, o/t]"""
        bias = self.bias if with_bias else None
        if self.blocks.divide:
            return self.blocks.columns(x, (self.weight, bias), self.products)[0]
        if self.group.size == 1 and gradient_sum(self.weight) is None:
            return self.products.linear(x, self.weight, bias)
        return _linears(
            x,
            (self.weight, bias),
            self.group,
            sequence_parallel=self.sequence_parallel,
            split_backward=self.split_backward,
            products=self.products,
        )[0]


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the input features split over the group; the bias is whole on every rank and added once.

    Args:
        in_features: input features of the whole layer; the group's size must divide it.
        out_features: output features, whole on every rank after the sum.
        group: the tensor-parallel group.
        bias: whether there is a bias.
        sequence_parallel: the output is split along the sequence, [b, s/t, o].
        split_backward: as for `column_parallel`.
        products: computes the layer's matrix products.
        blocks: where sums over features are cut, so that no layout changes a bit of them.
        ends_recomputed: the layer is the last product of a block that is computed again in backward, which ends before
            the product and its communication.

    Raises:
        ValueError: the group's size does not divide `in_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group = ALONE,
        bias: bool = True,
        sequence_parallel: bool = False,
        split_backward: bool = False,
        products: Products = TORCH,
        blocks: Blocks = ONE_BLOCK,
        ends_recomputed: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _require_divisible("in_features", in_features, group)
        self.group, self.sequence_parallel, self.split_backward = group, sequence_parallel, split_backward
        self.products, self.blocks, self.ends_recomputed = products, blocks, ends_recomputed
        start, stop = split_evenly(in_features, group.rank, group.size)
        self.weight = ShardedParameter(
            torch.empty(out_features, stop - start, device=device),
            ShardSpec.split((out_features, in_features), {1: (start, stop)}),
        )
        self.bias: ShardedParameter | None = None
        if bias:
            self.bias = ShardedParameter(torch.empty(out_features, device=device), ShardSpec(shape=(out_features,)))

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, i/t] -> [b, s, o] (or [b, s/t, o])"""
        if self.blocks.divide:
            return self.blocks.row(x, self.weight, self.bias, self.products)
        if self.group.size == 1 and gradient_sum(self.weight) is None:
            return self.products.linear(x, self.weight, self.bias)
        saved = self.ends_recomputed and self._is_one_node(x)
        if self.group.size == 1:
            return _linears(
                input_saved(x) if saved else x,
                (self.weight, self.bias),
                self.group,
                sequence_parallel=False,
                split_backward=self.split_backward,
                products=self.products,
                input_is_saved=saved,
            )[0]
        if self._is_one_node(x):
            layers = LinearLayers(self.products, (self.weight, self.bias), input_is_saved=saved)
            row_parallel = _LinearOfScatteredOutput if self.sequence_parallel else _LinearOfSummedOutput
            x = input_saved(x) if saved else x
            summed: Tensor = row_parallel.apply(layers, x, self.group, self.weight, self.bias)
            return summed
        partial = self.products.linear(x, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter_sequence(partial, self.group)
        else:
            y = reduce_from_group(partial, self.group, in_place=True)
        return y if self.bias is None else y + self.bias

    def _is_one_node(self, x: Tensor) -> bool:
        """Whether product and communication are one node of autograd."""
        return not self.split_backward and torch.is_grad_enabled() and on_accelerator(x)


def column_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: Group,
    *,
    sequence_parallel: bool = False,
    split_backward: bool = False,
    products: Products = TORCH,
) -> Tensor:
    """A column-parallel linear layer: every rank needs all of x, `weight` holds this rank's output features.

    With `split_backward` communication and product are separate operators, so that autograd can compute the gradient of
    the input without that of the weight. Otherwise one operator overlaps the communication of the input's gradient with
    the product for the weight's.

    Args:
        x: [b, s, i], or, sequence parallel, [b, s/t, i].
        weight: [o/t, i]
        bias: [o/t], or None.
        group: the tensor-parallel group.
        sequence_parallel: the input is split along the sequence.
        split_backward: see above.
        products: computes the matrix products.

    Returns:
        [b, s, o/t]
    """
    return _linears(
        x,
        (weight, bias),
        group,
        sequence_parallel=sequence_parallel,
        split_backward=split_backward,
        products=products,
    )[0]


def columns_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """What several column-parallel layers give for one input, whose communication is done once for all of them.

    Args:
        x: [b, s, i] (or [b, s/t, i])
        layers: on one group, alike but for their output features.

    Returns:
        [b, s, o/t] of each.
    """
    first = layers[0]
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    if first.blocks.divide:
        return first.blocks.columns(x, parameters, first.products)
    return _linears(
        x,
        parameters,
        first.group,
        sequence_parallel=first.sequence_parallel,
        split_backward=first.split_backward,
        products=first.products,
    )


def _linears(
    x: Tensor,
    parameters: Parameters,
    group: Group,
    *,
    sequence_parallel: bool,
    split_backward: bool,
    products: Products,
    input_is_saved: bool = False,
) -> tuple[Tensor, ...]:
    if split_backward or not torch.is_grad_enabled():
        entered = gather_sequence(x, group) if sequence_parallel else copy_to_group(x, group, in_place=True)
        return linears(products, entered, parameters)
    layers = LinearLayers(products, parameters, input_is_saved=input_is_saved)
    if group.size == 1 and not any(layers.sums):
        return linears(products, x, parameters)
    return _applied(layers, x, parameters, group, sequence_parallel=sequence_parallel)


def joined_columns_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor | None:
    """What `columns_parallel` gives, side by side in one tensor that one product computes.

    Args:
        x: [b, s, h] (or [b, s/t, h])
        layers: as for `columns_parallel`.

    Returns:
        [b, s, o/t of all layers together]; None where that cannot be: with biases, without gradients, with a backward
        that is split, or where the weights do not lie one after the other in memory.
    """
    first = layers[0]
    if first.blocks.divide or first.split_backward or not torch.is_grad_enabled():
        return None
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    weights = [weight for weight in parameters[::2] if weight is not None]
    if any(bias is not None for bias in parameters[1::2]) or (whole := joined(weights)) is None:
        return None
    stacked = LinearLayers(first.products, parameters, whole=whole)
    return _applied(stacked, x, parameters, first.group, sequence_parallel=first.sequence_parallel)[0]


def _applied(
    layers: LinearLayers, x: Tensor, parameters: Parameters, group: Group, *, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    sequence_parallel = sequence_parallel and group.size > 1
    operator = _LinearOfGatheredInput if sequence_parallel else _Linears
    y: tuple[Tensor, ...] = operator.apply(layers, x, group, *parameters)
    return y


def _require_divisible(name: str, features: int, group: Group) -> None:
    if features % group.size:
        raise ValueError(f"{name} {features} does not divide over {group.size} tensor-parallel ranks")


# ---- linear layers whose communication runs beside their products


class _LinearOfGatheredInput(Node):
    @staticmethod
    def forward(
        ctx: Any, layers: LinearLayers, x: Tensor, group: Group, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters[::2])
        ctx.layers, ctx.group = layers, group
        return start_gather(x, group).outputs(layers, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathering = start_gather(x, ctx.group)
        scattering = gathering.input_gradient(ctx.layers, grads, weights)
        gradients = ctx.layers.parameter_gradients(gathering.wait(), grads)
        return None, scattering.wait(), None, *gradients


class _LinearOfScatteredOutput(Node):
    """A row-parallel linear layer: the sum of a sample over the ranks runs while the next is computed. The first rank's
    product adds the bias."""

    @staticmethod
    def forward(ctx: Any, layers: LinearLayers, x: Tensor, group: Group, weight: Tensor, bias: Tensor | None) -> Tensor:
        save_operands(ctx, layers, x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
        y = x.new_empty(*x.shape[:2], weight.shape[0])
        scattering = SampleScatters(y, group)
        for partial, sample in zip(y, x, strict=True):
            layers.products.write_output(partial, sample, weight, bias if group.is_first else None)
            scattering.start()
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_operands(ctx)
        gathering = SampleGathers(grad, ctx.group)
        dx = torch.empty_like(x)
        for number, sample in enumerate(gathering.samples()):
            ctx.layers.products.write_input_gradient(dx[number], sample, weight)
        dweight = ctx.layers.weight_gradient(x, gathering.whole)
        return None, dx, None, dweight, grad.sum((0, 1)) if ctx.has_bias else None


class _LinearOfSummedOutput(Node):
    """A row-parallel linear layer whose output every rank gets. The first rank's product adds the bias."""

    @staticmethod
    def forward(ctx: Any, layers: LinearLayers, x: Tensor, group: Group, weight: Tensor, bias: Tensor | None) -> Tensor:
        save_operands(ctx, layers, x, weight)
        ctx.has_bias = bias is not None
        return Sum(layers.products.output(x, weight, bias if group.is_first else None), group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_operands(ctx)
        dx = ctx.layers.input_gradient([grad], [weight])
        return None, dx, None, *ctx.layers.parameter_gradients(x, [grad])


# ---- the embedding


class VocabParallelEmbedding(ShardedModule):
    """Token embedding with the vocabulary's rows split over the group.

    Rank r holds rows [r V / t, (r + 1) V / t). Its local table is padded with zero rows to `padded_rows(V, t,
    multiple)`, so that the ranks' matrices have one aligned shape; the padding exists in memory only and never takes
    part in a result.

    Args:
        num_embeddings: V, the true vocabulary size.
        embedding_dim: h.
        group: the tensor-parallel group.
        multiple: local rows are padded to a multiple of this.
        sequence_parallel: the output is split along the sequence, [b, s/t, h].
        blocks: with them gradients of rows are summed over whole sequences, whoever holds which positions.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = ALONE,
        multiple: int = 1,
        sequence_parallel: bool = False,
        blocks: Blocks = ONE_BLOCK,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.looked_up = blocks.looked_up if blocks.divide else looked_up
        self.weight = vocab_parallel_weight(
            num_embeddings, embedding_dim, group=group, multiple=multiple, device=device
        )
        self.weight.takes_rows = not blocks.divide

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] token ids in [0, V) -> [b, s, h] (or [b, s/t, h])"""
        if self.group.size == 1:
            return self.looked_up(tokens, self.weight)
        start, stop = self.weight.spec.slices[0]
        local = tokens - start
        outside = (local < 0) | (local >= stop - start)
        rows = self.looked_up(local.masked_fill(outside, 0), self.weight)
        leave = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.group)


def vocab_parallel_weight(
    vocab_size: int, hidden_size: int, *, group: Group, multiple: int, device: torch.device | None = None
) -> ShardedParameter:
    """This rank's uninitialised rows of a [V, h] table, padded at the end."""
    start, stop = split_evenly(vocab_size, group.rank, group.size)
    rows = padded_rows(vocab_size, group.size, multiple)
    spec = ShardSpec.split((vocab_size, hidden_size), {0: (start, stop)})
    return ShardedParameter(torch.empty(rows, hidden_size, device=device), spec)


def vocab_parallel_bias(
    vocab_size: int, *, group: Group, multiple: int, device: torch.device | None = None
) -> ShardedParameter:
    """This rank's uninitialised share of one number for each of V tokens, padded at the end like the weight's rows."""
    start, stop = split_evenly(vocab_size, group.rank, group.size)
    rows = padded_rows(vocab_size, group.size, multiple)
    spec = ShardSpec.split((vocab_size,), {0: (start, stop)})
    return ShardedParameter(torch.empty(rows, device=device), spec)
