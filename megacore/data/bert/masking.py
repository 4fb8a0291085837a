"""Which tokens of a sample are to be predicted, and what replaces them.

As in BERT (arXiv 1810.04805), of the chosen tokens 80% become the mask token, 10% a random one and 10% stay. The unit
that is chosen is a token, or a whole word; with n-grams (ALBERT, arXiv 1909.11942) it is n of them in a row, with
weight 1/n. A sample of n tokens has n * mask_prob of them predicted on average, exactly: the budget is rounded at
random, and the last unit, where it is too large, is taken with the probability that keeps the mean. Special tokens are
never chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import DataError

Bools = NDArray[np.bool_]
_MASKED, _REPLACED = 0.8, 0.1
_TRIES = 16  # to find n free units in a row, before one unit fewer is looked for
_LOTS = 256
_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that a sample is put together with."""

    cls: int
    sep: int
    mask: int
    pad: int


@dataclass(frozen=True, kw_only=True)
class Masking:
    """The rules of a run."""

    prob: float  # share of the tokens that are predicted
    mask: int  # id of the mask token
    special: Bools  # bool [V], tokens that are never chosen, and never a random replacement
    ordinary: NDArray[np.int64]  # int64, ids of the others that the tokenizer has
    starts: Bools | None = None  # bool [V], tokens that begin a word, where whole words are chosen; None: tokens are
    max_ngram: int = 1  # most units in a row that are chosen together

    def apply(
        self, tokens: NDArray[np.int64], begins: Bools | None, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], Bools]:
        """Choose what is predicted among `tokens`, int64 [n], and replace it: int64 [n] that the model reads, bool [n]
        where it predicts. `begins`: bool [n], positions that begin a word whatever the token, such as a sentence's
        first."""
        chosen = self.choose(tokens, begins, rng)
        predicted = np.flatnonzero(chosen)
        lot = rng.random(len(predicted))
        changed = tokens.copy()
        changed[predicted[lot < _MASKED]] = self.mask
        replaced = predicted[(lot >= _MASKED) & (lot < _MASKED + _REPLACED)]
        changed[replaced] = self.ordinary[rng.integers(len(self.ordinary), size=len(replaced))]
        return changed, chosen

    def choose(self, tokens: NDArray[np.int64], begins: Bools | None, rng: np.random.Generator) -> Bools:
        """bool [n]: the positions that are predicted."""
        free = ~self.special[tokens]
        first = free.copy()  # where a unit begins
        if self.starts is not None:
            first &= self.starts[tokens] if begins is None else self.starts[tokens] | begins
            # No unit reaches over a special token.
            first[1:] |= free[1:] & ~free[:-1]
            first[:1] = free[:1]
        begin = np.flatnonzero(first)  # of each unit
        chosen = np.zeros(len(tokens), np.bool_)
        count = int(free.sum())
        budget = int(count * self.prob + rng.random())
        if budget == 0:
            return chosen
        if self.starts is None and self.max_ngram == 1:
            chosen[rng.permutation(begin)[:budget]] = True
            return chosen
        sizes = np.bincount(np.cumsum(first)[free] - 1, minlength=len(begin))
        if self.max_ngram == 1:
            order = rng.permutation(len(begin))
            spans = [(unit, unit + 1) for unit in order[: _reached(sizes[order], budget, rng.random())].tolist()]
        else:
            # Units follow each other directly where no special token is between them.
            runs = np.cumsum(np.diff(begin, prepend=0) != np.concatenate(([0], sizes))[:-1])
            spans = draw_spans(sizes, runs, budget, self.max_ngram, rng)
        for start, stop in spans:
            chosen[begin[start] : begin[stop - 1] + sizes[stop - 1]] = True
        return chosen


def _reached(sizes: NDArray[np.int64], budget: int, lot: float) -> int:
    """How many units, in their order, make up the budget on average: the one that exceeds it counts with the
    probability that keeps the mean."""
    ends = np.cumsum(sizes)
    within = int(np.searchsorted(ends, budget, side="right"))
    if within == len(sizes):
        return within
    left = budget - (int(ends[within - 1]) if within else 0)
    return within + (lot * int(sizes[within]) < left)


