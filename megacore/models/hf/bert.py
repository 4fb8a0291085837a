"""What BERTs have beside rows: positions that begin after the padding, token types, and ModernBERT's two rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.rows import ReadOnly

_KINDS = ("full_attention", "sliding_attention")


class BertPart(Protocol):
    """Fields of BertSection."""

    def read(self, reader: ConfigReader) -> dict[str, Any]:
        """From a file; notes problems in the reader."""
        ...

    def write(self, config: ResolvedModel, bert: ResolvedBert) -> dict[str, Any]:
        """The fields of the file."""
        ...


class PositionsAfterPadding:
    """RoBERTa's padding has a row of the position table, and the first token the row after it."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        padding = reader.get("pad_token_id", 1)
        rows = reader.copied("max_position_embeddings", ("max_position_embeddings",), 512)
        if type(padding) is not int or not 0 <= padding < rows - 1:
            reader.problem("pad_token_id", f"is {str(padding)[:40]!r}, not a row of the position table before the last")
            padding = 1
        return {"position_offset": padding + 1, "max_position_embeddings": rows - padding - 1}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"pad_token_id": config.position_offset - 1, "max_position_embeddings": config.position_rows}


class TokenTypes:
    """One or two of them."""

    def read(self, reader: ConfigReader) -> dict[str, Any]:
        types = reader.get("type_vocab_size", 2)
        if type(types) is not int or types not in (1, 2):
            reader.problem("type_vocab_size", f"is {str(types)[:40]!r}, but megacore has only 1 or 2")
            types = 2
        return {"num_token_types": types}

    def write(self, config: ResolvedModel, bert: ResolvedBert) -> dict[str, Any]:
        return {"type_vocab_size": bert.num_token_types}


# ---- ModernBERT ------------------------------------------------------------------------------------------------------


def _base(reader: ConfigReader, kind: str, older: str, default: float) -> float:
    """The rotary base of a kind of block, which older files have in a field of its own."""
    table = reader.get("rope_parameters")
    entry = table.get(kind) if isinstance(table, dict) else None
    base = reader.get(older, default)
    if isinstance(entry, dict):
        base = entry.get("rope_theta", base)
        if entry.get("rope_type", "default") != "default" or entry.keys() - {"rope_type", "rope_theta"}:
            reader.problem(f"rope_parameters.{kind}", "has a rope scaling, which megacore does not have for ModernBERT")
    if type(base) not in (int, float):
        reader.problem(older, f"is {str(base)[:40]!r}, not a number")
        return default
    return float(base)


def _layer_types(layers: int, interval: int) -> list[str]:
    return [_KINDS[i % interval > 0] for i in range(layers)]


class GlobalRotation(ReadOnly):
    """The rotation of global blocks, and the window of local ones; `GlobalBlocks` writes both."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        base, window = _base(reader, _KINDS[0], "global_rope_theta", 160_000.0), reader.get("local_attention", 128)
        if type(window) is not int:
            reader.problem("local_attention", "is not a whole number")
        return {"rotary_base": base, "window_size": window}


class GlobalBlocks:
    """Which blocks are global, and the rotary base of local ones."""

    def read(self, reader: ConfigReader) -> dict[str, Any]:
        layers, interval = reader.get("num_hidden_layers", 22), reader.get("global_attn_every_n_layers", 3)
        kinds = reader.get("layer_types")
        if isinstance(kinds, list) and type(layers) is int and len(kinds) == layers:
            further = [i for i in range(1, layers) if kinds[i] == _KINDS[0]]
            interval = further[0] if further else layers
        if type(interval) is not int or interval < 1:
            reader.problem("global_attn_every_n_layers", "is not a number of blocks")
            interval = 1
        if kinds is not None and kinds != _layer_types(layers if type(layers) is int else 0, interval):
            reader.problem("layer_types", "is not one global block and then a fixed number of local ones, repeated")
        local = _base(reader, _KINDS[1], "local_rope_theta", 10_000.0)
        return {"global_attention_interval": interval, "local_rotary_base": local}

    def write(self, config: ResolvedModel, bert: ResolvedBert) -> dict[str, Any]:
        bases = {_KINDS[0]: config.rotary_base, _KINDS[1]: bert.local_rotary_base}
        return {
            "layer_types": _layer_types(config.num_layers, bert.global_attention_interval),
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
            "local_attention": config.window_size,
        }
