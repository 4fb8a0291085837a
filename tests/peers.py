"""Where the packages of other trainers are, which need versions of their own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv-peers"


def interpreter_with(package: str) -> str:
    """The interpreter that has a package: this one, or that which `make peers` makes; empty if neither has it."""
    if importlib.util.find_spec(package):
        return sys.executable
    return str(ENVIRONMENT / "bin" / "python") if any(ENVIRONMENT.glob(f"lib/*/site-packages/{package}")) else ""
