"""Common to every test: one torch thread, nothing inherited from what started the tests that a child could notice (the
ranks of a job, an ignored SIGINT), `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.patience import factor

# The ranks of a job in which the tests happen to be started must not leak into what they start.
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

torch.set_num_threads(1)

# A background job or `nohup` starts the tests with SIGINT ignored, which every child would inherit. A handler is not
# inherited through exec: with one that does nothing, the tests go on ignoring the signal and their children do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


def pytest_report_header() -> str:
    """What the machine does to the tests' timeouts."""
    return f"timeouts: {factor():.2g} times as long as on a quiet machine (tests/patience.py)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
