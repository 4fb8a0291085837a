"""The transformer block: attention and MLP, each with a norm and added to the residual stream.

The norm comes before the layer, as in GPT-2, or after the residual sum, as in the original transformer and in BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, Unpack, overload

import torch
from torch import Tensor, nn

from megacore import ops
from megacore.config import ResolvedModel
from megacore.layers.activations import ACTIVATION_FUNCTIONS
from megacore.layers.attention import Mixing, SelfAttention, refuse_unsupported
from megacore.layers.context import BuildContext
from megacore.layers.latent_attention import LatentAttention
from megacore.layers.norm import LayerNorm, RMSNorm, build_norm
from megacore.layers.rotary import Rotary
from megacore.parallel.random import Dropout
from megacore.parallel.recompute import computed_again
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, columns_parallel, joined_columns_parallel


class MLP(nn.Module):
    """h -> ffn_hidden_size -> h with an activation between; one all-reduce forward and one backward.

    A gated MLP (Shazeer 2020, arXiv 2002.05202) multiplies two projections of its input. They are separate parameters,
    so that a rank's slice of each is contiguous, and share the communication of the input.

    Args:
        config: sizes, biases, activation; the group's size divides `ffn_hidden_size`.
        context: groups, device and what else a layer is built with.
    """

    def __init__(self, config: ResolvedModel, context: BuildContext) -> None:
        super().__init__()
        h, inner, bias = config.hidden_size, config.inner_size, config.mlp_bias
        self.activation = config.activation
        self.gate: ColumnParallelLinear | None = None
        if config.gated:
            self.gate = ColumnParallelLinear(h, inner, bias=bias, **context.linear_arguments)
        self.up = ColumnParallelLinear(h, inner, bias=bias, **context.linear_arguments)
        self.down = RowParallelLinear(
            inner, h, bias=bias, ends_recomputed=context.recompute_full, **context.linear_arguments
        )
        # On a device one product computes gate and up, if their weights are neighbours in memory.
        self.joins = config.activation == "swiglu" and not bias
        if self.gate is not None:
            self.gate.weight.beside_next = self.joins and context.device.type != "cpu"
        # ReLU keeps its output itself.
        self.light = context.recompute_light and config.activation != "relu"

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]"""
        activate, inputs = self._before_activation(x)
        again = partial(activate, *inputs) if self.light else None
        return _apply(self.down, activate(*inputs), again=again)

    def _before_activation(self, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """The activation, and what it is computed from."""
        up, gate = self.up, self.gate
        if gate is not None:
            both = joined_columns_parallel(x, [up, gate]) if self.joins and ops.on_accelerator(x) else None
            if both is not None:
                return ops.swiglu_of_halves, (both,)
            return ACTIVATION_FUNCTIONS[self.activation], columns_parallel(x, [gate, up])
        if self._takes_bias(x):
            assert up.bias is not None
            return ops.bias_gelu, (up(x, with_bias=False), up.bias)
        return ACTIVATION_FUNCTIONS[self.activation], (up(x),)

    def _takes_bias(self, x: Tensor) -> bool:
        """Whether the activation adds the bias in the same pass. Not where weight gradients are computed apart, for
        which the activation's backward would run twice; compiled code fuses the two anyway."""
        fused = ops.uses_triton(x) and not torch.compiler.is_compiling() and self.activation == "gelu"
        return fused and self.up.bias is not None and not self.up.split_backward


class BuildsAttention(Protocol):
    """Makes an attention: a module whose forward takes x [b, s, h] (or, sequence parallel, [b, s/t, h]), the documents
    [b, s] and the positions [b, s] of whole sequences, or None, and returns a tensor like x."""

    def __call__(
        self, config: ResolvedModel, context: BuildContext, name: str, /, **mixing: Unpack[Mixing]
    ) -> nn.Module: ...


class TransformerBlock(nn.Module):
    """The pre-norm block of GPT-2 (Radford et al. 2019, section 2.3), or with attention and MLP side by side, as in
    GPT-NeoX (Black et al. 2022, arXiv 2204.06745, section 2.1) or, with one norm for both, in GPT-J, or with norms of
    the outputs of attention and MLP, as in OLMo 2 (arXiv 2501.00656, section 2.1) and Gemma 2 (arXiv 2408.00118,
    section 2).

    Args:
        config: sizes, kinds of layers and dropout.
        context: groups, device and what else a layer is built with.
        name: the block's global name, `blocks.17`.
        causal: no position sees a later one.
        window: number of most recent positions that are seen; None: all.
        rotary: turns queries and keys by their positions; None: nothing does.
        alibi: bias by distance, of this rank's heads.
        attention_norm: whether there is a norm before attention; ModernBERT's first block has none.
        attention: builds attention; None: the configuration says which.
        mlp: builds what follows attention.

    Raises:
        ConfigError: the run asks for what `attention` does not have.
    """

    def __init__(
        self,
        config: ResolvedModel,
        context: BuildContext,
        name: str,
        *,
        causal: bool = True,
        window: int | None = None,
        rotary: Rotary | None = None,
        alibi: ops.Alibi | None = None,
        attention_norm: bool = True,
        attention: BuildsAttention | None = None,
        mlp: Callable[[ResolvedModel, BuildContext], nn.Module] = MLP,
    ) -> None:
        super().__init__()
        self.parallel, self.light = config.parallel_residual, context.recompute_light
        self.placement, self.multiplier = config.norm_placement, config.residual_multiplier
        self.beside = context.beside
        norm = partial(build_norm, config, device=context.device, blocks=context.blocks)
        attention_norm = attention_norm and self.placement != "after"
        self.attention_norm = norm() if attention_norm else nn.Identity()
        self.attention_post_norm: LayerNorm | RMSNorm | None = None
        self.mlp_post_norm: LayerNorm | RMSNorm | None = None
        mixing: Mixing = {"causal": causal, "window": window, "rotary": rotary, "alibi": alibi}
        build = attention or (LatentAttention if config.multi_latent_attention else SelfAttention)
        self.attention = build(config, context, f"{name}.attention", **mixing)
        refuse_unsupported(self.attention, config, context, mixing)
        self.attention_dropout = context.hidden_dropout(config, f"{name}.attention_dropout")
        if self.placement != "before":
            self.attention_post_norm = norm()
        self.shares_norm = config.shared_parallel_norm
        self.mlp_norm = nn.Identity() if self.placement == "after" or self.shares_norm else norm()
        self.mlp = mlp(config, context)
        if self.placement != "before":
            self.mlp_post_norm = norm()
        self.leaves_padding_out: bool = getattr(self.mlp, "leaves_padding_out", False)
        self.mlp_dropout = context.hidden_dropout(config, f"{name}.mlp_dropout")

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """The block's output, in the form of its input.

        Args:
            x: [b, s, h]; or with what `BuildContext.beside` names, such as documents and positions [b, s], as for
                SelfAttention, which are handed on as they are.
        """
        if isinstance(x, Tensor):
            return self._apply_to(x)
        hidden, *where = x
        return (self._apply_to(hidden, **dict(zip(self.beside, where, strict=False))), *where)

    def _apply_to(
        self,
        x: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        norm, normed, again = self.attention_norm, x, None
        if not isinstance(norm, nn.Identity):
            normed, x = norm.with_input(x)
            again = partial(norm, x) if self.light else None
        attended = self._scaled(_apply(self.attention, normed, documents, positions, again=again))
        if self.shares_norm:
            attended = _residual_sum(self.attention_dropout, attended, x)
            beside = (padding,) if self.leaves_padding_out else ()
            return _residual_sum(
                self.mlp_dropout, self._scaled(_apply(self.mlp, normed, *beside, again=again)), attended
            )
        norm = self.mlp_norm
        if self.placement != "before" or isinstance(norm, nn.Identity):
            return self._with_post_norms(x, attended)
        if self.parallel:
            normed, total = norm.with_input(x)
            residual = _residual_sum(self.attention_dropout, attended, total)
        else:
            normed, total = _normed_sum(norm, self.attention_dropout, attended, x)
            residual = total
        del attended  # no backward needs it
        beside = (padding,) if self.leaves_padding_out else ()
        mixed = self._scaled(_apply(self.mlp, normed, *beside, again=partial(norm, total) if self.light else None))
        return _residual_sum(self.mlp_dropout, mixed, residual)

    def _scaled(self, x: Tensor) -> Tensor:
        """What a layer adds to the residual."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def _with_post_norms(self, x: Tensor, attended: Tensor) -> Tensor:
        """The block from attention's output on, where the outputs of its layers are normalised."""
        assert self.attention_post_norm is not None
        assert self.mlp_post_norm is not None
        x = _residual_sum(self.attention_dropout, self.attention_post_norm(attended), x)
        if isinstance(self.mlp_norm, nn.Identity):
            mixed = self._scaled(self.mlp(x))
        else:
            normed, x = self.mlp_norm.with_input(x)
            mixed = self._scaled(_apply(self.mlp, normed, again=partial(self.mlp_norm, x) if self.light else None))
        return _residual_sum(self.mlp_dropout, self.mlp_post_norm(mixed), x)


class PostNormBlock(nn.Module):
    """Bidirectional attention and MLP, each added to its input and then normed (Vaswani et al. 2017, arXiv 1706.03762,
    section 3.1; Devlin et al. 2018, arXiv 1810.04805).

    Args:
        config: sizes and dropout.
        context: groups, device and what else a layer is built with.
        name: the block's global name, `blocks.17`.
    """

    def __init__(self, config: ResolvedModel, context: BuildContext, name: str) -> None:
        super().__init__()
        self.light = context.recompute_light
        self.attention = SelfAttention(config, context, f"{name}.attention", causal=False)
        self.attention_dropout = context.hidden_dropout(config, f"{name}.attention_dropout")
        self.attention_norm = build_norm(config, device=context.device, blocks=context.blocks)
        self.mlp = MLP(config, context)
        self.mlp_dropout = context.hidden_dropout(config, f"{name}.mlp_dropout")
        self.mlp_norm = build_norm(config, device=context.device, blocks=context.blocks)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Hidden states [b, s, h] and document numbers [b, s] -> the same"""
        x, documents = inputs
        x, total = _normed_sum(self.attention_norm, self.attention_dropout, self.attention(x, documents), x)
        mixed = _apply(self.mlp, x, again=partial(self.attention_norm, total) if self.light else None)
        x, _ = _normed_sum(self.mlp_norm, self.mlp_dropout, mixed, x)
        return x, documents


def _apply(
    layer: Callable[..., Tensor], x: Tensor, *others: Tensor | None, again: Callable[[], Tensor] | None
) -> Tensor:
    """layer(x, *others); x is not kept for backward where `again` computes it."""
    if again is None:
        return layer(x, *others)
    with computed_again(x, again):
        return layer(x, *others)


def _residual_sum(dropout: Dropout | None, x: Tensor, residual: Tensor) -> Tensor:
    """residual + dropout(x)"""
    return residual + x if dropout is None else dropout.added_to(residual, x)


def _normed_sum(
    norm: LayerNorm | RMSNorm, dropout: Dropout | None, x: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """norm(residual + dropout(x)), and the sum, which either dropout or the norm computes in the same pass."""
    if dropout is None or not dropout.drops:
        return norm.of_sum(x, residual)
    return norm.with_input(dropout.added_to(residual, x))
