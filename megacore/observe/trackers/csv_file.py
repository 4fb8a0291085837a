"""`--csv`: metrics.csv in the output directory, a row per record of metrics.jsonl and a column per metric. A run that
resumes, that rolls back, or that gets a new metric writes it anew."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.files import GrowingFile, open_regular, replace_bytes
from megacore.observe.records import finite, json_lines
from megacore.observe.trackers.tracker import RunInfo

NAME = "metrics.csv"


class CsvFile:
    """A tracker that writes metrics.csv. A number that is not finite, or not in a record, is an empty cell."""

    flag = "--csv"

    def open(self, run: RunInfo) -> None:
        self._path = run.output_dir / NAME
        self._columns: list[str] = []
        # From metrics.jsonl, which is complete: this file may be of a run without the flag, or be cut off.
        self._write_all([r for r in _records(run.output_dir / "metrics.jsonl") if r["step"] <= run.first_step])

    def write(self, record: Mapping[str, Any]) -> None:
        if not record.keys() <= set(self._columns):
            # A new column changes the header, and so every row.
            self._write_all([*self._written(), record])
            return
        self._file.append(self._rows([record]).encode())

    def rewind(self, step: int) -> None:
        self._write_all([row for row in self._written() if int(row["step"]) <= step])

    def close(self, *, failed: bool) -> None:
        """Nothing is left: every row is written at once."""

    def _written(self) -> list[dict[str, str]]:
        self._file.restore()
        with self._path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def _write_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._columns += [key for key in dict.fromkeys(k for r in records for k in r) if key not in self._columns]
        header = ",".join(self._columns) + "\n" if self._columns else ""
        replace_bytes(self._path, (header + self._rows(records)).encode(), durable=False)
        self._file = GrowingFile(self._path)

    def _rows(self, records: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        writer.writerows({key: finite(value) for key, value in record.items()} for record in records)
        return text.getvalue()


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, which the run has checked; it may be writing the last line just now."""
    if not path.exists():
        return []
    with open_regular(path) as file:
        return [record for line, record in json_lines(file) if record is not None and line.endswith(b"\n")]
