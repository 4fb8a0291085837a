"""Masking against counts: how much, of what, in what units, and what stands there instead."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megacore.data.bert.masking import Masking, draw_spans
from megacore.data.tokenizers.training import train_tokenizer
from megacore.data.tokenizers.vocabulary import word_starts

VOCAB, MASK = 1000, 4
SPECIAL = np.arange(VOCAB) < 5
# A third of the vocabulary goes on with a word.
STARTS = np.arange(VOCAB) % 3 != 0


def masking(prob: float = 0.15, *, words: bool = False, max_ngram: int = 1) -> Masking:
    """Rules over a vocabulary of 1,000 ids, of which the first five are special."""
    starts, ordinary = STARTS if words else None, np.flatnonzero(~SPECIAL)
    return Masking(prob=prob, mask=MASK, special=SPECIAL, ordinary=ordinary, starts=starts, max_ngram=max_ngram)


def text(length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Random tokens, one in 25 of them special."""
    tokens = rng.integers(5, VOCAB, size=length)
    special = rng.random(length) < 0.04
    tokens[special] = rng.integers(5, size=int(special.sum()))
    return tokens


def words_of(tokens: NDArray[np.int64]) -> list[list[int]]:
    """Positions of each word, by brute force."""
    words: list[list[int]] = []
    for at, token in enumerate(tokens.tolist()):
        if SPECIAL[token]:
            continue
        if words and words[-1][-1] == at - 1 and not STARTS[token]:
            words[-1].append(at)
        else:
            words.append([at])
    return words


def within(count: float, trials: int, prob: float, sigmas: float = 3) -> bool:
    """Whether a binomial count is as near to its mean as can be asked."""
    return abs(count - trials * prob) <= sigmas * (trials * prob * (1 - prob)) ** 0.5


WAYS: list[dict[str, Any]] = [{}, {"words": True}, {"max_ngram": 3}, {"words": True, "max_ngram": 4}]


