r"""Where texts may be divided into words that are encoded apart, for the patterns of some tokenizers.

A word is what white space surrounds, with a space before it, or a smaller piece of it if it has nothing but ASCII. Each
word holds whole pieces of the tokenizer's pattern, and is divided alike by itself and in its text. The patterns are

- GPT-2's (Radford et al. 2019, section 2.2), here with possessive repetitions: the same pieces without backtracking;
- that of OpenAI's cl100k_base and Llama 3: digits go by threes, letters take one sign or one white space before them,
  white space goes up to its last line break, and signs take the line breaks behind them;
- Qwen 2's: the same, with digits one by one.

No alternative of theirs looks at what is before a match. Behind it they look at white space only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

# The bytes of White_Space beyond ASCII, in UTF-8.
_WIDE_SPACE = re.compile(rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80")
_APOSTROPHE = np.uint8(ord("'"))
# Kinds of bytes: three of white space, the second of them without line breaks; wide: beyond ASCII.
_SPACE, _WHITE, _BREAK, _LETTER, _DIGIT, _SIGN, _WIDE = range(7)
_KIND_BITS = 3


def _kind(byte: int) -> int:
    letter = chr(byte)
    if byte > 127 or letter == " ":
        return _WIDE if byte > 127 else _SPACE
    if letter in "\t\v\f\n\r":
        return _BREAK if letter in "\n\r" else _WHITE
    return _LETTER if letter.isalpha() else _DIGIT if letter.isdigit() else _SIGN


_KINDS = np.array([_kind(byte) for byte in range(256)], np.uint8)


def _table(values: set[int], size: int) -> NDArray[np.bool_]:
    table = np.zeros(size, np.bool_)
    table[list(values)] = True
    return table


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a pattern divides texts.

    Attributes:
        pattern: the regular expression, as a tokenizer.json has it.
        digits: that a piece has at most; None: any number.
        letters_take: whether letters take a sign or white space before them, and signs the line breaks behind them.
            Else all take a space before them.
        any_case: whether contractions may have capitals.
    """

    pattern: str
    digits: int | None = None
    letters_take: bool = False
    any_case: bool = False

    def cuts(self) -> NDArray[np.bool_]:
        """Whether a piece begins between bytes of two kinds, by `first << 3 | second`; white space begins none."""
        joined = {(kind, kind) for kind in range(7)} | {(_SPACE, _SIGN)}
        if self.letters_take:
            joined |= {(_SPACE, _LETTER), (_WHITE, _LETTER)}
        else:
            joined |= {(_SPACE, _LETTER), (_SPACE, _DIGIT), (_SPACE, _WIDE)}
        pairs = product(range(7), (_LETTER, _DIGIT, _SIGN, _WIDE))
        cuts = {first << _KIND_BITS | second for first, second in pairs if (first, second) not in joined}
        return _table(cuts, 8 << _KIND_BITS)

    def contractions(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether a byte, or two bytes as `first << 8 | second`, end a contraction."""
        ends = ["s", "d", "m", "t", "ll", "ve", "re"]
        if self.any_case:
            ends = ["".join(end) for word in ends for end in product(*((one, one.upper()) for one in word))]
        short = {ord(end) for end in ends if len(end) == 1}
        long = {ord(end[0]) << 8 | ord(end[1]) for end in ends if len(end) == 2}
        return _table(short, 1 << 8), _table(long, 1 << 16)


def _cl100k(digits: str, most: int) -> Division:
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return Division(pattern=pattern, digits=most, letters_take=True, any_case=True)


GPT2 = Division(pattern=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s")
LLAMA3 = _cl100k(r"\p{N}{1,3}", 3)
QWEN2 = _cl100k(r"\p{N}", 1)
DIVISIONS = {division.pattern: division for division in (GPT2, LLAMA3, QWEN2)}


class WordFinder:
    """Finds the words of texts.

    Args:
        division: how they are divided.
    """

    def __init__(self, division: Division) -> None:
        self._division, self._cuts = division, division.cuts()
        self._short, self._long = division.contractions()

    def begins(self, data: bytes, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where words begin.

        Args:
            data: texts in UTF-8, one after the other.
            bounds: where they begin and end.
        """
        letters = np.frombuffer(data, np.uint8)
        kinds = _KINDS[letters]
        words = self._between_white_space(data, kinds, bounds)
        pieces = words.copy()
        pairs = kinds[:-1] << np.uint8(_KIND_BITS)
        pairs |= kinds[1:]
        pieces[1:] |= self._cuts[pairs]
        if self._division.letters_take:  # a sign goes with the letters behind it if a piece begins with it
            behind = np.flatnonzero(pairs == (_SIGN << _KIND_BITS | _LETTER)) + 1
            pieces[behind] = ~pieces[behind - 1] | words[behind]
        self._divide_contractions(letters, words, pieces)
        if self._division.digits is not None:
            _divide_digits(kinds, words, pieces, self._division.digits)
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
        if not self._division.letters_take:
            words[1:] |= before[1:] & ~white[1:] & (kinds[:-1] != _SPACE)
        for first, end in wide:
            words[first:end] = False
            words[first] = first == 0 or not (white[first - 1] and behind[end - 1])
        texts = bounds[bounds < len(data)]
        words[texts] = True
        if self._division.letters_take:
            _divide_at_line_breaks(kinds, white, words, texts)
        return words

    def _divide_contractions(
        self, letters: NDArray[np.uint8], words: NDArray[np.bool_], pieces: NDArray[np.bool_]
    ) -> None:
        """Make contractions pieces, where a piece begins with the apostrophe."""
        places = np.flatnonzero((letters == _APOSTROPHE) & pieces)
        places = places[places + 1 < len(letters)]
        places = places[~words[places + 1]]
        short = places[self._short[letters[places + 1]]]
        places = places[places + 2 < len(letters)]
        places = places[~words[places + 2]]
        long = places[self._long[letters[places + 1].astype(np.uint16) << 8 | letters[places + 2]]]
        pieces[short + 1] = pieces[long + 1] = False
        for behind in (short + 2, long + 3):
            pieces[behind[behind < len(letters)]] = True


def _divide_digits(kinds: NDArray[np.uint8], words: NDArray[np.bool_], pieces: NDArray[np.bool_], most: int) -> None:
    """Make every `most` digits a piece, from the first of a number on."""
    places = np.flatnonzero(kinds == _DIGIT)
    if most > 1:
        first = np.diff(places, prepend=-2) != 1
        first |= words[places]
        numbers = np.flatnonzero(first)
        in_number = np.arange(len(places)) - np.repeat(numbers, np.diff(numbers, append=len(places)))
        places = places[in_number % most == 0]
    pieces[places] = True


def _divide_at_line_breaks(
    kinds: NDArray[np.uint8], white: NDArray[np.bool_], words: NDArray[np.bool_], texts: NDArray[np.int64]
) -> None:
    """Give line breaks to what they go with: the signs or the white space before them.

    Args:
        kinds: of the bytes.
        white: whether they are of white space.
        words: whether a word begins at each; changed.
        texts: where texts begin.
    """
    places = np.flatnonzero(kinds == _BREAK)
    words[places] = False
    words[texts] = True
    first = np.diff(places, prepend=-2) != 1
    first |= words[places]  # of their text
    begins, ends = places[first], places[np.append(first[1:], True)[: len(places)]] + 1
    # Without knowing what is before them they stay with it: beyond ASCII, letters and signs look alike.
    before = np.where(words[begins], np.uint8(_WIDE), kinds[begins - 1])
    words[begins[(before == _LETTER) | (before == _DIGIT)]] = True
    inside = ends < len(kinds)
    ends, before = ends[inside], before[inside]
    words[ends[~white[ends] | (before == _SIGN)]] = True
