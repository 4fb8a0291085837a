"""What docs/extend/extending.md shows works as it stands there, and what it asks for is asked for by a test."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megacore.config import Config, ResolvedConfig, sections_of
from megacore.config.fields import field_docs
from megacore.config.optimizer import OptimizerConfig
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.zero.local_segments import LocalRun
from tests.pages import files_of, write_files
from tests.parity.runs import make_config

EXTEND = Path(__file__).parents[2] / "docs" / "extend"
PAGE, SINK = EXTEND / "extending.md", EXTEND / "sink.md"


def code(name: str) -> str:
    """The page's block of this name."""
    pattern = rf"<!-- tested: {name} -->\n *```python\n(.*?)\n *```\n"
    (block,) = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return textwrap.dedent(block) + "\n"


def before(mark: str, addition: str, file: Path) -> None:
    """Put lines in front of the first one that begins with `mark`."""
    text = file.read_text(encoding="utf-8")
    at = re.search(rf"^{re.escape(mark)}", text, re.MULTILINE)
    assert at, f"no line of {file.name} begins with {mark!r}"
    file.write_text(text[: at.start()] + addition + text[at.start() :], encoding="utf-8")


@pytest.fixture(scope="module")
def with_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to which the page's steps for a dimension are applied."""
    root, copy = PAGE.parents[2], tmp_path_factory.mktemp("copies")
    for package in ("megacore", "kernels"):
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pretrain_gpt.py", copy)
    config = copy / "megacore" / "config"
    before("    schedule:", textwrap.indent(code("degree"), "    "), config / "parallel.py")
    (row,) = re.findall(r"add the row `([^`]+)` to `DIMENSIONS`", PAGE.read_text(encoding="utf-8"))
    before('    Dimension("tp"', f"    {row},\n", config / "dimensions.py")
    return copy


PARSE = """
from megacore.config import Config
from megacore.config.cli import parse_config
import os, sys
os.environ |= {"RANK": "0", "WORLD_SIZE": sys.argv[1], "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
argv = ["--mock-data", "--vocab-size", "64", "--train-iters", "9", *sys.argv[2:]]
config = parse_config(argv, prog="pretrain_gpt.py", description="", kind=Config)
print(config.parallel.degrees, config.training.global_batch_size, config.microbatches)
"""


WRONG = "--copies 2 x --pp 1 x --dp 2 = 4, but the run has 2 processes: use --dp 1, or leave"


@pytest.mark.parametrize(
    ("processes", "flags", "answer"),
    [
        ("2", "--copies 2", "{'pp': 1, 'dp': 1, 'cp': 1, 'copy': 2, 'tp': 1} 1 1"),
        ("8", "--copies 2 --tp 2 --global-batch-size 8", "{'pp': 1, 'dp': 2, 'cp': 1, 'copy': 2, 'tp': 2} 8 4"),
        ("2", "--copies 2 --dp 2", WRONG),
    ],
)
def test_a_new_dimension_makes_a_degree_that_counts(processes: str, flags: str, answer: str, with_copies: Path) -> None:
    command = [sys.executable, "-c", PARSE, processes, *flags.split()]
    environment = os.environ | {"PYTHONPATH": str(with_copies)}
    done = subprocess.run(command, cwd=with_copies, env=environment, capture_output=True, text=True, check=False)
    assert answer in done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_with_the_dimension_of_the_page_trains_as_one_process(with_copies: Path) -> None:
    flags = "--mock-data --vocab-size 64 --preset gpt2-tiny --seq-length 16 --train-iters 3 --log-interval 1"
    losses = {}
    for ranks in (1, 2):
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} pretrain_gpt.py"
        output = with_copies / str(ranks)
        words = [*launch.split(), *flags.split(), "--copies", str(ranks), "--output-dir", str(output)]
        environment = os.environ | {"PYTHONPATH": str(with_copies), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *words], cwd=with_copies, env=environment, check=True)
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses[ranks] = [record["train/loss"] for line in lines if "train/loss" in (record := json.loads(line))]
    assert len(losses[1]) == 3
    assert losses[1] == losses[2]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_as_in(program: str, config: ResolvedConfig) -> Mesh:
    """What a program does on a rank of a run: it is `train` with something of the page's."""
    mesh = build_mesh(config.parallel)
    with mock.patch.object(importlib.import_module("pretrain_gpt"), "run", lambda train: train(config, mesh)):
        exec(compile(program, "a page", "exec"), {"__name__": "__main__"})
    return mesh


