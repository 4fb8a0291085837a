"""Bytes that a rank holds, counted beside the formulas, as the Markdown tables of docs/guides/memory.md.

    python benchmarks/memory.py state          parameters, gradients, optimizer: stages, precisions, dp 1 to 8
    python benchmarks/memory.py activations    what a block keeps for backward: tp 1 to 4, every way to keep less
    python benchmarks/memory.py operators      the same for each operator of large blocks on a device, bytes per token

The numbers are counts, not samples: they are the same on every machine with the same torch. The model is a small one
and the ranks are CPU processes; what counts is bytes per parameter, and bytes per element of the residual stream. Large
blocks compute on fake tensors. Only the table goes to standard output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.plan.activations import Operator, shared_bytes
from tests.distributed import run_distributed
from tests.parity.activations import (
    BLOCKS,
    HIDDEN,
    MICRO_BATCH,
    SEQUENCE,
    activation_config,
    by_formula,
    kept_by_the_paper,
    kept_on_a_device,
    kept_per_block,
)
from tests.parity.test_activations import CASES, SPLIT_CASES
from tests.parity.test_memory import bytes_held


def state_rows() -> Iterator[Sequence[str]]:
    """Counted / predicted KiB of rank 0, after a step."""
    yield ("dp", "precision", "stage", "parameters", "gradients", "optimizer", "all", "counted / predicted")
    for dp in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as directory:
            held = run_distributed(bytes_held, dp, directory, timeout=300)[0]
        for (stage, precision), (counted, predicted) in held.items():
            if dp == 1 and stage > 0:  # the same as stage 0
                continue
            pairs = [(counted[kind], predicted[kind]) for kind in ("params", "grads", "optimizer")]
            total, expected = sum(one for one, _ in pairs), sum(other for _, other in pairs)
            cells = [f"{one / 1024:,.1f} / {other / 1024:,.1f}" for one, other in [*pairs, (total, expected)]]
            yield (str(dp), precision, str(stage), *cells, f"{total / expected:.3f}")


def activation_rows() -> Iterator[Sequence[str]]:
    """Bytes a block keeps on rank 0, in units of s b h."""
    yield ("tp", "sequence parallel", "recompute", "fp32", "formula", "bf16", "formula", "published (16 bits)")
    unit = SEQUENCE * MICRO_BATCH * HIDDEN
    for tp in (1, 2, 4):
        for case in CASES if tp == 1 else SPLIT_CASES:
            cells = []
            for precision in ("fp32", "bf16"):
                changes: dict[str, Any] = {"precision": precision, **case}
                with tempfile.TemporaryDirectory() as directory:
                    config = activation_config((tp, 1, 1), directory, **changes)
                    counted = sum(run_distributed(kept_per_block, tp, (tp, 1, 1), directory, changes)[0].values())
                cells += [f"{counted / unit:.2f}", f"{sum(by_formula(config).values()) / unit:.2f}"]
            split, recompute = "yes" if case.get("sequence_parallel") else "no", case.get("recompute", "none")
            paper = "-" if recompute == "light" else f"{kept_by_the_paper(config) / unit:.2f}"
            yield (str(tp), split, recompute, *cells, paper)


BLOCK: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "precision": "bf16"}
LLAMA: dict[str, Any] = {
    "ffn_hidden_size": 14_336,
    "num_query_groups": 8,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
}


def operator_rows() -> Iterator[Sequence[str]]:
    """Bytes per token that the operators of a block keep on rank 0, with the operators of a GPU."""
    operators = [name for name in get_args(Operator) if name not in ("dropout", "routing")]  # drawn again; of experts
    yield ("block", "tp", "sequence parallel", "recompute", *operators, "all", "formula")
    for name, shape in (("GPT-2's, h 4096", {}), ("Llama 3 8B's", LLAMA)):
        for tp, case in ((1, CASES), (8, SPLIT_CASES)):
            for changes in ({**BLOCK, **shape, "sequence_parallel": False, **saving} for saving in case):
                with tempfile.TemporaryDirectory() as directory:
                    config = activation_config((tp, 1, 1), directory, **changes)
                    counted, formula = (
                        kept_on_a_device((tp, 1, 1), directory, changes),
                        by_formula(config, on_cpu=False),
                    )
                if (
                    attention := counted.get("attention")
                ) is not None:  # all blocks share the tables of rotary positions
                    counted["attention"] = attention - shared_bytes(config) / BLOCKS
                    formula["attention"] -= shared_bytes(config) / BLOCKS
                tokens = SEQUENCE * MICRO_BATCH
                cells = [f"{counted.get(operator, 0) / tokens:,.0f}" for operator in operators]
                sums = [f"{sum(kept.values()) / tokens:,.0f}" for kept in (counted, formula)]
                split = "yes" if changes.get("sequence_parallel") else "no"
                yield (name, str(tp), split, changes.get("recompute", "none"), *cells, *sums)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"state": state_rows, "activations": activation_rows, "operators": operator_rows}
    parser.add_argument("table", choices=tables)
    rows = tables[parser.parse_args(argv).table]()
    # Ranks inherit this process's standard output: what they print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as table:
        os.dup2(2, 1)
        for number, row in enumerate(rows):
            print("| " + " | ".join(row) + " |", file=table, flush=True)
            if number == 0:
                print("|" + "---|" * len(row), file=table, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
