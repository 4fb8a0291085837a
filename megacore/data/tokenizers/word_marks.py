"""What a vocabulary says about its tokens: which of them begin a word, and which BERT uses for what.

WordPiece marks the pieces inside a word (`##ing`), byte-level BPE (a space is `Ġ`) and SentencePiece (`▁`) the pieces
that begin one, and older BPE those that end one (`</w>`), which says nothing about beginnings by itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

# What BERT needs, and how it is called where no tokenizer_config.json says so: by BERT, and by RoBERTa.
ROLES: dict[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}
METASPACE = {"type": "Metaspace"}
_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # space, newline, tab, carriage return
_SPACE = "▁"


def role_tokens(vocabulary: Container[str], named: Mapping[str, str]) -> dict[str, str]:
    """The token of each role that a vocabulary has.

    Args:
        vocabulary: the texts of all tokens.
        named: the tokens that a configuration names, by role; one that is not in the vocabulary is passed over.
    """
    tokens = {}
    for role, usual in ROLES.items():
        for token in (named.get(role), *usual):
            if token is not None and token in vocabulary:
                tokens[role] = token
                break
    return tokens


def word_starts(pieces: Sequence[str], description: Mapping[str, Any]) -> list[bool] | None:
    """Whether each token begins a word, None where the tokenizer does not mark that.

    Args:
        pieces: the texts of all tokens, by id.
        description: what a tokenizer.json says.
    """
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
