"""The parts of a DeepSpeed configuration about pipelines, tensor, sequence and expert parallelism and recomputation."""

from __future__ import annotations

from collections.abc import Mapping

from megacore.arrive.deepspeed_values import Translate, Value, of_saved_inputs, switch, whole
from megacore.arrive.tables import by_name
from megacore.arrive.translation import Translation


def _saved_inputs(value: Value) -> Translation:
    """A switch about the inputs that full recomputation keeps."""
    is_offloaded = value.path == "activation_checkpointing.cpu_checkpointing"
    name = "offload_activations" if is_offloaded else "distribute_saved_activations"
    return Translation(of_saved_inputs(name, value.shape) if switch(value) else {})


def _interval(value: Value) -> Translation:
    return Translation({"recompute": "full"} if whole(value) else {})


def _partition(value: Value) -> Translation:
    balances = {"best": {}, "uniform": "uniform", "parameters": "parameters"}
    if value.value not in list(balances):  # a list, as the value may have no hash
        raise ValueError(f"{value}: stages are not balanced by types of layers: use best, uniform or parameters")
    chosen = balances[value.value]
    return Translation({"pipeline_balance": chosen} if chosen else {})


def _sequence_ranks(value: Value) -> Translation:
    given = whole(value, low=1)
    return Translation({"cp": given}, {"cp_comm": "ulysses"} if given > 1 else {})


def _expert_scores(value: Value) -> Translation:
    if value.value not in ("softmax", "sigmoid"):
        raise ValueError(f"{value} is not known: use softmax or sigmoid")
    return Translation({"moe_router_score_function": value.value})


def _route_norm(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    return Translation({"moe_router_pre_softmax": not switch(value)})


LAYOUT: Mapping[str, Translate] = by_name(
    *(_saved_inputs, _interval, _partition, _sequence_ranks, _expert_scores, _route_norm)
)
"""The functions that rows of deepspeed_keys.toml name."""
