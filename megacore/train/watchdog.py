"""What a run asks its watchdog: to watch this process, why others have ended, which rank is slow. The watchdog,
`megacore.watch`, is optional: a tree without it trains as `Watchdog` says, and a hang lasts until the collective's own
timeout. This module alone knows where it is, and loads no torch."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import TYPE_CHECKING, cast

from megacore import has_ring
from megacore.config import ResolvedConfig
from megacore.parallel.heartbeat import Phase

if TYPE_CHECKING:
    from megacore.parallel.mesh import Mesh
    from megacore.train.callbacks import Callback


class Watchdog:
    """What a run asks, with the answers of a tree without a watchdog."""

    def begin(self, config: ResolvedConfig, *, leaves_if_hung: bool = True) -> None:
        """Watch this process from now on, unless `--hang-timeout-minutes` is 0 or it is watched already.
        `leaves_if_hung`: whether the process is the trainer's, which ends with a status of its own. A program of one's
        own may handle the signal."""
        if config.watch.hang_timeout_minutes and os.environ.get("RANK", "0") == "0":
            _say_that_it_is_missing()

    def end(self) -> None:
        """The run is over on this rank."""

    # ---- what this process does, beside megacore.parallel.heartbeat

    def rest_in(self, phase: Phase) -> None:
        """Set the phase that this process is in outside of every other phase; only to be called outside of all."""

    def note_mesh(self, config: ResolvedConfig, mesh: Mesh) -> None:
        """What computes the steps of this process."""

    def note_guard(self) -> None:
        """From now on the ranks of this node notice each other's death by themselves."""

    def note_termination(self) -> None:
        """A signal asks this rank to end."""

    def note_last_words(self) -> None:
        """This rank ends, and says itself why."""

    # ---- what happened to others

    def reported_hang(self) -> bool:
        """Whether the watchdog has said why the run ends, such as a hang, and ends it: nobody else is to say anything.
        What it said is left for the launcher, which asks every rank."""
        return False

    def left_their_order(self) -> str:
        """`; probably because of rank 3 ...`: the ranks of this node, if they are few, that have just communicated in
        another order than in other steps. Where another rank dies of that, or fails, they are the cause."""
        return ""

    def died_silently(self, within_seconds: float) -> str:
        """The ranks of this node that ended without a reason. `within_seconds`: to wait for the first of them."""
        return ""

    def different_operations(self, step: int, mesh: Mesh) -> str:
        """In which operation ranks took part with different sizes, and which rank is wrong; all call this together.
        `step`: in which the votes on operations (megacore/parallel/heartbeat.py) differed."""
        raise AssertionError("without a heartbeat no rank votes")

    def callbacks(self, mesh: Mesh, *, first_step: int) -> list[Callback]:
        """Those that name slow ranks; all ranks call this together. `first_step`: steps done before this run."""
        return []


@functools.cache
def _say_that_it_is_missing() -> None:
    print("megacore: note: megacore/watch is not installed: nothing ends a run that hangs", file=sys.stderr)


@functools.cache
def watchdog() -> Watchdog:
    """That of `megacore.watch`, where it is installed."""
    if not has_ring("watch"):
        return Watchdog()
    return cast(Watchdog, importlib.import_module("megacore.watch.for_training").WATCHDOG)
