"""Convert checkpoints: Hugging Face transformers to megacore and back, and Megatron-LM's to megacore.

python tools/convert_checkpoint.py --from hf --to megacore --input models/gpt2 --output output/gpt2
python tools/convert_checkpoint.py --from megacore --to hf --input output/mine --output models/mine
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for a bare checkout, which nothing has installed

from megacore.commands.convert import convert, parser
from megacore.commands.tool import run_tool


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the flags say; the exit status is 0 done, 2 refused, 1 failed."""
    return run_tool(parser(), argv, convert)


if __name__ == "__main__":
    sys.exit(main())
