"""Whether the ranks of a communicator make calls that fit together, found out when they are made.

A device runs the calls of one communicator one after the other: a call starts when the one before it is done. A
collective is done when all ranks are in it; a point-to-point call, or a group of them, when each of its messages has
met its counterpart in the call that its peer is in. Tags mean nothing. Ranks whose calls do not fit hang on a device;
here every rank keeps a log that the others read, and the rank whose call completes a deadlock raises instead.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


class OrderError(RuntimeError):
    """Two ranks call collectives or point-to-point transfers in orders that do not fit."""


@dataclass(frozen=True)
class Message:
    """One transfer of a call: `what` (such as `float32[64]`) to or from the rank `peer` of the communicator."""

    sends: bool
    peer: int
    what: str

    def __str__(self) -> str:
        return f"{'send' if self.sends else 'receive'} {self.what} {'to' if self.sends else 'from'} rank {self.peer}"


@dataclass
class Call:
    """One call of a rank: a collective, which `collective` describes, or messages that are in flight together."""

    collective: str = ""
    messages: list[Message] = field(default_factory=list)
    where: str = ""

    def __str__(self) -> str:
        return f"{self.collective or ' + '.join(map(str, self.messages))} at {self.where}"

    def to_json(self) -> str:
        messages = [(message.sends, message.peer, message.what) for message in self.messages]
        return json.dumps([self.collective, messages, self.where])

    @classmethod
    def from_json(cls, text: str) -> Call:
        collective, messages, where = json.loads(text)
        return cls(collective, [Message(*message) for message in messages], where)


class Order:
    """The log of this rank's calls on one communicator, and the view of all ranks' logs.

    Logs are files, for ranks of one machine: every rank appends to its own before it reads the others', so that of the
    ranks that disagree the last to call sees it. They are deleted as soon as every rank has opened them.

    Args:
        store: where the ranks of the communicator tell each other their files.
        rank: this rank in the communicator.
        names: what to call each rank of the communicator.
    """

    def __init__(self, store: dist.Store, rank: int, names: list[str]) -> None:
        self._names = names
        self._waiting: list[deque[Call]] = [deque() for _ in names]
        self._own, path = tempfile.mkstemp(prefix="pretend-calls-")
        store.set(f"calls/{rank}", path)
        paths = [store.get(f"calls/{other}").decode() for other in range(len(names))]
        self._logs: dict[int, Any] = {other: open(one, "rb") for other, one in enumerate(paths)}  # noqa: SIM115
        self._partial = dict.fromkeys(self._logs, b"")
        if store.add("calls/opened", 1) == len(names):
            for one in paths:
                os.unlink(one)

    def call(self, call: Call) -> None:
        """Note a call that this rank makes.

        Raises:
            OrderError: it cannot end.
        """
        os.write(self._own, call.to_json().encode() + b"\n")
        for rank, log in self._logs.items():
            *lines, self._partial[rank] = (self._partial[rank] + log.read()).split(b"\n")
            for line in lines:
                self._waiting[rank].append(Call.from_json(line.decode()))
        # Work off what can be, as a device would; of the rest the calls may keep each other from ending.
        while self._run_collective() or any(self._exchange(rank) for rank in range(len(self._waiting))):
            pass
        self._refuse_circles()

    def close(self) -> None:
        os.close(self._own)
        for log in self._logs.values():
            log.close()

    def _head(self, rank: int) -> Call | None:
        return self._waiting[rank][0] if self._waiting[rank] else None

    def _run_collective(self) -> bool:
        heads = [(rank, head) for rank in range(len(self._waiting)) if (head := self._head(rank)) and head.collective]
        for rank, head in heads[1:]:
            if head.collective != heads[0][1].collective:
                raise self._error([heads[0][0], rank], "are in different collectives of one communicator")
        if len(heads) < len(self._waiting):
            return False
        for calls in self._waiting:
            calls.popleft()
        return True

    def _exchange(self, rank: int) -> bool:
        """Let this rank's messages meet their counterparts; True if any did."""
        head = self._head(rank)
        if head is None or head.collective:
            return False
        for message in head.messages:
            other = self._head(message.peer)
            if other is None:
                continue
            found = next((one for one in other.messages if one.peer == rank and one.sends != message.sends), None)
            if found is None:
                continue
            if found.what != message.what:
                raise self._error([rank, message.peer], "exchange messages of different sizes")
            head.messages.remove(message)
            other.messages.remove(found)
            for one, call in ((rank, head), (message.peer, other)):
                if not call.messages:
                    self._waiting[one].popleft()
            return True
        return False

    def _waits_for(self, rank: int) -> list[int]:
        """The ranks that must leave the call that they are in before this rank's can end."""
        head = self._head(rank)
        if head is None:
            return []
        others = range(len(self._waiting)) if head.collective else [message.peer for message in head.messages]
        return [other for other in others if (call := self._head(other)) and not (head.collective and call.collective)]

    def _refuse_circles(self) -> None:
        for start in range(len(self._waiting)):
            path, stack = [start], [iter(self._waits_for(start))]
            while stack:
                following = next(stack[-1], None)
                if following is None:
                    stack.pop()
                    path.pop()
                elif following in path:
                    raise self._error(path[path.index(following) :], "wait for each other")
                else:
                    path.append(following)
                    stack.append(iter(self._waits_for(following)))

    def _error(self, ranks: list[int], what: str) -> OrderError:
        calls = "\n".join(f"  {self._names[rank]}: {self._head(rank)}" for rank in ranks)
        who = " and ".join(self._names[rank] for rank in ranks)
        return OrderError(f"{who} {what}, which hangs on a device:\n{calls}")
