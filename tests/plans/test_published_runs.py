"""The planner against measured runs of other trainers: parameters, FLOPs, memory and seconds (see published.py)."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacore.models.outline import outline
from megacore.pipeline.layer_time import layer_seconds
from megacore.plan.checked import APART, PUBLISHED, Errors, kind_of
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB
from megacore.plan.planner import step_flops
from megacore.plan.software import MEGACORE, Software
from megacore.plan.stage_time import block_passes, speed_of
from tests.plans.published import (
    A100,
    BLOOM,
    Run,
    blackwell_runs,
    held_out_runs,
    memory_runs,
    own_runs,
    single_node_runs,
    timed_runs,
)
from tests.plans.table import Checked, by_model, checked, cluster_lines, median_error, memory_lines, regret
from tests.unit.refusals import parse

ROOT = Path(__file__).parents[2]
# Models with one run or two of one layout: benchmarks/planner.py prints their errors, and they are bounded loosely.
SWEEPS = ("megatron-3.6B", "megatron-18.4B")


@pytest.fixture(scope="module")
def timed() -> list[Checked]:
    """Every run with a time, and its prediction."""
    return list(checked(timed_runs()))


def test_parameters_and_flops_of_bloom_are_exact() -> None:
    plan = BLOOM.plan()
    assert plan.parameters == 176_247_271_424
    hidden, layers, vocabulary, s = 14336, 70, 250_880, 2048
    by_hand = 96 * 2048 * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocabulary / (16 * layers * hidden))
    flops = step_flops(BLOOM.config, attention="full", hardware=True)
    assert flops == pytest.approx(by_hand, rel=1e-12)
    assert flops / 104.70 / 384 / 1e12 == pytest.approx(149.76, abs=0.005)  # as its log says


def test_selective_recomputation_repeats_linear_attention() -> None:
    heads = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
    words = f"--preset gpt2-tiny --position-embedding-type rope --layer-pattern l {heads} --recompute selective"
    config = parse(*words.split(), "--mock-data", "--train-iters", "1", "--vocab-size", "512", planned=True)
    model, hardware = (step_flops(config, attention="full", hardware=again) for again in (False, True))
    tokens = config.training.global_batch_size * config.data.seq_length
    assert hardware - model == tokens * config.model.num_layers * (6 * 32 * 8 + 2 * 64 * 4)


def test_linear_attention_takes_no_less_than_its_products_in_fp32() -> None:
    words = "--preset gpt2-tiny --position-embedding-type rope --layer-pattern l --precision bf16 --vocab-size 512"
    config, cluster = parse(*words.split(), "--mock-data", "--train-iters", "1", planned=True), CLUSTERS["h100"]
    passes = block_passes(config, outline(config)[1], speed_of(config, cluster, "expected"), again=False)
    products = config.training.micro_batch_size * config.data.seq_length * 32 * 2**18  # 32 heads of 128, chunks of 64
    assert passes.forward.attention > products / cluster.peaks["fp32"]
    assert layer_seconds(config, outline(config)[1]) > 3 * products / A100.peaks["fp32"]  # by which stages are balanced


@pytest.mark.parametrize("software", [None, MEGACORE], ids=["its own", "megacore"])
@pytest.mark.parametrize("model", SWEEPS)
def test_every_layout_of_a_model(model: str, software: Software | None, timed: list[Checked]) -> None:
    """And as if megacore ran it, the command line's default: layouts are ranked alike."""
    rows = by_model(timed)[model]
    if software is not None:
        rows = list(checked(replace(row.run, software=software) for row in rows))
    assert median_error(rows) <= 0.08
    assert regret(rows) <= 0.05


def test_most_measured_times_are_in_the_predicted_range(timed: list[Checked]) -> None:
    assert sum(row.is_in_range for row in timed) >= 0.75 * len(timed)
    spans = [row.high / row.low for row in timed]
    assert statistics.median(spans) < 1.5  # and the ranges say something


def test_models_that_were_measured_once(timed: list[Checked]) -> None:
    of_models = [median_error(rows) for model, rows in by_model(timed).items() if model not in SWEEPS]
    assert statistics.median(of_models) <= 0.08
    assert max(of_models) <= 0.15


