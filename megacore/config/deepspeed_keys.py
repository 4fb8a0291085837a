"""Every key of a DeepSpeed 0.19 configuration, and what it becomes here.

A key sets fields, changes nothing, or is accepted with some values and refused with others, because megacore would
compute something else. `tools/deepspeed_reference.py` writes the table of docs/guides/coming-from-deepspeed.md from
this one. deepspeed.py reads files with it. deepspeed_training.py has the part about the optimizer and its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from megacore.config.deepspeed_flags import bucket_mib
from megacore.config.deepspeed_training import OPTIMIZER_KEYS, SCHEDULER_KEYS
from megacore.config.deepspeed_values import (
    Key,
    Value,
    a_text,
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
from megacore.config.megatron_values import Translation

# ---- batches ---------------------------------------------------------------------------------------------------------

_TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"


def _total(value: Value) -> Translation:
    total, values = whole(value, low=1), {"global_batch_size": whole(value, low=1)}
    replicas, steps = value.shape.replicas, value.other(_ACCUMULATION, 1)
    if value.other(_MICRO) is not None or value.shape.micro_batch_size is not None or replicas is None:
        return Translation(values)
    if not isinstance(steps, int) or steps < 1 or total % (replicas * steps):
        raise ValueError(
            f"{value} must be a multiple of {_ACCUMULATION} {shown(steps)} x {replicas} data-parallel ranks, because "
            f"{_MICRO} is left out: change one of them"
        )
    return Translation(values, {"micro_batch_size": total // replicas // steps})


def _accumulation(value: Value) -> Translation:
    steps, replicas = whole(value, low=1), value.shape.replicas
    micro, total = value.shape.micro_batch_size, value.other(_TOTAL)
    if replicas is None or micro is None:
        if total is None and micro is None:
            raise ValueError(f"{value} needs the size of a microbatch: give {_MICRO}, or --micro-batch-size")
        return Translation()
    if total is not None and total != (product := micro * steps * replicas):
        raise ValueError(
            f"{_TOTAL} {shown(total)} must be {_MICRO} {micro} x {_ACCUMULATION} {steps} x {replicas} data-parallel "
            f"ranks = {product}: use {_TOTAL} {product}, or change one of the others"
        )
    return Translation({"global_batch_size": micro * steps * replicas})


# ---- precision -------------------------------------------------------------------------------------------------------


def _enabled(precision: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        return Translation({"precision": precision} if switch(value) else {})

    return translate


def _without_fp16(value: Value) -> bool:
    """Whether "auto" leaves the format to the flags, which choose another one than fp16."""
    return value_at(value.document, "fp16.enabled") == "auto" and value.shape.settings.get("precision") != "fp16"


def _loss_scale(value: Value) -> Translation:
    scale = real(value)
    return Translation({"loss_scale": scale} if scale and not _without_fp16(value) else {})


def _initial_scale(value: Value) -> Translation:
    power, replicas = whole(value), value.shape.replicas
    if value.other("fp16.loss_scale") or replicas is None or _without_fp16(value):
        return Translation()
    if power > 126:
        raise ValueError(f"{value} is above 126, whose power of two fp32 does not hold: use 16")
    return Translation({"initial_loss_scale": 2.0**power * replicas})


def _of_dynamic_scale(name: str, read: Callable[[Value], Any]) -> Key:
    def translate(value: Value) -> Translation:
        given = read(value)
        return Translation({} if value.other("fp16.loss_scale") or _without_fp16(value) else {name: given})

    return custom(f"--{name.replace('_', '-')}; nothing with a fixed loss_scale", (name,), translate)


_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def _sum_format(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    if value.value not in _SUMS:
        raise ValueError(f"{value}: gradients are accumulated and reduced in fp32 or bf16: use one of them")
    return Translation({"grad_reduce_dtype": _SUMS[value.value]})


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


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


def _offload(name: str, what: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        if value.value == "nvme":
            raise ValueError(f"{value}: {what} kept in host memory, not on disks: use cpu, or more --dp ranks")
        if value.value not in ("none", "cpu"):
            raise ValueError(f"{value} is not known: use none or cpu")
        return Translation({name: True} if value.value == "cpu" else {})

    return translate


_NO_NVME = "only offload to NVMe uses it, which is refused"
_WHOLE_BUCKETS = "gradients and parameters are exchanged in buckets of --bucket-size-mb"
_BY_LAYER = "--zero-stage 3 gathers the parameters of a layer ahead of its use, and releases them after it"
_EXACT_COMM = "what ranks exchange is not quantised"


def _zero() -> dict[str, Key]:
    keys = {
        "stage": sets("zero_stage", whole),
        "contiguous_gradients": idle(_WHOLE_BUCKETS),
        "reduce_scatter": idle("the same sums either way"),
        "reduce_bucket_size": custom("--bucket-size-mb: its value x 4 bytes, in MiB", ("bucket_size_mb",), _buckets),
        "use_multi_rank_bucket_allreduce": idle(_WHOLE_BUCKETS),
        "allgather_partitions": idle(_WHOLE_BUCKETS),
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
            "--offload-params for cpu; nvme is refused",
            ("offload_params",),
            _offload("offload_params", "parameters are"),
        ),
        "offload_param.pin_memory": idle("what is copied to or from a device is always pinned"),
        "offload_optimizer.device": custom(
            "--offload-optimizer for cpu; nvme is refused",
            ("offload_optimizer",),
            _offload("offload_optimizer", "optimizer state is"),
        ),
        "offload_optimizer.pin_memory": idle("what is copied to or from a device is always pinned"),
        "offload_optimizer.ratio": some((1, 1.0), "the whole optimizer state is offloaded", "use 1.0"),
        "offload_optimizer.super_offload": idle("the update always overlaps with the copies"),
        "offload_optimizer.cpuadam_cores_perc": idle("the update uses the cores of the rank"),
        "zenflow": some((None,), "all gradients are used in every step", "leave it out"),
        "sub_group_size": idle("the optimizer updates a bucket at a time"),
        "cpu_offload": if_true("--offload-optimizer", offload_optimizer=True),
        "cpu_offload_param": if_true("--offload-params", offload_params=True),
        "cpu_offload_use_pin_memory": idle("what is copied to or from a device is always pinned"),
        "memory_efficient_linear": idle(_BY_LAYER),
        "pipeline_loading_checkpoint": idle("each rank reads its own part of a checkpoint"),
        "override_module_apply": idle(_BY_LAYER),
        "log_trace_cache_warnings": idle("there is no cache of traces"),
        "enable_sanity_checks": idle("the checks are those of docs/guides/watching.md"),
        "save_muon_momentum_buffer_in_memory": idle(_NO_NVME),
        "ignore_unused_parameters": some((True,), "a parameter without gradient keeps its value", "leave it out"),
        "legacy_stage1": idle("the results of every stage are the same"),
        "round_robin_gradients": idle(_WHOLE_BUCKETS),
        "parameter_alignment": idle("the implementation of each operation is chosen and reported"),
        "zero_hpz_partition_size": some((0, 1), "parameters are divided over all --dp ranks", "use 1"),
        "zero_quantized_weights": some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_nontrainable_weights": some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_gradients": some((False,), _EXACT_COMM, "leave it out"),
    }
    keys |= {f"offload_param.{name}": idle(_NO_NVME)
             for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")}  # fmt: skip
    keys |= {f"offload_optimizer.{name}": idle(_NO_NVME)
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


# ---- memory, pipeline, layout ----------------------------------------------------------------------------------------


def _beside_recompute(becomes: str, name: str) -> Key:
    """A switch about the inputs that full recomputation keeps."""

    def translate(value: Value) -> Translation:
        recomputed = value.shape.settings.get("recompute") == "full"
        return Translation({name: True} if switch(value) and recomputed else {})

    return custom(f"{becomes}, beside --recompute full; else nothing", (name,), translate, is_last=True)


def _interval(value: Value) -> Translation:
    return Translation({"recompute": "full"} if whole(value) else {})


def _partition(value: Value) -> Translation:
    balances = {"best": {}, "uniform": "uniform", "parameters": "parameters"}
    if value.value not in balances:
        raise ValueError(f"{value}: stages are not balanced by types of layers: use best, uniform or parameters")
    chosen = balances[value.value]
    return Translation({"pipeline_balance": chosen} if chosen else {})


def _ranks(name: str, *, none: int | None = None) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        given = whole(value)
        return Translation({} if given == none else {name: given})

    return translate


def _inner_ranks(value: Value) -> Translation:
    given = whole(value, low=1)
    return Translation({"tp": given} if given > 1 else {})


def _sequence_ranks(value: Value) -> Translation:
    given = whole(value, low=1)
    return Translation({"cp": given}, {"cp_comm": "ulysses"} if given > 1 else {})


def _expert_scores(value: Value) -> Translation:
    if value.value not in ("softmax", "sigmoid"):
        raise ValueError(f"{value} is not known: use softmax or sigmoid")
    return Translation({"moe_router_score_function": value.value})


_SPLIT_BY_KIND = "megacore's layers know how they are split"
_ITS_EXPERTS = "the layers of megacore's models know their experts"
_CHOSEN = "the implementation of each operation is chosen and reported"


def _layout() -> dict[str, Key]:
    keys = {
        "pipeline.stages": custom("--pp", ("pp",), _ranks("pp")),
        "pipeline.partition": custom(
            "--pipeline-balance: uniform, parameters, or its default for best", ("pipeline_balance",), _partition
        ),
        "pipeline.seed_layers": idle("initial weights and dropout are functions of the seed and the layer"),
        "pipeline.activation_checkpoint_interval": custom(
            "--recompute full for 1 or more, which recomputes block by block", ("recompute",), _interval
        ),
        "pipeline.pipe_partitioned": idle("the same numbers either way"),
        "pipeline.grad_partitioned": idle("the same numbers either way"),
        "pipeline.use_reentrant": idle("the same numbers either way"),
        "tensor_parallel.autotp_size": custom("--tp; nothing with 0", ("tp",), _ranks("tp", none=0)),
        "tensor_parallel.tp.tp_size": custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.tensor_parallel.tp_size": custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.dtype": idle("--precision decides"),
        "tensor_parallel.tp_overlap_comm": idle(_CHOSEN),
        "tensor_parallel.vocab_parallel_lm_head": idle("the head is always divided over --tp ranks"),
        "tensor_parallel.vocab_parallel_ce_backend": idle(_CHOSEN),
        "sequence_parallel_size": custom("--cp, with --cp-comm ulysses", ("cp", "cp_comm"), _sequence_ranks),
        "expert_parallel.enabled": checked("turns on the keys below; --num-experts says how many there are", switch),
        "expert_parallel.autoep_size": custom("--ep", ("ep",), _ranks("ep")),
        "expert_parallel.expert_tensor_parallel_size": custom("--etp", ("etp",), _ranks("etp")),
        "expert_parallel.top_k": custom("--moe-router-topk", ("moe_router_topk",), _ranks("moe_router_topk")),
        "expert_parallel.score_func": custom(
            "--moe-router-score-function", ("moe_router_score_function",), _expert_scores
        ),
        "expert_parallel.num_expert_groups": sets("moe_router_num_groups", lambda value: whole(value, low=2)),
        "expert_parallel.num_limited_groups": sets("moe_router_group_topk", lambda value: whole(value, low=1)),
        "expert_parallel.routed_scaling_factor": sets("moe_router_topk_scaling_factor", real),
        "expert_parallel.route_scale": sets("moe_router_topk_scaling_factor", real),
        "expert_parallel.route_norm": custom(
            "--moe-router-pre-softmax for false", ("moe_router_pre_softmax",), _route_norm
        ),
        "expert_parallel.score_apply": some(
            ("post",), "experts' outputs are weighted, not their inputs", "leave it out"
        ),
        "expert_parallel.load_balance_coeff": some((None,), "DeepSpeed refuses it too", "use --moe-aux-loss-coeff"),
        "use_data_before_expert_parallelism": idle("the results do not depend on the order of ranks"),
        "activation_checkpointing.partition_activations": _beside_recompute(
            "--distribute-saved-activations", "distribute_saved_activations"
        ),
        "activation_checkpointing.cpu_checkpointing": _beside_recompute("--offload-activations", "offload_activations"),
        "activation_checkpointing.contiguous_memory_optimization": idle("the allocator keeps its memory"),
        "activation_checkpointing.number_checkpoints": idle("the allocator keeps its memory"),
        "activation_checkpointing.synchronize_checkpoint_boundary": idle("--trace and --profile-steps measure"),
        "activation_checkpointing.profile": idle("--trace and --profile-steps measure what takes time"),
    }
    for name in ("tp_grain_size", "mpu", "tp_group"):
        keys[f"tensor_parallel.tp.{name}"] = idle(_SPLIT_BY_KIND)
        keys[f"tensor_parallel.tensor_parallel.{name}"] = idle(_SPLIT_BY_KIND)
    for name in (
        *("injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host"),
        *("replace_with_kernel_inject", "kernel_inject"),
    ):
        keys[f"tensor_parallel.{name}"] = idle(_SPLIT_BY_KIND)
    for name in (
        *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2"),
        *("expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
        *("shared_experts_gate_pattern", "expert_activation"),
    ):
        keys[f"expert_parallel.{name}"] = idle(_ITS_EXPERTS)
    for name in (
        *("validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm"),
        *("combine_impl", "row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin"),
        "comm_max_tokens_per_rank",
    ):
        keys[f"expert_parallel.{name}"] = idle(_CHOSEN)
    return keys


def _route_norm(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    return Translation({"moe_router_pre_softmax": not switch(value)})


# ---- files, trackers, measurements -----------------------------------------------------------------------------------


def _events(value: Value) -> Translation:
    if not switch(value):
        return Translation()
    path, job = value.other("tensorboard.output_path", ""), value.other("tensorboard.job_name", "DeepSpeedJobName")
    if not isinstance(path, str) or not isinstance(job, str):
        return Translation()  # their keys are refused
    return Translation({"tensorboard_dir": str(PurePath(path) / job)})


def _project(value: Value) -> Translation:
    return Translation({"wandb_project": value.other("wandb.project", "deepspeed")} if switch(value) else {})


def _profile(value: Value) -> Translation:
    step = value.other("flops_profiler.profile_step", 1)
    if not switch(value):
        return Translation()
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"flops_profiler.profile_step {shown(step)} is not a step from 1: use, for example, 10")
    return Translation({"profile_steps": f"{step}:{step}"})


def _print_interval(value: Value) -> Translation:
    given = value.value
    if given is None or given == math.inf:
        return Translation()
    return Translation(implied={"log_interval": whole(value, low=1)})  # of DeepSpeed's lines, beside those of a script


def _decoupled(value: Value) -> Translation:
    on = value.value if isinstance(value.value, bool) else value.value is not None
    return Translation({"async_save": True} if on else {})


_IN_TRACE = "the profile of the steps has every operator"
_OUTPUT_DIR = "the file is OUTPUT_DIR/metrics.csv"


def _measurements() -> dict[str, Key]:
    keys = {
        "steps_per_print": custom(
            "--log-interval, where the flag is not given; nothing with null or Infinity",
            ("log_interval",),
            _print_interval,
        ),
        "wall_clock_breakdown": if_true("--trace", trace=True),
        "memory_breakdown": idle("metrics.jsonl has the memory of the ranks"),
        "dump_state": idle("the launch prints its configuration, and OUTPUT_DIR/config.toml has all of it"),
        "log_level": idle("the log has one line per event"),
        "timers.throughput.enabled": idle("metrics.jsonl has the throughput"),
        "timers.throughput.synchronized": idle("a step waits for its device once"),
        "comms_logger.enabled": if_true("--trace, whose time lines have every exchange", trace=True),
        "flops_profiler.enabled": custom(
            "--profile-steps of profile_step, 1 where it is left out", ("profile_steps",), _profile
        ),
        "flops_profiler.profile_step": checked("--profile-steps, see flops_profiler.enabled", lambda value: None),
        "flops_profiler.recompute_fwd_factor": idle("the launch counts what --recompute computes again"),
        "flops_profiler.module_depth": idle(_IN_TRACE),
        "flops_profiler.top_modules": idle(_IN_TRACE),
        "flops_profiler.detailed": idle(_IN_TRACE),
        "flops_profiler.output_file": idle("the files are in OUTPUT_DIR/profile"),
        "tensorboard.enabled": custom("--tensorboard-dir: output_path/job_name", ("tensorboard_dir",), _events),
        "tensorboard.output_path": checked("see tensorboard.enabled", lambda value: value.value == "" or a_text(value)),
        "tensorboard.job_name": checked("see tensorboard.enabled", a_text),
        "wandb.enabled": custom("--wandb-project, deepspeed where it is left out", ("wandb_project",), _project),
        "wandb.project": checked("see wandb.enabled", a_text),
        "wandb.team": custom("--wandb-entity", ("wandb_entity",), _named("wandb_entity")),
        "wandb.group": custom("--wandb-group", ("wandb_group",), _named("wandb_group")),
        "csv_monitor.enabled": if_true("--csv", csv=True),
        "csv_monitor.output_path": idle(_OUTPUT_DIR),
        "csv_monitor.job_name": idle(_OUTPUT_DIR),
        "comet.enabled": some((False,), "there is no tracker for Comet", "use tensorboard, wandb or csv_monitor"),
        "checkpoint.tag_validation": idle("all ranks always save the same step"),
        "checkpoint.load_universal": idle("every checkpoint is loaded on any layout"),
        "checkpoint.use_node_local_storage": some(
            (False,), "a checkpoint is one directory that all nodes see", "leave it out"
        ),
        "checkpoint.parallel_write.pipeline_stage": idle("every rank writes what it holds"),
        "checkpoint.checkpoint_serialization": idle("checkpoints are safetensors"),
        "checkpoint.writer.decoupled": custom("--async-save", ("async_save",), _decoupled),
        "datastates_ckpt": custom("--async-save", ("async_save",), _decoupled),
        "compile.deepcompile": if_true("--compile", compile=True),
        "compile.offload_activation": if_true("--offload-activations", offload_activations=True),
        "compile.offload_opt_states": if_true("--offload-optimizer", offload_optimizer=True),
        "compile.offload_parameters": if_true("--offload-params", offload_params=True),
    }
    keys |= {f"comms_logger.{name}": idle("--trace has every exchange of the traced steps")
             for name in ("prof_all", "prof_ops", "verbose", "debug")}  # fmt: skip
    keys |= {f"comet.{name}": idle("comet is refused, unless it is off")
             for name in ("samples_log_interval", "project", "workspace", "api_key", "experiment_name",
                          "experiment_key", "online", "mode")}  # fmt: skip
    keys |= {f"checkpoint.writer.{name}": idle("files are written as the disk takes them")
             for name in ("type", "io_buffer_size", "io_buffer_double", "show_statistics", "data_parallel",
                          "io_multiplier")}  # fmt: skip
    keys |= {f"compile.{name}": idle(_CHOSEN)
             for name in ("autoep_non_moe", "free_activation", "free_activation_threshold",
                          "offload_activation_pin_memory", "double_buffer", "symmetric_memory", "debug_log",
                          "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
                          "keep_int_input_tensors", "keep_all_input_tensors", "passes")}  # fmt: skip
    keys |= {f"aio.{name}": idle(_NO_NVME)
             for name in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events",
                          "use_gds")}  # fmt: skip
    return keys


def _named(name: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        return Translation({} if value.value is None else {name: a_text(value)})

    return translate


# ---- the table -------------------------------------------------------------------------------------------------------

_SEARCH = "the search is a command of its own, which runs nothing"
_SEARCH_INSTEAD = (
    "leave it out, and use python tools/plan.py pretrain_gpt.py --search --world-size N --cluster NAME with these flags"
)
_TUNED = "limits of --search are flags of tools/plan.py: --max-micro-batch-size, --max-zero-stage and so on"
_SAMPLES = "every sample of the data is used alike"
_REMOVED = "DeepSpeed 0.19 has removed it"


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
    _TOTAL: custom(
        f"--global-batch-size, and --micro-batch-size where {_MICRO} is left out",
        ("global_batch_size", "micro_batch_size"),
        _total,
        is_last=True,
    ),
    _MICRO: sets("micro_batch_size", lambda value: whole(value, low=1)),
    _ACCUMULATION: custom(
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
    "disable_allgather": idle(_WHOLE_BUCKETS),
    "communication_data_type": custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _sum_format),
    "seq_parallel_communication_data_type": idle("--cp ranks exchange activations in their own format"),
    "zero_allow_untested_optimizer": idle("every optimizer works with every --zero-stage"),
    "zero_force_ds_cpu_optimizer": idle(_CHOSEN),
    "disable_python_gc": idle("the interpreter collects garbage by itself"),
    "dataloader_drop_last": idle("samples follow one another from epoch to epoch, and no batch is incomplete"),
    "vocabulary_size": idle("--tokenizer or --vocab-size says it"),
    "data_types.grad_accum_dtype": custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _sum_format),
    "data_types.param_dtype": some((None,), "--precision decides", "leave it out, and use fp16 or bf16"),
    "data_types.buffer_dtype": some((None,), "buffers have the format of the parameters", "leave it out"),
    "data_types.keep_in_fp32_modules": some(("auto", []), "all layers have one format", "leave it out"),
    "bf16.enabled": custom("--precision bf16", ("precision",), _enabled("bf16")),
    "bf16.immediate_grad_update": idle("gradients are added up as they come"),
    "bf16.check_grad_overflow": idle("a step that is not finite is always skipped"),
    "bf16.bf16_master_weights_and_grads": some((False,), "master weights are fp32", "use data_types for gradients"),
    "bf16.bf16_optimizer_states": some((False,), "moments are fp32", "leave it out"),
    "fp16.enabled": custom("--precision fp16", ("precision",), _enabled("fp16")),
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
    **{f"zero_optimization.{name}": key for name, key in _zero().items()},
    "allgather_size": idle("--bucket-size-mb holds for both directions"),
    **OPTIMIZER_KEYS,
    **SCHEDULER_KEYS,
    **_layout(),
    **_measurements(),
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
