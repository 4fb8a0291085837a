"""OPT: GPT-2's block with ReLU, and a position table whose first two rows belong to no token."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import (
    ACTIVATIONS,
    Family,
    Same,
    TensorRule,
    q_k_v,
    read_tied,
    write_activation,
    write_tied,
)

_LAYER = "model.decoder.layers.{i}"


def _read(reader: ConfigReader) -> dict[str, Any]:
    hidden, bias = reader.get("hidden_size", 768), reader.get("enable_bias", True)
    reader.only("word_embed_proj_dim", (hidden, None), None)
    if type(bias) is not bool:
        reader.problem("enable_bias", f"is {str(bias)[:20]!r}, not true or false")
    return {
        "activation": reader.activation("activation_function", ACTIVATIONS, "relu"),
        "disable_bias_linear": bias is False,
    } | read_tied(reader, default=True)


def _write(config: ResolvedModel) -> dict[str, Any]:
    return {
        "activation_function": write_activation(config),
        "enable_bias": not config.disable_bias_linear,
        "word_embed_proj_dim": config.hidden_size,
        "pad_token_id": None,  # whose default is of the released vocabulary
    } | write_tied(config)


def _both(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias"))


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    prefix="model.",
    same=(
        Same("num_layers", ("num_hidden_layers",), 12),
        Same("hidden_size", ("hidden_size",), 768),
        Same("num_attention_heads", ("num_attention_heads",), 12),
        Same("ffn_hidden_size", ("ffn_dim",), 3072),
        Same("max_position_embeddings", ("max_position_embeddings",), 2048),
        Same("vocab_size", ("vocab_size",), 50272),
        Same("init_method_std", ("init_std",), 0.02),
        Same("hidden_dropout", ("dropout",), 0.1),
        Same("attention_dropout", ("attention_dropout",), 0.0),
    ),
    fixed={
        "do_layer_norm_before": ((True,), True),
        "_remove_final_layer_norm": ((False,), False),
        "layer_norm_elementwise_affine": ((True,), True),
    },
    constants={"position_offset": 2, "norm_epsilon": 1e-5},
    ignored=frozenset(("layerdrop",)),  # of training
    read=_read,
    write=_write,
    rules=(
        TensorRule("embedding.tokens.weight", ("model.decoder.embed_tokens.weight",)),
        TensorRule("embedding.positions", ("model.decoder.embed_positions.weight",)),
        *_both("blocks.{i}.attention_norm", f"{_LAYER}.self_attn_layer_norm"),
        *(
            TensorRule(
                f"blocks.{{i}}.attention.qkv.{kind}",
                tuple(f"{_LAYER}.self_attn.{one}_proj.{kind}" for one in "qkv"),
                q_k_v,
            )
            for kind in ("weight", "bias")
        ),
        *_both("blocks.{i}.attention.output", f"{_LAYER}.self_attn.out_proj"),
        *_both("blocks.{i}.mlp_norm", f"{_LAYER}.final_layer_norm"),
        *_both("blocks.{i}.mlp.up", f"{_LAYER}.fc1"),
        *_both("blocks.{i}.mlp.down", f"{_LAYER}.fc2"),
        *_both("head.norm", "model.decoder.final_layer_norm"),
        TensorRule("head.weight", ("lm_head.weight",)),
    ),
    ties={"lm_head.weight": "model.decoder.embed_tokens.weight"},
)
