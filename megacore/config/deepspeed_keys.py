"""Every key of a DeepSpeed 0.19 configuration, and what it becomes here.

A key sets fields, changes nothing, or is accepted with some values and refused with others, because megacore would
compute something else. `tools/deepspeed_reference.py` writes the table of docs/coming-from-deepspeed.md from this one,
and compares it with the classes of an installed DeepSpeed. deepspeed.py reads files with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from megacore.config.deepspeed_flags import bucket_mib
from megacore.config.megatron_values import Shape, Translation
from megacore.config.messages import number, one_of

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """A key's value in its file, and what it may depend on.

    Attributes:
        path: of the key, `zero_optimization.stage`.
        value: of the key.
        document: the whole file.
        shape: of the run, as far as it is known.
    """

    path: str
    value: Any
    document: Document
    shape: Shape

    def __str__(self) -> str:
        return f"{self.path} {shown(self.value)}"

    def other(self, path: str, default: Any = None) -> Any:
        """The value of another key; the default where the file leaves it out or says "auto"."""
        found = value_at(self.document, path)
        return default if found is None or found == "auto" else found


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a key becomes.

    Attributes:
        kind: sets fields; idle: changes nothing; some: is accepted with some values.
        becomes: in words: the flags that are set, or why nothing changes, or the accepted values, the reason and the
            way out.
        fields: that it may set.
        translate: its value. Raises ValueError for one that has no translation.
        is_last: it depends on what others become.
    """

    kind: Literal["sets", "idle", "some"]
    becomes: str
    fields: tuple[str, ...] = ()
    translate: Callable[[Value], Translation] = field(default=lambda value: Translation())
    is_last: bool = False


