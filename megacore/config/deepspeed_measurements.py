"""The parts of a DeepSpeed configuration about files, trackers, profiles and compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import PurePath

from megacore.config.deepspeed_values import (
    CHOSEN,
    NO_NVME,
    Key,
    Value,
    a_text,
    checked,
    custom,
    idle,
    if_true,
    shown,
    some,
    switch,
    whole,
)
from megacore.config.megatron_values import Translation


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


def measurement_keys() -> dict[str, Key]:
    """What the keys about files, trackers and measurements become."""
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
    keys |= {f"compile.{name}": idle(CHOSEN)
             for name in ("autoep_non_moe", "free_activation", "free_activation_threshold",
                          "offload_activation_pin_memory", "double_buffer", "symmetric_memory", "debug_log",
                          "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
                          "keep_int_input_tensors", "keep_all_input_tensors", "passes")}  # fmt: skip
    keys |= {f"compile.{name}": idle("a key of an earlier DeepSpeed: --compile decides")
             for name in ("enabled", "backend", "kwargs", "disable", "fullgraph", "dynamic", "mode", "options",
                          "dump_graphs")}  # fmt: skip
    keys |= {f"aio.{name}": idle(NO_NVME)
             for name in ("block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit",
                          "overlap_events", "use_gds")}  # fmt: skip
    return keys


def _named(name: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        return Translation({} if value.value is None else {name: a_text(value)})

    return translate
