"""The transformer block: attention and MLP, each with a norm and added to the residual stream. The norm comes before
the layer, as in GPT-2, or after the residual sum, as in the original transformer and in BERT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Protocol, Unpack, overload

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.activations import ACTIVATION_FUNCTIONS
from megacore.layers.attention import Mixing, SelfAttention, refuse_unsupported
from megacore.layers.context import BuildContext
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.linear_attention import GatedDeltaNet, Mamba2
from megacore.layers.norm import LayerNorm, build_norm
from megacore.parallel.random import Dropout
from megacore.parallel.recompute import computed_again
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, columns_in_one_product, columns_parallel

Recipe = tuple[Callable[..., Tensor], *tuple[Tensor, ...]]
"""A function and its inputs, from which a tensor can be made again."""


def run(layer: Callable[..., Tensor], x: Tensor, _: Recipe, *others: Tensor | None) -> Tensor:
    """layer(x, *others)"""
    return layer(x, *others)


def run_recomputing_input(layer: Callable[..., Tensor], x: Tensor, recipe: Recipe, *others: Tensor | None) -> Tensor:
    """layer(x, *others), which keeps for backward not x but the inputs of its recipe."""
    with computed_again(x, partial(recipe[0], *recipe[1:])):
        return layer(x, *others)


class MLP(nn.Module):
    """h -> ffn_hidden_size -> h with an activation between; one all-reduce forward and one backward. `config`: sizes,
    biases, activation; the group's size divides `ffn_hidden_size`."""

    inputs: ClassVar[tuple[str, ...]] = ("up",)
    """The projections of the input, in the order of the parameters."""
    up: ColumnParallelLinear

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        h, inner, bias = config.hidden_size, config.inner_size, config.mlp_bias
        self.activation = config.activation
        for name in self.inputs:
            self.add_module(name, ColumnParallelLinear(h, inner, bias=bias, **context.linear_arguments))
        self.down = RowParallelLinear(
            inner, h, bias=bias, ends_recomputed=context.recompute_full, **context.linear_arguments
        )
        # A kernel adds the bias in the pass of the activation. Not where weight gradients are computed apart, for which
        # the activation's backward would run twice; compiled code fuses the two anyway.
        self.fuses_bias = config.activation == "gelu" and bias and not context.split_backward
        # ReLU keeps its output itself.
        self.run = run_recomputing_input if context.recompute_light and config.activation != "relu" else run

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        if self.fuses_bias and ops.uses_triton(x) and not torch.compiler.is_compiling():
            assert self.up.bias is not None
            up = self.up(x, with_bias=False)
            return self.run(self.down, ops.bias_gelu(up, self.up.bias), (ops.bias_gelu, up, self.up.bias))
        activate, up = ACTIVATION_FUNCTIONS[self.activation], self.up(x)
        return self.run(self.down, activate(up), (activate, up))


class GatedMLP(MLP):
    """The MLP that multiplies two projections of its input (Shazeer 2020, arXiv 2002.05202). They are separate
    parameters, so that a rank's slice of each is contiguous, and share the communication of the input."""

    inputs = ("gate", "up")
    gate: ColumnParallelLinear

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__(config, context)
        # On a device one product computes both, if their weights are neighbours in memory. Memory order is the reverse
        # of the order of use (zero/layout.py): up comes first there, and in the joined output.
        self.joins = config.activation == "swiglu" and not config.mlp_bias
        self.gate.weight.adjacent_to_next = self.joins and context.device.type != "cpu"

    def forward(self, x: Tensor) -> Tensor:
        both = columns_in_one_product(x, [self.up, self.gate]) if self.joins and ops.on_accelerator(x) else None
        if both is not None:
            return self.run(self.down, ops.swiglu_of_halves(both), (ops.swiglu_of_halves, both))
        activate, (gate, up) = ACTIVATION_FUNCTIONS[self.activation], columns_parallel(x, [self.gate, self.up])
        return self.run(self.down, activate(gate, up), (activate, gate, up))


def build_mlp(config: ResolvedModel, context: BuildContext) -> MLP:
    """The MLP that the configuration asks for; arguments as for `MLP`."""
    return (GatedMLP if config.gated else MLP)(config, context)


# ---- what a block adds to the residual stream


