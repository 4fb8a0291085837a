"""Opening and indexing a dataset of 10 million documents on one core: to take less than 5 seconds.

    python benchmarks/open_dataset.py [--documents 10000000] [--seq-length 1024]

Writes an .idx from the format's byte layout, beside a sparse .bin of zeros of the right length, then measures what a
training run does at its start: open the dataset (which checks everything), divide it, build the three indices of the
training split for one epoch, write them to the cache, and read the first sample; and once more with the cache in place.
"""

from __future__ import annotations

import argparse
import os
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

from megacore.config.data import SplitShares
from megacore.data.gpt.build import split_documents
from megacore.data.gpt.dataset import GPTDataset
from megacore.data.indexed.reader import IndexedDataset


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--seq-length", type=int, default=1024)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "data"
        tokens = _write(prefix, args.documents)
        print(f"{args.documents:,} documents, {tokens:,} tokens, .idx {prefix.with_suffix('.idx').stat().st_size:,} B")
        for name in ("first", "again, from the cache"):
            _measure(name, prefix, tokens // args.seq_length, args.seq_length)


def _write(prefix: Path, documents: int) -> int:
    """Write the dataset; its number of tokens."""
    lengths = np.random.default_rng(0).integers(1, 2000, documents).astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    with open(prefix.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        file.write(lengths.tobytes())
        file.write(((ends - lengths) * 2).tobytes())
        file.write(np.arange(documents + 1).tobytes())
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(int(ends[-1]) * 2)
    return int(ends[-1])


def _measure(name: str, prefix: Path, samples: int, seq_length: int) -> None:
    begun, begun_cpu = time.perf_counter(), time.process_time()
    indexed = IndexedDataset(prefix)
    opened = time.perf_counter()
    train, _, _ = split_documents(indexed, SplitShares(0.949, 0.05, 0.001))
    count = int(samples * 0.94)  # within one epoch of the training split
    cache = prefix.parent / "cache"
    dataset = GPTDataset(indexed, train, num_samples=count, seq_length=seq_length, seed=1234, cache_dir=cache)
    assert dataset[0]["tokens"].shape == (seq_length,)
    done, done_cpu = time.perf_counter(), time.process_time()
    print(
        f"{name}: opened and checked in {opened - begun:.2f} s, {len(dataset):,} samples indexed in "
        f"{done - opened:.2f} s, together {done - begun:.2f} s (CPU {done_cpu - begun_cpu:.2f} s; less than 5 wanted)"
    )


if __name__ == "__main__":
    main()
