"""What the JSON of plans, searches and full dry runs have in common.

What is predicted is a figure, with its unit, origin and range. Other numbers are given, chosen or counted.
"""

from __future__ import annotations

import dataclasses
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megacore.config import ModelConfig, ResolvedConfig, ResolvedModel
from megacore.config.bert import BertSection
from megacore.config.fields import field_infos
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.presets import RECIPES
from megacore.config.schema import sections_of
from megacore.config.spelling import flag_and_value
from megacore.models.flops import idle_parameters
from megacore.models.outline import ModelLayer
from megacore.plan.cluster import Cluster
from megacore.plan.memory import RankMemory, held_after_loss, held_on_host, uses_host
from megacore.plan.planner import by_formula, usable_host_bytes
from megacore.plan.state import whole_parameters

REPORT = tomllib.loads(Path(__file__).with_name("report.toml").read_text(encoding="utf-8"))
"""The tables of what the planner prints."""
_LEFT_OUT = REPORT["left_out"]


def run_json(config: ResolvedConfig, layers: Sequence[ModelLayer]) -> dict[str, Any]:
    """What is trained, whatever the layout and the cluster.

    Args:
        config: a resolved configuration.
        layers: the whole model.
    """
    model = config.model
    parameters = whole_parameters(config, layers)
    sizes: dict[str, Any] = {
        "preset": model.preset,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "vocab_size": model.vocab_size,
    }
    if model.experts is not None:
        active = parameters - idle_parameters(model)
        sizes |= {"num_experts": model.experts.num_experts, "active_parameters": active}
    return {
        "model": {**sizes, "parameters": parameters},
        "precision": config.precision.precision,
        "seq_length": config.data.seq_length,
        "global_batch_size": config.training.global_batch_size,
        "world_size": config.parallel.ranks,
        "settings": other_settings(config),
    }


def cluster_json(config: ResolvedConfig, cluster: Cluster, *, capacity: float) -> dict[str, Any]:
    """What computes, and the memory that may be taken.

    Args:
        config: a resolved configuration.
        cluster: that computes.
        capacity: bytes that a rank may take.
    """
    return {
        "cluster": cluster.name,
        "cluster_source": cluster.source,
        "software": cluster.software.name,
        "capacity": _capacity_json(capacity),
        **({"host_capacity": _capacity_json(usable_host_bytes(cluster))} if uses_host(config) else {}),
    }


def _capacity_json(size: float | None) -> dict[str, Any] | None:
    """Bytes that may be taken; None: not known."""
    return None if size is None else {"value": size, "unit": "bytes", "origin": "assumed", "low": None, "high": None}


def node_host_json(config: ResolvedConfig, memory: Sequence[RankMemory], cluster: Cluster) -> dict[str, Any]:
    """What the ranks of a node hold in host memory, where something is offloaded.

    Args:
        config: a resolved configuration.
        memory: of each pipeline rank.
        cluster: that computes.
    """
    if not uses_host(config):
        return {}
    node_ranks = cluster.device.node_ranks
    size, lost = held_on_host(config, memory, node_ranks), held_after_loss(config, memory, node_ranks)
    after = {"node_host_after_loss": asdict(by_formula(lost, low=lost))} if lost else {}
    return {"node_host": asdict(by_formula(size, low=size)), **after}


def layout_json(config: ResolvedConfig) -> dict[str, Any]:
    """How the run is divided among ranks and in time."""
    parallel, training = config.parallel, config.training
    return {
        **parallel.degrees,
        **({} if config.model.experts is None else {"ep": parallel.ep, "etp": parallel.expert_split}),
        "schedule": parallel.schedule_name,
        "virtual_stages": parallel.virtual_stages,
        "pipeline_balance": parallel.pipeline_balance,
        "zero_stage": parallel.zero_stage,
        "sequence_parallel": bool(parallel.sequence_parallel),
        "micro_batch_size": training.micro_batch_size,
        "num_microbatches": config.microbatches,
        "recompute": training.recompute,
        "recompute_num_layers": training.recompute_num_layers,
    }