class Residual:
    """The residual stream, and the output of attention or MLP, which is added to it."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x"""
        return residual + x

    def add_and_norm(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """norm(residual + x), and the sum, which the norm computes in the same pass."""
        return norm.of_sum(x, residual)


class DroppedResidual(Residual):
    """With dropout of what is added."""

    def __init__(self, dropout: Dropout) -> None:
        self.dropout = dropout

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.dropout.added_to(residual, x)

    def add_and_norm(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if not self.dropout.drops:
            return norm.of_sum(x, residual)
        return norm.with_input(self.dropout.added_to(residual, x))


class NormedResidual(Residual):
    """With a norm of what is added, as in OLMo 2 and Gemma 2."""

    def __init__(self, residual: Residual, norm: LayerNorm) -> None:
        self.residual, self.norm = residual, norm

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.residual.add(self.norm(x), residual)

    def add_and_norm(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return norm.with_input(self.add(x, residual))


class ScaledResidual(Residual):
    """With what is added times a number, as in Granite."""

    def __init__(self, residual: Residual, multiplier: float) -> None:
        self.residual, self.multiplier = residual, multiplier

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.residual.add(x * self.multiplier, residual)

    def add_and_norm(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.residual.add_and_norm(norm, x * self.multiplier, residual)


def build_residual(config: ResolvedModel, dropout: Dropout | None, post_norm: LayerNorm | None) -> Residual:
    """How a block adds to the residual stream. `post_norm`: of the output; None: there is none."""
    residual = Residual() if dropout is None else DroppedResidual(dropout)
    if post_norm is not None:
        residual = NormedResidual(residual, post_norm)
    return residual if config.residual_multiplier == 1.0 else ScaledResidual(residual, config.residual_multiplier)


class Unnormed(nn.Identity):
    """In place of a norm where a block has none."""

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.with_input(x + residual)


Norm = LayerNorm | Unnormed


# ---- blocks


class BuildsAttention(Protocol):
    """Makes an attention: a module whose forward takes x [b, s, h] (or, sequence parallel, [b, s/t, h]), the documents
    [b, s] and the positions [b, s] of whole sequences, or None, and returns a tensor like x."""

    def __call__(
        self, config: ResolvedModel, context: BuildContext, name: str, /, **mixing: Unpack[Mixing]
    ) -> nn.Module: ...


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2 (Radford et al. 2019, section 2.3), or with norms of what attention and MLP give, as
    in OLMo 2 (arXiv 2501.00656, section 2.1) and Gemma 2 (arXiv 2408.00118, section 2). The configuration may ask for
    attention and MLP side by side instead of one after the other. Raises ConfigError where the run asks for what
    `attention` does not have.

    Args:
        config: sizes, kinds of layers and dropout.
        name: the block's global name, `blocks.17`.
        attention_norm: whether there is a norm before attention; ModernBERT's first block has none.
        attention: builds attention, but for l and m of --layer-pattern; None: the configuration says which.
        mixing: keyword arguments of `Attention`.
    """

    def __init__(
        self,
        config: ResolvedModel,
        context: BuildContext,
        name: str,
        *,
        attention_norm: bool = True,
        attention: BuildsAttention | None = None,
        mlp: Callable[[ResolvedModel, BuildContext], nn.Module] = build_mlp,
        **mixing: Unpack[Mixing],
    ) -> None:
        super().__init__()
        norm = partial(build_norm, config, device=context.device)
        reads_normed, has_post_norms = config.norm_placement != "after", config.norm_placement != "before"
        light = run_recomputing_input if context.recompute_light else run
        self.side_inputs = context.side_inputs
        self.attention_norm: Norm = norm() if attention_norm and reads_normed else Unnormed()
        self.run_attention = run if isinstance(self.attention_norm, Unnormed) else light
        mixing = {"causal": True, "window": None, "rotary": None, "alibi": None, **mixing}
        latent = LatentAttention if config.multi_latent_attention else SelfAttention
        linear = Mamba2 if config.is_mamba else GatedDeltaNet
        build = linear if config.is_linear else attention or latent
        self.attention = build(config, context, f"{name}.attention", **mixing)
        if build is attention:
            refuse_unsupported(self.attention, config, context, mixing)
        self.attention_dropout = context.hidden_dropout(config, f"{name}.attention_dropout")
        self.attention_post_norm = norm() if has_post_norms else None
        self.attention_residual = build_residual(config, self.attention_dropout, self.attention_post_norm)
        self.mlp_norm: Norm = norm() if reads_normed and not config.shared_parallel_norm else Unnormed()
        self.run_mlp = light if reads_normed else run
        self.mlp = mlp(config, context)
        self.mlp_side_inputs = ("padding",) if getattr(self.mlp, "leaves_padding_out", False) else ()
        self.mlp_post_norm = norm() if has_post_norms else None
        self.mlp_dropout = context.hidden_dropout(config, f"{name}.mlp_dropout")
        self.mlp_residual = build_residual(config, self.mlp_dropout, self.mlp_post_norm)
        own = type(self)  # no bound method: a model that is dropped is to free its memory at once, and not in cycles
        parallel = own.side_by_side_on_one_norm if config.shared_parallel_norm else own.side_by_side
        self.arrangement = parallel if config.parallel_residual else own.one_after_the_other

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The block's output, in the form of its input. `x`: [b, s, h]; or with what `BuildContext.side_inputs` names,
        such as documents and positions [b, s], as for SelfAttention, which are handed on as they are."""
        if isinstance(x, Tensor):
            return self.arrangement(self, x, {})
        hidden, *others = x
        return (self.arrangement(self, hidden, dict(zip(self.side_inputs, others, strict=False))), *others)

    # The arrangements: [b, s, h] -> [b, s, h], with the side inputs by name.

    def one_after_the_other(self, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        """Attention, whose sum with the residual stream the MLP reads."""
        normed, x = self.attention_norm.with_input(x)
        attended = self._attended(normed, x, side)
        normed, x = self.attention_residual.add_and_norm(self.mlp_norm, attended, x)
        del attended  # no backward needs it
        mixed = self.run_mlp(self.mlp, normed, (self.mlp_norm, x), *map(side.get, self.mlp_side_inputs))
        return self.mlp_residual.add(mixed, x)

    def side_by_side(self, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        """Attention and MLP of the same input, as in GPT-NeoX (Black et al. 2022, arXiv 2204.06745, section 2.1)."""
        normed, x = self.attention_norm.with_input(x)
        attended = self._attended(normed, x, side)
        normed, x = self.mlp_norm.with_input(x)
        residual = self.attention_residual.add(attended, x)
        del attended  # no backward needs it
        mixed = self.run_mlp(self.mlp, normed, (self.mlp_norm, x), *map(side.get, self.mlp_side_inputs))
        return self.mlp_residual.add(mixed, residual)

    def side_by_side_on_one_norm(self, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        """With one norm for both, as in GPT-J."""
        normed, x = self.attention_norm.with_input(x)
        residual = self.attention_residual.add(self._attended(normed, x, side), x)
        mixed = self.run_mlp(self.mlp, normed, (self.attention_norm, x), *map(side.get, self.mlp_side_inputs))
        return self.mlp_residual.add(mixed, residual)

    def _attended(self, normed: Tensor, x: Tensor, side: Mapping[str, Tensor]) -> Tensor:
        where = map(side.get, ("documents", "positions"))
        return self.run_attention(self.attention, normed, (self.attention_norm, x), *where)


class PostNormBlock(nn.Module):
    """Bidirectional attention and MLP, each added to its input and then normed (Vaswani et al. 2017, arXiv 1706.03762,
    section 3.1; Devlin et al. 2018, arXiv 1810.04805). `name`: the block's global name, `blocks.17`."""

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str) -> None:
        super().__init__()
        self.attention = SelfAttention(config, context, f"{name}.attention", causal=False)
        self.attention_dropout = context.hidden_dropout(config, f"{name}.attention_dropout")
        self.attention_residual = build_residual(config, self.attention_dropout, None)
        self.attention_norm = build_norm(config, device=context.device)
        self.run_mlp = run_recomputing_input if context.recompute_light else run
        self.mlp = build_mlp(config, context)
        self.mlp_dropout = context.hidden_dropout(config, f"{name}.mlp_dropout")
        self.mlp_residual = build_residual(config, self.mlp_dropout, None)
        self.mlp_norm = build_norm(config, device=context.device)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, h] and document numbers [b, s] -> the same"""
        x, documents = inputs
        x, total = self.attention_residual.add_and_norm(self.attention_norm, self.attention(x, documents), x)
        mixed = self.run_mlp(self.mlp, x, (self.attention_norm, total))
        x, _ = self.mlp_residual.add_and_norm(self.mlp_norm, mixed, x)
        return x, documents
