"""Reports a rank that died, by its coordinates, at once; and ends the process quietly on a signal.

A collective with a dead peer fails on some ranks and blocks on others, without naming the peer; and no Python signal
handler runs while one blocks. So a thread of every rank watches the other ranks on the same machine, and this rank's
signals. (A process descriptor becomes readable at the moment the process ends.) One survivor reports the dead rank, and
all stop at once instead of waiting for a timeout. The launcher is watched too: without it nothing would end the ranks.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from megacore.errors import EXIT_HUNG
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.train.failures import exit_with, report_cause
from megacore.train.stopping import ENDING
from megacore.train.watchdog import watchdog

EXIT_PEER_DIED = 1
_POLL_SECONDS = 0.2  # where the system has no process descriptors
_LAUNCHER = -1  # instead of a rank
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Peer:
    """A process of this job; the rank of the launcher, torchrun, is _LAUNCHER."""

    rank: int
    host: str
    pid: int


class PeerWatch:
    """Watches the other ranks on this machine, their launcher, and this one's signals, until `stop()`. `mesh`: for the
    ranks' coordinates. All ranks construct their watches together, in the main thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.me = Peer(mesh.world.rank, socket.gethostname(), os.getpid())
        everyone: list[Peer] = all_gather_objects(self.me, mesh.world)
        self._peers = [peer for peer in everyone if peer.host == self.me.host and peer.rank != self.me.rank]
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; other launchers may end before their processes
            self._peers.append(Peer(_LAUNCHER, self.me.host, os.getppid()))
        self._descriptors = {peer.rank: _open(peer.pid) for peer in self._peers}
        self._stopped = threading.Event()
        self._handled = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
        self._arrived, self._wakeup = _catch(self._handled)
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, unless it is stopped already: other ranks may end from now on."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for number in self._handled:
            # Unless another handler has replaced it. SIGUSR1 asks for a save: too late, but no reason to fail.
            if signal.getsignal(number) is _arrives and number != signal.SIGUSR1:
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.write(self._wakeup, b"\0")  # closing is not enough: data workers have inherited this end of the pipe
        os.close(self._wakeup)
        self._thread.join()
        os.close(self._arrived)

    def dead(self, within_seconds: float) -> list[Peer]:
        """The local ranks that have ended, and the launcher if it has; waits up to `within_seconds` for the first."""
        deadline = time.monotonic() + within_seconds
        while True:
            gone = [peer for peer in self._peers if not _alive(peer, self._descriptors[peer.rank])]
            if gone or not self._peers or time.monotonic() > deadline:
                return gone
            time.sleep(0.02)

    def describe(self, peer: Peer) -> str:
        """A rank by its number, coordinates and process, or the launcher."""
        if peer.rank == _LAUNCHER:
            return f"the launcher (torchrun; pid {peer.pid} on {peer.host})"
        return f"rank {peer.rank} ({self._mesh.describe(peer.rank)}; pid {peer.pid} on {peer.host})"

    def give_up(self, gone: list[Peer]) -> NoReturn:
        """Name the dead, unless a rank has already said why the job ends, and end this process."""
        # If the launcher has ended, other ranks ended because of it.
        gone = [peer for peer in gone if peer.rank == _LAUNCHER] or gone
        local = {peer.rank for peer in self._peers if peer.rank != _LAUNCHER} | {self.me.rank}
        survivors = local - {peer.rank for peer in gone}
        names = ", ".join(self.describe(peer) for peer in gone)
        cause = f"{names} has died; stopping the others{watchdog().left_their_order()}"
        exit_with(report_cause(cause, EXIT_PEER_DIED, otherwise=self.me.rank == min(survivors))[0])

    def _watch(self) -> None:
        descriptors = [fd for fd in self._descriptors.values() if fd is not None]
        patience = _POLL_SECONDS * 1000 if len(descriptors) < len(self._peers) else None
        events = _poll(self._arrived, *descriptors)
        while True:
            arrived = self._arrived in [descriptor for descriptor, _ in events.poll(patience)]
            if self._stopped.is_set():
                return
            if watchdog().reported_hang():
                exit_with(EXIT_HUNG)
            if gone := self.dead(0.0):  # before the signals: a launcher sends them to the survivors
                self.give_up(gone)
            for number in os.read(self._arrived, 64) if arrived else b"":
                if number in ENDING:
                    watchdog().note_termination()
                if number == signal.SIGUSR1:  # asks for a save: there is nothing to save yet
                    continue
                if number in self._handled and signal.getsignal(number) is _arrives:
                    stopped = f"stopped by {signal.Signals(number).name}"
                    exit_with(report_cause(stopped, 128 + number, otherwise=self.me.rank == 0)[0])


def _catch(numbers: list[signal.Signals]) -> tuple[int, int]:
    """The read and write ends of a pipe to which arriving signals write their numbers, instead of the default."""
    arrived, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, _arrives)
    return arrived, wakeup


def _arrives(number: int, frame: FrameType | None) -> None:
    """Does nothing: the number is in the pipe. A handler that training installs (stopping.py) takes over."""


def _open(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none (macOS)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _poll(*descriptors: int) -> select.poll:
    """A poll for any of the descriptors to become readable; unlike select.select for any descriptor number."""
    events = select.poll()
    for descriptor in descriptors:
        events.register(descriptor, select.POLLIN)
    return events


def _alive(peer: Peer, descriptor: int | None) -> bool:
    if descriptor is not None:
        return not _poll(descriptor).poll(0)
    try:
        os.kill(peer.pid, 0)
    except ProcessLookupError:
        return False
    return True
