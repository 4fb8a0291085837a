"""The largest micro batch that fits into a device's memory, in few tries."""

from __future__ import annotations

from collections.abc import Callable

# What the line through two peaks may fill: the allocator needs room for pieces that do not fit together.
_FILL = 0.94
_MOST_TRIES = 7
# A micro batch is large enough if the smallest one that failed is not more than this much larger.
_CLOSE = 1.125


def largest_fitting(peak_bytes: Callable[[int], int | None], *, memory: int | None, at_most: int) -> int:
    """The largest micro batch that was seen to fit.

    Peak memory is close to a line in the micro batch: sizes 1 and 2 give the line, and the line a guess. From there
    the gap between the largest that fits and the smallest that does not is halved.

    Args:
        peak_bytes: trains with a micro batch and returns the most memory in use, or None if it did not fit.
        memory: of the device; None where that is unknown: sizes then double until one fails.
        at_most: the largest to try.

    Returns:
        The micro batch; 0 if not even one sample fits.
    """
    peaks: dict[int, int] = {}
    too_large = at_most + 1
    size = 1
    for _ in range(_MOST_TRIES):
        peak = peak_bytes(size)
        if peak is None:
            too_large = size
        else:
            peaks[size] = peak
        fits = max(peaks, default=0)
        if fits == 0 and too_large == 1:
            return 0
        if fits + 1 >= too_large or (len(peaks) > 2 and fits * _CLOSE >= too_large):
            break
        size = _next(peaks, too_large, memory, bounded=too_large <= at_most)
        if size in peaks:
            break
    return max(peaks, default=0)


def _next(peaks: dict[int, int], too_large: int, memory: int | None, *, bounded: bool) -> int:
    """The size to try: between the largest that fits and the smallest that does not."""
    fits = max(peaks, default=0)
    if bounded:
        return (fits + too_large) // 2
    if memory is None or len(peaks) < 2:
        return min(2 * fits, too_large - 1)
    (small, low), (large, high) = sorted(peaks.items())[-2:]
    slope = max(1.0, (high - low) / (large - small))
    guess = large + int((_FILL * memory - high) / slope)
    return min(max(guess, large), too_large - 1)
