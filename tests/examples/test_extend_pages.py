"""The worked examples of docs/extend/ run as they stand there, and do what the pages say."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.config import Config, OptimizerConfig
from megacore.config.cli import parse_config
from megacore.config.fields import field_infos
from megacore.config.lr_styles import register_lr_style
from megacore.config.optimizers import OptimizerSettings, SGDConfig
from megacore.data.gpt.build import vocabulary_size
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import ConfigError
from megacore.layers.activations import register_activation
from megacore.optim.lr_schedules import learning_rate
from megacore.optim.optimizers import OPTIMIZER_CLASSES, register_optimizer
from megacore.optim.sgd import SGD
from megacore.parallel.mesh import build_mesh
from megacore.verify.command import main as verify
from tests.distributed import run_distributed
from tests.pages import ROOT, commands_of, files_of, write_files
from tools import convert_checkpoint, generate, perplexity

PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "extend").glob("*.md")) if files_of(path)}
SUBJECTS = {
    "activation", "optimizer", "attention", "block", "model-family", "loss", "dataset", "schedule", "sink", "kernel",
}  # fmt: skip
STEPS = 10


def losses_in(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["train/loss"] for line in lines if "train/loss" in (record := json.loads(line))]


def in_this_process(rank: int, ranks: int, folder: str, words: list[str]) -> list[float]:
    """Run a page's program as `python PROGRAM ...` does, without its start and its end."""
    program, *flags = words
    output = Path(folder, "run")

    def run(train: Any = None) -> None:
        argv = [*flags, "--output-dir", str(output)]
        config = parse_config(argv, prog=program, description="", kind=Config, vocabulary=vocabulary_size)
        (train or pretrain_gpt.train)(config, build_mesh(config.parallel))

    sys.path.insert(0, folder)
    pretrain_gpt = importlib.import_module("pretrain_gpt")
    with mock.patch.object(pretrain_gpt, "run", run):
        runpy.run_path(str(Path(folder, program)), run_name="__main__")
    return losses_in(output)


def all_trained(rank: int, ranks: int, folder: str) -> dict[str, list[float]]:
    """The losses of every page's first training, which is in one process."""
    losses = {}
    for subject in sorted(SUBJECTS):
        place = Path(folder, subject)
        place.mkdir()
        write_files(PAGES[subject], place)
        words = next(words for words in commands_of(PAGES[subject]) if words[0] == "python" and "pretrain" in words[1])
        losses[subject] = in_this_process(rank, ranks, str(place), words[1:])
    return losses


def test_every_subject_has_a_page_with_an_example() -> None:
    assert PAGES.keys() == SUBJECTS
    overview = (ROOT / "docs" / "extend" / "extending.md").read_text(encoding="utf-8")
    assert [subject for subject in SUBJECTS if f"({subject}.md)" not in overview] == []


def test_the_examples_train(tmp_path: Path) -> None:
    (losses,) = run_distributed(all_trained, 1, str(tmp_path), init=False)
    assert {subject: len(found) for subject, found in losses.items()} == dict.fromkeys(sorted(SUBJECTS), STEPS)
    assert [subject for subject, found in losses.items() if not found[-1] < found[0]] == []
    lines = [line.split() for line in (tmp_path / "sink" / "run" / "perplexity.txt").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [5, 10]
    assert all(1 < float(perplexity) < 2 * 512 for _, perplexity in lines)


def run_command(words: list[str], folder: Path, output: Path) -> str:
    """Run a command of a page in a folder, with the programs of this environment; what it prints."""
    variables = []
    while words and "=" in words[0]:
        variables.append(words[0])
        words = words[1:]
    launcher = ["-m", "torch.distributed.run", "--standalone"] if words[0] == "torchrun" else []
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in (*launcher, *words[1:])]
    if any("pretrain" in word for word in words) and not any("tools" in word for word in words):
        words = [*words, "--output-dir", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= dict(variable.split("=", 1) for variable in variables)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("subject", sorted(SUBJECTS))
def test_the_commands_run_and_all_layouts_print_the_same_losses(subject: str, tmp_path: Path) -> None:
    write_files(PAGES[subject], tmp_path)
    losses: list[list[float]] = []
    for number, words in enumerate(commands_of(PAGES[subject])):
        output = tmp_path / f"run{number}"
        run_command(words, tmp_path, output)
        if (output / "metrics.jsonl").exists() and "--schedule-csv" not in words:
            losses.append(losses_in(output))
    assert len(losses) == 2
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if subject == "optimizer" else 2e-5)


