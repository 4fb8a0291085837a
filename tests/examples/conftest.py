"""The examples are scripts: each folder of them is on the path, as it is when torchrun starts one."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from megacore.config.optimizers import OPTIMIZERS
from megacore.optim.optimizers import OPTIMIZER_CLASSES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(folder) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()]


def printed(rank: int, ranks: int, main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str]:
    """The exit status of an example's script, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = main(argv)
    return status, text.getvalue()


@pytest.fixture(scope="module", autouse=True)
def unchanged_registries() -> Iterator[None]:
    """What an example registers in this process is forgotten after its tests."""
    with mock.patch.dict(OPTIMIZERS), mock.patch.dict(OPTIMIZER_CLASSES):
        yield
