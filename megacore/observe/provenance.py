"""Where a run's numbers come from: version, git state, command, host, packages, hardware."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megacore
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.mesh import Mesh
from megacore.parallel.processors import available_cores
from megacore.train.metrics import device_name

_GIT_SECONDS = 5.0
_PACKAGES = ("safetensors", "tokenizers", "transformers", "triton", "wandb")


def provenance_of(mesh: Mesh) -> dict[str, Any]:
    """What is on record about this start of a run; of its first rank's machine the host, platform, cores that the rank
    may use, bytes of memory (or what control groups allow; None where nothing tells) and number of ranks. `git` is the
    commit of megacore's code, with " (modified)" where files differ from it; None outside a git checkout."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    allowed = host_capacity()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    packages = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {
        "version": megacore.__version__,
        "git": _git_state(Path(megacore.__file__).resolve().parent),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "host": socket.gethostname(),
        "platform": f"{platform.platform()}, {os.cpu_count()} processors, {memory:,.0f} GiB",
        "cores": available_cores(),
        "memory_bytes": None if allowed is None else int(allowed),
        "local_ranks": int(local) if local.isdecimal() else mesh.world.size,
        "device": device_name(mesh.device),
        "packages": packages | _installed(),
    }


@functools.cache
def _installed() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def _git_state(package: Path) -> str | None:
    """The commit that the package's files belong to, if they are in a checkout of megacore; this process loaded them
    once, and so asks once."""
    if not (package.parent / ".git").exists():
        return None
    try:
        commit = _git(package.parent, "rev-parse", "--short=12", "HEAD")
        changed = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + (" (modified)" if changed else "")


def _git(directory: Path, *words: str) -> str:
    command = ["git", "-C", str(directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    return done.stdout.strip()
