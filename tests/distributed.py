"""Run a function on N ranks: `run_distributed(fn, world_size, *args)` returns the ranks' results in order.

The ranks are real processes with a real process group (gloo, NCCL where there are enough GPUs, or the pretend
accelerator's, tests/accelerator/device.py), forked from a
server that has torch imported and warmed (`tests/forkserver_preload.py`), so that four of them are ready in well under
a second. They meet at a TCPStore which the calling process serves on a port that the system chooses: no fixed port.

    def check(rank: int, world_size: int) -> float: ...      # module level: it travels by name

    def test_it() -> None:
        assert run_distributed(check, 4) == [6.0] * 4

An exception or a death in one rank fails the call with that rank's traceback and kills the others at once; a hang
fails it after `timeout` seconds (longer on a busy machine, `tests/patience.py`) with the Python stack of every thread
of every rank. Ranks that may stay and did their call well are found by the next such call of as many ranks; they end
with the process that called them.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.accelerator import build
from tests.accelerator.collectives import register
from tests.patience import patience

ROOT = Path(__file__).resolve().parent.parent
DUMP_SIGNAL = signal.SIGRTMIN + 5  # not SIGUSR1, on which a run saves
# How long the ranks may take to write their stacks after a hang, in seconds of a quiet machine.
DUMP_GRACE = 2.0
# Set by the preload, and so True only in the server and the ranks it forks.
SERVER_READY = False


class RankFailed(Exception):
    """One or more ranks raised, died or hung; the message holds what each of them said.

    Attributes:
        ranks: The ranks that failed, in the order in which they were heard of.
        exception: What the first of them raised, where it could be pickled.
    """

    def __init__(self, message: str, ranks: list[int], exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.exception = exception


@dataclass(frozen=True, kw_only=True)
class _Gang:
    """What ranks are told once; calls of the same kind find them alive, with their process group."""

    world_size: int
    backend: str
    init: bool
    patience: float  # seconds on this machine that the first call may take
    stay: bool
    environment: dict[str, str]
    stacks: str  # directory of the hang dumps


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What every rank of one call is told."""

    work: bytes  # pickled (fn, args)
    import_path: list[str]


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """What a rank sends back: a pickled result, or a traceback with (where possible) the pickled exception.

    Attributes:
        groups: The groups that it has made so far: the next ones have the same names on every rank only if all made as
            many. None: the call left something behind (a thread, a child, a signal handler), and the rank ends.
    """

    ok: bool
    payload: bytes | None
    text: str = ""
    groups: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The parent's view of one rank: its process, the pipe of calls and replies, and one that closes with us."""

    rank: int
    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]
    lease: connection.Connection[Any, Any]


class _Live:
    """Ranks that are alive."""

    def __init__(self, world_size: int, backend: str, *, init: bool, stay: bool, seconds: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self.gang = _Gang(
            world_size=world_size,
            backend=backend,
            init=init,
            patience=seconds,
            stay=stay,
            environment=_environment(self._store.port, world_size),
            stacks=self._folder.name,
        )
        context = multiprocessing.get_context("forkserver")
        self.ranks: list[_Rank] = []
        for rank in range(world_size):
            (ours, theirs), (lease, held) = context.Pipe(), context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs, held, self.gang, rank), daemon=True)
            process.start()
            theirs.close()
            held.close()
            self.ranks.append(_Rank(rank=rank, process=process, pipe=ours, lease=lease))

    def call(self, call: _Call, timeout: float, seconds: float) -> list[_Reply]:
        for one in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # a rank that is dead is found out below
                one.pipe.send(call)
        return _collect(self.ranks, self.gang, timeout, seconds)

    def end(self) -> None:
        for one in self.ranks:
            one.pipe.close()
            one.lease.close()
            _kill(one.process)
        for one in self.ranks:
            one.process.join()
            one.process.close()
        self._folder.cleanup()


