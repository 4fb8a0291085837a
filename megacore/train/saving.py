"""The trainer's saves: what is said of them, and what happens where one fails (`--on-save-error`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megacore.checkpoint.save import CheckpointSaver, Saved
from megacore.checkpoint.state import TrainingState
from megacore.config import Config
from megacore.errors import StorageError
from megacore.parallel.mesh import Mesh
from megacore.train.sinks import Report


class Saving:
    """Saves a run, in the background or not, and keeps its promises to the user; all ranks call each method together.

    Args:
        config: resolved.
        mesh: this rank's place.
        report: where it says what it did.
        loaded: the checkpoint that the run continues from.
    """

    def __init__(self, config: Config, mesh: Mesh, report: Report, *, loaded: Path | None) -> None:
        self._saver = CheckpointSaver(config, mesh, loaded=loaded)
        self._options, self._last, self._report = config.checkpoint, config.training.train_iters, report
        self._saved_step: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether this rank's part of a save in the background is still under way."""
        return self._saver.is_waiting

    def save(self, state: TrainingState, *, is_last: bool = False) -> None:
        """Save the state, after an earlier save that is under way; in the background if the run is set so.

        Args:
            state: this rank's view of the run; where its step is saved already, nothing happens.
            is_last: whether nothing comes after it: then it is waited for, and if it fails the run does.

        Raises:
            StorageError: it failed, and the run is not to go on.
        """
        self._guarded(self._saver.finish)
        if self._saved_step != state.step:
            self._guarded(lambda: self._saver.begin(state), is_last=is_last)
        if is_last or not self._options.async_save:
            self._guarded(self._saver.finish, is_last=is_last)

    def go_on(self, *, some_wait: bool) -> None:
        """Take a save in the background one step further, unless some rank is not so far."""
        if self._saver.is_busy and not some_wait:
            self._guarded(self._saver.advance)

    def _guarded(self, act: Callable[[], Saved | None], *, is_last: bool = False) -> None:
        try:
            saved = act()
        except StorageError as error:
            if is_last or self._options.on_save_error == "stop":
                raise
            self._report.say(f"warning: {error}; training goes on (--on-save-error warn)")
            return
        if saved is None:
            return
        self._saved_step = saved.step
        self._report.say(f"step {saved.step}/{self._last} | saved {saved.path}")
        for note in saved.notes:
            self._report.say(f"warning: {note}; the checkpoint itself is whole")
