"""A WordPiece vocabulary that is the same every time.

The trainer of `tokenizers` numbers the characters inside words (`##x`) as it meets them in a hash map, and breaks ties
by these numbers: two runs give two vocabularies. Handing it all of them beforehand, in order, leaves nothing to chance.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MOST_CHARACTERS = 1000


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, *, lowercase: bool, show_progress: bool
) -> tokenizers.Tokenizer:
    """Train a WordPiece tokenizer as BERT uses it.

    Args:
        texts: Documents; iterated twice.
        vocab_size: Largest number of tokens, with room for `WORDPIECE_TOKENS`.
        lowercase: Whether case and accents are ignored.
        show_progress: Whether the library draws its bars.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet, inner = _alphabet(texts, normalizer, vocab_size - len(WORDPIECE_TOKENS))
    learner = _tokenizer(models.WordPiece(unk_token="[UNK]"), normalizer)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # As special tokens they are numbered first, in this order; the tokenizer below has only the real ones.
        special_tokens=[*WORDPIECE_TOKENS, *(f"##{character}" for character in inner)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=show_progress,
    )
    learner.train_from_iterator(texts, trainer)
    backend = _tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"), normalizer)
    backend.add_special_tokens(list(WORDPIECE_TOKENS))
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return backend


def _tokenizer(model: models.WordPiece, normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


class _Separators(dict[int, str]):
    """A table for str.translate that puts spaces around punctuation, as BERT's pre-tokenizer splits there."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        separate = character in string.punctuation or unicodedata.category(character).startswith("P")
        self[code] = f" {character} " if separate else character
        return self[code]


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer, room: int) -> tuple[list[str], list[str]]:
    """The commonest characters, and those of them that occur inside words, which take a second token each."""
    words: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    inner: set[str] = set()
    table = _Separators()

    def tally() -> None:
        for word, count in words.items():
            inner.update(word[1:])
            for character in word:
                characters[character] += count
        words.clear()

    for text in texts:
        words.update(normalizer.normalize_str(text).translate(table).split())
        if len(words) > 1_000_000:  # bounds the memory, not the result
            tally()
    tally()
    chosen: list[str] = []
    for character, _ in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        room -= 2 if character in inner else 1
        if room < 0 or len(chosen) == _MOST_CHARACTERS:
            break
        chosen.append(character)
    return sorted(chosen), sorted(inner.intersection(chosen))
