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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import megacore
from megacore.parallel.host_memory import host_capacity
from megacore.parallel.mesh import Mesh
from megacore.parallel.processors import available_cores
from megacore.train.metrics import device_name

_GIT_SECONDS = 5.0
_PACKAGES = ("safetensors", "tokenizers", "transformers", "triton", "wandb")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What is on record about a start of a run.

    Attributes:
        version: of megacore.
        git: commit of its code, with " (modified)" where files differ from it; None outside a git checkout.
        command: the command line.
        host: name of the first rank's machine.
        platform: operating system, and processors of that machine.
        cores: of that machine, which its first rank may use.
        memory_bytes: of that machine, or what its control groups allow; None where nothing tells.
        local_ranks: ranks on that machine.
        device: what each rank computes on.
        packages: versions by name.
    """

    version: str
    git: str | None
    command: str
    host: str
    platform: str
    cores: int
    memory_bytes: int | None
    local_ranks: int
    device: str
    packages: dict[str, str]


def provenance_of(mesh: Mesh) -> Provenance:
    """The provenance of this process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    allowed = host_capacity()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Provenance(
        version=megacore.__version__,
        git=_git_state(Path(megacore.__file__).resolve().parent),
        command=shlex.join([Path(sys.executable).name, *sys.argv]),
        host=socket.gethostname(),
        platform=f"{platform.platform()}, {os.cpu_count()} processors, {memory:,.0f} GiB",
        cores=available_cores(),
        memory_bytes=None if allowed is None else int(allowed),
        local_ranks=int(local) if local.isdecimal() else mesh.world.size,
        device=device_name(mesh.device),
        packages={"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        | _installed(),
    )


def first_line(run: Provenance, time: str) -> str:
    """The first line of a log: `megacore 0.1.0, git 343d829c1f2a (modified), on node7, 2026-11-22 05:44:35 UTC`."""
    code = "not in a git checkout" if run.git is None else f"git {run.git}"
    return f"megacore {run.version}, {code}, on {run.host}, {time}"


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
