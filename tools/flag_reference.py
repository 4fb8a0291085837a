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
from megacore.config.fields import FieldInfo, field_infos, flag
from megacore.config.flags import setting_files
from megacore.config.help import HelpText, help_text_of
from megacore.config.presets import PRESETS

if importlib.util.find_spec("tools") is None:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated_pages import written_reference

BEGIN = "<!-- flags: begin (written by tools/flag_reference.py) -->"
END = "<!-- flags: end -->"


def main(argv: Sequence[str]) -> int:
    """Prints, writes or checks the reference; returns the exit status."""
    return written_reference(argv, "the reference of all flags", reference, (BEGIN, END))


def reference() -> str:
    """All flags by section, then all presets."""
    lines = []
    for info, _ in setting_files().values():
        lines += [f"`{info.flag} {info.metavar}`: {help_text_of(info, Config).meaning}", ""]
    for name, section in sections_of(BertConfig).items():
        only = "" if name in SECTIONS else ", only pretrain_bert.py"
        lines += [f"### [{name}]{only}", "", str(section.__doc__), ""]
        lines += [*_section_table(name, section), ""] if field_infos(section) else []
    lines += ["### Presets", "", *_preset_table()]
    return "\n".join(lines) + "\n"


def _section_table(name: str, section: type) -> Iterator[str]:
    yield "| flag | value | default | meaning |"
    yield "|---|---|---|---|"
    for info in field_infos(section).values():
        names = f"`{info.flag}`" + "".join(f"<br>`{alias}`" for alias in info.aliases)
        bert = None if info.name in BertConfig.unsupported else help_text_of(info, BertConfig)
        gpt = help_text_of(info, Config) if name in SECTIONS else bert
        assert gpt is not None, "a section of pretrain_bert.py has only flags that it accepts"
        cells = (names, _value(info), _default(gpt, bert), _meaning(gpt, bert))
        escaped = [cell.replace("|", r"\|") for cell in cells]  # or it would end the cell
        yield f"| {' | '.join(escaped)} |"


def _default(gpt: HelpText, bert: HelpText | None) -> str:
    """The default and, where it differs, that of pretrain_bert.py."""
    default = gpt.default or "required"
    return default if bert is None or bert.default == gpt.default else f"{default}<br>BERT: {bert.default}"


def _meaning(gpt: HelpText, bert: HelpText | None) -> str:
    """The meaning and, where it differs, that for pretrain_bert.py."""
    if bert is None:
        return f"{gpt.meaning} Not for pretrain_bert.py."
    return gpt.meaning if bert.meaning == gpt.meaning else f"{gpt.meaning}<br>BERT: {bert.meaning}"


def _value(info: FieldInfo) -> str:
    if info.kind is bool:
        return f"on; `--no-{info.flag.removeprefix('--')}`: off"
    if info.choices:
        return ", ".join(f"`{choice}`" for choice in info.choices)
    return f"`{info.metavar}`" + (f", {info.range}" if info.range else "")


def _preset_table() -> Iterator[str]:
    yield "| preset | settings |"
    yield "|---|---|"
    for name, values in PRESETS.items():
        given = (flag(key) if value is True else f"{flag(key)} {value}" for key, value in values.items())
        yield f"| `{name}` | `{' '.join(given)}` |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
