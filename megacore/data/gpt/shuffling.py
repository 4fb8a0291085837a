"""Random orders that depend only on (seed, epoch), so that more epochs change none of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Number of epochs with a generator each. The later ones, possibly millions for a small dataset, are drawn together,
# one after the other from one generator, because making a generator takes as long as shuffling a thousand numbers.
EPOCHS_DRAWN_SEPARATELY = 1024
_ORDER = 0  # this use of an epoch's random numbers


def generator(*key: int) -> np.random.Generator:
    """The generator of a key; every key has a different one."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def shuffled_epochs(count: int, epochs: int, seed: int) -> NDArray[np.int64]:
    """int64 [epochs * count]: the numbers below `count` in a random order for every epoch."""
    separate = min(epochs, EPOCHS_DRAWN_SEPARATELY)
    order = np.tile(np.arange(count), (epochs, 1))
    for epoch in range(separate):
        order[epoch] = generator(seed, epoch, _ORDER).permutation(count)
    together = order[separate:]
    generator(seed, EPOCHS_DRAWN_SEPARATELY, _ORDER).permuted(together, axis=1, out=together)
    return order.reshape(-1)