def value_at(document: Document, path: str) -> Any:
    """The value of a key; None where the file leaves it out."""
    found: Any = document
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def shown(value: Any) -> str:
    """A value as a file has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = number(value) if isinstance(value, int | float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- values ----------------------------------------------------------------------------------------------------------


def _switch(value: Value) -> bool:
    if not isinstance(value.value, bool):
        raise ValueError(f"{value} must be true or false")
    return value.value


def _whole(value: Value, *, low: int = 0) -> int:
    given = value.value
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1 or given < low:
        raise ValueError(f"{value} is not a whole number of {low} or more: use, for example, {max(low, 1)}")
    return int(given)


def _real(value: Value) -> float:
    given = value.value
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"{value} is not a number: use, for example, 0.1")
    return float(given)


def _text(value: Value) -> str:
    if not isinstance(value.value, str) or not value.value.strip():
        raise ValueError(f"{value} is not a text: leave it out, or use a name")
    return value.value


def _sets(
    name: str, read: Callable[[Value], Any], becomes: str | None = None, *, convert: Callable[[Any], Any] | None = None
) -> Key:
    """A key that sets one field to its value."""

    def translate(value: Value) -> Translation:
        given = read(value)
        return Translation({name: given if convert is None else convert(given)})

    return Key(kind="sets", becomes=becomes or f"--{name.replace('_', '-')}", fields=(name,), translate=translate)


def _if_true(becomes: str, **values: Any) -> Key:
    """A switch that sets fields where it is on, and nothing where it is off."""

    def translate(value: Value) -> Translation:
        return Translation(values if _switch(value) else {})

    return Key(kind="sets", becomes=becomes, fields=tuple(values), translate=translate)


def _custom(
    becomes: str, fields: tuple[str, ...], translate: Callable[[Value], Translation], *, is_last: bool = False
) -> Key:
    return Key(kind="sets", becomes=becomes, fields=fields, translate=translate, is_last=is_last)


def _idle(why: str) -> Key:
    return Key(kind="idle", becomes=why)


def _some(accepted: tuple[Any, ...], why: str, instead: str) -> Key:
    """A key that is refused with any value that is not accepted."""

    def translate(value: Value) -> Translation:
        if not any(value.value == one and isinstance(value.value, bool) == isinstance(one, bool) for one in accepted):
            raise ValueError(f"{value}: {why}: {instead}")
        return Translation()

    return Key(
        kind="some", becomes=f"{one_of([shown(one) for one in accepted])}; {why}: {instead}", translate=translate
    )


# ---- batches ---------------------------------------------------------------------------------------------------------

_TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"


def _total(value: Value) -> Translation:
    total, values = _whole(value, low=1), {"global_batch_size": _whole(value, low=1)}
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
    steps, replicas = _whole(value, low=1), value.shape.replicas
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
        return Translation({"precision": precision} if _switch(value) else {})

    return translate


def _without_fp16(value: Value) -> bool:
    """Whether "auto" leaves the format to the flags, which choose another one than fp16."""
    return value_at(value.document, "fp16.enabled") == "auto" and value.shape.settings.get("precision") != "fp16"


def _loss_scale(value: Value) -> Translation:
    scale = _real(value)
    return Translation({"loss_scale": scale} if scale and not _without_fp16(value) else {})


def _initial_scale(value: Value) -> Translation:
    power, replicas = _whole(value), value.shape.replicas
    if value.other("fp16.loss_scale") or replicas is None or _without_fp16(value):
        return Translation()
    if power > 126:
        raise ValueError(f"{value} is above 126, whose power of two fp32 does not hold: use 16")
    return Translation({"initial_loss_scale": 2.0**power * replicas})


def _of_dynamic_scale(name: str, read: Callable[[Value], Any]) -> Key:
    def translate(value: Value) -> Translation:
        given = read(value)
        return Translation({} if value.other("fp16.loss_scale") or _without_fp16(value) else {name: given})

    return _custom(f"--{name.replace('_', '-')}; nothing with a fixed loss_scale", (name,), translate)


_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def _sum_format(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    if value.value not in _SUMS:
        raise ValueError(f"{value}: gradients are accumulated and reduced in fp32 or bf16: use one of them")
    return Translation({"grad_reduce_dtype": _SUMS[value.value]})


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


def _buckets(value: Value) -> Translation:
    return Translation({"bucket_size_mb": bucket_mib(_whole(value, low=1))})


def _gathered_buckets(value: Value) -> Translation:
    elements = _whole(value)
    if value.other("zero_optimization.reduce_bucket_size") is not None or not elements:
        return Translation()
    return Translation(implied={"bucket_size_mb": bucket_mib(elements)})


def _overlap(value: Value) -> Translation:
    given = _switch(value)
    return Translation({"overlap_grad_reduce": given, "overlap_param_gather": given})


def _optimizer_device(value: Value) -> Translation:
    if value.value == "nvme":
        raise ValueError(f"{value}: optimizer state is kept in host memory, not on disks: use cpu, or more --dp ranks")
    if value.value not in ("none", "cpu"):
        raise ValueError(f"{value} is not known: use none or cpu")
    return Translation({"offload_optimizer": True} if value.value == "cpu" else {})


_NO_NVME = "only offload to NVMe uses it, which is refused"
_WHOLE_BUCKETS = "gradients and parameters are exchanged in buckets of --bucket-size-mb"
_BY_LAYER = "--zero-stage 3 gathers the parameters of a layer ahead of its use, and releases them after it"
_EXACT_COMM = "what ranks exchange is not quantised"


def _zero() -> dict[str, Key]:
    keys = {
        "stage": _sets("zero_stage", _whole),
        "contiguous_gradients": _idle(_WHOLE_BUCKETS),
        "reduce_scatter": _idle("the same sums either way"),
        "reduce_bucket_size": _custom("--bucket-size-mb: its value x 4 bytes, in MiB", ("bucket_size_mb",), _buckets),
        "use_multi_rank_bucket_allreduce": _idle(_WHOLE_BUCKETS),
        "allgather_partitions": _idle(_WHOLE_BUCKETS),
        "allgather_bucket_size": _custom(
            "--bucket-size-mb, where reduce_bucket_size is left out", ("bucket_size_mb",), _gathered_buckets
        ),
        "overlap_comm": _custom(
            "--overlap-grad-reduce and --overlap-param-gather",
            ("overlap_grad_reduce", "overlap_param_gather"),
            _overlap,
        ),
        "compute_grad_norm": _idle("the norm is always computed, because it tells whether a step is finite"),
        "load_from_fp32_weights": _some(
            (True,), "checkpoints hold fp32 weights, from which a run always continues", "leave it out"
        ),
        "elastic_checkpoint": _idle("every checkpoint is loaded on any layout"),
        "offload_param.device": _some(
            ("none",), "parameters stay on the devices", "leave it out, and use stage 3 with more ranks, --tp or --pp"
        ),
        "offload_optimizer.device": _custom(
            "--offload-optimizer for cpu; nvme is refused", ("offload_optimizer",), _optimizer_device
        ),
        "offload_optimizer.pin_memory": _idle("what is copied to or from a device is always pinned"),
        "offload_optimizer.ratio": _some((1, 1.0), "the whole optimizer state is offloaded", "use 1.0"),
        "offload_optimizer.super_offload": _idle("the update always overlaps with the copies"),
        "offload_optimizer.cpuadam_cores_perc": _idle("the update uses the cores of the rank"),
        "zenflow": _some((None,), "all gradients are used in every step", "leave it out"),
        "sub_group_size": _idle("the optimizer updates a bucket at a time"),
        "cpu_offload": _if_true("--offload-optimizer", offload_optimizer=True),
        "cpu_offload_param": _some((False,), "parameters stay on the devices", "leave it out, and use more ranks"),
        "cpu_offload_use_pin_memory": _idle("what is copied to or from a device is always pinned"),
        "memory_efficient_linear": _idle(_BY_LAYER),
        "pipeline_loading_checkpoint": _idle("each rank reads its own part of a checkpoint"),
        "override_module_apply": _idle(_BY_LAYER),
        "log_trace_cache_warnings": _idle("there is no cache of traces"),
        "enable_sanity_checks": _idle("the checks are those of docs/watching.md"),
        "save_muon_momentum_buffer_in_memory": _idle(_NO_NVME),
        "ignore_unused_parameters": _some((True,), "a parameter without gradient keeps its value", "leave it out"),
        "legacy_stage1": _idle("the results of every stage are the same"),
        "round_robin_gradients": _idle(_WHOLE_BUCKETS),
        "parameter_alignment": _idle("the implementation of each operation is chosen and reported"),
        "zero_hpz_partition_size": _some((0, 1), "parameters are divided over all --dp ranks", "use 1"),
        "zero_quantized_weights": _some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_nontrainable_weights": _some((False,), _EXACT_COMM, "leave it out"),
        "zero_quantized_gradients": _some((False,), _EXACT_COMM, "leave it out"),
    }
    keys |= {f"offload_param.{name}": _idle("offload_param is refused, with device none nothing is offloaded")
             for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")}  # fmt: skip
    keys |= {f"offload_optimizer.{name}": _idle(_NO_NVME)
             for name in ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")}  # fmt: skip
    keys |= {f"leaf_module.{name}": _idle("the experts of a layer are gathered together")
             for name in ("classes", "names", "name_suffixes")}  # fmt: skip
    of_stage_3 = (
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"),
        *("max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params"),
        "allgather_sequential",
    )
    for name in of_stage_3:
        keys[f"stage3_{name}"] = keys[name] = _idle(_BY_LAYER)
    for name in (
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ):
        keys[name] = _idle("tools/convert_checkpoint.py --to hf exports the weights of any layout")
    return keys


# ---- optimizer and scheduler -----------------------------------------------------------------------------------------

_ADAM = ("adam", "adamw", "torchadam", "fusedadam", "deepspeedcpuadam")
_MATRICES = "as megacore's, it applies to matrices and not to biases and norms"


def _of_type(value: Value) -> str:
    kind = value.other("optimizer.type", "")
    return kind.lower() if isinstance(kind, str) else ""


def _optimizer(value: Value) -> Translation:
    kind = _of_type(value)
    if kind in _ADAM:
        adam_w = kind != "adam" or value.other("optimizer.params.adam_w_mode", True) is not False
        torch_default = 0.01 if value.other("optimizer.params.torch_adam") and adam_w else 0.0
        decay = value.other("optimizer.params.weight_decay", torch_default)
        defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": torch_default}
        kind = "adamw" if adam_w or not decay else "adam"  # which are one without weight decay
        return Translation({"optimizer": kind}, {"lr": 1e-3, **defaults, **_constant(value)})
    if kind == "sgd":
        return Translation(
            {"optimizer": "sgd"}, {"lr": 1e-3, "sgd_momentum": 0.0, "weight_decay": 0.0, **_constant(value)}
        )
    if kind == "lion":
        defaults = {"lr": 1e-4, "lion_beta1": 0.9, "lion_beta2": 0.99, "weight_decay": 0.0}
        return Translation({"optimizer": "lion"}, {**defaults, **_constant(value)})
    raise ValueError(
        f"{value} is not in megacore as DeepSpeed has it: use AdamW, Adam, SGD or Lion, or leave it out and choose one "
        "of megacore's with --optimizer"
    )


def _constant(value: Value) -> dict[str, Any]:
    """DeepSpeed's learning rate is constant without a scheduler."""
    return {} if value.other("scheduler.type") else {"lr_decay_style": "constant"}


