"""tools/plan.py --search: which layouts it lists, and in which order."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megacore.config import validate, violations
from megacore.models.outline import outline
from megacore.pipeline.schedule import SCHEDULES
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB, RankMemory, fullest_rank, plan_memory
from megacore.plan.planner import make_plan
from megacore.plan.search import Layout, search, with_memory
from megacore.plan.search_report import search_table
from megacore.plan.search_space import Constraints, Validity, divisions_of, variants, with_choice
from tests.unit.planning import planned
from tests.unit.refusals import parse
from tools.plan import main


def test_search_ranks_layouts_that_plan_confirms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first layout of a search is the fastest of all that it lists, and planning it gives the same time."""
    picture = tmp_path / "found.svg"
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 32 --cluster a100-40g --world-size 4"
    found = planned(capsys, f"{flags} --search --top 5 --max-pp 2 --picture {picture}")
    best = found["layouts"][0]
    assert [row["step_seconds"]["value"] for row in found["layouts"]] == sorted(
        row["step_seconds"]["value"] for row in found["layouts"]
    )
    assert all(
        row["layout"]["pp"] <= 2 and row["layout"]["tp"] * row["layout"]["pp"] * row["layout"]["dp"] == 4
        for row in found["layouts"]
    )
    assert all(row["peak"]["value"] <= found["capacity"]["value"] for row in found["layouts"])
    plan = planned(capsys, f"{flags} {best['flags']}")
    assert plan["step_seconds"]["value"] == pytest.approx(best["step_seconds"]["value"])
    assert plan["peak"]["value"] == pytest.approx(best["peak"]["value"])
    for name in ("layout", "flags", "fits"):
        assert plan[name] == best[name]
    for name in ("model", "cluster", "world_size", "global_batch_size", "capacity"):
        assert plan[name] == found[name]
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_a_search_keeps_the_layout_flags_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 48 --cluster a100-40g --world-size 8 --search"
    given = "--tensor_model_parallel_size 2 --pp 2 --dp 2 --micro-batch-size 3 --schedule interleaved --zero-stage 1"
    found = planned(capsys, f"{flags} {given} --recompute light --sequence-parallel --top 100000")
    assert {
        (row["layout"]["tp"], row["layout"]["pp"], row["layout"]["dp"], row["layout"]["micro_batch_size"])
        for row in found["layouts"]
    } == {(2, 2, 2, 3)}
    assert all("--schedule interleaved" in row["flags"] for row in found["layouts"])
    assert all(
        row["flags"].endswith("--zero-stage 1 --sequence-parallel --recompute light") for row in found["layouts"]
    )
    megatron = "--tensor-model-parallel-size 2 --use-distributed-optimizer --max-pp 1"
    assert main([*flags.split(), *megatron.split()]) == 0
    assert "As given, and not searched for: `--tp 2`, `--zero-stage 1`." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "degrees", "some"),
    [
        (
            "--preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --tp 2",
            ("ep", "etp"),
            {(1, 2), (2, 2), (4, 2), (2, 1), (8, 1)},
        ),
        ("--preset llama-3-8b-128k --num-layers 4 --global-batch-size 8", ("cp",), {(1,), (2,)}),
    ],
)
def test_a_search_divides_experts_and_long_sequences(
    flags: str, degrees: tuple[str, ...], some: set[tuple[int, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"pretrain_gpt.py {flags} --cluster h100"
    found = planned(capsys, f"{run} --world-size 8 --search --max-pp 1 --max-micro-batch-size 1 --top 100000")[
        "layouts"
    ]
    assert {tuple(row["layout"][name] for name in degrees) for row in found} >= some
    best = found[0]
    plan = planned(capsys, f"{run} {best['flags']}")
    assert plan["step_seconds"]["value"] == pytest.approx(best["step_seconds"]["value"])
    assert degrees[0] == "ep" or best["layout"]["cp"] > 1


@pytest.mark.parametrize(
    "restricting",
    [
        "",
        pytest.param(
            "--tp 2 --distribute-saved-activations --recompute full --no-sequence-parallel", marks=pytest.mark.slow
        ),
        "--zero-stage 3 --offload-params --offload-optimizer",
        pytest.param("--dp 2 --zero-stage 1 --zero-shard-size 2", marks=pytest.mark.slow),
        pytest.param("--cp 2 --cp-comm ring", marks=pytest.mark.slow),
    ],
)
def test_a_search_validates_each_rule_once_and_all_layouts(restricting: str) -> None:
    flags = "--mock-data --train-iters 9 --vocab-size 5000 --num-layers 6 --hidden-size 96 --num-attention-heads 6"
    of_replicas = [] if "zero" in restricting else ["--gradient-noise-interval", "1"]
    config = parse(*flags.split(), *restricting.split(), *of_replicas, "--global-batch-size", "24", planned=True)
    cluster, constraints = CLUSTERS["h100"], Constraints(world_size=6, most={"cp": 2})
    is_valid, found = Validity(config, 6), Counter[bool]()
    for degrees in divisions_of(config, cluster, constraints):
        for choice in variants(config, constraints, degrees, ("none", "full")):
            found[is_valid(choice)] += 1
            assert is_valid(choice) == (not violations(with_choice(config, choice), 6)), choice
    assert found[True] > (25 if restricting else 50) and found[False] > 10


def test_a_search_computes_the_memory_of_the_rank_that_takes_most() -> None:
    """Of ranks with equal layers only the first is computed: every rank of every layout takes no more."""
    flags = "--mock-data --train-iters 9 --vocab-size 5000 --num-layers 7 --hidden-size 256 --num-attention-heads 4"
    config = parse(*flags.split(), "--global-batch-size", "24", "--precision", "bf16")
    limits = {"micro_batch_size": 2, "tp": 2}
    found = search(config, CLUSTERS["h100"], Constraints(world_size=6, most=limits))
    assert {layout.config.parallel.schedule for layout in found.layouts} == {*SCHEDULES} - {"gpipe"}
    assert {layout.config.parallel.pp for layout in found.layouts} == {1, 2, 3, 6}
    for layout in found.layouts:
        ranks = plan_memory(layout.config, outline(layout.config), on_cpu=False)
        assert layout.memory_bytes == max(rank.expected for rank in ranks)
    # What fits into less is the same.
    half = sorted(layout.memory_bytes for layout in found.layouts)[len(found.layouts) // 2]
    some = search(config, CLUSTERS["h100"], Constraints(world_size=6, most=limits, memory_bytes=half))
    assert {layout.flags for layout in some.layouts} == {
        layout.flags for layout in found.layouts if layout.memory_bytes <= half
    }
    none = search(config, CLUSTERS["h100"], Constraints(world_size=6, most=limits, memory_bytes=GIB))
    assert not none.layouts
    assert none.least_memory == min(layout.memory_bytes for layout in found.layouts)


OFFLOADED = "--mock-data --train-iters 9 --vocab-size 512 --num-layers 4 --hidden-size 256 --num-attention-heads 4"


def test_traced_and_estimated_memory_are_not_compared() -> None:
    """An estimate that is too small by the same share everywhere changes neither the divisions nor the frontier."""

    def tenfold(*args: Any, **kwargs: Any) -> list[RankMemory]:
        return [dataclasses.replace(rank, activations=10 * rank.activations) for rank in plan_memory(*args, **kwargs)]

    config = parse(*OFFLOADED.split(), "--global-batch-size", "8", "--precision", "bf16")
    found = search(config, CLUSTERS["h100"], Constraints(world_size=4))
    estimated, some = with_memory(found, 2, plan_memory), with_memory(found, 2, tenfold)
    assert {layout.memory is None for layout in some.layouts} == {True, False}
    assert [of[0].flags for of in some.divisions] == [of[0].flags for of in estimated.divisions]
    assert [layout.flags for layout in some.frontier] == [layout.flags for layout in estimated.frontier]
    table = search_table(some, top=4)
    assert "memory: traced (estimated in rows 3, 4)" in table


def test_the_rows_of_a_search_are_planned_with_the_same_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every schedule. The times of the frontier are simulated, as those of a plan are."""
    flags = "pretrain_gpt.py --preset gpt2-xl --cluster a100-40g --global-batch-size 48 --world-size 16"
    given = "--pp 4 --tp 1 --micro-batch-size 2 --recompute none"
    found = planned(capsys, f"{flags} --search --top 100000 {given}")
    assert all(row["simulated"] for row in found["frontier"])
    # Stages that are balanced by time and by parameters are listed once where they hold the same layers.
    said = [
        (row["step_seconds"]["value"], row["peak"]["value"], row["flags"].split("--schedule")[1][:9])
        for row in found["layouts"]
    ]
    assert len(set(said)) == len(said)
    rows = {
        (row["layout"]["schedule"], row["layout"]["virtual_stages"], row["simulated"]): row for row in found["layouts"]
    }
    assert {schedule for schedule, *_ in rows} == {*SCHEDULES} - {"gpipe"}
    for row in [*found["frontier"], *rows.values()]:
        plan = planned(capsys, f"{flags} {row['flags']}")
        assert plan["peak"] == row["peak"], row["flags"]
        if row["simulated"]:
            assert plan["step_seconds"]["value"] == pytest.approx(row["step_seconds"]["value"]), row["flags"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --world-size 16 --max-memory-gb 0.5",
            marks=pytest.mark.slow,
        ),
        "--max-tp 1 --max-pp 2 --preset gpt2-large --global-batch-size 16 --world-size 8 --offload-optimizer "
        "--max-memory-gb 1",
    ],
)
def test_what_the_smallest_layout_needs_is_enough_for_it_and_less_is_not(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["pretrain_gpt.py", "--cluster", "h100", *(["--no-offload-optimizer"] * ("--offload-optimizer" not in flags))]

    def search_with(limit: float | str) -> int:
        given = re.sub(r"(?<=--max-memory-gb )\S+", str(limit), flags)
        return main([*run, "--search", *given.split()])

    assert main([*run, "--search", *flags.split()]) == 2
    said = re.search(r"the smallest needs (\S+) GB per rank: use --max-memory-gb ([\d.]+)", capsys.readouterr().err)
    assert said is not None and said[1] == said[2]
    assert search_with(said[1]) == 0
    assert search_with(0.99 * float(said[1])) == 2
    assert f"the smallest needs {said[1]} GB" in capsys.readouterr().err


def test_what_a_search_leaves_out_is_worse_in_time_and_memory() -> None:
    """Larger microbatches than the fastest of a layout, each planned."""
    flags = "--mock-data --train-iters 9 --vocab-size 5000 --num-layers 8 --hidden-size 1024 --num-attention-heads 8"
    config = parse(*flags.split(), "--global-batch-size", "64", "--precision", "bf16", "--zero-stage", "0")
    fixed = {"recompute": "none", "zero_stage": 0, "tp": 1, "dp": 1}
    found = search(config, CLUSTERS["h100"], Constraints(world_size=8, fixed=fixed))
    shapes: dict[str, list[Layout]] = {}
    for layout in found.layouts:
        shapes.setdefault(layout.flags.split(" --micro-batch-size")[0], []).append(layout)
    left_out = 0
    for layouts in shapes.values():
        tried = {layout.config.training.micro_batch_size for layout in layouts}
        best = min(layouts, key=lambda layout: layout.seconds)
        for size in {1, 2, 4, 8, 16, 32, 64} - tried:
            training = dataclasses.replace(best.config.training, micro_batch_size=size)
            larger = dataclasses.replace(best.config, training=training)
            if validate(larger, 8):
                continue
            left_out += 1
            assert make_plan(larger, CLUSTERS["h100"]).time.seconds > best.seconds
            assert fullest_rank(larger, outline(larger), on_cpu=False).expected > best.memory_bytes
    assert left_out == found.left_out > 0


SMALL = "pretrain_gpt.py --preset gpt2-small --cluster h100"


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--max-cp 2 --cp-comm ring --attention-dropout 0", {"cp": {2}}),
        ("--zero-shard-size 2 --tp 1", {"zero_stage": {1, 2, 3}, "dp": {2, 4}}),
        ("--distribute-saved-activations --pp 1", {"tp": {2, 4}, "recompute": {"full"}, "sequence_parallel": {False}}),
        ("--offload-params --offload-optimizer --tp 2", {"zero_stage": {3}, "dp": {1, 2}}),
    ],
)
def test_flags_that_need_what_a_search_chooses_restrict_it(
    flags: str, kept: dict[str, set[object]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, for one layout, each of them is refused."""
    found = planned(capsys, f"{SMALL} --world-size 4 --search --max-micro-batch-size 1 --top 100000 {flags}")["layouts"]
    assert {name: {row["layout"][name] for row in found} for name in kept} == kept


FILES: dict[str, tuple[str, dict[str, set[object]]]] = {
    "--config": (
        "[model]\npreset = 'gpt2-small'\n[training]\nrecompute = 'full'\nrecompute_num_layers = 2\n[parallel]\n"
        "pp = 2\nzero_stage = 1\nvirtual_stages = 2\nschedule = 'interleaved'\n",
        {"recompute": {"full"}, "recompute_num_layers": {2}, "pp": {1, 2, 4}, "schedule": {"1f1b", "interleaved"}},
    ),
    "--deepspeed-config": (
        '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 48, "zero_optimization": {"stage": 2}}',
        {"micro_batch_size": {2}, "zero_stage": {2}},
    ),
}


@pytest.mark.parametrize("flag", FILES)
def test_a_search_tries_the_values_of_a_file_and_its_flags_replace_them(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with the flags of a layout and the same file has the layout and the batch."""
    file, (text, kept) = tmp_path / "run.file", FILES[flag]
    file.write_text(text, encoding="utf-8")
    run = f"{SMALL} {flag} {file}"
    report = planned(capsys, f"{run} --world-size 4 --search --top 100000")
    found = report["layouts"]
    assert {name: {row["layout"][name] for row in found} for name in kept} == kept
    for row in {row["layout"]["pp"]: row for row in found}.values():
        plan = planned(capsys, f"{run} {row['flags']}")
        assert {**plan["layout"], "num_microbatches": 0} == {**row["layout"], "num_microbatches": 0}
        assert plan["global_batch_size"] == report["global_batch_size"]
