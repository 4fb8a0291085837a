"""Every key of a DeepSpeed 0.19 configuration, and what it becomes here.

A key sets fields, changes nothing, or is accepted with some values and refused with others, because megacore would
compute something else. `tools/deepspeed_reference.py` writes the table of docs/guides/coming-from-deepspeed.md from
this one. deepspeed.py reads files with it. deepspeed_training.py, deepspeed_zero.py, deepspeed_layout.py and
deepspeed_measurements.py have the larger parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megacore.config.deepspeed_layout import layout_keys
from megacore.config.deepspeed_measurements import measurement_keys
from megacore.config.deepspeed_training import OPTIMIZER_KEYS, SCHEDULER_KEYS
from megacore.config.deepspeed_values import (
    CHOSEN,
    WHOLE_BUCKETS,
    Key,
    Value,
    checked,
    custom,
    idle,
    if_true,
    real,
    sets,
    shown,
    some,
    switch,
    value_at,
    whole,
)
from megacore.config.deepspeed_zero import zero_keys
from megacore.config.megatron_values import Translation
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


def _of_dynamic_scale(name: str, read: Callable[[Value], Any]) -> Key:
    def translate(value: Value) -> Translation:
        given = read(value)
        return Translation({} if value.other("fp16.loss_scale") or _without_fp16(value) else {name: given})

    return custom(f"--{name.replace('_', '-')}; nothing with a fixed loss_scale", (name,), translate)


_ACCUMULATED = "data_types.grad_accum_dtype"
_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def _sum_format(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    if value.value not in _SUMS:
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


# ---- the table -------------------------------------------------------------------------------------------------------

_SEARCH = "the search is a command of its own, which runs nothing"
_SEARCH_INSTEAD = (
    "leave it out, and use python tools/plan.py pretrain_gpt.py --search --world-size N --cluster NAME with these flags"
)
_TUNED = "limits of --search are flags of tools/plan.py: --max-micro-batch-size, --max-zero-stage and so on"
_SAMPLES = "every sample of the data is used alike"
_REMOVED = "DeepSpeed 0.19 has removed it"
_FORMER = "a key of an earlier DeepSpeed"


def _removed(name: str) -> Key:
    def translate(value: Value) -> Translation:
        off = value.value in (None, False, {}) or (
            isinstance(value.value, Mapping) and value.value.get("enabled", True) is False
        )
        if not off:
            raise ValueError(f"{name} {shown(value.value)}: {_REMOVED}, and megacore has no such feature: leave it out")
        return Translation()

    return Key(kind="some", becomes=f"false, null or not enabled; {_REMOVED}", translate=translate)


KEYS: Mapping[str, Key] = {
    TOTAL: custom(
        f"--global-batch-size, and --micro-batch-size where {_MICRO} is left out",
        ("global_batch_size", "micro_batch_size"),
        _total,
        is_last=True,
    ),
    _MICRO: sets("micro_batch_size", lambda value: whole(value, low=1)),
    ACCUMULATION: custom(
        "--global-batch-size: its value x --micro-batch-size x --dp, checked where train_batch_size is given",
        ("global_batch_size",),
        _accumulation,
        is_last=True,
    ),
    "managed_gradient_accumulation": some((True,), "a step is always one update of the weights", "leave it out"),
    "gradient_clipping": sets("clip_grad", real),
    "prescale_gradients": idle("gradients are summed in --grad-reduce-dtype; the loss is divided before backward"),
    "gradient_predivide_factor": idle("the loss is divided before backward"),
    "gradient_allreduce_op": some(("mean", None), "the loss is the mean over the global batch", "use mean"),
    "disable_allgather": idle(WHOLE_BUCKETS),
    "communication_data_type": custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _communicated),
    "seq_parallel_communication_data_type": idle("--cp ranks exchange activations in their own format"),
    "zero_allow_untested_optimizer": idle("every optimizer works with every --zero-stage"),
    "zero_force_ds_cpu_optimizer": idle(CHOSEN),
    "disable_python_gc": idle("the interpreter collects garbage by itself"),
    "dataloader_drop_last": idle("samples follow one another from epoch to epoch, and no batch is incomplete"),
    "cuda_visible_devices": idle(f"{_FORMER}: the launcher chooses the devices"),
    "fp32_allreduce": idle(f"{_FORMER}: gradients are summed in --grad-reduce-dtype, fp32 where it is not given"),
    "vocabulary_size": idle("--tokenizer or --vocab-size says it"),
    _ACCUMULATED: custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _sum_format),
    "data_types.param_dtype": some((None,), "--precision decides", "leave it out, and use fp16 or bf16"),
    "data_types.buffer_dtype": some((None,), "buffers have the format of the parameters", "leave it out"),
    "data_types.keep_in_fp32_modules": some(("auto", []), "all layers have one format", "leave it out"),
    "bf16.enabled": if_true("--precision bf16", precision="bf16"),
    "bf16.immediate_grad_update": idle("gradients are added up as they come"),
    "bf16.check_grad_overflow": idle("a step that is not finite is always skipped"),
    "bf16.bf16_master_weights_and_grads": some((False,), "master weights are fp32", "use data_types for gradients"),
    "bf16.bf16_optimizer_states": some((False,), "moments are fp32", "leave it out"),
    "fp16.enabled": custom(
        "--precision fp16; the file decides about the loss scale, whatever --loss-scale says",
        ("precision", "loss_scale"),
        _enabled_fp16,
    ),
    "fp16.auto_cast": idle("inputs always have the format of the parameters"),
    "fp16.loss_scale": custom("--loss-scale; nothing with 0, the dynamic scale", ("loss_scale",), _loss_scale),
    "fp16.initial_scale_power": custom(
        "--initial-loss-scale: 2 to its value, x --dp, because megacore scales the mean over all replicas",
        ("initial_loss_scale",),
        _initial_scale,
        is_last=True,
    ),
    "fp16.loss_scale_window": _of_dynamic_scale("loss_scale_window", lambda value: whole(value, low=1)),
    "fp16.hysteresis": _of_dynamic_scale("hysteresis", lambda value: whole(value, low=1)),
    "fp16.consecutive_hysteresis": some(
        (False,), "counting of --hysteresis restarts only after the scale doubles", "leave it out"
    ),
    "fp16.min_loss_scale": _of_dynamic_scale("min_loss_scale", real),
    "fp16.fp16_master_weights_and_grads": some((False,), "master weights are fp32", "leave it out"),
    "torch_autocast.enabled": some((False,), "parameters have one format", "use bf16 or fp16, with fp32 masters"),
    "torch_autocast.dtype": idle("torch_autocast is refused, unless it is off"),
    "torch_autocast.lower_precision_safe_modules": idle("torch_autocast is refused, unless it is off"),
    **{f"zero_optimization.{name}": key for name, key in zero_keys().items()},
    "allgather_size": idle("--bucket-size-mb holds for both directions"),
    **OPTIMIZER_KEYS,
    **SCHEDULER_KEYS,
    **layout_keys(),
    **measurement_keys(),
    "hybrid_engine.enabled": some((False,), "training and generation are separate programs", "leave it out"),
    **{
        f"hybrid_engine.{name}": idle("hybrid_engine is refused, unless it is off")
        for name in (
            *("max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
            *("tp_gather_partition_size", "enable_cuda_graph"),
        )
    },
    "weight_quantization": some((None,), "weights are not quantised", "leave it out"),
    "data_efficiency.enabled": checked("turns on the keys below", switch),
    "data_efficiency.seed": idle("--seed decides"),
    "data_efficiency.data_sampling": some((None,), _SAMPLES, 'leave it out, or set its "enabled" to false'),
    "data_efficiency.data_routing": some(
        (None,), "every token passes every layer", 'leave it out, or set its "enabled" to false'
    ),
    "autotuning.enabled": some((False,), _SEARCH, _SEARCH_INSTEAD),
    **{
        f"autotuning.{name}": idle(_TUNED)
        for name in (
            *("fast", "results_dir", "exps_dir", "overwrite", "start_profile_step", "end_profile_step", "metric"),
            *("metric_path", "tuner_type", "tuner_early_stopping", "tuner_num_trials", "arg_mappings", "model_info"),
            *("model_info_path", "mp_size", "max_train_batch_size", "min_train_batch_size"),
            *("max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu"),
            "num_tuning_micro_batch_sizes",
        )
    },
    **{
        name: _removed(name)
        for name in (
            *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
            *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
            *("zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"),
            "zero_optimization.zeropp_loco_param",
        )
    },
}
"""What each key becomes, by its path."""

SWITCHED: Mapping[str, tuple[str, bool]] = {
    "bf16": ("enabled", False),
    "fp16": ("enabled", False),
    "torch_autocast": ("enabled", False),
    "tensorboard": ("enabled", False),
    "wandb": ("enabled", False),
    "csv_monitor": ("enabled", False),
    "comet": ("enabled", False),
    "comms_logger": ("enabled", False),
    "flops_profiler": ("enabled", False),
    "autotuning": ("enabled", False),
    "hybrid_engine": ("enabled", False),
    "weight_quantization": ("enabled", True),
    "data_efficiency": ("enabled", False),
    "data_efficiency.data_sampling": ("enabled", False),
    "data_efficiency.data_routing": ("enabled", False),
    "expert_parallel": ("enabled", False),
    "compile": ("deepcompile", False),
}
"""Sections that are off unless a key of theirs says otherwise, with that key and its default. The other keys of a
section that is off have no effect."""
ALIASES: Mapping[str, str] = {"bfloat16": "bf16"}
"""Other names of sections."""
