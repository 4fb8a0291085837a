"""Randomness that does not depend on the layout: everything random is a function of names and indices, not of a
rank's history.

- Initial values: a pure function of (seed, global name, global shape), drawn block by block with a counter-based
  generator (Philox; Salmon et al. 2011), so that a rank draws no more memory than its slice and one block.
- Dropout: the mask of a site is a pure function of (seed, site name, global microbatch index, shard). Two pipelines,
  two data layouts or a recomputation therefore see the same mask, and no generator state is ever saved or restored.
- Noise of a position is a pure function of (seed, site name, global sample number, position): also of no shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megacore import ops
from megacore.ops.dispatch import custom_op
from megacore.ops.dropout import philox
from megacore.parallel.sharding import ShardSpec

_BLOCK_ELEMENTS = 1 << 20


def stable_hash(*parts: str | int) -> int:
    """64 bits that depend only on the parts, the same in every process and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def normal_slice(spec: ShardSpec, *, seed: int, std: float, out: Tensor | None = None) -> Tensor:
    """This rank's slice of a normally distributed global tensor, bit-identical for every way of slicing it. `spec`: a
    tensor's name, shape and slice; one or more dimensions. `std`: standard deviation; the mean is 0. `out`: fp32 of the
    slice's shape, on any device: is filled block by block; None: a new tensor on the CPU. Returns `out`, or the new
    tensor."""

    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)

    return _drawn(spec, seed, draw, out)


def uniform_slice(spec: ShardSpec, *, seed: int, bound: float, out: Tensor) -> Tensor:
    """The same of a tensor whose numbers are evenly distributed in [-bound, bound)."""

    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return (generator.random(shape, dtype=np.float32) * 2 - 1) * np.float32(bound)

    return _drawn(spec, seed, draw, out)


def _drawn(
    spec: ShardSpec,
    seed: int,
    draw: Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float32]],
    out: Tensor | None,
) -> Tensor:
    rows, *inner = spec.shape
    (first, last), *rest = spec.slices
    result = torch.empty(spec.local_shape) if out is None else out
    height = max(1, _BLOCK_ELEMENTS // math.prod(inner))
    for top in range(first - first % height, last, height):
        bottom = min(top + height, rows)
        generator = np.random.Generator(np.random.Philox(key=stable_hash(seed, spec.name, top)))
        block = draw(generator, (bottom - top, *inner))
        begin, end = max(top, first), min(bottom, last)
        values = block[(slice(begin - top, end - top), *(slice(*bounds) for bounds in rest))]
        result[begin - first : end - first] = torch.from_numpy(values)
    return result


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Let operators that take no generator draw from a separate stream. Torch's default generators, of the CPU and of
    the device, start from `seed` inside; afterwards they are as they were before. `seed`: 64 bits. `device`: whose
    generator is seeded besides the CPU's."""
    owners: list[Any] = [torch.random]
    if device is not None and device.type != "cpu":
        owners.append(torch.get_device_module(device))
    states: list[Tensor] = [owner.get_rng_state() for owner in owners]  # all before any seed: two may share a generator
    torch.default_generator.manual_seed(seed)
    for owner in owners[1:]:
        owner.manual_seed(seed)
    try:
        yield
    finally:
        for owner, state in zip(owners, states, strict=True):
            owner.set_rng_state(state)


class RandomStreams:
    """The source of dropout masks of one model replica."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self.device = seed, device
        self._generator = torch.Generator(device=device)
        # Global index of the microbatch that is being computed. Who computes one sets it first: the runtime before a
        # forward, recomputation before the second one.
        self.microbatch = 0
        # What layers have decided in the first pass of what is computed again, by layer, and must not decide anew in
        # the second; None: nothing is computed again.
        self.decided: dict[nn.Module, Any] | None = None

    def key(self, site: str, shard: int) -> int:
        """The seed of a site's mask, for operators that draw it themselves."""
        return stable_hash(self._seed, site, self.microbatch, shard)

    def seed(self, site: str, shard: int) -> int:
        return self.key(site, shard) & (2**63 - 1)

    def generator(self, site: str, shard: int) -> torch.Generator:
        """A generator at the start of the site's stream; valid until the next call."""
        self._generator.manual_seed(self.seed(site, shard))
        return self._generator

    def uniform(self, site: str, positions: Tensor, *, samples: int, width: int) -> Tensor:
        """Random numbers in [0, 1) of each position, the same bits whichever ranks hold which of them. `positions`: [s]
        int64, in the sequence. `width`: how many there are of each position. Returns [b, s, width] fp32."""
        columns = torch.arange(-(-width // 4), device=positions.device)
        numbers = torch.arange(samples, device=positions.device) + self.microbatch * samples  # in the run
        sample, position, column = numbers[:, None, None], positions[:, None], columns
        counter = column, position, sample & 0xFFFFFFFF, sample >> 32
        words = torch.stack(philox(stable_hash(self._seed, site), counter), dim=-1).flatten(-2)[..., :width]
        return (words >> 8).float().mul_(2.0**-24)


@custom_op("megacore::kept", mutates_args=())
def _kept(seed: Tensor, shape: Sequence[int], share: float, device: torch.device) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(int(seed))
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(share, generator=generator)


@_kept.register_fake
def _(seed: Tensor, shape: Sequence[int], share: float, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


class Dropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014) whose mask depends on names and indices only. `probability`: share of
    elements set to zero, in [0, 1). `site`: global name of the position in the model. `shard`: which slice of the
    activations this rank holds; 0 where all tensor-parallel ranks hold the same, which must then draw the same mask."""

    def __init__(self, probability: float, streams: RandomStreams, site: str, *, shard: int = 0) -> None:
        super().__init__()
        self.probability, self.streams, self.site, self.shard = probability, streams, site, shard
        self._scale = float(np.float32(1.0) / np.float32(1.0 - probability))
        self._seed = torch.zeros((), dtype=torch.int64)

    def prepare(self, x: Tensor) -> None:
        """Make the seed of the microbatch a tensor on the CPU, which compiled code reads."""
        if self.training and self.probability > 0.0:
            self._seed = torch.tensor(self.streams.seed(self.site, self.shard))

    @property
    def drops(self) -> bool:
        """Whether anything is set to zero now: not in evaluation, or with probability 0."""
        return self.training and self.probability > 0.0

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + dropout(x), of two tensors of one shape and dtype; on a device with kernels in one pass."""
        if not self.drops:
            return residual + x
        if ops.uses_triton(x) and not torch.compiler.is_compiling():
            seed = self.streams.seed(self.site, self.shard)
            return ops.dropout_add(x, residual, probability=self.probability, seed=seed)
        dropped: Tensor = self(x)
        return residual + dropped

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x; x itself in evaluation or with probability 0."""
        if not self.drops:
            return x
        if torch.compiler.is_compiling():
            mask: Tensor = _kept(self._seed, x.shape, 1.0 - self.probability, x.device)
        else:
            mask = self.mask(x)
        # The factor stays a Python number, which torch multiplies by in fp32: 1 / 0.9 in bf16 is 1.109, and every
        # activation would be 0.16% too small. The mask comes second, so that backward scales no dropped gradient.
        return (x * self._scale).mul_(mask)

    def mask(self, x: Tensor) -> Tensor:
        return self.drawn(x, self.shard)

    def drawn(self, like: Tensor, shard: int) -> Tensor:
        """The mask of a shard, a bool of the shape of `like`."""
        mask = torch.empty(like.shape, dtype=torch.bool, device=like.device)
        return mask.bernoulli_(1.0 - self.probability, generator=self.streams.generator(self.site, shard))
