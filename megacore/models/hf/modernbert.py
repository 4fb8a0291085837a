"""ModernBERT: local and global blocks with different rotary bases, and a gated MLP whose two matrices are stored as
one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Layout, Run, Same, TensorRule, read_tied, stacked_q_k_v, write_tied

_KINDS = ("full_attention", "sliding_attention")
_BASES = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
_LAYER = "model.layers.{i}"
# How transformers runs it, and heads of other tasks.
_IGNORED = """
    initializer_cutoff_factor classifier_pooling classifier_bias classifier_activation deterministic_flash_attn
    reference_compile repad_logits_with_grad sparse_prediction sparse_pred_ignore_index mlp_dropout embedding_dropout
"""


def _half(number: int) -> Layout:
    """One of the two matrices that are stored as one."""

    def runs(config: ResolvedModel) -> Iterator[Run]:
        inner = config.ffn_hidden_size
        yield Run(source=0, start=number * inner, stop=(number + 1) * inner)

    return Layout(lambda config: ((number + 1) * config.ffn_hidden_size,), runs)


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = {"rotary_base": _base(reader, "full_attention"), "window_size": reader.get("local_attention", 128)}
    if type(fields["window_size"]) is not int:
        reader.problem("local_attention", "is not a whole number")
    return fields | read_tied(reader, default=True)


def _base(reader: ConfigReader, kind: str) -> float:
    """The rotary base of a kind of block."""
    name, default = _BASES[kind]
    table = reader.get("rope_parameters")
    entry = table.get(kind) if isinstance(table, dict) else None
    base = reader.get(name, default)
    if isinstance(entry, dict):
        base = entry.get("rope_theta", base)
        if entry.get("rope_type", "default") != "default" or entry.keys() - {"rope_type", "rope_theta"}:
            reader.problem(f"rope_parameters.{kind}", "has a rope scaling, which megacore does not have for ModernBERT")
    if type(base) not in (int, float):
        reader.problem(name, f"is {str(base)[:40]!r}, not a number")
        return default
    return float(base)


def _read_bert(reader: ConfigReader) -> dict[str, Any]:
    """Which blocks are global, and the local base."""
    layers, interval = reader.get("num_hidden_layers", 22), reader.get("global_attn_every_n_layers", 3)
    kinds = reader.get("layer_types")
    if isinstance(kinds, list) and type(layers) is int and len(kinds) == layers:
        further = [i for i in range(1, layers) if kinds[i] == _KINDS[0]]
        interval = further[0] if further else layers
    if type(interval) is not int or interval < 1:
        reader.problem("global_attn_every_n_layers", "is not a number of blocks")
        interval = 1
    if kinds is not None and kinds != _layer_types(layers if type(layers) is int else 0, interval):
        reader.problem(
            "layer_types",
            "is not one global block and then a fixed number of local ones, repeated",
        )
    fields: dict[str, Any] = {"global_attention_interval": interval}
    return fields | {"local_rotary_base": _base(reader, "sliding_attention")}


def _layer_types(layers: int, interval: int) -> list[str]:
    return [_KINDS[i % interval > 0] for i in range(layers)]


def _write_bert(config: ResolvedModel, bert: ResolvedBert) -> dict[str, Any]:
    bases = {"full_attention": config.rotary_base, "sliding_attention": bert.local_rotary_base}
    return {
        "layer_types": _layer_types(config.num_layers, bert.global_attention_interval),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "local_attention": config.window_size,
    }


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    bert_style="modern",
    prefix="model.",
    same=(
        Same("num_layers", ("num_hidden_layers",), 22),
        Same("hidden_size", ("hidden_size",), 768),
        Same("num_attention_heads", ("num_attention_heads",), 12),
        Same("ffn_hidden_size", ("intermediate_size",), 1152),
        Same("max_position_embeddings", ("max_position_embeddings",), 8192),
        Same("vocab_size", ("vocab_size",), 50368),
        Same("norm_epsilon", ("norm_eps", "layer_norm_eps"), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    fixed={
        "hidden_activation": (("gelu",), "gelu"),
        "norm_bias": ((False,), False),
        "attention_bias": ((False,), False),
        "mlp_bias": ((False,), False),
        "decoder_bias": ((True,), True),
    },
    optional={"position_embedding_type": ("absolute", "rope")},
    constants={
        "activation": "geglu-exact",
        "norm_bias": False,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
    },
    ignored=frozenset(_IGNORED.split()),
    read=_read,
    write=write_tied,
    read_bert=_read_bert,
    write_bert=_write_bert,
    rules=(
        TensorRule("embedding.tokens.weight", ("model.embeddings.tok_embeddings.weight",)),
        TensorRule("embedding.norm.weight", ("model.embeddings.norm.weight",)),
        TensorRule("blocks.{i}.attention_norm.weight", (f"{_LAYER}.attn_norm.weight",)),
        TensorRule("blocks.{i}.attention.qkv.weight", (f"{_LAYER}.attn.Wqkv.weight",), stacked_q_k_v),
        TensorRule("blocks.{i}.attention.output.weight", (f"{_LAYER}.attn.Wo.weight",)),
        TensorRule("blocks.{i}.mlp_norm.weight", (f"{_LAYER}.mlp_norm.weight",)),
        TensorRule("blocks.{i}.mlp.gate.weight", (f"{_LAYER}.mlp.Wi.weight",), _half(0)),
        TensorRule("blocks.{i}.mlp.up.weight", (f"{_LAYER}.mlp.Wi.weight",), _half(1)),
        TensorRule("blocks.{i}.mlp.down.weight", (f"{_LAYER}.mlp.Wo.weight",)),
        TensorRule("head.norm.weight", ("model.final_norm.weight",)),
        TensorRule("head.transform.weight", ("head.dense.weight",)),
        TensorRule("head.transform_norm.weight", ("head.norm.weight",)),
        TensorRule("head.weight", ("decoder.weight",)),
        TensorRule("head.bias", ("decoder.bias",)),
    ),
    buffers=(".rotary_emb.inv_freq",),
    ties={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
