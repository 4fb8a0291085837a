"""Where kernels run in these tests: in Triton's interpreter when the environment asks for it, else on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = ("test_numerics.py", "test_training.py", "test_planted.py")

# Where there is no GPU, only the process of test_interpreter.py runs them, which names them.
collect_ignore = [] if INTERPRETING or torch.cuda.is_available() else list(INTERPRETED)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The interpreter's device is the CPU."""
    return torch.device("cpu" if INTERPRETING else "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of numerics needs a GPU, unless kernels are interpreted."""
    for item in items:
        if not INTERPRETING and item.get_closest_marker("on_device"):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; test_interpreter.py runs it without one"))
