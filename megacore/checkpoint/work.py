"""A part of a save that one rank does by itself: its result, or what to say of the exception that ended it.

Nothing that the part raises escapes: the ranks agree on the outcome (save.py), and one that left by itself would leave
the others waiting in a collective.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.errors import PeerFailed, StorageError, UserError
from megacore.remote import Location


class Work:
    """A part of a save that this rank does by itself, now or in a thread; what it raises is kept for the agreement.

    Attributes:
        result: what the part returned.
        problem: why it failed, or None; empty where it failed only because another rank did.
    """

    def __init__(self, do: Callable[[], Any] | None, path: Location, *, background: bool) -> None:
        self.result: Any = None
        self.problem: str | None = None
        self._do, self._path = do, path
        self._thread: threading.Thread | None = None
        if do is None:
            return
        if not background:
            self._run()
            return
        thread = threading.Thread(target=self._run, name="save", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # the system gives no more threads
            self.problem, self._do = described(error, path), None

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        assert self._do is not None
        try:
            self.result = self._do()
        except PeerFailed:
            self.problem = ""
        except Exception as error:
            self.problem = described(error, self._path)
        finally:
            self._do = None  # and with it the state that it holds


def described(error: Exception, path: Location) -> str:
    """An exception in one line; one that nobody foresaw with its type and the line of code that raised it."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    if isinstance(error, UserError | StorageError):
        return f"{path}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{path}: {type(error).__name__}: {error}".removesuffix(": ") + where
