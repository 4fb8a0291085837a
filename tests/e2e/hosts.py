"""Several hosts on one machine, for tests of jobs over several nodes.

Each host is a set of Linux namespaces: its own network interface and address, host name, /dev/shm, /etc/hosts, and a
directory that has the same name on every host and other files on each (`Hosts.disk`). All other files are shared, as on
a cluster with a network disk. A bridge in a network namespace of its own joins the hosts: they do not reach the network
of the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.launching import TORCHRUN, Job, environment, words
from tests.patience import patience
from tests.warm import start

ON_HOST = Path(__file__).with_name("on_host.py")
PORT = 29500
_NETWORK = "10.83.0"


class Denied(Exception):
    """This process may not make hosts; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host.

    Attributes:
        name: its host name.
        number: of the host, from 0.
        keeper: the process that holds its namespaces.
    """

    name: str
    number: int
    keeper: subprocess.Popen[str]

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"{_NETWORK}.{self.number + 1}"

    def processes(self) -> list[int]:
        """The processes that run on it, without its keeper."""
        mine = os.readlink(f"/proc/{self.keeper.pid}/ns/net")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(process / "ns" / "net") == mine and int(process.name) != self.keeper.pid:
                    found.append(int(process.name))
        return found

    def kill(self) -> None:
        """Kill all its processes at once, as a loss of power does: none reacts to the death of another one."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


class Hosts:
    """Hosts joined by a bridge, until the context ends; nothing of them outlives it.

    Args:
        count: how many.
        directory: for the files that differ between hosts; it must be empty or missing.

    Raises:
        Denied: on entry, where this process may not make them.
    """

    def __init__(self, count: int, directory: Path) -> None:
        self._directory = directory
        self.disk = directory / "disk"
        self._names = [f"node{number}" for number in range(count)]
        self._stack = contextlib.ExitStack()
        self._all: list[Host] = []

    def __enter__(self) -> Hosts:
        if missing := [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]:
            raise Denied(f"{', '.join(missing)} not installed")
        self.disk.mkdir(parents=True)
        addresses = [f"{_NETWORK}.{number + 1} {name}" for number, name in enumerate(self._names)]
        (self._directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
        try:
            self._switch = self._keeper("--net", setup="ip link add bridge0 type bridge && ip link set bridge0 up")
            for number, name in enumerate(self._names):
                self._all.append(self._add(number, name))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._all:
            host.kill()
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self._all[number]

    def cut(self, number: int) -> None:
        """Pull the cable of a host: nothing reaches it or comes from it any more, and nobody is told."""
        self._on_switch("ip", "link", "set", f"port{number}", "down")

    def join(self, number: int) -> None:
        """Plug it in again."""
        self._on_switch("ip", "link", "set", f"port{number}", "up")

    def limit(self, number: int, megabits: int) -> None:
        """Let only so many megabits per second through to a host."""
        shape = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "500ms")
        self._on_switch("tc", "qdisc", "add", "dev", f"port{number}", "root", *shape)

    def own_directory(self, number: int) -> Path:
        """Where the files of `disk` of a host are, as the tests see them."""
        return self._directory / self._names[number]

    @contextlib.contextmanager
    def torchrun(
        self,
        logs: Path,
        per_node: int,
        script: Path,
        *flags: object,
        nodes: Sequence[int],
        c10d: bool = False,
        starts: Sequence[int] | None = None,
        **given: object,
    ) -> Iterator[list[Job]]:
        """Start a script on several hosts, with one torchrun on each; the first of them has the store.

        Args:
            logs: a new folder for what they print.
            per_node: ranks of each host.
            script: what each rank runs.
            flags: its flags.
            nodes: the hosts, by number.
            starts: those of them that start now; None: all.
            c10d: meet by `--rdzv-backend c10d`, otherwise with `--node-rank` and `--master-addr`.
            given: further flags of torchrun.

        Yields:
            The job of each host.
        """
        logs.mkdir()
        first = self[nodes[0]].name
        common = words(**{"nnodes": len(nodes), "nproc_per_node": per_node, "redirects": 3, **given})
        jobs = []
        starts = nodes if starts is None else starts
        for node_rank, number in enumerate(nodes):
            if number not in starts:
                continue
            if c10d:
                meet = words(rdzv_backend="c10d", rdzv_endpoint=f"{first}:{PORT}", rdzv_id="job")
            else:
                meet = words(node_rank=node_rank, master_addr=first, master_port=PORT)
            own = logs / self[number].name
            own.mkdir()
            command = [TORCHRUN, *common, *words(log_dir=own), *meet, script, *flags]
            keeper = self[number].keeper.pid
            output, errors = own / "torchrun.out", own / "torchrun.err"
            started = start(ON_HOST, keeper, *command, stdout=output, stderr=errors, environment=environment())
            jobs.append(Job(torchrun=started, logs=own))
        try:
            yield jobs
        finally:
            for number in starts:
                self[number].kill()
            for job in jobs:
                job.torchrun.wait()

    def _add(self, number: int, name: str) -> Host:
        own = self.own_directory(number)
        own.mkdir()
        setup = (
            "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm"
            f" && mount --bind '{self._directory}/hosts' /etc/hosts"
            f" && mount --bind '{own}' '{self.disk}' && hostname {name} && ip link set lo up"
        )
        keeper = self._keeper("--net", "--uts", "--mount", setup=setup)
        host = Host(name=name, number=number, keeper=keeper)
        port, cable = f"port{number}", f"cable{number}"
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", cable, "netns", str(keeper.pid))
        self._on_switch("ip", "link", "set", port, "master", "bridge0", "up")
        inside = ("nsenter", "--target", str(keeper.pid), "--net", "ip")
        _run(*inside, "address", "add", f"{host.address}/24", "dev", cable)
        _run(*inside, "link", "set", cable, "up")
        return host

    def _keeper(self, *namespaces: str, setup: str) -> subprocess.Popen[str]:
        """A process in new namespaces, which ends with this one: `cat` reads its input until then."""
        command = ["unshare", *namespaces, "sh", "-c", f"{setup} && echo ready && exec cat"]
        pipe = subprocess.PIPE
        keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        self._stack.callback(keeper.wait)
        self._stack.callback(keeper.kill)
        assert keeper.stdout is not None and keeper.stderr is not None
        if keeper.stdout.readline() != "ready\n":
            raise Denied(" ".join(keeper.stderr.read().split()))
        return keeper

    def _on_switch(self, *command: str) -> None:
        _run("nsenter", "--target", str(self._switch.pid), "--net", *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(10))
    if done.returncode != 0:
        raise Denied(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
