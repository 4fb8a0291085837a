"""A runner for the rows of each file."""

from __future__ import annotations

import pytest

from tests.matrix.runner import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"))
