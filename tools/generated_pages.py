"""The parts of the documentation that a tool writes: each is between two marker lines of a page, and printed, written
there or compared with what is there."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a newline at its end. A bar in a cell is escaped, or it would end the cell."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    cells = ([str(cell).replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def written_reference(
    argv: Sequence[str], what: str, text: Callable[[], str], markers: tuple[str, str], *, prog: str | None = None
) -> int:
    """The command line of a tool that writes such a part.

    Args:
        argv: the arguments.
        what: the tool prints, for its help.
        text: makes it, as Markdown.
        markers: the two lines around it.
        prog: the name of the tool; None: that of the running program.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog=prog, description=f"Print {what} as Markdown.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE", help="replace it in FILE")
    action.add_argument("--check", type=Path, metavar="FILE", help="compare it with FILE, without a change")
    options = parser.parse_args(argv)
    if options.write or options.check:
        return bring_up_to_date(options.write or options.check, text(), markers, writes=bool(options.write))
    print(text(), end="")
    return 0


def bring_up_to_date(file: Path, text: str, markers: tuple[str, str], *, writes: bool) -> int:
    """Writes a text between the two marker lines of a document, or checks that it is there.

    Args:
        file: the document.
        text: what belongs between the markers.
        markers: the two lines. The first one names the tool in parentheses.
        writes: write it; else only check.

    Returns:
        The exit status: 1 where the check has failed.
    """
    begin, end = markers
    document = file.read_text(encoding="utf-8")
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{file} has no lines {begin} and {end}")
    updated = f"{before}{begin}\n\n{text}\n{end}{after}"
    if writes:
        file.write_text(updated, encoding="utf-8")
    elif updated != document:
        tool = begin.split("written by ")[1].split(")")[0]
        print(f"{file} is not current: python {tool} --write {file}")
        return 1
    return 0
