"""Prints the reference of every flag as Markdown, from the fields themselves.

    python tools/flag_reference.py                              # print it
    python tools/flag_reference.py --write docs/configuration.md    # bring the document up to date
    python tools/flag_reference.py --check docs/configuration.md    # exit status 1 if it is not

In a document the reference stands between two marker lines, and only what is between them is replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megacore.config import SECTIONS, Config, sections_of
from megacore.config.bert import BertConfig
from megacore.config.fields import FieldInfo, field_docs, field_infos, flag
from megacore.config.flags import CONFIG_DOC, CONFIG_INFO
from megacore.config.help import default_text
from megacore.config.presets import PRESETS

BEGIN = "<!-- flags: begin (written by tools/flag_reference.py) -->"
END = "<!-- flags: end -->"


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks the reference; returns the exit status."""
    parser = argparse.ArgumentParser(description="Print the reference of every flag as Markdown.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE", help="replace the reference in FILE")
    action.add_argument("--check", type=Path, metavar="FILE", help="compare the reference in FILE, and change nothing")
    options = parser.parse_args(argv)
    if options.write:
        options.write.write_text(updated(options.write.read_text(encoding="utf-8")), encoding="utf-8")
    elif options.check:
        text = options.check.read_text(encoding="utf-8")
        if text != updated(text):
            print(f"{options.check} is not current: python tools/flag_reference.py --write {options.check}")
            return 1
    else:
        print(reference(), end="")
    return 0


def updated(document: str) -> str:
    """The document with the present reference between its markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def reference() -> str:
    """Every flag by section, those of one entry point alone after those of all, and every preset."""
    lines = [f"`{CONFIG_INFO.flag} {CONFIG_INFO.metavar}`: {CONFIG_DOC}", ""]
    for name, section in sections_of(BertConfig).items():
        whose = "" if name in SECTIONS else ", of pretrain_bert.py alone"
        lines += [f"### [{name}]{whose}", "", str(section.__doc__), "", *_section_table(section), ""]
    lines += ["### Presets", "", *_preset_table()]
    return "\n".join(lines) + "\n"


def _section_table(section: type) -> Iterator[str]:
    docs = field_docs(section)
    yield "| flag | value | default | meaning |"
    yield "|---|---|---|---|"
    for info in field_infos(section).values():
        names = f"`{info.flag}`" + "".join(f"<br>`{alias}`" for alias in info.aliases)
        yield f"| {names} | {_value(info)} | {_default(info)} | {docs[info.name]}{_to_bert(info)} |"


def _default(info: FieldInfo) -> str:
    """The default, and BERT's where it is another."""
    gpts, berts = (default_text(info, kind).removeprefix("default: ") for kind in (Config, BertConfig))
    return gpts if gpts == berts or info.name in BertConfig.foreign else f"{gpts}<br>BERT: {berts}"


def _to_bert(info: FieldInfo) -> str:
    """What the field means to pretrain_bert.py, where it is not the same."""
    if info.name in BertConfig.foreign:
        return " Not of pretrain_bert.py."
    return f"<br>BERT: {BertConfig.meanings[info.name]}" if info.name in BertConfig.meanings else ""


def _value(info: FieldInfo) -> str:
    if info.kind is bool:
        return f"on; `--no-{info.flag.removeprefix('--')}`: off"
    if info.choices:
        return ", ".join(f"`{choice}`" for choice in info.choices)
    return f"`{info.metavar}`" + (f", {info.range}" if info.range else "")


def _preset_table() -> Iterator[str]:
    yield "| preset | stands for |"
    yield "|---|---|"
    for name, values in PRESETS.items():
        given = (flag(key) if value is True else f"{flag(key)} {value}" for key, value in values.items())
        yield f"| `{name}` | `{' '.join(given)}` |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
