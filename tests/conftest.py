"""Common to every test: one torch thread, nothing inherited from what started the tests that a child could notice (the
ranks of a job, an ignored SIGINT), nothing left by one file to the next, `gpu` tests only where there is a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.patience import MARGIN, factor

# The ranks of a job in which the tests happen to be started must not leak into what they start.
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

torch.set_num_threads(1)

# A background job or `nohup` starts the tests with SIGINT ignored, which every child would inherit. A handler is not
# inherited through exec: with one that does nothing, the tests go on ignoring the signal and their children do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


# The files that take longest (`--durations=50`), the longest first. Files run side by side (`--dist loadfile`), and one
# that began last would leave the other cores idle.
LONGEST = (
    "test_tools.py", "matrix/test_layouts.py", "matrix/test_exact.py", "e2e/test_failures.py",
    "kernels/test_interpreter.py", "plans/test_traced_memory.py", "matrix/test_zero.py",
    "parity/test_conversion_memory.py",
    "parallel/test_dry_run.py", "e2e/test_rings.py", "accelerator/test_synchronizations.py", "parallel/test_engine.py",
    "parallel/test_stopping.py", "accelerator/test_training.py", "e2e/test_pretrain.py", "plans/test_published_runs.py",
    "e2e/test_watch.py", "parallel/test_spikes.py", "unit/test_roofline.py", "accelerator/test_memory.py",
    "golden/test_golden.py", "e2e/test_refusals.py", "examples/test_extend_pages.py", "e2e/test_scripts.py",
    "kernels/test_compiled.py", "e2e/test_readme.py", "parallel/test_replicas.py", "e2e/test_same_run.py",
    "e2e/test_object_store.py",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def nothing_of_a_file_is_left_to_the_next() -> Iterator[None]:
    """Which files run before a file, in the same process, changes nothing: torch's settings and the environment are put
    back."""
    environment, folder = dict(os.environ), Path.cwd()
    dtype, threads, has_gradients = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    precision, is_deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(has_gradients)
    torch.set_float32_matmul_precision(precision)
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:  # setting it loads torch's compiler
        torch.use_deterministic_algorithms(is_deterministic)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)


@pytest.fixture(autouse=True)
def random_numbers_are_the_same_in_every_run() -> None:
    """Whatever ran before, and if the test runs alone."""
    torch.manual_seed(1)


def pytest_report_header() -> str:
    """What the machine does to the tests' timeouts."""
    return f"timeouts: {MARGIN * factor():.2g} times as long as things take on a quiet machine (tests/patience.py)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first where files run side by side, and skip the tests marked `gpu` without a device."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
        if missing := [str(path) for path in turns if not path.exists()]:
            raise pytest.UsageError(f"tests/conftest.py, LONGEST: no such file: {', '.join(missing)}")
        items.sort(key=lambda item: turns.get(item.path, len(turns)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
