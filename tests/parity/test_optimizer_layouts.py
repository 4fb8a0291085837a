"""Every optimizer trains on every layout as on one process, and its state survives a resume on another layout."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, agree, bitwise, make_config, make_trainer, outcome_of

Changes = dict[str, Any]
STEPS = 4
OPTIMIZERS: dict[str, Changes] = {
    "adam": {"optimizer": "adam", "lr": 1e-3},
    "sgd": {"optimizer": "sgd", "sgd_nesterov": True, "lr": 0.1},
    "lamb": {"optimizer": "lamb", "lr": 1e-2},
    "muon": {"optimizer": "muon", "lr": 1e-2},
    "muon heads": {"optimizer": "muon", "lr": 1e-2, "muon_split_qkv": "heads", "num_query_groups": 2},
    "adafactor": {"optimizer": "adafactor", "lr": 1e-2},
    "lion": {"optimizer": "lion", "lr": 1e-4},
}
LAYOUTS: dict[str, tuple[Layout, Changes]] = {
    "tp2": ((2, 1, 1), {}),
    "pp2": ((1, 2, 1), {}),
    "cp2": ((1, 1, 1), {"cp": 2}),
    "z0": ((1, 1, 2), {}),
    "z1": ((1, 1, 2), {"zero_stage": 1}),
    "z2": ((1, 1, 2), {"zero_stage": 2}),
    "z3": ((1, 1, 2), {"zero_stage": 3}),
    "offload": ((1, 1, 2), {"zero_stage": 1, "offload_optimizer": True, "clip_grad": 0.0}),
    "tp2 sp dp2 z1": ((2, 1, 2), {"sequence_parallel": True, "zero_stage": 1}),
    "tp2 pp2 z0": ((2, 2, 1), {}),
    "tp2 dp2 z0": ((2, 1, 2), {}),
    "tp2 dp2 z3": ((2, 1, 2), {"zero_stage": 3}),
    "dp4 z2": ((1, 1, 4), {"zero_stage": 2}),
    "dp4 z3 shards of 2": ((1, 1, 4), {"zero_stage": 3, "zero_shard_size": 2}),
}
EXPERTS: Changes = {"num_experts": 4, "moe_ffn_hidden_size": 16}
LAYOUTS_OF_EXPERTS: dict[str, tuple[Layout, Changes]] = {
    "ep2": ((1, 1, 2), {"ep": 2, "zero_stage": 1}),
    "ep2 edp2": ((1, 1, 4), {"ep": 2, "zero_stage": 2}),
    "tp2 ep2": ((2, 1, 2), {"ep": 2}),
}


def config_of(layout: Layout, directory: str, changes: Changes) -> Any:
    fixed = {"num_layers": 2, "train_iters": STEPS, "micro_batch_size": 1, "lr_warmup_iters": 1}
    return make_config(layout, directory, **{**fixed, **changes})


def losses_and_weights(rank: int, ranks: int, directory: str, cases: list[tuple[Layout, Changes]]) -> list[Outcome]:
    outcomes = []
    for layout, changes in cases:
        config = config_of(layout, directory, changes)
        outcomes.append(outcome_of(make_trainer(config, build_mesh(config.parallel))))
    return outcomes


@functools.cache
def alone(changes: tuple[tuple[str, Any], ...], directory: str) -> Outcome:
    config = config_of((1, 1, 1), directory, dict(changes))
    return outcome_of(make_trainer(config, Mesh(device=torch.device("cpu"), world=ALONE)))


def compare(cases: list[tuple[str, str]], directory: Path, *, experts: bool = False) -> None:
    """Train with optimizers on layouts of as many ranks, and compare with one process.

    Args:
        cases: names of an optimizer and a layout.
        directory: for the runs.
        experts: of a model with experts.
    """
    layouts = LAYOUTS_OF_EXPERTS if experts else LAYOUTS
    cases = [case for case in cases if case[0] != "adafactor" or layouts[case[1]][0][0] == 1]  # needs --tp 1
    if not cases:
        return
    bases = [OPTIMIZERS[optimizer] | (EXPERTS if experts else {}) for optimizer, _ in cases]
    runs = [(layouts[name][0], base | layouts[name][1]) for (_, name), base in zip(cases, bases, strict=True)]
    (ranks,) = {tp * pp * dp * changes.get("cp", 1) for (tp, pp, dp), changes in runs}
    found = run_distributed(losses_and_weights, ranks, str(directory), runs, timeout=180)[0]
    for (optimizer, name), base, outcome in zip(cases, bases, found, strict=True):
        unclipped = {key: value for key, value in layouts[name][1].items() if key == "clip_grad"}
        expected = alone((*base.items(), *unclipped.items()), str(directory))
        # Adafactor's step lies where the gradient was. SGD adds weight decay to it, or to a copy in host memory.
        is_changed = optimizer == "adafactor" or (optimizer == "sgd" and name == "offload")
        agree(outcome, dataclasses.replace(expected, gradients={}) if is_changed else expected)
        if optimizer != "lion":  # the sign of what is zero but for rounding
            weights_agree(outcome, expected)


def weights_agree(found: Outcome, expected: Outcome) -> None:
    for name, weight in expected.final.items():
        if name.endswith("qkv.bias"):  # the gradient of the key's bias is zero but for rounding, which Adam scales up
            continue
        change = (weight - expected.initial[name]).norm()
        error = (found.final[name] - weight).norm()
        assert error <= 2e-3 * change + 1e-7, f"{name}: {error / change}"


def test_what_needs_whole_parameters_trains_as_on_one_process(tmp_path: Path) -> None:
    compare([("lamb", "z1"), ("muon", "tp2"), ("muon", "z0")], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tp2", "pp2"], ["z0", "z1", "z2", "z3"], ["cp2", "offload"]], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_train_as_one_process(optimizer: str, names: list[str], tmp_path: Path) -> None:
    compare([(optimizer, name) for name in names], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["tp2 sp dp2 z1", "tp2 pp2 z0"], ["tp2 dp2 z0", "tp2 dp2 z3"], ["dp4 z2", "dp4 z3 shards of 2"]], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_ranks_train_as_one_process(optimizer: str, names: list[str], tmp_path: Path) -> None:
    compare([(optimizer, name) for name in names], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["ep2"], ["ep2 edp2", "tp2 ep2"]], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_train_as_on_one_process(optimizer: str, names: list[str], tmp_path: Path) -> None:
    compare([(optimizer, name) for name in names], tmp_path, experts=True)


def saved(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> Outcome:
    """Half of the steps, a checkpoint, then the other half."""
    config = config_of(layout, directory, changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    for _ in range(STEPS // 2):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    trainer.saving.finish()
    return rest_of(trainer)


def resumed(rank: int, ranks: int, directory: str, layout: Layout, changes: Changes) -> Outcome:
    config = config_of(layout, directory, changes | {"load": directory})
    return rest_of(make_trainer(config, build_mesh(config.parallel)))


def rest_of(trainer: Any) -> Outcome:
    losses, norms = [], []
    for _ in range(STEPS // 2):
        result = trainer.train_step(next(trainer.batches))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return Outcome(losses, norms, {}, {}, {}, {})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_continues_bit_for_bit_and_on_another_layout(optimizer: str, tmp_path: Path) -> None:
    base = OPTIMIZERS[optimizer]
    layout, changes = LAYOUTS["tp2 sp dp2 z1" if optimizer != "adafactor" else "dp4 z2"]
    expected = run_distributed(saved, 4, str(tmp_path), layout, base | changes)[0]
    bitwise(run_distributed(resumed, 4, str(tmp_path), layout, base | changes)[0], expected)
    for name, ranks in (("z3", 2), ("pp2", 2)):
        other, changed = LAYOUTS[name]
        found = run_distributed(resumed, ranks, str(tmp_path), other, base | changed)[0]
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
