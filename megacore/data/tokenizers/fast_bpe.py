"""Byte-level BPE through tiktoken's encoder, several times as fast as `tokenizers`, where the ids are the same.

tiktoken merges the neighbours whose token has the lowest id; `tokenizers` goes by a list of merges. Both give the same
ids where ids are in the order of merges. That is not taken for granted: `fast_encoder` compares both on every token of
the vocabulary and on two planes of Unicode, and `FastEncoder.agrees` on text of the user's. Words that were encoded
before come from `WordTable`; what the encoder does not know, such as texts with special tokens, `tokenizers` encodes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, groupby, takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megacore.data.tokenizers.same_ids import characters
from megacore.data.tokenizers.tokenizer import JsonTokenizer, Tokenizer
from megacore.data.tokenizers.words import DIVISIONS, GPT2, Division, WordTable

if TYPE_CHECKING:
    import tiktoken

NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: Mapping[str | None, NormalForm] = {"NFC": "NFC", "NFD": "NFD", "NFKC": "NFKC", "NFKD": "NFKD"}
PROBED = (range(1, 0xD800), range(0xE000, 0x20000))  # code points; surrogates are no characters
TOGETHER = 1 << 16  # characters of the texts whose words are looked up at once: what a core's cache holds
_SHARES = 4  # of a comparison for each process, so that all end at about the same time
WHOLE = 1 << 18  # characters that are encoded at once, where a text can be divided
_PLACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SIGNS = ("", "'", "1", ".", "-", "\n", " ", "é", "東")


class FastEncoder:
    """Encodes texts as a tokenizer does, through tiktoken's `encoding`. `special`: what texts must not hold, as the
    tokenizer finds it first. `normal_form`: of Unicode; None: texts stay as they are. `division`: into words, by the
    encoder's pattern; None: texts are encoded whole."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoding: tiktoken.Encoding,
        special: Sequence[str],
        normal_form: NormalForm | None,
        *,
        strips_spaces: bool = False,
        division: Division | None = None,
    ) -> None:
        self._tokenizer, self._encoding, self._normal_form = tokenizer, encoding, normal_form
        self._special, self._strips_spaces = tuple(special), strips_spaces
        self.words = None if division is None else WordTable(encoding.encode_ordinary, division)
        # One search rules out most texts: what all special tokens begin with.
        same = takewhile(lambda letters: len(set(letters)) == 1, zip(*special, strict=False))
        self._common = "".join(letters[0] for letters in same)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        ids = dict[int, NDArray[np.uint32]]()
        if self.words is not None:
            short = ((number, text) for number, text in enumerate(texts) if len(text) <= TOGETHER)
            known = {number: text.encode() for number, text in short if self._is_plain(text)}
            ends = accumulate(map(len, known.values()))
            for _, group in groupby(zip(known, ends, strict=True), lambda item: item[1] // TOGETHER):
                numbers = [number for number, _ in group]
                found = self.words.encode_batch([known[number] for number in numbers])
                ids.update(zip(numbers, found, strict=True))
        return [ids[number] if number in ids else self.encode(text) for number, text in enumerate(texts)]

    def encode(self, text: str) -> NDArray[np.uint32]:
        if len(text) > WHOLE and self.divides:
            return np.concatenate(list(self.encode_parts([text])))
        return self._encode_part(text)

    def encode_parts(self, pieces: Iterable[str]) -> Iterator[NDArray[np.uint32]]:
        """The ids of a text that comes in pieces, a part at a time; only for an encoder that `divides`."""
        return map(self._encode_part, _parts(pieces, WHOLE))

    def _encode_part(self, text: str) -> NDArray[np.uint32]:
        if not self._is_plain(text):
            return np.array(self._tokenizer.encode_batch([text])[0], np.uint32)
        if self.words is None:
            return np.array(self._encoding.encode_ordinary(text), np.uint32)
        return self.words.encode_batch([text.encode()])[0]

    @cached_property
    def divides(self) -> bool:
        """Whether a long text may be encoded in parts that begin with the space before a word. No special token may
        have a space, or take one that is beside it. That no piece of the tokenizer's pattern goes across such a place
        is tried out on every letter of ASCII, and on digits and signs around."""
        if any(" " in token for token in self._special) or self._strips_spaces:
            return False
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = [(f"{one}{other}", f"{other}{one}") for one, other in zip(letters, reversed(letters), strict=True)]
        firsts = [f"{sign}{word}" for word, _ in words for sign in _SIGNS]
        seconds = [f" {word}{sign}" for _, word in words for sign in _SIGNS]
        wholes = [first + second for first, second in zip(firsts, seconds, strict=True)]
        encoded = zip(*map(self.encode_batch, (wholes, firsts, seconds)), strict=True)
        return all(whole.tolist() == [*first, *second] for whole, first, second in encoded)

    def agrees(self, texts: Sequence[str], workers: int = 1) -> bool:
        """Whether the tokenizer itself gives the same ids for these texts, which `workers` processes share."""
        if workers == 1 or sys.platform != "linux":
            return self._agrees(texts)
        shares = [texts[number :: _SHARES * workers] for number in range(_SHARES * workers)]
        # Forked, so that neither the encoder nor the texts are sent.
        with multiprocessing.get_context("fork").Pool(workers, _start_comparison, (self._agrees, shares)) as pool:
            return all(pool.imap(_compare, range(len(shares))))

    def _agrees(self, texts: Sequence[str]) -> bool:
        pairs = zip(self.encode_batch(texts), self._tokenizer.encode_batch(texts), strict=True)
        return all(ours.tolist() == theirs for ours, theirs in pairs)

    def _is_plain(self, text: str) -> bool:
        if self._special and self._common in text and any(token in text for token in self._special):
            return False
        return self._normal_form is None or text.isascii() or unicodedata.is_normalized(self._normal_form, text)


_compared: tuple[Callable[[Sequence[str]], bool], list[Sequence[str]]]  # in a process that shares a comparison


def _start_comparison(*compared: Any) -> None:
    global _compared
    _compared = compared


def _compare(number: int) -> bool:
    agrees, shares = _compared
    return agrees(shares[number])


def _parts(pieces: Iterable[str], length: int) -> Iterator[str]:
    """A text in parts of `length` characters or more, which begin with a space between two letters of ASCII. The parts
    do not depend on the pieces that the text comes in."""
    text, searched = "", 0
    for piece in pieces:
        text += piece
        begin = 0
        while (place := _PLACE.search(text, max(begin + length, searched))) is not None:
            yield text[begin : place.start()]
            begin = place.start()
        text = text[begin:] if begin else text
        searched = len(text) - 1  # a space that ends it may be a place
    yield text


def fast_encoder(tokenizer: Tokenizer, workers: int = 1) -> FastEncoder | None:
    """An encoder that gives the tokenizer's ids; None where there is none. That is where it is no byte-level BPE,
    tiktoken is not installed, or some ids differ, which `workers` processes find out."""
    if not isinstance(tokenizer, JsonTokenizer):
        return None
    described = json.loads(tokenizer.to_json())
    pattern, normalizer = _pattern(described.get("pre_tokenizer")), described.get("normalizer")
    form: NormalForm | None = None if normalizer is None else _FORMS.get(normalizer.get("type"))
    if pattern is None or (normalizer is not None and form is None) or not _is_plain_bpe(described["model"]):
        return None
    try:
        import tiktoken
    except ImportError:
        return None
    letters = bytes_of_letters()
    tokens = described.get("added_tokens", ())
    added = {token["content"] for token in tokens}
    strips = any(token.get("lstrip") or token.get("rstrip") for token in tokens)
    try:
        ranks = {
            bytes(letters[letter] for letter in token): number
            for token, number in described["model"]["vocab"].items()
            if token not in added
        }
        encoding = tiktoken.Encoding("megacore", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except (KeyError, ValueError):  # a token that is no text of bytes, or a pattern that tiktoken does not have
        return None
    division = DIVISIONS.get(pattern)
    new = partial(FastEncoder, tokenizer, encoding, sorted(added), form, strips_spaces=strips, division=division)
    probes = list(characters(PROBED, " {0}a{0}1{0}."))
    for token in ranks:
        with contextlib.suppress(UnicodeDecodeError):  # part of a character is no text by itself
            probes += (token.decode(), f"x{token.decode()}y")
    # Another one is returned than is tried, which has the words of the user's texts only.
    return new() if new().agrees(probes, workers) else None


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    """Whether bytes are merged by the order of ids, and nothing else is done."""
    off = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
    if model.get("type") != "BPE" or any(model.get(name) for name in off):
        return False
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    merged = [model["vocab"].get("".join(pair), -1) for pair in pairs]
    return merged == sorted(merged) and -1 not in merged


def _pattern(described: dict[str, Any] | None) -> str | None:
    """The regular expression by which texts are divided before bytes are merged, if that is all that is done."""
    match described:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest} if rest.get("use_regex", True):
            return GPT2.pattern
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
