"""BLOOM: attention that falls with distance (ALiBi), a norm after the embedding, and query, key and value fused by
head, as megacore has them."""

from __future__ import annotations

from typing import Any

from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, Same, TensorRule, read_tied, write_tied

# How Megatron-LM trained it: not what is computed.
_IGNORED = """
    offset_alibi skip_bias_add skip_bias_add_qkv attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion
"""


def _read(reader: ConfigReader) -> dict[str, Any]:
    parts = reader.get("pretraining_tp", 1)
    if reader.get("slow_but_exact", False) is not False and parts != 1:
        reader.problem(
            "slow_but_exact",
            f"is true with pretraining_tp {str(parts)[:20]}, for which transformers leaves out the biases of each "
            "block's output layers: set slow_but_exact to false",
        )
    return read_tied(reader, default=True)


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(f"{ours}.{kind}", (f"transformer.{theirs}.{kind}",)) for kind in ("weight", "bias"))


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    same=(
        Same("num_layers", ("n_layer", "num_hidden_layers"), 2),
        Same("hidden_size", ("hidden_size", "n_embed"), 64),
        Same("num_attention_heads", ("n_head", "num_attention_heads"), 8),
        Same("max_position_embeddings", ("seq_length",), 2048),
        Same("vocab_size", ("vocab_size",), 250880),
        Same("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
        Same("init_method_std", ("initializer_range",), 0.02),
        Same("hidden_dropout", ("hidden_dropout",), 0.0),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    fixed={
        "apply_residual_connection_post_layernorm": ((False,), False),
        "n_inner": ((None,), None),
    },
    constants={"position_embedding_type": "alibi", "embedding_layernorm": True},
    ignored=frozenset(_IGNORED.split()),
    read=_read,
    write=write_tied,
    rules=(
        TensorRule("embedding.tokens.weight", ("transformer.word_embeddings.weight",)),
        *_both("embedding.norm", "word_embeddings_layernorm"),
        *_both("blocks.{i}.attention_norm", "h.{i}.input_layernorm"),
        *_both("blocks.{i}.attention.qkv", "h.{i}.self_attention.query_key_value"),
        *_both("blocks.{i}.attention.output", "h.{i}.self_attention.dense"),
        *_both("blocks.{i}.mlp_norm", "h.{i}.post_attention_layernorm"),
        *_both("blocks.{i}.mlp.up", "h.{i}.mlp.dense_h_to_4h"),
        *_both("blocks.{i}.mlp.down", "h.{i}.mlp.dense_4h_to_h"),
        *_both("head.norm", "ln_f"),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    ties={"lm_head.weight": "transformer.word_embeddings.weight"},
)
