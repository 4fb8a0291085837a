"""Runs programs of one tree, each in processes forked from this one, which has the tree's torch and megacore loaded.

    python worker.py TREE        a request and an answer per line, as JSON, on stdin and stdout

It is a script, and imports nothing of the tests but reader.py: the tree may be of a time that has not this folder.

Request: `script` (a path), `words`, `ranks` (0: one process without a launcher's variables), `environment`,
`folder` (the working directory) and `seconds`. Answer: the exit `statuses`, what the ranks printed (`out`, `err`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from reader import status_of  # type: ignore[import-not-found]

LOADED = ("gpt_task", "bert_task", "launch", "trainer", "engine")
# Ranks meet at a store which the worker serves, as torchrun does.
STORE = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_GLOO_LAZY_INIT": "1"}


def serve(tree: Path) -> None:
    sys.path.insert(0, str(tree))
    import torch

    torch.set_num_threads(1)  # OpenMP threads do not survive a fork
    # torch counts the dtypes of the first optimizer step only here, before there are ranks
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()
    for name in ("pretrain_gpt", "pretrain_bert", *(f"megacore.train.{name}" for name in LOADED)):
        with contextlib.suppress(ModuleNotFoundError):  # what another tree has renamed is imported by each program
            importlib.import_module(name)
    gc.freeze()  # or each program would look at what it inherits, and so copy it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_run(tree, json.loads(line))) + "\n")
        answers.flush()


def _run(tree: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Start a program's ranks, and wait for all of them, or kill them when time is up."""
    from torch.distributed import TCPStore

    folder, ranks = Path(request["folder"]), request["ranks"]
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False) if ranks else None
    plain = {k: v for k, v in os.environ.items() if k not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}}
    children: dict[int, int] = {}
    for rank in range(max(1, ranks)):
        environment = {**plain, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "COLUMNS": "120"}
        if store is not None:
            environment |= {**STORE, "MASTER_PORT": str(store.port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        if (pid := os.fork()) == 0:
            _become(Path(request["script"]), request, environment | request["environment"], rank)
        children[pid] = rank
    statuses = _wait(children, request["seconds"])
    printed = {
        kind: "".join((folder / f"{kind}.{r}").read_text() for r in range(max(1, ranks))) for kind in ("out", "err")
    }
    return {"statuses": [statuses[rank] for rank in sorted(statuses)], **printed}


def _wait(children: dict[int, int], seconds: float) -> dict[int, int]:
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(statuses) < len(children):
        for pid in [pid for pid, rank in children.items() if rank not in statuses]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[children[pid]] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    return statuses


def _become(script: Path, request: dict[str, Any], environment: dict[str, str], rank: int) -> None:
    """Turn this process, just forked, into one rank of a program; it ends with the script."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    for target, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{kind}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [str(script), *request["words"]]
    sys.path[0] = str(script.parent)
    status = status_of(str(script))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]).resolve())