def draw_spans(
    sizes: NDArray[np.int64], runs: NDArray[np.int64], budget: int, max_ngram: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Spans (first unit, one after the last) that do not overlap, each within one run, until they hold the budget of
    tokens on average. `sizes`: [units] tokens of each. `runs`: [units] number of each unit's run, ascending. A span of
    n units has the weight 1/n."""
    longest = min(max_ngram, int(np.bincount(runs).max()))
    up_to = np.cumsum(1 / np.arange(1, longest + 1))
    shares, lots = (up_to / up_to[-1]).tolist(), _lots(rng)
    ends, run_of = np.concatenate(([0], np.cumsum(sizes))).tolist(), runs.tolist()
    taken = bytearray(len(sizes))
    spans: list[tuple[int, int]] = []
    while budget > 0:
        span = _free_span(taken, run_of, bisect_right(shares, next(lots)) + 1, lots)
        if span is None:
            break
        start, stop = span
        size = ends[stop] - ends[start]
        if size > budget and next(lots) * size >= budget:
            break
        spans.append(span)
        taken[start:stop] = b"\1" * (stop - start)
        budget -= size
    return spans


def _free_span(taken: bytearray, run_of: Sequence[int], length: int, lots: Iterator[float]) -> tuple[int, int] | None:
    """A random span of `length` free units of one run, or of as many fewer as are free somewhere."""
    for wanted in range(length, 0, -1):
        starts = len(taken) - wanted + 1
        for _ in range(_TRIES):
            start = int(next(lots) * starts)
            if run_of[start] == run_of[start + wanted - 1] and not any(taken[start : start + wanted]):
                return start, start + wanted
    free = [unit for unit, is_taken in enumerate(taken) if not is_taken]
    if not free:
        return None
    unit = free[int(next(lots) * len(free))]
    return unit, unit + 1


def _lots(rng: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) without end; many at once, because drawing one by itself takes as long."""
    while True:
        yield from rng.random(_LOTS).tolist()


def special_tokens(tokenizer: Tokenizer, source: str) -> SpecialTokens:
    """The ids that samples are put together with. Raises DataError where the tokenizer has not all of them; names
    those, and the way out."""
    missing = [name for role, name in _NAMES.items() if role not in tokenizer.roles]
    if missing:
        raise DataError(
            f"--tokenizer {source} has no {' and no '.join(missing)} token, which BERT needs: train one with "
            "tools/train_tokenizer.py --model wordpiece, or give the directory of a BERT tokenizer"
        )
    return SpecialTokens(**tokenizer.roles)


def make_masking(
    tokenizer: Tokenizer, source: str, *, vocab_size: int, prob: float, whole_words: bool, max_ngram: int
) -> Masking:
    """The rules of a run with a tokenizer. `source`: where that was read from, for messages. `max_ngram`: most units in
    a row that are chosen together. Raises DataError where it has no mask token, no ordinary token, or no marks where
    words begin."""
    tokens = special_tokens(tokenizer, source)
    special = np.zeros(vocab_size, np.bool_)
    special[sorted(tokenizer.special_ids)] = True
    ordinary = np.flatnonzero(~special[: tokenizer.vocab_size])
    if not len(ordinary):
        raise DataError(f"--tokenizer {source} has special tokens only, and nothing to predict: give another one")
    starts = tokenizer.word_starts() if whole_words else None
    if whole_words and starts is None:
        raise DataError(
            f"--whole-word-masking: the tokenizer {source} does not mark where words begin: leave the flag out, or "
            "train one with tools/train_tokenizer.py --model wordpiece"
        )
    marks = None if starts is None else np.ones(vocab_size, np.bool_)
    if marks is not None:
        marks[: len(starts or ())] = starts
    return Masking(prob=prob, mask=tokens.mask, special=special, ordinary=ordinary, starts=marks, max_ngram=max_ngram)
