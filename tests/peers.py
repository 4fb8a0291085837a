"""Where the packages of other trainers are, which need versions of their own."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks.comparison.install import ENVIRONMENT, python_of


def interpreter_with(package: str) -> str:
    """The interpreter that has a package: this one, or that which `make peers` makes; empty if neither has it."""
    if importlib.util.find_spec(package):
        return sys.executable
    return str(python_of(ENVIRONMENT)) if any(ENVIRONMENT.glob(f"lib/*/site-packages/{package}")) else ""
