"""torchrun, the real one, except that its ranks are forked instead of starting an interpreter for each.

Run by `tests/warm.py` in a process that has torch and megacore loaded, and so do the ranks.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main

from tests.warm import Child, Nursery, Program

# Before torchrun has threads and descriptors, such as those of its store, which a new interpreter would not have.
NURSERY = Nursery()


def start_rank(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Child:
    """In place of SubprocessHandler._popen, for a command `python -u script words`."""
    _, unbuffered, script, *words = args
    assert unbuffered == "-u", args
    program = Program(
        script=script,
        words=tuple(words),
        environment=env,
        directory=os.getcwd(),
        stdout=1 if handler._stdout is None else handler._stdout.fileno(),
        stderr=2 if handler._stderr is None else handler._stderr.fileno(),
    )
    return NURSERY.start(program)


if __name__ == "__main__":
    SubprocessHandler._popen = start_rank  # type: ignore[assignment,method-assign]
    main()
