"""What keys of DeepSpeed's configuration, and flags of Megatron-DeepSpeed, become whose value needs computing. Rows of
deepspeed_keys.toml, which has every key of a DeepSpeed 0.19 configuration, and of deepspeed_flags.toml name these
functions. docs/guides/coming-from-deepspeed.md shows the tables."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import PurePath
from typing import Any

from megacore.arrive.megatron import nearest
from megacore.arrive.rows import (
    Foreign,
    Value,
    bucket_mib,
    read_rows,
    read_tables,
    real,
    shown,
    switch,
    text,
    value_at,
    whole,
)
from megacore.arrive.translation import MissingField, Translation
from megacore.config.data import DataConfig
from megacore.config.fields import LARGEST_INT
from megacore.config.messages import number, one_of
from megacore.config.rampup import BatchSizes
from megacore.config.training import TrainingConfig

# ---- batches ---------------------------------------------------------------------------------------------------------

TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
"""Keys of the batch and of the microbatch."""
ACCUMULATION = "gradient_accumulation_steps"
"""The key of the number of microbatches of a replica."""


def _micro_batch_size(value: Value) -> int | None:
    """As it is given."""
    return value.run.number("micro_batch_size") if "micro_batch_size" in value.run.settings else None


def _total(value: Value) -> Translation:
    samples, replicas, steps = whole(value, 1), value.run.replicas, value.other(ACCUMULATION, 1)
    values = {"global_batch_size": samples}
    if value.other(_MICRO) is not None or _micro_batch_size(value) is not None or replicas is None:
        return Translation(values)
    if not isinstance(steps, int) or steps < 1 or samples % (replicas * steps):
        raise ValueError(
            f"{value} must be a multiple of {ACCUMULATION} {shown(steps)} x {replicas} data-parallel ranks, because "
            f"{_MICRO} is left out: change one of them"
        )
    return Translation(values, {"micro_batch_size": samples // replicas // steps})


def _accumulation(value: Value) -> Translation:
    steps, replicas = whole(value, 1), value.run.replicas
    micro, samples = _micro_batch_size(value), value.other(TOTAL)
    if micro is None and samples is None and value_at(value.document, _MICRO) == "auto":
        micro = TrainingConfig.micro_batch_size
    if micro is None and samples is None:
        raise ValueError(f"{value} needs the size of a microbatch: give {_MICRO}, or --micro-batch-size")
    if replicas is None or micro is None:
        return Translation()
    if samples is not None and samples != (product := micro * steps * replicas):
        raise ValueError(
            f"{TOTAL} {shown(samples)} must be {_MICRO} {micro} x {ACCUMULATION} {steps} x {replicas} data-parallel "
            f"ranks = {product}: use {TOTAL} {product}, or change one of the others"
        )
    return Translation({"global_batch_size": micro * steps * replicas})


# ---- precision -------------------------------------------------------------------------------------------------------


def _without_fp16(value: Value) -> bool:
    """Whether "auto" leaves the format to the flags, which choose another one than fp16."""
    return value_at(value.document, "fp16.enabled") == "auto" and value.run.settings.get("precision") != "fp16"


def _enabled_fp16(value: Value) -> Translation:
    """fp16, whose loss scale the file decides, as in DeepSpeed: it is dynamic where the file does not fix it."""
    if not switch(value):
        return Translation()
    scale, given = value_at(value.document, "fp16.loss_scale"), value.run.settings.get("loss_scale")
    if given is None or scale not in (None, 0):
        return Translation({"precision": "fp16"})
    note = f"its loss scale is dynamic (fp16.loss_scale 0), and --loss-scale {number(given)} has no effect beside it"
    return Translation({"precision": "fp16"}, dropped=("loss_scale",), note=note)


def _loss_scale(value: Value) -> Translation:
    if value.value == "dynamic":
        raise ValueError(f'{value.name} "dynamic" is not a number: use 0, which is the dynamic scale')
    scale = real(value, example=0)
    return Translation({"loss_scale": scale} if scale and not _without_fp16(value) else {})


def _initial_scale(value: Value) -> Translation:
    power, replicas = whole(value), value.run.replicas
    if value.other("fp16.loss_scale") or replicas is None or _without_fp16(value):
        return Translation()
    if power > 126:
        raise ValueError(f"{value} is above 126, whose power of two fp32 does not hold: use 16")
    note = f"2^{power} x {replicas} replicas, because megacore scales the mean over all of them" if replicas > 1 else ""
    return Translation({"initial_loss_scale": 2.0**power * replicas}, note=note)


def _dynamic_scale(value: Value) -> Translation:
    """A key of the dynamic loss scale, with the name of its field."""
    name = value.name.removeprefix("fp16.")
    given = real(value) if name == "min_loss_scale" else whole(value, 1)
    return Translation({} if value.other("fp16.loss_scale") or _without_fp16(value) else {name: given})


_ACCUMULATED = "data_types.grad_accum_dtype"
_SUMS = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}


def _communicated(value: Value) -> Translation:
    accumulated, given = _SUMS.get(str(value.other(_ACCUMULATED))), str(value.value)
    if accumulated is None or given not in (*_SUMS, "fp16", "float16") or _SUMS.get(given) == accumulated:
        return all_keys()[_ACCUMULATED].translate(value)
    return Translation(
        note=f"has no effect: gradients are reduced as they are accumulated ({_ACCUMULATED}), in {accumulated}"
    )


# ---- parallelism and memory ------------------------------------------------------------------------------------------


def _ulysses(value: Value) -> Translation:
    ranks = whole(value, 1)
    return Translation({"cp": ranks}, {"cp_comm": "ulysses"} if ranks > 1 else {})


def _saved_inputs(value: Value) -> Translation:
    """A switch about the inputs that full recomputation keeps, where there are any; dividing them needs --tp ranks."""
    divides, settings = "partition" in value.name, value.run.settings
    if not (value.is_flag or switch(value)) or settings.get("recompute") != "full":
        return Translation()
    if divides and (settings.get("tp") or 1) == 1:
        return Translation()
    return Translation({"distribute_saved_activations" if divides else "offload_activations": True})


def _gathered_buckets(value: Value) -> Translation:
    if not whole(value) or value.other("zero_optimization.reduce_bucket_size") is not None:
        return Translation()
    return Translation(implied={"bucket_size_mb": bucket_mib(value)})


def _without_pipeline(value: Value) -> Translation:
    if (pp := value.run.number("pp") or 1) > 1:
        raise ValueError(f"{value} contradicts --pp {pp}: leave one of them out")
    return Translation()


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _in_steps(value: Value) -> Translation:
    """A number of tokens where megacore counts steps: --lr-decay-tokens is --lr-decay-iters."""
    batch, samples = _batch_and_samples(value)
    name = value.name.removeprefix("--").replace("-", "_").replace("tokens", "iters")
    return Translation({name: max(1, nearest(samples / batch))})


def _batch_and_samples(value: Value) -> tuple[int, Fraction]:
    """The global batch size, and the samples that have so many tokens."""
    tokens = whole(value, 1)
    if (batch := value.run.number("global_batch_size")) is None:
        said = f"{value} counts tokens: add --global-batch-size 8, or another, or count steps"
        raise MissingField("global_batch_size", said)
    return batch, Fraction(tokens, max(value.run.settings.get("seq_length", DataConfig.seq_length), 1))


def _end(value: Value) -> Translation:
    """The number of steps after which so many tokens are used; a run ends there or at --train-iters, whichever is
    first, and the latter remains the length of the learning rate's schedule."""
    batch, samples = _batch_and_samples(value)
    steps = BatchSizes(batch, value.run.ramp).steps(math.ceil(samples) - 1) + 1
    settings = value.run.settings
    given = settings.get("train_iters")
    if given is None:
        return Translation({"train_iters": steps})
    if given <= steps:
        return Translation(note=f"--train-iters {given} ends the run first")
    is_decided = "lr_decay_iters" in settings or "--lr-decay-tokens" in value.run.others
    keeps = not is_decided and settings.get("lr_decay_style") != "constant"
    return Translation(
        {"train_iters": steps} | ({"lr_decay_iters": given} if keeps else {}),
        dropped=("train_iters",),
        note=f"it ends the run before --train-iters {given}",
    )


