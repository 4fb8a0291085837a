"""The largest model that trains on one device of little memory, with its state there and in host memory.

    python benchmarks/largest_model.py                            128 MiB of device memory, blocks of 256
    python benchmarks/largest_model.py --device-mib 64 --hidden-size 128 --times 20

The device is the pretend accelerator of tests/accelerator, which counts every tensor and refuses what exceeds its
memory: the figures are counts, the same on every machine with the same torch, and say nothing of time. Each row is the
deepest model that completes one step of AdamW in bf16. The last one stops at `--times` the blocks of plain data
parallelism, because its limit is the host's memory. Only the table goes to standard output.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.accelerator import build
from tests.accelerator.largest_model import HOST, PLAIN, Largest, largest
from tests.distributed import run_distributed
from tools.generated_pages import table

FULL = {"recompute": "full"}
OPTIMIZER = {"zero_stage": 3, "offload_optimizer": True}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-mib", type=int, default=128, help="memory of the device; default 128")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of a block; default 256")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens of the one sequence of a step; default 128")
    parser.add_argument("--times", type=int, default=16, help="most blocks, in those of data parallelism; default 16")
    arguments = parser.parse_args(argv)
    if (problem := build.missing()) is not None:
        sys.exit(f"the pretend accelerator cannot be built here: {problem}")
    limit = arguments.device_mib << 20
    shape = {"hidden_size": arguments.hidden_size, "seq_length": arguments.seq_length}
    of_state = limit // (16 * 12 * arguments.hidden_size**2)

    def found(flags: dict[str, Any], most: int) -> Largest:
        work = partial(largest, limit=limit, most=most, shape=shape, flags=flags)
        with tempfile.TemporaryDirectory() as directory:
            return run_distributed(work, 1, directory, backend="pretend", init=False, timeout=1800)[0]

    rows = [
        ("--zero-stage 0", found(PLAIN, of_state)),
        ("--zero-stage 0 --recompute full", found(PLAIN | FULL, of_state)),
        ("--offload-optimizer --recompute full", found(OPTIMIZER | FULL, 3 * of_state)),
    ]
    plain = max(one.blocks for _, one in rows[:2])
    every = "--zero-stage 3 --offload-params --offload-optimizer --recompute full"
    rows.append((every, found(HOST | FULL, arguments.times * plain)))
    head = ("flags", "blocks", "parameters", "times", "most on the device", "state in host memory")
    cells = (
        (
            f"`{flags}`",
            f"{one.blocks}{'' if one.is_limit else ' or more'}",
            f"{one.parameters / 1e6:.1f}M",
            f"{one.blocks / plain:.1f}",
            f"{one.peak / 2**20:.1f} MiB",
            f"{one.on_host / 2**20:,.0f} MiB",
        )
        for flags, one in rows
    )
    print(table(head, cells))


if __name__ == "__main__":
    main()