def _lr(value: Value) -> Translation:
    if value.other("scheduler.type") in _WITH_MAX_LR and value.other("scheduler.params.warmup_max_lr") is not None:
        return Translation()  # the scheduler's holds
    return Translation({"lr": _real(value)})


def _betas(value: Value) -> Translation:
    betas = value.value
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"{value} must be two numbers: use [0.9, 0.999]")
    if _of_type(value) == "sgd":
        raise ValueError(f"{value} has no effect with SGD: leave it out")
    first, second = (_real(Value(value.path, beta, value.document, value.shape)) for beta in betas)
    name = "lion" if _of_type(value) == "lion" else "adam"
    return Translation({f"{name}_beta1": first, f"{name}_beta2": second})


_WITH_MAX_LR = ("WarmupLR", "WarmupDecayLR")
_SCHEDULERS = (*_WITH_MAX_LR, "WarmupCosineLR")


def _scheduler(value: Value) -> Translation:
    kind, base = value.value, "scheduler.params"
    if kind not in _SCHEDULERS:
        raise ValueError(f"{value} is not in megacore: use {one_of(_SCHEDULERS)}, or --lr-decay-style")
    warmup = max(2, _whole(_other(value, f"{base}.warmup_num_steps", 1000), low=1))
    style = value.other(f"{base}.warmup_type", "log")
    values: dict[str, Any] = {"lr_warmup_iters": warmup, "lr_warmup_style": "linear" if style == "linear" else "log"}
    if value.other(f"{base}.warmup_num_steps") is None and value_at(value.document, f"{base}.warmup_num_steps"):
        values = {}  # "auto"
    implied: dict[str, Any] = {"lr": 1e-3} if kind == "WarmupDecayLR" else {}
    if kind in _WITH_MAX_LR and (top := value.other(f"{base}.warmup_max_lr")) is not None:
        values["lr"] = _real(_other(value, f"{base}.warmup_max_lr", top))
    if kind == "WarmupLR":
        return Translation({**values, "lr_decay_style": "constant"}, implied)
    values |= {"lr_decay_style": "linear" if kind == "WarmupDecayLR" else "cosine"}
    if (total := value.other(f"{base}.total_num_steps")) is not None:
        values["lr_decay_iters"] = _whole(_other(value, f"{base}.total_num_steps", total), low=1)
    elif value_at(value.document, f"{base}.total_num_steps") is None:
        raise ValueError(f"{value} needs total_num_steps: give it, or use WarmupLR")
    if kind == "WarmupDecayLR":
        return Translation({**values, "min_lr": 0.0}, implied)
    ratio = _real(_other(value, f"{base}.cos_min_ratio", 1e-4))
    lr = value.shape.settings.get("lr", _real(_other(value, "optimizer.params.lr", 1e-3)))
    return Translation({**values, "min_lr": float(f"{ratio * lr:.12g}")}, implied)


