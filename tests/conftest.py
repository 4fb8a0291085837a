"""Common to every test: one torch thread, no job's ranks in the environment, `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch

# The ranks of a job in which the tests happen to be started must not leak into what they start.
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
