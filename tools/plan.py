"""Predict what a training run needs before you pay for it: memory of every rank, step time, bytes sent, days, price.

    python tools/plan.py pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 \\
        --micro-batch-size 2 --recompute full --zero-stage 1 --cluster a100-80g --tokens 366e9
    python tools/plan.py pretrain_gpt.py --preset llama-3-8b --global-batch-size 256 --cluster h100 --world-size 64 \\
        --search --picture layouts.svg
    python tools/plan.py output/mine --cluster h100     # of a run, by its output directory
    python tools/plan.py output/mine --cluster h100 --compare "--tp 4" "--cp 2"
    python tools/plan.py pretrain_gpt.py --preset llama-3-8b --tp 8 --cluster h200 --operators
    python tools/plan.py --calibrate output/mock        # fit output/mock/cluster.toml to a run of this machine
    python tools/plan.py pretrain_gpt.py ... --cluster h100 --fit rows.csv      # fit to measured steps, and plan

Takes the flags of the entry point and validates them as it does. Only tracing loads torch (docs/guides/planner.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.plan import plan_tool as main

if __name__ == "__main__":
    sys.exit(main())