# ---- files, trackers and profiles ------------------------------------------------------------------------------------


def _events(value: Value) -> Translation:
    if not switch(value):
        return Translation()
    path, job = value.other("tensorboard.output_path", ""), value.other("tensorboard.job_name", "DeepSpeedJobName")
    if not isinstance(path, str) or not isinstance(job, str):
        return Translation()  # their keys are refused
    return Translation({"tensorboard_dir": str(PurePath(path) / job)})


def _project(value: Value) -> Translation:
    return Translation({"wandb_project": text(value.key("wandb.project", "deepspeed"))} if switch(value) else {})


def _profile(value: Value) -> Translation:
    step = value.other("flops_profiler.profile_step", 1)
    if not switch(value):
        return Translation()
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"flops_profiler.profile_step {shown(step)} is not a step from 1: use, for example, 10")
    return Translation({"profile_steps": f"{step}:{step}"})


# ---- the optimizer ---------------------------------------------------------------------------------------------------

_TYPES = ("AdamW", "Adam", "SGD", "Lion", "Lamb", "OneBitAdam", "OneBitLamb", "Muon")
_ADAM = ("adam", "adamw", "torchadam", "fusedadam", "deepspeedcpuadam")
_WITHOUT_BETAS = ("sgd", "muon")


def optimizer_type(value: Value) -> str:
    """The type of the file's optimizer, in small letters."""
    kind = value.other("optimizer.type", "")
    return kind.lower() if isinstance(kind, str) else ""


