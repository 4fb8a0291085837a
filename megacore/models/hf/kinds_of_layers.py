"""Layers of several kinds in a config.json: `layer_types`, and the window of some of them."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WINDOW, pattern_of, repeated
from megacore.models.hf.config_reader import ConfigReader

_LETTERS = {"sliding_attention": WINDOW, "full_attention": FULL}
_TYPES = {letter: name for name, letter in _LETTERS.items()}


def read_layer_types(reader: ConfigReader, layers: Any) -> str | None:
    """The letters of the file's layers, as of --attention-pattern; None where it has no valid list.

    Args:
        reader: the file.
        layers: its number of layers.
    """
    types = reader.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not set(map(str, types)) <= _LETTERS.keys():
        reader.problem("layer_types", "has kinds of layers that megacore does not know")
        return None
    if len(types) != layers:
        reader.problem("layer_types", f"has {len(types)} entries for {layers} layers")
        return None
    return "".join(_LETTERS[one] for one in types)


def read_kinds(reader: ConfigReader, layers: Any, period: Any, name: str) -> str:
    """The letters of the layers, of which each last one of a period has no window where the file has no `layer_types`.

    Args:
        reader: the file.
        layers: its number of layers.
        period: that number of layers.
        name: the field that has it.
    """
    kinds = read_layer_types(reader, layers)
    if kinds is not None:
        return kinds
    if type(layers) is not int or not 0 < layers <= 10_000:
        return FULL  # a problem of another field
    if type(period) is not int or not 0 < period <= 10_000:
        reader.problem(name, f"is {str(period)[:40]!r}, not a number of layers")
        return FULL
    return repeated(WINDOW * (period - 1) + FULL, layers)


def require_window(reader: ConfigReader, kinds: str, window: int | None) -> None:
    """Note that layers have a window of no size."""
    if WINDOW in kinds and window is None:
        reader.problem("sliding_window", "is null, but layers have a window")


def pattern_fields(kinds: str, window: int | None) -> dict[str, Any]:
    """ModelConfig's fields for blocks of these kinds.

    Args:
        kinds: a letter for each block.
        window: of those that have one.
    """
    is_mixed = len(set(kinds)) > 1 or kinds.strip(WINDOW + FULL) != ""
    return {
        "window_size": window if WINDOW in kinds else None,
        "attention_pattern": pattern_of(kinds) if is_mixed else None,
    }


def write_layer_types(config: ResolvedModel, full: str = FULL) -> list[str] | None:
    """`layer_types` of a model; None where it has layers of other kinds.

    Args:
        config: the model.
        full: the letter of the family's layers of full attention.
    """
    names = {WINDOW: _TYPES[WINDOW], full: _TYPES[FULL]}
    kinds = config.attention_kinds
    return [names[one] for one in kinds] if set(kinds) <= names.keys() else None
