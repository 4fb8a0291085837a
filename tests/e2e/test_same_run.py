"""Ranks that were started differently are refused at launch, with what differs and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megacore.config import ResolvedConfig
from megacore.data.indexed.writer import IndexedWriter
from megacore.train import same_run
from megacore.train.same_run import differences, facts
from tests.e2e.launching import PROGRAM, needs_proc, small_run, under_torchrun
from tests.parity.runs import make_config

# Stands for another node's command line: rank 2's learning rate and rank 3's tensor-parallel degree.
OTHERWISE = """
import os, runpy, sys
own = {{"2": ["--lr", "0.002", "--dp", "4"], "3": ["--lr", "0.001", "--tp", "2"]}}
sys.argv = [{program!r}, *sys.argv[1:], *own.get(os.environ["RANK"], ["--lr", "0.001", "--dp", "4"])]
sys.path.insert(0, {root!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_proc
def test_a_rank_with_other_flags_is_named_with_both_values(tmp_path: Path) -> None:
    script = tmp_path / "otherwise.py"
    script.write_text(OTHERWISE.format(program=str(PROGRAM), root=str(PROGRAM.parent)))
    flags = small_run(tmp_path / "out", global_batch_size=4)
    with under_torchrun(tmp_path / "logs", 4, script, *flags) as job:
        job.ends(60.0)
    said = job.said()
    assert said.count("megacore: refused on rank ") == 1
    assert "rank 2 (pp 0, dp 2, tp 0): --lr 0.002, rank 0: 0.001\n" in said
    assert "rank 3 (pp 0, dp 3, tp 0): --tp 2, rank 0: 1\n" in said
    assert "rank 3 (pp 0, dp 3, tp 0): --dp 2, rank 0: 4\n" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def changed(config: ResolvedConfig, section: str, **values: object) -> ResolvedConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def told(first: ResolvedConfig, other: ResolvedConfig) -> str:
    return "\n".join(differences([facts(first), facts(other)])[:-1])


def dataset(prefix: Path, last: int) -> Path:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add(np.array([5, 6, last]))
        writer.end_document()
        writer.commit()
    return prefix


def test_a_path_may_differ_but_not_what_it_leads_to(tmp_path: Path) -> None:
    one, same, other = (dataset(tmp_path / name / "corpus", last) for name, last in (("a", 7), ("b", 7), ("c", 8)))
    plain = make_config((1, 1, 2), tmp_path / "out")
    base = changed(plain, "data", data_path=(str(one),), mock_data=False)
    moved = changed(base, "data", data_path=(str(same),), data_cache_path=None)
    assert told(base, changed(moved, "training", output_dir="elsewhere")) == ""
    text = told(base, changed(base, "data", data_path=(str(other),)))
    assert text.startswith("rank 1 (pp 0, dp 1, tp 0): --data-path, .bin of dataset 1 6 bytes (")
    assert "--load auto, rank 0: not given" in told(base, changed(base, "checkpoint", load="auto"))
    assert "No such file" in told(base, changed(base, "data", data_path=(str(tmp_path / "none"),)))


def test_other_code_or_another_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_config((1, 1, 2), tmp_path)
    before = facts(config)
    assert any(name.startswith("megacore's kernels/") for name in before)
    monkeypatch.setattr(same_run.torch, "__version__", "2.0.0")
    text = differences([before, facts(config) | {"megacore's train/launch.py": "other"}])
    assert text[0].startswith("rank 1 (pp 0, dp 1, tp 0): megacore's train/launch.py other, rank 0: ")
    assert text[1].startswith("rank 1 (pp 0, dp 1, tp 0): version of torch 2.0.0, rank 0: ")


def test_ranks_that_differ_alike_share_a_line() -> None:
    first = {"--tp": "2", "--dp": "4", "--seed": "1"}
    lines = differences([first] * 4 + [first | {"--seed": "2"}] * 4)
    assert lines[0] == "ranks 4 to 7 (the first: pp 0, dp 2, tp 0): --seed 2, rank 0: 1"
    assert len(lines) == 2
