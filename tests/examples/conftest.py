"""The examples are scripts: each folder of them is on the path, as it is when torchrun starts one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megacore.config.optimizers import OPTIMIZERS
from megacore.optim.optimizers import OPTIMIZER_CLASSES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(folder) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()]


@pytest.fixture(scope="module", autouse=True)
def unchanged_registries() -> Iterator[None]:
    """What an example registers in this process is forgotten after its tests."""
    with mock.patch.dict(OPTIMIZERS), mock.patch.dict(OPTIMIZER_CLASSES):
        yield
