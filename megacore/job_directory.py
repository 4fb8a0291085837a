"""The directories that the ranks of a job share on a node, each for one purpose. They lie in memory (/dev/shm) where
there is such a file system, otherwise among the temporary files. Their names follow from what these ranks have in
common, so that none has to be told, and only this user can open them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_ENVIRONMENT = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)


def base() -> Path:
    """Where the directories of all jobs on this machine lie."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def job_directory(purpose: str, environment: Mapping[str, str], output_dir: str, *, node: int = 0) -> Path:
    """The path of a directory, which may not exist yet. `node`: tells nodes apart that share a machine."""
    alone = str(os.getpid()) if environment.get("WORLD_SIZE", "1") == "1" else ""
    shared = [environment.get(name, "") for name in _ENVIRONMENT]
    key = json.dumps([*shared, node, os.path.abspath(output_dir), alone])
    return base() / f"{_prefix(purpose)}{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def make(directory: Path) -> None:
    """Make a directory, or take the one that another rank made. Raises OSError where it cannot be made, or belongs to
    somebody else."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not a directory of this user")


def job_directories(purpose: str) -> Iterator[Path]:
    """Those of all jobs of this user on this machine."""
    for directory in sorted(base().glob(f"{_prefix(purpose)}*")):
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid == os.getuid() and directory.is_dir():
                yield directory


def _prefix(purpose: str) -> str:
    return f"megacore-{purpose}-{os.getuid()}-"
