"""The trainer's saves: the callbacks that follow them, and what happens if one fails (`--on-save-error`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from megacore.checkpoint import IN_DOUBT, CheckpointSaver, Saved, TrainingState
from megacore.config import ResolvedConfig
from megacore.errors import OutputClosed, StorageError, TrainingStopped
from megacore.parallel.heartbeat import Phase, section
from megacore.parallel.mesh import Mesh
from megacore.remote import Location
from megacore.train.callbacks import Callback, Callbacks


class Saving:
    """Saves a run, in the background or not, and keeps its promises to the user; all ranks call each method together.

    As a context it ends what is under way where the run ends by an exception: in order where all ranks have the same
    one, or where there is no other rank; else the save is given up, as nobody may be left to agree with.

    `callbacks`: called for every checkpoint once it is published, and with warnings. `loaded`: the checkpoint that the
    run continues from. `updates`: of the weights, as the run counts them when it has loaded.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        mesh: Mesh,
        *,
        callbacks: Callbacks,
        loaded: Location | None,
        updates: int,
    ) -> None:
        self._saver = CheckpointSaver(config, mesh, loaded=loaded)
        self._options, self._callbacks = config.checkpoint, callbacks
        self._is_one_process = mesh.world.size == 1
        # `updates`: of its weights, as this start of the run counts them: its manifest may count those before a
        # --no-load-optim too.
        # `newest`: the run's newest checkpoint: the last that was saved, or else the one that the run continues from.
        # `is_busy`: whether a save is under way in the background; the same on every rank.
        self.is_busy, self.newest, self.updates = False, loaded, updates
        warns = config.checkpoint.on_save_error == "warn"
        self._warning = "; training continues (--on-save-error warn)" if warns else None
        self._saved_step: int | None = None

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._saver.is_busy:
            return
        in_thread = self._options.async_save  # else it is the save itself that has failed
        if isinstance(error, TrainingStopped) or (self._is_one_process and in_thread and isinstance(error, Exception)):
            with contextlib.suppress(OutputClosed, StorageError):  # what ends the run is the first of them
                self._guarded(self._saver.finish, "")
        else:
            self._saver.abandon()

    @property
    def is_waiting(self) -> bool:
        """Whether this rank's part of a save in the background is still under way."""
        return self._saver.is_waiting

    def save(self, state: TrainingState, *, is_last: bool = False) -> None:
        """Save the state, after an earlier save that is under way; in the background if the run is set so. `state`:
        this rank's view of the run; where its step is saved already, nothing happens. `is_last`: whether nothing comes
        after it: then it is waited for, and if it fails the run does. Raises StorageError where it failed, and
        --on-save-error is stop."""
        self.finish()
        warning = None if is_last else self._warning
        if self._saved_step != state.step:
            self._guarded(lambda: self._saver.begin(state), warning)
        if is_last or not self._options.async_save:
            self._guarded(self._saver.finish, warning)

    def finish(self) -> None:
        self._guarded(self._saver.finish, self._warning)

    def save_again(self, state: TrainingState) -> None:
        """Save a state that differs from the saved one of its step, and wait."""
        self._saved_step = None
        self.save(state)
        self.finish()

    @section(Phase.SAVE)
    def doubt(self, updates: int) -> None:
        """Mark in doubt the checkpoints of the weights of now, if the newest has them. `updates`: of the weights so
        far."""
        with contextlib.suppress(OutputClosed, StorageError):  # what ends the run is the first of them
            self.finish()
        if self.newest is None or self.updates != updates:
            return
        marked = self._saver.doubt(self.newest)
        with contextlib.suppress(OutputClosed):
            if marked.paths:
                self._callbacks.say(f"warning: --load auto now passes over {' and '.join(marked.paths)}, {IN_DOUBT}")
            for problem in marked.problems:
                self._callbacks.say(f"warning: {problem}")

    def advance(self, *, some_rank_waits: bool) -> None:
        """Take a save in the background one step further, unless some rank is not so far."""
        if self._saver.is_busy and not some_rank_waits:
            self._guarded(self._saver.advance, self._warning)

    @section(Phase.SAVE)
    def _guarded(self, act: Callable[[], Saved | None], warning: str | None) -> None:
        """Act, and announce what was saved; with a warning, failing is only reported, with that at its end."""
        try:
            saved = act()
        except StorageError as error:
            if warning is None:
                raise
            self._callbacks.say(f"warning: {error}{warning}")
            return
        finally:
            self.is_busy = self._saver.is_busy
        if saved is None:
            return
        self._saved_step, self.newest, self.updates = saved.step, saved.path, saved.updates
        self._callbacks.call(Callback.on_save, saved)
