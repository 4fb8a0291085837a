"""Compile the pretend accelerator once per machine: `python -m tests.accelerator.build` prints the library's path.

The library lies in torch's extension cache, named after everything that it depends on: its source, the compiler and
torch. It uses no Python headers, so that any Python loads it. Compiling takes 10 to 30 seconds and needs g++ alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")


def missing() -> str | None:
    """Why the library cannot be built here, or None."""
    if platform.system() != "Linux":
        return "the pretend accelerator is for Linux"
    if _compiler() is None:
        return "the pretend accelerator needs g++ (Debian, Ubuntu: apt install g++), or CXX naming another compiler"
    return None


def library() -> Path:
    """The compiled library; built when this machine does not have it yet.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message holds what it said.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    path = _cached()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:  # of several test workers, one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _cached() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    parts = (_SOURCE.read_text(), torch.__version__, str(torch.compiled_with_cxx11_abi()), *_FLAGS, str(_compiler()))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Path(root) / "megacore_pretend" / f"{digest}.so"


def _compile(path: Path) -> None:
    root = Path(torch.__file__).parent
    include, libraries = root / "include", root / "lib"
    temporary = path.with_suffix(".building")
    command = [
        str(_compiler()),
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include / 'torch/csrc/api/include'}",
        str(_SOURCE),
        *("-o", str(temporary)),
        f"-L{libraries}",
        *("-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} could not build the pretend accelerator:\n{done.stderr}")
    temporary.rename(path)


if __name__ == "__main__":
    print(library())
