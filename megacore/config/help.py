"""`--help`: a short page with the usual flags, a page per section, a page per flag, and everything.

The texts come from the fields (`Section` classes) themselves. A field's text may end with "Default: ...", which says
what the field is when nobody sets it; otherwise the default is the field's value.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megacore.config.dry_run_flags import DRY_RUN_FLAGS
from megacore.config.fields import FieldInfo, field_docs, field_infos
from megacore.config.flags import all_fields, flags_by_name, setting_files
from megacore.config.messages import did_you_mean, number, one_of
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.other_trainers import other_trainers
from megacore.config.schema import Config, section_of, sections_of
from megacore.config.spelling import PARAMETERS, negative
from megacore.errors import UserError

# The flags of the short page. An entry point shows those that it has.
_USUAL = {
    "Model": ("preset", "bert_style", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    "Data": ("data_path", "tokenizer", "mock_data"),
    "Training": ("train_iters", "micro_batch_size", "global_batch_size", "lr", "lr_warmup_iters", "precision"),
    "Parallelism": ("tp", "pp", "dp", "zero_stage"),
    "Output": ("output_dir", "save_interval", "load", "config"),
}
_ALL = "all"
_SHORT = ""

_WIDEST = 120
_COLUMN = 26  # where the texts of the short page begin


class HelpText(NamedTuple):
    """The help of one flag, in two parts."""

    meaning: str  # what the flag does
    default: str  # its value when nobody sets it, without a full stop; empty if the flag is required


def help_topic(argv: Sequence[str]) -> str | None:
    """What the command line asks about: None for no help, empty for the short page, else the word after `--help`."""
    for number_of_word, word in enumerate(argv):
        name, _, topic = word.partition("=")
        if name in ("--help", "-h"):
            following = argv[number_of_word + 1 :]
            if topic or not following:
                return topic
            is_topic = len(following) == 1 or not following[0].startswith("-")
            return following[0] if is_topic else _SHORT
    return None


def help_text(topic: str, kind: type[Config], *, prog: str, description: str) -> str:
    """The help about a topic, as wide as the terminal: the short page for an empty one, or a section, a flag with or
    without its dashes, or `all`. Raises UserError with the topics that exist."""
    page = _Page(kind)
    name = topic.strip().lower().replace("_", "-")
    if topic == _SHORT:
        lines = page.short(prog, description)
    elif name == _ALL:
        lines = page.everything(prog)
    elif name in sections_of(kind):
        lines = page.section(name)
    elif (flag := f"--{name.removeprefix('--')}") in DRY_RUN_FLAGS:
        lines = page.flag(DRY_RUN_FLAGS[flag])
    else:
        lines = page.flag(_field_of(name, kind))
    return "\n".join(lines)


def help_text_of(info: FieldInfo, kind: type[Config]) -> HelpText:
    """The help text of a field, as the entry point means it."""
    if info.doc:
        doc = info.doc
    else:
        section = sections_of(kind)[section_of(kind, info.name)]
        doc = kind.help_texts.get(info.name, field_docs(section).get(info.name, ""))
    meaning, _, default = doc.partition(" Default: ")
    return HelpText(meaning, default.removesuffix(".") or _default_value(info, kind))


def _default_value(info: FieldInfo, kind: type[Config]) -> str:
    """`12`, or nothing if the field is required; for defaults that depend on a flag, each with that flag."""
    if info.required:
        return ""
    variants = kind.all_defaults().items()
    values = [(given, _shown(info, defaults.get(info.name, info.default))) for given, defaults in variants]
    (_, first), *others = values
    return "; ".join([first, *(f"{value} with {given}" for given, value in others if value != first)])


def _shown(info: FieldInfo, value: object) -> str:
    if info.kind is bool:
        return "on" if value else "off"
    if isinstance(value, int | float):
        return number(value)
    return "none" if value in (None, ()) else str(value)


def _field_of(topic: str, kind: type[Config]) -> FieldInfo:
    flags = flags_by_name(kind)
    name = topic if topic.startswith("-") else f"--{topic}"
    info = flags.get(name)
    if info is not None and info.name not in kind.unsupported:
        return info
    if info is not None:
        raise UserError(f"{info.flag} {kind.unsupported[info.name]}")
    if theirs := other_trainers().help_of(name):
        raise UserError(theirs)
    sections = list(sections_of(kind))
    known = [*sections, *DRY_RUN_FLAGS, *(flag for flag, info in flags.items() if info.name not in kind.unsupported)]
    raise UserError(
        f"--help {topic}: there is no such section or flag: use {one_of([*sections, _ALL])}, or the name of a flag"
        f"{did_you_mean(topic, known)}"
    )


class _Page:
    """Writes help as lines of text for one entry point and one terminal."""

    def __init__(self, kind: type[Config]) -> None:
        self.kind = kind
        self.width = min(shutil.get_terminal_size().columns, _WIDEST) - 1
        self.styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def short(self, prog: str, description: str) -> Iterator[str]:
        """Usage, the usual flags in a line or two each, examples, and where the rest is."""
        yield f"Usage: python {prog} FLAGS"
        yield f"       torchrun --nproc-per-node N {prog} FLAGS"
        yield ""
        yield from self._wrapped(description, indent=0)
        fields = setting_files() | all_fields(self.kind)
        for group, names in _USUAL.items():
            yield from self._heading(group)
            for name in names:
                if name in fields and name not in self.kind.unsupported:
                    yield from self._summary(fields[name])
        yield from self._heading("Examples")
        for purpose, command in self.kind.examples.items():
            yield f"  # {purpose}"
            yield from textwrap.indent(command, "  ").splitlines()
        yield from self._heading("More help")
        yield from self._columns("--help SECTION", "All flags of one section:")
        for name in self._sections():
            if name not in OPTIMIZERS:
                yield from self._columns(f"  {name}", str(sections_of(self.kind)[name].__doc__))
        yield from self._columns(f"  {', '.join(OPTIMIZERS)}", "Settings of the --optimizer of that name.")
        yield from self._columns("--help FLAG", "One flag, for example --help lr.")
        yield from self._columns("--help all", "Every flag.")
        yield from self._columns("--version", "The version of megacore.")

    def everything(self, prog: str) -> Iterator[str]:
        yield f"All flags of {prog}"
        yield ""
        for info in setting_files().values():
            yield from self._entry(info)
            yield ""
        for name in self._sections():
            yield from self.section(name)
            yield ""
        yield self._bold("Dry runs")
        for info in DRY_RUN_FLAGS.values():
            yield ""
            yield from self._entry(info)

    def _sections(self) -> list[str]:
        """Sections of which the entry point accepts a flag, or that have none."""
        sections = {name: field_infos(section).keys() for name, section in sections_of(self.kind).items()}
        return [name for name, fields in sections.items() if not fields or fields - self.kind.unsupported.keys()]

    def section(self, name: str) -> Iterator[str]:
        section = sections_of(self.kind)[name]
        yield self._bold(f"[{name}]")
        yield from self._wrapped(str(section.__doc__), indent=0)
        fields = field_infos(section)
        for info in fields.values():
            if info.name not in self.kind.unsupported and info.owner not in fields:
                yield ""
                yield from self._entry(info)

    def flag(self, info: FieldInfo) -> Iterator[str]:
        """One flag: its text, its range, and its key in a configuration file."""
        yield from self._entry(info, with_aliases=True)
        if info.range is not None:
            yield from self._wrapped(f"Range: {info.range}.", indent=6)
        if not info.doc:
            yield from self._wrapped(f"In a file: {info.name} under [{section_of(self.kind, info.name)}].", indent=6)

    def _entry(self, info: FieldInfo, *, with_aliases: bool = False) -> Iterator[str]:
        """A flag with its aliases, its whole text and its default, and its parameters; or a parameter."""
        if info.owner and not with_aliases:
            yield from self._parameter(info, indent=2)
            return
        follows = "" if info.kind is bool else f" {info.metavar}"
        follows += " [NAME=VALUE...]" if info.name in PARAMETERS else ""
        names = f"{info.usage}, {', '.join(info.aliases)}" if info.owner else ", ".join(info.flags)
        names += f", {negative(info.flag)}" if info.kind is bool else ""
        # No flag is cut at its hyphens.
        first, *further = textwrap.wrap(
            f"{names}{follows}", self.width - 2, subsequent_indent="    ", break_on_hyphens=False
        )
        yield from (f"  {self._bold(first)}", *(f"  {line}" for line in further))
        yield from self._wrapped(self._meaning(info), indent=6)
        if info.name in PARAMETERS:
            section = sections_of(self.kind)[section_of(self.kind, info.name)]
            for parameter in field_infos(section).values():
                if parameter.owner == info.name and parameter.name not in self.kind.unsupported:
                    yield from self._parameter(parameter, indent=8)

    def _parameter(self, info: FieldInfo, *, indent: int) -> Iterator[str]:
        """A parameter, in a paragraph of its own."""
        usage = info.usage.partition(" ")[2]
        yield from self._wrapped(f"{usage}: {self._meaning(info)}", indent=indent, further=2)

    def _meaning(self, info: FieldInfo) -> str:
        """The text of a flag, and its default."""
        text = help_text_of(info, self.kind)
        return f"{text.meaning} {f'Default: {text.default}.' if text.default else 'Required.'}"

    def _summary(self, info: FieldInfo) -> Iterator[str]:
        """A flag with the first sentence of its text and its default."""
        text = help_text_of(info, self.kind)
        first_sentence = re.split(r"(?<=\.)\s", text.meaning)[0]
        default = f"Default: {text.default}." if text.default else "Required."
        yield from self._columns(info.usage, f"{first_sentence} {default}")

    def _columns(self, left: str, right: str) -> Iterator[str]:
        """Two columns; the right one begins on a new line where the left one is too wide."""
        lines = self._wrapped(right, indent=_COLUMN)
        if len(left) + 4 <= _COLUMN:
            first = next(lines)
            yield f"  {self._bold(left)}{' ' * (_COLUMN - 2 - len(left))}{first.lstrip()}"
        else:
            yield f"  {self._bold(left)}"
        yield from lines

    def _heading(self, title: str) -> Iterator[str]:
        yield ""
        yield self._bold(f"{title}:")

    def _wrapped(self, text: str, *, indent: int, further: int = 0) -> Iterator[str]:
        """The text in lines as wide as the page. Flags and numbers are never broken."""
        space = " " * indent
        yield from textwrap.wrap(
            text,
            self.width,
            initial_indent=space,
            subsequent_indent=space + " " * further,
            break_on_hyphens=False,
            break_long_words=further > 0,
        )

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.styled else text
