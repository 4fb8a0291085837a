"""The law of a ladder recovers known constants and covers what it predicts; a ladder goes on; proposals can be run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from megacore.commands.plan import plan_run
from megacore.ladder.law import PUBLISHED, Law, Point, fit
from tools.ladder import main as ladder
from tools.plan import main as plan

SIZES = np.geomspace(3e4, 6e5, 6)
TINY = "--mock-data --vocab-size 64 --num-layers 1 --seq-length 16 --widths 8 16 24 32 --eval-iters 2 --output-dir out"


def points(law: Law, noise: float, random: np.random.Generator) -> list[Point]:
    sizes = [(n, 20 * n * part) for n in SIZES for part in (0.25, 0.5, 1)]
    return [Point(n, d, law.loss(n, d) * float(np.exp(noise * random.standard_normal()))) for n, d in sizes]


@pytest.mark.parametrize("constants", [PUBLISHED.constants, (2.0, 60.0, 90.0, 0.33, 0.30)])
def test_the_constants_of_a_known_law_are_found(constants: tuple[float, ...]) -> None:
    found = fit(points(Law(constants), 0.0, np.random.default_rng(0)))
    assert found.constants == pytest.approx(constants, rel=0.01)


def test_nine_of_ten_larger_runs_end_within_the_interval() -> None:
    law, inside = Law((2.0, 60.0, 90.0, 0.33, 0.30)), []
    for seed in range(10):
        random = np.random.default_rng(seed)
        found = fit(points(law, 0.002, random))
        for times in (4, 10):
            n = SIZES[-1] * times**0.5
            seen = law.loss(n, 20 * n) * float(np.exp(0.002 * random.standard_normal()))
            low, high = found.interval(n, 20 * n)
            inside.append(low <= seen <= high)
            assert found.loss(n, 20 * n) == pytest.approx(seen, rel=0.02)
    assert sum(inside) >= 18


@pytest.mark.parametrize("operations", [1e18, 1e23])
def test_the_best_sizes_have_the_lowest_loss_of_all_with_as_many_operations(operations: float) -> None:
    n, d = PUBLISHED.best(operations)
    assert 6 * n * d == pytest.approx(operations)
    others = n * np.geomspace(0.25, 4, 801)
    losses = [PUBLISHED.loss(size, operations / 6 / size) for size in others]
    assert others[int(np.argmin(losses))] == pytest.approx(n, rel=0.01)


def test_a_ladder_that_was_stopped_goes_on_and_its_law_proposes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ladder(shlex.split(f"{TINY} --minutes 1")) == 0
    file, log = tmp_path / "out" / "ladder.json", tmp_path / "out" / "log.txt"
    whole = json.loads(file.read_text())
    assert len(whole["points"]) == 12 and "<svg" in (tmp_path / "out" / "ladder.svg").read_text()
    runs = log.read_text().count("done: ")
    file.write_text(json.dumps({**whole, "points": whole["points"][:9], "law": None}))
    assert plan(shlex.split("--budget '1 h on 1 x cpu' --ladder out/ladder.json")) == 2
    assert "out/ladder.json lacks runs" in capsys.readouterr().err
    assert ladder(shlex.split(f"{TINY} --minutes 1")) == 0
    assert json.loads(file.read_text()) == whole and log.read_text().count("done: ") == runs + 3
    assert ladder(shlex.split(f"{TINY} --minutes 1 --lr 0.1")) == 2
    assert plan(shlex.split("--budget '10 min on 1 x cpu' --ladder out/ladder.json --estimate --json")) == 0
    run = json.loads("{" + capsys.readouterr().out.partition("{")[2])
    assert "--mup-base-width 8" in run["command"] and run["loss"]["low"] <= run["loss"]["value"] <= run["loss"]["high"]


@pytest.mark.parametrize("budget", ["8 h on 8 x h100", "500 USD on 16 x a100-80g --tokens-per-parameter 200"])
def test_a_proposal_fits_its_budget_and_the_trainer_takes_its_command(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _, flags = budget.partition(" --")
    assert plan(["--budget", text, *(f"--{flags}".split() if flags else ()), "--estimate", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    amount = run["hours"]["value"] if run["budget"]["unit"] == "h" else run["price"]["value"]
    assert amount == pytest.approx(run["budget"]["amount"], rel=0.01)
    ratio = run["tokens"] / run["parameters"]
    assert 190 < ratio < 210 if flags else 15 < ratio < 30
    words = run["command"].partition("pretrain_gpt.py")[2] + f" --dry-run --cluster {run['budget']['cluster']}"
    assert ("--nnodes 2 --node-rank $NODE_RANK" in run["command"]) == ("16 x" in text)
    assert plan_run(shlex.split(f"{words} --estimate --json"), "pretrain_gpt.py") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] and planned["parameters"]["value"] == run["parameters"]
