"""Prints what megacore makes of every key of a DeepSpeed configuration, and of Megatron-DeepSpeed's flags, as Markdown.

python tools/deepspeed_reference.py                                         # print it
python tools/deepspeed_reference.py --write docs/guides/coming-from-deepspeed.md   # bring the document up to date
python tools/deepspeed_reference.py --check docs/guides/coming-from-deepspeed.md   # exit status 1 if it is not
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megacore.arrive.deepspeed_flags import DEEPSPEED_FLAGS
from megacore.arrive.deepspeed_keys import all_keys

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import table, written_reference

MARKERS = ("<!-- keys: begin (written by tools/deepspeed_reference.py) -->", "<!-- keys: end -->")
_KINDS = {"sets": "{}", "idle": "no effect", "some": "only {}"}


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks it; returns the exit status."""
    return written_reference(argv, "what becomes of DeepSpeed's keys and flags", reference, MARKERS)


def reference() -> str:
    """The keys by section, then the flags."""
    keys = table(("key", "becomes"), ((f"`{name}`", text) for name, text in _rows()))
    idle = [name for name, flag in sorted(DEEPSPEED_FLAGS.items()) if flag.becomes.startswith("nothing: ")]
    others = sorted(DEEPSPEED_FLAGS.keys() - set(idle))
    rows = [(f"`{name}`", DEEPSPEED_FLAGS[name].becomes) for name in others]
    flags = table(("flag", "becomes"), [*rows, (", ".join(f"`{name}`" for name in idle), "no effect")])
    return f"### Keys of the file\n\n{keys}\n\n### Flags of Megatron-DeepSpeed\n\n{flags}\n"


def _rows() -> Iterator[tuple[str, str]]:
    """Keys of a section that become the same share a row."""
    by_section = sorted(all_keys(), key=_place)
    for (section, _, text), paths in groupby(by_section, key=lambda path: _described(path)):
        names = [path.removeprefix(f"{section}.") if section else path for path in paths]
        yield "`, `".join([f"{section}.{names[0]}" if section else names[0], *names[1:]]), text


def _place(path: str) -> tuple[bool, str, bool, bool]:
    """Sections follow one another; in each, the key that turns it on is first, and keys without effect are last."""
    section, _, name = path.rpartition(".")
    is_idle = all_keys()[path].kind == "idle"
    return bool(section), section, is_idle, not is_idle and name not in ("enabled", "type")


def _described(path: str) -> tuple[str, str, str]:
    key = all_keys()[path]
    return path.rpartition(".")[0], key.kind, _KINDS[key.kind].format(key.becomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
