"""What docs/extending.md shows works as it stands there, and what it asks for is asked for by a test."""

from __future__ import annotations

import csv
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacore.config import Config, optimizers, sections_of
from megacore.config.fields import field_docs
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings
from megacore.config.sections import OptimizerConfig
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.zero.data_parallel import LocalRun

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def definitions(name: str, **known: Any) -> dict[str, Any]:
    """What the page's block of this name defines."""
    pattern = rf"<!-- tested: {name} -->\n *```python\n(.*?)\n *```\n"
    (block,) = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(textwrap.dedent(block), f"{PAGE.name}: {name}", "exec"), known)
    return known


def test_the_metric_sink_appends_on_the_first_rank_only(tmp_path: Path) -> None:
    sink = definitions("sink")["CsvSink"]()
    config = SimpleNamespace(training=SimpleNamespace(output_dir=str(tmp_path)))
    for step in (1, 2):
        for rank in (0, 1):
            run = SimpleNamespace(config=config, mesh=SimpleNamespace(world=SimpleNamespace(rank=rank)))
            sink.on_log(run, {"step": step, "train/loss": 0.5, "train/lr": 0.1})
    assert list(csv.reader((tmp_path / "metrics.csv").open())) == [["1", "0.5", "0.1"], ["2", "0.5", "0.1"]]


def test_the_optimizer_is_lion(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = definitions("settings", **vars(optimizers))["LionConfig"]
    monkeypatch.setattr(optimizers, "LionConfig", settings, raising=False)
    lion = definitions("update")["Lion"]
    weight = torch.linspace(-1, 1, 5)
    bucket: Any = None
    run = LocalRun(bucket=bucket, shard_slice=slice(5), master=nn.Parameter(weight.clone(), False), is_matrix=True)
    optimizer = lion([run], settings(), weight_decay=0.1)
    momentum = torch.zeros(5)
    for step in range(3):
        gradient = torch.tensor([1.0, -2.0, 0.5, -0.1, 3.0]) * (-0.9) ** step
        optimizer.update([run], [gradient.clone()], lr=0.01, weight_decay=0.1)
        # Algorithm 2 of the paper, with its defaults.
        weight = weight - 0.01 * (torch.sign(0.9 * momentum + 0.1 * gradient) + 0.1 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(run.master, weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.tensors("momentum", [run])[0], momentum, rtol=1e-6, atol=1e-7)


def test_an_optimizer_has_settings_a_section_a_class_and_a_help_text() -> None:
    sections = {name: kind for name, kind in sections_of(Config).items() if issubclass(kind, OptimizerSettings)}
    assert sections == OPTIMIZERS
    assert OPTIMIZER_CLASSES.keys() == set(OPTIMIZERS.values())
    assert [name for name in OPTIMIZERS if f"{name}: " not in field_docs(OptimizerConfig)["optimizer"]] == []
