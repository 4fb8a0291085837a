"""A rank begins to be watched: its ledger, from before torch is imported to the last thing it does. The first rank of
a node that gets here starts the node's watcher, a separate process: it needs none of the ranks, and ends when the last
of them is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import megacore
from megacore.config import ResolvedConfig
from megacore.config.nodes import launcher_number
from megacore.errors import EXIT_HUNG
from megacore.files import take_lock
from megacore.job_directory import job_directory, make
from megacore.parallel.heartbeat import Current
from megacore.watch.ledger import Identity, Ledger, this_ledger
from megacore.watch.node import PURPOSE, STACK_SIGNAL, leaving_file, stack_file
from megacore.watch.processes import born

LOCK = "watcher.lock"
_ATTEMPTS = 10
_SECONDS_BETWEEN_LOOKS = 0.1


class _Kept:
    """What must live as long as the process."""

    stacks: BinaryIO | None = None
    watcher: subprocess.Popen[bytes] | None = None


def begin_watch(config: ResolvedConfig, *, leaves_if_hung: bool = True) -> None:
    """Watch this process from now on, unless `--hang-timeout-minutes` is 0 or it is watched already. A node without a
    place for ledgers is not watched, and says so. `leaves_if_hung`: the process is the trainer's, and ends with a
    status of its own."""
    if Current.heartbeat is not None or config.watch.hang_timeout_minutes == 0:
        return
    identity = _identity(config, os.environ)
    directory = job_directory(PURPOSE, os.environ, identity.output_dir, node=identity.node)
    try:
        if not any(begin_in(directory, identity) for _ in range(_ATTEMPTS)):
            raise FileNotFoundError(f"{directory} is removed as often as it is made")
    except OSError as error:
        Current.heartbeat = None
        print(f"megacore: warning: no watchdog on {identity.host}: {error}", file=sys.stderr)
    # A program of one's own may handle the signal itself.
    if leaves_if_hung:
        threading.Thread(target=_leave_if_hung, name="hang-watch", daemon=True).start()


def begin_in(directory: Path, identity: Identity) -> bool:
    """Open this rank's ledger, and see to it that the node has a watcher that knows of it; False: the directory has
    been removed meanwhile. Raises OSError where there is no room for ledgers."""
    try:
        make(directory)
        _Kept.stacks = stacks = stack_file(directory, identity.rank).open("wb")
        Current.heartbeat = ledger = Ledger(directory, identity)
        # A watcher announces that it leaves, and then looks for new ledgers a last time; a rank writes its ledger, and
        # then looks for the announcement. So at least one of them notices the other.
        while not _start_watcher(directory) and leaving_file(directory).exists():
            time.sleep(0.02)
    except FileNotFoundError:
        return False
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    return ledger.path.exists()


def _leave_if_hung() -> None:
    """End this process with the status of a hang, whatever its main thread does, until train/peers.py does so."""
    ledger = this_ledger()
    while ledger is not None and this_ledger() is ledger and (leaves := ledger.leaves_as_hung) is not None:
        if leaves:
            os._exit(EXIT_HUNG)
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _identity(config: ResolvedConfig, environment: Mapping[str, str]) -> Identity:
    number = partial(launcher_number, environment=environment)
    world_size, rank = number("WORLD_SIZE", 1, low=1), number("RANK", 0)
    local_world_size = number("LOCAL_WORLD_SIZE", world_size, low=1)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=born(os.getpid()),
        degrees=config.parallel.degrees,
        output_dir=os.path.realpath(config.training.output_dir),
        hang_timeout=60.0 * config.watch.hang_timeout_minutes,
        collective_timeout=60.0 * config.parallel.distributed_timeout_minutes,
        node=number("GROUP_RANK", rank // local_world_size),
    )


def _start_watcher(directory: Path) -> bool:
    """Start the node's watcher, unless there is one: it inherits a lock. Returns whether it has been started."""
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    messages = os.dup(2)
    try:
        with contextlib.suppress(BlockingIOError):
            take_lock(lock)
            leaving_file(directory).unlink(missing_ok=True)  # of one that was killed
            root = str(Path(megacore.__file__).resolve().parents[1])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            _Kept.watcher = subprocess.Popen(
                [sys.executable, "-m", "megacore.watch.watcher", str(directory), str(messages)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # its messages go to a copy of this rank's
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(lock, messages),
                start_new_session=True,  # Ctrl-C is for the ranks
            )
            return True
        return False
    finally:
        os.close(lock)
        os.close(messages)
