"""Rotary positions in a config.json: `rope_parameters` as transformers writes it now, or `rope_theta` and
`rope_scaling` as it did before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.messages import one_of
from megacore.config.rope_factors import parse_factors, written_factors
from megacore.models.hf.config_reader import ConfigReader

# The keys that each kind of scaling has, beside the base and the rotated share.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
# Further numbers that a kind may have; transformers takes null, and 0 of yarn's, as their absence.
_OPTIONAL: Mapping[str, Mapping[str, str]] = {
    "yarn": {
        "rope_beta_fast": "beta_fast",
        "rope_beta_slow": "beta_slow",
        "rope_mscale": "mscale",
        "rope_mscale_all_dim": "mscale_all_dim",
        "rope_attention_factor": "attention_factor",
    },
    "longrope": {"rope_attention_factor": "attention_factor"},
}
# Keys that are no numbers, and one that transformers does not look at.
_OTHERS = {"yarn": ("truncate",), "dynamic": ("original_max_position_embeddings",)}
_OF_LONGROPE = {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
_DEFAULT_BASE = 10_000.0


def read_rope(
    reader: ConfigReader,
    positions: int,
    *,
    base: str = "rope_theta",
    usual_base: Any = _DEFAULT_BASE,
    share: float = 1.0,
    original: Any = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """ModelConfig's fields about rotary positions.

    Args:
        positions: its longest context, at which dynamic scaling begins.
        base: the field that older files have the base in.
        usual_base: what transformers takes where the file has none.
        share: of a head that is rotated, where the rope parameters do not say it.
        original: context before scaling, of a family that has it outside the rope parameters.
        renamed: kinds of scaling by names that only this family gives them -> their usual names.
    """
    given = {name: reader.get(name) for name in ("rope_parameters", "rope_scaling")}
    for name, value in given.items():
        if value is not None and not isinstance(value, dict):
            reader.problem(name, f"is {str(value)[:40]!r}, not an object")
            given[name] = None
    name = "rope_scaling" if given["rope_scaling"] else "rope_parameters"
    table: dict[str, Any] = given[name] or {}
    if given["rope_scaling"] and given["rope_parameters"] and given["rope_scaling"] != given["rope_parameters"]:
        reader.problem("rope_scaling", "differs from rope_parameters: leave one of them out")
    kind = table.get("rope_type", table.get("type", "default"))
    kind = renamed.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        reader.problem(f"{name}.rope_type", f"is {str(kind)[:40]!r}, but megacore has {one_of(list(_KEYS))}")
        return {}
    if original is not None and kind == "longrope":
        table = {**table, "original_max_position_embeddings": original}
    fields: dict[str, Any] = {"position_embedding_type": "rope", "rope_scaling": "none" if kind == "default" else kind}
    optional = _OPTIONAL.get(kind, {})
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {*_KEYS[kind], *optional.values(), *_OTHERS.get(kind, ())}
    for key in sorted(table.keys() - known):
        reader.problem(f"{name}.{key[:40]}", f"is a field that megacore does not know for the type {kind}")
    theta = table.get("rope_theta", reader.get(base, usual_base))
    numbers = {"rotary_base": ("rope_theta", theta), "rotary_percent": ("partial_rotary_factor", share)}
    if "partial_rotary_factor" in table:
        numbers["rotary_percent"] = ("partial_rotary_factor", table["partial_rotary_factor"])
    for ours, key in (
        ("rope_scaling_factor", "factor"),
        ("rope_low_freq_factor", "low_freq_factor"),
        ("rope_high_freq_factor", "high_freq_factor"),
    ):
        if key in _KEYS[kind]:
            numbers[ours] = (key, table.get(key))
    numbers |= {
        ours: (key, table[key])
        for ours, key in optional.items()
        if table.get(key) is not None and not (kind == "yarn" and table[key] == 0)
    }
    before = positions if kind == "dynamic" else table.get("original_max_position_embeddings", positions)
    if kind in _OPTIONAL and table.get("factor") is None and type(before) is int and before > 0:
        numbers["rope_scaling_factor"] = ("factor", positions / before)
    if kind == "yarn":
        if table.get("attention_factor") == 0:
            reader.problem(f"{name}.attention_factor", "is 0, which makes every rotated query and key 0")
        fields["rope_truncate"] = truncate = table.get("truncate", True)
        if type(truncate) is not bool:
            reader.problem(f"{name}.truncate", f"is {str(truncate)[:40]!r}, not true or false")
    for key, ours in _OF_LONGROPE.items() if kind == "longrope" else ():
        factors = table.get(key)
        if isinstance(factors, list) and factors and all(type(one) in (int, float) for one in factors):
            fields[ours] = written_factors(factors)
        else:
            reader.problem(f"{name}.{key}", f"is {str(factors)[:40]!r}, not a list of numbers")
    for ours, (key, value) in numbers.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            reader.problem(f"{name}.{key}", f"is {str(value)[:40]!r}, not a number")
        else:
            fields[ours] = float(value)
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        if type(before) is not int:
            reader.problem(f"{name}.original_max_position_embeddings", f"is {str(before)[:40]!r}, not a whole number")
        else:
            fields["rope_original_max_positions"] = before
    return fields


def write_rope(config: ResolvedModel, *, share: bool = False) -> dict[str, Any]:
    """`rope_parameters` of a model. `share`: whether the family rotates a share of each head."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    table: dict[str, Any] = {"rope_type": kind, "rope_theta": config.rotary_base}
    if share:
        table["partial_rotary_factor"] = config.rotary_percent
    values: dict[str, Any] = {
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_max_positions,
    }
    factors = {key: getattr(config, ours) for key, ours in _OF_LONGROPE.items()}
    values |= {key: None if text is None else list(parse_factors(text)) for key, text in factors.items()}
    table |= {key: values[key] for key in _KEYS[kind]}
    given = {key: getattr(config, ours) for ours, key in _OPTIONAL.get(kind, {}).items()}
    table |= {key: value for key, value in given.items() if value is not None}
    if kind == "yarn" and not config.rope_truncate:
        table["truncate"] = False
    return {"rope_parameters": table}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One rotation for all layers."""

    base: float = _DEFAULT_BASE  # what transformers takes where the file has none
    base_name: str = "rope_theta"  # the field that older files have it in
    share: float | None = None  # of each head that is rotated, where the file does not say it; None: whole heads only
    share_name: str = "partial_rotary_factor"  # the field that older files have it in
    check_share: bool = True  # refuse another share than the whole, where `share` is None
    # Default of the context before scaling, of a family that has it outside the rope parameters.
    original: int | None = None
    if_named: bool = False  # no positions but where `position_embedding_type` says rope
    renamed: Mapping[str, str] = field(default_factory=dict)  # as for `read_rope`
    usual: Mapping[str, Any] = field(default_factory=dict)  # rope parameters that transformers takes where it has none

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        given = [reader.get(name) for name in ("rope_parameters", "rope_scaling")]
        fields = read_rope(
            ConfigReader({"rope_parameters": self.usual}, reader.where) if self.usual and not any(given) else reader,
            ours["max_position_embeddings"] or 1,
            base=self.base_name,
            usual_base=self.base,
            share=1.0 if self.share is None else reader.get(self.share_name, self.share),
            original=None if self.original is None else reader.get(_ORIGINAL, self.original),
            renamed=self.renamed,
        )
        if self.share is None and self.check_share:
            if fields.get("rotary_percent", 1.0) != 1.0:
                reader.problem(
                    "partial_rotary_factor", f"is {fields['rotary_percent']}, but this family rotates whole heads"
                )
            reader.only("partial_rotary_factor", (1.0, 1, None))
        if self.if_named and reader.get("position_embedding_type") != "rope":
            return {"position_embedding_type": "none"}
        return fields

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        named = {"position_embedding_type": "rope" if config.position_embedding_type == "rope" else "nope"}
        return write_rope(config, share=self.share is not None) | (named if self.if_named else {})


class OriginalContext:
    """The context before scaling of Phi-3, which `Rope` reads and which stands after other fields in the file."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        before = config.rope_original_max_positions
        return {} if before is None else {_ORIGINAL: before}


