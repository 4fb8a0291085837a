"""Tensor parallelism: the linear layers and the embedding, split over a group (Shoeybi et al. 2019, arXiv
1909.08053, section 3).

A column-parallel layer splits its output features and a row-parallel one its input features. A pair of them needs one
all-reduce in forward, of the second's output, and one in backward, of the gradient of the first's input. On a group of
one each is its torch.nn twin.

With sequence parallelism (sequence.py) a column-parallel layer keeps only this rank's positions of its input for
backward and gathers the input again there, while the input gradient is computed; the reduce-scatter of that gradient
runs while the weight's is computed. A row-parallel layer reduce-scatters its output, and gathers the gradient of its
output.

Shape legend: s sequence, b micro-batch, i input features, o output features, h hidden size, V vocabulary, t group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import padded_rows
from megacore.ops import on_accelerator
from megacore.ops.dispatch import Node
from megacore.parallel.collectives import Sum, copy_to_group, reduce_from_group
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.products import (
    TORCH,
    LinearLayers,
    Parameters,
    Products,
    accumulator_of,
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
    start_scatter,
)
from megacore.parallel.sharding import ShardedModule, ShardedParameter, ShardSpec, split_evenly

# ---- linear layers


class ColumnParallelLinear(ShardedModule):
    """y = x W^T + b with the output features split over the group. Raises ValueError where the group's size does not
    divide `out_features`.

    Args:
        in_features: input features, whole on every rank.
        out_features: output features of the whole layer; the group's size must divide it.
        sequence_parallel: the input is split along the sequence, [b, s/t, i], and gathered here.
        split_backward: as for `columns_of_parameters`.
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
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _require_divisible("out_features", out_features, group)
        self.group, self.sequence_parallel, self.split_backward = group, sequence_parallel, split_backward
        self.products = products
        self.exchange: Exchange | None = None
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
        # Not `accumulator_of`: on one rank a layer is to cost the host no more than torch's.
        if self.group.size == 1 and self.products is TORCH and getattr(self.weight, "accumulator", None) is None:
            return F.linear(x, self.weight, bias)
        return self.columns(x, (self.weight, bias))[0]

    def columns(self, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        """As `forward`, with these parameters (weight, bias, weight, ...) instead of the layer's: several outputs."""
        return columns_of_parameters(self, x, parameters)

    def adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """The output y for the input x, to which an adapter adds (layers/lora.py); y itself without one."""
        return y


class RowParallelLinear(ShardedModule):
    """y = x W^T + b with the input features split over the group; the bias is whole on every rank and added once.
    Raises ValueError where the group's size does not divide `in_features`.

    Args:
        in_features: input features of the whole layer; the group's size must divide it.
        out_features: output features, whole on every rank after the sum.
        sequence_parallel: the output is split along the sequence, [b, s/t, o].
        split_backward: as for `columns_of_parameters`.
        ends_recomputed: the layer is the last product of a block that is recomputed in backward; recomputation stops
            before this product and its communication.
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
        ends_recomputed: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _require_divisible("in_features", in_features, group)
        self.group, self.sequence_parallel, self.split_backward = group, sequence_parallel, split_backward
        self.products, self.ends_recomputed = products, ends_recomputed
        self.exchange: Exchange | None = None
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
        alone = self.group.size == 1
        if alone and self.products is TORCH and getattr(self.weight, "accumulator", None) is None:
            return F.linear(x, self.weight, self.bias)
        separate = self.split_backward or not torch.is_grad_enabled()
        if alone and (separate or accumulator_of(self.weight) is None):
            return self.products.linear(x, self.weight, self.bias)
        if self.exchange is None and not alone and (separate or not on_accelerator(x)):
            y = self.products.linear(x, self.weight)
            if self.sequence_parallel:
                y = reduce_scatter_sequence(y, self.group)
            else:
                y = reduce_from_group(y, self.group, in_place=True)
            return y if self.bias is None else y + self.bias
        saved = self.ends_recomputed and on_accelerator(x)
        layers = LinearLayers(self.products, (self.weight, self.bias), input_is_saved=saved)
        exchange = Exchange if alone else _ScatteredOutput if self.sequence_parallel else _SummedOutput
        x = input_saved(x) if saved else x
        (summed,) = _ParallelLinear.apply(layers, self.exchange or exchange(self.group), x, self.weight, self.bias)
        return summed


def columns_of_parameters(
    layer: ColumnParallelLinear | VocabParallelOutput, x: Tensor, parameters: Parameters
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers of one input, which every rank needs all of; its communication is done once.

    With `split_backward` communication and product are separate operators, so that autograd can compute the gradient of
    the input without that of the weight. Otherwise one operator overlaps the communication of the input's gradient with
    the product for the weight's.

    `layer`: its group and ways to compute are those of all. `x`: [b, s, i], or, sequence parallel, [b, s/t, i].
    `parameters`: weight [o/t, i], bias [o/t] or None, weight, ...: this rank's output features. Returns [b, s, o/t] of
    each layer.
    """
    group, products = layer.group, layer.products
    if layer.exchange is None and (layer.split_backward or not torch.is_grad_enabled()):
        entered = gather_sequence(x, group) if layer.sequence_parallel else copy_to_group(x, group, in_place=True)
        return linears(products, entered, parameters)
    layers = LinearLayers(products, parameters)
    if group.size == 1 and not any(layers.accumulators):
        return linears(products, x, parameters)
    y: tuple[Tensor, ...] = _ParallelLinear.apply(layers, _entry(layer), x, *parameters)
    return y


def columns_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """What several column-parallel layers, alike but for their output features, give for one input, [b, s, o/t] each;
    it is communicated once. `x`: [b, s, i] (or [b, s/t, i])."""
    outputs = layers[0].columns(x, [parameter for layer in layers for parameter in (layer.weight, layer.bias)])
    return tuple(layer.adapted(x, y) for layer, y in zip(layers, outputs, strict=True))


def columns_in_one_product(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor | None:
    """What `columns_parallel` gives, side by side in one tensor that one product computes. `x`: [b, s, h] (or [b, s/t,
    h]). `layers`: as for `columns_parallel`, without biases. Returns [b, s, o/t of all layers together]; None where
    that cannot be: without gradients, with a backward that is split, or where the weights do not lie one after the
    other in memory."""
    first = layers[0]
    if first.exchange is None and (first.split_backward or not torch.is_grad_enabled()):
        return None
    if (whole := joined([layer.weight for layer in layers])) is None:
        return None
    parameters = [parameter for layer in layers for parameter in (layer.weight, None)]
    joint = LinearLayers(first.products, parameters, whole=whole)
    y: tuple[Tensor] = _ParallelLinear.apply(joint, _entry(first), x, *parameters)
    return y[0]


def _require_divisible(name: str, features: int, group: Group) -> None:
    if features % group.size:
        raise ValueError(f"{name} {features} does not divide over {group.size} tensor-parallel ranks")


# ---- one node of autograd for all of them: products, and what a rank exchanges while they run


class _ParallelLinear(Node):
    """Linear layers whose communication runs while they multiply: the `exchange` says what the ranks send each other,
    and when."""

    @staticmethod
    def forward(
        ctx: Any, layers: LinearLayers, exchange: Exchange, x: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        save_operands(ctx, layers, x, *parameters[::2])
        ctx.exchange = exchange
        return exchange.outputs(layers, x, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = saved_operands(ctx)
        dx, gradients = ctx.exchange.gradients(ctx.layers, x, weights, grads, ctx.needs_input_grad[2])
        return None, None, dx, *gradients


Gradients = tuple[Tensor | None, Sequence[Tensor | None]]
"""Of the input, None where nobody wants it, and of weight, bias, weight, ..."""


class Exchange:
    """What the ranks of a group exchange for linear layers, and when: nothing in this one, of a group of one. A layer
    whose `exchange` is set does it in that way, also without gradients (async_tp.py)."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        return layers.outputs(x, parameters)

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        dx = layers.input_gradient(grads, weights) if wants_input else None
        return dx, layers.parameter_gradients(x, grads)


class _WholeInput(Exchange):
    """Every rank holds the input: the all-reduce of its gradient runs while the weight gradients are computed."""

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        summing = Sum(layers.input_gradient(grads, weights), self.group) if wants_input else None
        gradients = layers.parameter_gradients(x, grads)
        return None if summing is None else summing.wait(), gradients


class _GatheredInput(Exchange):
    """A rank holds its positions of the input, which is gathered, and once more in backward, so that only these are
    kept. The reduce-scatter of its gradient runs while the weight gradients are computed."""

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        return start_gather(x, self.group).outputs(layers, parameters)

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        if layers.frozen:  # no gradient reads the input
            dx = start_scatter(layers.input_gradient(grads, weights), self.group).wait()
            return dx, layers.parameter_gradients(x, grads)
        gathering = start_gather(x, self.group)
        scattering = gathering.input_gradient(layers, grads, weights) if wants_input else None
        gradients = layers.parameter_gradients(gathering.wait(), grads)
        return None if scattering is None else scattering.wait(), gradients


class _SummedOutput(Exchange):
    """Every rank computes a part of the output, and gets the sum. The first rank's product adds the bias. The gradient
    of the output is whole on every rank: backward exchanges nothing."""

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        weight, bias = parameters
        assert weight is not None
        partial = layers.products.output(x, weight, bias if self.group.is_first else None)
        return (Sum(partial, self.group).wait(),)


class _ScatteredOutput(Exchange):
    """The same where a rank gets its positions of the sum, which runs for a sample while the next is computed."""

    def outputs(self, layers: LinearLayers, x: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
        weight, bias = parameters
        assert weight is not None
        y = x.new_empty(*x.shape[:2], weight.shape[0])
        scattering = SampleScatters(y, self.group)
        for partial, sample in zip(y, x, strict=True):
            layers.products.write_output(partial, sample, weight, bias if self.group.is_first else None)
            scattering.start()
        return (scattering.wait(),)

    def gradients(
        self, layers: LinearLayers, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], wants_input: bool
    ) -> Gradients:
        gathering = SampleGathers(grads[0], self.group)
        dx = torch.empty_like(x) if wants_input else None
        for number, sample in enumerate(gathering.samples()):
            if dx is not None:
                layers.products.write_input_gradient(dx[number], sample, weights[0])
        learns = layers.parameters[1] is not None and not layers.frozen
        # The bias's gradient is of this rank's positions: `WeightUpdate._all_reduce_replicated_grads` sums it, once a
        # step.
        return dx, (layers.weight_gradient(x, gathering.whole), grads[0].sum((0, 1)) if learns else None)


def _entry(layer: ColumnParallelLinear | VocabParallelOutput) -> Exchange:
    """What ranks exchange for column-parallel layers."""
    if layer.exchange is not None:
        return layer.exchange
    if layer.group.size == 1:
        return Exchange(layer.group)
    return _GatheredInput(layer.group) if layer.sequence_parallel else _WholeInput(layer.group)


# ---- the embedding


class VocabParallelEmbedding(ShardedModule):
    """Token embedding with the vocabulary's rows split over the group.

    Rank r holds rows [r V / t, (r + 1) V / t). Its local table is padded with zero rows to `padded_rows(V, t,
    multiple)`, so that the ranks' matrices have one aligned shape; the padding exists in memory only and never takes
    part in a result.

    Args:
        num_embeddings: V, the true vocabulary size.
        embedding_dim: h.
        multiple: local rows are padded to a multiple of this.
        sequence_parallel: the output is split along the sequence, [b, s/t, h].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = ALONE,
        multiple: int = 1,
        sequence_parallel: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = _vocab_parallel(num_embeddings, embedding_dim, group=group, multiple=multiple, device=device)
        self.weight.takes_rows = True
        self.rows = self.weight.spec.slices[0]  # not of the weight in forward: a further use of it has no spec

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] token ids in [0, V) -> [b, s, h] (or [b, s/t, h])"""
        if self.group.size == 1:
            return self.look_up(tokens)
        start, stop = self.rows
        local = tokens - start
        outside = (local < 0) | (local >= stop - start)
        rows = self.look_up(local.masked_fill(outside, 0))
        leave = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.group)

    def look_up(self, rows: Tensor) -> Tensor:
        if getattr(self.weight, "accumulator", None) is None:
            return F.embedding(rows, self.weight)
        return looked_up(rows, self.weight)


class VocabParallelOutput(ShardedModule):
    """The output layer: logits over the vocabulary, whose rows are split like the embedding's, and may be the same.

    Args:
        num_embeddings: V, the true vocabulary size.
        embedding_dim: h.
        multiple: local rows are padded to a multiple of this, as are the embedding's.
        bias: whether each token has one.
        sequence_parallel, split_backward, products: as for `columns_of_parameters`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = ALONE,
        multiple: int = 1,
        bias: bool = False,
        sequence_parallel: bool = False,
        split_backward: bool = False,
        products: Products = TORCH,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.split_backward, self.products = split_backward, products
        self.exchange: Exchange | None = None
        self.weight = _vocab_parallel(num_embeddings, embedding_dim, group=group, multiple=multiple, device=device)
        self.bias: ShardedParameter | None = None
        if bias:
            self.bias = _vocab_parallel(num_embeddings, group=group, multiple=multiple, device=device)

    def logits(self, x: Tensor) -> Tensor:
        """[b, s, h] (or, sequence parallel, [b, s/t, h]) -> [b, s, padded V/t]"""
        if self.group.size == 1 and self.products is TORCH and getattr(self.weight, "accumulator", None) is None:
            return F.linear(x, self.weight, self.bias)
        return columns_of_parameters(self, x, (self.weight, self.bias))[0]


def _vocab_parallel(
    vocab_size: int, *sizes: int, group: Group, multiple: int, device: torch.device | None
) -> ShardedParameter:
    """This rank's uninitialised rows of a [V, *sizes] table, padded at the end."""
    spec = ShardSpec.split((vocab_size, *sizes), {0: split_evenly(vocab_size, group.rank, group.size)})
    rows = padded_rows(vocab_size, group.size, multiple)
    return ShardedParameter(torch.empty(rows, *sizes, device=device), spec)
