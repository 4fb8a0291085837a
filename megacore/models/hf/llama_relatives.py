"""Nemotron, Seed-OSS, ERNIE 4.5, Helium, Arcee and Ministral 3: Llama's block with other biases, another activation,
another norm, queries that grow with the position, or the rotation of pairs of neighbouring dimensions, where megacore
rotates dimension i with i + d/2."""

from __future__ import annotations

from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.family import Family, neighbouring_q_k_v, read_tied, write_tied
from megacore.models.hf.llama import (
    block_rules,
    llama_like,
    read_biases,
    read_common,
    same_fields,
    window_of,
    write_biases,
)
from megacore.models.hf.rope import read_rope, write_rope

_NOT_GATED = {"up": "up_proj", "down": "down_proj"}
_RELU2 = {"hidden_act": (("relu2",), "relu2")}


def _flags(reader: ConfigReader, **defaults: bool) -> dict[str, bool]:
    """Fields that are true or false."""
    values = {name: reader.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        if type(value) is not bool:
            reader.problem(name, f"is {str(value)[:20]!r}, not true or false")
    return {name: value is True for name, value in values.items()}


# ---- Nemotron --------------------------------------------------------------------------------------------------------


def _read_nemotron(reader: ConfigReader) -> dict[str, Any]:
    positions, share = reader.get("max_position_embeddings", 4096), reader.get("partial_rotary_factor", 0.5)
    rotation = read_rope(reader, positions if type(positions) is int else 1, share=share)
    return rotation | read_tied(reader, default=False) | read_biases(reader)


NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    prefix="model.",
    same=same_fields(
        groups=None,
        positions=4096,
        inner=24576,
        vocabulary=256000,
        head=None,
        hidden=6144,
        heads=48,
        epsilon=1e-5,
        epsilon_name="norm_eps",
        std=0.0134,
    ),
    fixed=_RELU2,
    constants={"activation": "relu2", "layernorm_1p": True},
    read=_read_nemotron,
    write=lambda config: write_rope(config, share=True) | write_tied(config) | write_biases(config),
    rules=block_rules(biases=True, norm_bias=True, mlp=_NOT_GATED),
    buffers=(".rotary_emb.inv_freq",),
    ties={"lm_head.weight": "model.embed_tokens.weight"},
)


# ---- Seed-OSS --------------------------------------------------------------------------------------------------------


def _read_seed(reader: ConfigReader) -> dict[str, Any]:
    has = _flags(reader, attention_bias=True, attention_out_bias=False, mlp_bias=False)
    biases: dict[str, Any] = {"disable_bias_linear": not all(has.values())}
    if not all(has.values()):
        names = {"attention_bias": "add_qkv_bias", "attention_out_bias": "add_attention_output_bias"}
        biases |= {ours: has[theirs] for theirs, ours in (names | {"mlp_bias": "add_mlp_bias"}).items()}
    dropout = reader.get("residual_dropout", 0.1)
    biases["hidden_dropout"] = float(dropout) if type(dropout) in (int, float) else 0.0
    return read_common(reader) | biases


def _write_seed(config: ResolvedModel) -> dict[str, Any]:
    biases = {"attention_bias": config.qkv_bias, "attention_out_bias": config.attention_output_bias}
    values = {"mlp_bias": config.mlp_bias, "residual_dropout": config.hidden_dropout}
    return write_rope(config) | write_tied(config) | biases | values


SEED_OSS = llama_like(
    "seed_oss",
    "SeedOssForCausalLM",
    same=same_fields(
        groups=8, positions=524288, inner=27648, vocabulary=155136, head=128, layers=64, heads=80, dropout=0.1
    ),
    read=_read_seed,
    write=_write_seed,
    rules=block_rules(biases=True),
)


# ---- ERNIE 4.5 -------------------------------------------------------------------------------------------------------

