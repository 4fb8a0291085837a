"""How a job ends early: the first cause is said once, and every process ends at once.

When one rank fails, its peers fail as well, each with a different message. The first rank of the job to report is the
one with the cause; the messages of the others only follow from it. A cause outside the program (too little memory, a
full disk, a file that cannot be written) is one line: a traceback from every rank would hide it. Anything else is taken
for an error of the program, and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import NoReturn

import torch

from megacore.config.cli import leave_for_launcher
from megacore.errors import EXIT_HUNG, StorageError
from megacore.parallel.mesh import first_status_of_job
from megacore.train.watchdog import watchdog

# As gloo and NCCL say it.
_LOST = re.compile(
    r"(?P<reason>Connection (?:closed|reset) by (?:remote )?peer|remote process exit(?:ed|ing prematurely))"
    r"(?:,? \[(?P<address>[^\]]+)\])?"
)
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_reporting = threading.Lock()  # a thread that has nothing to say must not end the process while another speaks


def report_cause(text: str, status: int, *, otherwise: bool = True) -> tuple[int, bool]:
    """Say why the job ends, unless a rank already has. `text`: the message, without the program's name. `status`:
    with which this rank would end. `otherwise`: whether to say it where the ranks cannot agree on one, because their
    launcher is gone. Returns the exit status, which is that of the rank that has spoken, and whether this call said
    it."""
    with _reporting:
        watchdog().note_last_words()
        if watchdog().reported_hang():
            return EXIT_HUNG, False
        try:
            status, is_first = first_status_of_job(status)
        except (OSError, RuntimeError):
            is_first = otherwise
        if is_first:
            message = f"megacore: {text}"
            leave_for_launcher(message)
            with contextlib.suppress(BrokenPipeError):  # nobody reads it
                print(message, file=sys.stderr, flush=True)
        return status, is_first


def exit_with(status: int) -> NoReturn:
    """End the process now, past the interpreter's shutdown.

    Once the interpreter shuts down, a thread that asks for its lock is ended on the spot, and where that unwinds a C++
    destructor the whole process aborts ("terminate called without an active exception"). Such threads are left at the
    end of a finished run: gloo's workers, which drop the last reference to a transfer's tensors and which run on after
    destroy_process_group while anything holds a group, and any thread of ours that ends while it holds a group.
    Everything is flushed and closed by now: nothing is left for a shutdown to do.
    """
    try:
        if status and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a pipe whose reader is gone
        os._exit(status)


def outside_cause(error: Exception) -> str | None:
    """What went wrong outside the program, and what to do; None where the program itself may be wrong."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return _memory(error)
    if isinstance(error, StorageError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return None


def lost_connection(error: Exception) -> str | None:
    """That a rank of another machine has ended or cannot be reached, where a backend says so; None if it does not."""
    if (found := _LOST.search(str(error))) is None:
        return None
    where = f" at {found['address']}" if found["address"] else ""
    return (
        f"lost the connection to a rank of another machine{where} ({found['reason']}): the first cause is in the "
        "output of that machine, if it still runs"
    )


def _memory(error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = reason[reason.find("DefaultCPUAllocator") :] if "DefaultCPUAllocator" in reason else reason
    return (
        f"there is not enough memory ({reason.rstrip('.')}): use --recompute full, --micro-batch-size 1 or "
        "--zero-stage 3, more ranks by --tp or --pp, or a smaller model (docs/guides/memory.md)"
    )
