"""What `--retune` tries next: a few measured steps find what is fast on a machine that the planner does not know."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.commands.plan import plan_run
from megacore.config import ResolvedConfig, violations
from megacore.ladder.law import PUBLISHED, Law, Point, fit
from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS, Cluster
from megacore.plan.next_layout import Measured, layouts_of_fewer, next_layout
from megacore.plan.row_fit import with_constants
from megacore.plan.search import search
from megacore.plan.search_space import Constraints
from megacore.plan.step_time import step_seconds
from megacore.survive.layouts import chosen_before, layout_for
from tests.parity.runs import Layout, make_config
from tools.ladder import main as ladder
from tools.plan import main as plan

# Logarithms of the factors by which the machine is not as the planner has it, in the order of row_fit.CONSTANTS.
SLOW_LINKS, SLOW_MEMORY = (0.0, 0.0, -1.5, 0.0, 1.5, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
MACHINES = [(SLOW_LINKS, {}), pytest.param(SLOW_MEMORY, {"reproducible": True}, marks=pytest.mark.slow)]


def seconds(config: ResolvedConfig, cluster: Cluster = CLUSTERS["laptop"]) -> float:
    return step_seconds(config, outline(config), cluster)


@pytest.mark.parametrize(("machine", "changes"), MACHINES)
def test_few_trials_find_what_a_search_of_the_machine_itself_finds(
    machine: tuple[float, ...], changes: Mapping[str, Any], tmp_path: Path
) -> None:
    config = make_config((2, 1, 1), tmp_path, micro_batch_size=1, global_batch_size=4, num_layers=2, **changes)
    cluster = with_constants(CLUSTERS["laptop"], machine, 1.0)
    best = search(config, cluster, Constraints(world_size=2, fixed=changes and {"micro_batch_size": 1})).layouts[0]

    measured = [Measured(config=config, seconds=seconds(config, cluster))]
    while len(measured) < 6 and (found := next_layout(measured, device_name="cpu")) is not None:
        measured.append(Measured(config=found.config, seconds=seconds(found.config, cluster)))
    for trained in (one.config.training for one in measured):
        assert (trained.global_batch_size, trained.micro_batch_size if changes else 1) == (4, 1)
    assert min(one.seconds for one in measured) <= best.seconds / 0.97


@pytest.mark.parametrize(("ranks", "plain"), [(8, (2, 2, 2)), (7, (2, 2, 1)), (3, (2, 1, 1)), (1, (1, 1, 1))])
def test_fewer_ranks_get_the_fastest_layout(ranks: int, plain: Layout, tmp_path: Path) -> None:
    """Of all degrees, one by one; without the planner as many ranks as share a batch of 4, split as before."""
    config = make_config((2, 2, 2), tmp_path, micro_batch_size=1, global_batch_size=4, zero_stage=1)
    assert [(layout_for(config, ranks) or {})[name] for name in ("tp", "pp", "dp")] == list(plain)
    *_, values = layouts_of_fewer(config, ranks, device_name="cpu", fixed={"schedule": "1f1b"})
    found, degrees = config.with_values(values), itertools.product((1, 2, 4), range(1, 5), (1, 2, 4))
    others = [found.with_values({"tp": t, "pp": p, "dp": d, "sequence_parallel": False}) for t, p, d in degrees]
    valid = [one for one in others if one.parallel.ranks <= ranks and not violations(one, one.parallel.ranks)]
    assert found.parallel.ranks <= ranks and (found.training.global_batch_size, found.parallel.zero_stage) == (4, 1)
    assert seconds(found) <= min(map(seconds, valid)) / 0.97


def test_all_ranks_that_are_left_train(tmp_path: Path) -> None:
    """Without what so few cannot hold."""
    given: Mapping[str, Any] = {"schedule": "interleaved", "virtual_stages": 2, "sequence_parallel": True}
    given = {**given, "async_tp": True, "zero_stage": 1, "zero_shard_size": 2}
    config = make_config((2, 2, 2), tmp_path, micro_batch_size=1, global_batch_size=24, num_layers=8, **given)
    for ranks in (6, 3, 1):
        planned = next(layouts_of_fewer(config, ranks, device_name="cpu", fixed=given))
        for values in (planned, layout_for(config, ranks) or {}):
            assert not violations(config.with_values(values), ranks)


DAMAGED = ("null", "[1]", '{"tp": null}', '{"tp": [2]}', '{"sequence_parallel": 3}')


def test_what_retune_has_chosen_is_read_from_a_damaged_file(tmp_path: Path) -> None:
    config = make_config((2, 1, 2), tmp_path, micro_batch_size=1, global_batch_size=4)
    for values in (*DAMAGED, '{"tp": 1, "dp": 4, "train_iters": 3}'):
        rows = b'{"event": "retune", "values": %b}\n{"event": "retune", "val{}\n\0\n\xff\n' % values.encode()
        Path(config.training.output_dir, "events.jsonl").write_bytes(rows + b"[" * 9999)
        assert chosen_before(config, {}) == (None if values in DAMAGED else {"tp": 1, "dp": 4})


# ---- the law of a ladder


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
