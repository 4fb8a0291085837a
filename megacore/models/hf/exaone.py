"""EXAONE 4: norms of the outputs of its layers and of heads; where some layers have a window, only they are rotated."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.config.layer_pattern import FULL, WITHOUT_POSITIONS
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import write_tied
from megacore.models.hf.kinds_of_layers import (
    pattern_fields,
    read_kinds,
    read_layer_types,
    require_window,
    write_layer_types,
)
from megacore.models.hf.llama import block_rules, llama_like, read_common, same_fields, window_of
from megacore.models.hf.rope import write_rope


def _read(reader: ConfigReader) -> dict[str, Any]:
    layers, window = reader.get("num_hidden_layers", 32), window_of(reader, default=4096)
    period = reader.get("sliding_window_pattern", 4)
    if window is None:
        kinds = read_layer_types(reader, layers) or FULL
        require_window(reader, kinds, window)
    else:
        kinds = read_kinds(reader, layers, period, "sliding_window_pattern").replace(FULL, WITHOUT_POSITIONS)
    return read_common(reader) | pattern_fields(kinds, window)


def _write(config: ResolvedModel) -> dict[str, Any]:
    has_window = set(config.attention_kinds) != {FULL}
    types = write_layer_types(config, full=WITHOUT_POSITIONS if has_window else FULL)
    window = (config.window_size or 4096) if has_window else None
    return write_rope(config) | write_tied(config) | {"layer_types": types, "sliding_window": window}


EXAONE4 = llama_like(
    "exaone4",
    "Exaone4ForCausalLM",
    same=same_fields(groups=32, positions=2048, inner=16384, vocabulary=102400, head=None, epsilon=1e-5),
    constants={"disable_bias_linear": True, "qk_layernorm": True, "norm_placement": "after"},
    ignored=frozenset(("cache_implementation",)),
    read=_read,
    write=_write,
    rules=block_rules(
        head_norms=True,
        norms={"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    ),
)
