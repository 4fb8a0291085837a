"""What happens before torch is loaded: the first rank says that the run starts, and torch gets better defaults. Most of
the time between Enter and the log goes into imports. An entry point calls `announce` before its own, so this module
imports nothing that takes time."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import MutableMapping
from typing import ClassVar

REHEARSAL = "MEGACORE_REHEARSE"
"""The variable that cuts a run to this machine, as --rehearse does."""
_SILENT = {"help", "h", "version", "dry-run"}  # flags that ask for a text, which nothing else may precede


class _Begun:
    """When this process said that the run starts; None: it has not, as where a program calls parts of the trainer."""

    at: ClassVar[float | None] = None  # of `time.monotonic`


def announce() -> None:
    """Say once that the run starts, on rank 0, unless its command line asks for a text."""
    flags = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in sys.argv[1:] if word.startswith("-")}
    if _Begun.at is not None or flags & _SILENT or os.environ.get("RANK", "0") != "0":
        return
    _Begun.at = time.monotonic()
    processes = os.environ.get("WORLD_SIZE", "1")
    what = f"{processes} {'process' if processes == '1' else 'processes'}"
    if "rehearse" in flags or os.environ.get(REHEARSAL):
        what = "a rehearsal"
    _say(f"starting {what}: reading flags and files")


def announce_stage(stage: str) -> None:
    """Say what the start has come to, where it was announced. `stage`: what is done from now on."""
    if _Begun.at is not None:
        _say(f"starting {time.monotonic() - _Begun.at:6.1f} s | {stage}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it; the log finds out
        print(line, flush=True)


# What torch reads from the environment as it is loaded. Both concern CUDA: runs on a CPU are the same without them.
DEFAULTS = {
    # Freed memory serves allocations of other sizes: what is reserved stays near what is used.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Communication starts before kernels of the computation that wait for a free processor.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
_OLDER_NAMES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")}


def set_torch_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, under this or an older name. Call it before torch is imported."""
    for name, value in DEFAULTS.items():
        if not any(known in environment for known in (name, *_OLDER_NAMES.get(name, ()))):
            environment[name] = value
