"""How a job ends early: the first cause is said once, and every process ends at once.

When one rank fails, its peers fail as well, each with a different message. The first rank of the job to report is the
one with the cause; the messages of the others only follow from it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

from megacore.config.cli import leave_for_launcher
from megacore.parallel.mesh import is_first_of_job
from megacore.train.watchdog import watchdog

_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
_reporting = threading.Lock()  # a thread that has nothing to say must not end the process while another speaks


def report_cause(text: str, *, otherwise: bool = True) -> bool:
    """Say why the job ends, unless a rank already has.

    Args:
        text: the message, without the program's name.
        otherwise: whether to say it where the ranks cannot agree on one, because their launcher is gone.

    Returns:
        Whether it was said.
    """
    with _reporting:
        watchdog().note_last_words()
        if watchdog().reported_hang() or not is_first_of_job("end", otherwise=otherwise):
            return False
        message = f"megacore: {text}"
        leave_for_launcher(message)
        with contextlib.suppress(BrokenPipeError):  # nobody reads it
            print(message, file=sys.stderr, flush=True)
        return True


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
