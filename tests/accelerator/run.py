"""Run a script with the pretend accelerator: `python -m tests.accelerator.run SCRIPT --device pretend ...`, or
`torchrun --nproc-per-node 2 tests/accelerator/run.py SCRIPT --device pretend ...`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Register the device, then run the script as if it had been started itself."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} SCRIPT [ARGUMENT ...]")
    sys.path[0] = str(Path(sys.argv[1]).resolve().parent)
    sys.path.insert(1, str(ROOT))
    from tests.accelerator.collectives import register  # found only now

    register()
    os.environ.setdefault("PRETEND_DEVICES", os.environ.get("LOCAL_WORLD_SIZE", "8"))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
