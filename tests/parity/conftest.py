"""One training run per request, shared by all tests of the session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.bert_runs import train_bert
from tests.parity.runs import Layout, Outcome, Run, train


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a GPT on a layout; equal requests are trained once."""
    return remembered(train, tmp_path_factory)


@pytest.fixture(scope="session")
def run_bert(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train a BERT on a layout; equal requests are trained once."""
    return remembered(train_bert, tmp_path_factory)


def remembered(train: Callable[..., Outcome | None], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`train` as a function of the layout and of changes by field name, under which its results are kept."""

    @cache
    def cached(layout: Layout, changes: tuple[tuple[str, Any], ...]) -> Outcome:
        tp, pp, dp = layout
        directory: Path = tmp_path_factory.mktemp("run")
        options = dict(changes)
        ranks = tp * pp * dp * options.get("cp", 1)
        outcome = run_distributed(train, ranks, layout, str(directory), options, timeout=180)[0]
        assert isinstance(outcome, Outcome)
        return outcome

    return lambda layout, **changes: cached(layout, tuple(sorted(changes.items())))
