"""Files that a configuration names and the disk does not have, and output directories that cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.config.missing_files import missing_files
from tests.unit.test_config import make


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "half.idx").touch()
    (tmp_path / "corpus_text_document.idx").touch()
    (tmp_path / "corpus_text_document.bin").touch()
    (tmp_path / "pairs_text_sentence.idx").touch()
    prefixes = tuple(str(tmp_path / name) for name in ("half", "none", "corpus", "corpus_text_document.bin", "pairs"))
    file = tmp_path / "half.idx"
    config = make(data_path=prefixes, tokenizer=str(tmp_path / "tok"), load=str(file), output_dir=str(file / "out"))
    problems = "\n".join(missing_files(config))
    for words in (
        f"--tokenizer {tmp_path}/tok does not exist",
        f"--load {file} is not a directory: use the directory of a checkpoint or of a run, or --load auto",
        f"{tmp_path}/half.bin not found",
        f"{tmp_path}/none.bin and {tmp_path}/none.idx not found",
        f"use {tmp_path}/corpus_text_document",
        f"use {tmp_path}/pairs_text_sentence",
        "must be a prefix without the suffix .bin: use",
        f"--output-dir {file}/out cannot be created: {file} is not a directory",
    ):
        assert words in problems
    assert missing_files(make(data_path=(prefixes[2] + "_text_document",), output_dir=str(tmp_path / "a/b"))) == []
    assert len(missing_files(make(tokenizer="x" * 5000, load="x" * 5000, data_path=("x" * 5000,)))) == 3


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "latest"])
def test_a_directory_in_the_way_of_a_file_of_the_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (problem,) = missing_files(make(output_dir=str(tmp_path)))
    assert problem.startswith(f"--output-dir {tmp_path}: its {name} is a directory")
    assert problem.endswith("choose another --output-dir, or move it away")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody, root included, can write")
def test_an_output_directory_that_nobody_can_write_is_named() -> None:
    for directory in ("/proc", "/proc/here"):
        (problem,) = missing_files(make(output_dir=directory))
        assert problem.startswith(f"--output-dir {directory} cannot be written: /proc: no file can be created there (")
        assert problem.endswith("use a directory in which you can create files, such as one in your home directory")


def test_looking_at_the_output_directory_leaves_nothing_there(tmp_path: Path) -> None:
    assert missing_files(make(output_dir=str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []


# ---- round trip ------------------------------------------------------------------------------------------------------
