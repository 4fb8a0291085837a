"""Profiles of ranks, kept in the user's cache between runs: tracing takes seconds, and reading a moment. A profile is
found by everything that it depends on: the settings that decide what a step does, the rank, the versions of torch and
Triton, and the sources of megacore. What uses the code of a program, such as an optimizer that it registers, is traced
each time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megacore
from megacore.config import ResolvedConfig
from megacore.config.activations import BUILT_IN
from megacore.errors import UserError
from megacore.files import cache_home, replace_bytes
from megacore.parallel.processors import available_cores
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import training_schedule
from megacore.safe_json import read_json
from megacore.tracer.step_memory import Pass, Passage, StepProfile, microbatches_that_run

_LARGEST = 2**24
# Of what torch says in a process that is forked from one that has computed gradients: its threads of autograd are not
# there, or do not know the absent device.
_AFTER_GRADIENTS = ("Autograd-and-Fork", "device_ready_queues_")
_KEPT_SECONDS, _WRITING_SECONDS = 30 * 86400, 3600
# Sections of a configuration that change nothing of what a step holds, and such fields of others.
_APART = {"checkpoint", "data", "logging", "rampup", "spikes", "start", "watch"}
_FREE: Mapping[str, frozenset[str]] = {
    "model": frozenset({"preset"}),
    "optimizer": frozenset({
        "lr", "min_lr", "lr_decay_iters", "lr_warmup_init", "lr_warmup_iters", "lr_wsd_decay_iters", "weight_decay",
    }),
    "training": frozenset({
        "deterministic", "eval_interval", "eval_iters", "global_batch_size", "max_bad_steps", "memory_check",
        "output_dir", "seed", "skip_train", "train_iters",
    }),
}  # fmt: skip


def profiles_of(
    config: ResolvedConfig, ranks: Sequence[int], *, on_cpu: bool, shares_work: bool = True
) -> list[StepProfile]:
    """The profile of each of these ranks, of the first in its stage. `on_cpu`: ranks compute in host memory."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("tracing memory needs torch: install it, or use --estimate")
    paths = [_path(config, rank, on_cpu=on_cpu) for rank in ranks]
    found = list(map(_read, paths))
    missing = [number for number, profile in enumerate(found) if profile is None]
    unknown = [ranks[number] for number in missing]
    traced = _traced(config, unknown, on_cpu=on_cpu, shares_work=shares_work) if missing else []
    for number, profile in zip(missing, traced, strict=True):
        found[number] = profile
        _write(paths[number], profile)
    return [profile for profile in found if profile is not None]


def _traced(config: ResolvedConfig, ranks: Sequence[int], *, on_cpu: bool, shares_work: bool) -> list[StepProfile]:
    found = _outcomes(config, ranks, on_cpu=on_cpu, shares_work=shares_work)
    for rank, outcome in zip(ranks, found, strict=True):
        if isinstance(outcome, str):
            raise UserError(f"pipeline rank {rank} cannot take a step on fake tensors: {outcome}; use --estimate")
    return [outcome for outcome in found if isinstance(outcome, StepProfile)]


def _outcomes(
    config: ResolvedConfig, ranks: Sequence[int], *, on_cpu: bool, shares_work: bool
) -> list[StepProfile | str]:
    from megacore.tracer import profile, workers  # they load torch, which what is known need not wait for

    trace = functools.partial(profile.try_profile, config, on_cpu=on_cpu)
    if not shares_work or sys.platform != "linux" or multiprocessing.current_process().daemon:
        return list(map(trace, ranks))
    count = min(available_cores(), len(ranks))
    found = list(workers.in_processes(trace, ranks, count))
    if not any(isinstance(outcome, str) and any(part in outcome for part in _AFTER_GRADIENTS) for outcome in found):
        return found
    # In a new process nothing is registered, and a configuration with registered sections cannot be sent there.
    kind = type(config)
    if getattr(sys.modules[kind.__module__], kind.__name__) is not kind or not _is_of_megacore(config):
        return list(map(trace, ranks))
    return list(workers.in_processes(trace, ranks, count, method="spawn"))


def _is_of_megacore(config: ResolvedConfig) -> bool:
    """Whether a step runs no code that a program has registered."""
    own = type(config.optimizer_settings).__module__.partition(".")[0] == megacore.__name__
    return own and config.model.activation in BUILT_IN


def _path(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> Path | None:
    """Where a profile is kept; None: nowhere."""
    home = cache_home()
    if home is None or not _is_of_megacore(config):
        return None
    count = microbatches_that_run(config, rank)
    data = config.data.seq_length, config.beside_hidden_states, config.padded_documents
    file = None if config.parallel.schedule_csv is None else training_schedule(config.parallel, count).actions
    versions = _version("torch"), _version("triton")
    key = repr((_settings(config), count, data, file, rank, on_cpu, versions, _sources()))
    return home / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _settings(config: ResolvedConfig) -> list[tuple[str, str, Any]]:
    # Weights are updated in groups of one rate and decay: what counts is which of them are alike.
    optimizer = config.optimizer
    alike = optimizer.weight_decay == 0, None if optimizer.decoupled_lr is None else optimizer.lr
    return [("optimizer", "alike", alike)] + [
        (section.name, field.name, getattr(getattr(config, section.name), field.name))
        for section in dataclasses.fields(config)
        if section.name not in _APART
        for field in dataclasses.fields(getattr(config, section.name))
        if field.name not in _FREE.get(section.name, ())
    ]


@functools.cache
def _sources() -> str:
    """A digest of all that a step may run."""
    digest, package = hashlib.sha256(), Path(megacore.__file__).parent
    for root in (package, package.parent / "kernels"):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> StepProfile | None:
    """The profile in a file; None: there is none, or it is damaged."""
    if path is None:
        return None
    try:
        read = read_json(path, _LARGEST)
        return _from_json(read["profile"]) if read["digest"] == _digest(read["profile"]) else None
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError):
        return None


def _write(path: Path | None, profile: StepProfile) -> None:
    if path is None:
        return
    data = _to_json(profile)
    with contextlib.suppress(OSError):  # it is traced again
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, json.dumps({"digest": _digest(data), "profile": data}).encode(), durable=False)
        _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    """Remove profiles that are a month old, and files that a killed process has not finished."""
    for path in folder.iterdir():
        age = time.time() - path.stat().st_mtime
        if age > (_WRITING_SECONDS if path.suffix != ".json" else _KEPT_SECONDS):
            path.unlink()


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _to_json(profile: StepProfile) -> dict[str, Any]:
    return {
        **{name: getattr(profile, name) for name in ("beside_state", "lasting_gradients", "updating")},
        "passes": [[op.value, stage, passes] for (op, stage), passes in profile.passes.items()],
        "messages": [[op.value, stage, size] for (op, stage), size in profile.messages.items()],
    }


def _from_json(read: dict[str, Any]) -> StepProfile:
    return StepProfile(
        beside_state=int(read["beside_state"]),
        lasting_gradients=float(read["lasting_gradients"]),
        updating=int(read["updating"]),
        passes={
            (Op(op), int(stage)): [
                Pass(after, [Passage(*map(int, one)) for one in passages]) for after, passages in of_op
            ]
            for op, stage, of_op in read["passes"]
        },
        messages={(Op(op), int(stage)): int(size) for op, stage, size in read["messages"]},
    )
