"""The largest size that fits into a memory, in few tries: a micro batch on a device, or a model on a rank."""

from __future__ import annotations

import math
from collections.abc import Callable

# What the line through two peaks may fill: the allocator needs room for pieces that do not fit together.
_FILL = 0.94
_MOST_TRIES = 7
# A size is large enough if the smallest one that failed is not more than this much larger.
_CLOSE = 1.125


def largest_fitting(
    peak_bytes: Callable[[int], int | None], *, memory: int | None, at_most: int, exact: bool = False
) -> int:
    """The largest size that was seen to fit.

    Peak memory is close to a line in the size: sizes 1 and 2 give the line, and the line a guess. From there the gap
    between the largest that fits and the smallest that does not is halved, or the line through both is followed.

    Args:
        peak_bytes: tries a size and returns the most memory in use, or None if it did not fit.
        memory: that a size may take; None where that is unknown: sizes then double until one fails.
        at_most: the largest to try.
        exact: the next larger one is tried too, and `memory` may be full.

    Returns:
        The size; 0 if not even 1 fits.
    """
    peaks: dict[int, int] = {}
    fits, too_large, size = 0, at_most + 1, 1
    for _ in range(_MOST_TRIES):
        peak = peak_bytes(size)
        if peak is not None:
            peaks[size] = peak
        if peak is None or (memory is not None and peak > memory):
            too_large = size
        fits = max((tried for tried in peaks if tried < too_large), default=0)
        if fits + 1 >= too_large or (not exact and len(peaks) > 2 and fits * _CLOSE >= too_large):
            break
        known = sorted(tried for tried in peaks if tried <= too_large)[-2:]  # with the smallest that is too large
        if memory is None or len(known) < 2 or (too_large <= at_most and too_large not in peaks):
            size = (fits + too_large) // 2 if too_large <= at_most else min(2 * fits, at_most)
        else:
            small, large = known
            slope = max(1.0, (peaks[large] - peaks[small]) / (large - small))
            guess = large + math.floor(((1.0 if exact else _FILL) * memory - peaks[large]) / slope)
            size = min(max(guess, fits + exact), too_large - 1)
        if size in peaks:
            break
    return fits
