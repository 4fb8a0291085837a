"""The pages of docs/reference/ that are written from the code, or that show how to read what a run has written, and
what pages say of settings."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import megacore
from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.commands.plan import plan_tool
from megacore.config import Config, ResolvedConfig, sections_of
from megacore.config.bert import BertConfig
from megacore.config.dry_run_flags import DRY_RUN_FLAGS
from megacore.config.fields import field_docs
from megacore.config.flags import flags_by_name
from megacore.config.optimizer import OptimizerConfig
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings
from megacore.config.other_trainers import other_trainers
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.zero.local_segments import LocalRun
from tests.distributed import run_distributed
from tests.pages import files_of, write_files
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import make_config, make_trainer
from tests.unit import data_bytes
from tools import references

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
FORMATS = (REFERENCE / "formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("part", references.PARTS, ids=" ".join)
def test_what_comes_from_the_code_is_current(part: tuple[str, str]) -> None:
    if part[1] == "tools" and sys.version_info >= (3, 13):
        pytest.skip("argparse prints help in another form from Python 3.13 on")
    assert references.bring(part, writes=False), f"{part}: run python tools/references.py"


def test_every_tool_is_in_the_reference_or_left_out_for_a_reason() -> None:
    named = [name for names in references.LISTED.values() for name in names] + list(references.UNLISTED)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
    page = (REFERENCE / "tools.md").read_text(encoding="utf-8")
    assert [script for script in references.console_scripts().values() if f"`{script}`" not in page] == []
    examples = re.findall(r"^### (\w+)\n((?:(?!^###).*\n)*)", page, re.MULTILINE)
    assert [name for name, text in examples if f"tools/{name}.py" not in text] == []


def test_every_name_of_the_api_imports_and_is_documented() -> None:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(megacore[\w.]*)` \| (stable|provisional) \|", page, re.MULTILINE)
    assert len(names) > 10
    for name, _ in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name
    assert {name for name, _ in names} >= {f"megacore.{name}" for name in megacore.__all__}
    assert set(megacore.__all__) <= set(dir(megacore))
    fresh = "import sys, megacore; sys.exit('torch' in sys.modules or hasattr(megacore, 'trainer'))"
    subprocess.run([sys.executable, "-c", fresh], cwd=ROOT, check=True)


def trained_from_python(rank: int, ranks: int, folder: str) -> list[float]:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- tested: python -->\n```python\n(.*?)```", page, re.DOTALL)
    assert text.count("\n") <= 12, "ten lines, and two empty ones"
    os.chdir(folder)  # of a process of the test
    defined: dict[str, Any] = {}
    exec(compile(text, "api.md", "exec"), defined)
    losses: list[float] = defined["run"].losses
    return losses


def test_a_gpt_trains_from_python_on_one_process_and_two(tmp_path: Path) -> None:
    (alone,) = run_distributed(trained_from_python, 1, str(tmp_path), init=False)
    assert len(alone) == 10
    assert alone[-1] < alone[0]
    for losses in run_distributed(trained_from_python, 2, str(tmp_path), init=False):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_wrong_keywords_are_refused_together_as_flags_are(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="did you mean --num-layers") as refused:
        megacore.pretrain_gpt(num_layerz=2, hidden_size=65, num_attention_heads=4, mock_data=True, vocab_size=8)
    assert "--hidden-size 65 must be a multiple of --num-attention-heads 4: use" in str(refused.value)
    assert "--train-iters is missing" in str(refused.value)
    with pytest.raises(ValueError, match=r"dry_run is not for Python.*\n.*lr is a dict: give a number"):
        megacore.pretrain_gpt(dry_run=True, lr={})  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is handler


def snippet(name: str) -> dict[str, Any]:
    """What a block of code of formats.md defines, where megacore cannot be imported."""
    (text,) = re.findall(rf"<!-- tested: {name} -->\n```python\n(.*?)```", FORMATS, re.DOTALL)
    assert "megacore" not in text
    known: dict[str, Any] = {}
    exec(compile(text, f"formats.md: {name}", "exec"), known)
    return known


def test_the_snippets_read_what_a_run_writes(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path / "run", num_layers=2, train_iters=3, log_interval=1, trace=True)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.run()
    weights = trainer.parameters
    checkpoint = tmp_path / "run" / "step_00000003"
    read_tensor = snippet("checkpoint")["read_tensor"]
    for name, parameter in weights.items():
        whole = parameter.spec.unpadded(parameter.detach()).numpy()
        assert np.array_equal(read_tensor(checkpoint, name), whole), name
    losses = snippet("metrics")["losses"](tmp_path / "run")
    assert list(losses) == [1, 2, 3]
    assert all(np.isfinite(loss) for loss in losses.values())
    trace = json.loads((tmp_path / "run" / "trace.json").read_text(encoding="utf-8"))
    assert {"schedule", "virtual_stages", "microbatches"} <= trace["otherData"].keys()
    kinds = {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"pass", "update", "compute"} <= kinds
    assert all(
        {"step", "stage", "microbatch"} <= e["args"].keys() for e in trace["traceEvents"] if e.get("cat") == "compute"
    )


def test_the_snippet_reads_a_dataset(tmp_path: Path) -> None:
    sequences = [[1, 2, 3], [4], [5, 6]]
    few = data_bytes.write(tmp_path / "few", [[tokens] for tokens in sequences], code=4)
    found = snippet("dataset")["read_sequences"](str(few))
    assert [tokens.tolist() for tokens in found] == sequences


def test_the_keys_of_a_plan_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    words = "pretrain_gpt.py --preset gpt2-tiny --mock-data --train-iters 9 --tp 2 --cluster laptop --tokens 1e9 --json"
    assert plan_tool(words.split()) == 0
    plan = json.loads(capsys.readouterr().out)
    table = FORMATS[FORMATS.index("## Plans") :]
    shown: dict[str, set[str]] = {}  # by what they are of
    for line in table.splitlines():
        if line.startswith("| `"):
            _, keys, of, *_ = line.split("|")
            for kind in re.split(r", ", of.strip()):
                shown.setdefault(kind, set()).update(re.findall(r"`(\w+)`", keys))
    of_plan = shown["both"] | shown["plan"]
    assert plan.keys() <= of_plan
    of_offloading = {"host_capacity", "node_host"}
    assert of_plan - plan.keys() == {"active_parameters", "suggestions", *of_offloading}
    assert plan_tool([*words.replace("--tp 2", "--world-size 2 --search").split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == (shown["both"] | shown["search"]) - of_offloading
    assert found["layouts"][0].keys() == shown["each layout"] - of_offloading
    assert plan["parameters"].keys() == {"value", "unit", "origin", "low", "high"}


# ---- metrics ---------------------------------------------------------------------------------------------------------

PAGE = REFERENCE / "metrics.md"
SHORT: dict[str, Any] = {"train_iters": 1, "eval_interval": 1, "eval_iters": 1, "num_layers": 1}


def written(directory: Path) -> set[str]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {re.sub(r"/block_\d+/", "/block_N/", key) for line in lines for key in json.loads(line)}


def test_every_metric_is_documented_and_every_documented_one_written(tmp_path: Path) -> None:
    mesh = Mesh(device=torch.device("cpu"))
    guards = {"on_spike": "rollback", "save_interval": 1, "clip_grad_adaptive": True, "gradient_noise_interval": 1}
    gpt = make_config((1, 1, 1), tmp_path / "gpt", precision="fp16", peak_tflops=1.0, **guards, **SHORT)
    make_trainer(gpt, mesh).run()
    make_bert_trainer(make_bert_config((1, 1, 1), tmp_path / "bert", **SHORT), mesh).run()
    experts: dict[str, Any] = {"num_experts": 2, "moe_router_topk": 2, "moe_expert_capacity_factor": 1.0}
    experts |= {"disable_bias_linear": True, "activation": "swiglu"}
    make_trainer(make_config((1, 1, 1), tmp_path / "experts", **experts, **SHORT), mesh).run()
    of_several_ranks = {"watch/replicas_checked_step"}  # tests/parallel/test_replicas.py reads it
    found = set.union(*(written(tmp_path / model) for model in ("gpt", "bert", "experts")))
    section = PAGE.read_text(encoding="utf-8").partition("## Names and units")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| ([a-z_]+(?:/[a-z_N]+){0,2}) \|", section, re.MULTILINE))
    assert found | of_several_ranks == {"key"} ^ documented


def test_the_documentation_names_every_table_of_a_file() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    sentence = re.search(r"A file has the tables ([^:]*), and its keys", page)
    assert sentence is not None
    assert re.findall(r"`\[(\w+)\]`", sentence[1]) == list(sections_of(BertConfig))


def test_the_page_for_megatron_users_names_flags_that_exist_and_help_answers_for_every_one() -> None:
    page = (ROOT / "docs" / "guides" / "coming-from-megatron.md").read_text()
    named = set(re.findall(r"--[a-zA-Z][a-zA-Z0-9-]+(?![\w*-])", page))
    ours = flags_by_name(BertConfig).keys()
    dropped = REPLACED.keys() | NOT_YET.keys()
    assert all(other_trainers().help_of(flag) for flag in dropped | FOREIGN.keys())
    of_launchers = {"--nproc-per-node", "--processes", "--help"}
    assert named <= dropped | ours | FOREIGN.keys() | DRY_RUN_FLAGS.keys() | of_launchers | {"--flag", "--no-flag"}
    becomes = {flag: foreign.becomes for flag, foreign in {**FOREIGN, **LISTS}.items()}
    for table in (REPLACED, NOT_YET, becomes):
        for flag, text in table.items():
            assert set(re.findall(r"--[a-z0-9-]+", text)) <= ours, flag


# ---- docs/extend -----------------------------------------------------------------------------------------------------

EXTEND = Path(__file__).parents[2] / "docs" / "extend"
EXTENDING, SINK = EXTEND / "extending.md", EXTEND / "sink.md"


def code(name: str) -> str:
    """The page's block of this name."""
    pattern = rf"<!-- tested: {name} -->\n *```python\n(.*?)\n *```\n"
    (block,) = re.findall(pattern, EXTENDING.read_text(encoding="utf-8"), re.DOTALL)
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
    root, copy = EXTENDING.parents[2], tmp_path_factory.mktemp("copies")
    for package in ("megacore", "kernels"):
        shutil.copytree(root / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pretrain_gpt.py", copy)
    config = copy / "megacore" / "config"
    before("    schedule:", textwrap.indent(code("degree"), "    "), config / "parallel.py")
    (row,) = re.findall(r"add the row `([^`]+)` to `DIMENSIONS`", EXTENDING.read_text(encoding="utf-8"))
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


# ---- the code tour ---------------------------------------------------------------------------------------------------

ANCHOR = re.compile(r"^\d+\. \[`(?P<path>[\w/.]+)`\]\(\.\./\.\./(?P=path)\) `(?P<symbol>[\w.]+)`")
STOPS = [
    match for line in (ROOT / "docs/explain/code-tour.md").read_text().splitlines() if (match := ANCHOR.match(line))
]
FILES = [stop["path"] for stop in STOPS]


def test_the_tour_has_ten_files_at_most() -> None:
    assert 5 < len(STOPS) <= 10
    assert len(set(FILES)) == len(FILES)


@pytest.mark.parametrize("stop", STOPS, ids=FILES)
def test_a_stop_names_what_its_file_defines(stop: re.Match[str]) -> None:
    node: ast.Module | ast.stmt = ast.parse((ROOT / stop["path"]).read_text())
    for name in stop["symbol"].split("."):
        assert isinstance(node, ast.Module | ast.ClassDef)
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