# Ranks that wait for a call of their kind: the number of ranks and the environment. The last used are at the end.
_alive: dict[tuple[int, frozenset[tuple[str, str]]], _Live] = {}
_MOST_RANKS = 12


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
    stay: bool = False,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes and return their results by rank.

    With `stay` the processes may have run an earlier call: what that made (groups, settings of torch, random states) is
    undone.

    Args:
        fn: A module-level function; it and its arguments are pickled.
        world_size: Number of ranks.
        args: Further arguments, the same for every rank.
        timeout: Seconds after which the ranks are taken to hang on a quiet machine; `patience` scales them.
        backend: `gloo`, `nccl` where there is a GPU for every rank, or `pretend`; with the last two each rank is given
            its device.
        init: Whether the harness initialises the default process group; without it, `init_process_group()` in `fn`
            works as it does under torchrun.
        stay: The processes stay alive for the next such call: for functions that leave no message under way.

    Raises:
        RankFailed: A rank raised, died or hung.
    """
    work = pickle.dumps((fn, args))
    if backend == "pretend":
        build.library()  # before there are ranks that wait for each other
    start_server()
    seconds = patience(timeout)
    kind = (world_size, frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST"))
    may_stay = stay and init and backend == "gloo"
    ranks = _alive.pop(kind, None) if may_stay else None
    if ranks is None:
        _make_room(world_size)
        ranks = _Live(world_size, backend, init=init, stay=may_stay, seconds=seconds)
    try:
        replies = ranks.call(_Call(work=work, import_path=sys.path), timeout, seconds)
        if may_stay and replies[0].groups is not None and len({reply.groups for reply in replies}) == 1:
            _alive[kind], ranks = ranks, None
    finally:
        if ranks is not None:
            ranks.end()
    return [pickle.loads(reply.payload or b"") for reply in replies]


def _make_room(world_size: int) -> None:
    """End the ranks that have waited longest, so that few are alive."""
    while _alive and sum(one.gang.world_size for one in _alive.values()) + world_size > _MOST_RANKS:
        _alive.pop(next(iter(_alive))).end()


def start_server() -> None:
    """Start the fork server of this process unless it runs; its preload is found from the repository's root."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.forkserver_preload"])
    before = os.environ.get("PYTHONPATH")
    # The server is not told our sys.path (Python 3.11), and would silently go without the preload.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _environment(port: int, world_size: int) -> dict[str, str]:
    """The caller's environment with what torchrun adds, bar the ranks themselves."""
    return dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the store is served by the launcher, so rank 0 must not try to bind the port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        # Connect on first use: a 2x2x2 mesh of gloo groups opens a quarter of the sockets.
        "TORCH_GLOO_LAZY_INIT": "1",
    }


def _kill(process: ForkServerProcess) -> None:
    """Kill a rank with its whole process group, so that its own children (data workers) go too."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _collect(ranks: list[_Rank], gang: _Gang, timeout: float, seconds: float) -> list[_Reply]:
    """Wait for every rank's reply; raise at the first failure or when the time is up."""
    replies: dict[int, _Reply] = {}
    deadline = time.monotonic() + seconds
    while len(replies) < len(ranks):
        waiting = {one.pipe: one for one in ranks if one.rank not in replies}
        heard = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not heard:
            raise _hang(list(waiting.values()), gang, timeout, seconds)
        for pipe in heard:
            one = waiting[pipe]  # type: ignore[index]
            replies[one.rank] = _receive(one)
        failed = [rank for rank, reply in replies.items() if not reply.ok]
        if failed:
            raise _failure(failed, replies, gang.world_size)
    return [replies[one.rank] for one in ranks]


def _receive(one: _Rank) -> _Reply:
    """Read a rank's reply; a pipe that closes without one means that the rank died."""
    try:
        reply: _Reply = pickle.loads(one.pipe.recv_bytes())
        return reply
    except (EOFError, ConnectionResetError):
        one.process.join(patience(5))
        code = one.process.exitcode
        cause = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
        return _Reply(ok=False, payload=None, text=f"it {cause} before it sent a result")


def _failure(failed: list[int], replies: dict[int, _Reply], world_size: int) -> RankFailed:
    parts = [f"rank {rank} of {world_size} failed:\n{replies[rank].text}" for rank in failed]
    payload = replies[failed[0]].payload
    return RankFailed("\n".join(parts), failed, pickle.loads(payload) if payload else None)


