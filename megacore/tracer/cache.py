"""Profiles of ranks, kept in the user's cache between runs: tracing takes seconds, and reading a moment.

A profile is found by everything that it depends on: the settings that decide what a step does, the rank, the version of
torch, and the sources of megacore.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megacore
from megacore.config import ResolvedConfig
from megacore.errors import UserError
from megacore.files import cache_home, read_bounded, replace_bytes
from megacore.parallel.processors import available_cores
from megacore.pipeline.schedule import Op
from megacore.pipeline.schedule_file import training_schedule
from megacore.tracer.step_memory import Passage, StepProfile, microbatches_that_run

_LARGEST = 2**24
# Sections of a configuration, and fields of others, that change nothing of what a step holds.
_APART = {"checkpoint", "data", "logging", "rampup", "spikes", "start", "watch"}
_FREE = {
    "deterministic", "eval_interval", "eval_iters", "global_batch_size", "max_bad_steps", "memory_check", "output_dir",
    "preset", "seed", "skip_train", "train_iters",
}  # fmt: skip


def profiles_of(
    config: ResolvedConfig, ranks: Sequence[int], *, on_cpu: bool, shares_work: bool = True
) -> list[StepProfile]:
    """The profile of each of these ranks of a pipeline, of the first in its stage.

    Args:
        config: a resolved configuration.
        ranks: numbers in the pipeline.
        on_cpu: whether the ranks compute in host memory.
        shares_work: whether other processes trace.
    """
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
    from megacore.tracer.profile import profile_of  # loads torch, which what is known need not wait for

    trace = functools.partial(profile_of, config, on_cpu=on_cpu)
    numbers = [rank * (config.parallel.ranks // config.parallel.pp) for rank in ranks]
    if not shares_work or sys.platform != "linux" or multiprocessing.current_process().daemon:
        return list(map(trace, numbers))
    try:
        return _in_processes("fork", trace, numbers)
    except RuntimeError:  # if this process has computed gradients, autograd works in none that is forked from it
        return _in_processes("spawn", trace, numbers)


def _in_processes(method: str, trace: Callable[[int], StepProfile], numbers: Sequence[int]) -> list[StepProfile]:
    from megacore.tracer.fake_job import absent_accelerator

    cores, context = min(available_cores(), len(numbers)), multiprocessing.get_context(method)
    try:
        # The device must be known before a process computes gradients, on whatever device.
        with concurrent.futures.ProcessPoolExecutor(cores, context, initializer=absent_accelerator) as pool:
            return list(pool.map(trace, numbers))
    except concurrent.futures.BrokenExecutor:
        raise UserError("a process that traces memory was killed: use --estimate") from None


def _path(config: ResolvedConfig, rank: int, *, on_cpu: bool) -> Path:
    count = config.microbatches
    if config.parallel.schedule_csv is None:
        count = min(count, microbatches_that_run(config))
    data = config.data.seq_length, config.beside_hidden_states, config.padded_documents
    file = None if config.parallel.schedule_csv is None else training_schedule(config.parallel, count).actions
    key = repr((_settings(config), count, data, file, rank, on_cpu, version("torch"), _sources()))
    return cache_home() / "profiles" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _settings(config: ResolvedConfig) -> list[tuple[str, str, Any]]:
    sections = [(f.name, getattr(config, f.name)) for f in dataclasses.fields(config) if f.name not in _APART]
    return [
        (name, field.name, getattr(section, field.name))
        for name, section in sections
        for field in dataclasses.fields(section)
        if field.name not in _FREE
    ]


@functools.cache
def _sources() -> str:
    """A digest of all that a step may run."""
    digest, package = hashlib.sha256(), Path(megacore.__file__).parent
    for root in (package, package.parent / "kernels"):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> StepProfile | None:
    """The profile in a file; None: there is none, or it is damaged."""
    try:
        return _from_json(json.loads(read_bounded(path, _LARGEST)))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
        return None


def _write(path: Path, profile: StepProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, json.dumps(_to_json(profile)).encode(), durable=False)
    except OSError:
        pass  # it is traced again


def _to_json(profile: StepProfile) -> dict[str, Any]:
    return {
        **{name: getattr(profile, name) for name in ("beside_state", "lasting_gradients", "updating")},
        "passages": [[op.value, stage, passages] for (op, stage), passages in profile.passages.items()],
        "messages": [[op.value, stage, size] for (op, stage), size in profile.messages.items()],
    }


def _from_json(read: dict[str, Any]) -> StepProfile:
    if not any(op == Op.FORWARD.value for op, *_ in read["passages"]):
        raise ValueError("no profile has no forward")
    return StepProfile(
        beside_state=int(read["beside_state"]),
        lasting_gradients=float(read["lasting_gradients"]),
        updating=int(read["updating"]),
        passages={
            (Op(op), int(stage)): [[Passage(*map(int, one)) for one in passages] for passages in of_microbatches]
            for op, stage, of_microbatches in read["passages"]
        },
        messages={(Op(op), int(stage)): int(size) for op, stage, size in read["messages"]},
    )
