"""Check the ledger that a run with --ledger wrote: its chain, its checkpoints, and steps that are computed again.

    python tools/audit.py output                             # the ledger, and every checkpoint against it
    python tools/audit.py output --replay 120                # compute up to step 120 again, on one process
    torchrun --nproc-per-node 2 tools/audit.py output --replay 120 --tp 2
    python tools/audit.py output --bisect                    # the first wrong step, and what of it is
    python tools/audit.py output --bisect other              # the first step in which two runs differ

The exit status is 0 where all agrees, 1 where something does not, 2 for what is refused. See docs/guides/audit.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
