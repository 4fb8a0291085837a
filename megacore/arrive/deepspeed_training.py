"""The part of a DeepSpeed configuration about the optimizer and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacore.arrive.deepspeed_values import Translate, Value, real, value_at, whole
from megacore.arrive.tables import by_name
from megacore.arrive.translation import Translation
from megacore.config.fields import LARGEST_INT
from megacore.config.messages import number, one_of

# ---- the optimizer ---------------------------------------------------------------------------------------------------

_ADAM = ("adam", "adamw", "torchadam", "fusedadam", "deepspeedcpuadam")
_WITHOUT_BETAS = ("sgd", "muon")
_KINDS = ("AdamW", "Adam", "SGD", "Lion", "Lamb", "OneBitAdam", "OneBitLamb", "Muon")
_ADAMS = {"lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0}
_LAMBS = {"lamb_min_coeff": 0.01, "lamb_max_coeff": 10.0}
_FURTHER: dict[str, dict[str, Any]] = {
    "lion": {"lr": 1e-4, "lion_beta1": 0.9, "lion_beta2": 0.99, "weight_decay": 0.0},
    "lamb": _ADAMS | _LAMBS,
    "onebitadam": _ADAMS | {"onebit_freeze_step": 100_000},
    "onebitlamb": _ADAMS | _LAMBS | {"onebit_freeze_step": 100_000},
}
"""DeepSpeed's defaults."""


def optimizer_type(value: Value) -> str:
    """The type of the file's optimizer, in small letters."""
    kind = value.other("optimizer.type", "")
    return kind.lower() if isinstance(kind, str) else ""


def _optimizer(value: Value) -> Translation:
    kind = optimizer_type(value)
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
    if kind in _FURTHER:
        return Translation({"optimizer": kind}, {**_FURTHER[kind], **_constant(value)})
    if kind == "muon":
        return _muon(value)
    raise ValueError(
        f"{value} is not in megacore as DeepSpeed has it: use {one_of(_KINDS)}, or leave it out and choose one of "
        "megacore's with --optimizer"
    )


def _muon(value: Value) -> Translation:
    """Muon with the AdamW of its other parameters, whose learning rates may differ by a factor."""
    params = "optimizer.params"
    shared = value.other(f"{params}.lr")
    rates = {}
    for name, default in (("muon", 0.02), ("adam", 3e-4)):
        is_shared = shared is not None and value.other(f"{params}.{name}_lr") is None
        rates[name] = real(other(value, f"{params}.lr" if is_shared else f"{params}.{name}_lr", default))
    if _sets_lr(value):  # of all parameters
        rates["muon"] = rates["adam"]
    if rates["adam"] <= 0:
        raise ValueError(f"{value}: the learning rate {number(rates['adam'])} must be above 0: use, for example, 3e-4")
    of_deepspeed = {"muon_scale_mode": "shape_scaling", "muon_split_qkv": "none", "muon_nesterov": True}
    values = {"optimizer": "muon", "muon_extra_scale_factor": rates["muon"] / rates["adam"], **of_deepspeed}
    if not _sets_lr(value):
        values["lr"] = rates["adam"]
    defaults = {"muon_momentum": 0.95, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-10, "weight_decay": 0.0}
    return Translation(values, {**defaults, **_constant(value)})


def _constant(value: Value) -> dict[str, Any]:
    """DeepSpeed's learning rate is constant without a scheduler."""
    return {} if value.other("scheduler.type") else {"lr_decay_style": "constant"}


def _sets_lr(value: Value) -> bool:
    """Whether the scheduler sets the learning rate, whatever that of the optimizer."""
    kind, top = value.other("scheduler.type"), value_at(value.document, "scheduler.params.warmup_max_lr")
    top = _MAX_LR.get(kind) if top is None else top
    return kind in _CYCLES or (kind in _WITH_MAX_LR and top not in (None, "auto"))


def _lr(value: Value) -> Translation:
    given = real(value)
    return Translation({} if _sets_lr(value) or optimizer_type(value) == "muon" else {"lr": given})


def _momentum(value: Value) -> Translation:
    return Translation({"muon_momentum" if optimizer_type(value) == "muon" else "sgd_momentum": real(value)})


def _betas(value: Value) -> Translation:
    betas = value.value
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"{value} must be two numbers: use [0.9, 0.999]")
    if optimizer_type(value) == "sgd":
        raise ValueError(f"{value} has no effect with SGD: leave it out")
    if _cycles_momentum(value):
        return Translation()  # the scheduler sets them
    first, second = (real(Value(value.path, beta, value.document, value.shape)) for beta in betas)
    name = "lion" if optimizer_type(value) == "lion" else "adam"
    return Translation({f"{name}_beta1": first, f"{name}_beta2": second})


# ---- its schedule ----------------------------------------------------------------------------------------------------

_WITH_MAX_LR = ("WarmupLR", "WarmupDecayLR")
_MAX_LR = {"WarmupDecayLR": 1e-3}  # where it is left out; WarmupLR takes that of the optimizer
_CYCLES = ("OneCycle", "LRRangeTest")
_SCHEDULERS = (*_WITH_MAX_LR, "WarmupCosineLR", *_CYCLES)


