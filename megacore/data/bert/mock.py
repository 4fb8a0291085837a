"""Generated text for BERT without a dataset: the noisy cycle of gpt/mock.py. A pair in order is one walk through the
cycle, cut in two; else the second part walks from anywhere, or the two are swapped. So both tasks can be learned."""

from __future__ import annotations

import numpy as np

from megacore.data.bert.masking import Masking, SpecialTokens
from megacore.data.bert.text import Layout, joined
from megacore.data.gpt.mock import cycle, walk
from megacore.errors import DataError

MOCK_TOKENS = SpecialTokens(pad=0, cls=1, sep=2, mask=3)
_SPECIAL = 4
_SMALLEST = 8


class MockBertText:
    """Samples that are a function of their random numbers; `seed` decides the cycle, the same for training and
    validation."""

    def __init__(
        self, vocab_size: int, seq_length: int, *, task: str, packed: bool, short_seq_prob: float, seed: int
    ) -> None:
        self._length, self._task, self._packed, self._short = seq_length, task, packed, short_seq_prob
        self._cycle = _SPECIAL + cycle(vocab_size - _SPECIAL, seed)

    def layout(self, index: int, rng: np.random.Generator) -> Layout:
        """Sample `index`, drawn with the sample's random numbers."""
        if self._packed:
            return self._documents(rng)
        ends = 2 if self._task == "none" else 3
        room = self._length - ends
        if rng.random() < self._short:
            room = int(rng.integers(ends - 1, room + 1))
        text = walk(self._cycle, room, rng)
        if ends == 2:
            return joined(MOCK_TOKENS, [text], None)
        cut, label = int(rng.integers(1, room)), int(rng.random() < 0.5)
        a, b = text[:cut], text[cut:]
        if label and self._task == "sop":
            a, b = b, a
        elif label:
            b = walk(self._cycle, room - cut, rng)
        return joined(MOCK_TOKENS, [a, b], None, label)

    def _documents(self, rng: np.random.Generator) -> Layout:
        tokens = np.empty(self._length, np.int64)
        documents = np.empty(self._length, np.int64)
        filled = number = 0
        while filled < self._length:
            number += 1
            text = walk(self._cycle, int(rng.integers(1, self._length + 1)), rng)
            unit = np.concatenate(([MOCK_TOKENS.cls], text, [MOCK_TOKENS.sep]))[: self._length - filled]
            tokens[filled : filled + len(unit)] = unit
            documents[filled : filled + len(unit)] = number
            filled += len(unit)
        return Layout(tokens=tokens, token_types=np.zeros_like(tokens), documents=documents, begins=None)


def mock_masking(vocab_size: int, *, prob: float, max_ngram: int) -> Masking:
    """The rules of masking for generated text. Raises DataError where the vocabulary is too small for special tokens
    and text."""
    if vocab_size < _SMALLEST:
        raise DataError(f"--vocab-size {vocab_size} is too small for --mock-data: use {_SMALLEST} or more")
    special = np.arange(vocab_size) < _SPECIAL
    return Masking(
        prob=prob, mask=MOCK_TOKENS.mask, special=special, ordinary=np.flatnonzero(~special), max_ngram=max_ngram
    )
