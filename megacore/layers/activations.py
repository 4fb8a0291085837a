"""The functions of the activations, by the value of --activation (megacore/config/activations.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megacore import ops
from megacore.config.activations import ACTIVATIONS, ActivationKind

ACTIVATION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": ops.gelu,
    "gelu-exact": partial(ops.gelu, exact=True),
    "relu": torch.relu,
    "relu2": ops.squared_relu,
    "swiglu": ops.swiglu,
    "clamped-swiglu": ops.clamped_swiglu,
    "geglu": ops.geglu,
    "geglu-exact": partial(ops.geglu, exact=True),
}


def register_activation(name: str, function: Callable[..., Tensor], *, kept: int, gated: bool = False) -> None:
    """Make an activation of one's own a value of --activation, before flags are read. Raises ValueError where the name
    is that of another activation.

    Args:
        name: of the activation.
        function: [.., f] -> [.., f], of each element by itself; of a gated one (gate, value) -> [.., f].
        kept: tensors of the size of its output that the layer keeps for backward: the output, and what the function
            saves. `F.silu` saves its input: 2.
        gated: the function takes a gate and a value.
    """
    kind = ActivationKind(kept=kept, gated=gated)
    if name in ACTIVATIONS and (ACTIVATIONS[name], ACTIVATION_FUNCTIONS.get(name)) != (kind, function):
        raise ValueError(f"register_activation: the name {name!r} is taken: use another one")
    ACTIVATIONS[name], ACTIVATION_FUNCTIONS[name] = kind, function
