"""Measured steps of any trainer as a CSV file: a row for each layout, a column for each flag, and what was measured.

Columns are flags by their names (`tp`, `micro_batch_size`), by words of other tables (`tensor parallelism`, `# GPUs`),
or `flags`, a part of a command line. Everything wrong with the file is found before anything is planned.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacore.config import Config
from megacore.config.fields import FieldInfo
from megacore.config.flags import all_fields
from megacore.config.messages import counted, did_you_mean, one_of
from megacore.config.spelling import flag_and_value
from megacore.files import read_bounded
from megacore.plan.plan_json import REPORT

# Units of what is measured, by column. A row has one of them.
MEASURES = {
    "seconds": "seconds of a step",
    "milliseconds": "milliseconds of a step",
    "tokens_per_second": "tokens per second of all GPUs",
    "tokens_per_second_per_gpu": "tokens per second of a GPU",
    "tflops_per_gpu": "model TFLOP/s of a GPU",
}
_LABELS = {"model", "name", "source", "note", "parameters_billion"}
_CLUSTERS = {"cluster", "gpu", "gpu_type"}  # which must be the same in all rows
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MOST_BYTES, _MOST_ROWS = 1 << 22, 2000
_LEAST_MEASURED, _MOST_MEASURED = 1e-6, 1e12


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """A row of the file.

    Attributes:
        line: its number.
        fields: that its columns set.
        flags: the same as words of a command line, `--world-size` among them.
        measure: of `MEASURES`.
        value: measured.
    """

    line: int
    fields: frozenset[str]
    flags: tuple[str, ...]
    measure: str
    value: float


class RowFile:
    """What is in a file of measured steps.

    Args:
        path: of the CSV file.
        kind: of the configuration whose fields are columns.
        cluster: of --cluster, which a column of GPUs must name.

    Attributes:
        rows: those that could be read.
    """

    def __init__(self, path: Path, kind: type[Config], cluster: str | None) -> None:
        self.path, self.rows = path, list[FileRow]()
        self._wrong, self._count = dict[str, list[int]](), 0
        self._fields, self._cluster = all_fields(kind), cluster
        try:
            text = read_bounded(path, _MOST_BYTES).decode("utf-8-sig")
        except FileNotFoundError:
            self.refuse("there is no such file: write one with a header, as in tp,pp,dp,seconds")
        except OSError as error:
            self.refuse(f"{(error.strerror or '').lower()}: give a CSV file, as in tp,pp,dp,seconds")
        except UnicodeDecodeError:
            self.refuse("is not text in UTF-8: give a CSV file, as in tp,pp,dp,seconds")
        else:
            self._read(text)

    def refuse(self, why: str, *lines: int) -> None:
        """Note what is wrong with the file, or with lines of it; lines of one message are told together."""
        self._wrong.setdefault(why, []).extend(lines)
        self._count += 1

    @property
    def problems(self) -> list[str]:
        """What is wrong."""
        places = {
            why: "" if not lines else f", line {lines[0]}" if len(lines) == 1 else f", lines {_listed(lines)}"
            for why, lines in self._wrong.items()
        }
        return [f"--fit {self.path}{place}: {why}" for why, place in places.items()]

    def _read(self, text: str) -> None:
        try:
            lines = [(line, cells) for line, cells in _lines(text) if any(cell.strip() for cell in cells)]
        except csv.Error as error:
            self.refuse(f"{error}: give a CSV file, as in tp,pp,dp,seconds")
            return
        header = next((place for place, (_, cells) in enumerate(lines) if not self._is_comment(cells)), None)
        if header is None:
            self.refuse("has no rows: write a header and a row for each measured step, as in tp,pp,dp,seconds")
            return
        if len(lines[header][1]) == 1 and ";" in lines[header][1][0]:
            self.refuse("columns are separated by semicolons: use commas", lines[header][0])
            return
        columns = [self._column(cell) for cell in lines[header][1]]
        body = [(line, cells) for line, cells in lines[header + 1 :] if not cells[0].lstrip().startswith("#")]
        accepted = self._accepts(columns, line=lines[header][0])
        if len(body) > _MOST_ROWS:
            self.refuse(f"has {len(body):,} rows: leave at most {_MOST_ROWS:,}, as every twentieth one")
            return
        self._one_cluster(columns, body)
        for line, cells in body:
            if len(cells) != len(columns):
                self.refuse(f"{counted(len(cells), 'cell')}: give {len(columns)}, as the header has", line)
            elif (
                row := self._row(line, dict(zip(columns, map(str.strip, cells), strict=True)))
            ) is not None and accepted:
                self.rows.append(row)

    def _is_comment(self, cells: Sequence[str]) -> bool:
        """Whether a line is one, and no header that begins with `# GPUs`."""
        return cells[0].lstrip().startswith("#") and not all(self._is_known(self._column(cell)) for cell in cells)

    def _column(self, cell: str) -> str:
        name = re.sub(r"[^a-z0-9]+", "_", cell.lower()).strip("_")
        name = REPORT["columns"].get(name, name)
        aliases = (info.name for info in self._fields.values() if f"--{name.replace('_', '-')}" in info.aliases)
        return name if name in self._fields else next(aliases, name)

    def _is_known(self, column: str) -> bool:
        return column in {*self._fields, *MEASURES, *_LABELS, *_CLUSTERS, "flags", "world_size"}

    def _accepts(self, columns: Sequence[str], *, line: int) -> bool:
        before = self._count
        for name in columns:
            if not self._is_known(name):
                near = did_you_mean(name, [*self._fields, *MEASURES, *_LABELS])
                self.refuse(
                    f"column {name} is no flag and no measure{near}: rename it, as in tp, or leave it out", line
                )
        for name, count in Counter(columns).items():
            if count > 1:
                self.refuse(f"{counted(count, 'column')} are {name}: keep one of them", line)
        measures = [name for name in columns if name in MEASURES]
        if len(measures) != 1:
            said = f"{one_of(measures)} are all measured: keep one of them" if measures else "no column is measured"
            self.refuse(said + ("" if measures else f": add one of {', '.join(MEASURES)}, as in seconds"), line)
        return self._count == before

    def _one_cluster(self, columns: Sequence[str], body: Sequence[tuple[int, Sequence[str]]]) -> None:
        """That all rows are of the GPUs of --cluster."""
        for place, name in enumerate(columns):
            if name not in _CLUSTERS:
                continue
            named: dict[str, list[int]] = {}
            for line, cells in body:
                named.setdefault(cells[place].strip() if place < len(cells) else "", []).append(line)
            usual = self._cluster or max(named, key=lambda gpu: len(named[gpu]), default="")
            for gpu, lines in named.items():
                if gpu not in ("", usual):
                    self.refuse(f"{name} {gpu} is not --cluster {usual}: fit it from a file of its own", *lines)

    def _row(self, line: int, cells: Mapping[str, str]) -> FileRow | None:
        before = self._count
        words, fields = list[str](), set[str]()
        measure, value = "", math.nan
        for name, text in cells.items():
            if name in MEASURES:
                measure, value = name, _number(text)
                if not _LEAST_MEASURED <= value <= _MOST_MEASURED:
                    wrong = f"{name} {text} must be a positive number" if text else f"{name} is missing"
                    self.refuse(f"{wrong}: give {MEASURES[name]}, as in 4.2, or leave the row out", line)
            elif name == "flags":
                try:
                    words += shlex.split(text)
                except ValueError as error:
                    self.refuse(f"flags {text}: {str(error).lower()}: write them as on a command line", line)
            elif text and self._is_known(name) and name not in _LABELS | _CLUSTERS:
                fields.add(name)
                words += self._words(line, name, text)
        if self._count > before:
            return None
        return FileRow(line=line, fields=frozenset(fields), flags=tuple(words), measure=measure, value=value)

    def _words(self, line: int, name: str, text: str) -> list[str]:
        info: FieldInfo | None = self._fields.get(name)
        if info is None or info.kind is not bool:
            return [f"--{name.replace('_', '-')}", *text.split()]
        if text.lower() not in _SWITCHES:
            self.refuse(f"{name} {text} must be true or false: use {name} true", line)
            return []
        return [flag_and_value(name, _SWITCHES[text.lower()])]


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    for cells in reader:
        if cells:
            yield reader.line_num, cells


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _listed(lines: Sequence[int]) -> str:
    """`3, 4 and 12 more`."""
    shown = ", ".join(map(str, lines[:3]))
    return shown if len(lines) <= 3 else f"{shown} and {len(lines) - 3} more"
