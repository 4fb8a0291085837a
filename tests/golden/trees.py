"""A tree of megacore at work: its programs started warm (worker.py), its command lines read (reader.py), and what they
leave, without what differs between two runs of the same code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tests.patience import patience

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Of metrics.jsonl, what follows from the numbers alone: times, memory and rates are the machine's.
NUMBERS = ("consumed_", "eval/", "moe/", "train/")
# Lines about the start of a run say how long it took.
_STARTING = re.compile(r"^starting .*\n", re.MULTILINE)
# How long a search took.
_SEARCHED = re.compile(r'(?<=searched in )[0-9.]+|(?<="wall_seconds": )[0-9.]+')
_HOST = re.compile(rf"\bon {re.escape(platform.node())}\b")

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended: the status of each rank, and what all of them printed, with names for folders."""

    statuses: list[int]
    out: str
    err: str


class Worker:
    """One process of a tree that forks its programs (worker.py), or reads its command lines (reader.py)."""

    def __init__(self, tree: Path, kind: str = "worker.py") -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / kind), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ) | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        script: str,
        words: Iterable[str],
        folder: Path,
        *,
        ranks: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a script to its end in a folder. A script of the tests is this tree's, others are the worker's tree's."""
        assert self._process.stdin is not None and self._process.stdout is not None
        owner = ROOT if script.startswith("tests/") else self.tree
        request = {"script": str(owner / script), "words": list(words), "ranks": ranks, "folder": str(folder)}
        request |= {"environment": dict(environment or {}), "seconds": patience(90)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.tree} ended with {self._process.wait()}; its error is above")
        answer = json.loads(line)
        names = {str(folder): "{dir}", str(owner): "{tree}", str(self.tree): "{tree}"}
        for kind in ("out", "err"):
            answer[kind] = _HOST.sub("on {host}", _STARTING.sub("", _SEARCHED.sub("0", answer[kind])))
            for found, name in names.items():
                answer[kind] = answer[kind].replace(found, name)
        return Ended(**answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        yield Path(name).resolve()


def on_workers(tree: Path, kind: str, work: Mapping[K, Callable[[Worker], V]], workers: int) -> dict[K, V]:
    """What each function returns, given one of a tree's workers of a kind."""
    free: SimpleQueue[Worker] = SimpleQueue()
    every = [Worker(tree, kind) for _ in range(workers)]
    for one in every:
        free.put(one)

    def on_free(key: K) -> V:
        worker = free.get()
        try:
            return work[key](worker)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(work, pool.map(on_free, work), strict=True))
    finally:
        for one in every:
            one.close()


def numbers_of(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run; of what the machine's speed decides, the names only."""
    lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
    rows = [
        {k: v if k == "step" or k.startswith(NUMBERS) else "measured" for k, v in json.loads(line).items()}
        for line in lines
    ]
    return [{key: value if value == value else "nan" for key, value in row.items()} for row in rows]


def tensors_of(directory: Path) -> dict[str, str]:
    """SHA-256, dtype and shape of every tensor in the safetensors files below a folder, by file and name."""
    found = {}
    for path in sorted(directory.rglob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            for name, entry in sorted(header.items()):
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    file.seek(8 + size + start)
                    digest = hashlib.sha256(file.read(stop - start)).hexdigest()
                    key = f"{path.relative_to(directory)}:{name}"
                    found[key] = f"{entry['dtype']} {entry['shape']} {digest[:16]}"
    return found


def files_below(path: Path) -> list[Path]:
    """A file, or every file of a folder; nothing where there is neither."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Each place where two JSON values differ, in words."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                yield f"{where}/{key}: only in the {'new' if key in other else 'old'} tree"
            else:
                yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differences(first, second, f"{where}/{index}")
    elif one != other:
        yield f"{where}:\n    - {one!r}\n    + {other!r}"
