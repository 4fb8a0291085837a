"""pretrain_gpt.py in which one rank hangs: `HANG='{"rank": 2, "at": "step", "call": 7, "fault": "stop"}'`, or a list.

Run as a script in place of pretrain_gpt.py. `at` is one of POINTS or "import", `call` counts the calls of that point on
the rank from 1, and `fault` is one of FAULTS, SIZES or SKIPS, which happens before the call, or in place of it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.watch.ledger import this_ledger

ROOT = Path(__file__).resolve().parents[2]
HANG = "HANG"
MARK = "HANG_MARK"  # names a file that gets the time of the fault
LONG = 3600

# Where a run can hang: (module, attribute) of what is called there.
POINTS = {
    "start": ("megacore.train.launch", "build_mesh"),
    "build": ("megacore.train.step", "parallelize"),
    "data": ("megacore.data.loading.loader", "_RankView.__getitem__"),
    "forward": ("megacore.pipeline.stage", "Stage.forward"),
    "backward": ("megacore.pipeline.runtime", "accumulate_gradients"),
    "step": ("megacore.optim.update", "WeightUpdate.apply"),
    "sink": ("megacore.observe.events", "Events.on_log"),
    "evaluate": ("megacore.pipeline.runtime", "PipelineRuntime.evaluate"),
    "save": ("megacore.checkpoint.save", "CheckpointSaver._stage"),
    "message": ("megacore.pipeline.runtime", "_Run.as_transfer"),
    "posted": ("torch.distributed", "all_reduce"),
    "collective": ("megacore.optim.update", "all_reduce_job_"),
}


def hold_the_interpreter() -> None:
    """Block in C and keep the interpreter's lock: no thread of Python runs any more."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it is taken
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


FAULTS: dict[str, Callable[[], object]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(LONG),
    "lock": hold_the_interpreter,
    "spin": lambda: all(itertools.repeat(True)),
    "slow": lambda: time.sleep(float(os.environ.get("SLOW", "0.05"))),
}


SIZES = {"lengthen": 3.0, "shorten": 0.5}  # of the messages that a transfer sends


def resized(transfer: Any, factor: float) -> Any:
    """The transfer, with messages of another size if it sends any."""
    tensors = tuple(tensor.new_zeros(int(factor * tensor.numel())) for tensor in getattr(transfer, "tensors", ()))
    return dataclasses.replace(transfer, tensors=tensors) if tensors else transfer


SKIPS = {"skip": 0, "skip-last": -1}  # which of the collectives of a sum over the job is left out


def without_one_group(left_out: int, tensor: Any, mesh: Any, **named: Any) -> Any:
    """A sum over the job in which this rank leaves out one of its collectives."""
    collectives: Any = importlib.import_module("megacore.parallel.collectives")
    for group in mesh.sum_groups:
        if group is not mesh.sum_groups[left_out]:
            collectives.all_reduce_(tensor, group, **named)
    return tensor


def plant(rank: int, at: str, call: int, fault: str, seconds: float | None = None) -> None:
    """Put a fault into this process, if it is that rank; a slow one takes so many seconds in every call."""
    if int(os.environ["RANK"]) != rank:
        return
    if at == "import":  # the first phase of all
        FAULTS[fault]()
    module, name = POINTS[at]
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    called, calls = getattr(holder, last), 0

    @functools.wraps(called)
    def faulty(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += fault not in SIZES or ((ledger := this_ledger()) is not None and ledger.in_step)
        if fault == "slow" or calls == call or (fault in SIZES and calls == call + 1):
            if MARK in os.environ:
                Path(os.environ[MARK]).write_text(str(time.time()))
            if fault in SKIPS:
                return without_one_group(SKIPS[fault], *given, **named)
            if fault in SIZES:
                return resized(called(*given, **named), SIZES[fault])
            if seconds is not None:
                time.sleep(seconds)
            else:
                FAULTS[fault]()
        return called(*given, **named)

    setattr(holder, last, faulty)


def main() -> None:
    """Plant the fault and train."""
    sys.path.insert(0, str(ROOT))
    pretrain_gpt: Any = importlib.import_module("pretrain_gpt")
    start: Any = importlib.import_module("megacore.watch.start")
    begin = start.begin_watch

    def begin_and_plant(config: Any, **options: Any) -> None:
        begin(config, **options)
        start.begin_watch = begin  # once
        plans = json.loads(os.environ[HANG])
        for plan in plans if isinstance(plans, list) else [plans]:
            plant(**plan)

    start.begin_watch = begin_and_plant
    status = pretrain_gpt.main(sys.argv[1:])
    importlib.import_module("megacore.train.launch").exit_with(status)


if __name__ == "__main__":
    main()
