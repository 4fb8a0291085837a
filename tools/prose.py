"""English from Python's own files: docstrings and reference topics without code, tables and signatures."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_MARKUP = re.compile(r":[a-z:]+:(?=`)|`+|\*\*|(?<=\w)_(?=\s|$)")
_BULLET = re.compile(r"^(?:[-*+o]|\(?\d+[.)]|@\w+:?|:\w+[^:]*:)\s+")
_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_SENTENCE_END = re.compile(r"[a-z)\"'][.!?][\"')]?$")
_CODE = re.compile(r"[][_=<>{}|*\\#@^~+$%&/]|\w\.\w|\(\)")
# Code has few of these words; about every third word of English is one of them.
_FREQUENT = frozenset(
    re.findall(
        "[a-z]+",
        "a all an and any are as at be been but by can do does each either for from has have if in into is it its may "
        "more must no not of on one only or other same should so such than that the their then there these they this "
        "to two use used was when where which will with without would you your",
    )
)
_FEWEST_WORDS = 5
_FEWEST_ENGLISH = 0.85  # of all words, those of letters only
_FEWEST_FREQUENT = 0.25
_PUNCTUATION = "\"'“”‘’().,:;!?"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a source file, in its order. A file that is no Python of this version has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of "\d" in a string
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
        if isinstance(node, (*_DOCUMENTED, ast.If, ast.Try)):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of English in a text, each as one line.

    A paragraph is a run of lines with one indentation. It counts as English if it begins and ends as a sentence does,
    has no signs of code, nearly all of its words have letters only, and enough of them are frequent ones.
    """
    for (filled, _), lines in itertools.groupby(inspect.cleandoc(text).splitlines(), key=_kind):
        if filled:
            yield from filter(_is_english, map(_plain, _items(lines)))


def _kind(line: str) -> tuple[bool, int]:
    """Whether a line has text rather than nothing or a rule, and the column where its text begins, after a bullet."""
    bare = line.lstrip()
    return any(map(str.isalnum, line)), len(line) - len(_BULLET.sub("", bare))


def _items(lines: Iterable[str]) -> Iterator[str]:
    """Lines joined, except where a bullet begins another item."""
    item: list[str] = []
    for line in lines:
        bare = _BULLET.sub("", line.strip())
        if bare != line.strip() and item:
            yield " ".join(item)
            item = []
        item.append(bare)
    yield " ".join(item)


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub("", text).split())


def _is_english(text: str) -> bool:
    words = text.split()
    if len(words) < _FEWEST_WORDS or not text[0].isupper() or not _SENTENCE_END.search(text) or _CODE.search(text):
        return False
    english = [bare for word in words if _WORD.fullmatch(bare := word.strip(_PUNCTUATION))]
    frequent = sum(word.lower() in _FREQUENT for word in english)
    return len(english) >= _FEWEST_ENGLISH * len(words) and frequent >= _FEWEST_FREQUENT * len(words)
