"""Prints the reference of all flags as Markdown, from the fields themselves.

    python tools/flag_reference.py                              # print it
    python tools/flag_reference.py --write docs/reference/configuration.md    # bring the document up to date
    python tools/flag_reference.py --check docs/reference/configuration.md    # exit status 1 if it is not

In a document the reference is between two marker lines, and only what is between them is replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megacore.config import SECTIONS, Config, sections_of
from megacore.config.bert import BertConfig
from megacore.config.fields import FieldInfo, Range, field_infos
from megacore.config.flags import setting_files
from megacore.config.help import HelpText, help_text_of
from megacore.config.messages import number

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import written_reference

BEGIN = "<!-- flags: begin (written by tools/flag_reference.py) -->"
END = "<!-- flags: end -->"


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks the reference; returns the exit status."""
    return written_reference(argv, "the reference of all flags", reference, (BEGIN, END))


def reference() -> str:
    """All flags by section."""
    lines = []
    for info, _ in setting_files().values():
        lines += [f"`{info.flag} {info.metavar}`: {help_text_of(info, Config).meaning}", ""]
    for name, section in sections_of(BertConfig).items():
        only = "" if name in SECTIONS else ", only pretrain_bert.py"
        lines += [f"### [{name}]{only}", "", str(section.__doc__), ""]
        lines += [*_section_table(name, section), ""] if field_infos(section) else []
    return "\n".join(lines)


def _section_table(name: str, section: type) -> Iterator[str]:
    yield "|flag |value |default |meaning|"
    yield "|---|---|---|---|"
    for info in field_infos(section).values():
        names = f"`{info.flag}`" + "".join(f"<br>`{alias}`" for alias in info.aliases)
        bert = None if info.name in BertConfig.unsupported else help_text_of(info, BertConfig)
        gpt = help_text_of(info, Config) if name in SECTIONS else bert
        assert gpt is not None, "a section of pretrain_bert.py has only flags that it accepts"
        cells = (names if bert else f"{names} †", _value(info), _default(gpt, bert), _meaning(gpt, bert))
        escaped = [cell.replace("|", r"\|") for cell in cells]  # or it would end the cell
        yield f"|{' |'.join(escaped)}|"  # a bar is no word of its own


def _default(gpt: HelpText, bert: HelpText | None) -> str:
    """The default and, where it differs, that of pretrain_bert.py."""
    default = gpt.default or "required"
    return default if bert is None or bert.default == gpt.default else f"{default}<br>BERT: {bert.default}"


def _meaning(gpt: HelpText, bert: HelpText | None) -> str:
    """The meaning and, where it differs, that for pretrain_bert.py."""
    return gpt.meaning if bert is None or bert.meaning == gpt.meaning else f"{gpt.meaning}<br>BERT: {bert.meaning}"


def _value(info: FieldInfo) -> str:
    """What a flag takes; nothing for a switch."""
    if info.kind is bool:
        return ""
    if info.choices:
        return f"`{'|'.join(info.choices)}`"
    return f"`{_bounds(info.range, info.kind)}`" if info.range else f"`{info.metavar}`"


def _bounds(of: Range, kind: type) -> str:
    """`1..9`, or `>0.0..<1.0` where bounds are excluded and the number may be a fraction."""
    signs = ((">=", of.low), (">", of.above), ("<=", of.high), ("<", of.below))
    bounds = [f"{sign}{_number(bound, kind)}" for sign, bound in signs if bound is not None]
    return bounds[0] if len(bounds) == 1 else "..".join(bound.replace(">=", "").replace("<=", "") for bound in bounds)


def _number(value: float, kind: type) -> str:
    text = number(value)
    return f"{text}.0" if kind is float and text.isdigit() else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