def _first_lr(value: Value) -> Translation:
    first = _real(value)
    return Translation({"lr_warmup_init": first} if first else {})


def _other(value: Value, path: str, default: Any) -> Value:
    """Another key of the same file."""
    return Value(path, value.other(path, default), value.document, value.shape)


def _warmup_type(value: Value) -> Translation:
    if value.value not in ("linear", "log"):
        raise ValueError(f"{value} is not known: use linear or log")
    return Translation()


_PART_OF_SCHEDULER = "part of scheduler.type"


def _checked(becomes: str, read: Callable[[Value], object]) -> Key:
    """A key whose value another key uses."""

    def translate(value: Value) -> Translation:
        read(value)
        return Translation()

    return Key(kind="sets", becomes=becomes, translate=translate)


_OPTIMIZER: dict[str, Key] = {
    "optimizer.type": _custom(
        "--optimizer: Adam, AdamW, SGD or Lion, with DeepSpeed's defaults for what params leaves out; without a "
        "scheduler --lr-decay-style constant",
        ("optimizer", "lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "sgd_momentum", "lr_decay_style"),
        _optimizer,
    ),
    "optimizer.legacy_fusion": _idle("the implementation of each operation is chosen and reported"),
    "optimizer.params.lr": _custom("--lr, unless the scheduler has warmup_max_lr", ("lr",), _lr),
    "optimizer.params.betas": _custom(
        "--adam-beta1 and --adam-beta2, with Lion --lion-beta1 and --lion-beta2",
        ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2"),
        _betas,
    ),
    "optimizer.params.eps": _sets("adam_eps", _real),
    "optimizer.params.weight_decay": _sets("weight_decay", _real, f"--weight-decay; {_MATRICES}"),
    "optimizer.params.momentum": _sets("sgd_momentum", _real),
    "optimizer.params.bias_correction": _some((True,), "AdamW corrects its moments' bias", "leave it out"),
    "optimizer.params.adam_w_mode": _checked("--optimizer adam for false with weight decay, else adamw", _switch),
    "optimizer.params.torch_adam": _checked("nothing but the default of weight_decay, 0.01 with AdamW", _switch),
    "optimizer.params.amsgrad": _some((False,), "AdamW has no maximum of moments", "leave it out"),
    "optimizer.params.fp32_optimizer_states": _some((True,), "moments are fp32", "leave it out"),
    "optimizer.params.dampening": _some((0, 0.0), "SGD's momentum has no dampening", "leave it out"),
    "optimizer.params.nesterov": _if_true("--sgd-nesterov", sgd_nesterov=True),
    "optimizer.params.max_grad_norm": _some((0, 0.0), "DeepSpeed refuses it too", "use gradient_clipping"),
    **{
        f"optimizer.params.{name}": _idle("the implementation of each operation is chosen and reported")
        for name in ("foreach", "fused", "capturable", "set_grad_none")
    },
}
_SCHEDULER: dict[str, Key] = {
    "scheduler.type": _custom(
        "WarmupLR is --lr-decay-style constant, WarmupDecayLR linear to 0, WarmupCosineLR cosine; others are refused",
        ("lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_style", "min_lr"),
        _scheduler,
        is_last=True,
    ),
    "scheduler.params.warmup_min_lr": _custom("--lr-warmup-init", ("lr_warmup_init",), _first_lr),
    "scheduler.params.warmup_min_ratio": _some((0, 0.0), "the warm-up starts at 0", "use 0"),
    "scheduler.params.warmup_max_lr": _checked(f"--lr; {_PART_OF_SCHEDULER}", _real),
    "scheduler.params.warmup_num_steps": _checked(
        f"--lr-warmup-iters; {_PART_OF_SCHEDULER}", lambda value: _whole(value, low=1)
    ),
    "scheduler.params.warmup_type": _custom("--lr-warmup-style, log where it is left out", (), _warmup_type),
    "scheduler.params.total_num_steps": _checked(
        f"--lr-decay-iters; {_PART_OF_SCHEDULER}", lambda value: _whole(value, low=1)
    ),
    "scheduler.params.cos_min_ratio": _checked("--min-lr: its value x --lr, of WarmupCosineLR", _real),
    "scheduler.params.last_batch_iteration": _some((-1,), "a resumed run continues its schedule", "leave it out"),
}


# ---- memory, pipeline, layout ----------------------------------------------------------------------------------------


def _beside_recompute(becomes: str, name: str) -> Key:
    """A switch about the inputs that full recomputation keeps."""

    def translate(value: Value) -> Translation:
        recomputed = value.shape.settings.get("recompute") == "full"
        return Translation({name: True} if _switch(value) and recomputed else {})

    return _custom(f"{becomes}, beside --recompute full; else nothing", (name,), translate, is_last=True)


def _interval(value: Value) -> Translation:
    return Translation({"recompute": "full"} if _whole(value) else {})


def _partition(value: Value) -> Translation:
    balances = {"best": {}, "uniform": "uniform", "parameters": "parameters"}
    if value.value not in balances:
        raise ValueError(f"{value}: stages are not balanced by types of layers: use best, uniform or parameters")
    chosen = balances[value.value]
    return Translation({"pipeline_balance": chosen} if chosen else {})


def _ranks(name: str, *, none: int | None = None) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        given = _whole(value)
        return Translation({} if given == none else {name: given})

    return translate


def _inner_ranks(value: Value) -> Translation:
    given = _whole(value, low=1)
    return Translation({"tp": given} if given > 1 else {})


def _sequence_ranks(value: Value) -> Translation:
    given = _whole(value, low=1)
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
        "pipeline.stages": _custom("--pp", ("pp",), _ranks("pp")),
        "pipeline.partition": _custom(
            "--pipeline-balance: uniform, parameters, or its default for best", ("pipeline_balance",), _partition
        ),
        "pipeline.seed_layers": _idle("initial weights and dropout are functions of the seed and the layer"),
        "pipeline.activation_checkpoint_interval": _custom(
            "--recompute full for 1 or more, which recomputes block by block", ("recompute",), _interval
        ),
        "pipeline.pipe_partitioned": _idle("the same numbers either way"),
        "pipeline.grad_partitioned": _idle("the same numbers either way"),
        "pipeline.use_reentrant": _idle("the same numbers either way"),
        "tensor_parallel.autotp_size": _custom("--tp; nothing with 0", ("tp",), _ranks("tp", none=0)),
        "tensor_parallel.tp.tp_size": _custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.tensor_parallel.tp_size": _custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.dtype": _idle("--precision decides"),
        "tensor_parallel.tp_overlap_comm": _idle(_CHOSEN),
        "tensor_parallel.vocab_parallel_lm_head": _idle("the head is always divided over --tp ranks"),
        "tensor_parallel.vocab_parallel_ce_backend": _idle(_CHOSEN),
        "sequence_parallel_size": _custom("--cp, with --cp-comm ulysses", ("cp", "cp_comm"), _sequence_ranks),
        "expert_parallel.enabled": _checked("turns on the keys below; --num-experts says how many there are", _switch),
        "expert_parallel.autoep_size": _custom("--ep", ("ep",), _ranks("ep")),
        "expert_parallel.expert_tensor_parallel_size": _custom("--etp", ("etp",), _ranks("etp")),
        "expert_parallel.top_k": _custom("--moe-router-topk", ("moe_router_topk",), _ranks("moe_router_topk")),
        "expert_parallel.score_func": _custom(
            "--moe-router-score-function", ("moe_router_score_function",), _expert_scores
        ),
        "expert_parallel.num_expert_groups": _sets("moe_router_num_groups", lambda value: _whole(value, low=2)),
        "expert_parallel.num_limited_groups": _sets("moe_router_group_topk", lambda value: _whole(value, low=1)),
        "expert_parallel.routed_scaling_factor": _sets("moe_router_topk_scaling_factor", _real),
        "expert_parallel.route_scale": _sets("moe_router_topk_scaling_factor", _real),
        "expert_parallel.route_norm": _custom(
            "--moe-router-pre-softmax for false", ("moe_router_pre_softmax",), _route_norm
        ),
        "expert_parallel.score_apply": _some(
            ("post",), "experts' outputs are weighted, not their inputs", "leave it out"
        ),
        "expert_parallel.load_balance_coeff": _some((None,), "DeepSpeed refuses it too", "use --moe-aux-loss-coeff"),
        "use_data_before_expert_parallelism": _idle("the results do not depend on the order of ranks"),
        "activation_checkpointing.partition_activations": _beside_recompute(
            "--distribute-saved-activations", "distribute_saved_activations"
        ),
        "activation_checkpointing.cpu_checkpointing": _beside_recompute("--offload-activations", "offload_activations"),
        "activation_checkpointing.contiguous_memory_optimization": _idle("the allocator keeps its memory"),
        "activation_checkpointing.number_checkpoints": _idle("the allocator keeps its memory"),
        "activation_checkpointing.synchronize_checkpoint_boundary": _idle("--trace and --profile-steps measure"),
        "activation_checkpointing.profile": _idle("--trace and --profile-steps measure what takes time"),
    }
    for name in ("tp_grain_size", "mpu", "tp_group"):
        keys[f"tensor_parallel.tp.{name}"] = _idle(_SPLIT_BY_KIND)
        keys[f"tensor_parallel.tensor_parallel.{name}"] = _idle(_SPLIT_BY_KIND)
    for name in (
        *("injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host"),
        *("replace_with_kernel_inject", "kernel_inject"),
    ):
        keys[f"tensor_parallel.{name}"] = _idle(_SPLIT_BY_KIND)
    for name in (
        *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2"),
        *("expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
        *("shared_experts_gate_pattern", "expert_activation"),
    ):
        keys[f"expert_parallel.{name}"] = _idle(_ITS_EXPERTS)
    for name in (
        *("validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm"),
        *("combine_impl", "row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin"),
        "comm_max_tokens_per_rank",
    ):
        keys[f"expert_parallel.{name}"] = _idle(_CHOSEN)
    return keys


def _route_norm(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    return Translation({"moe_router_pre_softmax": not _switch(value)})


# ---- files, trackers, measurements -----------------------------------------------------------------------------------


def _events(value: Value) -> Translation:
    if not _switch(value):
        return Translation()
    path = PurePath(value.other("tensorboard.output_path", "")) / value.other(
        "tensorboard.job_name", "DeepSpeedJobName"
    )
    return Translation({"tensorboard_dir": str(path)})


def _project(value: Value) -> Translation:
    return Translation({"wandb_project": value.other("wandb.project", "deepspeed")} if _switch(value) else {})


def _profile(value: Value) -> Translation:
    step = value.other("flops_profiler.profile_step", 1)
    if not _switch(value):
        return Translation()
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"flops_profiler.profile_step {shown(step)} is not a step from 1: use, for example, 10")
    return Translation({"profile_steps": f"{step}:{step}"})


def _print_interval(value: Value) -> Translation:
    given = value.value
    if given is None or given == math.inf:
        return Translation()
    return Translation(implied={"log_interval": _whole(value, low=1)})  # of DeepSpeed's lines, beside those of a script


def _decoupled(value: Value) -> Translation:
    on = value.value if isinstance(value.value, bool) else value.value is not None
    return Translation({"async_save": True} if on else {})


_IN_TRACE = "the profile of the steps has every operator"
_OUTPUT_DIR = "the file is OUTPUT_DIR/metrics.csv"


def _measurements() -> dict[str, Key]:
    keys = {
        "steps_per_print": _custom(
            "--log-interval, where the flag is not given; nothing with null or Infinity",
            ("log_interval",),
            _print_interval,
        ),
        "wall_clock_breakdown": _if_true("--trace", trace=True),
        "memory_breakdown": _idle("metrics.jsonl has the memory of the ranks"),
        "dump_state": _idle("the launch prints its configuration, and OUTPUT_DIR/config.toml has all of it"),
        "log_level": _idle("the log has one line per event"),
        "timers.throughput.enabled": _idle("metrics.jsonl has the throughput"),
        "timers.throughput.synchronized": _idle("a step waits for its device once"),
        "comms_logger.enabled": _if_true("--trace, whose time lines have every exchange", trace=True),
        "flops_profiler.enabled": _custom(
            "--profile-steps of profile_step, 1 where it is left out", ("profile_steps",), _profile
        ),
        "flops_profiler.profile_step": _checked("--profile-steps, see flops_profiler.enabled", lambda value: None),
        "flops_profiler.recompute_fwd_factor": _idle("the launch counts what --recompute computes again"),
        "flops_profiler.module_depth": _idle(_IN_TRACE),
        "flops_profiler.top_modules": _idle(_IN_TRACE),
        "flops_profiler.detailed": _idle(_IN_TRACE),
        "flops_profiler.output_file": _idle("the files are in OUTPUT_DIR/profile"),
        "tensorboard.enabled": _custom("--tensorboard-dir: output_path/job_name", ("tensorboard_dir",), _events),
        "tensorboard.output_path": _checked("see tensorboard.enabled", lambda value: None),
        "tensorboard.job_name": _checked("see tensorboard.enabled", _text),
        "wandb.enabled": _custom("--wandb-project, deepspeed where it is left out", ("wandb_project",), _project),
        "wandb.project": _checked("see wandb.enabled", _text),
        "wandb.team": _custom("--wandb-entity", ("wandb_entity",), _named("wandb_entity")),
        "wandb.group": _custom("--wandb-group", ("wandb_group",), _named("wandb_group")),
        "csv_monitor.enabled": _if_true("--csv", csv=True),
        "csv_monitor.output_path": _idle(_OUTPUT_DIR),
        "csv_monitor.job_name": _idle(_OUTPUT_DIR),
        "comet.enabled": _some((False,), "there is no tracker for Comet", "use tensorboard, wandb or csv_monitor"),
        "checkpoint.tag_validation": _idle("all ranks always save the same step"),
        "checkpoint.load_universal": _idle("every checkpoint is loaded on any layout"),
        "checkpoint.use_node_local_storage": _some(
            (False,), "a checkpoint is one directory that all nodes see", "leave it out"
        ),
        "checkpoint.parallel_write.pipeline_stage": _idle("every rank writes what it holds"),
        "checkpoint.checkpoint_serialization": _idle("checkpoints are safetensors"),
        "checkpoint.writer.decoupled": _custom("--async-save", ("async_save",), _decoupled),
        "datastates_ckpt": _custom("--async-save", ("async_save",), _decoupled),
        "compile.deepcompile": _if_true("--compile", compile=True),
        "compile.offload_activation": _if_true("--offload-activations", offload_activations=True),
        "compile.offload_opt_states": _if_true("--offload-optimizer", offload_optimizer=True),
        "compile.offload_parameters": _some((False,), "parameters stay on the devices", "leave it out"),
    }
    keys |= {f"comms_logger.{name}": _idle("--trace has every exchange of the traced steps")
             for name in ("prof_all", "prof_ops", "verbose", "debug")}  # fmt: skip
    keys |= {f"comet.{name}": _idle("comet is refused, unless it is off")
             for name in ("samples_log_interval", "project", "workspace", "api_key", "experiment_name",
                          "experiment_key", "online", "mode")}  # fmt: skip
    keys |= {f"checkpoint.writer.{name}": _idle("files are written as the disk takes them")
             for name in ("type", "io_buffer_size", "io_buffer_double", "show_statistics", "data_parallel",
                          "io_multiplier")}  # fmt: skip
    keys |= {f"compile.{name}": _idle(_CHOSEN)
             for name in ("autoep_non_moe", "free_activation", "free_activation_threshold",
                          "offload_activation_pin_memory", "double_buffer", "symmetric_memory", "debug_log",
                          "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
                          "keep_int_input_tensors", "keep_all_input_tensors", "passes")}  # fmt: skip
    keys |= {f"aio.{name}": _idle(_NO_NVME)
             for name in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events",
                          "use_gds")}  # fmt: skip
    return keys


