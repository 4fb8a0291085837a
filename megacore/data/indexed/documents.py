"""From a chunk of a file to texts: JSON lines, plain text, and what is wrong with a line, located and never silent. A
line of conversations is an object with `messages`, a list of objects with `role` and `content`, or with `prompt` and
`completion`, each a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from megacore.data.indexed.corpus import Chunk
from megacore.data.tokenizers.chat_template import Message, Passage, Template
from megacore.errors import DataError

T = TypeVar("T")


class BadLine(NamedTuple):
    """A line that holds no usable document."""

    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


@dataclass(kw_only=True)
class Parsed:
    """The documents of a chunk."""

    texts: tuple[list[str], ...]  # one list per key, all of the same length
    bad: list[BadLine] = field(default_factory=list)  # lines without a usable document, in order


def parse(chunk: Chunk, keys: Sequence[str] = ("text",)) -> Parsed:
    """The texts of a chunk: a tuple of texts for every JSON line that holds all keys, one for a unit of plain text."""
    parsed = Parsed(texts=tuple([] for _ in (keys if chunk.unit == "json" else ("text",))))
    if chunk.unit == "json":
        for values in _readable(chunk, lambda line: _texts_of(line, keys), parsed.bad):
            for texts, value in zip(parsed.texts, values, strict=True):
                texts.append(value)
    elif chunk.unit == "line":  # blank lines separate nothing and are skipped
        parsed.texts[0].extend(_readable(chunk, _line_of_text, parsed.bad))
    else:  # a line that is not UTF-8 is left out of its document
        units = [list(_readable(chunk, _line_of_text, parsed.bad, blank=True))]
        if chunk.unit == "paragraph":
            units = [list(group) for filled, group in groupby(units[0], lambda line: bool(line.strip())) if filled]
        parsed.texts[0].extend(text for text in map("\n".join, units) if text.strip())
    return parsed


def _readable(chunk: Chunk, read: Callable[[bytes], T], bad: list[BadLine], *, blank: bool = False) -> Iterator[T]:
    """What `read` makes of each line, without blank ones unless these count; those of which it raises ValueError are
    added to `bad`. Raises DataError, with the line, where `read` does."""
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if not blank and (not line or line.isspace()):
            continue
        try:
            found = read(line)
        except DataError as error:
            raise DataError(f"{chunk.source}:{number}: {error}") from error
        except ValueError as error:
            bad.append(BadLine(chunk.source, number, str(error)))
        else:
            yield found


def _texts_of(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts of a JSON line."""
    record, values = json_record(line), list[str]()
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r} (it has {', '.join(map(repr, list(record)[:5])) or 'none'})")
        values.append(require_text(record[key], f"key {key!r}", escaped=b"\\u" in line))
    return values


def _line_of_text(line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None


def json_record(line: bytes, column: Callable[[int], int] = lambda number: number) -> dict[str, Any]:
    """The object of one JSON line. `column`: from a column of the line to the one that messages name. Raises ValueError
    that says what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {column(error.colno)})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets nested as deep
        raise ValueError("not usable JSON (too deep or too long a number)") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {type(record).__name__}")
    return record


def require_text(value: Any, name: str, *, escaped: bool = True) -> str:
    """A value of a JSON line that must be text, or ValueError; `escaped`: the line has escapes, one of which may be
    half a character."""
    if not isinstance(value, str):
        raise ValueError(f"{name} holds {type(value).__name__}, not text")
    try:
        if escaped:
            value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, which is no character") from None
    return value


def not_utf8(error: UnicodeDecodeError, before: int = 0) -> str:
    """What is wrong with a line, of which `before` bytes come before those that were decoded."""
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at column {before + error.start + 1})"


def rendered_lines(chunk: Chunk, template: Template) -> tuple[list[list[Passage]], list[BadLine]]:
    """The passages of each line of a chunk, and the lines that hold none. Raises DataError where the template cannot be
    used at all."""
    bad = list[BadLine]()
    return list(_readable(chunk, lambda line: _rendered(json_record(line), template), bad)), bad


def _rendered(record: dict[str, Any], template: Template) -> list[Passage]:
    """The passages of one line; ValueError says what is wrong with it."""
    if "messages" in record:
        return template.render(_messages(record["messages"]))
    missing = [key for key in ("prompt", "completion") if key not in record]
    if missing:
        raise ValueError(
            f"no key {' and no key '.join(map(repr, missing))}: a line has `messages`, or `prompt` and `completion` "
            f"(it has {', '.join(map(repr, list(record)[:5])) or 'none'})"
        )
    prompt, completion = (require_text(record[key], f"key {key!r}") for key in ("prompt", "completion"))
    if not completion:
        raise ValueError("key 'completion' is empty: there is nothing to predict")
    text = prompt + completion
    return [Passage(text=text, predicted=((len(prompt), len(text)),), ends=True)]


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("key 'messages' is not a list of messages, or is empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object but {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"message {number} has no {key!r}")
            require_text(message[key], f"{key!r} of message {number}")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise ValueError("no message of the role 'assistant' has content: there is nothing to predict")
    return messages