def _optimizer(value: Value) -> Translation:
    """The optimizer with DeepSpeed's defaults; its learning rate is constant without a scheduler."""
    kind, params = optimizer_type(value), "optimizer.params"
    defaults = tables()["optimizer_defaults"].get("adam" if kind in _ADAM else kind)
    if defaults is None:
        raise ValueError(
            f"{value} is not in megacore as DeepSpeed has it: use {one_of(_TYPES)}, or leave it out and choose one of "
            "megacore's with --optimizer"
        )
    values: dict[str, Any] = {"optimizer": kind}
    if kind in _ADAM:
        adam_w = kind != "adam" or value.other(f"{params}.adam_w_mode", True) is not False
        usual = 0.01 if value.other(f"{params}.torch_adam") and adam_w else 0.0
        defaults = {**defaults, "weight_decay": usual}
        # Both are one without weight decay.
        values = {"optimizer": "adamw" if adam_w or not value.other(f"{params}.weight_decay", usual) else "adam"}
    elif kind == "muon":
        values |= _of_muon(value)
    return Translation(values, defaults | ({} if value.other("scheduler.type") else {"lr_decay_style": "constant"}))


def _of_muon(value: Value) -> dict[str, Any]:
    """What Muon sets, with the AdamW of its other parameters, whose learning rates may differ by a factor."""
    params = "optimizer.params"
    shared = value.other(f"{params}.lr")
    rates = {}
    for name, default in (("muon", 0.02), ("adam", 3e-4)):
        is_shared = shared is not None and value.other(f"{params}.{name}_lr") is None
        rates[name] = real(value.key(f"{params}.lr" if is_shared else f"{params}.{name}_lr", default))
    if _sets_lr(value):  # of all parameters
        rates["muon"] = rates["adam"]
    if rates["adam"] <= 0:
        raise ValueError(f"{value}: the learning rate {number(rates['adam'])} must be above 0: use, for example, 3e-4")
    return {
        "muon_extra_scale_factor": rates["muon"] / rates["adam"],
        **{"muon_scale_mode": "shape_scaling", "muon_split_qkv": "none", "muon_nesterov": True},
        **({} if _sets_lr(value) else {"lr": rates["adam"]}),
    }