def _hang(silent: list[_Rank], gang: _Gang, timeout: float, seconds: float) -> RankFailed:
    """Ask every silent rank for its stacks and put them into the error."""
    for one in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid or 0, DUMP_SIGNAL)
    deadline = time.monotonic() + patience(DUMP_GRACE)
    files = [_stack_file(gang, one.rank) for one in silent]
    sizes = [-1] * len(files)
    while time.monotonic() < deadline:  # done when every dump is there and has stopped growing
        time.sleep(0.1)
        before, sizes = sizes, [file.stat().st_size if file.exists() else 0 for file in files]
        if before == sizes and all(sizes):
            break
    stacks = [file.read_text() if file.exists() else "" for file in files]
    parts = [
        f"rank {one.rank}:\n{stack or '(no stack: it never started, or is stopped)'}"
        for one, stack in zip(silent, stacks, strict=True)
    ]
    names = ", ".join(str(one.rank) for one in silent)
    text = f"no result within {timeout:g} s from rank(s) {names} of {gang.world_size}"
    text += f" ({seconds:.0f} s on this machine); their stacks:\n"
    return RankFailed(text + "\n".join(parts), [one.rank for one in silent])


def _stack_file(gang: _Gang, rank: int) -> Path:
    return Path(gang.stacks) / f"rank{rank}.txt"


def _rank_main(
    pipe: connection.Connection[Any, Any], lease: connection.Connection[Any, Any], gang: _Gang, rank: int
) -> None:
    """The life of a rank: join the group, make calls and send their results, leave when the caller lets go."""
    os.setpgid(0, 0)
    threading.Thread(target=_leave_with_the_caller, args=(lease,), daemon=True).start()
    stacks = _stack_file(gang, rank).open("w")
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    as_found: _Process | None = None
    while True:  # until the caller lets go; before that a rank that leaves would close connections its peers wait on
        try:
            call: _Call = pipe.recv()
        except (EOFError, ConnectionResetError):  # the caller is gone; the thread above ends what is left
            signal.pause()
        try:
            if as_found is None:
                _join(gang, rank)
                as_found = _Process()
            else:
                as_found.restore()
            sys.path[:] = call.import_path
            fn, args = pickle.loads(call.work)
            payload = pickle.dumps(fn(rank, gang.world_size, *args))
            # A group that ends while a message is under way can keep gloo's thread in a loop for ever.
            reply = _Reply(ok=True, payload=payload, groups=as_found.leave_groups() if gang.stay else None)
        except BaseException as error:
            reply = _Reply(ok=False, payload=_pickled(error), text=traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps(reply))


def _leave_with_the_caller(lease: connection.Connection[Any, Any]) -> None:
    """Wait until the caller closes its end of the pipe, be it done or dead; end with all processes started here."""
    lease.poll(None)
    os.killpg(0, signal.SIGKILL)


def _join(gang: _Gang, rank: int) -> None:
    """Set the process up as torchrun would."""
    os.environ.clear()
    os.environ.update(gang.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    if gang.backend == "nccl":
        torch.cuda.set_device(rank)
    if gang.backend == "pretend":
        register()
        torch.accelerator.set_device_index(rank)
    if gang.init:
        # Longer than the harness waits: a hang is reported by the harness, with stacks.
        dist.init_process_group(gang.backend, timeout=datetime.timedelta(seconds=gang.patience + 300))


class _Process:
    """A rank before its first call: what a call changes is put back before the next, or the rank is not used again."""

    def __init__(self) -> None:
        self._environment, self._folder = dict(os.environ), Path.cwd()
        self._random = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._dtype = torch.get_default_dtype()
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._kept = self._what_stays()

    def restore(self) -> None:
        """Undo what the last call changed."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])
        random.setstate(self._random[2])
        torch.set_default_dtype(self._dtype)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)

    def leave_groups(self) -> int | None:
        """Leave the groups that a call has made; how many there have been, or None where something else stays."""
        gc.collect()
        if self._world is None or self._what_stays() != self._kept:
            return None
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self._world:
                dist.destroy_process_group(group)
        return dist.distributed_c10d._world.group_count

    def _what_stays(self) -> tuple[object, ...]:
        """Threads, children, the default group, signal handlers and limits."""
        try:
            has_children = os.waitpid(-1, os.WNOHANG) is not None
        except ChildProcessError:
            has_children = False
        handlers = tuple(signal.getsignal(number) for number in signal.valid_signals())
        world = dist.group.WORLD if dist.is_initialized() else None
        kinds = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
        limits = tuple(resource.getrlimit(kind) for kind in kinds)
        return (frozenset(threading.enumerate()), has_children, id(world), handlers, limits)


def _pickled(error: BaseException) -> bytes | None:
    """The exception's pickle if it survives the way there and back."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload
