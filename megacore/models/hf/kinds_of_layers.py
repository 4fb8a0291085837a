"""Layers of several kinds in a config.json: `layer_types`, and the window of some of them."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WINDOW, pattern_of
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


def write_layer_types(config: ResolvedModel) -> list[str] | None:
    """`layer_types` of a model; None where it has layers of other kinds."""
    kinds = config.attention_kinds
    return [_TYPES[one] for one in kinds] if set(kinds) <= _TYPES.keys() else None
