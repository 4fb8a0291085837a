"""What single families of decoders have beside rows: Bloom, Falcon, Gemma, GPT-BigCode and MPT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.config import ResolvedModel
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.rows import ReadOnly


class ExactSumsOfBloom(ReadOnly):
    """Of a setting by which transformers computes something else."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        parts = reader.get("pretraining_tp", 1)
        if reader.get("slow_but_exact", False) is not False and parts != 1:
            reader.problem(
                "slow_but_exact",
                f"is true with pretraining_tp {str(parts)[:20]}, for which transformers leaves out the biases of each "
                "block's output layers: set slow_but_exact to false",
            )
        return {}


class ScaledEmbeddings(ReadOnly):
    """Gemma scales embeddings by the square root of the hidden size."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"embedding_multiplier": math.sqrt(ours["hidden_size"]) if ours["hidden_size"] > 0 else 1.0}


class DecoderOfFalcon:
    """Falcon 7B and 11B have one norm before attention and feed-forward layer, side by side, 40B and 180B two."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        heads, newer = ours["num_attention_heads"], reader.flag("new_decoder_architecture", False)
        shares_keys, parallel = reader.flag("multi_query", True), reader.flag("parallel_attn", True)
        if reader.flag("alibi", False):
            reader.problem(
                "alibi",
                "is true: transformers rounds this family's ALiBi to bf16 and divides it, which megacore does not",
            )
        if newer:
            reader.only("parallel_attn", (True,), True)
        groups, norms = reader.get("num_kv_heads"), reader.get("num_ln_in_parallel_attn")
        groups = heads if groups is None else groups
        if not newer:
            groups = 1 if shares_keys else heads
        norms = norms if norms is not None else 2 if newer else 1
        if type(groups) is not int or norms not in (1, 2):
            reader.problem("num_kv_heads", "or num_ln_in_parallel_attn is not a valid number")
            groups = None
        parallel = newer or parallel
        one_norm = parallel and (not newer or norms == 1)
        return {"num_query_groups": groups, "parallel_residual": parallel, "shared_parallel_norm": one_norm}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        few_groups = config.query_groups not in (1, config.num_attention_heads)
        newer = config.parallel_residual and (few_groups or not config.shared_parallel_norm)
        return {
            "new_decoder_architecture": newer,
            "num_ln_in_parallel_attn": (1 if config.shared_parallel_norm else 2) if newer else None,
            "multi_query": not newer and config.query_groups == 1,
            "num_kv_heads": config.query_groups if newer else None,
            "parallel_attn": config.parallel_residual,
        }


class OneKeyForAllHeads:
    """GPT-BigCode has one key and value for all heads, or one for each."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        shared = reader.flag("multi_query", True)
        number = 1 if shared else ours["num_attention_heads"]
        reader.only("num_key_value_heads", (number,), number)
        return {"num_query_groups": 1 if shared else None}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"multi_query": config.query_groups == 1, "num_key_value_heads": config.query_groups}


@dataclass(frozen=True, kw_only=True)
class AttentionTable:
    """MPT's `attn_config`."""

    only: Mapping[str, Any]  # its entries with the only values that megacore has

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        table, heads = reader.get("attn_config", {}), ours["num_attention_heads"]
        if not isinstance(table, dict):
            reader.problem("attn_config", f"is {str(table)[:40]!r}, not an object")
            table = {}
        for name, value in self.only.items():
            if name in table and table[name] != value:
                reader.problem(f"attn_config.{name}", f"is {str(table[name])[:40]!r}, but megacore has only {value!r}")
        if heads & (heads - 1):
            reader.problem(
                "n_heads", f"is {heads}, no power of two, for which this family's ALiBi has slopes of its own"
            )
        dropout, clipping = table.get("attn_pdrop", 0.0), ConfigReader(table, reader.where)
        limit = clipping.copied("clip_qkv", ("clip_qkv",), None) or None  # 0 is no limit to transformers
        reader.problems += clipping.problems
        return {"clip_qkv": limit, "attention_dropout": float(dropout) if type(dropout) in (int, float) else 0.0}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {"attn_config": {**self.only, "clip_qkv": config.clip_qkv}}
