"""tools/plan.py: what it prints of a layout, of several, and as JSON; the ways out of one that does not fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.plan.checked import PUBLISHED
from megacore.plan.memory import GIB
from tests.patience import patience
from tests.unit.planning import BLOOM, planned, with_flags, wrong_figures
from tools.plan import main

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_run_of_bert_is_planned_with_attention_to_all_positions(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--cluster a100-80g --vocab-size 30522 --seq-length 512 --tp 2 --dp 4 --global-batch-size 64"
    bert = planned(capsys, f"pretrain_bert.py {flags} --micro-batch-size 8")
    assert bert["parameters"]["value"] == 110_106_428  # of transformers' BertForPreTraining, bert-base-uncased
    assert not any("causal" in name for name in bert["throughput"])
    gpt = planned(
        capsys,
        f"pretrain_gpt.py {flags} --micro-batch-size 8 --num-layers 12 --hidden-size 768 --num-attention-heads 12",
    )
    assert bert["step_parts"]["attention"]["value"] > 1.8 * gpt["step_parts"]["attention"]["value"]


LONG = "llama-3-8b-128k --seq-length 65536 --zero-stage 3 --recompute full --micro-batch-size 1 --global-batch-size 8"


DOES_NOT_FIT = {
    "gpt2-xl --pp 4 --schedule gpipe --micro-batch-size 8 --global-batch-size 128 --cluster a100-40g": (
        "--schedule 1f1b"
    ),
    f"{LONG} --dp 8 --cluster a100-40g": "--tp 2 --dp 4 --global-batch-size 8",
    "bloom-176b --cluster laptop --micro-batch-size 1": (
        "--tp 8 --pp 64, on 512 machines with as much memory (gpus_per_node = 1)"
    ),
    "llama-3-8b --cluster laptop": (
        "--recompute full --tp 8 --pp 2, on 16 machines with as much memory (gpus_per_node = 1)"
    ),
    "mixtral-8x7b --tp 4 --dp 2 --global-batch-size 8 --cluster h100": (
        "--dp 4 --zero-stage 3 --global-batch-size 8, on 16 devices"
    ),
}


@pytest.mark.parametrize(("flags", "known"), DOES_NOT_FIT.items())
def test_suggestions_fit_when_they_are_planned(
    flags: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each as flags in place of those that do not fit, with the memory that it names; more machines as a cluster file,
    as the report says."""
    given = f"pretrain_gpt.py --preset {flags}"
    plan = planned(capsys, given)
    assert not plan["fits"]
    assert len(plan["suggestions"]) == 3
    assert any(way.startswith(f"{known}: ") for way in plan["suggestions"]), plan["suggestions"]
    for way in plan["suggestions"]:
        if "machines with at least" in way:
            continue
        words = with_flags(given.split(), re.split(", |: ", way)[0].split())
        if "machines with as much memory" in way:
            of_machine = re.search(r"\((gpus_per_node = \d+)\)", way)
            assert of_machine is not None
            cluster = tmp_path / "machines.toml"
            cluster.write_text(f'based_on = "{plan["cluster"]}"\n{of_machine[1]}', encoding="utf-8")
            words = with_flags(words, ["--cluster", str(cluster)])
        again = planned(capsys, " ".join(words))
        assert again["fits"], way
        peak = again["peak"]["value"] / GIB
        assert f": {peak:,.1f} GiB" in way, (peak, way)


def test_a_plan_loads_only_what_it_needs() -> None:
    """What takes longer to load than a plan takes."""
    idle = {"torch", "numpy", "tokenizers", "rich", "multiprocessing.connection", "http.client"}
    words = [*BLOOM.split(), "--estimate"]
    code = f"import sys, tools.plan as t; t.main({words!r}); sys.exit(bool({idle!r} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_the_largest_microbatch_that_fits_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --global-batch-size 64 --cluster laptop --micro-batch-size"
    plan = planned(capsys, f"{run} 64")
    assert plan["suggestions"][0].startswith("--micro-batch-size 4 --global-batch-size 64: ")
    assert planned(capsys, f"{run} 4")["fits"] and not planned(capsys, f"{run} 8")["fits"]
    second, third = plan["suggestions"][1:]
    assert second.startswith("--recompute selective --micro-batch-size 16 ")
    assert "machines" in third and "--micro-batch-size" not in third  # not the same on more machines


