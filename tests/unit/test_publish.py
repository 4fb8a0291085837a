"""A directory that is published whole or not at all, and what killed conversions leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.convert.publish import published
from megacore.errors import CheckpointError
from tests.patience import patience


@pytest.mark.parametrize(
    ("output", "problem"),
    [("new/..", "is no name of a new directory"), ("file/out", "cannot be made"), ("/proc/x/y", "cannot be made")],
)
def test_an_impossible_output_is_refused_before_anything_is_written(output: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"--output .* {problem}"), published(tmp_path / output):
        pytest.fail("the conversion began")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from megacore.convert.publish import published\n"
        "with published(Path(sys.argv[1])) as made: (made / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "out")], check=False, timeout=patience(60))
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".out.tmp-")
    living, other = tmp_path / f".out.tmp-{os.getppid()}", tmp_path / ".outer.tmp-999999999"
    living.mkdir()
    other.mkdir()
    with published(tmp_path / "out") as made:
        (made / "whole").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name, "out"])
