"""Which of the packages that a tree may lack it has."""

from __future__ import annotations

from importlib.util import find_spec


def has_ring(name: str) -> bool:
    """Whether `megacore.NAME` is there. A folder without sources, such as one of compiled files that a deletion left,
    does not count."""
    spec = find_spec(f"megacore.{name}")
    return spec is not None and spec.origin is not None
