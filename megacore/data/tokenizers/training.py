"""Training tokenizers: byte-level BPE and WordPiece through `tokenizers`, unigram and BPE through SentencePiece. All
are deterministic and never larger than asked for. All but WordPiece, which is for BERT, are lossless:
`decode(encode(text)) == text` for any text."""

from __future__ import annotations

import io
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megacore.data.tokenizers.tokenizer import END_OF_TEXT, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from megacore.errors import DataError

TokenizerKind = Literal["bpe", "unigram", "wordpiece", "sentencepiece-bpe"]
# SentencePiece drops longer sentences without a word; longer lines are cut to this many characters.
_PIECE_CHARACTERS = 4096
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MOST_CHARACTERS = 1000  # of a WordPiece alphabet


def train_tokenizer(
    texts: Iterable[str], kind: TokenizerKind, vocab_size: int, *, lowercase: bool = False, show_progress: bool = False
) -> Tokenizer:
    """Train a tokenizer on documents, which are iterated more than once. `vocab_size`: the most tokens, special ones
    included. `lowercase`: WordPiece ignores case and accents. Raises DataError where there is no text, or the
    vocabulary is too small for the kind or too large for the text."""
    if not any(texts):  # documents may be there, and all be empty
        raise DataError("the input files hold no text to train on")
    if kind == "bpe":
        tokenizer: Tokenizer = _train_bpe(texts, vocab_size, show_progress)
    elif kind == "wordpiece":
        tokenizer = _train_wordpiece(texts, vocab_size, lowercase, show_progress)
    else:
        tokenizer = _train_sentencepiece(texts, kind.removeprefix("sentencepiece-"), vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size} is too small for this text: only its characters take {tokenizer.vocab_size}"
        )
    return tokenizer


def _train_bpe(texts: Iterable[str], vocab_size: int, show_progress: bool) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 1
    if vocab_size < smallest:
        raise DataError(f"--vocab-size {vocab_size} must be at least {smallest} for bpe: 256 bytes and {END_OF_TEXT}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=show_progress,
    )
    backend.train_from_iterator(texts, trainer)
    return JsonTokenizer(backend, END_OF_TEXT)


def _train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool, show_progress: bool) -> Tokenizer:
    smallest = len(WORDPIECE_TOKENS) + 2
    if vocab_size < smallest:
        raise DataError(f"--vocab-size {vocab_size} must be at least {smallest} for wordpiece")
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet, inner = _alphabet(texts, normalizer, vocab_size - len(WORDPIECE_TOKENS))
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # As special tokens they are numbered first, in this order; the tokenizer below has only the real ones.
        special_tokens=[*WORDPIECE_TOKENS, *(f"##{character}" for character in inner)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=show_progress,
    )
    learner.train_from_iterator(texts, trainer)
    backend = tokenizers.Tokenizer(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(list(WORDPIECE_TOKENS))
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return JsonTokenizer(backend, "[SEP]")


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
    # Ties go by code point. The trainer itself numbers the characters inside words as a hash map gives them and breaks
    # ties by these numbers, so that two runs would make two vocabularies: it gets all of them beforehand.
    for character, _ in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        room -= 2 if character in inner else 1
        if room < 0 or len(chosen) == _MOST_CHARACTERS:
            break
        chosen.append(character)
    return sorted(chosen), sorted(inner.intersection(chosen))


def _train_sentencepiece(texts: Iterable[str], model_type: str, vocab_size: int) -> Tokenizer:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_pieces(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            # A small corpus gives a smaller vocabulary rather than an error; only unigram can do that.
            hard_vocab_limit=model_type != "unigram",
            # Lossless: no normalization, white space kept as it is, bytes for characters outside the vocabulary.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            max_sentence_length=8 * _PIECE_CHARACTERS,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            num_threads=16,  # decides the order of floating-point sums, and with it the result: not the machine's
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[-1].strip() if str(error).strip() else type(error).__name__
        raise DataError(f"--vocab-size {vocab_size}: SentencePiece cannot train on this text ({reason})") from error
    return SentencePieceTokenizer(model.getvalue())


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Lines, cut where they are too long for SentencePiece."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _PIECE_CHARACTERS):
                # SentencePiece's trainer complains of every line with a zero byte.
                yield line[start : start + _PIECE_CHARACTERS].replace("\0", " ")
