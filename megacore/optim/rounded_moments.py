"""Adam's moments in bf16, rounded stochastically: up or down at random, so that the expected value is the exact one
(Gupta et al. 2015, arXiv 1502.02551, section 3).

Rounding to nearest loses every change below half a unit in the last place, 0.2 to 0.4% of the value: with beta2 = 0.999
the square would hardly move. The random bits of an element are a hash of the run's seed, the parameter's name, the
number of the update and the element's position in the whole parameter (SplitMix64: Steele et al. 2014).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megacore.config.optimizers import StateKind
from megacore.optim.moments import KeptMoments, Moments, Part, global_indices, local_shape
from megacore.parallel.random import stable_hash
from megacore.zero.local_segments import LocalRun, LocalSegment

_STEP_FACTOR = 0xD1B54A32D192ED03 - (1 << 64)
_INDEX_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LOW = 0xFFFF


class RoundedMoments(KeptMoments):
    """Moments as bf16 tensors, [n] for each run, in the optimizer's state under the names of their kinds. `kinds`: of
    the mean and of the square, in bf16. `state`: of the optimizer, where the tensors are kept."""

    def __init__(
        self,
        segments: Sequence[LocalSegment],
        kinds: tuple[StateKind, ...],
        state: Mapping[LocalRun, dict[str, Tensor]],
        *,
        seed: int,
    ) -> None:
        super().__init__(segments, kinds, state)
        self._keys = {local.spec.name: stable_hash(seed, "moments", local.spec.name) for local in segments}
        self._shapes = {local.spec.name: local_shape(local) for local in segments}

    def read(self, part: Part) -> Moments:
        return Moments(*(self._kept(part, kind).float() for kind in self.kinds))

    def write(self, part: Part, moments: Moments, step: Tensor) -> None:
        local, first = part.local, part.local.segment.start
        start, stop = first + part.in_segment.start, first + part.in_segment.stop
        index = global_indices(local.spec, self._shapes[local.spec.name], start, stop, moments.mean.device)
        bits = random_bits(index, self._keys[local.spec.name], step)
        for kind, values in zip(self.kinds, moments, strict=True):
            self._kept(part, kind).copy_(rounded(values, bits))
            bits >>= 16  # `rounded` takes the lowest 16 bits, others for each moment

    def values(self, local: LocalSegment, column: int) -> Tensor | None:
        return local.state(self, self.kinds[column].name)

    def set_values(self, local: LocalSegment, column: int, values: Tensor) -> None:
        self._tensor(local.run, self.kinds[column])
        kept = local.state(self, self.kinds[column].name)
        assert kept is not None
        kept.copy_(values)

    def settle(self) -> None:
        """Nothing: rounding needs no other rank."""

    def _kept(self, part: Part, kind: StateKind) -> Tensor:
        """The bf16 tensor of a part."""
        return self._tensor(part.local.run, kind)[part.in_run]

    def _tensor(self, run: LocalRun, kind: StateKind) -> Tensor:
        if kind.name not in self.state[run]:
            self.state[run][kind.name] = torch.zeros_like(run.master, dtype=torch.bfloat16)
        return self.state[run][kind.name]


def random_bits(index: Tensor, key: int, step: Tensor) -> Tensor:
    """64 random bits of each element, [n] int64. `index`: [n] int64, positions in the whole parameter; overwritten.
    `key`: 64 bits, of the parameter. `step`: number of the update, a scalar."""
    signed = key - (1 << 64) if key >> 63 else key
    bits = index.mul_(_INDEX_FACTOR).add_(step.to(torch.int64) * _STEP_FACTOR + signed)
    for shift, factor in _MIX:
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits *= factor
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Values rounded to bf16 at random: away from zero with the probability of the part that bf16 cannot hold, else
    towards zero. Those that bf16 holds exactly, and those that are not finite, stay. `values`: [n] fp32. `bits`: [n]
    int64, of which the last 16 are used. Returns [n] fp32, whose last 16 bits are zero where they are finite."""
    added = (bits & _LOW).to(torch.int32).add_(values.view(torch.int32)).bitwise_and_(~_LOW)
    return torch.where(values.isfinite(), added.view(torch.float32), values)
