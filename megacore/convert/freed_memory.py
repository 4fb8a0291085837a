"""Memory that is freed goes back to the system at once, so that a tool's memory is that of the tensors it holds.

glibc maps large blocks one by one, but raises the size from which it does so, up to 32 MiB, as such blocks are freed.
Tensors below it then come from the heap, whose holes a later tensor of the same size does not fill once something small
lies in them: a model of many layers leaves a hole for each, hundreds of megabytes in all. A size that is set stays.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_MAPPED_FROM = 1 << 20  # bytes


def give_back_what_is_freed() -> None:
    """Have blocks of 1 MiB and more mapped one by one in this process; nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
