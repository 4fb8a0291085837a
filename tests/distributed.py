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
of every rank. Nothing is left running.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

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
class _Launch:
    """What every rank of one call is told."""

    work: bytes  # pickled (fn, args)
    world_size: int
    backend: str
    init: bool
    timeout: float  # in seconds of a quiet machine
    patience: float  # the same on this machine
    environment: dict[str, str]
    import_path: list[str]
    stacks: str  # directory of the hang dumps


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """What a rank sends back: a pickled result, or a traceback with (where possible) the pickled exception."""

    ok: bool
    payload: bytes | None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes and return their results by rank.

    Args:
        fn: A module-level function; it and its arguments are pickled.
        world_size: Number of ranks.
        args: Further arguments, the same for every rank.
        timeout: Seconds after which the ranks are taken to hang on a quiet machine; `patience` scales them.
        backend: `gloo`, `nccl` where there is a GPU for every rank, or `pretend`; with the last two each rank is given
            its device.
        init: Whether the harness initialises the default process group; without it, `init_process_group()` in `fn`
            works as it does under torchrun.

    Raises:
        RankFailed: A rank raised, died or hung.
    """
    if backend == "pretend":
        build.library()  # before there are ranks that wait for each other
    start_server()
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as stacks:
        launch = _Launch(
            work=pickle.dumps((fn, args)),
            world_size=world_size,
            backend=backend,
            init=init,
            timeout=timeout,
            patience=patience(timeout),
            environment=_environment(store.port, world_size),
            import_path=sys.path,
            stacks=stacks,
        )
        with _started(launch) as ranks:
            replies = _collect(ranks, launch)
    return [pickle.loads(reply.payload or b"") for reply in replies]


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


@contextlib.contextmanager
def _started(launch: _Launch) -> Iterator[list[_Rank]]:
    """Start the ranks, and see to it that none is left when the block ends, however it ends."""
    context = multiprocessing.get_context("forkserver")
    ranks: list[_Rank] = []
    try:
        for rank in range(launch.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs, launch, rank), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(rank=rank, process=process, pipe=ours))
        yield ranks
    finally:
        for one in ranks:
            one.pipe.close()
            _kill(one.process)
        for one in ranks:
            one.process.join()
            one.process.close()


def _kill(process: ForkServerProcess) -> None:
    """Kill a rank with its whole process group, so that its own children (data workers) go too."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _collect(ranks: list[_Rank], launch: _Launch) -> list[_Reply]:
    """Wait for every rank's reply; raise at the first failure or when the time is up."""
    replies: dict[int, _Reply] = {}
    deadline = time.monotonic() + launch.patience
    while len(replies) < len(ranks):
        waiting = {one.pipe: one for one in ranks if one.rank not in replies}
        heard = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not heard:
            raise _hang(list(waiting.values()), launch)
        for pipe in heard:
            one = waiting[pipe]  # type: ignore[index]
            replies[one.rank] = _receive(one)
        failed = [rank for rank, reply in replies.items() if not reply.ok]
        if failed:
            raise _failure(failed, replies, launch.world_size)
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


def _hang(silent: list[_Rank], launch: _Launch) -> RankFailed:
    """Ask every silent rank for its stacks and put them into the error."""
    for one in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid or 0, DUMP_SIGNAL)
    deadline = time.monotonic() + patience(DUMP_GRACE)
    files = [_stack_file(launch, one.rank) for one in silent]
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
    text = f"no result within {launch.timeout:g} s from rank(s) {names} of {launch.world_size}"
    text += f" ({launch.patience:.0f} s on this machine); their stacks:\n"
    return RankFailed(text + "\n".join(parts), [one.rank for one in silent])


def _stack_file(launch: _Launch, rank: int) -> Path:
    return Path(launch.stacks) / f"rank{rank}.txt"


def _rank_main(pipe: connection.Connection[Any, Any], launch: _Launch, rank: int) -> None:
    """The life of a rank: join the group, call the function, send its result, leave when the caller lets go."""
    os.setpgid(0, 0)
    leaving = threading.Thread(target=_leave_with_the_caller, args=(pipe,), daemon=True)
    leaving.start()
    stacks = _stack_file(launch, rank).open("w")
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    try:
        reply = _Reply(ok=True, payload=pickle.dumps(_call(launch, rank)))
    except BaseException as error:
        reply = _Reply(ok=False, payload=_pickled(error), text=traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(reply))
    # Stay until every rank is done: a rank that leaves closes connections on which its peers may still wait.
    leaving.join()


def _leave_with_the_caller(pipe: connection.Connection[Any, Any]) -> None:
    """Wait until the caller closes its end of the pipe, be it done or dead; end with all processes started here."""
    pipe.poll(None)
    os.killpg(0, signal.SIGKILL)


def _call(launch: _Launch, rank: int) -> Any:
    """Set the process up as torchrun would, and call the function."""
    os.environ.clear()
    os.environ.update(launch.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.path[:] = launch.import_path
    fn, args = pickle.loads(launch.work)
    torch.set_num_threads(1)
    if launch.backend == "nccl":
        torch.cuda.set_device(rank)
    if launch.backend == "pretend":
        register()
        torch.accelerator.set_device_index(rank)
    if launch.init:
        # Longer than the harness waits: a hang is reported by the harness, with stacks.
        dist.init_process_group(launch.backend, timeout=datetime.timedelta(seconds=launch.patience + 30))
    return fn(rank, launch.world_size, *args)


def _pickled(error: BaseException) -> bytes | None:
    """The exception's pickle if it survives the way there and back."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return None
    return payload
