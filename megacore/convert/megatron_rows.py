"""Names of tensors and flags in Megatron-LM's checkpoints (megatron.toml), for reading and writing."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megacore.config.fields import Section, field_infos

Norms = Literal["fused", "apart"]
Split = Literal["rows", "columns", "whole"]
_TABLES = tomllib.loads(Path(__file__).with_name("megatron.toml").read_text(encoding="utf-8"))
_NUMBER = re.compile(r"(?<=\.experts\.)\d+")


def _tensors(table: str) -> Iterator[tuple[str, Split, list[str]]]:
    """Each tensor of a table, how ranks split it, and its names: as it is written, with norms apart, and others."""
    for ours, row in _TABLES[table].items():
        for kind in ("weight", "bias") if "*" in ours else ("",):
            first, *others = row["names"].split()
            names = [name.replace("*", kind) for name in (first, row.get("apart", first), *others)]
            yield (
                ours.replace("*", kind),
                "whole" if kind == "bias" and row["split"] == "columns" else row["split"],
                names,
            )


_OURS = {
    table: {name: (ours, split) for ours, split, names in _tensors(table) for name in names}
    for table in ("model", "block")
}
_WRITTEN = {ours: (split, names) for table in _OURS for ours, split, names in _tensors(table)}


def our_name(theirs: str, *, in_block: bool) -> tuple[str, Split] | None:
    """megacore's name of a tensor, and how tensor-parallel ranks split it; None: it has none. In a block, `theirs` is
    without what precedes it."""
    number = _NUMBER.search(theirs)
    found = _OURS["block" if in_block else "model"].get(_NUMBER.sub("{n}", theirs))
    if found is None or number is None:
        return found
    return found[0].replace("{n}", number[0]), found[1]


def written_name(ours: str, norms: Norms) -> str:
    """The name under which a tensor is written, in a block without what precedes it."""
    return _WRITTEN[ours][1][norms == "apart"]


def split_of(ours: str) -> Split:
    """How tensor-parallel ranks split a tensor, in a block named without the block's number."""
    return _WRITTEN[ours][0]


def read_fields(args: Mapping[str, Any], section: type[Section], problems: list[str]) -> dict[str, Any]:
    """The fields of a section that are flags of Megatron-LM, the model's or the experts'. `problems`: what is of a
    wrong kind, or would be another model than megacore's, is added here."""
    suffix = "_of_experts" if "num_experts" in field_infos(section) else ""
    for values, names in _TABLES[f"only{suffix}"].items():
        allowed = json.loads(f"[{values}]")
        for name in names.split():
            if name in args and args[name] not in allowed:
                problems.append(f"{name} is {str(args[name])[:40]!r}, which megacore does not have")
    fields: dict[str, Any] = {}
    for ours, row in _TABLES[f"flags{suffix}"].items():
        names, info = row["names"].split(), field_infos(section)[ours]
        value = next((args[name] for name in names if args.get(name) is not None), row.get("default"))
        is_whole_float = info.kind is float and type(value) is int
        if type(value) is info.kind or is_whole_float or (info.optional and value is None):
            fields[ours] = value
        else:
            problems.append(f"{names[0]} is {str(value)[:40]!r}, not a {info.kind.__name__}")
    return fields


def written_flags(model: Any) -> dict[str, Any]:
    """The flags that are fields of a model, under their first names."""
    return {row["names"].split()[0]: getattr(model, ours) for ours, row in _TABLES["flags"].items()}
