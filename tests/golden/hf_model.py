"""Write a tiny model of transformers: `hf_model.py NAME DIRECTORY`, NAME of tests/parity/hf_models.py."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind the tree's own modules
    from tests.parity.hf_models import make_model, save_model

    save_model(make_model(sys.argv[1]), Path(sys.argv[2]))
