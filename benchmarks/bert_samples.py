"""How many BERT samples one process makes in a second, for every layout.

    python benchmarks/bert_samples.py [--seq-length 128] [--samples 4000]

Writes a dataset of 20,000 documents of 2 to 30 sentences of random tokens, and measures the training set of each way to
lay out and mask samples: the fastest of 3 rounds, on one core.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megacore.data.bert.dataset import BertDataset
from megacore.data.bert.layouts import PackedText, PairText, SegmentText
from megacore.data.bert.masking import Masking, SpecialTokens
from megacore.data.bert.text import BertText, Shape, Split
from megacore.data.indexed.reader import IndexedDataset, token_dtype
from megacore.data.indexed.writer import IndexedWriter

VOCAB, SPECIAL = 30_000, 4


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4000)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory() as folder:
        indexed = _written(Path(folder) / "data")
        split = Split(indexed=indexed, documents=range(indexed.num_documents), num_samples=args.samples, seed=1)
        for words in (False, True):
            shape = Shape(
                seq_length=args.seq_length,
                special=SpecialTokens(pad=0, cls=1, sep=2, mask=3),
                short_seq_prob=0.1,
                mark_sentences=words,
                vocab_size=VOCAB,
            )
            made: dict[str, BertText] = {
                "pairs": PairText(split, shape, swap=False),
                "segments": SegmentText(split, shape),
                "packed": PackedText(split, shape),
            }
            for name, text in made.items():
                _measure(f"{name}{', words and 3-grams' if words else ''}", text, args, words=words)


def _measure(name: str, text: BertText, args: argparse.Namespace, *, words: bool) -> None:
    special = np.arange(VOCAB) < SPECIAL
    masking = Masking(
        prob=0.15,
        mask=3,
        special=special,
        ordinary=np.flatnonzero(~special),
        starts=np.arange(VOCAB) % 4 != 0 if words else None,
        max_ngram=3 if words else 1,
    )
    dataset = BertDataset(text, masking, num_samples=args.samples, seq_length=args.seq_length, pad=0, seed=1, stream=0)
    seconds = min(_seconds(lambda: [dataset[k] for k in range(args.samples)]) for _ in range(3))
    print(
        f"{name:30} {args.samples / seconds:8,.0f} samples/s {args.samples * args.seq_length / seconds:12,.0f} tokens/s"
    )


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _written(prefix: Path) -> IndexedDataset:
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 31, size=20_000)
    lengths = rng.integers(3, 40, size=int(sizes.sum())).astype(np.int32)
    tokens = rng.integers(SPECIAL, VOCAB, size=int(lengths.sum())).astype(token_dtype(VOCAB))
    with IndexedWriter(prefix, tokens.dtype) as writer:
        writer.extend(tokens, lengths, sizes)
        writer.commit()
    return IndexedDataset(prefix)


if __name__ == "__main__":
    main()
