"""At most how many times as long a tokenizer.json or a SentencePiece model makes a text: a file of a few bytes can ask
for any amount of memory."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

_LONGEST_OF_UNICODE = 18  # characters that Unicode's own tables make of one (NFKC of U+FDFA), which counts as no growth


def growth(section: Any) -> float:
    """The growth of a text in a tokenizer.json's `normalizer` or `decoder`, as JSON has it."""
    written: list[tuple[str | None, float]] = []  # text of each step so far, None for any, and its growth
    for step in _flat(section):
        kind, pattern, content = step["type"], None, None
        if kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            own = len(content) / len(pattern) if pattern else len(content) + 1  # a regular expression may match nothing
        elif kind == "Prepend":
            own = len(step["prepend"]) + 1
        elif kind == "Precompiled":
            own = _growth_of_table(base64.b64decode(step["precompiled_charsmap"] or ""))
        else:
            own = 2 if kind == "ByteLevel" else 1
        # Only what shares a character with a pattern is replaced again: replacements of different characters, however
        # many, grow a text no more than the largest of them.
        before = (size for text, size in written if not pattern or text is None or set(pattern) & set(text))
        size = max(1.0, own) * max(before, default=1.0)
        written = [*written, (content, size)] if pattern else [(None, max([size, *(size for _, size in written)]))]
    return max((size for _, size in written), default=1.0)


def _flat(section: Any) -> Iterator[dict[str, Any]]:
    """The steps, without sequences of them."""
    if section is None:
        return
    if section["type"] == "Sequence":
        for step in section.get("normalizers") or section.get("decoders") or ():
            yield from _flat(step)
    else:
        yield section


def growth_of_model(model: bytes) -> float:
    """The growth of a text that a SentencePiece model normalizes, or decodes. `model`: the message `ModelProto`, which
    the library accepts."""
    rules = (rule for number, rule in _parts(model) if number in (3, 5))  # normalizer_spec and denormalizer_spec
    tables = (table for rule in rules for number, table in _parts(rule) if number == 2)  # precompiled_charsmap
    return max(map(_growth_of_table, tables), default=1.0)


def _growth_of_table(table: bytes) -> float:
    """By the longest text in a SentencePiece table: the size of a trie, the trie, texts that zeros end."""
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max((len(text.decode("utf-8", "replace")) for text in texts), default=0) / _LONGEST_OF_UNICODE


def _parts(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The texts and messages in a protobuf message, each with the number of its field."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if (kind := key & 7) == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            at += {1: 8, 5: 4}.get(kind, 0)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, and the place behind it."""
    number = shift = 0
    while True:
        number |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return number, at
