"""Prints what megacore makes of every flag of Megatron-LM that it translates or refuses, as Markdown.

python tools/megatron_reference.py                                         # print it
python tools/megatron_reference.py --write docs/guides/coming-from-megatron.md   # bring the document up to date
python tools/megatron_reference.py --check docs/guides/coming-from-megatron.md   # exit status 1 if it is not
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megacore.arrive.megatron_flags import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.config.bert import BertConfig
from megacore.config.flags import flags_by_name

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import table, written_reference


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks the tables; returns the exit status."""
    marked = (
        (f"<!-- {part}: begin (written by tools/megatron_reference.py) -->", f"<!-- {part}: end -->") for part in PARTS
    )
    what = "what becomes of Megatron-LM's flags"
    return max(written_reference(argv, what, text, lines) for text, lines in zip(PARTS.values(), marked, strict=True))


def _table(words: Mapping[str, str], title: str) -> str:
    """Flags of which the same is said share a row."""
    rows: dict[str, list[str]] = {}
    for name in sorted(words, key=str.lower):
        rows.setdefault(words[name], []).append(name)
    cells = ((", ".join(_short(names)), text) for text, names in rows.items())
    return table(("Megatron-LM", title), cells) + "\n"


def _short(names: Sequence[str]) -> Iterator[str]:
    """Names, or `--first-*` for three or more that begin as no other flag does."""
    known = {*FOREIGN, *REPLACED, *NOT_YET, *flags_by_name(BertConfig)}
    for first, alike in groupby(names, key=lambda name: name.split("-")[2]):
        group, start = list(alike), f"--{first}-"
        if len(group) >= 3 and {name for name in known if name.startswith(start)} == set(group):
            yield f"`{start}*`"
        else:
            yield from (f"`{name}`" for name in group)


PARTS: dict[str, Callable[[], str]] = {
    "translated": lambda: _table(
        {name: flag.becomes for name, flag in {**FOREIGN, **LISTS}.items() if not flag.is_idle}, "becomes"
    ),
    "replaced": lambda: _table(REPLACED, "instead"),  # have another name, or are not needed
    "not yet": lambda: _table(
        {name: text.removeprefix("without it, ") for name, text in NOT_YET.items()}, "without it"
    ),
}
"""The tables of the document, by the name in their marker lines."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
