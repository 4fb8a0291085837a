"""The errors a user can cause, apart from the bugs only we can.

Every `UserError` ends a run with exit status 2 and one message, without a traceback: the text must therefore name
what was given (flag or file, and its value), the constraint it breaks, and the way out. Anything else that escapes
is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_REFUSED = 2
EXIT_CORRUPT = 3
EXIT_DIVERGED = 4
EXIT_HUNG = 124  # as of timeout(1)


class UserError(ValueError):
    """Something the user gave cannot be used; the message says what, why and the way out."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = (message,)


class ConfigError(UserError):
    """One or more violated configuration constraints, reported together."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(f"  - {problem}" for problem in problems))
        self.problems = tuple(problems)


class Collected:
    """Adds what the code in it refuses to the problems, each once, and goes on: `with Collected(problems): ...`"""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> bool:
        if isinstance(error, UserError):
            self.problems += [problem for problem in error.problems if problem not in self.problems]
        return isinstance(error, UserError)


class DataError(UserError):
    """A dataset, tokenizer or input text that is missing, damaged or does not fit the configuration."""


class TrainingStopped(Exception):
    """Training must end: it diverges, on all ranks alike, which may still talk to each other; reported
    without a traceback."""


class SilentCorruption(TrainingStopped):
    """Numbers that must be equal are not: hardware or software computes wrongly, which nothing else shows. All ranks
    find it together; the process ends with status 3."""


class TrainingDiverged(TrainingStopped):
    """Training must end, and would probably diverge again if it were resumed from its last checkpoint as it is; exit
    status 4."""


class OutputClosed(Exception):
    """Nothing reads the run's output any more, which only rank 0 notices; reported without a traceback."""


class StorageError(Exception):
    """What the run writes cannot be written (full disk, removed directory); reported without a traceback."""


class WorkerDied(Exception):
    """A process that reads data for a rank has ended, and the rank with it; reported without a traceback."""


class PeerFailed(Exception):
    """Another rank could not prepare for a collective; that rank has the reason, and this one only its echo."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, damaged or does not fit the model."""
