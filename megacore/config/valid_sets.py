"""The notation of --valid-sets: NAME=PREFIX NAME=PREFIX ..., the validation sets that are evaluated by themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_EXAMPLE = "--valid-sets wiki=data/wiki_text_document code=data/code_text_document"


def parse_valid_sets(words: Sequence[str]) -> dict[str, str]:
    """The prefix of each set by its name; words that `valid_set_problems` refuses are left out."""
    pairs = (word.partition("=") for word in words)
    return {name: prefix for name, _, prefix in pairs if _NAME.fullmatch(name) and prefix.strip()}


def valid_set_problems(words: Sequence[str]) -> Iterator[str]:
    """What is wrong with the words of --valid-sets, a message each."""
    for word in words:
        name, equals, prefix = word.partition("=")
        if not equals or not prefix.strip():
            yield f"--valid-sets {word} is not NAME=PREFIX: use, for example, {_EXAMPLE}"
        elif not _NAME.fullmatch(name):
            yield (
                f"--valid-sets {word}: the name {name!r} becomes part of a metric's name, and must be 1 to 64 letters, "
                f"digits, '_', '.' or '-', the first a letter or digit: use, for example, {_EXAMPLE}"
            )
    names = Counter(word.partition("=")[0] for word in words if "=" in word)
    for name, count in names.items():
        if count > 1:
            yield f"--valid-sets has the name {name} {count} times: give each set its own name"
