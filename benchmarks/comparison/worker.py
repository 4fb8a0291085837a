"""One rank of one side: builds the job of a file, its first argument, then runs as many steps as each line of its
standard input says. It answers each with a line of JSON, on the file descriptor that is its second argument.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comparison.job import Job, Step


def main(argv: list[str]) -> None:
    job = Job.from_json(Path(argv[0]).read_text(encoding="utf-8"))
    with os.fdopen(int(argv[1]), "w", encoding="utf-8") as answers:

        def answer(record: dict[str, Any]) -> None:
            print(json.dumps(record), file=answers, flush=True)

        torch.set_num_threads(1)
        try:
            side = importlib.import_module(f"benchmarks.comparison.sides.{job.side.replace('-', '_')}")
            before = _resident()
            step = side.build(job)
            answer({"name": side.name(job.layout)})
            for line in sys.stdin:
                answer({**_measured(step, int(line)), "peak": _peak() - before, "process_peak": _peak()})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
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


def _resident() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