def test_a_deep_model_has_its_suggestions_soon(capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --num-layers 3000 --hidden-size 16384 --num-attention-heads 128 --vocab-size 128256"
    started = time.process_time()
    ways = planned(capsys, f"{run} --cluster laptop")["suggestions"]
    assert time.process_time() - started < patience(2)
    assert ways[-1].startswith("--num-layers 1 ") and len(ways) >= 2


@pytest.mark.parametrize("memory", [42.0, 41.0])
def test_a_way_out_whose_range_does_not_fit_is_tight(
    memory: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The range of a planned peak ends 10 % above what is expected."""
    cluster = tmp_path / "device.toml"
    cluster.write_text(f"based_on = 'a100-40g'\nmemory_gb = {memory}\n")
    run = f"pretrain_gpt.py --preset llama-3-8b --micro-batch-size 8 --cluster {cluster}"
    ways = planned(capsys, run)["suggestions"]
    usable = 0.97 * memory * 1e9 / 2**30
    for way in ways:
        size = float(re.search(r": ([\d.]+) GiB", way)[1])  # type: ignore[index]
        assert ("(tight: up to " in way) == (1.1 * size > usable), way
    assert any("tight" in way for way in ways) or memory < 42


# ---- --compare -------------------------------------------------------------------------------------------------------


RUN = "pretrain_gpt.py --preset llama-3-8b --global-batch-size 64 --cluster h100 --estimate"


def compared(flags: str, *layouts: str) -> int:
    return main([*RUN.split(), *flags.split(), "--compare", *layouts])


def test_the_figures_are_those_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared("--world-size 8 --json --tokens 1e9", "--tp 8", "--tp 2 --zero-stage 1") == 0
    both = json.loads(capsys.readouterr().out)
    alone = [
        planned(capsys, f"{RUN} --tokens 1e9 {layout}") for layout in ("--tp 2 --dp 4 --zero-stage 1", "--tp 8 --dp 1")
    ]
    assert [layout.pop("given") for layout in both["layouts"]] == ["--tp 2 --zero-stage 1", "--tp 8"]
    assert both["layouts"] == alone
    fast, slow = (plan["step_seconds"]["value"] for plan in alone)
    (line,) = both["verdicts"]
    assert line.startswith(f"(--tp 2 --zero-stage 1) wins: it saves {1 - fast / slow:.1%} of the time of (--tp 8)")
    assert "less exposed tensor, sequence and context parallel communication" in line and "the ranges" in line


def test_the_range_has_the_errors_of_published_steps(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"{RUN.replace('h100', 'a100-80g')} --software megatron-lm --tp 8 --dp 4")
    seconds, errors = plan["step_seconds"], PUBLISHED["a100", "megatron-lm", "dense models"]
    assert seconds["high"] >= errors.high * seconds["value"] * (1 - 1e-9)
    assert seconds["low"] <= errors.low * seconds["value"] * (1 + 1e-9)
    rate = plan["throughput"]["tokens/s"]
    assert rate["low"] == pytest.approx(rate["value"] * seconds["value"] / seconds["high"])


def test_a_search_marks_what_is_tight(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two limits between which the upper end of the best layout's peak lies."""
    flags = f"{RUN} --world-size 16 --dp 16 --zero-stage 3 --recompute none --micro-batch-size 1 --search"
    peak = planned(capsys, flags)["layouts"][0]["peak"]
    for limit, is_tight in ((peak["high"] * 1.01, False), (peak["high"] * 0.99, True)):
        (row,) = planned(capsys, f"{flags} --max-memory-gb {limit / 1e9}")["layouts"]
        assert row["tight"] == is_tight


def test_a_search_offloads_where_nothing_fits_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, f"{RUN} --world-size 1 --search")["layouts"]
    assert found and all(row["flags"].endswith(" --offload-optimizer") for row in found)
    alone = planned(capsys, f"{RUN} {found[0]['flags']}")
    assert alone["fits"] and alone["step_seconds"]["value"] == pytest.approx(found[0]["step_seconds"]["value"])


# ---- --json ----------------------------------------------------------------------------------------------------------


EXPERTS = (
    "pretrain_gpt.py --preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --cluster h100 --world-size 8 "
    "--tokens 1e9"
)
SPLIT = (
    "pretrain_gpt.py --preset llama-3-8b --cluster h100 --tp 2 --pp 4 --dp 8 --zero-stage 1 --global-batch-size 64 "
    "--schedule zero-bubble"
)


@pytest.mark.parametrize(
    "flags",
    [
        f"{BLOOM} --tokens 366e9",
        f"{EXPERTS} --tp 2 --sequence-parallel --dp 4 --ep 4 --etp 1",
        f"{EXPERTS} --search --top 3 --recompute full --recompute-num-layers 1",
        "pretrain_gpt.py --preset gpt2-small --cluster a100-40g --offload-optimizer --dp 2 --zero-stage 1",
        "pretrain_gpt.py --preset gpt2-small --cluster laptop --world-size 2 --search --max-tp 1",
    ],
)
def test_what_is_predicted_has_a_unit_an_origin_and_a_range(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, flags)
    assert list(wrong_figures(report)) == []


@pytest.mark.parametrize("flags", [BLOOM, SPLIT])
def test_the_ranges_of_the_terms_add_up_to_that_of_the_peak(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, flags)
    for rank in report["memory"]:
        for end in ("low", "value", "high"):
            assert sum(term[end] for term in rank["terms"].values()) == pytest.approx(rank["peak"][end])
    for end in ("low", "value", "high"):
        assert report["peak"][end] == max(rank["peak"][end] for rank in report["memory"])


# ---- memory of a node's host -----------------------------------------------------------------------------------------


LLAMA_1B = "pretrain_gpt.py --preset llama-3.2-1b --global-batch-size 8"


def cluster(directory: Path, text: str) -> str:
    path = directory / "mine.toml"
    path.write_text(f'based_on = "h100"\n{text}\n', encoding="utf-8")
    return f"--cluster {path}"


def test_a_plan_whose_host_is_too_small_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LLAMA_1B} --dp 8 --offload-optimizer {cluster(tmp_path, 'host_memory_gb = 64')}"
    plan = planned(capsys, flags)
    assert not plan["fits"]
    assert plan["suggestions"][0].startswith("--no-offload-optimizer: ")
    for way in plan["suggestions"]:
        words = with_flags(flags.split(), way.split(":")[0].split(",")[0].split())
        assert planned(capsys, " ".join(words))["fits"], way


