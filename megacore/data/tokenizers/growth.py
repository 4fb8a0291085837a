"""At most how many times as long the steps of a tokenizer.json make a text: a file of a few bytes can ask for any
amount of memory."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

_LONGEST_OF_UNICODE = 18  # characters that Unicode's own tables make of one (NFKC of U+FDFA), which counts as no growth


def growth(section: Any) -> float:
    """The growth of a text in a tokenizer.json's `normalizer` or `decoder`.

    What a replacement writes is replaced again only by a pattern that shares a character with it, so that any number
    of replacements of different characters grow a text no more than the largest of them.

    Args:
        section: as JSON has it, of a file that the library accepts.
    """
    written: list[tuple[str | None, float]] = []  # text of each step so far, None for any, and its growth
    for step in _flat(section):
        kind, pattern, content = step["type"], None, None
        if kind == "Replace":
            pattern, content = step["pattern"].get("String"), step["content"]
            own = len(content) / len(pattern) if pattern else len(content) + 1  # a regular expression may match nothing
        elif kind == "Prepend":
            own = len(step["prepend"]) + 1
        elif kind == "Precompiled":
            own = _longest_of_table(base64.b64decode(step["precompiled_charsmap"] or "")) / _LONGEST_OF_UNICODE
        else:
            own = 2 if kind == "ByteLevel" else 1
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


def _longest_of_table(table: bytes) -> float:
    """Characters of the longest text in a SentencePiece table: the size of a trie, the trie, texts that zeros end."""
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max((len(text.decode("utf-8", "replace")) for text in texts), default=0)
