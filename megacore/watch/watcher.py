"""The process that watches the ranks of a node: `python -m megacore.watch.watcher DIRECTORY DESCRIPTOR`. It reads their
ledgers a few times a second and needs nothing from them: a rank that is stopped, or that blocks in C and holds the
interpreter's lock, is seen like any other. It ends with the last rank, whatever ended that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from megacore.config.cli import leave_for_launcher
from megacore.errors import EXIT_HUNG
from megacore.files import replace_bytes
from megacore.parallel.heartbeat import Phase
from megacore.watch.blame import Seen, Verdict, blame
from megacore.watch.budget import TIMES, Limit, limit, still_seconds
from megacore.watch.ledger import Flag
from megacore.watch.node import Node, leaving_file, remove, report_file
from megacore.watch.nodes import Nodes
from megacore.watch.processes import end, state_of, was_asked_to_end
from megacore.watch.report import deaths_in_words, hang_report, main_stack, table

_SLOWEST_LOOK, _FASTEST_LOOK = 1.0, 0.05
_LOOKS = 40  # per timeout
_SECONDS_TO_END_BY_THEMSELVES = 0.5  # before SIGTERM
_SECONDS_TO_END = 4.0  # before SIGKILL
_SECONDS_FOR_A_LAUNCHER = 1.5  # to end the others, where one has died


class Watcher:
    """Watches the ranks of a node until they are gone."""

    def __init__(self, node: Node, messages: TextIO) -> None:
        self.messages = messages
        self._begin(node)

    def _begin(self, node: Node) -> None:
        self.node = node
        self._started = self._looked = time.monotonic()
        self._nodes: Nodes | None = None  # where the job has several
        self._unobserved = 0.0  # seconds in which this process did not run either

    def run(self) -> None:
        """Watch, until every rank is gone or done, or a hang is reported."""
        while True:
            seen = self.node.look()
            if self._is_over(seen):
                if self.leaves():
                    return
                continue
            if seen:
                self._note_pause(seen)
                if self._is_ended_from_outside(seen):
                    return
                if self._died_at_start(seen) or self._hangs(seen):
                    return
            self.node.wait(self._pause(seen))

    def _is_over(self, seen: Sequence[Seen]) -> bool:
        # A rank has a ledger before it starts this process: without any that can be seen, it has died already.
        return all(one.state == "gone" or one.is_done for one in seen)

    def leaves(self) -> bool:
        """Whether there is nothing more to watch: no next run has been started in the same way at once."""
        leaving, again = leaving_file(self.node.directory), Node(self.node.directory)
        with contextlib.suppress(OSError):
            leaving.touch()
        if not any(one.state != "gone" and not one.is_done for one in again.look()):
            return True
        leaving.unlink(missing_ok=True)
        self._begin(again)
        return False

    def _pause(self, seen: Sequence[Seen]) -> float:
        timeout = seen[0].record.identity.hang_timeout if seen else 0.0
        return min(_SLOWEST_LOOK, max(_FASTEST_LOOK, timeout / _LOOKS))

    def _note_pause(self, seen: Sequence[Seen]) -> None:
        """Where this process did not get to run, the ranks may not have either: that time is no evidence."""
        now = time.monotonic()
        late = now - self._looked - 2 * self._pause(seen) - 0.5
        if all(one.state == "stopped" for one in seen if not one.is_done):
            late = now - self._looked
        if still_seconds(seen) < now - self._looked:
            self._unobserved = 0.0
        elif late > 0:
            self._unobserved += late
        self._looked = now

    # ---- hangs

    def _hangs(self, seen: Sequence[Seen]) -> bool:
        """Whether the ranks hang; then it is reported and they are gone."""
        still = still_seconds(seen) - self._unobserved
        who = seen[0].record.identity
        if still <= min(who.hang_timeout, _least(seen)):
            return False
        everyone = list(seen)
        if self._nodes is not None:
            elsewhere = self._nodes.others()
            if elsewhere is None:
                return False
            everyone += [one for ranks, _ in elsewhere for one in ranks]
            still = min(still, *(seconds for _, seconds in elsewhere)) if elsewhere else still
        world = who.world_size
        missing = world - len(everyone)
        if missing and time.monotonic() - self._started < TIMES[Phase.START] * who.hang_timeout:
            return False
        verdict = blame(everyone, world)
        allowed = limit(everyone, verdict)
        if still <= allowed.seconds:
            return False
        stacks = self.node.stacks(list(seen))
        again = self.node.look()
        if any(_moved(one, other) for one, other in zip(seen, again, strict=False)) or len(again) != len(seen):
            return False  # one moved meanwhile
        busy = {one.rank for one in seen if one.is_busy and not _is_in_torch(stacks[one.rank])}
        again = [dataclasses.replace(one, is_busy=one.is_busy and one.rank in busy) for one in again]
        here = {one.rank for one in again}
        everyone = [*again, *(one for one in everyone if one.rank not in here)]
        verdict = blame(everyone, world)
        self._report(everyone, verdict, seconds=still, allowed=allowed, stacks=stacks)
        self._end(again)
        return True

    def _report(
        self, seen: Sequence[Seen], verdict: Verdict, *, seconds: float, allowed: Limit, stacks: dict[int, str]
    ) -> None:
        identity = seen[0].record.identity
        text = hang_report(
            seen, verdict, seconds=seconds, allowed=str(allowed), stacks=stacks, world_size=identity.world_size
        )
        content = {
            "step": max(one.record.step for one in seen),
            "verdict": dataclasses.asdict(verdict),
            "still_seconds": seconds,
            "limit_seconds": allowed.seconds,
            "hang_timeout_seconds": identity.hang_timeout,
            "ranks": [{"state": one.state, **one.record.to_json(), "stack": stacks.get(one.rank)} for one in seen],
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "exit_status": EXIT_HUNG,
        }
        where = ""
        path = Path(identity.output_dir) / f"hang-{content['step']}.json"
        with contextlib.suppress(OSError):  # the message counts
            # One node writes it, which is not one that is cut off: a network disk might not answer that one either.
            if (self._nodes is None or self._nodes.decides) and path.parent.is_dir():
                replace_bytes(path, json.dumps(content, indent=1).encode(), durable=False)
                where = f"all of it, with all stacks: {path}; "
        by_itself = f" (status {EXIT_HUNG}); --load auto resumes it" if seen[0].record.flags & Flag.GUARDED else ""
        ending = f"  {where}every process of the run ends now{by_itself}"
        self._pronounce(f"{text}\n{ending}", hung=True)

    # ---- deaths

    def _died_at_start(self, seen: Sequence[Seen]) -> bool:
        """Whether a rank died before the ranks watch each other; then it is reported and they are gone. Not if it has
        said why, or was asked to end, or if a launcher has ended the others as well."""
        dead = [one for one in seen if one.state == "gone" and not one.is_done and not one.is_outside]
        living = [one for one in seen if one.state != "gone" and not one.is_done]
        if not dead or not living or any(one.record.flags & (Flag.GUARDED | Flag.SPOKE) for one in (*dead, *living)):
            return False
        asked = [was_asked_to_end(one.record.identity.pid) for one in dead]
        if None in asked:
            time.sleep(_SECONDS_FOR_A_LAUNCHER)
            still = {one.rank for one in self.node.look() if one.state != "gone"}
            living = [one for one in living if one.rank in still]
        if True in asked or not living:
            return False
        rows = "\n".join(f"  {row}" for row in table(seen))
        self._pronounce(f"{deaths_in_words(dead)}; stopping the others\n{rows}", hung=False)
        end([one.record.identity.pid for one in living], _SECONDS_TO_END)
        return True

    def _pronounce(self, text: str, *, hung: bool) -> None:
        """Say why the run ends; the ranks are told first, so that they do not."""
        message = f"megacore: {text}"
        self._tell_ranks(message, hung=hung)
        leave_for_launcher(message)
        with contextlib.suppress(OSError):
            self.messages.write(f"{message}\n")
            self.messages.flush()
        if self._nodes is not None:
            self._nodes.pronounce(message)

    def _is_ended_from_outside(self, seen: Sequence[Seen]) -> bool:
        """Publish what this node's ranks do, if the job has other nodes; end them if the deciding one says so."""
        who = seen[0].record.identity
        if who.world_size == who.local_world_size:
            return False
        if self._nodes is None:
            self._nodes = Nodes(os.environ, who.node, who.world_size, who.local_world_size)
        still = still_seconds(seen) - self._unobserved
        urgent = still > min(who.hang_timeout, _least(seen)) / 2
        self._nodes.publish(seen, max(0.0, still), urgent=urgent)
        message = self._nodes.verdict() if urgent and not self._nodes.decides else None
        if message is None:
            return False
        self._tell_ranks(message, hung=True)
        self._end(seen)
        return True

    def _tell_ranks(self, message: str, *, hung: bool) -> None:
        with contextlib.suppress(OSError):
            report_file(self.node.directory).write_text(message)
        for file in self.node.files.values():
            file.pronounce(hung=hung)

    def _end(self, hung: Sequence[Seen]) -> None:
        """End ranks that were told of a hang: those that can act end by themselves, with its status."""
        deadline = time.monotonic() + _SECONDS_TO_END_BY_THEMSELVES
        living = [one.record.identity for one in hung if one.state == "running"]
        while living and time.monotonic() < deadline:
            time.sleep(_FASTEST_LOOK)
            living = [who for who in living if state_of(who.pid, who.born) == "running"]
        end([one.record.identity.pid for one in hung if one.state != "gone"], _SECONDS_TO_END)


def _least(seen: Sequence[Seen]) -> float:
    """The shortest limit that any verdict could set, to spare the work of finding one."""
    return min(limit(seen, Verdict(kind="stopped")).seconds, *(one.record.identity.hang_timeout for one in seen))


def _is_in_torch(stack: str) -> bool:
    """Whether the main thread is in a call of torch's communication, where it may wait on a processor."""
    return any("torch/distributed/" in frame for frame in main_stack(stack)[:1])


def _moved(one: Seen, other: Seen) -> bool:
    return other.record.age < one.record.age or one.state != other.state


def main(arguments: Sequence[str]) -> None:
    """Watch the ranks of a directory."""
    directory, descriptor = Path(arguments[0]), int(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # for the ranks; it ends with them
    with os.fdopen(descriptor, "w") as messages:
        Watcher(Node(directory), messages).run()
    remove(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