class RotatedDimensions:
    """The rotated part of each head as a number of dimensions, as GPT-J has it."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        rotated = reader.get("rotary_dim", 64)
        hidden, heads = ours["hidden_size"], ours["num_attention_heads"]
        if hidden > 0 and heads > 0 and type(rotated) is int and 0 < rotated <= hidden // heads:
            return {"rotary_percent": rotated / (hidden // heads)}
        reader.problem("rotary_dim", f"is {str(rotated)[:40]!r}, not a number of dimensions of a head")
        return {}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"rotary_dim": config.rotary_dimensions}


# ---- a rotation for each kind of layers ------------------------------------------------------------------------------


def settle_rotation(ours: dict[str, Any]) -> None:
    """Make one rotation of two where all layers are of one kind; else megacore has a base of layers with a window."""
    if "window_rotary_base" not in ours or ours.get("layer_pattern") is not None:
        return
    base = ours.pop("window_rotary_base")
    if base is not None and ours.get("window_size") is not None:  # every layer has a window, which is never scaled
        for name in [one for one in ours if one.startswith("rope_") or one == "rotary_percent"]:
            del ours[name]
        ours["rotary_base"] = base


def _read_of_kinds(reader: ConfigReader, positions: int, *, base: Any, window_base: Any) -> dict[str, Any]:
    """The rotation of layers without a window and the base of those with one, of a file whose `rope_parameters` has a
    table for each kind; the bases are those that transformers takes where a table has none."""
    tables = reader.get("rope_parameters")
    whole = ConfigReader({"rope_parameters": tables.get("full_attention")}, reader.where)
    near = ConfigReader({"rope_parameters": tables.get("sliding_attention")}, reader.where)
    fields = read_rope(whole, positions, usual_base=base)
    of_windows = read_rope(near, 1, usual_base=window_base)
    reader.problems += [*whole.problems, *near.problems]
    if of_windows.get("rope_scaling", "none") != "none":
        reader.problem("rope_parameters.sliding_attention", "is scaled: megacore scales layers without a window")
    return fields | {"window_rotary_base": of_windows.get("rotary_base")}


def _write_of_kinds(config: ResolvedModel) -> dict[str, Any]:
    base = config.rotary_base if config.window_rotary_base is None else config.window_rotary_base
    near = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {"sliding_attention": near, "full_attention": write_rope(config)["rope_parameters"]}}


class RopesOfOlmo3:
    """Windows have the usual base; a file without tables of kinds of layers does not change it."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        positions, tables, base = ours["max_position_embeddings"] or 1, reader.get("rope_parameters"), 500_000.0
        if tables is None:
            return read_rope(reader, positions, usual_base=base) | {"window_rotary_base": base}
        if not isinstance(tables, dict) or not tables.keys() <= {"full_attention", "sliding_attention"}:
            reader.problem("rope_parameters", "has no tables of kinds of layers alone")
            return {}
        reader.only("rope_scaling", (None,))
        return _read_of_kinds(reader, positions, base=reader.get("rope_theta", base), window_base=base)

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return _write_of_kinds(config)