ERNIE = llama_like(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    other_names=("Ernie4_5_ForCausalLM",),
    same=same_fields(
        groups=2,
        positions=131072,
        inner=3072,
        vocabulary=103424,
        head=128,
        layers=18,
        hidden=1024,
        heads=16,
        epsilon=1e-5,
    ),
    read=lambda reader: (
        read_common(reader, tied=True, base=500_000.0)
        | {"disable_bias_linear": not _flags(reader, use_bias=False)["use_bias"]}
    ),
    write=lambda config: write_rope(config) | write_tied(config) | {"use_bias": not config.disable_bias_linear},
    rules=block_rules(biases=True, qkv=neighbouring_q_k_v),
)


# ---- Helium ----------------------------------------------------------------------------------------------------------


def _read_helium(reader: ConfigReader) -> dict[str, Any]:
    has = _flags(reader, attention_bias=False, mlp_bias=False)
    biases = {"add_qkv_bias": has["attention_bias"], "add_mlp_bias": has["mlp_bias"]}
    return read_common(reader, base=100_000.0) | {"disable_bias_linear": True, **biases}


def _write_helium(config: ResolvedModel) -> dict[str, Any]:
    return write_rope(config) | write_tied(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


HELIUM = llama_like(
    "helium",
    "HeliumForCausalLM",
    same=same_fields(
        groups=20,
        positions=4096,
        inner=7040,
        vocabulary=48000,
        head=128,
        layers=24,
        hidden=2560,
        heads=20,
        epsilon=1e-8,
    ),
    read=_read_helium,
    write=_write_helium,
    rules=block_rules(biases=True, qkv=neighbouring_q_k_v),
)


# ---- Arcee -----------------------------------------------------------------------------------------------------------

ARCEE = llama_like(
    "arcee",
    "ArceeForCausalLM",
    same=same_fields(groups=None, positions=4096, inner=18432, vocabulary=32000, head=None, hidden=2560, epsilon=1e-5),
    fixed=_RELU2,
    constants={"activation": "relu2"},
    read=lambda reader: read_common(reader) | read_biases(reader),
    write=lambda config: write_rope(config) | write_tied(config) | write_biases(config),
    rules=block_rules(biases=True, mlp=_NOT_GATED),
)


# ---- Ministral 3 -----------------------------------------------------------------------------------------------------

_GROWTH, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
_USUAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}


def _read_ministral3(reader: ConfigReader) -> dict[str, Any]:
    """Queries are longer from the original number of positions on, which no model of so few positions reaches."""
    positions, table = reader.get("max_position_embeddings", 262144), reader.get("rope_parameters")
    table = _USUAL_ROPE if table is None else table
    if not isinstance(table, dict):
        reader.problem("rope_parameters", f"is {str(table)[:40]!r}, not an object")
        return {}
    growth, original = table.get(_GROWTH, 0.1), table.get(_ORIGINAL)
    if growth != 0 and not (type(positions) is int and type(original) is int and positions <= original):
        reader.problem(
            f"rope_parameters.{_GROWTH}",
            f"is {str(growth)[:40]!r}, which makes queries longer from position {str(original)[:40]} on, and megacore "
            f"does not; in a copy with max_position_embeddings {str(original)[:40]} the model is the same up to there",
        )
    unread = {_GROWTH, "max_position_embeddings"}
    if table.get("rope_type", table.get("type", "default")) in ("default", "linear"):
        unread.add(_ORIGINAL)
    rope = ConfigReader({"rope_parameters": {k: v for k, v in table.items() if k not in unread}}, reader.where)
    fields = read_rope(rope, positions if type(positions) is int else 1)
    reader.problems += rope.problems
    window = {"disable_bias_linear": True, "window_size": window_of(reader, default=None)}
    return fields | read_tied(reader, default=False) | window


def _write_ministral3(config: ResolvedModel) -> dict[str, Any]:
    table = {_ORIGINAL: config.max_position_embeddings, **write_rope(config)["rope_parameters"], _GROWTH: 0.0}
    return {"rope_parameters": table, "sliding_window": config.window_size} | write_tied(config)


MINISTRAL3 = llama_like(
    "ministral3",
    "Ministral3ForCausalLM",
    same=same_fields(groups=8, positions=262144, inner=14336, vocabulary=131072, head=128, layers=34, epsilon=1e-5),
    read=_read_ministral3,
    write=_write_ministral3,
    rules=block_rules(),
)