def test_the_metric_sink_writes_beside_the_files_of_a_run(beside: Path) -> None:
    write_files(SINK, beside)
    for _ in range(2):  # the second run begins the file anew
        config = make_config((1, 1, 1), beside / "run", num_layers=1, train_iters=4, eval_interval=2, mock_data=True)
        config = replace(config, logging=replace(config.logging, csv=True))
        mesh = run_as_in(files_of(SINK)["pretrain_with_sink.py"], config)
    lines = [line.split() for line in (beside / "run" / "perplexity.txt").read_text().splitlines()]
    records = [json.loads(line) for line in (beside / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {str(record["step"]): record["eval/loss"] for record in records if "eval/loss" in record}
    assert {step: float(value) for step, value in lines} == {k: math.exp(v) for k, v in losses.items()}
    assert [step for step, _ in lines] == ["2", "4"]
    sink: Any = importlib.import_module("my_sink").PerplexityFile()
    second = replace(mesh, world=replace(mesh.world, ranks=(0, 1), rank=1))
    sink.on_evaluate(SimpleNamespace(config=config, mesh=second), {"step": 9, "eval/loss": 1.0})
    assert len((beside / "run" / "perplexity.txt").read_text().splitlines()) == 2


def test_the_products_round_what_they_multiply(beside: Path) -> None:
    (beside / "my_products.py").write_text(code("products"), encoding="utf-8")
    config = make_config((1, 1, 1), beside / "run", num_layers=1, train_iters=1, mock_data=True)
    run_as_in(code("with products"), config)
    products = importlib.import_module("my_products").RoundedProducts()
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    expected = x.to(torch.bfloat16).float() @ weight.to(torch.bfloat16).float().T
    torch.testing.assert_close(products.output(x, weight, None), expected, rtol=1e-6, atol=1e-6)


def test_the_optimizer_is_signum(beside: Path) -> None:
    write_files(EXTEND / "optimizer.md", beside)
    with mock.patch.dict(OPTIMIZERS), mock.patch.dict(OPTIMIZER_CLASSES):
        page = runpy.run_path(str(beside / "signum.py"))
        assert OPTIMIZERS["signum"] is page["SignumConfig"]
    signum, settings = page["Signum"], page["SignumConfig"]
    weight = torch.linspace(-1, 1, 5)
    bucket: Any = None
    run = LocalRun(bucket=bucket, shard_slice=slice(5), master=nn.Parameter(weight.clone(), False), is_matrix=True)
    optimizer = signum([run], settings(), weight_decay=0.1)
    momentum = torch.zeros(5)
    for step in range(3):
        gradient = torch.tensor([1.0, -2.0, 0.5, -0.1, 3.0]) * (-0.9) ** step
        optimizer.update([run], [gradient.clone()], lr=0.01, weight_decay=0.1)
        # Algorithm 2 of the paper, with its default.
        momentum = 0.9 * momentum + 0.1 * gradient
        weight = weight - 0.01 * (torch.sign(momentum) + 0.1 * weight)
    torch.testing.assert_close(run.master, weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.tensors("momentum", [run])[0], momentum, rtol=1e-6, atol=1e-7)


def test_an_optimizer_has_settings_a_section_a_class_and_a_help_text() -> None:
    sections = {name: kind for name, kind in sections_of(Config).items() if issubclass(kind, OptimizerSettings)}
    assert sections == OPTIMIZERS
    assert OPTIMIZER_CLASSES.keys() == set(OPTIMIZERS.values())
    assert [name for name in OPTIMIZERS if f"{name}: " not in field_docs(OptimizerConfig)["optimizer"]] == []


def test_a_refusal_names_the_program_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its --help has the flags of what it has registered; that of pretrain_gpt.py has not."""
    monkeypatch.setattr(sys, "argv", ["/home/me/pretrain_mish.py", "--activation", "mis"])
    program = importlib.import_module("pretrain_gpt")
    monkeypatch.setattr(program, "prepare_signals", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        program.run()
    assert "pretrain_mish.py --help" in capsys.readouterr().err
