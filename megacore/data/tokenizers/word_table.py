"""The ids of words that were encoded before, looked up for all words of a text at once.

A look-up in a Python dict costs more than encoding a short word: every word is an object, somewhere in memory. Here the
words of a text are found, hashed and compared as NumPy arrays. A word of up to 15 bytes is two integers of 64 bits that
hold its bytes and its length, so that equal integers are equal words. What is not in the table, a Python dict has; what
that does not have is encoded. word_division.py finds the words.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megacore.data.tokenizers.word_division import Division, WordFinder

_MOST_WORDS = 1 << 18  # that are kept
_LONGEST_WORD = 64  # bytes of a word that is kept
_INLINE = 15  # bytes of a word that the table holds
_BITS = 17  # of a place in the table: 4 MB
_COUNT_BITS = 32  # of the number of ids of a word, in a value of the dict
_EMPTY = np.uint64(2**64 - 1)  # no word has this length
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], np.uint64)
_LOW = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(_INLINE + 1)], np.uint64)
_HIGH = np.array([(1 << 8 * max(length - 8, 0)) - 1 for length in range(_INLINE + 1)], np.uint64)


class WordTable:
    """Encodes texts by their words.

    Args:
        encode: gives the ids of a text that is one word; those of a text are the ids of its words.
        division: of texts into words.
    """

    def __init__(self, encode: Callable[[str], list[int]], division: Division) -> None:
        self._encode, self._finder = encode, WordFinder(division)
        self.words = dict[bytes, int]()  # where the ids of a word begin in `_ids`, and how many they are
        self._ids = array("I")
        self._low = np.zeros(1 << _BITS, np.uint64)
        self._high = np.full(1 << _BITS, _EMPTY, np.uint64)
        self._value = np.zeros(1 << _BITS, np.int64)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """The ids of texts in UTF-8."""
        if len(self.words) >= _MOST_WORDS or len(self._ids) >= 16 * _MOST_WORDS:
            self.words.clear()
            self._ids = array("I")
            self._high.fill(_EMPTY)
        data = b"".join(texts)
        bounds = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, count=len(texts)), out=bounds[1:])
        begins = self._finder.begins(data, bounds)
        values = self._look_up(data, begins)
        counts = values & ((1 << _COUNT_BITS) - 1)
        ends = np.zeros(len(begins) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        places = np.repeat((values >> _COUNT_BITS) - ends[:-1], counts)
        places += np.arange(len(places))
        ids = np.frombuffer(self._ids, np.uint32)[places] if len(places) else np.zeros(0, np.uint32)
        cuts = ends[np.searchsorted(begins, bounds)].tolist()
        return [ids[cut:end] for cut, end in pairwise(cuts)]

    def _look_up(self, data: bytes, begins: NDArray[np.int64]) -> NDArray[np.int64]:
        """The value in `words` of each word of the data."""
        lengths = np.diff(begins, append=len(data))
        # Eight bytes from every place on.
        view = np.ndarray((len(data) + 8,), "<u8", data + bytes(16), strides=(1,))
        inline = np.where(lengths <= _INLINE, lengths, 0)
        low = view[begins] & _LOW[inline]
        high = view[np.minimum(begins + 8, len(data))] & _HIGH[inline]
        high |= inline.astype(np.uint64) << np.uint64(56)
        mixed = low * _FACTORS[0] ^ high * _FACTORS[1]
        mixed ^= mixed >> np.uint64(32)
        mixed *= _FACTORS[2]
        slots = (mixed >> np.uint64(64 - _BITS)).view(np.int64)
        values = self._value[slots]
        missing = np.flatnonzero((self._low[slots] != low) | (self._high[slots] != high))
        # Each word has two places, of which the second is the first of its neighbour.
        second = slots[missing] ^ 1
        found = (self._low[second] == low[missing]) & (self._high[second] == high[missing])
        values[missing[found]] = self._value[second[found]]
        missing = missing[~found]
        if len(missing):
            # Most words of one place are equal: the first is looked for, and those that differ from it.
            slot, which, same_place = np.unique(slots[missing], return_index=True, return_inverse=True)
            first = missing[which]
            values[first] = self._values_of(data, begins[first], lengths[first])
            firsts = first[same_place]
            values[missing] = values[firsts]
            differ = (low[missing] != low[firsts]) | (high[missing] != high[firsts]) | (inline[missing] == 0)
            others = missing[differ]
            values[others] = self._values_of(data, begins[others], lengths[others])
            held = inline[first] > 0
            slot, first = slot[held], first[held]
            for kept, new in ((self._low, low), (self._high, high), (self._value, values)):
                kept[slot ^ 1] = kept[slot]
                kept[slot] = new[first]
        return values

    def _values_of(self, data: bytes, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[int]:
        pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
        return [self._value_of(data[begin : begin + length]) for begin, length in pairs]

    def _value_of(self, word: bytes) -> int:
        value = self.words.get(word)
        if value is None:
            ids = self._encode(word.decode())
            value = len(self._ids) << _COUNT_BITS | len(ids)
            self._ids.extend(ids)
            if len(word) <= _LONGEST_WORD:
                self.words[word] = value
        return value
