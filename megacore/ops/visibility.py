"""Which keys a query sees: causality, a window, documents packed into one sequence. Positions are numbers in the whole
sequence, whatever part of it the queries and keys at hand are. A block of queries asks for the keys that it may see,
and then for the mask between the two, which is none where nothing is hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Who sees whom."""

    causal: bool  # no position sees a later one
    # With causal, a position sees only its last `window` positions, itself included; otherwise those at most window //
    # 2 away on either side (as ModernBERT counts, arXiv 2412.13663).
    window: int | None = None
    # [b, s] of the whole sequence: a position sees only its document. 0 is padding, whose results mean nothing: it sees
    # itself and may see other padding, so that every query sees some key.
    documents: Tensor | None = None
    padded: bool = True  # whether a document number may be 0, so that results have to be set to 0 there

    def of(self, documents: Tensor | None) -> Visibility:
        """The same of these documents."""
        if documents is None:
            return self
        return Visibility(causal=self.causal, window=self.window, documents=documents, padded=self.padded)

    @property
    def reach(self) -> int | None:
        """The distance from which a key is not seen; None: there is none."""
        return self.window if self.causal or self.window is None else self.window // 2 + 1

    def restricts(self, length: int) -> bool:
        """Whether anything but causality hides keys of a sequence of this length."""
        return self.documents is not None or (self.reach is not None and self.reach < length)

    def keys(self, queries: range, length: int) -> range:
        """The keys that a block of queries may see: it sees none outside, and each query sees itself if it is there.
        Documents narrow the range on the CPU only: on a device the host would have to wait for their numbers."""
        reach = length if self.reach is None else self.reach
        first = 0 if self.reach is None else max(queries.start - reach + 1, 0)
        last = min(queries.stop if self.causal else queries.stop + reach - 1, length)
        if self.documents is None or self.documents.device.type != "cpu":
            return range(first, last)
        ours, theirs = self.documents[:, queries.start : queries.stop], self.documents[:, first:last]
        info = torch.iinfo(theirs.dtype)
        lowest = ours.masked_fill(ours == 0, info.max).amin(1, keepdim=True)
        highest = ours.masked_fill(ours == 0, info.min).amax(1, keepdim=True)
        shared = ((theirs >= lowest) & (theirs <= highest) & (theirs != 0)).any(0).nonzero()
        themselves = range(min(queries.start, length), min(queries.stop, length))
        if not len(shared):  # only padding, or none of these keys
            return themselves
        begin, end = first + int(shared[0]), first + int(shared[-1]) + 1
        return range(min(begin, themselves.start), max(end, themselves.stop)) if themselves else range(begin, end)

    def pairs(self, queries: range, length: int) -> int:
        """How many pairs of a query and a key that it sees there are in one sequence; documents are not looked at."""
        reach = length if self.reach is None else min(self.reach, length)
        # A query sees the keys from `position - reach + 1`: those before the sequence are taken off.
        before = len(queries) * reach - _missing(queries.start, queries.stop, reach)
        if self.causal:
            return before
        after = len(queries) * reach - _missing(length - queries.stop, length - queries.start, reach)
        return before + after - len(queries)  # each query counts itself on both sides

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """What queries see of keys, [1 or b, 1, queries, keys] bool, padding also padding; None: each query sees each
        key."""
        seen = self._near(queries, keys, device)
        if self.documents is None:
            return seen
        ours = self.documents[:, None, queries.start : queries.stop, None]
        same = ours == self.documents[:, None, None, keys.start : keys.stop]
        return same if seen is None else seen & same

    def _near(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        """[1, 1, queries, keys]: which keys are nearer than `reach` and, if causal, not later."""
        furthest = max(queries.stop - 1 - keys.start, keys.stop - 1 - queries.start)
        if not (self.causal and keys.stop - 1 > queries.start) and (self.reach is None or furthest < self.reach):
            return None
        distance = distances(queries, keys, device)
        seen = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.reach is not None:
            seen &= distance.abs() < self.reach
        return seen.view(1, 1, len(queries), len(keys))


def _missing(start: int, stop: int, reach: int) -> int:
    """The sum of max(reach - 1 - distance, 0) over distances from start to stop: how many keys of a full reach lie
    beyond the end of the sequence that these queries are away from."""
    first, last = reach - 1 - start, reach - stop  # of a falling sequence of whole numbers
    last = max(last, 1)
    return (first + last) * (first - last + 1) // 2 if first >= last else 0


def distances(queries: range, keys: range, device: torch.device) -> Tensor:
    """[queries, keys] int64: how many positions before the query the key is."""
    return positions(queries, device)[:, None] - positions(keys, device)


def positions(of: range, device: torch.device) -> Tensor:
    """[of] int64"""
    return torch.arange(of.start, of.stop, device=device)
