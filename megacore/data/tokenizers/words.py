"""The ids of words that were encoded before, found, hashed and compared as NumPy arrays for all words of a text at
once: a look-up in a Python dict costs more than encoding a short word.

A word is what white space surrounds, with a space before it, or a smaller piece of it if it has nothing but ASCII. Each
holds whole pieces of the tokenizer's pattern, and is divided alike by itself and in its text. The patterns are

- GPT-2's (Radford et al. 2019, section 2.2), here with possessive repetitions: the same pieces without backtracking;
- that of OpenAI's cl100k_base and Llama 3: digits go by threes, letters take one sign or one white space before them,
  white space goes up to its last line break, and signs take the line breaks behind them;
- Qwen 2's: the same, with digits one by one.

No alternative of theirs looks at what is before a match. Behind it they look at white space only.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

# The bytes of White_Space beyond ASCII, in UTF-8.
_WIDE_SPACE = re.compile(rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80")
_APOSTROPHE = np.uint8(ord("'"))
# Kinds of bytes: three of white space, the second of them without line breaks; wide: beyond ASCII.
_SPACE, _WHITE, _BREAK, _LETTER, _DIGIT, _SIGN, _WIDE = range(7)
_KINDS = np.full(256, _SIGN, np.uint8)
_KINDS[128:] = _WIDE
for _bytes, _kind in ((b" ", _SPACE), (b"\t\v\f", _WHITE), (b"\n\r", _BREAK), (b"0123456789", _DIGIT)):
    _KINDS[list(_bytes)] = _kind
_KINDS[[byte for byte in range(128) if chr(byte).isalpha()]] = _LETTER
_KIND_BITS = 3


class Division:
    """How a pattern divides texts. `pattern`: the regular expression, as a tokenizer.json has it. `digits`: that a
    piece has at most; None: any number. `letters_take`: whether letters take a sign or white space before them, and
    signs the line breaks behind them, and contractions may have capitals. Else all take a space before them."""

    def __init__(self, pattern: str, *, digits: int | None = None, letters_take: bool = False) -> None:
        self.pattern, self._digits, self._letters_take = pattern, digits, letters_take
        # Whether a piece begins between bytes of two kinds; white space begins none.
        self._cuts = np.zeros(8 << _KIND_BITS, np.bool_)
        for first, second in product(range(7), (_LETTER, _DIGIT, _SIGN, _WIDE)):
            takes = second == _LETTER and first in (_SPACE, _WHITE) if letters_take else first == _SPACE
            is_joined = takes or first == second or (first, second) == (_SPACE, _SIGN)
            self._cuts[first << _KIND_BITS | second] = not is_joined
        # Whether one byte, or two bytes, end a contraction.
        self._contractions = np.zeros(1 << 8, np.bool_), np.zeros(1 << 16, np.bool_)
        for word in ("s", "d", "m", "t", "ll", "ve", "re"):
            for end in product(*(letter + letter.upper() if letters_take else letter for letter in word)):
                self._contractions[len(end) - 1][int.from_bytes("".join(end).encode(), "big")] = True

    def begins(self, data: bytes, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where words begin in `data`, texts in UTF-8 one after the other, which begin and end at `bounds`."""
        letters = np.frombuffer(data, np.uint8)
        kinds = _KINDS[letters]
        words = self._between_white_space(data, kinds, bounds)
        pieces = words.copy()
        pairs = kinds[:-1] << np.uint8(_KIND_BITS)
        pairs |= kinds[1:]
        pieces[1:] |= self._cuts[pairs]
        if self._letters_take:  # a sign goes with the letters behind it if a piece begins with it
            behind = np.flatnonzero(pairs == (_SIGN << _KIND_BITS | _LETTER)) + 1
            pieces[behind] = ~pieces[behind - 1] | words[behind]
        # A contraction is a piece where a piece begins with its apostrophe.
        places = np.flatnonzero((letters == _APOSTROPHE) & pieces)
        for length, known in enumerate(self._contractions, 1):
            places = places[places + length < len(letters)]
            places = places[~words[places + length]]
            spelled = np.zeros(len(places), np.uint16)
            for ahead in range(1, length + 1):
                spelled = spelled << np.uint16(8) | letters[places + ahead]
            found = places[known[spelled]]
            pieces[found + 1] = False
            behind = found + length + 1
            pieces[behind[behind < len(letters)]] = True
        if self._digits is not None:
            places = np.flatnonzero(kinds == _DIGIT)
            if self._digits > 1:  # from the first of a number on
                first = np.diff(places, prepend=-2) != 1
                first |= words[places]
                numbers = np.flatnonzero(first)
                in_number = np.arange(len(places)) - np.repeat(numbers, np.diff(numbers, append=len(places)))
                places = places[in_number % self._digits == 0]
            pieces[places] = True
        if not data.isascii():  # words with other characters stay whole
            begins = np.flatnonzero(words)
            plain = np.maximum.reduceat(letters, begins) < 128 if len(begins) else np.zeros(0, bool)
            pieces &= np.repeat(plain, np.diff(begins, append=len(data)))
            pieces |= words
        return np.flatnonzero(pieces)

    def _between_white_space(
        self, data: bytes, kinds: NDArray[np.uint8], bounds: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether a word begins at each byte, whatever the characters beyond ASCII are."""
        white = kinds <= _BREAK
        wide = [] if data.isascii() else [match.span() for match in _WIDE_SPACE.finditer(data)]
        for first, end in wide:
            white[first:end] = True
        before, behind = np.zeros_like(white), np.ones_like(white)
        before[1:], behind[:-1] = white[:-1], white[1:]
        behind[bounds[bounds > 0] - 1] = True  # white space at the end of a text is one word
        words = white & ~(before & behind)  # the first of some white space, and the last, which a word may take
        if not self._letters_take:
            words[1:] |= before[1:] & ~white[1:] & (kinds[:-1] != _SPACE)
        for first, end in wide:
            words[first:end] = False
            words[first] = first == 0 or not (white[first - 1] and behind[end - 1])
        texts = bounds[bounds < len(data)]
        words[texts] = True
        if self._letters_take:  # line breaks go with the signs or the white space before them
            places = np.flatnonzero(kinds == _BREAK)
            words[places] = False
            words[texts] = True
            is_first = np.diff(places, prepend=-2) != 1
            is_first |= words[places]  # of their text
            begins, ends = places[is_first], places[np.append(is_first[1:], True)[: len(places)]] + 1
            # Without knowing what is before them they stay with it: beyond ASCII, letters and signs look alike.
            kind = np.where(words[begins], np.uint8(_WIDE), kinds[begins - 1])
            words[begins[(kind == _LETTER) | (kind == _DIGIT)]] = True
            inside = ends < len(kinds)
            ends, kind = ends[inside], kind[inside]
            words[ends[~white[ends] | (kind == _SIGN)]] = True
        return words


def _cl100k(numbers: str, digits: int) -> Division:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return Division(pattern, digits=digits, letters_take=True)


GPT2 = Division(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")
LLAMA3 = _cl100k(r"\p{N}{1,3}", 3)
QWEN2 = _cl100k(r"\p{N}", 1)
DIVISIONS = {division.pattern: division for division in (GPT2, LLAMA3, QWEN2)}

MOST_WORDS = 1 << 18  # that are kept
LONGEST_WORD = 64  # bytes of a word that is kept
_INLINE = 15  # bytes of a word that the table holds
BITS = 17  # of a place in the table: 4 MB
_COUNT_BITS = 32  # of the number of ids of a word, in a value of the dict
_EMPTY = np.uint64(2**64 - 1)  # no word has this length
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], np.uint64)
_LOW = np.array([(1 << 8 * min(length, 8)) - 1 for length in range(_INLINE + 1)], np.uint64)
_HIGH = np.array([(1 << 8 * max(length - 8, 0)) - 1 for length in range(_INLINE + 1)], np.uint64)


class WordTable:
    """Encodes texts by their words. A word of up to 15 bytes is two integers of 64 bits, its bytes and its length, so
    that equal integers are equal words. A dict has longer ones; `encode` gives the ids of what neither has."""

    def __init__(self, encode: Callable[[str], list[int]], division: Division) -> None:
        self._encode, self._division = encode, division
        self.words = dict[bytes, int]()  # where the ids of a word begin in `_ids`, and how many they are
        self._ids = array("I")
        self._low = np.zeros(1 << BITS, np.uint64)
        self._high = np.full(1 << BITS, _EMPTY, np.uint64)
        self._value = np.zeros(1 << BITS, np.int64)

    def encode_batch(self, texts: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        if len(self.words) >= MOST_WORDS or len(self._ids) >= 16 * MOST_WORDS:
            self.words.clear()
            self._ids = array("I")
            self._high.fill(_EMPTY)
        data = b"".join(texts)
        bounds = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, count=len(texts)), out=bounds[1:])
        begins = self._division.begins(data, bounds)
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
        slots = (mixed >> np.uint64(64 - BITS)).view(np.int64)
        values = self._value[slots]
        missing = np.flatnonzero((self._low[slots] != low) | (self._high[slots] != high))
        # Each word has two places, of which the second is the first of its neighbour.
        second = slots[missing] ^ 1
        found = (self._low[second] == low[missing]) & (self._high[second] == high[missing])
        values[missing[found]] = self._value[second[found]]
        missing = missing[~found]
        if not len(missing):
            return values
        # Most words of one place are equal: the first is looked for, and those that differ from it.
        slot, which, same_place = np.unique(slots[missing], return_index=True, return_inverse=True)
        first = missing[which]
        firsts = first[same_place]
        differ = (low[missing] != low[firsts]) | (high[missing] != high[firsts]) | (inline[missing] == 0)
        for place in (*first.tolist(), *missing[differ & (missing != firsts)].tolist()):
            values[place] = self._value_of(data[begins[place] : begins[place] + lengths[place]])
        values[missing[~differ]] = values[firsts[~differ]]
        held = inline[first] > 0
        slot, first = slot[held], first[held]
        for kept, new in ((self._low, low), (self._high, high), (self._value, values)):
            kept[slot ^ 1] = kept[slot]
            kept[slot] = new[first]
        return values

    def _value_of(self, word: bytes) -> int:
        value = self.words.get(word)
        if value is None:
            ids = self._encode(word.decode())
            value = len(self._ids) << _COUNT_BITS | len(ids)
            self._ids.extend(ids)
            if len(word) <= LONGEST_WORD:
                self.words[word] = value
        return value
