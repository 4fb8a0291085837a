"""Failures whose cause lies outside the program, in words: too little memory, a full disk, a file that cannot be
written.

A traceback from every rank would hide what one line says. Anything else is taken for an error of the program, and
keeps its traceback.
"""

from __future__ import annotations

import re

import torch

from megacore.errors import StorageError

# As gloo and NCCL say it.
_LOST = re.compile(
    r"(?P<reason>Connection (?:closed|reset) by (?:remote )?peer|remote process exit(?:ed|ing prematurely))"
    r"(?:,? \[(?P<address>[^\]]+)\])?"
)


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