@pytest.mark.parametrize(
    ("way", "prob", "length"),
    # By default every way once, with either rate and either length; all of them together are slow.
    [
        pytest.param(way, prob, length, marks=[pytest.mark.slow] * ((i % 2, i // 2) != (j, k)))
        for i, way in enumerate(WAYS)
        for j, prob in enumerate((0.15, 0.3))
        for k, length in enumerate((30, 500))
    ],
)
def test_rates_are_those_asked_for(way: dict[str, Any], prob: float, length: int) -> None:
    rng, rules = np.random.default_rng(length), masking(prob, **way)
    count: Counter[str] = Counter()
    for _ in range(100_000 // length):
        tokens = text(length, rng)
        changed, chosen = rules.apply(tokens, None, rng)
        assert not chosen[SPECIAL[tokens]].any()
        assert (changed[~chosen] == tokens[~chosen]).all()
        assert not SPECIAL[changed[chosen & (changed != MASK)]].any()
        count["text"] += int((~SPECIAL[tokens]).sum())
        count["chosen"] += int(chosen.sum())
        count["masked"] += int((changed[chosen] == MASK).sum())
        count["kept"] += int((changed[chosen] == tokens[chosen]).sum())
    assert within(count["chosen"], count["text"], prob)
    assert within(count["masked"], count["chosen"], 0.8)
    # A random token is now and then the same one.
    assert within(count["kept"], count["chosen"], 0.1 + 0.1 / (VOCAB - 5))


def test_every_position_is_chosen_equally_often() -> None:
    rng, tokens = np.random.default_rng(1), np.arange(5, 55)
    times = np.sum([masking(0.2).choose(tokens, None, rng) for _ in range(4000)], axis=0)
    # 50 binomials of 4,000 trials each: none is 5 standard deviations off.
    assert abs(times - 800).max() < 5 * (4000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("max_ngram", [1, 3])
def test_words_are_masked_whole(max_ngram: int) -> None:
    rng, rules = np.random.default_rng(2), masking(0.3, words=True, max_ngram=max_ngram)
    long_words = 0
    for _ in range(200):
        tokens = text(120, rng)
        chosen = rules.choose(tokens, None, rng)
        for word in words_of(tokens):
            assert len(set(chosen[word].tolist())) == 1
            long_words += len(word) > 1 and bool(chosen[word[0]])
    assert long_words > 500


def test_the_sentences_first_token_begins_a_word_whatever_it_is() -> None:
    rng, rules = np.random.default_rng(3), masking(0.5, words=True)
    tokens, begins = np.array([7, 9, 9, 9]), np.array([False, False, True, False])
    seen = {tuple(rules.choose(tokens, begins, rng).tolist()) for _ in range(300)}
    assert (True, True, False, False) in seen
    assert (False, False, True, True) in seen
    assert all(a == b and c == d for a, b, c, d in seen)


def test_ngrams_are_as_long_as_their_weights_say() -> None:
    rng = np.random.default_rng(4)
    sizes = np.ones(20_000, np.int64)
    runs = np.arange(20_000) // 50
    lengths: Counter[int] = Counter()
    for _ in range(10):
        spans = draw_spans(sizes, runs, 2000, 4, rng)
        lengths.update(stop - start for start, stop in spans)
        taken = np.concatenate([np.arange(*span) for span in spans])
        assert len(set(taken.tolist())) == len(taken)  # none overlap
        assert all(runs[start] == runs[stop - 1] for start, stop in spans)
    total = lengths.total()
    assert total > 8000
    weights = {n: (1 / n) / (1 + 1 / 2 + 1 / 3 + 1 / 4) for n in (1, 2, 3, 4)}
    assert lengths.keys() == weights.keys()
    assert all(within(lengths[n], total, weight) for n, weight in weights.items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [[], [1, 2, 3], [7], [1, 9, 9, 2, 7], [9] * 40])
def test_short_texts_are_masked_on_average_too(tokens: list[int], way: dict[str, Any]) -> None:
    rng, rules = np.random.default_rng(6), masking(0.3, **way)
    values = np.array(tokens, np.int64)
    free = int((~SPECIAL[values]).sum())
    counts = [int(rules.choose(values, None, rng).sum()) for _ in range(1500)]
    assert max(counts) <= free
    # A word is chosen as a whole: the variance of the mean is that of all tokens at once, at most.
    assert abs(np.mean(counts) - 0.3 * free) <= 4 * free * (0.3 * 0.7 / 1500) ** 0.5


# ---- tokenizers ------------------------------------------------------------------------------------------------------

TEXT = ["the people of the town were running and jumping over the walls of the towns"] * 3


@pytest.mark.parametrize("kind", ["bpe", "unigram", "sentencepiece-bpe", "wordpiece"])
def test_words_begin_where_the_tokenizer_marks_them(kind: Any) -> None:
    tokenizer = train_tokenizer(TEXT, kind, 300 if kind != "wordpiece" else 60)
    starts = tokenizer.word_starts()
    assert starts is not None
    line = TEXT[0]
    ids = tokenizer.encode(line)
    marked = [0, *(at for at, token in enumerate(ids) if at and starts[token])]
    assert len(marked) == len(line.split())
    pieces = [tokenizer.decode(ids[a:b]).strip() for a, b in zip(marked, [*marked[1:], len(ids)], strict=True)]
    assert [piece.replace(" ", "") for piece in pieces] == line.split()


def test_a_vocabulary_without_marks_has_no_words() -> None:
    assert word_starts(["a", "b"], {"model": {"type": "BPE"}}) is None
    assert word_starts(["a", "##b"], {"model": {"continuing_subword_prefix": "##"}}) == [True, False]
    steps = {"pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}
    assert word_starts(["Ġa", "b", "Ċ"], {"model": {}, "pre_tokenizer": steps}) == [True, False, True]
    assert word_starts(["▁a", "b"], {"model": {"type": "BPE"}}) == [True, False]
