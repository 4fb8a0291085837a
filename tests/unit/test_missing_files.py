"""Files that a configuration names and the disk does not have, and output directories that cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.config.missing_files import missing_files
from tests.unit.test_config import make


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody, root included, can write")
def test_an_output_directory_that_nobody_can_write_is_named() -> None:
    for directory in ("/proc", "/proc/here"):
        (problem,) = missing_files(make(output_dir=directory))
        assert problem.startswith(f"--output-dir {directory} cannot be written: /proc: no file can be created there (")
        assert problem.endswith("use a directory in which you can create files, such as one in your home directory")


def test_a_name_that_is_too_long_is_that_of_a_missing_file() -> None:
    assert len(missing_files(make(tokenizer="x" * 5000, load="x" * 5000, data_path=("x" * 5000,)))) == 3


def test_looking_at_the_output_directory_leaves_nothing_there(tmp_path: Path) -> None:
    assert missing_files(make(output_dir=str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []
