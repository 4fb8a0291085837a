"""Preprocessing beside other ways to do it: same text, same tokenizer, same number of workers, one run.

    python benchmarks/preprocess.py [--workers 2] [--megabytes 32] [--rounds 3] [--sides megacore pool ...]

The text is the sources of the standard library and of installed packages as JSON lines. The sides take turns, each in a
process of its own, and none counts the interpreter's start. CPU seconds stand beside wall-clock, for machines that are
not idle.

- megacore: the whole of tools/preprocess_data.py, from opening the file to the renamed .bin/.idx;
- one_worker: the same with --workers 1;
- pool: as Megatron-LM's tools/preprocess_data.py works: a pool of processes, a document at a time through
  `tokenizers`, lists of ids sent back, and an .idx at the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.in_turn import ratio, take_turns  # noqa: E402

SIDES = ("megacore", "one_worker", "pool")


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=32.0, help="size of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="default: all")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), args)


def _compare(folder: Path, args: argparse.Namespace) -> None:
    corpus = folder / "corpus.jsonl"
    size = _write_corpus(corpus, int(args.megabytes * 1e6)) / 1e6
    words = ["tools/train_tokenizer.py", "--input", str(corpus), "--vocab-size", str(args.vocab_size)]
    subprocess.check_output([sys.executable, *words, "--output", f"{folder}/tokenizer"], cwd=REPOSITORY)
    print(f"{size:.1f} MB of text, vocabulary {args.vocab_size}, {args.workers} workers, {os.cpu_count()} cores")

    def measured(side: str) -> dict[str, float]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            result = fresh.submit(_timed, side, folder, args.workers).result()
        rates = (f"{name} {taken:6.2f} s {size / taken:6.2f} MB/s" for name, taken in result.items())
        print(f"{side:<18} {'  '.join(rates)}", flush=True)
        return result

    taken = take_turns({side: partial(measured, side) for side in args.sides}, args.rounds, warm_up=0)
    for side in args.sides if "megacore" in taken else ():
        if side != "megacore":
            pairs = ([[one[name] for one in taken[of]] for of in (side, "megacore")] for name in ("wall", "cpu"))
            throughput, per_cpu = (ratio(*pair) for pair in pairs)
            print(f"megacore / {side}: {throughput} of its throughput, {per_cpu} per CPU second")


def _write_corpus(path: Path, size: int) -> int:
    """Write Python sources as JSON lines, those of the standard library and of installed packages, and all again up to
    a size; the bytes of text."""
    folders = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    sources = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for source in cycle(dict.fromkeys(sources)):
            text = source.read_bytes().decode("utf-8", "ignore")
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode("utf-8"))
            if written >= size:
                return written
    raise AssertionError("there is a source")


def _timed(side: str, folder: Path, workers: int) -> dict[str, float]:
    """Wall-clock and CPU seconds of a side, its child processes included."""
    work = (_pool if side == "pool" else _megacore)(folder, 1 if side == "one_worker" else workers)

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    begun, begun_cpu = time.perf_counter(), cpu()
    work()
    return {"wall": time.perf_counter() - begun, "cpu": cpu() - begun_cpu}


def _megacore(folder: Path, workers: int) -> Callable[[], None]:
    from tools.preprocess_data import main as preprocess  # only the side that is measured imports it, untimed

    def work() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            flags = f"--append-eod --workers {workers} --output-prefix {folder}/out".split()
            status = preprocess(["--input", f"{folder}/corpus.jsonl", "--tokenizer", f"{folder}/tokenizer", *flags])
        assert status == 0

    return work


def _pool(folder: Path, workers: int) -> Callable[[], None]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def work() -> None:
        lengths = []
        with (
            open(folder / "corpus.jsonl", encoding="utf-8") as lines,
            open(folder / "pool.bin", "wb") as tokens,
            multiprocessing.Pool(workers, _load_for_pool, (str(folder),)) as pool,
        ):
            for ids in pool.imap(_encode_line, lines, 32):
                tokens.write(np.array(ids, np.uint16).tobytes())
                lengths.append(len(ids))
        sizes = np.array(lengths, np.int64)
        with open(folder / "pool.idx", "wb") as index:
            for part in (sizes.astype(np.int32), np.cumsum(2 * sizes) - 2 * sizes, np.arange(len(sizes) + 1)):
                index.write(part.tobytes())

    return work


_of_pool: Any = None


def _load_for_pool(folder: str) -> None:
    import tokenizers

    global _of_pool
    _of_pool = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")


def _encode_line(line: str) -> list[int]:
    return [*_of_pool.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]


if __name__ == "__main__":
    main()
