"""The `--help` of every entry point, drawn by tyro from the fields: each flag with its aliases, meaning and default."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any, get_type_hints

from megacore.config import Config, sections_of
from megacore.config.fields import FieldInfo, field_docs, field_infos
from megacore.config.flags import CONFIG_DOC, CONFIG_INFO
from megacore.config.messages import number


def print_help(prog: str, description: str, kind: type[Config]) -> None:
    """Prints the help text to stdout, as wide as the terminal."""
    # Only the help needs tyro: loading it on every rank of every launch would cost each 0.2 s.
    import tyro

    def shown(info: FieldInfo, doc: str) -> Any:
        # tyro sorts a flag's own name last; naming the last alias as the flag brings the field's own name to the front.
        *others, last = info.flags
        metavar = None if info.kind is bool else info.metavar
        return tyro.conf.arg(
            name=last.removeprefix("--"),
            aliases=others,
            metavar=metavar,
            help=doc,
            help_behavior_hint=f"({default_text(info, kind)})",
        )

    def section_class(name: str, section: type) -> type:
        hints, docs = get_type_hints(section), {**field_docs(section), **kind.meanings}
        fields = [
            (key, Annotated[hints[key], shown(info, docs[key])], dataclasses.field(default=info.default))
            for key, info in field_infos(section).items()
            if key not in kind.foreign
        ]
        return dataclasses.make_dataclass(name, fields, kw_only=True, namespace={"__doc__": section.__doc__})

    flags = [
        ("config", Annotated[str | None, shown(CONFIG_INFO, CONFIG_DOC)], dataclasses.field(default=None)),
        *((name, section_class(name, section), dataclasses.field()) for name, section in sections_of(kind).items()),
    ]
    tree = dataclasses.make_dataclass("Flags", flags, kw_only=True)
    with contextlib.suppress(SystemExit):
        tyro.cli(tree, prog=prog, description=description, args=["--help"], config=(tyro.conf.OmitArgPrefixes,))


def default_text(info: FieldInfo, kind: type[Config]) -> str:
    """`default: 12`, or that there is none; where it depends on a flag, as a style's do, each with that flag."""
    if info.required:
        return "required"
    variants = kind.all_defaults().items()
    (_, first), *others = [
        (beside, _value_text(info, values.get(info.name, info.default))) for beside, values in variants
    ]
    return "; ".join([f"default: {first}", *(f"{text} with {beside}" for beside, text in others if text != first)])


def _value_text(info: FieldInfo, value: Any) -> str:
    if info.kind is bool:
        return "on" if value else "off"
    if info.kind in (int, float) and value is not None:
        return number(value)
    return "none" if value == () else str(value)
