"""What the watchdog does for a run (megacore/train/watchdog.py)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from megacore.config import ResolvedConfig
from megacore.parallel.heartbeat import Phase
from megacore.train.watchdog import Watchdog
from megacore.watch import start
from megacore.watch.ledger import Flag, this_ledger

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.train.callbacks import Callback


class _Watchdog(Watchdog):
    def begin(self, config: ResolvedConfig, *, leaves_if_hung: bool = True) -> None:
        start.begin_watch(config, leaves_if_hung=leaves_if_hung)

    def end(self) -> None:
        start.end_watch()

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
        return start.hang_is_reported()

    def left_their_order(self) -> str:
        return start.left_its_order()

    def died_silently(self, within_seconds: float) -> str:
        return start.died_without_a_word(within_seconds)

    # What follows needs torch, which is not loaded when a run begins to be watched.

    def different_operations(self, step: int, mesh: Mesh) -> str:
        found: str = import_module("megacore.watch.same_operations").different_operations(step, mesh)
        return found

    def callbacks(self, mesh: Mesh, *, first_step: int) -> list[Callback]:
        if mesh.world.size == 1:
            return []
        return [import_module("megacore.watch.stragglers").Stragglers(mesh, first_step=first_step)]


WATCHDOG = _Watchdog()
