"""pretrain_gpt.py, whose first rank is killed at a point of a save: DIES="POINT NUMBER", the NUMBERth time there."""

from __future__ import annotations

import importlib
import os
import signal
from itertools import count
from pathlib import Path

from megacore.checkpoint import storage

if __name__ == "__main__":
    where, _, number = os.environ["DIES"].rpartition(" ")
    seen = count(1)

    def passing(point: str) -> None:
        """Die there, and leave a word that it happened."""
        if point == where and os.environ["RANK"] == "0" and next(seen) == int(number):
            Path(os.environ["DIED"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    storage.passing = passing
    importlib.import_module("pretrain_gpt").run()
