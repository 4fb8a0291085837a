"""What the watchdog does for a run (megacore/train/watchdog.py)."""

from __future__ import annotations

import contextlib
import time
from importlib import import_module
from typing import TYPE_CHECKING

from megacore.config import ResolvedConfig
from megacore.config.cli import leave_for_launcher
from megacore.config.dimensions import describe_rank
from megacore.parallel.heartbeat import Current, Phase
from megacore.train.watchdog import Watchdog
from megacore.watch import start
from megacore.watch.ledger import Flag, this_ledger
from megacore.watch.node import Node, report_file
from megacore.watch.report import deaths_in_words

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.train.callbacks import Callback


class _Watchdog(Watchdog):
    def begin(self, config: ResolvedConfig, *, leaves_if_hung: bool = True) -> None:
        start.begin_watch(config, leaves_if_hung=leaves_if_hung)

    def end(self) -> None:
        if ledger := this_ledger():
            ledger.finish()
        Current.heartbeat = None

    def rest_in(self, phase: Phase) -> None:
        if ledger := this_ledger():
            ledger.rest_in(phase)

    def note_mesh(self, config: ResolvedConfig, mesh: Mesh) -> None:
        if ledger := this_ledger():
            if mesh.device.type != "cpu":
                ledger.set_flag(Flag.ASYNCHRONOUS)
            if config.training.compile and mesh.layer.size > 1:
                ledger.set_flag(Flag.HIDDEN)

    def note_guard(self) -> None:
        if ledger := this_ledger():
            ledger.set_flag(Flag.GUARDED)

    def note_termination(self) -> None:
        if ledger := this_ledger():
            ledger.note_termination()

    def note_last_words(self) -> None:
        if ledger := this_ledger():
            ledger.set_flag(Flag.SPOKE)

    def reported_hang(self) -> bool:
        if (ledger := this_ledger()) is None or not ledger.verdict:
            return False
        with contextlib.suppress(OSError):
            leave_for_launcher(report_file(ledger.directory).read_text())
        return True

    def left_their_order(self) -> str:
        if (ledger := this_ledger()) is None:
            return ""
        seen = Node(ledger.directory).look()  # the dead too: gloo aborts a rank that gets more than it expects
        odd = [one.record for one in seen if one.record.deviation]
        if not odd or 2 * len(odd) > ledger.identity.local_world_size:
            return ""
        names = "; ".join(f"rank {r.rank} ({describe_rank(r.rank, r.identity.degrees)})" for r in odd)
        left = f"left the order in which it communicates in step {odd[0].deviation}"
        return f"; probably because of {names}, which {left}"

    def died_silently(self, within_seconds: float) -> str:
        if (ledger := this_ledger()) is None:
            return ""
        node, deadline = Node(ledger.directory), time.monotonic() + within_seconds
        while True:
            ended = [one for one in node.look() if one.state == "gone" and not one.is_done]
            if any(one.record.flags & Flag.SPOKE for one in ended):
                return ""
            if ended or time.monotonic() > deadline:
                return deaths_in_words(ended) if ended else ""
            time.sleep(0.05)

    # What follows needs torch, which is not loaded when a run begins to be watched.

    def different_operations(self, step: int, mesh: Mesh) -> str:
        found: str = import_module("megacore.watch.same_operations").different_operations(step, mesh)
        return found

    def callbacks(self, mesh: Mesh, *, first_step: int) -> list[Callback]:
        if mesh.world.size == 1:
            return []
        return [import_module("megacore.watch.stragglers").Stragglers(mesh, first_step=first_step)]


WATCHDOG = _Watchdog()
