"""GPT-2: Conv1D matrices, stored as [in, out], and query, key and value stacked. GPT-BigCode (StarCoder, SantaCoder):
the same with usual matrices, and one key and value for all heads."""

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

_IGNORED = """
    reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout
"""


def _read(reader: ConfigReader, activation: str = "gelu_new") -> dict[str, Any]:
    dropout = reader.get("resid_pdrop", 0.1)  # megacore has one for all; those of transformers may differ
    return {
        "hidden_dropout": float(dropout) if type(dropout) in (int, float) else 0.0,
        "activation": reader.activation("activation_function", ACTIVATIONS, activation),
    } | read_tied(reader, default=True)


def _write(config: ResolvedModel) -> dict[str, Any]:
    return {
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "activation_function": write_activation(config),
    } | write_tied(config)


def _both(ours: str, theirs: str, *, layout: Layout | None = None, transposed: bool = False) -> tuple[TensorRule, ...]:
    """Weight and bias of a layer of a block."""
    ours, theirs = f"blocks.{{i}}.{ours}", f"transformer.h.{{i}}.{theirs}"
    return (
        TensorRule(f"{ours}.weight", (f"{theirs}.weight",), layout, transposed),
        TensorRule(f"{ours}.bias", (f"{theirs}.bias",), layout),
    )


def _family(model_type: str, architecture: str, qkv: Layout, *, transposed: bool, **parts: Any) -> Family:
    """A family with GPT-2's names.

    Args:
        model_type: as in config.json.
        architecture: transformers' class.
        qkv: order of the rows of queries, keys and values.
        transposed: matrices are stored as [in, out].
        parts: the other attributes of `Family`.
    """
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="transformer.",
        same=(
            Same("num_layers", ("n_layer", "num_hidden_layers"), 12),
            Same("hidden_size", ("n_embd", "hidden_size"), 768),
            Same("num_attention_heads", ("n_head", "num_attention_heads"), 12),
            Same("ffn_hidden_size", ("n_inner",), None),
            Same("max_position_embeddings", ("n_positions", "max_position_embeddings", "n_ctx"), 1024),
            Same("vocab_size", ("vocab_size",), 50257),
            Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
            Same("init_method_std", ("initializer_range",), 0.02),
            Same("attention_dropout", ("attn_pdrop",), 0.1),
        ),
        rules=(
            TensorRule("embedding.tokens.weight", ("transformer.wte.weight",)),
            TensorRule("embedding.positions", ("transformer.wpe.weight",)),
            *_both("attention_norm", "ln_1"),
            *_both("attention.qkv", "attn.c_attn", layout=qkv, transposed=transposed),
            *_both("attention.output", "attn.c_proj", transposed=transposed),
            *_both("mlp_norm", "ln_2"),
            *_both("mlp.up", "mlp.c_fc", transposed=transposed),
            *_both("mlp.down", "mlp.c_proj", transposed=transposed),
            TensorRule("head.norm.weight", ("transformer.ln_f.weight",)),
            TensorRule("head.norm.bias", ("transformer.ln_f.bias",)),
            TensorRule("head.weight", ("lm_head.weight",)),
        ),
        buffers=(".attn.bias", ".attn.masked_bias"),
        ties={"lm_head.weight": "transformer.wte.weight"},
        **parts,
    )


GPT2 = _family(
    "gpt2",
    "GPT2LMHeadModel",
    stacked_q_k_v,
    transposed=True,
    fixed={
        "scale_attn_weights": ((True,), True),
        "scale_attn_by_inverse_layer_idx": ((False,), False),
    },
    ignored=frozenset(_IGNORED.split()),
    read=_read,
    write=_write,
)


# ---- GPT-BigCode -----------------------------------------------------------------------------------------------------

_IGNORED_OF_BIGCODE = """
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 validate_runner_input inference_runner max_batch_size
    max_sequence_length pre_allocate_kv_cache pad_key_length
"""


def _runs(config: ResolvedModel) -> Iterator[Run]:
    """One key and one value: after all queries. One for each head: as megacore has them."""
    if config.query_groups == 1:
        yield from stacked_q_k_v.runs(config)
    else:
        yield Run(source=0, start=0, stop=sum(stacked_q_k_v.sizes(config)))


def _read_bigcode(reader: ConfigReader) -> dict[str, Any]:
    shared, heads = reader.get("multi_query", True), reader.get("n_head", 12)
    if type(shared) is not bool:
        reader.problem("multi_query", f"is {str(shared)[:20]!r}, not true or false")
    reader.only("num_key_value_heads", (1 if shared else heads,), 1 if shared else heads)
    return {"num_query_groups": 1 if shared else None} | _read(reader, "gelu_pytorch_tanh")


def _write_bigcode(config: ResolvedModel) -> dict[str, Any]:
    values = _write(config) | {"multi_query": config.query_groups == 1, "num_key_value_heads": config.query_groups}
    if config.activation == "gelu":  # the family's usual name of what write_activation calls gelu_new
        values["activation_function"] = "gelu_pytorch_tanh"
    return values


GPT_BIGCODE = _family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    Layout(stacked_q_k_v.sizes, _runs),
    transposed=False,
    fixed={"scale_attn_weights": ((True,), True)},
    ignored=frozenset((_IGNORED + _IGNORED_OF_BIGCODE).replace("reorder_and_upcast_attn", "").split()),
    read=_read_bigcode,
    write=_write_bigcode,
)
