"""Run a Python script on a host of `hosts.py`: `on_host.py PID SCRIPT WORDS...` joins the namespaces of that process.

Started warm (`tests/warm.py`); what the script forks is on that host too.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path


def join(pid: int) -> None:
    """Put this process, which must have one thread, into the network, the host name and the files of another one.

    Raises:
        OSError: the right to do so is missing.
    """
    directory = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts", "mnt")]
    for namespace in namespaces:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns of process {pid}")
        os.close(namespace)
    os.chdir(directory)  # joining the files leaves the process at their root


def main(words: list[str]) -> None:
    """Join, and become the script."""
    pid, script, *rest = words
    join(int(pid))
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
