"""OLMo 3: OLMo 2's block with a window in three layers of four, whose rotation is not scaled."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import read_tied, write_tied
from megacore.models.hf.kinds_of_layers import pattern_fields, read_kinds, require_window, write_layer_types
from megacore.models.hf.llama import llama_like, same_fields, window_of
from megacore.models.hf.llama_variants import OLMO2
from megacore.models.hf.rope import read_rope, read_ropes_of_kinds, rotation_of, write_ropes_of_kinds

_BASE = 500_000.0


def _read(reader: ConfigReader) -> dict[str, Any]:
    kinds = read_kinds(reader, reader.get("num_hidden_layers", 32), 4, "layer_types")
    window = window_of(reader, default=4096)
    require_window(reader, kinds, window)
    return rotation_of(*_read_ropes(reader), pattern_fields(kinds, window)) | read_tied(reader, default=False)


def _read_ropes(reader: ConfigReader) -> tuple[dict[str, Any], float | None]:
    """The rotation of layers without a window, and the base of those with one, which a file without tables of kinds
    of layers does not change."""
    given, tables = reader.get("max_position_embeddings", 2048), reader.get("rope_parameters")
    positions = given if type(given) is int else 1
    if tables is None:
        return read_rope(reader, positions, usual_base=_BASE), _BASE
    if not isinstance(tables, dict) or not tables.keys() <= {"full_attention", "sliding_attention"}:
        reader.problem("rope_parameters", "has no tables of kinds of layers alone")
        return {}, None
    reader.only("rope_scaling", (None,))
    return read_ropes_of_kinds(reader, positions, base=reader.get("rope_theta", _BASE), window_base=_BASE)


def _write(config: ResolvedModel) -> dict[str, Any]:
    window = {"layer_types": write_layer_types(config), "sliding_window": config.window_size or 4096}
    return write_ropes_of_kinds(config) | write_tied(config) | window


OLMO3 = llama_like(
    "olmo3",
    "Olmo3ForCausalLM",
    same=same_fields(groups=None, positions=2048, inner=11008, vocabulary=50304, head=None, epsilon=1e-5),
    fixed=OLMO2.fixed,
    constants=OLMO2.constants,
    read=_read,
    write=_write,
    rules=OLMO2.rules,
)
