"""Rotary positions (Su et al. 2021, arXiv 2104.09864): which angle each position turns each pair of dimensions by.

One object serves all layers of a model that share its frequencies, and keeps the tables of the longest sequence so far.
Longer contexts than a model was trained on stretch the frequencies: all alike (linear; Chen et al. 2023, arXiv
2306.15595), by the length of the sequence (dynamic NTK; Peng et al. 2023, arXiv 2309.00071, appendix B.1), or the low
ones only (llama3; Llama team 2024, arXiv 2407.21783; and yarn, Peng et al., section 3.2), or each by a number that was
searched for (longrope; Ding et al. 2024, arXiv 2402.13753). yarn and longrope also make queries and keys longer,
because scores over more positions are flatter (Peng et al., section 3.4).

Shape legend: b micro-batch, s positions, n heads, d head size, r rotated dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megacore import ops
from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, LINEAR, MAMBA, WINDOW, WITHOUT_POSITIONS
from megacore.config.rope_factors import parse_factors
from megacore.parallel.context import WHOLE, SequenceShards


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies are stretched."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]  # by which rule
    factor: float  # how many times longer the context becomes
    original: int = 0  # context in tokens before; not used by linear
    low: float = 1.0  # llama3 and yarn stretch frequencies that turn fewer times than this over the original context,
    high: float = 4.0  # and leave those that turn more often than this; between the two they change over smoothly
    whole_pairs: bool = True  # yarn rounds these bounds to whole pairs of dimensions
    length: float = 1.0  # yarn and longrope multiply rotated queries and keys by this
    # Longrope divides the frequencies by these in sequences of at most `original` tokens,
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()  # and by these in longer ones; [r/2] each

    @classmethod
    def of(cls, config: ResolvedModel) -> RopeScaling | None:
        """None: the configuration asks for none."""
        if config.rope_scaling == "none":
            return None
        is_yarn = config.rope_scaling == "yarn"
        return cls(
            kind=config.rope_scaling,
            factor=config.rope_scaling_factor,
            original=config.rope_original_max_positions or 0,
            low=config.rope_beta_slow if is_yarn else config.rope_low_freq_factor,
            high=config.rope_beta_fast if is_yarn else config.rope_high_freq_factor,
            whole_pairs=config.rope_truncate,
            length=_length(config),
            short=parse_factors(config.rope_short_factors) if config.rope_short_factors else (),
            long=parse_factors(config.rope_long_factors) if config.rope_long_factors else (),
        )


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much longer vectors become for a context that is `factor` times longer (arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0


def _length(config: ResolvedModel) -> float:
    """What rotated queries and keys are multiplied by."""
    if config.rope_scaling not in ("yarn", "longrope"):
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    if config.rope_scaling == "longrope":
        assert config.rope_original_max_positions is not None, "the configuration requires it"
        return math.sqrt(1.0 + math.log(config.rope_scaling_factor) / math.log(config.rope_original_max_positions))
    factor, ours, all_dimensions = config.rope_scaling_factor, config.rope_mscale, config.rope_mscale_all_dim
    if ours is None or all_dimensions is None:
        return yarn_scale(factor)
    return yarn_scale(factor, ours) / yarn_scale(factor, all_dimensions)


class Rotary:
    """Rotates queries and keys by their positions. `dimensions`: r, even; of each head, from its first. `scaling`: how
    they are stretched; None: not at all. `sequence`: which positions queries and keys are given of."""

    def __init__(
        self,
        dimensions: int,
        *,
        base: float = 10_000.0,
        scaling: RopeScaling | None = None,
        sequence: SequenceShards = WHOLE,
    ) -> None:
        assert dimensions > 0 and dimensions % 2 == 0, "dimensions are rotated in pairs"
        self.dimensions, self.base, self.scaling, self.sequence = dimensions, base, scaling, sequence
        self._length, self._tables = 0, (torch.empty(0), torch.empty(0))
        self._here = self._tables  # of the positions that this rank holds

    @classmethod
    def of(cls, config: ResolvedModel, sequence: SequenceShards = WHOLE) -> Rotary | None:
        """The one that a configuration asks for, if any. `sequence`: which positions this rank holds."""
        if config.position_embedding_type != "rope":
            return None
        scaling = RopeScaling.of(config)
        return cls(config.rotary_dimensions, base=config.rotary_base, scaling=scaling, sequence=sequence)

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn both by their positions. `query`: [b, s, n, d]. `key`: [b, s, g, d]. `positions`: [b, s] int64, of whole
        sequences, below s or the length of the longest `tables`. None: 0 to s - 1. Returns like both, contiguous."""
        cos, sin = self._angles(query, positions)
        if positions is None:
            return ops.rotary(query.contiguous(), cos, sin), ops.rotary(key.contiguous(), cos, sin)
        rows = (x.contiguous().view(1, -1, *x.shape[2:]) for x in (query, key))
        turned = (ops.rotary(x, cos, sin).view(like.shape) for x, like in zip(rows, (query, key), strict=True))
        return next(turned), next(turned)

    def split(self, packed: Tensor, *, groups: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned by their positions, and values out of one projection. `packed`: [b, s, groups * (q +
        2), d] contiguous: of each group its q queries, its key, its value. `groups`: the number of keys and of values.
        `positions`: as for `rotate`. Returns [b, s, groups * q, d] and twice [b, s, groups, d], contiguous."""
        cos, sin = self._angles(packed, positions)
        if positions is None:
            return ops.split_rotary(packed, cos, sin, groups=groups)
        b, s = packed.shape[:2]
        parts = ops.split_rotary(packed.view(1, b * s, *packed.shape[2:]), cos, sin, groups=groups)
        query, key, value = (part.view(b, s, *part.shape[2:]) for part in parts)
        return query, key, value

    def _angles(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles of x's positions, [s, r/2], or [b s, r/2] of given ones."""
        cos, sin = self.tables(self.sequence.whole_length(x.shape[1]), x.device)
        if positions is None:
            return (cos, sin) if self.sequence.group.size == 1 else self._here
        rows = self.sequence.take(positions, 1).flatten()
        cos, sin = self._tables
        return cos[rows], sin[rows]

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position's angles, times the length of `RopeScaling`, [s, r/2] fp32 each."""
        by_length = self.scaling is not None and self.scaling.kind in ("dynamic", "longrope")
        exact = self.sequence.group.size > 1 or by_length
        if length > self._length or (exact and length != self._length) or self._tables[0].device != device:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies(length)).to(device)
            self._length, self._tables = length, (angles.cos(), angles.sin())
            if self.scaling is not None and self.scaling.length != 1.0:
                self._tables = self._tables[0] * self.scaling.length, self._tables[1] * self.scaling.length
            if self.sequence.group.size > 1:
                self._here = self.sequence.take(self._tables[0], 0), self.sequence.take(self._tables[1], 0)
        if length == self._length:
            return self._tables
        cos, sin = self._tables
        return cos[:length], sin[:length]

    @property
    def made(self) -> tuple[Tensor, ...]:
        return (*self._tables, *self._here)

    def frequencies(self, length: int) -> Tensor:
        """Radians a position of each pair, [r/2] fp32. `length`: of the sequence; for dynamic scaling and longrope."""
        scaling, base, r = self.scaling, self.base, self.dimensions
        if scaling is not None and scaling.kind == "dynamic" and length > scaling.original:
            stretch = scaling.factor * length / scaling.original - (scaling.factor - 1.0)
            base *= stretch ** (r / (r - 2)) if r > 2 else 1.0
        powers = base ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
        if scaling is not None and scaling.kind == "longrope":
            factors = scaling.long if length > scaling.original else scaling.short
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
        frequencies = 1.0 / powers
        if scaling is None or scaling.kind == "dynamic":
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "yarn":
            kept = 1.0 - _yarn_ramp(scaling, base, r)
            return (frequencies / scaling.factor) * (1.0 - kept) + frequencies * kept
        turns = scaling.original * frequencies / (2.0 * math.pi)  # over the original context
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn_ramp(scaling: RopeScaling, base: float, r: int) -> Tensor:
    """How far each pair of dimensions is stretched, [r/2]: 0 not at all, 1 fully, and between the bounds linearly by
    the number of the pair (arXiv 2309.00071, section 3.2)."""

    def pair_with(turns: float) -> float:
        """The pair, as a fraction, that turns so often over the original context."""
        return r * math.log(scaling.original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    first, last = pair_with(scaling.high), pair_with(scaling.low)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, r - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(r // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)


def rotaries_of(config: ResolvedModel, sequence: SequenceShards = WHOLE) -> Mapping[str, Rotary | None]:
    """What turns the queries and keys of each kind of block, by its letter in --layer-pattern."""
    usual = Rotary.of(config, sequence)
    local = usual
    if usual is not None and config.window_rotary_base is not None and config.layer_pattern is not None:
        local = Rotary(usual.dimensions, base=config.window_rotary_base, sequence=sequence)
    return {WINDOW: local, FULL: usual, WITHOUT_POSITIONS: None, LINEAR: None, MAMBA: None}
