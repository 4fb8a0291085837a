"""What glibc's malloc does with memory that is freed: it goes back to the system, or stays in the process.

glibc maps large blocks one by one, but raises the size from which it does so, up to 32 MiB, as such blocks are freed.
Tensors below it then come from the heap, whose holes a later tensor of the same size does not fill once something small
lies in them: a model of many layers leaves a hole for each, hundreds of megabytes in all. A size that is set stays.

A tool that reads one tensor after the other gives memory back. A training step allocates the same tensors again: each
4 KiB page that went back costs it a page fault, in which the system fills the page with zeros.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM = 1 << 20  # bytes
_KEPT = (1 << 31) - 1  # bytes; the largest int
_USERS_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def give_back_what_is_freed() -> None:
    """Have blocks of 1 MiB and more mapped one by one in this process; nothing where the C library is not glibc."""
    _set(_M_MMAP_THRESHOLD, _MAPPED_FROM)


def keep_what_is_freed() -> None:
    """Have blocks below 2 GiB come from the heap, which keeps up to 2 GiB at its end, in this process. Nothing changes
    where the C library is not glibc, or the user has set malloc's thresholds in the environment."""
    if not any(name in os.environ for name in _USERS_SETTINGS):
        _set(_M_MMAP_THRESHOLD, _KEPT)
        _set(_M_TRIM_THRESHOLD, _KEPT)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
