"""Tables in Markdown, and the parts of a page that a program writes between two marker lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a newline at its end. A bar in a cell is escaped, or it would end the cell."""
    cells = [list(head), *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    lines = [f"|{' |'.join(row)}|" for row in cells]  # a bar is no word of its own
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def bring_up_to_date(file: Path, text: str, markers: tuple[str, str], *, writes: bool) -> bool:
    """Write a text between the two marker lines of a page, or only compare it.

    Args:
        file: the page.
        text: what belongs between the markers.
        markers: the two lines.
        writes: write it; else only check.

    Returns:
        Whether it was there already.
    """
    begin, end = markers
    page = file.read_text(encoding="utf-8")
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{file} has no lines {begin} and {end}")
    updated = f"{before}{begin}\n\n{text}\n{end}{after}"
    if writes:
        file.write_text(updated, encoding="utf-8")
    return updated == page
