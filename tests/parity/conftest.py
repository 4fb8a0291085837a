"""One training run per request, shared by all tests of the session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, Run, train


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train on a layout; equal requests are trained once."""

    @cache
    def cached(layout: Layout, changes: tuple[tuple[str, Any], ...]) -> Outcome:
        tp, pp, dp = layout
        directory: Path = tmp_path_factory.mktemp("run")
        outcome = run_distributed(train, tp * pp * dp, layout, str(directory), dict(changes), timeout=180)[0]
        assert isinstance(outcome, Outcome)
        return outcome

    return lambda layout, **changes: cached(layout, tuple(sorted(changes.items())))