def _scheduler(value: Value) -> Translation:
    kind, base = value.value, "scheduler.params"
    if kind not in _SCHEDULERS:
        raise ValueError(f"{value} is not in megacore: use {one_of(_SCHEDULERS)}, or --lr-decay-style")
    if kind in _CYCLES:
        return _one_cycle(value) if kind == "OneCycle" else _range_test(value)
    warmup = max(2, whole(other(value, f"{base}.warmup_num_steps", 1000), low=1))
    style = value.other(f"{base}.warmup_type", "log")
    values: dict[str, Any] = {"lr_warmup_iters": warmup, "lr_warmup_style": "linear" if style == "linear" else "log"}
    if value.other(f"{base}.warmup_num_steps") is None and value_at(value.document, f"{base}.warmup_num_steps"):
        values = {}  # "auto"
    if kind in _WITH_MAX_LR and _sets_lr(value):
        values["lr"] = real(other(value, f"{base}.warmup_max_lr", _MAX_LR.get(kind)))
    if kind == "WarmupLR":
        return Translation({**values, "lr_decay_style": "constant"})
    values |= {"lr_decay_style": "linear" if kind == "WarmupDecayLR" else "cosine"}
    if (total := value.other(f"{base}.total_num_steps")) is not None:
        values["lr_decay_iters"] = whole(other(value, f"{base}.total_num_steps", total), low=1)
    elif value_at(value.document, f"{base}.total_num_steps") is None:
        raise ValueError(f"{value} needs total_num_steps: give it, or use WarmupLR")
    if kind == "WarmupDecayLR":
        return Translation({**values, "min_lr": 0.0}, {"lr": _MAX_LR[kind]})
    ratio = real(other(value, f"{base}.cos_min_ratio", 1e-4))
    lr = value.shape.settings.get("lr", real(other(value, "optimizer.params.lr", 1e-3)))
    return Translation({**values, "min_lr": float(f"{ratio * lr:.12g}")})


def _cycles_momentum(value: Value) -> bool:
    """Whether OneCycle changes the momentum: it does of the optimizers that have betas."""
    cycles = value.other("scheduler.params.cycle_momentum", True)
    return (
        value.other("scheduler.type") == "OneCycle"
        and cycles is not False
        and optimizer_type(value) not in _WITHOUT_BETAS
    )


def _one_cycle(value: Value) -> Translation:
    """Up and down along lines, exactly in DeepSpeed's steps: the first one has the least rate."""

    def read(name: str, default: float | None = None) -> float:
        path = f"scheduler.params.{name}"
        if default is None and value.other(path) is None:
            raise ValueError(f"{value} needs {name}: give it, or use WarmupLR")
        return real(other(value, path, default))

    def steps(name: str, default: int) -> int:
        return whole(other(value, f"scheduler.params.{name}", default), low=1)

    first = steps("cycle_first_step_size", 2000)
    end = first + steps("cycle_second_step_size", first) + 1
    least = read("cycle_min_lr")
    values: dict[str, Any] = {
        **{"lr": read("cycle_max_lr"), "min_lr": least, "lr_warmup_init": least},
        **{"lr_warmup_iters": first + 1, "lr_decay_iters": end},
        **{"lr_decay_style": "1cycle", "lr_cycle_style": "linear"},
    }
    if not _cycles_momentum(value):
        return Translation(values | {"lr_cycle_momentum": _usual_momentum(value)})
    betas = (read("cycle_max_mom", 0.9), 0.99)  # DeepSpeed sets the second one too
    prefix = "lion" if optimizer_type(value) == "lion" else "adam"
    of_momentum = {f"{prefix}_beta{which}": beta for which, beta in enumerate(betas, start=1)}
    return Translation(values | {"lr_cycle_momentum": read("cycle_min_mom", 0.8), **of_momentum})


def _usual_momentum(value: Value) -> float:
    """The momentum that stays as it is."""
    names = {"sgd": ("momentum", 0.0), "muon": ("momentum", 0.95)}
    if (kind := optimizer_type(value)) in names:
        name, default = names[kind]
        return real(other(value, f"optimizer.params.{name}", default))
    betas = value.other("optimizer.params.betas")
    given = betas[0] if isinstance(betas, list | tuple) and betas else value.shape.settings.get("adam_beta1", 0.9)
    return real(Value("optimizer.params.betas", given, value.document, value.shape))


def _range_test(value: Value) -> Translation:
    """A rate that rises along a line to the end of the run."""
    params, last = "scheduler.params", value.shape.train_iters
    if last is None:
        return Translation()
    if last == LARGEST_INT:  # of an engine
        raise ValueError(f"{value} needs the length of the run, which an engine does not know: use WarmupLR")
    first = real(other(value, f"{params}.lr_range_test_min_lr", 1e-3))
    size = whole(other(value, f"{params}.lr_range_test_step_size", 2000), low=1)
    rate = real(other(value, f"{params}.lr_range_test_step_rate", 1.0))
    top = first * (1 + rate * (last - 1) / size)
    rising = {"lr": top, "min_lr": top, "lr_warmup_init": first, "lr_warmup_iters": last, "lr_decay_iters": last + 1}
    usual = {"lr_cycle_momentum": _usual_momentum(value)}
    return Translation({**rising, "lr_decay_style": "1cycle", "lr_cycle_style": "linear", **usual})


def _first_lr(value: Value) -> Translation:
    first = real(value)
    return Translation({"lr_warmup_init": first} if first else {})


def other(value: Value, path: str, default: Any) -> Value:
    """Another key of the same file."""
    return Value(path, value.other(path, default), value.document, value.shape)


def _warmup_type(value: Value) -> Translation:
    if value.value not in ("linear", "log"):
        raise ValueError(f"{value} is not known: use linear or log")
    return Translation()


OPTIMIZER: Mapping[str, Translate] = by_name(
    *(_optimizer, _lr, _betas, _momentum, _scheduler, _first_lr, _warmup_type),
)
"""The functions that rows of deepspeed_keys.toml name."""