def of_tools(rank: int, ranks: int, folder: str) -> tuple[list[str], list[int]]:
    """What tools say of a checkpoint of the page's program, with it and without; and their exit statuses."""
    train_tokenizer([(ROOT / "README.md").read_text()], "bpe", 300).save(Path(folder, "tokenizer"))
    flags = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
    words = ["pretrain_sigmoid.py", *flags, "--mock-data", "--global-batch-size", "8", "--train-iters", "3"]
    in_this_process(0, 1, folder, [*words, "--tokenizer", str(Path(folder, "tokenizer")), "--lr", "0.01"])
    program, run = str(Path(folder, "pretrain_sigmoid.py")), str(Path(folder, "run"))
    Path(without := str(Path(folder, "empty.py"))).touch()
    scored = ["--input", str(ROOT / "Makefile"), "--checkpoint", run, "--json"]
    export = ["--from", "megacore", "--to", "hf", "--input", run, "--output", str(Path(folder, "hf"))]
    of_run = ["--checkpoint", run, "--prompt", "The", "--max-new-tokens", "2", "--temperature", "0"]
    score, convert, say = perplexity.main, convert_checkpoint.main, generate.main
    calls: list[tuple[Any, list[str]]] = [
        (score, scored),
        (convert, export),
        (convert, [*export[:3], "megatron", *export[4:]]),
        (score, [*scored, "--program", program]),
        (say, [*of_run, "--program", program]),
        (say, [*of_run, "--program", str(ROOT / "README.md")]),
        (convert, [*export, "--program", program]),
        (verify, [program, *flags, "--dp", "1"]),
        *(
            (main, [*words, "--program", without])
            for main, words in ((score, scored), (say, of_run), (convert, export))
        ),
    ]
    said, statuses = list[str](), list[int]()
    for main, argv in calls:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            statuses.append(main(argv))
        said.append(out.getvalue() + err.getvalue())
    return said, statuses


def test_tools_take_the_program_that_trained(tmp_path: Path) -> None:
    write_files(PAGES["attention"], tmp_path)
    ((said, statuses),) = run_distributed(of_tools, 1, str(tmp_path), init=False)
    assert statuses == [2, 2, 2, 0, 0, 2, 2, 0, 2, 2, 2], said
    for refused in said[:3]:
        assert "was trained by a program that describes its own layers: " in refused
    assert "use --to hf or dcp instead of megatron, with --program FILE.py" in said[2]
    assert json.loads(said[3])["nats"] > 0
    assert said[4].startswith("The")
    assert "README.md is no Python file: give the file that trained the model" in said[5]
    assert "the two models do not compute the same" in said[6]
    assert "SigmoidAttention" not in said[7]
    for refused in said[8:]:
        assert f"--program {tmp_path / 'empty.py'} has no function `layers`: give that file" in refused


def refusals_of(rank: int, ranks: int, folder: str, program: str, command_lines: list[str]) -> list[str]:
    """What a page's program says to each."""
    messages = []
    for flags in command_lines:
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
            try:
                in_this_process(rank, ranks, folder, [program, *flags.split()])
            except ConfigError as refused:  # by what knows the layers
                print(refused, file=said)
        messages.append(said.getvalue())
    return messages


