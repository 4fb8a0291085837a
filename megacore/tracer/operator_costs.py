"""What operators compute: the cost of each operator that multiplies matrices or attends, in FLOPs. All other operators
are limited by the bytes that they move. An operator that may compute and has no cost here is an error: without one, its
time would silently be that of its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

from megacore.ops.visibility import Visibility
from megacore.plan.roofline import Kind


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call of an operator computes."""

    kind: Kind  # which of the device's efficiencies applies
    flops: float  # by the full-attention convention, backward of attention twice its forward
    work: float  # FLOPs that are executed
    name: str | None = None  # under which launches are listed; None: the operator's


Arguments = Mapping[str, Any]
"""The arguments of a call by the names of the operator's schema."""


def operator_cost(operator: Any, arguments: Arguments) -> Cost | None:
    """The cost of a call; None: the operator is limited by the bytes that it moves. `operator`: the
    `torch._ops.OpOverload` that is called. Raises NotImplementedError where the operator may compute, and its cost is
    not known."""
    full_name = operator._schema.name
    namespace, name = full_name.split("::")
    if (cost := COSTS.get(full_name)) is not None:
        return cost(arguments)
    computes = operator.overloadpacket in flop_registry or "attention" in name or "attn" in name
    if computes or (namespace == "megacore" and name not in MEMORY_ONLY):
        raise NotImplementedError(
            f"the cost of the operator {full_name} is not known: add it to {__name__}, to COSTS if it multiplies "
            "matrices or attends, else to MEMORY_ONLY"
        )
    return None


def _product(left: str, right: str) -> Callable[[Arguments], Cost]:
    """Of the matrices that two arguments name: [..., m, k] and [..., k, n]."""

    def cost(arguments: Arguments) -> Cost:
        flops = 2.0 * math.prod(arguments[left].shape) * arguments[right].shape[-1]
        return Cost(kind="product", flops=flops, work=flops)

    return cost


def _grouped_products(arguments: Arguments) -> Cost:
    """Of each row with the matrix of its expert: rows [r, i] or [r, o], weights [E, o, i]."""
    _, outputs, inputs = arguments["weight"].shape
    flops = 2.0 * len(arguments["x"]) * outputs * inputs
    return Cost(kind="product", flops=flops, work=flops)


def _grouped_weight_gradients(arguments: Arguments) -> Cost:
    """dY^T X of the rows of all experts: [r, o] and [r, i]."""
    flops = 2.0 * arguments["grad"].numel() * arguments["x"].shape[1]
    return Cost(kind="product", flops=flops, work=flops)


def _states_between_chunks(arguments: Arguments) -> Cost:
    """M S of each chunk: M [h, c, k, k], or its diagonal [h, c, k, 1], and S [h, k, v]."""
    flops = 2.0 * arguments["makes"].numel() * arguments["passes"].shape[-1]
    return Cost(kind="product", flops=flops, work=flops)


def _fused_attention(arguments: Arguments, *, backward: bool) -> Cost:
    """torch's fused attention: with a mask it computes hidden pairs too."""
    view = Visibility(causal=bool(arguments.get("is_causal")))
    return _attention(arguments, view, offset=0, backward=backward)


def _block_attention(arguments: Arguments, *, backward: bool) -> Cost:
    """Attention in blocks, without what causality and the window hide. On fake tensors all is one document."""
    view = Visibility(causal=arguments["causal"], window=arguments["window"])
    return _attention(arguments, view, offset=arguments["offset"], backward=backward)


def _attention(arguments: Arguments, view: Visibility, *, offset: int, backward: bool) -> Cost:
    """Two products forward; backward four, and one that repeats the scores."""
    b, n, s, d = arguments["query"].shape
    length = arguments["key"].shape[-2]
    pairs = view.pairs(range(offset, offset + s), length)
    # By convention a window restricts the keys of each query, and causality does not.
    flops = 4.0 * b * n * d * s * min(length, view.window or length)
    work = 4.0 * b * n * d * pairs
    if backward:
        return Cost(kind="attention", flops=2.0 * flops, work=2.5 * work, name="attention_backward")
    return Cost(kind="attention", flops=flops, work=work, name="attention")


_FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"  # what fake tensors on the CPU choose
COSTS: Mapping[str, Callable[[Arguments], Cost]] = {
    "aten::mm": _product("self", "mat2"),
    "aten::bmm": _product("self", "mat2"),
    "aten::_scaled_mm": _product("self", "mat2"),
    "aten::_scaled_mm_v2": _product("self", "mat2"),
    "aten::addmm": _product("mat1", "mat2"),
    "aten::addmm_": _product("mat1", "mat2"),
    "aten::baddbmm": _product("batch1", "batch2"),
    "aten::baddbmm_": _product("batch1", "batch2"),
    _FUSED: lambda arguments: _fused_attention(arguments, backward=False),
    f"{_FUSED}_backward": lambda arguments: _fused_attention(arguments, backward=True),
    "megacore::block_attention": lambda arguments: _block_attention(arguments, backward=False),
    "megacore::block_attention_backward": lambda arguments: _block_attention(arguments, backward=True),
    "megacore::grouped_products": _grouped_products,
    "megacore::add_grouped_weight_gradients_": _grouped_weight_gradients,
    "megacore::grouped_weight_gradients": _grouped_weight_gradients,
    "megacore::states_between_chunks": _states_between_chunks,
}
# Operators of megacore that compute less than a device does in the time of the bytes that they move.
MEMORY_ONLY = frozenset({
    "adamw_", "bias_gelu_backward", "combine_rows", "cross_entropy_gradient_", "cross_entropy_losses",
    "cross_entropy_merged", "cross_entropy_statistics", "dropout_add", "dropout_backward", "gather_rows",
    "gelu_backward", "gelu_forward", "join_rotary", "kept", "norm_backward", "norm_forward", "rotary",
    "softmax_backward", "softmax_forward", "split_rotary", "spread_rows", "swiglu_backward", "swiglu_forward",
    "swiglu_of_halves", "swiglu_of_halves_backward",
})  # fmt: skip
