"""What a vocabulary says: its tokenizer, where GPT-2 or BERT were published with it; which tokens begin a word; which
BERT uses for what. WordPiece marks the pieces inside a word (`##ing`), byte-level BPE (a space is `Ġ`) and
SentencePiece (`▁`) those that begin one, and older BPE those that end one (`</w>`)."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from megacore.safe_json import parse_json

# What BERT needs, and how it is called where no tokenizer_config.json says so: by BERT, and by RoBERTa.
ROLES: dict[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}
_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # space, newline, tab, carriage return
_SPACE = "▁"


def role_tokens(vocabulary: Container[str], named: Mapping[str, str]) -> dict[str, str]:
    """The token of each role that a vocabulary has. `vocabulary`: the texts of all tokens. `named`: the tokens that a
    configuration names, by role; one that is not in the vocabulary is passed over."""
    tokens = {}
    for role, usual in ROLES.items():
        for token in (named.get(role), *usual):
            if token is not None and token in vocabulary:
                tokens[role] = token
                break
    return tokens


def word_starts(pieces: Sequence[str], description: Mapping[str, Any]) -> list[bool] | None:
    """Whether each token begins a word, None where the tokenizer does not mark that. `pieces`: the texts of all tokens,
    by id."""
    inside = (description.get("model") or {}).get("continuing_subword_prefix")
    if inside:
        return [not piece.startswith(inside) for piece in pieces]
    kinds = set(_types(description))
    if "ByteLevel" in kinds:
        return [piece.startswith(_BYTE_LEVEL_SPACES) for piece in pieces]
    if kinds & {"Metaspace", "Unigram"} or any(piece.startswith(_SPACE) and len(piece) > 1 for piece in pieces):
        return [piece.startswith(_SPACE) for piece in pieces]
    return None


def _types(value: Any) -> Iterator[str]:
    """The types of all steps that a tokenizer.json consists of; the vocabulary is none of them."""
    if isinstance(value, Mapping):
        if isinstance(value.get("type"), str):
            yield value["type"]
        for key, inner in value.items():
            if key not in ("vocab", "merges", "added_tokens"):
                yield from _types(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _types(inner)


_GPT2_SPECIAL = "<|endoftext|>"
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_IN_BRACKETS = re.compile(r"\[[^\]]*\]")


def is_plain_vocabulary(data: bytes) -> bool:
    """Whether a JSON file maps tokens to ids, and nothing else."""
    try:
        values = parse_json(data, unique=False)
    except ValueError:
        return False
    return isinstance(values, dict) and bool(values) and all(type(number) is int for number in values.values())


def byte_level_bpe(vocabulary: bytes, merges: bytes) -> tokenizers.Tokenizer:
    """GPT-2's tokenizer (Radford et al. 2019, section 2.2). `merges`: that of merges.txt, a pair a line, perhaps after
    a line with the version."""
    lines = merges.decode("utf-8").splitlines()
    words = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    pairs = [(first, second) for first, second in words]
    backend = tokenizers.Tokenizer(models.BPE(json.loads(vocabulary), pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    if backend.token_to_id(_GPT2_SPECIAL) is not None:
        backend.add_special_tokens([AddedToken(_GPT2_SPECIAL, normalized=True)])
    return backend


def wordpiece(vocabulary: bytes) -> tokenizers.Tokenizer:
    """BERT's tokenizer (Devlin et al., arXiv 1810.04805), of lower-case text where its vocabulary has no capitals.
    `vocabulary`: the content of vocab.txt, a token a line."""
    tokens = vocabulary.decode("utf-8").splitlines()
    lower = not any(token != token.lower() for token in tokens if not _IN_BRACKETS.fullmatch(token))
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([token for token in _BERT_SPECIAL if token in set(tokens)])
    return backend
