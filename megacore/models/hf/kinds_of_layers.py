"""Layers of several kinds in a config.json: `layer_types` or an older way to say them, and the window of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megacore.config import ModelConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.config.layer_pattern import FULL, LINEAR, MAMBA, WINDOW, WITHOUT_POSITIONS, pattern_of, repeated
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.rows import read_window

_LETTERS = {"sliding_attention": WINDOW, "full_attention": FULL, "linear_attention": LINEAR}
_LETTERS |= {"attention": FULL, "mamba": LINEAR}  # as older files have them
_MOST = 10_000  # layers


def read_layer_types(reader: ConfigReader, layers: int, other: str = WINDOW) -> str | None:
    """The letters of the file's layers, as of --layer-pattern; None where it has no valid list. `other`: the letter of
    those that the family has beside full attention."""
    types = reader.get("layer_types")
    if types is None:
        return None
    known = {name for name, letter in _LETTERS.items() if letter in (other, FULL)}
    if not isinstance(types, list) or not set(map(str, types)) <= known:
        reader.problem("layer_types", "has kinds of layers that megacore does not know")
        return None
    if len(types) != layers:
        reader.problem("layer_types", f"has {len(types)} entries for {layers} layers")
        return None
    return "".join(_LETTERS[one] for one in types)


def _read_kinds(reader: ConfigReader, layers: int, period: Any, name: str, other: str = WINDOW) -> str:
    """The letters of the layers, of which each last one of a period has full attention where the file has no
    `layer_types`. `name`: the field that has it. `other`: as for `read_layer_types`."""
    kinds = read_layer_types(reader, layers, other)
    if kinds is not None:
        return kinds
    if not 0 < layers <= _MOST:
        return FULL  # a problem of another field
    if type(period) is not int or not 0 < period <= _MOST:
        reader.problem(name, f"is {str(period)[:40]!r}, not a number of layers")
        return FULL
    return repeated(other * (period - 1) + FULL, layers)


class LinearLayers:
    """Qwen3-Next's: linear attention in all layers but each last one of an interval."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        interval = reader.get("full_attention_interval", 4)  # which transformers reads where there is no list
        return pattern_fields(
            _read_kinds(reader, ours["num_layers"], interval, "full_attention_interval", LINEAR), None
        )

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"layer_types": write_layer_types(config)}


class MambaLayers:
    """Granite 4's: Mamba-2 in all layers without full attention; where there are none, its sizes mean nothing."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        reader.only("num_local_experts", (0,), 8)
        layers, heads = ours["num_layers"], ours["linear_num_value_heads"]
        kinds = read_layer_types(reader, layers, LINEAR) or repeated(LINEAR, min(layers, _MOST))
        expand, size = reader.count("mamba_expand", 2, "times hidden_size"), reader.get("mamba_d_head", "auto")
        if LINEAR not in kinds:
            unset = {
                name: info.default for name, info in field_infos(ModelConfig).items() if name.startswith("linear_")
            }
            return pattern_fields(kinds, None) | unset
        wide = (expand or 1) * ours["hidden_size"]
        if heads > 0 and (wide % heads or size not in ("auto", wide // heads)):
            reader.problem("mamba_d_head", f"is not mamba_expand x hidden_size / mamba_n_heads, {wide} / {heads}")
        values = {"linear_value_head_dim": max(wide // max(heads, 1), 1)}
        return pattern_fields(kinds.replace(LINEAR, MAMBA), None) | values

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        if not config.has_linear:  # transformers wants valid sizes, also where there are no such layers
            return {}
        expand = config.linear_widths[1] // config.hidden_size
        values = {"mamba_d_head": config.linear_value_head_dim, "mamba_expand": expand, "num_local_experts": 0}
        return {"layer_types": write_layer_types(config), **values}


def pattern_fields(kinds: str, window: int | None) -> dict[str, Any]:
    """ModelConfig's fields for blocks of these kinds, a letter each; `window` is of those that have one."""
    is_mixed = len(set(kinds)) > 1 or kinds.strip(WINDOW + FULL) != ""
    return {
        "window_size": window if WINDOW in kinds else None,
        "layer_pattern": pattern_of(kinds) if is_mixed else None,
    }


def write_layer_types(config: ResolvedModel, full: str = FULL) -> list[str] | None:
    """`layer_types` of a model; None where it has layers of other kinds. `full`: the letter of the family's layers of
    full attention."""
    names = {WINDOW: "sliding_attention", full: "full_attention", **dict.fromkeys(LINEAR + MAMBA, "linear_attention")}
    kinds = config.attention_kinds
    return [names[one] for one in kinds] if set(kinds) <= names.keys() else None


@dataclass(frozen=True, kw_only=True)
class WindowPattern:
    """A window in all layers but each last one of a period, where the file has no `layer_types`."""

    period: int  # the usual number of layers
    window: int = 4096  # the usual size
    period_names: tuple[str, ...] = ()  # what the field that has it may be called
    rotates_windows_only: bool = False  # layers without a window have no positions
    may_be_off: bool = False  # without a size of the window no layer has one, and all rotate

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        layers, window = ours["num_layers"], read_window(reader, self.window)
        name, period = "layer_types", self.period
        if self.period_names:
            name = reader.first_of(self.period_names)
            period = reader.get(name, self.period)
        if window is None and self.may_be_off:
            kinds = read_layer_types(reader, layers) or FULL
        else:
            kinds = _read_kinds(reader, layers, period, name)
            if self.rotates_windows_only:
                kinds = kinds.replace(FULL, WITHOUT_POSITIONS)
        if WINDOW in kinds and window is None:
            reader.problem("sliding_window", "is null, but layers have a window")
        return pattern_fields(kinds, window)

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        is_off = self.may_be_off and set(config.attention_kinds) == {FULL}
        full = WITHOUT_POSITIONS if self.rotates_windows_only and not is_off else FULL
        window = None if is_off else config.window_size or self.window
        return {"layer_types": write_layer_types(config, full), "sliding_window": window}


