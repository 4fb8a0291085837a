"""Fill-in-the-middle (Bavarian et al. 2022, arXiv 2207.14255): documents whose middle comes last, in training samples.

A document is cut at two places and put together again as PREFIX prefix SUFFIX suffix MIDDLE middle (PSM), or as PREFIX
SUFFIX suffix MIDDLE prefix middle (SPM, its second variant), after the sample's tokens are cut from the stream
(context-level, section 3 of the paper). An end-of-document token stays at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megacore.data.gpt.shuffling import generator
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import DataError

KNOWN_SENTINELS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),  # StarCoder, and the defaults of Megatron-LM
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),  # SantaCoder
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),  # Qwen2.5-Coder, CodeGemma
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),  # DeepSeek-Coder
    ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"),  # Codestral
)
"""Names of the three tokens, tried in this order: those that precede the prefix, the middle and the suffix."""
_USE = 3  # this use of the seed's random numbers
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no UTF-8 decode to
Tokens = NDArray[np.int64]
Flags = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """Ids of the tokens that precede the prefix, the middle and the suffix."""

    prefix: int
    middle: int
    suffix: int


def sentinels_of(tokenizer: Tokenizer, names: Sequence[str | None] = (None, None, None)) -> Sentinels:
    """The sentinels in a tokenizer's vocabulary. `names`: of the prefix, the middle and the suffix; None: those of the
    first of `KNOWN_SENTINELS` that fits. Raises DataError where the vocabulary has no such tokens, or two of them are
    one."""
    wanted = [tuple(given or known for given, known in zip(names, each, strict=True)) for each in KNOWN_SENTINELS]
    asked = {name for each in wanted for name in each}
    ids = {piece: i for i in range(tokenizer.vocab_size) if (piece := tokenizer.piece(i)) in asked}
    fitting = next((each for each in wanted if all(name in ids for name in each)), None)
    flags = "--fim-rate prefix-token, middle-token and suffix-token"
    if fitting is None:
        missing = [name for name in names if name is not None and name not in ids]
        known = ", ".join(known for given, known in zip(names, KNOWN_SENTINELS[0], strict=True) if given is None)
        lacks = ", ".join(missing) if missing else f"{known}, and those of other models that are known"
        raise DataError(
            f"--fim-rate needs three tokens, but the vocabulary of --tokenizer lacks {lacks}: name tokens that it has "
            f"with all of {flags}, or add them to the tokenizer"
        )
    if len(set(fitting)) < len(fitting):
        raise DataError(f"--fim-rate needs three different tokens, and has {' '.join(fitting)}: use others for {flags}")
    prefix, middle, suffix = (ids[name] for name in fitting)
    return Sentinels(prefix=prefix, middle=middle, suffix=suffix)


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Permutes the documents of samples, as a function of (seed, number, sample) only."""

    rate: float  # probability of a document to be permuted
    spm_rate: float  # of those, the probability of suffix-prefix-middle
    sentinels: Sentinels  # the three tokens
    eod: int | None  # id of the end-of-document token, which stays at the end of its document, if there is one
    seed: int  # of the random numbers
    number: int = 0  # of the dataset among those that are blended, so that each draws its own
    tokenizer: Tokenizer | None = None  # cuts documents at characters; None cuts between tokens

    def window(
        self, index: int, tokens: Tokens, sizes: Sequence[int], predicted: Flags | None
    ) -> tuple[Tokens, list[int], Flags]:
        """Permute the documents of a window of n tokens and restore its length. `sizes`: tokens of each document.
        `predicted`: [n] whether a token counts in the loss; None: all. Returns tokens [n], the documents' new sizes
        without those of 0, and `predicted` [n]."""
        rng = generator(self.seed, index, _USE, self.number)
        flags = np.ones(len(tokens), np.float32) if predicted is None else predicted
        ends = np.cumsum(sizes)
        pieces = [
            self._document(rng, tokens[end - size : end], flags[end - size : end], is_masked=predicted is not None)
            for size, end in zip(sizes, ends.tolist(), strict=True)
        ]
        made, counted = (np.concatenate([piece[which] for piece in pieces])[: len(tokens)] for which in (0, 1))
        lacking = len(tokens) - len(made)
        stops = np.minimum(np.cumsum([len(piece[0]) for piece in pieces]), len(tokens))
        # Padding counts to the last document, so that attention needs no document of its own for it.
        stops[-1] += lacking
        kept = [size for size in np.diff(stops, prepend=0).tolist() if size]
        padding = np.full(lacking, 0 if self.eod is None else self.eod)
        return np.append(made, padding), kept, np.append(counted, np.zeros(lacking, np.float32))

    def document(self, index: int, tokens: Tokens, predicted: Flags | None) -> tuple[Tokens, Flags]:
        """Permute the one document of a sample, which becomes longer. `tokens`: [n]. `predicted`: [n] whether a token
        counts in the loss; None: all."""
        flags = np.ones(len(tokens), np.float32) if predicted is None else predicted
        rng = generator(self.seed, index, _USE, self.number)
        return self._document(rng, tokens, flags, is_masked=predicted is not None)

    def _document(
        self, rng: np.random.Generator, tokens: Tokens, predicted: Flags, *, is_masked: bool
    ) -> tuple[Tokens, Flags]:
        length = len(tokens) - bool(len(tokens) and tokens[-1] == self.eod)
        if length == 0 or rng.random() >= self.rate:
            return tokens, predicted
        is_spm, places = rng.random() < self.spm_rate, np.sort(rng.random(2))
        parts = None if is_masked else self._at_characters(tokens[:length], places)
        if parts is not None:
            counted = [np.ones(len(part), np.float32) for part in parts]
        else:
            cuts = (places * (length + 1)).astype(np.int64)
            parts, counted = np.split(tokens[:length], cuts), np.split(predicted[:length], cuts)
        join = np.full(1, 0.0 if is_masked else 1.0, np.float32)  # a loss mask marks text; a sentinel is none of it
        named = self.sentinels
        prefix, middle, suffix = (np.array([number]) for number in (named.prefix, named.middle, named.suffix))
        if is_spm:
            made = [prefix, suffix, parts[2], middle, parts[0], parts[1]]
            flags = [join, join, counted[2], join, counted[0], counted[1]]
        else:
            made = [prefix, parts[0], suffix, parts[2], middle, parts[1]]
            flags = [join, counted[0], join, counted[2], join, counted[1]]
        return np.concatenate([*made, tokens[length:]]), np.concatenate([*flags, predicted[length:]])

    def _at_characters(self, tokens: Tokens, places: NDArray[np.float64]) -> list[Tokens] | None:
        """Prefix, middle and suffix, cut at characters; None where the tokenizer would not give back the text."""
        if self.tokenizer is None or not self.tokenizer.special_ids.isdisjoint(ids := tokens.tolist()):
            return None
        text = self.tokenizer.decode(ids)
        if _UNREADABLE in text:
            return None
        first, second = (int(place * (len(text) + 1)) for place in places)
        parts = [self.tokenizer.encode(part) for part in (text[:first], text[first:second], text[second:])]
        if self.tokenizer.decode([*parts[0], *parts[1], *parts[2]]) != text:
            return None
        return [np.array(part, np.int64) for part in parts]
