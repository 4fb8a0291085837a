"""What the watchers of several nodes tell each other, through the job's own store. The watcher of node 0 puts all nodes
together and decides; the others end their ranks when it has. A node that hears nothing of node 0, because the network
is cut, decides for itself. The store is torch's: only here, on jobs over several nodes, the watcher loads torch."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from megacore.watch.blame import Seen
from megacore.watch.record import Record

T = TypeVar("T")
PATIENCE = timedelta(seconds=2)
_QUIET_SECONDS = 20.0  # between publications of a node whose ranks move
_SILENT_SECONDS = 10.0  # a node that stands still publishes far more often


class Nodes:
    """This watcher's place among those of the other nodes. `local_world_size`: ranks of this node, and of every other
    one."""

    def __init__(self, environment: Mapping[str, str], node: int, world_size: int, local_world_size: int) -> None:
        self.node, self.count = node, math.ceil(world_size / local_world_size)
        self._environment = environment
        self.store: Any = None
        self._call: threading.Thread | None = None
        # A restart by torchrun keeps the store, with what the watchers of the earlier start have written.
        self._name = f"megacore/watch/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._published, self._serial, self._was_urgent = -math.inf, 0, False
        self._heard: dict[int, tuple[int, float]] = {}  # of each node: its last publication, and when it was new

    @property
    def decides(self) -> bool:
        return self.node == 0

    def publish(self, seen: Sequence[Seen], still: float, *, urgent: bool) -> None:
        """Tell the other nodes what the ranks of this one do. `still`: seconds for which none of them has moved."""
        waits = 0.0 if urgent != self._was_urgent else 1.0 if urgent else _QUIET_SECONDS
        if time.monotonic() - self._published < waits or self._is_asking:
            return
        self._published, self._serial, self._was_urgent = time.monotonic(), self._serial + 1, urgent
        ranks = [{"state": one.state, "is_busy": one.is_busy, **one.record.to_json()} for one in seen]
        self._set(
            f"node-{self.node}", json.dumps({"serial": self._serial, "still": still, "urgent": urgent, "ranks": ranks})
        )

    def others(self) -> list[tuple[list[Seen], float]] | None:
        """The ranks of every other node, with the seconds for which they stand still; None if a node may yet move, or
        if the first node is to decide and does. A node that was expected to publish and does not is out of reach, and
        left out."""
        if not self.decides:
            return [] if self._publication(0) is None else None
        others = []
        for node in range(self.count):
            if node == self.node:
                continue
            if (publication := self._publication(node)) is None:
                continue
            content, silent = publication
            if not content["urgent"]:
                return None
            others.append(([_seen(rank) for rank in content["ranks"]], content["still"] + silent))
        return others

    def _publication(self, node: int) -> tuple[dict[str, Any], float] | None:
        """What a node has published last, and the seconds since; None if it is out of reach."""
        text = self._get(f"node-{node}")
        content: dict[str, Any] = {"serial": -1, "urgent": False} if text is None else json.loads(text)
        if node not in self._heard or self._heard[node][0] != content["serial"]:
            self._heard[node] = content["serial"], time.monotonic()
        silent = time.monotonic() - self._heard[node][1]
        return None if silent > _QUIET_SECONDS + _SILENT_SECONDS else (content, silent)

    def pronounce(self, text: str) -> None:
        """Tell the watchers of the other nodes that the run ends, and give them the time to notice."""
        if self._call is not None:
            self._call.join(PATIENCE.total_seconds())
        self._set("verdict", text)
        # They look once a second.
        time.sleep(1.5)

    def verdict(self) -> str | None:
        """What the deciding watcher has pronounced."""
        return self._get("verdict")

    # ---- the store

    def _open(self) -> Any:
        if self.store is None:
            from torch.distributed import TCPStore

            address, port = self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])
            self.store = TCPStore(address, port, timeout=PATIENCE, wait_for_workers=False)
        return self.store

    def _set(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(f"{self._name}/{key}", text))

    def _get(self, key: str) -> str | None:
        name = f"{self._name}/{key}"
        return self._ask(lambda store: store.get(name).decode() if store.check([name]) else None)

    @property
    def _is_asking(self) -> bool:
        return self._call is not None and self._call.is_alive()

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """The store's answer; None if it does not answer soon, is not served yet, or no longer."""
        if self._is_asking:
            return None
        answers: list[T] = []

        def call() -> None:
            try:
                answers.append(question(self._open()))
            except (ImportError, RuntimeError, OSError):
                self.store = None

        # torch waits without a limit for an answer over a connection that is cut. So a thread waits, and while it does
        # the store is asked nothing else.
        self._call = threading.Thread(target=call, name="store", daemon=True)
        self._call.start()
        self._call.join(PATIENCE.total_seconds())
        return answers[0] if answers else None


def _seen(values: dict[str, Any]) -> Seen:
    state, is_busy = values.pop("state"), values.pop("is_busy")
    return Seen(record=Record.from_json(values), state=state, is_busy=is_busy)