def _lr(value: Value) -> Translation:
    given = real(value)
    return Translation({} if _sets_lr(value) or optimizer_type(value) == "muon" else {"lr": given})


def _momentum(value: Value) -> Translation:
    return Translation({"muon_momentum" if optimizer_type(value) == "muon" else "sgd_momentum": real(value)})


def _betas(value: Value) -> Translation:
    if not isinstance(value.value, list | tuple) or len(value.value) != 2:
        raise ValueError(f"{value} must be two numbers: use [0.9, 0.999]")
    if optimizer_type(value) == "sgd":
        raise ValueError(f"{value} has no effect with SGD: leave it out")
    if _cycles_momentum(value):
        return Translation()  # the scheduler sets them
    first, second = (real(replace(value, value=beta)) for beta in value.value)
    return Translation(_as_betas(value, first, second))


def _as_betas(value: Value, first: float, second: float) -> dict[str, float]:
    name = "lion" if optimizer_type(value) == "lion" else "adam"
    return {f"{name}_beta1": first, f"{name}_beta2": second}


# ---- its schedule ----------------------------------------------------------------------------------------------------

_PARAMS = "scheduler.params"
_MAX_LR = {"WarmupLR": None, "WarmupDecayLR": 1e-3}  # where it is left out; WarmupLR takes that of the optimizer
_CYCLES = ("OneCycle", "LRRangeTest")
_SCHEDULERS = (*_MAX_LR, "WarmupCosineLR", *_CYCLES)


def _sets_lr(value: Value) -> bool:
    """Whether the scheduler sets the learning rate, whatever that of the optimizer."""
    kind, top = str(value.other("scheduler.type")), value_at(value.document, f"{_PARAMS}.warmup_max_lr")
    top = _MAX_LR.get(kind) if top is None else top
    return kind in _CYCLES or (kind in _MAX_LR and top not in (None, "auto"))


def _scheduler(value: Value) -> Translation:
    kind = value.value
    if kind not in _SCHEDULERS:
        raise ValueError(f"{value} is not in megacore: use {one_of(_SCHEDULERS)}, or --lr-decay-style")
    if kind in _CYCLES:
        return _one_cycle(value) if kind == "OneCycle" else _range_test(value)
    steps = max(2, whole(value.key(f"{_PARAMS}.warmup_num_steps", 1000), 1))
    style = "linear" if value.other(f"{_PARAMS}.warmup_type", "log") == "linear" else "log"
    is_auto = value_at(value.document, f"{_PARAMS}.warmup_num_steps") == "auto"
    values: dict[str, Any] = {} if is_auto else {"lr_warmup_iters": steps, "lr_warmup_style": style}
    if kind in _MAX_LR and _sets_lr(value):
        values["lr"] = real(value.key(f"{_PARAMS}.warmup_max_lr", _MAX_LR[kind]))
    if kind == "WarmupLR":
        return Translation({**values, "lr_decay_style": "constant"})
    values["lr_decay_style"] = "linear" if kind == "WarmupDecayLR" else "cosine"
    if (length := value.key(f"{_PARAMS}.total_num_steps")).value is not None:
        values["lr_decay_iters"] = whole(length, 1)
    elif value_at(value.document, length.name) is None:
        raise ValueError(f"{value} needs total_num_steps: give it, or use WarmupLR")
    if kind == "WarmupDecayLR":
        return Translation({**values, "min_lr": 0.0}, {"lr": _MAX_LR[kind]})
    ratio = real(value.key(f"{_PARAMS}.cos_min_ratio", 1e-4))
    rate = value.run.settings.get("lr", real(value.key("optimizer.params.lr", 1e-3)))
    return Translation({**values, "min_lr": float(f"{ratio * rate:.12g}")})