def _named(name: str) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        return Translation({} if value.value is None else {name: _text(value)})

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
    _TOTAL: _custom(
        f"--global-batch-size, and --micro-batch-size where {_MICRO} is left out",
        ("global_batch_size", "micro_batch_size"),
        _total,
        is_last=True,
    ),
    _MICRO: _sets("micro_batch_size", lambda value: _whole(value, low=1)),
    _ACCUMULATION: _custom(
        "--global-batch-size: its value x --micro-batch-size x --dp, checked where train_batch_size is given",
        ("global_batch_size",),
        _accumulation,
        is_last=True,
    ),
    "managed_gradient_accumulation": _some((True,), "a step is always one update of the weights", "leave it out"),
    "gradient_clipping": _sets("clip_grad", _real),
    "prescale_gradients": _idle("gradients are summed in --grad-reduce-dtype; the loss is divided before backward"),
    "gradient_predivide_factor": _idle("the loss is divided before backward"),
    "gradient_allreduce_op": _some(("mean", None), "the loss is the mean over the global batch", "use mean"),
    "disable_allgather": _idle(_WHOLE_BUCKETS),
    "communication_data_type": _custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _sum_format),
    "seq_parallel_communication_data_type": _idle("--cp ranks exchange activations in their own format"),
    "zero_allow_untested_optimizer": _idle("every optimizer works with every --zero-stage"),
    "zero_force_ds_cpu_optimizer": _idle(_CHOSEN),
    "disable_python_gc": _idle("the interpreter collects garbage by itself"),
    "dataloader_drop_last": _idle("samples follow one another from epoch to epoch, and no batch is incomplete"),
    "vocabulary_size": _idle("--tokenizer or --vocab-size says it"),
    "data_types.grad_accum_dtype": _custom("--grad-reduce-dtype: fp32 or bf16", ("grad_reduce_dtype",), _sum_format),
    "data_types.param_dtype": _some((None,), "--precision decides", "leave it out, and use fp16 or bf16"),
    "data_types.buffer_dtype": _some((None,), "buffers have the format of the parameters", "leave it out"),
    "data_types.keep_in_fp32_modules": _some(("auto", []), "all layers have one format", "leave it out"),
    "bf16.enabled": _custom("--precision bf16", ("precision",), _enabled("bf16")),
    "bf16.immediate_grad_update": _idle("gradients are added up as they come"),
    "bf16.check_grad_overflow": _idle("a step that is not finite is always skipped"),
    "bf16.bf16_master_weights_and_grads": _some((False,), "master weights are fp32", "use data_types for gradients"),
    "bf16.bf16_optimizer_states": _some((False,), "moments are fp32", "leave it out"),
    "fp16.enabled": _custom("--precision fp16", ("precision",), _enabled("fp16")),
    "fp16.auto_cast": _idle("inputs always have the format of the parameters"),
    "fp16.loss_scale": _custom("--loss-scale; nothing with 0, the dynamic scale", ("loss_scale",), _loss_scale),
    "fp16.initial_scale_power": _custom(
        "--initial-loss-scale: 2 to its value, x --dp, because megacore scales the mean over all replicas",
        ("initial_loss_scale",),
        _initial_scale,
        is_last=True,
    ),
    "fp16.loss_scale_window": _of_dynamic_scale("loss_scale_window", lambda value: _whole(value, low=1)),
    "fp16.hysteresis": _of_dynamic_scale("hysteresis", lambda value: _whole(value, low=1)),
    "fp16.consecutive_hysteresis": _some(
        (False,), "counting of --hysteresis restarts only after the scale doubles", "leave it out"
    ),
    "fp16.min_loss_scale": _of_dynamic_scale("min_loss_scale", _real),
    "fp16.fp16_master_weights_and_grads": _some((False,), "master weights are fp32", "leave it out"),
    "torch_autocast.enabled": _some((False,), "parameters have one format", "use bf16 or fp16, with fp32 masters"),
    "torch_autocast.dtype": _idle("torch_autocast is refused, unless it is off"),
    "torch_autocast.lower_precision_safe_modules": _idle("torch_autocast is refused, unless it is off"),
    **{f"zero_optimization.{name}": key for name, key in _zero().items()},
    "allgather_size": _idle("--bucket-size-mb holds for both directions"),
    **_OPTIMIZER,
    **_SCHEDULER,
    **_layout(),
    **_measurements(),
    "hybrid_engine.enabled": _some((False,), "training and generation are separate programs", "leave it out"),
    **{
        f"hybrid_engine.{name}": _idle("hybrid_engine is refused, unless it is off")
        for name in (
            *("max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters"),
            *("tp_gather_partition_size", "enable_cuda_graph"),
        )
    },
    "weight_quantization": _some((None,), "weights are not quantised", "leave it out"),
    "data_efficiency.enabled": _checked("turns on the keys below", _switch),
    "data_efficiency.seed": _idle("--seed decides"),
    "data_efficiency.data_sampling": _some((None,), _SAMPLES, 'leave it out, or set its "enabled" to false'),
    "data_efficiency.data_routing": _some(
        (None,), "every token passes every layer", 'leave it out, or set its "enabled" to false'
    ),
    "autotuning.enabled": _some((False,), _SEARCH, _SEARCH_INSTEAD),
    **{
        f"autotuning.{name}": _idle(_TUNED)
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