def test_dense_models_on_gb200() -> None:
    """With the efficiency of Hopper they were planned 23 to 30 % too fast."""
    rows = list(checked(blackwell_runs()))
    assert all(row.is_in_range for row in rows)
    assert max(abs(row.error) for row in rows) <= 0.08
    assert min(row.error for row in rows) < 0 < max(row.error for row in rows)


@pytest.mark.slow
def test_held_out_runs() -> None:
    rows = list(checked(held_out_runs()))
    assert len(rows) == 25
    assert median_error(rows) <= 0.10
    assert [row.run.flags for row in rows if abs(row.error) > 0.20] == []


def first_is_quick(runs: Iterable[Run]) -> list[Any]:
    """The runs, whose memory takes seconds to trace: all but the first are slow."""
    return [pytest.param(run, marks=[pytest.mark.slow] * (number > 0)) for number, run in enumerate(runs)]


@pytest.mark.parametrize("run", first_is_quick(own_runs()), ids=lambda run: run.flags.split()[1])
def test_one_h100(run: Run) -> None:
    """The time within the error of other runs; the bytes of tensors at the peak within 1 %."""
    plan = run.plan()
    assert run.seconds is not None and abs(plan.time.seconds / run.seconds - 1) <= 0.16
    assert plan.fullest.expected_tensors / GIB == pytest.approx(run.gib, rel=0.01)


@pytest.mark.parametrize("hidden", [1024, 2048])
def test_small_models_on_one_node(hidden: int) -> None:
    """Those whose launches take as long as their operators; a twelfth of the rows."""
    rows = list(checked(run for run in single_node_runs(every=12) if f"hidden {hidden}," in run.model))
    assert len(rows) > 20
    assert median_error(rows) <= 0.10


@pytest.mark.parametrize("run", first_is_quick(memory_runs()), ids=lambda run: run.model)
def test_memory(run: Run) -> None:
    assert run.plan().fullest.expected / GIB == pytest.approx(run.gib, rel=0.10)


@pytest.mark.slow
def test_the_table_of_memory_is_in_the_reports() -> None:
    page = (ROOT / "docs/reports/measured.md").read_text(encoding="utf-8")
    assert "\n".join(memory_lines()) in page


def test_the_table_of_clusters_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/planner.md").read_text(encoding="utf-8")
    assert "\n".join(cluster_lines()) in page


@pytest.mark.slow
def test_the_errors_of_published_steps() -> None:
    """Those that ranges have, and from which difference on two layouts can be told apart."""
    rows = list(checked([*timed_runs(), *blackwell_runs(), *held_out_runs(), *single_node_runs()]))
    errors, competing = defaultdict[tuple[str, str, str], list[tuple[float, int]]](list), defaultdict[Any, Any](list)
    for row in rows:
        config, cluster = row.run.config, row.run.computed_by
        ratio = row.measured / row.seconds
        errors[cluster.chip, cluster.software.name, kind_of(config, cluster)].append((ratio, config.parallel.ranks))
        if cluster.chip == "a100":
            batch = config.training.global_batch_size, config.data.seq_length
            competing[row.run.model, config.parallel.ranks, *batch].append((row.seconds, row.measured))
    of_today = dict[Any, Errors]()
    for key, found in errors.items():
        ratios, ranks = sorted(ratio for ratio, _ in found), max(ranks for _, ranks in found)
        tail = int(0.05 * len(ratios)) if len(ratios) >= 20 else 0
        ends = ratios[tail], ratios[min(int(0.95 * len(ratios)), len(ratios) - 1)] if tail else ratios[-1]
        of_today[key] = Errors(len(found), ranks, *(round(end, 2) for end in ends))
    assert of_today == PUBLISHED
    right = {True: list[bool](), False: list[bool]()}
    for sets in competing.values():
        for (fast, first), (slow, second) in itertools.combinations(sorted(sets), 2):
            right[slow >= (1 + APART) * fast].append(second > first)
    assert statistics.fmean(right[True]) >= 0.95 and statistics.fmean(right[False]) <= 0.7
