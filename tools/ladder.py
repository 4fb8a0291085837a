"""Train small models of growing width, and fit the law of their held-out losses: what a larger run would end with.

    python tools/ladder.py --data-path data/mine_text_document --tokenizer data/tokenizer --minutes 5
    python tools/plan.py --budget "8 h on 8 x h100" --ladder ladder/ladder.json

Repeat the command to go on after a stop. See docs/guides/planner.md.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("megacore") is None:  # a bare checkout, which nothing has installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacore.ladder.climb import main

if __name__ == "__main__":
    sys.exit(main())
