"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 with one key and value for all heads. MPT: ALiBi, and no biases at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Layout,
    Run,
    Same,
    TensorRule,
    read_tied,
    stacked_q_k_v,
    write_activation,
    write_tied,
)

# ---- GPT-BigCode -----------------------------------------------------------------------------------------------------


def _runs(config: ResolvedModel) -> Iterator[Run]:
    """One key and one value: after all queries. One for each head: as megacore has them."""
    if config.query_groups == 1:
        yield from stacked_q_k_v.runs(config)
    else:
        yield Run(source=0, start=0, stop=sum(stacked_q_k_v.sizes(config)))


_FUSED = Layout(stacked_q_k_v.sizes, _runs)


def _read_bigcode(reader: ConfigReader) -> dict[str, Any]:
    shared, heads = reader.get("multi_query", True), reader.get("n_head", 12)
    dropout = reader.get("resid_pdrop", 0.1)
    if type(shared) is not bool:
        reader.problem("multi_query", f"is {str(shared)[:20]!r}, not true or false")
    reader.only("num_key_value_heads", (1 if shared else heads,), 1 if shared else heads)
    return {
        "num_query_groups": 1 if shared else None,
        "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        "activation": reader.activation("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"),
    } | read_tied(reader, default=True)


def _write_bigcode(config: ResolvedModel) -> dict[str, Any]:
    return {
        "multi_query": config.query_groups == 1,
        "num_key_value_heads": config.query_groups,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        # The family's usual name of what write_activation calls gelu_new.
        "activation_function": "gelu_pytorch_tanh" if config.activation == "gelu" else write_activation(config),
    } | write_tied(config)


def _both(ours: str, theirs: str, layout: Layout | None = None) -> tuple[TensorRule, ...]:
    """Weight and bias of a layer of a block."""
    ours, theirs = f"blocks.{{i}}.{ours}", f"transformer.h.{{i}}.{theirs}"
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",), layout) for kind in ("weight", "bias"))


GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    prefix="transformer.",
    same=(
        Same("num_layers", ("n_layer", "num_hidden_layers"), 12),
        Same("hidden_size", ("n_embd", "hidden_size"), 768),
        Same("num_attention_heads", ("n_head", "num_attention_heads"), 12),
        Same("ffn_hidden_size", ("n_inner",), None),
        Same("max_position_embeddings", ("n_positions", "max_position_embeddings"), 1024),
        Same("vocab_size", ("vocab_size",), 50257),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("attention_dropout", ("attn_pdrop",), 0.1),
    ),
    fixed={"scale_attn_weights": ((True,), True)},
    ignored=frozenset(
        (
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "summary_type", "summary_use_proj"),
            *("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "validate_runner_input"),
            *("inference_runner", "max_batch_size", "max_sequence_length", "pre_allocate_kv_cache", "pad_key_length"),
        )
    ),
    read=_read_bigcode,
    write=_write_bigcode,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.wte.weight",)),
        TensorRule("embedding.positions", ("transformer.wpe.weight",)),
        *_both("attention_norm", "ln_1"),
        *_both("attention.qkv", "attn.c_attn", _FUSED),
        *_both("attention.output", "attn.c_proj"),
        *_both("mlp_norm", "ln_2"),
        *_both("mlp.up", "mlp.c_fc"),
        *_both("mlp.down", "mlp.c_proj"),
        TensorRule("head.norm.weight", ("transformer.ln_f.weight",)),
        TensorRule("head.norm.bias", ("transformer.ln_f.bias",)),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
    ties={"lm_head.weight": "transformer.wte.weight"},
)


# ---- MPT -------------------------------------------------------------------------------------------------------------

_ATTENTION: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "clip_qkv": (None,),
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
    dropout = table.get("attn_pdrop", 0.0)
    return {
        "attention_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        **read_tied(reader, default=True),
    }


def _write_mpt(config: ResolvedModel) -> dict[str, Any]:
    table = {name: allowed[0] for name, allowed in _ATTENTION.items()}
    return write_tied(config) | {"attn_config": table}


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
