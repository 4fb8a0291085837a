"""Start programs in a process that has torch and megacore loaded: `start(script, *words)` is `python script words`.

A cold start costs about 3 s of CPU time per process, nearly all of it for importing torch. Here the process is forked
from the warmed server of `tests/distributed.py`, and made into what a new interpreter would be: its own session,
environment, working directory, output files and default signal handlers; the script runs as `__main__`. What a test
says about the start itself (imports, signals while torch loads, what is refused before) needs a real interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import torch

from tests.distributed import start_server
from tests.golden.reader import status_of

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_LARGEST_REQUEST = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be run, and where.

    Attributes:
        script: The Python file.
        words: Its arguments.
        environment: All environment variables.
        directory: The working directory.
        stdout: File descriptor or path that the output goes to.
        stderr: The same for what goes to stderr.
    """

    script: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    stdout: int | str
    stderr: int | str

    def become(self) -> NoReturn:
        """Turn this process, just forked, into the program; it ends with the script."""
        if os.getsid(0) != os.getpid():
            os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, output in ((1, self.stdout), (2, self.stderr)):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o644) if isinstance(output, str) else output, target)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.chdir(self.directory)
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(self.environment)
        # A fork leaves torch's pool of threads to be made anew by whoever first needs it. Autograd's threads of two
        # devices may need it at the same time, and one of them then aborts the process.
        torch.set_num_threads(torch.get_num_threads())
        sys.argv = [self.script, *self.words]
        sys.path[0] = str(Path(self.script).resolve().parent)
        _leave(status_of(self.script))


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


class Started:
    """A running program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status once there is one."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill it with what it started, as far as that has no session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start(
    script: Path,
    *words: object,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Started:
    """Start a Python script in a process forked from the warmed server.

    Args:
        script: The file.
        words: Its arguments.
        stdout: The file for its output.
        stderr: The file for what goes to stderr; the same path as `stdout` shares it.
        environment: All of its environment; None takes the caller's.
        directory: Its working directory; None takes the caller's.
    """
    start_server()
    program = Program(
        script=str(script),
        words=tuple(map(str, words)),
        environment=dict(os.environ if environment is None else environment),
        directory=str(directory or Path.cwd()),
        stdout=str(stdout),
        stderr=str(stderr),
    )
    process = multiprocessing.get_context("forkserver").Process(target=program.become)
    process.start()
    return Started(process)


class Nursery:
    """A process that starts the programs of another one, whose children they become.

    Where a process has threads, as torchrun has those of its store, a fork of it may inherit a lock that nobody will
    release, and objects that own descriptors which it has closed. So this one is forked before there are any.
    """

    def __init__(self) -> None:
        self._requests, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._requests.close()
            try:
                _serve(served)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        served.close()

    def start(self, program: Program) -> Child:
        """Start a program, whose outputs are descriptors, as a child of this process and in a session of its own."""
        outputs = [int(program.stdout), int(program.stderr)]
        _adopt_orphans(True)
        try:
            socket.send_fds(self._requests, [pickle.dumps(program)], outputs)
            return Child(int(self._requests.recv(_LARGEST_REQUEST)))
        finally:
            _adopt_orphans(False)


def _serve(requests: socket.socket) -> None:
    """Start what is asked for, until the other process is gone."""
    os.setsid()
    with open(os.devnull, "w") as nowhere:  # it must not seem to be one of those that write to the caller's files
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    while True:
        request, outputs, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 2)
        if not request:
            return
        said, told = os.pipe()
        if (between := os.fork()) == 0:  # it ends at once, and the caller inherits its child
            if os.fork() == 0:
                _begin(pickle.loads(request), outputs, told, {requests.fileno(), said})
            os._exit(0)
        os.close(told)
        number = os.read(said, 32)
        os.waitpid(between, 0)
        for descriptor in (said, *outputs):
            os.close(descriptor)
        requests.send(number)


def _begin(program: Program, outputs: list[int], told: int, others: set[int]) -> NoReturn:
    """Become the program, once its number is told."""
    try:
        os.setsid()
        os.write(told, str(os.getpid()).encode())
        for descriptor in (*others, told):
            os.close(descriptor)
        replace(program, stdout=outputs[0], stderr=outputs[1]).become()
    except BaseException:
        traceback.print_exc()
        _leave(1)


def _adopt_orphans(yes: bool) -> None:
    """Make this process the parent of those of its descendants whose parent has ended, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Child:
    """A program that is a child of this process, with what torchrun needs of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.returncode: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """The exit status once there is one."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It did not end in time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status
