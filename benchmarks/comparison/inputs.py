"""What all sides start from: initial weights by megacore's names, and tokens. Written once as files; numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comparison.job import Sizes

SAMPLES = 1024  # a run that needs more begins again
_CYCLE = 64
_NOISE = 0.1


def write_inputs(sizes: Sizes, directory: Path) -> tuple[str, str]:
    """Files of token ids and of initial weights for a model of these sizes."""
    tokens, weights = str(directory / "tokens.npy"), str(directory / "weights.npz")
    rng = np.random.default_rng(1)
    np.save(tokens, _tokens(sizes, rng))
    values: dict[str, Any] = dict(_weights(sizes, rng))
    np.savez(weights, **values)
    return tokens, weights


def _tokens(sizes: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    """int64 [samples, s + 1]: nine times of ten the next token is the following one of a cycle of 64."""
    shape = (SAMPLES, sizes.seq + 1)
    steps = np.where(rng.random(shape) < _NOISE, rng.integers(_CYCLE, size=shape), 1)
    cycle = rng.permutation(sizes.vocab)[:_CYCLE]
    return cycle[np.cumsum(steps, axis=1) % len(cycle)].astype(np.int64)


def _weights(sizes: Sizes, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float32]]]:
    h = sizes.hidden

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (0.02 * scale * rng.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", np.ones(h, np.float32)
        yield f"{name}.bias", np.zeros(h, np.float32)

    def linear(name: str, rows: int, columns: int, scale: float) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", normal(rows, columns, scale=scale)
        yield f"{name}.bias", normal(rows)

    yield "embedding.tokens.weight", normal(sizes.vocab, h)
    yield "embedding.positions", normal(sizes.seq, h)
    residual = 1 / math.sqrt(2 * sizes.layers)
    for block in (f"blocks.{number}" for number in range(sizes.layers)):
        yield from norm(f"{block}.attention_norm")
        yield from linear(f"{block}.attention.qkv", 3 * h, h, 1.0)  # rows by head: query, key, value
        yield from linear(f"{block}.attention.output", h, h, residual)
        yield from norm(f"{block}.mlp_norm")
        yield from linear(f"{block}.mlp.up", 4 * h, h, 1.0)
        yield from linear(f"{block}.mlp.down", h, 4 * h, residual)
    yield from norm("head.norm")
    yield "head.weight", normal(sizes.vocab, h)
