"""JSON lines too long to hold in memory: kept in a temporary file, checked, and read in pieces of text. What a line
means is left to the `json` module. A line is copied without the contents of its long strings, each replaced by a short
name; the copy is parsed as any line is. The contents are decoded a piece at a time, by the same module."""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megacore.data.indexed.documents import json_record, not_utf8, require_text
from megacore.errors import DataError

PIECE = 1 << 20  # bytes that are read at once
LONG_STRING = 1 << 16  # bytes of a string that is not copied
LONGEST_COPY = 1 << 23  # bytes of a line without its long strings
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to the quote that ends a string
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE = 6  # characters of \uXXXX


@dataclass(frozen=True)
class _Span:
    """The content of a long string: bytes of the line, and the place of its name in the copy, in bytes."""

    begin: int
    end: int
    place: int
    name: bytes


def unnamed_file(folder: Path) -> BinaryIO:
    """A temporary file that ends with the process, in a directory or the nearest one above that exists. Raises
    DataError where the directory cannot be written to."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        return tempfile.TemporaryFile(dir=there)
    except OSError as error:
        raise DataError(f"{there}: cannot write there ({error.strerror})") from error


class LongText:
    """A text of a long line; iterating gives it in pieces, any number of times."""

    def __init__(self, line: LongLine, content: _Span | str) -> None:
        self._line, self._content = line, content

    def __iter__(self) -> Iterator[str]:
        if isinstance(self._content, str):
            yield self._content
            return
        for piece in self._line.literals(self._content):
            yield json.loads(f'"{piece}"')


class LongLine:
    """A line of a file in a temporary file. `folder`: where the temporary file is made."""

    def __init__(self, folder: Path) -> None:
        self._file = unnamed_file(folder)
        self.size = 0

    def write(self, data: bytes | bytearray) -> None:
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        self._file.close()

    def read(self) -> bytes:
        self._file.seek(0)
        return self._file.read()

    def texts(self, keys: Sequence[str]) -> list[LongText] | None:
        """The texts of the keys; None if the line is long without its long strings too. Raises ValueError that says
        what is wrong with the line, as for a short one."""
        copied = self._copy()
        if copied is None:
            return None
        copy, spans = copied
        whole = {span.name.decode(): self._has_whole_characters(span, copy, spans) for span in spans}
        record = self._parse(copy, spans)
        named = {span.name.decode(): span for span in spans}
        texts = []
        for key in keys:
            if key not in record:
                known = ("..." if name in named else repr(name) for name in list(record)[:5])
                raise ValueError(f"no key {key!r} (it has {', '.join(known) or 'none'})")
            value = require_text(record[key], f"key {key!r}")
            if not whole.get(value, True):
                require_text("\ud800", f"key {key!r}")
            texts.append(LongText(self, named.get(value, value)))
        return texts

    def literals(self, span: _Span) -> Iterator[str]:
        """The content of a string as it is written, in pieces that end where no character or escape is divided."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        kept = ""
        for block in self._blocks(span.begin, span.end):
            text = kept + decoder.decode(block)
            cut = _end_of_characters(text)
            if cut:
                yield text[:cut]
            kept = text[cut:]
        if kept:
            yield kept

    def _blocks(self, begin: int, end: int) -> Iterator[bytes]:
        while block := self._read(begin, min(PIECE, end - begin)):
            begin += len(block)
            yield block

    def _read(self, begin: int, size: int) -> bytes:
        """Bytes of the line, without the newline that ends it."""
        self._file.seek(begin)
        return self._file.read(size).removesuffix(b"\n")

    def _copy(self) -> tuple[bytes, list[_Span]] | None:
        """The line with names for its long strings, and these strings; None if even that is long. Raises ValueError
        where the line is not UTF-8."""
        secret, decoder = os.urandom(16).hex(), codecs.getincrementaldecoder("utf-8")()
        copy, spans = bytearray(), list[_Span]()
        begin = -1  # of the content of the string that is being read; -1 outside of strings
        held = bytearray()  # the content so far, while it is short
        for offset, block in self._whole_escapes():
            self._check_utf8(decoder, block, offset)
            place = 0
            while place < len(block):
                if begin < 0:
                    quote = block.find(b'"', place) + 1
                    copy += block[place : quote or len(block)]
                    place = quote or len(block)
                    begin = offset + place if quote else -1
                    if len(copy) > LONGEST_COPY:
                        return None
                    continue
                match = _INSIDE.match(block, place)
                assert match is not None, "the pattern matches nothing too"
                if len(held) <= LONG_STRING:
                    held += match[0]
                place = match.end()
                if place < len(block):
                    _end_string(copy, spans, held, begin, offset + place, secret)
                    begin, held = -1, bytearray()
                    copy += block[place : place + 1]
                    place += 1
        self._check_utf8(decoder, b"", self.size, final=True)
        if begin >= 0:  # nothing ends it
            _end_string(copy, spans, held, begin, self.size, secret)
        return bytes(copy), spans

    def _whole_escapes(self) -> Iterator[tuple[int, bytes]]:
        """Blocks that end with no unfinished escape, but for the last, and where they begin."""
        offset = 0
        while block := self._read(offset, PIECE):
            if (len(block) - len(block.rstrip(b"\\"))) % 2:
                block += self._read(offset + len(block), 1)
            yield offset, block
            offset += len(block)

    def _check_utf8(
        self, decoder: codecs.IncrementalDecoder, block: bytes, offset: int, *, final: bool = False
    ) -> None:
        unfinished = len(decoder.getstate()[0])
        try:
            decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise ValueError(not_utf8(error, offset - unfinished)) from None

    def _has_whole_characters(self, span: _Span, copy: bytes, spans: Sequence[_Span]) -> bool:
        """Whether a long string has no half of a surrogate pair. Raises ValueError where it is not a JSON string, or
        something before it is not JSON."""
        whole, before = True, 0
        for piece in self.literals(span):
            try:
                text = json.loads(f'"{piece}"')
            except ValueError:
                end = span.place + len(span.name)
                self._parse(copy[: span.place] + piece.encode() + copy[end:], spans, (span, before))
                raise AssertionError("a piece that is no text makes no line") from None
            before += len(piece)
            if "\\u" in piece:
                try:
                    text.encode()
                except UnicodeEncodeError:
                    whole = False
        return whole

    def _parse(self, copy: bytes, spans: Sequence[_Span], shown: tuple[_Span, int] | None = None) -> dict[str, Any]:
        """The object of a copy. `shown`: one of which a piece is in the copy, not its name; and the characters before
        the piece. Raises ValueError that says what is wrong, with the column in the line."""
        return json_record(copy, lambda column: column + self._left_out(copy, column, spans, shown))

    def _left_out(self, copy: bytes, column: int, spans: Sequence[_Span], shown: tuple[_Span, int] | None) -> int:
        """How many more characters the line has than the copy, before a column of the copy."""
        added = 0
        for span in spans:
            if len(copy[: span.place].decode()) > column - 1:
                break
            if shown is not None and span is shown[0]:
                return added + shown[1]
            added += sum(len(piece) for piece in self.literals(span)) - len(span.name)
        return added


def _end_string(copy: bytearray, spans: list[_Span], held: bytearray, begin: int, end: int, secret: str) -> None:
    """Add the content of a string to the copy, or the name of a long one."""
    if len(held) <= LONG_STRING:
        copy += held
        return
    name = f"{secret}-{len(spans)}".encode()
    spans.append(_Span(begin, end, len(copy), name))
    copy += name


def _end_of_characters(text: str) -> int:
    """Where the last whole character of a string's literal ends; what begins there may be part of one."""
    cut = len(text)
    last = text.rfind("\\", max(0, cut - _ESCAPE))
    if last >= 0 and _begins_escape(text, last):
        size = _ESCAPE if text[last + 1 : last + 2] == "u" else 2
        if last + size > cut:
            cut = last
    high = cut - _ESCAPE
    if high >= 0 and _HIGH_SURROGATE.match(text, high) and _begins_escape(text, high):
        return high  # the other half may follow
    return cut


def _begins_escape(text: str, place: int) -> bool:
    """Whether the backslash at a place begins an escape, or ends one."""
    before = text[: place + 1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
