"""The part of a DeepSpeed configuration about batches and precision."""

from __future__ import annotations

from collections.abc import Mapping

from megacore.arrive.deepspeed_values import Translate, Value, real, shown, switch, value_at, whole
from megacore.arrive.tables import by_name
from megacore.arrive.translation import Translation
from megacore.config.messages import number
from megacore.config.training import TrainingConfig

# ---- batches ---------------------------------------------------------------------------------------------------------

TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
"""Keys of the batch and of the microbatch."""
ACCUMULATION = "gradient_accumulation_steps"
"""The key of the number of microbatches of a replica."""


def _total(value: Value) -> Translation:
    total, values = whole(value, low=1), {"global_batch_size": whole(value, low=1)}
    replicas, steps = value.shape.replicas, value.other(ACCUMULATION, 1)
    if value.other(_MICRO) is not None or value.shape.micro_batch_size is not None or replicas is None:
        return Translation(values)
    if not isinstance(steps, int) or steps < 1 or total % (replicas * steps):
        raise ValueError(
            f"{value} must be a multiple of {ACCUMULATION} {shown(steps)} x {replicas} data-parallel ranks, because "
            f"{_MICRO} is left out: change one of them"
        )
    return Translation(values, {"micro_batch_size": total // replicas // steps})


def _accumulation(value: Value) -> Translation:
    steps, replicas = whole(value, low=1), value.shape.replicas
    micro, total = value.shape.micro_batch_size, value.other(TOTAL)
    if micro is None and total is None and value_at(value.document, _MICRO) == "auto":
        micro = TrainingConfig.micro_batch_size
    if replicas is None or micro is None:
        if total is None and micro is None:
            raise ValueError(f"{value} needs the size of a microbatch: give {_MICRO}, or --micro-batch-size")
        return Translation()
    if total is not None and total != (product := micro * steps * replicas):
        raise ValueError(
            f"{TOTAL} {shown(total)} must be {_MICRO} {micro} x {ACCUMULATION} {steps} x {replicas} data-parallel "
            f"ranks = {product}: use {TOTAL} {product}, or change one of the others"
        )
    return Translation({"global_batch_size": micro * steps * replicas})


# ---- precision -------------------------------------------------------------------------------------------------------


def _without_fp16(value: Value) -> bool:
    """Whether "auto" leaves the format to the flags, which choose another one than fp16."""
    return value_at(value.document, "fp16.enabled") == "auto" and value.shape.settings.get("precision") != "fp16"


def _enabled_fp16(value: Value) -> Translation:
    """fp16, whose loss scale the file decides, as in DeepSpeed: it is dynamic where the file does not fix it."""
    if not switch(value):
        return Translation()
    scale, given = value_at(value.document, "fp16.loss_scale"), value.shape.settings.get("loss_scale")
    if given is None or scale not in (None, 0):
        return Translation({"precision": "fp16"})
    note = f"its loss scale is dynamic (fp16.loss_scale 0), and --loss-scale {number(given)} has no effect beside it"
    return Translation({"precision": "fp16"}, dropped=("loss_scale",), note=note)


def _loss_scale(value: Value) -> Translation:
    if value.value == "dynamic":
        raise ValueError(f'{value.path} "dynamic" is not a number: use 0, which is the dynamic scale')
    scale = real(value, example=0)
    return Translation({"loss_scale": scale} if scale and not _without_fp16(value) else {})


def _initial_scale(value: Value) -> Translation:
    power, replicas = whole(value), value.shape.replicas
    if value.other("fp16.loss_scale") or replicas is None or _without_fp16(value):
        return Translation()
    if power > 126:
        raise ValueError(f"{value} is above 126, whose power of two fp32 does not hold: use 16")
    note = f"2^{power} x {replicas} replicas, because megacore scales the mean over all of them" if replicas > 1 else ""
    return Translation({"initial_loss_scale": 2.0**power * replicas}, note=note)


def _dynamic_scale(value: Value) -> Translation:
    """A key of the dynamic loss scale, with the name of its field."""
    name = value.path.removeprefix("fp16.")
    given = real(value) if name == "min_loss_scale" else whole(value, low=1)
    return Translation({} if value.other("fp16.loss_scale") or _without_fp16(value) else {name: given})


_ACCUMULATED = "data_types.grad_accum_dtype"
_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def _sum_format(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    if value.value not in list(_SUMS):  # a list, as the value may have no hash
        raise ValueError(f"{value}: gradients are accumulated and reduced in fp32 or bf16: use one of them")
    return Translation({"grad_reduce_dtype": _SUMS[value.value]})


def _communicated(value: Value) -> Translation:
    accumulated, given = _SUMS.get(str(value.other(_ACCUMULATED))), str(value.value)
    is_unused = accumulated is not None and given in (*_SUMS, "fp16", "float16") and _SUMS.get(given) != accumulated
    if not is_unused:
        return _sum_format(value)
    return Translation(
        note=f"has no effect: gradients are reduced as they are accumulated ({_ACCUMULATED}), in {accumulated}"
    )


BATCHES: Mapping[str, Translate] = by_name(
    *(_total, _accumulation, _enabled_fp16, _loss_scale, _initial_scale, _dynamic_scale, _sum_format, _communicated)
)
"""The functions that rows of deepspeed_keys.toml name."""