def layout_flags(config: ResolvedConfig, *, with_defaults: bool = False) -> str:
    """The flags that make the layout.

    Args:
        config: a resolved configuration.
        with_defaults: also those that have their defaults, for a run whose --config file may say otherwise.
    """
    parallel, training = config.parallel, config.training
    context = f" --cp {parallel.cp}" if parallel.cp > 1 or with_defaults else ""
    parts = [f"--tp {parallel.tp}{context} --pp {parallel.pp} --dp {parallel.dp}"]
    if config.model.experts is not None:
        is_default = parallel.expert_split == parallel.tp
        is_left_out = is_default and not with_defaults
        parts.append(f"--ep {parallel.ep}" + ("" if is_left_out else f" --etp {parallel.expert_split}"))
    if parallel.schedule_csv is not None:
        parts.append(f"--schedule-csv {shlex.quote(str(parallel.schedule_csv))}")
    elif with_defaults or not parallel.is_one_by_one:
        parts.append(f"--schedule {parallel.schedule_name}")
    if parallel.virtual_stages > 1 or with_defaults:
        parts.append(f"--virtual-stages {parallel.virtual_stages}")
    if parallel.pipeline_layout is not None:
        parts.append(f"--pipeline-layout {shlex.quote(parallel.pipeline_layout)}")
    elif with_defaults or (parallel.pp > 1 and parallel.pipeline_balance != "time"):
        parts.append(f"--pipeline-balance {parallel.pipeline_balance}")
    parts.append(f"--micro-batch-size {training.micro_batch_size}")
    if parallel.zero_stage or with_defaults:
        parts.append(f"--zero-stage {parallel.zero_stage}")
    if parallel.sequence_parallel:
        parts.append("--sequence-parallel")
    elif parallel.tp > 1 or with_defaults:  # which is not the default everywhere
        parts.append("--no-sequence-parallel")
    parts.append(f"--recompute {training.recompute}")
    if training.recompute_num_layers is not None:
        parts.append(f"--recompute-num-layers {training.recompute_num_layers}")
    return " ".join(parts)


# ---- settings that differ from their defaults ------------------------------------------------------------------------


def other_settings(config: ResolvedConfig) -> list[str]:
    """Flags with their values, as `--optimizer lion` and `--offload-activations`.

    Args:
        config: a resolved configuration.
    """
    usual = _usual(config)
    return [
        flag_and_value(name, value)
        for section in _sections(config)
        for name, value in _changed(config, section, usual)
        if name not in {*_LEFT_OUT["in_other_lines"], *_LEFT_OUT["fields"].get(section, ())}
    ]


def _sections(config: ResolvedConfig) -> Iterator[str]:
    """Names of the sections that may decide a plan: not those of other optimizers."""
    others = OPTIMIZERS.keys() - {config.optimizer.optimizer, *config.optimizer_settings.shares}
    return (name for name in sections_of(type(config)) if name not in {*_LEFT_OUT["sections"], *others})


def _usual(config: ResolvedConfig) -> dict[str, Any]:
    """Values by field that stand for the default: of the preset of the model, or as they follow from other values."""
    given = {name: value for one in sections_of(type(config)) for name, value in vars(getattr(config, one)).items()}
    style = {"bert_style": bert.bert_style} if (bert := getattr(config, "bert", None)) else {}
    task = {"sentence_task": BertSection(**style).resolve().sentence_task}
    usual = {**task, **config.defaults(given), **config.presets.get(config.model.preset or "", {})}
    usual |= RECIPES.get(config.optimizer.recipe or "", {})
    sizes = [name for name in ResolvedModel.__annotations__ if name in field_infos(ModelConfig)]
    values = {name: getattr(config.model, name) for name in field_infos(ModelConfig)}
    model = ModelConfig(**values | {name: usual.get(name) for name in sizes})
    followed = model.resolve(seq_length=config.data.seq_length, vocab_size=config.model.vocab_size)
    vocabulary = {"vocab_size": usual.get("vocab_size")}  # which follows from nothing
    return usual | {name: getattr(followed, name) for name in sizes} | vocabulary


def _changed(config: ResolvedConfig, section: str, usual: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a section that have another value than usual, with it."""
    for name, info in field_infos(type(getattr(config, section))).items():
        value, default = getattr(getattr(config, section), name), usual.get(name, info.default)
        if value != default and default is not dataclasses.MISSING:
            yield name, value
