"""Sizes of a report: one unit, no zeros."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacore.plan.size_unit import GIB_UNIT, MIB_UNIT, size_unit
from tools.plan import main

GIB, MIB = 2.0**30, 2.0**20
SMALL = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 256 --seq-length 64"


@pytest.mark.parametrize(
    ("sizes", "column"),
    [
        ([80 * GIB, 0.25 * GIB, 1.0], ["80.00", "0.25", "0.00"]),
        ([1.3 * MIB, 0.26 * MIB], ["0.0013", "0.0003"]),
        ([0.0, 0.0], ["0.00", "0.00"]),
        ([], []),
    ],
)
def test_a_column_has_as_many_decimals_as_its_largest_size_needs(sizes: list[float], column: list[str]) -> None:
    assert GIB_UNIT.column(sizes) == column


def test_the_unit_is_of_the_largest_size() -> None:
    assert size_unit([1.0, 0.2 * GIB]) == GIB_UNIT
    assert size_unit([1.0, 90 * MIB]) == MIB_UNIT
    assert size_unit([]) == MIB_UNIT
    assert MIB_UNIT.text(1025.26 * MIB) == "1,025.3 MiB"
    assert MIB_UNIT.text(1024.0) == "0.00098 MiB"


def test_sizes_of_which_one_is_larger_differ_as_texts() -> None:
    assert GIB_UNIT.apart(80.004 * GIB, 80.001 * GIB) == ("80.004", "80.001")
    assert GIB_UNIT.apart(81 * GIB, 80 * GIB) == ("81.0", "80.0")


@pytest.mark.parametrize("cluster", ["laptop", "h100"])
def test_no_column_of_a_small_model_reads_zero(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.svg"
    flags = f"{SMALL} --cluster {cluster} --pp 2 --global-batch-size 8 --memory-timeline {picture}"
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert "## Memory per rank in MiB, " in text and "GiB usable" in text
    table = text.partition("## Memory")[2].partition("\n\nFits")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| [0-9]", line)]
    assert len(rows) == 2
    for column in list(zip(*rows, strict=True))[2:]:
        assert any(float(cell.strip("*").replace(",", "")) > 0 for cell in column), column
    assert re.search(r"Fits: the highest peak is on pipeline rank \d, [\d,.]+ MiB", text)
    drawn = picture.read_text(encoding="utf-8")
    assert "0.00 GiB" not in drawn and re.search(r"peak [\d,.]+ MiB", drawn)


def test_a_large_model_is_in_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain_gpt.py", "--preset", "llama-3-8b", "--cluster", "h100"]) == 0
    text = capsys.readouterr().out
    assert "## Memory per rank in GiB, 76.7 GiB usable" in text
    assert re.search(r"DOES NOT FIT: pipeline rank 0, [\d.]+ GiB \([\d.]+ to [\d.]+\) of 76.7 GiB", text)


@pytest.mark.parametrize(("model", "unit"), [(SMALL, "MiB"), ("pretrain_gpt.py --preset gpt2-large", "GiB")])
def test_a_search_has_the_unit_of_a_plan(model: str, unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{model} --cluster h100 --world-size 2 --global-batch-size 8 --search --top 3"
    assert main(flags.split()) == 0
    row = re.search(
        r"tokens/s \| (\w+) \|.*\n.*\n\| 1 \| [^|]* \| [^|]* \| [^|]* \| ([^|]*) \| `([^`]*)`", capsys.readouterr().out
    )
    assert row is not None and row.group(1) == unit
    assert main([*model.split(), *f"--cluster h100 --global-batch-size 8 {row.group(3)}".split()]) == 0
    assert f"| **{row.group(2)}** |" in capsys.readouterr().out