class RopesOfGemma3:
    """Windows have a base of their own, which older files have in a field of its own."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        positions, table = ours["max_position_embeddings"] or 1, reader.get("rope_parameters")
        local = reader.get("rope_local_base_freq", _DEFAULT_BASE)
        if isinstance(table, dict) and "full_attention" in table:
            base = reader.get("rope_theta", 1_000_000.0)
            return _read_of_kinds(reader, positions, base=base, window_base=local)
        fields = read_rope(reader, positions)
        if not reader.has("rope_theta") or "rotary_base" not in fields:
            fields["rotary_base"] = 1_000_000.0
        if type(local) not in (int, float):
            reader.problem("rope_local_base_freq", f"is {str(local)[:40]!r}, not a number")
            return fields
        return fields | {"window_rotary_base": float(local)}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return _write_of_kinds(config)


# ---- Ministral 3 -----------------------------------------------------------------------------------------------------

_GROWTH, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}


class RopeOfMinistral3:
    """Queries are longer from the original number of positions on, which no model of so few positions reaches."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        positions, table = ours["max_position_embeddings"], reader.get("rope_parameters")
        table = _OF_MINISTRAL3 if table is None else table
        if not isinstance(table, dict):
            reader.problem("rope_parameters", f"is {str(table)[:40]!r}, not an object")
            return {}
        growth, original = table.get(_GROWTH, 0.1), table.get(_ORIGINAL)
        if growth != 0 and not (type(positions) is int and type(original) is int and positions <= original):
            reader.problem(
                f"rope_parameters.{_GROWTH}",
                f"is {str(growth)[:40]!r}, which makes queries longer from position {str(original)[:40]} on, and "
                f"megacore does not; in a copy with max_position_embeddings {str(original)[:40]} the model is the same "
                "up to there",
            )
        unread = {_GROWTH, "max_position_embeddings"}
        if table.get("rope_type", table.get("type", "default")) in ("default", "linear"):
            unread.add(_ORIGINAL)
        rope = ConfigReader({"rope_parameters": {k: v for k, v in table.items() if k not in unread}}, reader.where)
        fields = read_rope(rope, positions or 1)
        reader.problems += rope.problems
        return fields

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        rope = write_rope(config)["rope_parameters"]
        return {"rope_parameters": {_ORIGINAL: config.max_position_embeddings, **rope, _GROWTH: 0.0}}
