"""A finished run ends with status 0, every time: no process dies while it leaves."""

from __future__ import annotations

import pytest

from benchmarks.launches import launch_often


@pytest.mark.slow
def test_finished_runs_end_with_status_0() -> None:
    launches = launch_often(10, ranks=4)
    assert [launch.status for launch in launches] == [0] * 10
    # Status 0 alone could hide a death that the launcher does not see.
    assert [
        launch.text for launch in launches if "terminate" in launch.text or "done: 3 steps" not in launch.text
    ] == []