@dataclass(frozen=True, kw_only=True)
class QwenWindows:
    """Qwen's: if `use_sliding_window` is set, some layers have a window."""

    # Which ones, without `layer_types`: `last`, from `max_window_layers` on; `alternate`, each second one before
    # `max_window_layers`; `all`, and the family knows neither `layer_types` nor that number.
    layers: Literal["last", "alternate", "all"] = "last"

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        layers, uses = ours["num_layers"], reader.get("use_sliding_window", False)
        window, first = read_window(reader, 4096), reader.get("max_window_layers", 28)
        if type(uses) is not bool or type(first) is not int or not 0 < layers <= _MOST:
            reader.problem("use_sliding_window", "or max_window_layers is not of its type")
            return {}
        kinds = None if self.layers == "all" else read_layer_types(reader, layers)
        if kinds is None:
            kinds = self._kinds(layers, max(first, 0)) if uses and window is not None else FULL * layers
        if WINDOW in kinds and (not uses or window is None):
            reader.problem(
                "layer_types", "has sliding_attention, but use_sliding_window is false or sliding_window null"
            )
        return pattern_fields(kinds, window)

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        uses = config.window_size is not None
        values: dict[str, Any] = {"use_sliding_window": uses, "sliding_window": config.window_size}
        if self.layers == "all":
            return values
        if config.layer_pattern is not None or (uses and self.layers == "alternate"):
            return values | {"layer_types": write_layer_types(config)}
        return values | ({"max_window_layers": 0} if uses else {})

    def _kinds(self, layers: int, bound: int) -> str:
        """The letters of the layers where windows are used; `bound` is `max_window_layers`."""
        if self.layers == "all":
            return WINDOW * layers
        if self.layers == "alternate":
            return "".join(WINDOW if number % 2 == 0 and number < bound else FULL for number in range(layers))
        slides = max(0, layers - bound)
        return FULL * (layers - slides) + WINDOW * slides


class LayersWithoutPositions:
    """SmolLM3's: a list of the layers that rotate, or each last one of an interval does not."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        layers, rotated = ours["num_layers"], reader.get("no_rope_layers")
        interval, kinds = reader.get("no_rope_layer_interval", 4), FULL
        if isinstance(rotated, list) and rotated and set(map(str, rotated)) <= {"0", "1"}:
            kinds = "".join(FULL if one else WITHOUT_POSITIONS for one in rotated)
            if len(rotated) != layers:
                reader.problem("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
        elif rotated is None and type(interval) is int and 1 <= interval <= _MOST and layers > 0:
            kinds = repeated(FULL * (interval - 1) + WITHOUT_POSITIONS, layers)
        else:
            reader.problem("no_rope_layers", f"is {str(rotated)[:40]!r}, not a list of 0 and 1 for the layers")
        types = reader.get("layer_types")
        if types is not None and (not isinstance(types, list) or set(map(str, types)) != {"full_attention"}):
            reader.problem("layer_types", "has windows, which megacore does not have in this family")
        return pattern_fields(kinds, None)

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"no_rope_layers": [0 if kind == WITHOUT_POSITIONS else 1 for kind in config.attention_kinds]}


_OF_GPT_NEO = {"local": WINDOW, "global": FULL}


class AttentionTypes:
    """GPT-Neo's: pairs of names of layers and how often they are repeated."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        window = reader.count("window_size", 256, "positions")
        if window is None and reader.get("window_size", 256) is None:
            reader.problem("window_size", "is 'None', not a number of positions")
        return pattern_fields(self._kinds(reader, ours["num_layers"]), window or 256)

    def _kinds(self, reader: ConfigReader, layers: int) -> str:
        kinds = ""
        types = reader.get("attention_types", [[["global", "local"], 12]])
        for pair in types if isinstance(types, list) else [None]:
            names, times = pair if isinstance(pair, list) and len(pair) == 2 else (None, 0)
            if not isinstance(names, list) or not names or not set(map(str, names)) <= _OF_GPT_NEO.keys():
                reader.problem("attention_types", "is not a list of pairs: names of global and local, and a number")
                return FULL
            if type(times) is not int or not 0 < times * len(names) <= _MOST:
                reader.problem("attention_types", f"repeats kinds of layers {str(times)[:20]!r} times")
                return FULL
            kinds += "".join(_OF_GPT_NEO[name] for name in names) * times
            if len(kinds) > _MOST:
                break
        if len(kinds) != layers:
            reader.problem("attention_types", f"has {len(kinds)} entries for {layers} layers")
        listed = reader.get("attention_layers")  # which transformers makes anew
        if listed is not None and listed != self._names(kinds):
            reader.problem("attention_layers", "differs from attention_types")
        return kinds or FULL

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"attention_types": [[self._names(config.attention_kinds), 1]], "window_size": config.window_size or 256}

    def _names(self, kinds: str) -> list[str | None]:
        names = {letter: name for name, letter in _OF_GPT_NEO.items()}
        return [names.get(kind) for kind in kinds]
