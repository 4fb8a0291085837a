"""What a part of the check has measured, a JSON object a line: complete up to the moment at which the part ends,
whatever ends it. Standard library alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """Appends records to a file.

    Args:
        path: the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, kind: str, **figures: Any) -> None:
        """Write one record, so that it is in the file when this returns.

        Args:
            kind: what it describes: a test, a kernel, a training run, ...
            figures: its content, as JSON can hold it.
        """
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **figures}) + "\n")


def read_records(path: Path) -> list[Record]:
    """The records of a file, without a last line that was cut off; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its message, at most 200 characters."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"[:200]


def part_parser(description: str | None, *, device: str = "auto") -> argparse.ArgumentParser:
    """The flags that every part of the check has: --device, --small and --records.

    Args:
        description: of the part.
        device: where it runs by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device, help=f"where to run ({device})")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try out the measurement itself")
    parser.add_argument("--records", type=Path, metavar="FILE", help="append every figure to this file as JSON")
    return parser
