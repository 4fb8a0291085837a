"""Generated tokens that a model can learn from: a noisy cycle through at most 64 tokens spread over the vocabulary;
with probability 0.9 the next one of the cycle follows. A unigram model's loss is ln 64 = 4.16; one token back gives
0.74."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_STATES = 64
_NOISE = 0.1


class MockDataset:
    """Samples that are a function of (seed, stream, index) only. The seed decides the cycle, the same for every
    stream."""

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        num_samples: int,
        seed: int,
        *,
        stream: int = 0,
        boundaries: bool = False,
        tells_padding: bool = False,
    ) -> None:
        self.seq_length, self._boundaries, self._tells_padding = seq_length, boundaries, tells_padding
        self._num_samples, self._seed, self._stream = num_samples, seed, stream
        self._cycle = cycle(vocab_size, seed)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, self._stream, index])))
        window = walk(self._cycle, self.seq_length + 1, rng)
        sample: dict[str, NDArray] = {
            "tokens": window[:-1],
            "labels": window[1:],
            "loss_mask": np.ones(self.seq_length, np.float32),
        }
        if self._tells_padding:
            sample["padding"] = np.zeros(self.seq_length, np.int64)
        return sample | random_documents(self.seq_length, rng) if self._boundaries else sample


def random_documents(length: int, rng: np.random.Generator) -> dict[str, NDArray]:
    """`documents` and `positions` int64 [length], as in `PackedMicrobatch`: about four documents."""
    begins = rng.random(length) < 3 / length
    begins[0] = True
    first = np.maximum.accumulate(np.where(begins, np.arange(length), 0))
    return {"documents": np.cumsum(begins), "positions": np.arange(length) - first}


def cycle(vocab_size: int, seed: int) -> NDArray[np.int64]:
    """At most 64 ids spread evenly from 0 to vocab_size - 1, in an order of the seed's."""
    states = min(vocab_size, _STATES)
    spread = np.arange(states) * (vocab_size - 1) // max(states - 1, 1)
    return np.random.Generator(np.random.PCG64(seed)).permutation(spread)


def walk(through: NDArray[np.int64], length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """int64 [length]: a noisy way through a cycle, from anywhere."""
    jumps = rng.random(length) < _NOISE
    jumps[:1] = True
    since = np.arange(length)
    last_jump = np.maximum.accumulate(np.where(jumps, since, 0))
    start = rng.integers(len(through), size=length)[last_jump]
    return through[(start + since - last_jump) % len(through)].astype(np.int64)
