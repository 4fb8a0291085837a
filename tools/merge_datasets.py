"""Concatenate .bin/.idx datasets.

    python tools/merge_datasets.py --input part0_text_document part1_text_document --output-prefix all_text_document

All inputs must hold tokens of one dtype and, where they say so, of one tokenizer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.tool import ToolParser, run_tool
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.writer import merge
from megacore.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status is 0 done, 2 refused."""
    return run_tool(ToolParser.of("merge_datasets"), argv, _merge)


def _merge(args: Namespace) -> None:
    total = sum(path.stat().st_size for prefix in args.input if (path := Path(f"{prefix}.bin")).is_file())
    with Progress("merging", total) as progress:
        sidecar = merge(args.input, args.output_prefix, on_copied=progress.advance)
    merged = IndexedDataset(args.output_prefix)
    sizes = f"{merged.num_documents:,} documents, {len(merged):,} sequences, {merged.num_tokens:,} tokens"
    print(f"{args.output_prefix}.bin|idx: {sizes} ({merged.dtype.name}) of {len(args.input)} datasets")
    if sidecar is None:
        print(f"{args.output_prefix}.json is not written: not every input has one", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
