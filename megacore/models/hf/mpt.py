"""MPT: ALiBi, and no biases at all."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Layout, Same, TensorRule, read_tied, stacked_q_k_v, write_tied

_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "softmax_scale": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


def _read_mpt(reader: ConfigReader) -> dict[str, Any]:
    table, heads = reader.get("attn_config", {}), reader.get("n_heads", 16)
    if not isinstance(table, dict):
        reader.problem("attn_config", f"is {str(table)[:40]!r}, not an object")
        table = {}
    for name, allowed in _ATTENTION.items():
        if name in table and table[name] not in allowed:
            reader.problem(f"attn_config.{name}", f"is {str(table[name])[:40]!r}, but megacore has only {allowed[0]!r}")
    if type(heads) is int and heads & (heads - 1):
        reader.problem("n_heads", f"is {heads}, no power of two, for which this family's ALiBi has slopes of its own")
    dropout, clipping = table.get("attn_pdrop", 0.0), ConfigReader(table, reader.where)
    fields = {
        "clip_qkv": clipping.copied("clip_qkv", ("clip_qkv",), None) or None,  # 0 is no limit to transformers
        "attention_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        **read_tied(reader, default=True),
    }
    reader.problems += clipping.problems
    return fields


def _write_mpt(config: ResolvedModel) -> dict[str, Any]:
    table = {name: allowed[0] for name, allowed in _ATTENTION.items()}
    return write_tied(config) | {"attn_config": table | {"clip_qkv": config.clip_qkv}}


def _weight(ours: str, theirs: str, layout: Layout | None = None) -> TensorRule:
    return TensorRule(f"blocks.{{i}}.{ours}.weight", (f"transformer.blocks.{{i}}.{theirs}.weight",), layout)


MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    other_names=("MPTForCausalLM",),
    prefix="transformer.",
    same=(
        Same("num_layers", ("n_layers", "num_hidden_layers"), 24),
        Same("hidden_size", ("d_model", "hidden_size"), 2048),
        Same("num_attention_heads", ("n_heads", "num_attention_heads"), 16),
        Same("max_position_embeddings", ("max_seq_len",), 2048),
        Same("vocab_size", ("vocab_size",), 50368),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("resid_pdrop",), 0.0),
    ),
    fixed={
        "expansion_ratio": ((4,), 4),
        "no_bias": ((True,), True),
        "logit_scale": ((None,), None),
        "embedding_fraction": ((1.0, 1), 1.0),
    },
    constants={
        "position_embedding_type": "alibi",
        "activation": "gelu-exact",
        "norm_bias": False,
        "disable_bias_linear": True,
    },
    ignored=frozenset(("learned_pos_emb", "init_device", "norm_type", "verbose", "emb_pdrop", "init_config")),
    read=_read_mpt,
    write=_write_mpt,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.wte.weight",)),
        _weight("attention_norm", "norm_1"),
        _weight("attention.qkv", "attn.Wqkv", stacked_q_k_v),
        _weight("attention.output", "attn.out_proj"),
        _weight("mlp_norm", "norm_2"),
        _weight("mlp.up", "ffn.up_proj"),
        _weight("mlp.down", "ffn.down_proj"),
        TensorRule("head.norm.weight", ("transformer.norm_f.weight",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    ties={"lm_head.weight": "transformer.wte.weight"},
)
