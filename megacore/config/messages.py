"""The parts of a message that name the way out: valid values, nearest multiples, the name that was probably meant. All
messages are built of them and read alike: `--tp 3 must divide --num-attention-heads 16: use 1, 2, 4, 8 or 16`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

_MISSPELLED = 0.8  # names that are as similar differ by some letters only
_SIMILAR = 0.55  # names and words that are less similar are not taken for one another


def number(value: float) -> str:
    """A number as a user would type it."""
    return str(value) if isinstance(value, int) else f"{value:g}" if float(f"{value:g}") == value else repr(value)


def shortened(text: str, most: int = 60) -> str:
    """A text, or its first letters and three points."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_of(values: Sequence[object]) -> str:
    """`1, 2, 4 or 8`."""
    texts = [str(v) for v in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def at_most(most: int) -> str:
    """`19 or less`; `0`, below which nothing is accepted."""
    return f"{most} or less" if most else "0"


def divisors(n: int, *, near: int | None = None, most: int | None = 10) -> list[int]:
    """The divisors of n in order; of more than `most` (None: all) those nearest to `near`, which is n by default."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = sorted({*small, *(n // d for d in small)})
    if most is None or len(divisors) <= most:
        return divisors
    return sorted(sorted(divisors, key=lambda d: abs(d - (n if near is None else near)))[:most])


def nearest_multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` just below and just above a value that is not a multiple itself."""
    below = value // of * of
    return [m for m in (below, below + of) if m > 0]


def multiples(value: int, of: int) -> list[int]:
    """48 positive multiples of `of` around a value, in order."""
    first = max(value // of - 24, 1)
    return [of * factor for factor in range(first, first + 48)]


def nearest_name(name: str, accepted: Iterable[str], *, similar: float = _SIMILAR) -> str | None:
    """The accepted name that was probably meant: a misspelled one, then its initials (`lr` for `learning_rate`), then
    the most similar one as a whole and by words, from `similar` on."""
    bare = {candidate.lower().lstrip("-"): candidate for candidate in accepted}  # leading dashes would look similar
    wanted = name.lower().lstrip("-")
    if wanted in bare:
        return bare[wanted]
    misspelled = difflib.get_close_matches(wanted, bare, n=max(len(bare), 1), cutoff=_MISSPELLED)
    initials = "".join(word[:1] for word in re.split(r"[-_]", wanted))
    if not misspelled and initials in bare and len(initials) >= 2:
        return bare[initials]
    words = set(re.split(r"[-_]", wanted))
    # All of a candidate's words and one more: `schedule` for `pipeline-schedule`.
    whole = [name for name in bare if len(words - (part := set(re.split(r"[-_]", name)))) == 1 and part < words]
    if whole:
        return bare[max(whole, key=lambda name: (len(name), name))]
    scores = {n: (_similarity(wanted, n) + _shared_words(wanted, n)) / 2 for n in misspelled or bare}
    nearest = max(scores, key=lambda candidate: (scores[candidate], candidate), default="")
    return bare[nearest] if misspelled or scores.get(nearest, 0.0) >= similar else None


def is_misspelled(name: str, accepted: str) -> bool:
    """Whether a name differs from an accepted one by some letters only."""
    return _similarity(name.lower(), accepted) >= _MISSPELLED


def _similarity(one: str, other: str) -> float:
    """From 0 to 1: the share of letters that are in both in the same order."""
    return difflib.SequenceMatcher(None, other, one).ratio()


def _shared_words(wanted: str, candidate: str) -> float:
    """From 0 to 1: how similar the words of `wanted` are to the most similar ones of a candidate, on average."""
    words, others = (re.findall(r"[a-z0-9]+", name) for name in (wanted, candidate))
    nearest = [max((_similarity(word, other) for other in others), default=0.0) for word in words]
    shared = [near for near in nearest if near >= _SIMILAR]
    # One word of a long name says nothing: `nope` is not meant to be `qk-nope-head-dim`.
    says_something = 3 * len(shared) >= len(others) or candidate.startswith(wanted)
    # Squares: an equal word counts more than two similar ones.
    return sum(near**2 for near in shared) / len(words) if shared and says_something else 0.0


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """` (did you mean NAME?)`, or nothing if no accepted name is near."""
    near = nearest_name(name, accepted)
    return f" (did you mean {near}?)" if near else ""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`1 problem`, `3,000 problems`."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 4 to 7`, for ranks in ascending order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_run = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]} to {ranks[-1]}" if is_run and len(ranks) > 2 else f"ranks {', '.join(map(str, ranks))}"
