"""The part of a DeepSpeed configuration about ZeRO and offloading."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megacore.config.deepspeed_flags import bucket_mib
from megacore.config.deepspeed_values import (
    NO_NVME,
    WHOLE_BUCKETS,
    Key,
    Value,
    custom,
    idle,
    if_true,
    sets,
    some,
    switch,
    whole,
)
from megacore.config.megatron_values import Translation


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


def _offload(what: str, values: Mapping[str, bool], implied: Mapping[str, bool]) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        if value.value == "nvme":
            raise ValueError(f"{value}: {what} kept in host memory, not on disks: use cpu, or more --dp ranks")
        if value.value not in ("none", "cpu"):
            raise ValueError(f"{value} is not known: use none or cpu")
        return Translation(values, implied) if value.value == "cpu" else Translation()

    return translate


_BY_LAYER = "--zero-stage 3 gathers the parameters of a layer ahead of its use, and releases them after it"
_EXACT_COMM = "what ranks exchange is not quantised"


def zero_keys() -> dict[str, Key]:
    """What the keys of zero_optimization become."""
    keys = {
        "stage": sets("zero_stage", whole),
        "contiguous_gradients": idle(WHOLE_BUCKETS),
        "reduce_scatter": idle("the same sums either way"),
        "reduce_bucket_size": custom("--bucket-size-mb: its value x 4 bytes, in MiB", ("bucket_size_mb",), _buckets),
        "use_multi_rank_bucket_allreduce": idle(WHOLE_BUCKETS),
        "allgather_partitions": idle(WHOLE_BUCKETS),
        "allgather_bucket_size": custom(
            "--bucket-size-mb, where reduce_bucket_size is left out", ("bucket_size_mb",), _gathered_buckets
        ),
        "overlap_comm": custom(
            "--overlap-grad-reduce and --overlap-param-gather",
            ("overlap_grad_reduce", "overlap_param_gather"),
            _overlap,
        ),
        "compute_grad_norm": idle("the norm is always computed, because it tells whether a step is finite"),
        "load_from_fp32_weights": some(
            (True,), "checkpoints hold fp32 weights, from which a run always continues", "leave it out"
        ),
        "elastic_checkpoint": idle("every checkpoint is loaded on any layout"),
        "offload_param.device": custom(
            "--offload-params for cpu, with --offload-optimizer; nvme is refused",
            ("offload_params", "offload_optimizer"),
            _offload("parameters are", {"offload_params": True}, {"offload_optimizer": True}),
        ),
        "offload_param.pin_memory": idle("what is copied to or from a device is always pinned"),
        "offload_optimizer.device": custom(
            "--offload-optimizer for cpu; nvme is refused",
            ("offload_optimizer",),
            _offload("optimizer state is", {"offload_optimizer": True}, {}),
        ),
        "offload_optimizer.pin_memory": idle("what is copied to or from a device is always pinned"),
        "offload_optimizer.ratio": some((1, 1.0), "the whole optimizer state is offloaded", "use 1.0"),
        "offload_optimizer.super_offload": idle("the update always overlaps with the copies"),
        "offload_optimizer.cpuadam_cores_perc": idle("the update uses the cores of the rank"),
        "zenflow": some((None,), "all gradients are used in every step", "leave it out"),
        "sub_group_size": idle("the optimizer updates a bucket at a time"),
        "cpu_offload": if_true("--offload-optimizer", offload_optimizer=True),
        "cpu_offload_param": if_true(
            "--offload-params, with --offload-optimizer", offload_params=True, offload_optimizer=True
        ),
        "cpu_offload_use_pin_memory": idle("what is copied to or from a device is always pinned"),
        "memory_efficient_linear": idle(_BY_LAYER),
        "pipeline_loading_checkpoint": idle("each rank reads its own part of a checkpoint"),
        "override_module_apply": idle(_BY_LAYER),
        "log_trace_cache_warnings": idle("there is no cache of traces"),
        "enable_sanity_checks": idle("the checks are those of docs/guides/watching.md"),
        "save_muon_momentum_buffer_in_memory": idle(NO_NVME),
        "ignore_unused_parameters": some((True,), "a parameter without gradient keeps its value", "leave it out"),
        "legacy_stage1": idle("the results of every stage are the same"),
        "round_robin_gradients": idle(WHOLE_BUCKETS),
        "parameter_alignment": idle("megacore chooses the implementation of each operation, and reports it"),
        "zero_hpz_partition_size": some((0, 1), "parameters are divided over all --dp ranks", "use 1"),
        "zero_quantized_weights": some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_nontrainable_weights": some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_gradients": some((False,), _EXACT_COMM, "leave it out"),
    }
    keys |= {f"offload_param.{name}": idle(NO_NVME)
             for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")}  # fmt: skip
    keys |= {f"offload_optimizer.{name}": idle(NO_NVME)
             for name in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")}  # fmt: skip
    keys |= {f"leaf_module.{name}": idle("the experts of a layer are gathered together")
             for name in ("classes", "names", "name_suffixes")}  # fmt: skip
    of_stage_3 = (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
        *("max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params"),
        "allgather_sequential",
    )
    for name in of_stage_3:
        keys[f"stage3_{name}"] = keys[name] = idle(_BY_LAYER)
    for name in (
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ):
        keys[name] = idle("tools/convert_checkpoint.py --to hf exports the weights of any layout")
    return keys
