"""The operators of layers, and the one module (dispatch.py) that decides which implementation of each runs.

Every operator has a plain-torch form and a Triton kernel (`megacore.kernels`, imported only from here). On a GPU with
Triton the kernel runs, elsewhere torch; `--kernels` and `kernels_chosen` override it. Each kernel is a
`torch.library.custom_op` with a shape function and a gradient, so that fake tensors, FLOP counters and torch.compile
see through it. Each may be used by itself: `from megacore.ops import rms_norm`.
"""

from __future__ import annotations

import torch

from megacore.ops.activation import bias_gelu, clamped_swiglu, geglu, gelu, squared_relu, swiglu, swiglu_of_halves
from megacore.ops.adamw import AdamWStep, adamw_
from megacore.ops.attention import (
    Alibi,
    Attention,
    AttentionShape,
    alibi_slopes,
    attention,
    attention_backend,
    resolved,
    slower_attention,
)
from megacore.ops.delta_rule import causal_convolution, gated_delta_rule, passed_on
from megacore.ops.dispatch import (
    Choice,
    choose_kernels,
    described,
    kernels_chosen,
    on_accelerator,
    uses_triton,
    why_not,
)
from megacore.ops.dropout import dropout_add, dropout_mask
from megacore.ops.loss import CrossEntropyOptions, VocabularyShare, cross_entropy, summed_cross_entropy
from megacore.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    norm_and_sum,
    rms_norm,
)
from megacore.ops.position import rotary, split_rotary
from megacore.ops.soft_cap import soft_capped
from megacore.ops.softmax import fused_softmax
from megacore.ops.visibility import Visibility

__all__ = [
    "AdamWStep",
    "Alibi",
    "Attention",
    "AttentionShape",
    "Choice",
    "CrossEntropyOptions",
    "Visibility",
    "VocabularyShare",
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "alibi_slopes",
    "attention",
    "attention_backend",
    "bias_gelu",
    "causal_convolution",
    "choose_kernels",
    "clamped_swiglu",
    "cross_entropy",
    "dropout_add",
    "dropout_mask",
    "fused_softmax",
    "gated_delta_rule",
    "geglu",
    "gelu",
    "implementations",
    "kernels_chosen",
    "layer_norm",
    "norm_and_sum",
    "on_accelerator",
    "passed_on",
    "rms_norm",
    "rotary",
    "slower_attention",
    "soft_capped",
    "split_rotary",
    "squared_relu",
    "summed_cross_entropy",
    "swiglu",
    "swiglu_of_halves",
    "uses_triton",
    "why_not",
]


def implementations(
    device: torch.device,
    attention: Attention,
    *,
    norm: str = "layer_norm",
    affine: bool = True,
    activation: str = "gelu",
    positions: str = "learned",
    capped: bool = False,
) -> dict[str, str]:
    """Which implementation each operator of a model runs on a device, in the order of a block.

    Args:
        device: where the model computes.
        attention: what was asked for.
        norm: `layer_norm` or `rms_norm`.
        affine: whether norms have weights.
        activation: of the feed-forward layer, as the configuration names it.
        positions: likewise.
        capped: whether attention scores have a soft cap.
    """
    kernels = described(device)
    softmax = kernels if positions != "alibi" else "torch"
    names = {norm: kernels if affine else "torch"}
    if positions == "rope":
        names["rotary"] = kernels
    fused = "torch in blocks" if capped else "torch sdpa"
    names["attention"] = fused if resolved(attention) == "sdpa" else f"fused softmax, {softmax}"
    names[activation] = kernels if activation in ("gelu", "swiglu") else "torch"
    return {**names, "cross_entropy": kernels}
