"""The part of a DeepSpeed configuration about ZeRO and offloading."""

from __future__ import annotations

from collections.abc import Mapping

from megacore.arrive.deepspeed_flags import bucket_mib
from megacore.arrive.deepspeed_values import Translate, Value, switch, whole
from megacore.arrive.tables import by_name
from megacore.arrive.translation import Translation


def _buckets(value: Value) -> Translation:
    return Translation({"bucket_size_mb": bucket_mib(whole(value, low=1))})


def _gathered_buckets(value: Value) -> Translation:
    elements = whole(value)
    if value.other("zero_optimization.reduce_bucket_size") is not None or not elements:
        return Translation()
    return Translation(implied={"bucket_size_mb": bucket_mib(elements)})


def _overlap(value: Value) -> Translation:
    given = switch(value)
    return Translation({"overlap_grad_reduce": given, "overlap_param_gather": given})


def _offload(value: Value, what: str, offloaded: Translation) -> Translation:
    if value.value == "nvme":
        raise ValueError(f"{value}: {what} kept in host memory, not on disks: use cpu, or more --dp ranks")
    if value.value not in ("none", "cpu"):
        raise ValueError(f"{value} is not known: use none or cpu")
    return offloaded if value.value == "cpu" else Translation()


def _offload_param(value: Value) -> Translation:
    return _offload(value, "parameters are", Translation({"offload_params": True}, {"offload_optimizer": True}))


def _offload_optimizer(value: Value) -> Translation:
    return _offload(value, "optimizer state is", Translation({"offload_optimizer": True}))


ZERO: Mapping[str, Translate] = by_name(_buckets, _gathered_buckets, _overlap, _offload_param, _offload_optimizer)
"""The functions that rows of deepspeed_keys.toml name."""