@pytest.mark.parametrize(("dp", "nodes"), [(8, 1), (16, 2)])
def test_the_copies_of_survive_are_in_host_memory(dp: int, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: two slots of the weights and both moments in fp32, which replicas divide, and of another node too."""
    flags = f"pretrain_gpt.py --preset gpt2-small --global-batch-size 16 --dp {dp} --cluster h100 --survive"
    plan, without = planned(capsys, flags), planned(capsys, flags.removesuffix(" --survive"))
    of_rank = 2 * 12 * plan["parameters"]["value"] / dp
    (copies,) = plan["memory"][0]["host_terms"].items()
    assert (copies[0], copies[1]["value"]) == ("copies of --survive", pytest.approx(of_rank, rel=0.001))  # padding
    assert plan["node_host"]["value"] == pytest.approx(8 * nodes * of_rank, rel=0.001)
    assert nodes == 1 or plan["node_host_after_loss"]["value"] == pytest.approx(16 * of_rank, rel=0.001)
    assert plan["peak"] == without["peak"] and "node_host" not in without


def test_a_search_leaves_out_what_the_host_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LLAMA_1B} --offload-optimizer --search --world-size 8 --top 1000 --max-tp 1 --max-pp 1"
    with_all = planned(capsys, f"{flags} --cluster h100")
    small = cluster(tmp_path, "host_memory_gb = 64")
    found = planned(capsys, f"{flags} {small}")
    usable = found["host_capacity"]["value"]
    assert max(layout["node_host"]["value"] for layout in found["layouts"]) <= usable
    kept = [layout["flags"] for layout in with_all["layouts"] if layout["node_host"]["value"] <= usable]
    assert 0 < len(kept) < len(with_all["layouts"])
    assert sorted(layout["flags"] for layout in found["layouts"]) == sorted(kept)
    assert main(f"{flags} --dp 8 --zero-stage 0 {small}".split()) == 2
    refused = capsys.readouterr().err
    assert "the one that offloads least needs 159 GB of host memory per node, of 62.0 usable: use " in refused
    assert "use --no-offload-optimizer" in refused
