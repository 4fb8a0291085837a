"""Preprocessing beside other ways to do it: same text, same tokenizer, same number of workers, one run.

    python benchmarks/preprocess.py [--workers 2] [--megabytes 32] [--rounds 3] [--sides megacore pool ...]

The text is the sources of the standard library and of installed packages as JSON lines. The sides take turns, each in a
process of its own, and none counts the interpreter's start. CPU seconds stand beside wall-clock, for machines that are
not idle.

- megacore: the whole of tools/preprocess_data.py, from opening the file to the renamed .bin/.idx;
- one_worker: the same with --workers 1;
- independent_runs: as many such runs at once as megacore has workers, each of all the text: how far the machine itself
  lets processes that share nothing scale;
- tiktoken: its encoder with the same vocabulary, on texts that are in memory already, and nothing done with the result;
  one thread;
- encode_batch_fast: that of `tokenizers`, likewise, with as many threads as megacore has workers;
- pool: as Megatron-LM's tools/preprocess_data.py works: a pool of processes, a document at a time through
  `tokenizers`, lists of ids sent back, and an .idx at the end;
- datatrove: its DocumentTokenizer, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from contextlib import redirect_stderr, redirect_stdout
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.in_turn import ratio  # noqa: E402

SIDES = (
    "megacore",
    "one_worker",
    "independent_runs",
    "tiktoken",
    "encode_batch_fast",
    "pool",
    "datatrove",
)
Measure = Callable[[Path, int, str], dict[str, float]]
_BATCH = 1000  # texts per call: all at once would measure the allocator


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=32.0, help="size of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=_installed(), help="default: what is installed")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measures: dict[str, Measure] = {"megacore": _megacore, "one_worker": _megacore, "tiktoken": _tiktoken}
        measures |= {"independent_runs": _independent_runs, "pool": _pool, "datatrove": _datatrove}
        print(json.dumps(measures.get(args.side, _library)(args.folder, args.workers, args.side)))
        return
    for name in set(SIDES).difference(_installed()):
        print(f"{name} is not measured: pip install {name}")
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), args)


def _compare(folder: Path, args: argparse.Namespace) -> None:
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    size = _write_corpus(corpus, int(args.megabytes * 1e6))
    _run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", args.vocab_size, "--output", tokenizer)
    print(f"{size / 1e6:.1f} MB of text, vocabulary {args.vocab_size}, {args.workers} workers, {os.cpu_count()} cores")
    sides = list(args.sides)
    wall: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(args.rounds):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            result = json.loads(_run(__file__, "--side", side, "--folder", folder, "--workers", args.workers))
            wall[side].append(result["wall"])
            cpu[side].append(result["cpu"])
            text = size * (args.workers if side == "independent_runs" else 1) / 1e6
            print(
                f"round {number + 1} {side:<18} {result['wall']:6.2f} s  {text / result['wall']:6.2f} MB/s  "
                f"CPU {result['cpu']:6.2f} s  {text / result['cpu']:6.2f} MB per CPU second",
                flush=True,
            )
    if "one_worker" in sides and "independent_runs" in sides:
        together = [args.workers * seconds for seconds in wall["one_worker"]]
        print(
            f"{args.workers} independent_runs / one_worker: {ratio(together, wall['independent_runs'])} of its "
            f"throughput, {ratio(cpu['independent_runs'], [args.workers * s for s in cpu['one_worker']])} of its CPU "
            "seconds for each"
        )
    others = [side for side in sides if side not in ("megacore", "independent_runs")]
    for side in others if "megacore" in sides else ():
        print(
            f"megacore / {side}: {ratio(wall[side], wall['megacore'])} of its throughput, "
            f"{ratio(cpu[side], cpu['megacore'])} per CPU second"
        )


def _installed() -> list[str]:
    missing = {side for side in ("tiktoken", "datatrove") if importlib.util.find_spec(side) is None}
    return [side for side in SIDES if side not in missing]


def _run(*command: object) -> str:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout


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


def _timed(work: Callable[[], None]) -> dict[str, float]:
    """Wall-clock and CPU seconds of some work, its child processes included."""

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    begun, begun_cpu = time.perf_counter(), cpu()
    work()
    return {"wall": time.perf_counter() - begun, "cpu": cpu() - begun_cpu}


def _megacore(folder: Path, workers: int, side: str) -> dict[str, float]:
    return _preprocess(folder, 1 if side == "one_worker" else workers, "out")


def _preprocess(folder: Path, workers: int, output: str) -> dict[str, float]:
    from tools.preprocess_data import main as preprocess  # only the side that is measured imports it

    def work() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            flags = f"--append-eod --workers {workers} --output-prefix {folder}/{output}".split()
            status = preprocess(["--input", f"{folder}/corpus.jsonl", "--tokenizer", f"{folder}/tokenizer", *flags])
        assert status == 0

    return _timed(work)


def _independent_runs(folder: Path, workers: int, side: str) -> dict[str, float]:
    fork = multiprocessing.get_context("fork")
    ready, results = fork.Barrier(workers), fork.SimpleQueue()

    def run(number: int) -> None:
        ready.wait()
        results.put(_preprocess(folder, 1, f"out{number}"))

    processes = [fork.Process(target=run, args=(number,)) for number in range(workers)]
    for process in processes:
        process.start()
    runs = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return {"wall": max(run["wall"] for run in runs), "cpu": sum(run["cpu"] for run in runs)}


def _tiktoken(folder: Path, workers: int, side: str) -> dict[str, float]:
    from megacore.data.tokenizers.fast_bpe import fast_encoder
    from megacore.data.tokenizers.tokenizer import load_tokenizer

    fast = fast_encoder(load_tokenizer(folder / "tokenizer"))
    assert fast is not None
    texts, encode = _texts(folder), fast._encoding.encode_to_numpy

    def work() -> None:
        for text in texts:
            encode(text, disallowed_special=())

    return _timed(work)


def _pool(folder: Path, workers: int, side: str) -> dict[str, float]:
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

    return _timed(work)


_of_pool: Any = None


def _load_for_pool(folder: str) -> None:
    import tokenizers

    global _of_pool
    _of_pool = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")


def _encode_line(line: str) -> list[int]:
    return [*_of_pool.encode(json.loads(line)["text"], add_special_tokens=False).ids, 0]


def _datatrove(folder: Path, workers: int, side: str) -> dict[str, float]:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for part in range(workers):  # its workers divide files, not lines
        name = folder / "parts" / f"{part}.jsonl"
        name.parent.mkdir(exist_ok=True)
        name.write_text("".join(lines[part::workers]), encoding="utf-8")
    tokenizer = DocumentTokenizer(
        output_folder=str(folder / "datatrove"),
        tokenizer_name_or_path=str(folder / "tokenizer" / "tokenizer.json"),
        eos_token="<|endoftext|>",
        shuffle_documents=False,
    )
    logs = tempfile.mkdtemp(dir=folder)
    steps = [JsonlReader(str(folder / "parts")), tokenizer]

    def work() -> None:
        LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=logs, skip_completed=False).run()

    return _timed(work)


def _texts(folder: Path) -> list[str]:
    with open(folder / "corpus.jsonl", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def _library(folder: Path, workers: int, side: str) -> dict[str, float]:
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import tokenizers  # after the variables that decide its threads

    encode = getattr(tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json"), side)
    texts = _texts(folder)

    def work() -> None:
        for start in range(0, len(texts), _BATCH):
            encode(texts[start : start + _BATCH], add_special_tokens=False)

    return _timed(work)


if __name__ == "__main__":
    main()
