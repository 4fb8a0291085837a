"""TOML files: each problem is reported with its place in the file, and none hides another."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from megacore.config.cli import load_toml
from megacore.errors import ConfigError
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        *itertools.product(["--config", "--schedule-csv", "--tokenizer"], ["device", "pipe"]),
        ("--config", "giant"),
        ("--schedule-csv", "giant"),  # a tokenizer may well be large
    ],
)
def test_what_could_be_read_for_ever_is_refused_at_once(flag: str, kind: str, refuse: Refuse, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "giant":
        path.touch()
        os.truncate(path, 1 << 40)
    (problem,) = problems(refuse(*GOOD, flag, str(path)))
    assert f"{flag} {path} " in problem
    assert (" bytes, more than" if kind == "giant" else " no" if flag == "--tokenizer" else " is not a") in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"[optimizer]\nlr = 1{'0' * 400}", "must be a number"),
        ("x = " + "[" * 5000, "is not valid TOML"),
        ("[model]\nx = \udcff", "is not valid TOML: 'utf-8'"),
    ],
    ids=("endless", "deep", "no text"),
)
def test_a_file_that_no_table_can_hold_is_refused(text: str, said: str, refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    (problem,) = problems(refuse(*GOOD, "--config", str(tmp_path / "c.toml")))
    assert said in problem
    (problem,) = problems(refuse(*GOOD, "--output-dir", "\udcff"))
    assert r"--output-dir '\udcff' is not valid UTF-8" in problem


def test_load_toml_raises_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\ntrain_iters = 'a'\nsave = 3\n")
    with pytest.raises(ConfigError) as error:
        load_toml(file)
    assert len(error.value.problems) == 2
    file.write_text("[training]\ntrain_iters = 0\n[data]\nmock_data = true\n")
    with pytest.raises(ConfigError, match="--train-iters 0"):
        load_toml(file)
