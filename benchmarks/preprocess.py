"""Preprocessing against what `tokenizers` itself reaches: same text, same tokenizer, same number of workers, one run.

    python benchmarks/preprocess.py [--workers 2] [--megabytes 32] [--rounds 3]

The text is the standard library's sources as JSON lines. `megacore` is the whole of tools/preprocess_data.py, from
opening the file to the renamed .bin/.idx. `encode_batch` is the library's call on texts that are in memory already,
with as many threads as the tool has workers, and nothing done with the result; `encode_batch_fast` leaves out
character offsets, as the tool does. They take turns, each in a process of its own, and none counts the interpreter's
start. The ratio to `encode_batch` is to be at least 0.8. CPU seconds stand beside wall-clock, for machines that are
not idle.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SIDES = ("megacore", "encode_batch", "encode_batch_fast")
_BATCH = 1000  # texts per call of encode_batch: all at once would measure the allocator


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=32.0, help="size of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure = _megacore if args.side == "megacore" else _library
        print(json.dumps(measure(args.folder, args.workers, args.side)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(Path(folder), args)


def _compare(folder: Path, args: argparse.Namespace) -> None:
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    size = _write_corpus(corpus, int(args.megabytes * 1e6))
    _run("tools/train_tokenizer.py", "--input", corpus, "--vocab-size", args.vocab_size, "--output", tokenizer)
    print(f"{size / 1e6:.1f} MB of text, vocabulary {args.vocab_size}, {args.workers} workers, {os.cpu_count()} cores")
    wall, cpu = dict.fromkeys(SIDES, 1e9), dict.fromkeys(SIDES, 1e9)
    for number in range(args.rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            result = json.loads(_run(__file__, "--side", side, "--folder", folder, "--workers", args.workers))
            wall[side], cpu[side] = min(wall[side], result["wall"]), min(cpu[side], result["cpu"])
            print(
                f"round {number + 1} {side:<18} {result['wall']:6.2f} s  {size / result['wall'] / 1e6:6.2f} MB/s  "
                f"CPU {result['cpu']:6.2f} s",
                flush=True,
            )
    for side in SIDES[1:]:
        print(
            f"megacore / {side}, best rounds: {wall[side] / wall['megacore']:.2f} of its throughput, "
            f"{cpu[side] / cpu['megacore']:.2f} per CPU second"
        )


def _run(*command: object) -> str:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout


def _write_corpus(path: Path, size: int) -> int:
    """Write the standard library's sources as JSON lines, again and again up to a size; the bytes of text."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [file.read_bytes().decode("utf-8", "ignore") for file in sources if "site-packages" not in file.parts]
    written = number = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            text = texts[number % len(texts)]
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode("utf-8"))
            number += 1
    return written


def _timed(work: Callable[[], None]) -> dict[str, float]:
    """Wall-clock and CPU seconds of some work, its child processes included."""

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    begun, begun_cpu = time.perf_counter(), cpu()
    work()
    return {"wall": time.perf_counter() - begun, "cpu": cpu() - begun_cpu}


def _megacore(folder: Path, workers: int, side: str) -> dict[str, float]:
    sys.path.insert(0, str(REPOSITORY))
    from tools.preprocess_data import main as preprocess  # only the side that is measured imports it

    def work() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            flags = f"--append-eod --workers {workers} --output-prefix {folder}/out".split()
            status = preprocess(["--input", f"{folder}/corpus.jsonl", "--tokenizer", f"{folder}/tokenizer", *flags])
        assert status == 0

    return _timed(work)


def _library(folder: Path, workers: int, side: str) -> dict[str, float]:
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import tokenizers  # after the variables that decide its threads

    encode = getattr(tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json"), side)
    with open(folder / "corpus.jsonl", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]

    def work() -> None:
        for start in range(0, len(texts), _BATCH):
            encode(texts[start : start + _BATCH], add_special_tokens=False)

    return _timed(work)


if __name__ == "__main__":
    main()
