"""Reads command lines of one tree, one after another in this process: what each prints, its status, its configuration.

    python reader.py TREE        a request and an answer per line, as JSON, on stdin and stdout

It is a script, and imports nothing of the tests: the tree may be of a time that has not this folder.

Request: `script` (a path), `words`, `environment`, `folder` (the working directory) and `seconds`. Answer: the exit
`statuses`, here one, and what was printed (`out`, `err`). Reading loads no torch. A line finds the environment,
the folder, the streams and the warnings of a process of its own; the test reads lines in another order than that in
which they were written, so that one which changed what a later one says would be found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

# Bytes of host memory that command lines find free: what is refused does not depend on the machine, and no preset is.
MEMORY = 2.0**50
LAUNCHERS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


def serve(tree: Path) -> None:
    sys.path.insert(0, str(tree))
    _save_instead_of_training()
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    plain |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "COLUMNS": "120"}
    requests, answers, errors = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(plain | request["environment"])
        os.chdir(request["folder"])
        sys.argv = [request["script"], *request["words"]]
        for target, kind in ((1, "out"), (2, "err")):
            os.dup2(opened := os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), target)
            os.close(opened)
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=errors)
        with warnings.catch_warnings():  # and what warns once, warns again
            status = status_of(request["script"])
        faulthandler.cancel_dump_traceback_later()
        printed = {kind: Path(request["folder"], kind).read_text() for kind in ("out", "err")}
        answers.write(json.dumps({"statuses": [status], **printed}) + "\n")
        answers.flush()


def status_of(script: str) -> int:
    """Run a script as `__main__`; its exit status, as the interpreter finds it."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        traceback.print_exc()
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _save_instead_of_training() -> None:
    """An accepted run writes its configuration and ends. These are the names that tie this file to a tree's inside."""
    system: Any = os
    system.fsync = lambda descriptor: None  # no file here has to outlive the machine
    command_line: Any = importlib.import_module("megacore.config.cli")
    command_line.GRACE_SECONDS = 0.0  # no launcher waits for the message of another rank
    launch: Any = types.ModuleType("megacore.train.launch")
    save: Any = importlib.import_module("megacore.config.toml").save_toml
    launch.launch = lambda config, program: save(config, "config.toml") or 0
    launch.exit_with = sys.exit
    sys.modules[launch.__name__] = launch
    with contextlib.suppress(ImportError):
        importlib.import_module("megacore.watch.start").begin_watch = lambda config, **_: None  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError, AttributeError):  # a tree of another time has it elsewhere
        kind = importlib.import_module("megacore.parallel.host_memory").AvailableMemory
        free = kind(MEMORY, "MemAvailable of this machine")
        importlib.import_module("megacore.plan.fit").host_memory = lambda: free  # type: ignore[attr-defined]


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve())
