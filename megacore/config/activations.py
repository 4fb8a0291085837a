"""The activations of feed-forward layers, by the value of --activation: what flags and the memory plan know of each.
megacore/layers/activations.py has the functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ActivationKind:
    """One activation."""

    # Tensors [b, s, f] that a feed-forward layer keeps for it: the input of its last matrix, and what the activation's
    # backward needs.
    kept: int
    gated: bool = False  # it takes a gate and a value, of two matrices


ACTIVATIONS: dict[str, ActivationKind] = {
    "gelu": ActivationKind(kept=2),
    "gelu-exact": ActivationKind(kept=2),
    "relu": ActivationKind(kept=1),
    "relu2": ActivationKind(kept=2),
    "swiglu": ActivationKind(kept=3, gated=True),
    "clamped-swiglu": ActivationKind(kept=3, gated=True),
    "geglu": ActivationKind(kept=3, gated=True),
    "geglu-exact": ActivationKind(kept=3, gated=True),
}
BUILT_IN = frozenset(ACTIVATIONS)
"""Those that no program has registered."""