def _cycles_momentum(value: Value) -> bool:
    """Whether OneCycle changes the momentum: it does of the optimizers that have betas."""
    is_one_cycle = value.other("scheduler.type") == "OneCycle"
    cycles = value.other(f"{_PARAMS}.cycle_momentum", True) is not False
    return is_one_cycle and cycles and optimizer_type(value) not in _WITHOUT_BETAS


def _one_cycle(value: Value) -> Translation:
    """Up and down along lines, exactly in DeepSpeed's steps: the first one has the least rate."""
    first = whole(value.key(f"{_PARAMS}.cycle_first_step_size", 2000), 1)
    end = first + whole(value.key(f"{_PARAMS}.cycle_second_step_size", first), 1) + 1
    rates = {name: value.key(f"{_PARAMS}.cycle_{name}_lr") for name in ("min", "max")}
    for name, rate in rates.items():
        if rate.value is None:
            raise ValueError(f"{value} needs cycle_{name}_lr: give it, or use WarmupLR")
    least = real(rates["min"])
    values: dict[str, Any] = {
        **{"lr": real(rates["max"]), "min_lr": least, "lr_warmup_init": least},
        **{"lr_warmup_iters": first + 1, "lr_decay_iters": end},
        **{"lr_decay_style": "1cycle", "lr_cycle_style": "linear"},
    }
    if not _cycles_momentum(value):
        return Translation(values | {"lr_cycle_momentum": _usual_momentum(value)})
    most = real(value.key(f"{_PARAMS}.cycle_max_mom", 0.9))
    momenta = {"lr_cycle_momentum": real(value.key(f"{_PARAMS}.cycle_min_mom", 0.8))}
    return Translation(values | momenta | _as_betas(value, most, 0.99))  # DeepSpeed sets the second one too


def _usual_momentum(value: Value) -> float:
    kind = optimizer_type(value)
    if kind in _WITHOUT_BETAS:
        return real(value.key("optimizer.params.momentum", 0.0 if kind == "sgd" else 0.95))
    given = value.key("optimizer.params.betas")
    is_list = isinstance(given.value, list | tuple) and given.value
    return real(replace(given, value=given.value[0] if is_list else value.run.settings.get("adam_beta1", 0.9)))


def _range_test(value: Value) -> Translation:
    """A rate that rises along a line to the end of the run."""
    last = value.run.number("train_iters")
    if last is None:
        return Translation()
    if last == LARGEST_INT:  # of an engine
        raise ValueError(f"{value} needs the length of the run, which an engine does not know: use WarmupLR")
    first = real(value.key(f"{_PARAMS}.lr_range_test_min_lr", 1e-3))
    size = whole(value.key(f"{_PARAMS}.lr_range_test_step_size", 2000), 1)
    rate = real(value.key(f"{_PARAMS}.lr_range_test_step_rate", 1.0))
    top = first * (1 + rate * (last - 1) / size)
    rising = {"lr": top, "min_lr": top, "lr_warmup_init": first, "lr_warmup_iters": last, "lr_decay_iters": last + 1}
    usual = {"lr_cycle_momentum": _usual_momentum(value)}
    return Translation({**rising, "lr_decay_style": "1cycle", "lr_cycle_style": "linear", **usual})


# ---- the tables ------------------------------------------------------------------------------------------------------


@functools.cache  # only a run with a DeepSpeed configuration reads the file
def tables() -> Mapping[str, Any]:
    """The file of keys. `switched` are the sections that are off unless a key of theirs says otherwise, with that key
    and its default; `aliases` are other names of sections."""
    return read_tables("deepspeed_keys.toml")


@functools.cache
def all_keys() -> Mapping[str, Foreign]:
    """What each key becomes, by its path."""
    return read_rows(tables(), globals())


DEEPSPEED_FLAGS: Mapping[str, Foreign] = read_rows(read_tables("deepspeed_flags.toml"), globals())
"""The flags of DeepSpeed's launcher and of Megatron-DeepSpeed that are accepted and translated."""
LAUNCHER = frozenset({"--deepspeed", "--deepscale", "--local-rank", "--deepspeed-mpi"})
"""Those that say nothing about the script that is run."""
