"""Pictures beside a report: written before it is printed, and no reason to lose it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from megacore.commands.tool import os_problem
from megacore.drawing.canvas import Drawing, save
from megacore.errors import UserError
from megacore.files import output_is_closed


def report_with_pictures(
    pictures: Iterable[tuple[Path | None, Callable[[], Drawing]]], report: Callable[[], None]
) -> None:
    """Write pictures, then print the report, whose reader may stop reading: `| head`. A file of None was not asked for.
    Raises UserError with pictures that could not be drawn or written, after the rest."""
    problems = []
    for path, draw in pictures:
        if path is None:
            continue
        try:
            save(draw(), path)
        except OSError as error:
            problems.append(os_problem(error))
        except UserError as error:
            problems.append(str(error))
        else:
            print(f"wrote {path}", file=sys.stderr)
    try:
        report()
    except BrokenPipeError:
        if not problems:
            raise
    if problems:
        # The report may have no reader left, which must not hide the problems with the pictures.
        output_is_closed()
        raise UserError("; ".join(problems))
