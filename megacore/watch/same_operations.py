"""Finds operations in which ranks took part with different sizes: gloo takes a message that is shorter than its
receiver expects, and leaves the rest of the tensor as it was. The ranks compare, in every step, a digest of all
operations on each channel, which travels with the sums of the step. Only where digests differ are the operations
exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacore.config.messages import ranks_in_words
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.heartbeat import Channel
from megacore.parallel.mesh import Mesh
from megacore.watch.ledger import this_ledger

Operations = Mapping[Channel, Sequence[tuple[int, str, int]]]  # number, kind and bytes


def different_operations(step: int, mesh: Mesh) -> str:
    """What differs, and on which rank; all ranks call this together. `step`: in which it was noticed."""
    ledger = this_ledger()
    assert ledger is not None, "every rank has voted"
    everyone = all_gather_objects((ledger.recent_operations(), ledger.had_deviated), mesh.world)
    deviating = [rank for rank, (_, deviates) in enumerate(everyone) if deviates]
    remembered = [operations for operations, _ in everyone if operations is not None]
    difference = first_difference(remembered) if len(remembered) == len(everyone) else None
    what = "one of more operations than are remembered" if difference is None else difference.in_words()
    culprits, why = ([], "") if difference is None else odd_ones(difference.posted, deviating)
    named = ", ".join(f"rank {rank} ({mesh.describe(rank)})" for rank in culprits)
    return (
        f"ranks communicate with different sizes in step {step}: {what}; "
        + (f"{named} {why}" if named else "which rank is wrong is undetermined")
        + ". The weights may be wrong since then: --load auto continues from the last checkpoint"
    )


@dataclass(frozen=True)
class Difference:
    """An operation that the members of a channel posted differently."""

    channel: Channel
    number: int  # of the operation on the channel
    posted: Mapping[int, str]  # by rank what it posted, in words

    def in_words(self) -> str:
        """`message 12 from rank 0 to rank 1: rank 0: 96 bytes; rank 1: 32 bytes`."""
        by_words: dict[str, list[int]] = {}
        for rank, words in self.posted.items():
            by_words.setdefault(words, []).append(rank)
        ranks = self.channel.ranks
        between = (
            f"from rank {ranks[0]} to rank {ranks[1]}" if self.channel.is_message else f"of {ranks_in_words(ranks)}"
        )
        sizes = ", ".join(f"{ranks_in_words(ranks)}: {words}" for words, ranks in by_words.items())
        return f"operation {self.number} {between} ({sizes})"


def first_difference(everyone: Sequence[Operations]) -> Difference | None:
    """The first operation of a channel that its members posted differently. `everyone`: the operations of every rank,
    by rank, since the ranks last agreed on them."""
    for channel in {channel: None for operations in everyone for channel in operations}:
        posted = {
            rank: {number: f"{kind} of {size:,} bytes" for number, kind, size in everyone[rank].get(channel, ())}
            for rank in channel.ranks
        }
        known = max(min(numbers) for numbers in posted.values() if numbers)  # before it a rank has forgotten
        for number in sorted({number for numbers in posted.values() for number in numbers if number >= known}):
            words = {rank: numbers.get(number, "none") for rank, numbers in posted.items()}
            if len(set(words.values())) > 1:
                return Difference(channel, number, words)
    return None


def odd_ones(posted: Mapping[int, str], deviating: Sequence[int]) -> tuple[list[int], str]:
    """The ranks that are wrong, and how that is known; no rank where it is not. `posted`: what each member posted.
    `deviating`: ranks that have left their usual order of operations."""
    odd = [rank for rank in deviating if rank in posted]
    if 0 < 2 * len(odd) <= len(posted):
        return odd, "left what it does in every step, the others did not"
    (most, count), *_ = Counter(posted.values()).most_common(1)
    odd = [rank for rank, words in posted.items() if words != most]
    return (odd, "differs from the others") if 2 * count > len(posted) else ([], "")
