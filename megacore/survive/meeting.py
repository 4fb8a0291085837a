"""Where the keepers of a job meet: the store of its launcher. What they write is of one generation, the ranks from one
failure to the next: who is there, who is to train on what (the plan), and why it is over."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megacore.config.nodes import launcher_number
from megacore.survive.copies import Inventory, Slot

NOBODY = -1
EXIT_ASKS = 75  # of a child that has asked for another generation
ASKED = "asked.json"  # in the memory of its node: for which one
BEAT_SECONDS = 1.0
_SILENT_SECONDS = 4.0  # after which a keeper that gave a sign every second is lost


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a generation does."""

    present: list[int]  # the keepers that have met
    members: list[int]  # those whose children train, by rank
    values: dict[str, Any]  # of the run's settings that are other than at its start: its layout, and what was tried
    nodes: list[int]  # the number of the node that each member is on
    load: str | None = None  # the checkpoint to continue from; None: the run's own, as at its start
    slot: str | None = None  # of the nodes' memory, which is that checkpoint
    parts: Sequence[Sequence[int]] = ()  # of the slot, that each node has
    step: int = 0  # that it continues after
    saves: bool = False  # whether its first step is to be saved
    serial: int = 0  # of the first checkpoint that this run publishes
    passed: Sequence[str] = ()  # checkpoints that cannot be continued
    blamed: Sequence[int] = ()  # whose failures have ended the generations at this step; NOBODY: not known
    cause: str = ""  # why there is a new generation; empty at the start
    at: float = 0.0  # when that was noticed, as time.time
    made: float = 0.0  # when the plan was made, likewise
    asked: bool = False  # whether the run has asked for it, and nothing failed
    fallback: dict[str, Any] | None = None  # `values` for the next one, if this fails before `values` are measured
    tuning: dict[str, Any] | None = None  # `tried` and `failed` of --retune (retune.py); None: nothing is measured
    refused: str = ""  # why the run ends instead
    lines: Sequence[str] = ()  # to say of it


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the first keeper asks of each node before it plans: to check a slot and, where `first` is given, to copy
    parts of it to disk."""

    slot: str
    first: str = ""  # the name of the unfinished checkpoint
    last: str = ""  # its name once it is published
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # that a node copies

    def is_met(self, found: Inventory) -> bool:
        """Whether a node has done it."""
        return self.slot in found.checked and found.saved == self.first


@dataclass(frozen=True, kw_only=True)
class Presence:
    """A keeper, as the others know it."""

    host: str
    node: str  # a name of its memory, which all keepers on its machine have in common
    pid: int
    local_rank: int


class Meeting:
    """This keeper's part in the meetings of a job. Every method raises RuntimeError where the store is lost."""

    def __init__(self, node: str) -> None:
        self.rank, self.size = launcher_number("RANK", 0), launcher_number("WORLD_SIZE", 1, low=1)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # Where there is no launcher with a store, the first keeper serves one.
        self._serves = self.size > 1 and self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        self._store: Any = dist.PrefixStore(f"megacore/survive/{attempt}", _store(self.size, serves=self._serves))
        self._node = node
        # Of others: the last, since when it is silent, and when this keeper last looked.
        self._beats: dict[int, tuple[bytes, float, float]] = {}
        self._beat, self._beaten = 0, 0.0

    def beat(self) -> None:
        """Give a sign of life, once a second."""
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            self._beat, self._beaten = self._beat + 1, time.monotonic()
            self._store.set(f"beat/{self.rank}", str(self._beat))

    def generation(self) -> int | None:
        """The newest generation that has a plan; None: none has."""
        return int(self._store.get("generation")) if self._store.check(["generation"]) else None

    def enter(self, generation: int) -> None:
        """This keeper is ready for a generation: its child of the one before is gone."""
        local = launcher_number("LOCAL_RANK", 0)
        own = Presence(host=socket.gethostname(), node=self._node, pid=os.getpid(), local_rank=local)
        self._put(generation, f"present/{self.rank}", asdict(own))

    def present(self, generation: int) -> dict[int, Presence]:
        """The keepers that are ready for it."""
        found = {rank: self._got(generation, f"present/{rank}") for rank in range(self.size)}
        return {rank: Presence(**content) for rank, content in found.items() if content is not None}

    def show(self, generation: int, inventory: Inventory) -> None:
        """Say what the memory of this node has, once its children of the generation before are gone, and again when a
        request is met."""
        self._put(generation, f"memory/{self._node}", asdict(inventory))

    def shown(self, generation: int, node: str) -> Inventory | None:
        """What the memory of a node has; None: it has not been said."""
        content = self._got(generation, f"memory/{node}")
        return content and Inventory(**{**content, "slots": [Slot(**slot) for slot in content["slots"]]})

    def ask(self, generation: int, request: Request) -> None:
        """Ask this of all nodes, in place of what was asked before."""
        self._put(generation, "request", asdict(request))

    def asked(self, generation: int) -> Request | None:
        content = self._got(generation, "request")
        return None if content is None else Request(**content)

    def propose(self, generation: int, plan: Plan) -> bool:
        """Make this the plan, unless there is one; whether it is."""
        is_first = self._first(generation, "plan", asdict(plan))
        self._store.set("generation", str(generation))
        return is_first

    def plan(self, generation: int) -> Plan | None:
        content = self._got(generation, "plan")
        return None if content is None else Plan(**content)

    def end(
        self,
        generation: int,
        cause: str,
        *,
        blamed: int | None = None,
        asked: Mapping[str, Any] | None = None,
        passed: str | None = None,
    ) -> None:
        """Say that a generation is over. `blamed`: the keeper whose failure that is, or NOBODY; None: it is none.
        `asked`: parts of the next plan, for which the run has ended it. `passed`: the checkpoint that it could not
        continue from."""
        over = {"cause": cause, "at": time.time(), "blamed": blamed, "asked": asked, "passed": passed}
        self._first(generation, "over", over)
        self._store.set(f"{generation}/news", "1")

    def is_over(self, generation: int) -> bool:
        """Whether the generation, or the run with it, is over."""
        return bool(self._store.check([f"{generation}/news"]))

    def over(self, generation: int) -> dict[str, Any] | None:
        """Why a generation is over, and when that was noticed; None: it is not."""
        return self._got(generation, "over")

    def finish(self, generation: int, status: int) -> None:
        """Say that the run ends with a generation, with this exit status, as of subprocess."""
        self._first(generation, "status", {"status": status if status >= 0 else 128 - status})
        self._store.set(f"{generation}/news", "1")

    def status(self, generation: int) -> int | None:
        """The exit status that the run ends with; None: it does not."""
        content = self._got(generation, "status")
        return None if content is None else int(content["status"])

    def leave(self) -> None:
        """This keeper goes; one that serves the store waits for the others."""
        self._store.set(f"left/{self.rank}", "1")
        if not self._serves:
            return  # and ask no more: it may be gone
        waiting = [rank for rank in range(self.size) if rank != self.rank]
        known = self.present(self.generation() or 0)
        while waiting := [
            rank for rank in waiting if not self._store.check([f"left/{rank}"]) and not self.lost([rank], known)
        ]:
            time.sleep(0.05)

    def lost(self, ranks: Sequence[int], known: dict[int, Presence]) -> list[int]:
        """Those of some keepers that are gone: on this machine their process is, on others they give no sign."""
        return [rank for rank in ranks if self._is_lost(rank, known.get(rank))]

    def _is_lost(self, rank: int, known: Presence | None) -> bool:
        if known is not None and known.node == self._node and has_ended(known.pid):
            return True
        key, now = f"beat/{rank}", time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        before, since, looked = self._beats.get(rank, (b"", now, now))
        if beat != before or now - looked > 2 * BEAT_SECONDS:  # who slept has heard nothing
            since = now
        self._beats[rank] = beat, since, now
        return now - since > _SILENT_SECONDS

    def _put(self, generation: int, key: str, content: Any) -> None:
        self._store.set(f"{generation}/{key}", json.dumps(content))

    def _got(self, generation: int, key: str) -> Any:
        name = f"{generation}/{key}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def _first(self, generation: int, key: str, content: Any) -> bool:
        own = json.dumps(content)
        return bool(self._store.compare_set(f"{generation}/{key}", "", own).decode() == own)


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or waits for nothing but its parent's look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _store(size: int, *, serves: bool) -> dist.Store:
    """The store of the job; alone a keeper needs none."""
    if size == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], launcher_number("MASTER_PORT", low=1)
    return dist.TCPStore(address, port, is_master=serves, wait_for_workers=False, timeout=timedelta(minutes=5))
