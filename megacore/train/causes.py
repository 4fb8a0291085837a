"""Failures whose cause lies outside the program, in words: too little memory, a full disk, a file that cannot be
written.

A traceback from every rank would hide what one line says. Anything else is taken for an error of the program, and
keeps its traceback.
"""

from __future__ import annotations

import torch

from megacore.errors import StorageError


def outside_cause(error: Exception) -> str | None:
    """What went wrong outside the program, and what to do; None where the program itself may be wrong."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return _memory(error)
    if isinstance(error, StorageError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return None


def _memory(error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = reason[reason.find("DefaultCPUAllocator") :] if "DefaultCPUAllocator" in reason else reason
    return (
        f"there is not enough memory ({reason.rstrip('.')}): use a smaller model or --micro-batch-size, more ranks for "
        "--tp or --pp, a higher --zero-stage, or --recompute full (docs/memory.md)"
    )
