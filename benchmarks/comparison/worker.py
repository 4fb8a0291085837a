"""One rank of one side: builds the job that comes through a pipe, whose file descriptor is its argument, then runs as
many steps as it is told, and answers what they took."""

from __future__ import annotations

import importlib
import math
import os
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comparison.job import Job, Step


def main(argv: list[str]) -> None:
    pipe = Connection(int(argv[0]))
    torch.set_num_threads(1)
    try:
        job: Job = pipe.recv()
        side = importlib.import_module(f"benchmarks.comparison.sides.{job.side.replace('-', '_')}")
        before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        step = side.build(job)
        pipe.send({"name": side.name(job.layout)})
        while True:
            found = _measured(step, pipe.recv())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            pipe.send({**found, "peak": peak})
    except EOFError:  # nobody asks any more
        pass
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)  # the ranks of a framework that failed on one of them would wait for each other here


def _measured(step: Step, count: int) -> dict[str, Any]:
    """Seconds of a number of steps, from when all ranks begin to when the last has ended; and this rank's losses."""
    losses = []
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        losses.append(step())
    _wait()
    seconds = time.perf_counter() - start
    known = [math.nan if loss is None else loss for loss in losses]
    return {"seconds": seconds, "losses": known}


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
