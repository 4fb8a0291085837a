"""Compare a parallel layout with one process, on a narrowed copy of the model.

    python tools/verify.py pretrain_gpt.py --tp 2 --pp 2 --dp 2 --zero-stage 1      # starts 8 ranks
    torchrun --nproc-per-node 8 tools/verify.py pretrain_gpt.py --tp 2 --pp 2 --dp 2
    python tools/verify.py pretrain_bert.py --tp 2 --dp 2 --self-test               # plants defects, finds them

The exit status is 0 if everything compared agrees, 1 if something differs or a run failed, 2 for what is refused. See
docs/guides/verify.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