def test_what_a_page_adds_is_refused_by_name_where_it_cannot_be(tmp_path: Path) -> None:
    """What an attention does not support, and flags of a registered optimizer, which are checked like all others."""
    write_files(PAGES["attention"], tmp_path)
    run = "--preset gpt2-tiny --mock-data --train-iters 1 --global-batch-size 8"
    asked = ["--reproducible", "--recompute selective", "--attention-dropout 0.1", "--position-embedding-type alibi"]
    asked += ["--attention-multiplier 2.0"]
    given = (str(tmp_path), "pretrain_sigmoid.py", [" ".join([run, *asked])])
    ((said,),) = run_distributed(refusals_of, 1, *given, init=False)
    assert [flag for flag in asked if f"{flag}: SigmoidAttention does not have it" not in said] == []
    given = (str(tmp_path), "pretrain_sigmoid.py", [f"{run} --cp 2 --attention-dropout 0"])
    ((of_cp,), _) = run_distributed(refusals_of, 2, *given, init=False)
    assert "--cp 2: SigmoidAttention does not have it: use --cp 1" in of_cp

    write_files(PAGES["optimizer"], tmp_path)
    wrong, idle = f"{run} --optimizer signum --signum-momentum 1.5", f"{run} --signum-momentum 0.5"
    given = (str(tmp_path), "pretrain_signum.py", [wrong, idle])
    ((of_wrong, of_idle),) = run_distributed(refusals_of, 1, *given, init=False)
    assert "--signum-momentum 1.5 must be at least 0 and below 1" in of_wrong
    assert "--signum-momentum 0.5 has no effect with --optimizer adamw" in of_idle
    assert "signum" not in field_infos(OptimizerConfig)["optimizer"].choices, "of another process"


def formulas(rank: int, ranks: int, folder: str) -> None:
    """What the pages' functions compute, against plain torch."""
    sys.path.insert(0, folder)
    x = torch.linspace(-6, 6, 301)
    quick = runpy.run_path(str(Path(folder, "quick_gelu.py")))["quick_gelu"]
    ours = x.clone().requires_grad_()
    quick(ours).sum().backward()
    plain = x.double().requires_grad_()
    (plain * torch.sigmoid(1.702 * plain)).sum().backward()
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=1e-5, atol=1e-6)
    runpy.run_path(str(Path(folder, "pretrain_cosine2.py")), run_name="cosine2")
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="cosine2", lr_warmup_iters=10)
    for step in (10, 33, 90, 110, 200):
        progress = min((step - 10) / 100, 1.0)
        expected = 0.2 + 0.8 * (0.5 + 0.5 * math.cos(math.pi * progress)) ** 2
        assert learning_rate(step, config, train_iters=110) == pytest.approx(expected, abs=1e-12)


def test_the_functions_are_their_formulas(tmp_path: Path) -> None:
    for subject in ("kernel", "schedule"):
        write_files(PAGES[subject], tmp_path)
    run_distributed(formulas, 1, str(tmp_path), init=False)


class OfSGD(SGDConfig):
    """Not a section: a subclass of one."""


def test_what_cannot_be_registered_is_refused_by_name() -> None:
    wrong: list[tuple[Any, tuple[Any, ...], str]] = [
        (register_optimizer, ("sgd", OfSGD, SGD), r"the name 'sgd' is taken.*whose only base is OptimizerSettings"),
        (register_optimizer, ("My-Own", SGDConfig, SGD), "must be a word of lower-case letters"),
        (partial(register_activation, kept=1), ("relu", torch.tanh), "the name 'relu' is taken"),
        (register_lr_style, ("rising", lambda x: x), r"the share left is 0\.0 at 0 and 1\.0 at 1: it must be 1 and 0"),
        (register_lr_style, ("cosine", lambda x: 1.0 - x), "the name is taken"),
    ]
    for register, given, said in wrong:
        with pytest.raises(ValueError, match=said):
            register(*given)
    assert issubclass(SGDConfig, OptimizerSettings)
    assert OfSGD not in OPTIMIZER_CLASSES
