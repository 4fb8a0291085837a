"""tools/plan.py: what it prints, refuses, searches and fits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacore.config import validate
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config, save_toml
from megacore.errors import ConfigError
from megacore.plan.canvas import Words
from megacore.plan.cluster import CLUSTERS, cluster_named, load_cluster, to_toml
from megacore.plan.memory import GIB, fullest_rank, plan_memory
from megacore.plan.outline import outline
from megacore.plan.plan_picture import frontier_picture
from megacore.plan.planner import make_plan
from megacore.plan.search import Found, Layout, search
from megacore.plan.search_space import Constraints
from tests.parity.runs import make_config
from tests.unit.refusals import parse
from tools.plan import main

ROOT = Path(__file__).resolve().parent.parent.parent
BLOOM = (
    "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --micro-batch-size 2 "
    "--zero-stage 1 --recompute full --schedule 1f1b --pipeline-balance parameters --cluster a100-80g"
)


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_parts_of_a_step_add_up_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"{BLOOM} --tokens 366e9")
    parts = sum(part["value"] for part in plan["step_parts"].values())
    assert parts == pytest.approx(plan["step_seconds"]["value"], rel=1e-9)
    assert plan["parameters"]["value"] == 176_247_271_424
    assert [rank["in_flight"] for rank in plan["memory"]] == list(range(12, 0, -1))
    rate = plan["throughput"]["tokens/s"]["value"]
    assert rate == pytest.approx(2048 * 2048 / plan["step_seconds"]["value"])
    assert plan["training"]["days"]["value"] == pytest.approx(366e9 / rate / 0.9 / 86400)
    assert plan["training"]["price"]["value"] == pytest.approx(plan["training"]["days"]["value"] * 24 * 384 * 1.8)
    for figure in (plan["step_seconds"], *plan["throughput"].values()):
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["origin"] == "assumed"


@pytest.mark.parametrize(
    "flags",
    [
        "llama-3-8b --dp 2",
        "gpt2-small --pp 4 --schedule interleaved --virtual-stages 2 --global-batch-size 100000",
        "qwen3-0.6b --pp 2 --schedule interleaved --virtual-stages 2 --global-batch-size 128",
        "smollm3-3b --pp 4 --schedule interleaved --virtual-stages 2 --global-batch-size 128",
    ],
)
def test_no_step_is_shorter_than_the_computations_of_its_busiest_rank(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, f"pretrain_gpt.py --preset {flags} --cluster h100")
    for name, part in found["step_parts"].items():
        assert min(part["low"], part["value"]) >= 0, name


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


def test_what_does_not_fit_names_the_stage_the_term_and_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 2 --dp 4 --pipeline-balance parameters --cluster h100"
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT: pipeline rank 1" in text
    assert "largest term is optimizer state" in text
    assert all(f"\n{number}. " in text for number in (1, 2, 3))


def test_the_software_that_runs_the_step_is_named_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{BLOOM} --no-sequence-parallel --attention fused-softmax"
    own, theirs = planned(capsys, flags), planned(capsys, f"{flags} --software megatron-lm")
    assert (own["software"], theirs["software"]) == ("megacore", "megatron-lm")
    # Nothing of it runs beside computing, neither sums of tensor parallelism nor reductions between replicas.
    assert set(theirs["hidden_seconds"].values()) == {0.0}
    assert theirs["step_parts"]["replicas"]["value"] > own["step_parts"]["replicas"]["value"]
    assert theirs["step_seconds"]["value"] > own["step_seconds"]["value"]
    for key in ("parameters", "bytes_per_rank_and_step", "memory"):  # these do not depend on it
        assert theirs[key] == own[key]
    assert main([*BLOOM.split(), "--software", "torch-eager"]) == 0
    assert "- software that runs the step: torch-eager" in capsys.readouterr().out


def test_flags_that_are_left_out_are_those_of_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--vocab-size 51200 --hidden-size 3072 --num-layers 30 --num-attention-heads 32 --seq-length 2048"
    flags = (
        f"pretrain_gpt.py {shape} --tp 2 --pp 2 --dp 16 --global-batch-size 512 --micro-batch-size 4 --precision fp16"
    )
    flags += " --recompute full --cluster a100-80g --software megatron-lm"
    usual = "--attention fused-softmax --hidden-dropout 0.1 --attention-dropout 0.1 --no-sequence-parallel"
    said = planned(capsys, f"{flags} {usual} --schedule 1f1b --pipeline-balance parameters")
    assert planned(capsys, flags) == said
    assert (said["layout"]["schedule"], said["layout"]["sequence_parallel"]) == ("1f1b", False)
    others = planned(capsys, f"{flags} --sequence-parallel --virtual-stages 3 --schedule interleaved --attention sdpa")
    assert others["layout"]["sequence_parallel"]
    assert others["layout"]["virtual_stages"] == 3
    assert others["step_parts"]["attention"]["value"] < 0.5 * said["step_parts"]["attention"]["value"]


def test_messages_of_megatron_lm_wait_without_interleaving(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "pretrain_gpt.py --vocab-size 51200 --hidden-size 4096 --num-layers 16 --num-attention-heads 32 --pp 4 --dp 2 "
        "--global-batch-size 32 --cluster a100-80g --software megatron-lm"
    )
    plain = planned(capsys, f"{flags} --schedule 1f1b")["step_parts"]["pipeline"]["value"]
    interleaved = planned(capsys, f"{flags} --schedule interleaved --virtual-stages 2")["step_parts"]["pipeline"]
    assert plain > 0.0
    assert interleaved["value"] < plain


def test_a_search_is_for_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset gpt2-small --world-size 2 --global-batch-size 8 --cluster a100-80g --search"
    own, theirs = planned(capsys, flags), planned(capsys, f"{flags} --software megatron-lm")
    assert theirs["software"] == "megatron-lm"
    assert theirs["layouts"][0]["step_seconds"]["value"] > own["layouts"][0]["step_seconds"]["value"]
    assert main([*flags.split(), "--software", "megatron-lm"]) == 0
    assert "software megatron-lm" in capsys.readouterr().out.splitlines()[0]


def test_a_step_on_many_nodes_takes_as_long_as_the_slowest(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset llama-3-8b --tp 8 --cluster h100 --software megatron-core"

    def lag(replicas: int) -> float:
        plan = planned(capsys, f"{flags} --dp {replicas} --global-batch-size {4 * replicas}")
        parts = {name: part["value"] for name, part in plan["step_parts"].items()}
        return float(parts["slowest"] / (parts["gemm"] + parts["attention"] + parts["memory"]))

    shares = [lag(replicas) for replicas in (1, 2, 64, 1024)]
    assert shares[0] == 0.0  # a single node waits for nobody
    # The largest of n normal numbers that is expected, in standard deviations, from tables of order statistics.
    spread = CLUSTERS["h100"].device.node_spread.expected
    assert shares[1:] == pytest.approx([spread * size for size in (0.564, 2.37, 3.25)], rel=0.06)
    many_cpus = planned(capsys, "pretrain_gpt.py --preset gpt2-small --dp 64 --cluster cpu")
    assert many_cpus["step_parts"]["slowest"]["value"] == 0.0


LONG = "llama-3-8b-128k --seq-length 65536 --zero-stage 3 --recompute full --micro-batch-size 1 --global-batch-size 8"
INTERLEAVED = "gpt2-xl --pp 4 --schedule interleaved --virtual-stages 3"
DOES_NOT_FIT = {
    "gpt2-xl --pp 4 --schedule gpipe --micro-batch-size 8 --global-batch-size 128 --cluster a100-40g": (
        "--schedule 1f1b"
    ),
    f"{INTERLEAVED} --micro-batch-size 10 --global-batch-size 160 --cluster a100-40g": (
        "--schedule 1f1b --virtual-stages 1"
    ),
    f"{LONG} --dp 8 --cluster a100-40g": "--tp 2 --pp 1 --dp 4",
    "gpt2-medium --dp 4 --recompute full --micro-batch-size 1 --global-batch-size 8 --cluster laptop": (
        "--dp 2 --global-batch-size 8, with 2 ranks on the machine"
    ),
    "bloom-176b --cluster laptop --micro-batch-size 1": "--preset gpt2-large --recompute full, a smaller model",
}


@pytest.mark.parametrize(("flags", "known"), DOES_NOT_FIT.items())
def test_the_ways_out_fit_when_they_are_planned(flags: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each as flags in place of those that do not fit; more machines with CPUs are no cluster to plan for."""
    given = f"pretrain_gpt.py --preset {flags}"
    plan = planned(capsys, given)
    assert not plan["fits"]
    assert len(plan["ways_out"]) == 3
    assert any(way.startswith(f"{known}: ") for way in plan["ways_out"]), plan["ways_out"]
    for way in plan["ways_out"]:
        if " machines " not in way:
            changed, kept = re.split(", |: ", way)[0].split(), given.split()
            for flag in (word for word in changed if word in kept and word.startswith("--")):
                at = kept.index(flag)
                del kept[at : at + 2]
            assert planned(capsys, " ".join([*kept, *changed]))["fits"], way


def test_torch_is_not_loaded() -> None:
    code = f"import sys; from tools.plan import main; main({BLOOM.split()!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_wrong_files_are_refused_by_their_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "own.toml"
    cluster.write_text("memory_gb = [", encoding="utf-8")
    flags = (
        f"pretrain_gpt.py --preset gpt2-small --cluster {cluster} --timeline line.gif --memory-timeline nowhere/m.svg"
    )
    assert main(flags.split()) == 2
    text = capsys.readouterr().err
    assert "--timeline line.gif must end in .svg or .png: use --timeline line.svg" in text
    assert "--memory-timeline nowhere/m.svg: nowhere is not a directory" in text
    assert f"--cluster {cluster} is not valid TOML: " in text


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gtp.py --preset gpt2-small --tp 5 --pp 13 --world-size 64 --cluster a100-80gb"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(flags.split()))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "6 problems" in text
    for part in ("did you mean a100-80g?", "did you mean pretrain_gpt.py?", "--num-attention-heads 12", "--pp 13"):
        assert part in text


def test_a_cluster_file_is_read_back_and_refused_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(CLUSTERS["h100"]), encoding="utf-8")
    device, expected = load_cluster(path).device, CLUSTERS["h100"].device
    assert device.memory_bytes == pytest.approx(expected.memory_bytes)
    assert device.network.bandwidth == pytest.approx(expected.network.bandwidth)
    assert device.product_efficiency == expected.product_efficiency
    path.write_text("memory_gb = -3\nnic = 4\n[peak_tflops]\nbf17 = 3\n", encoding="utf-8")
    assert main(["pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", str(path)]) == 2
    text = capsys.readouterr().err
    for part in ("memory_gb = -3 must be", "nics_per_node is missing", "peak_tflops.bf17", "nic is not a field"):
        assert part in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--cluster moon --software megatron-ln --tp 5",
            [
                "--cluster moon",
                "--software megatron-ln is not known",
                "did you mean megatron-lm?",
                "--tp 5 must divide",
            ],
        ),
        ("--cluster moon --goodput 2 --tp 5", ["--cluster moon", "--goodput 2 must be", "--tp 5 must divide"]),
        ("--tokens many --world-size x --search", ["--tokens many", "--world-size 'x' is not", "--cluster is missing"]),
        ("--cluster h100 --search --world-size 8 --min-tp 4 --max-tp 2", ["--min-tp 4 must be at most --max-tp 2"]),
        ("--cluster h100 --search --world-size 8 --tp 4 --max-tp 2", ["--tp 4 must be at most --max-tp 2"]),
        ("--cluster h100 --search --world-size 8 --schedule 1f1p", ["--schedule 1f1p is not known"]),
        ("--cluster h100 --search --world-size 8 --ep 2", ["--ep 2 has no effect without experts"]),
        ("--cluster h100 --search --world-size 8 --pipeline-layout E|H", ["--pipeline-layout E|H is for one layout"]),
        ("--cluster h100 --max-pp 2 --max-memory-gb 9", ["--max-pp 2 limits --search", "--max-memory-gb 9.0 limits"]),
        ("--cluster h100 --pp 99 --nonsense 3 --top 0", ["--pp 99 must be at most", "--nonsense", "--top 0 must be"]),
    ],
)
def test_wrong_values_of_the_plans_flags_are_reported_with_the_rest(
    flags: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["pretrain_gpt.py", "--preset", "gpt2-small", *flags.split()]))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert all(part in text for part in said), text
    assert text.endswith("Flags and their defaults: plan.py --help\n")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            "--max-tp 0 --min-pp 200",
            [
                "--max-tp 0 must be at least 1",
                "--min-pp 200 leaves no --pp: those that divide --world-size 64 and are at most --num-layers 12 are "
                "1, 2, 4, 8",
            ],
        ),
        (
            "--min-tp 16 --min-cp 3 --max-cp 3 --min-dp 8",
            [
                "--min-tp 16 x --min-cp 3 x --min-dp 8 = 384 must be at most --world-size 64",
                "--min-tp 16 leaves no --tp: those that divide --world-size 64 and divide --num-attention-heads 12 are "
                "1, 2, 4",
                "--min-cp 3 and --max-cp 3 leave no --cp",
            ],
        ),
        ("--min-dp 3 --max-dp 3", ["--min-dp 3 and --max-dp 3 leave no --dp"]),
    ],
)
def test_limits_that_no_layout_can_keep_are_all_named(
    limits: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "pretrain_gpt.py --preset gpt2-small --global-batch-size 16 --cluster h100 --world-size 64 --search"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([*flags.split(), *limits.split()]))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert all(part in text for part in said), text
    assert text.count("\n  - ") == len(said)


def test_a_search_goes_beyond_a_node_where_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset bloom-176b --cluster h100 --world-size 32 --search --min-tp 9 --max-pp 1"
    found = planned(capsys, f"{flags} --max-memory-gb 1000 --max-micro-batch-size 1 --global-batch-size 2")
    assert {row["layout"]["tp"] for row in found["layouts"]} == {16}


def test_efficiencies_are_in_order(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'based_on = "h100"\n[efficiency]\nproducts = [0.8, 0.7, 0.6]\nhost_us = [1, 2, 3]', encoding="utf-8"
    )
    with pytest.raises(ConfigError) as refusal:
        load_cluster(path)
    assert list(refusal.value.problems) == [
        f"{path}: efficiency.products = [0.8, 0.7, 0.6] must rise: [slow, expected, fast]",
        f"{path}: efficiency.host_us = [1, 2, 3] must fall: [slow, expected, fast]",
    ]


def test_of_an_unknown_base_nothing_else_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('based_on = "h900"\nmemory_gb = -1', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert len(refused.value.problems) == 2
    assert "based_on = 'h900' is not known" in refused.value.problems[0]


@pytest.mark.parametrize("text", ['based_on = ["h100"]', 'based_on = "h100"\nefficiency = 3', "memory_gb = ["])
def test_a_cluster_file_of_wrong_types_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", str(path)]))
    assert stop.value.code == 2
    assert str(path) in capsys.readouterr().err


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
    assert all(row["peak_bytes"] <= found["capacity_bytes"] for row in found["layouts"])
    plan = planned(capsys, f"{flags} {best['flags']}")
    assert plan["step_seconds"]["value"] == pytest.approx(best["step_seconds"]["value"])
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
    assert main([*flags.split(), "--tp", "2", "--max-pp", "1"]) == 0
    assert "As given, and not searched for: `--tp 2`." in capsys.readouterr().out


def test_a_search_has_no_two_equal_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages that are balanced by time and by parameters are listed once where they hold the same layers."""
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 32 --cluster a100-40g --world-size 4"
    found = planned(capsys, f"{flags} --search --min-pp 2 --max-micro-batch-size 1 --top 100000")
    said = [
        (row["step_seconds"]["value"], row["peak_bytes"], row["flags"].split("--schedule")[1][:9])
        for row in found["layouts"]
    ]
    assert len(set(said)) == len(said)


def test_the_table_has_one_row_for_each_division(capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts that differ only in their schedule take one row, which says how many there are; JSON lists them all."""
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 48 --cluster a100-40g --world-size 8 --search"
    flags += " --tp 1 --pp 4 --zero-stage 1 --recompute none --micro-batch-size 1 --top 100"
    layouts = planned(capsys, flags)["layouts"]
    schedules = {re.sub(r" --micro-batch-size.*", "", layout["flags"]) for layout in layouts}
    assert len(schedules) == len(layouts) > 3
    assert main(flags.split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 ") or line.startswith("| 2 ")]
    assert len(rows) == 1
    assert layouts[0]["flags"] in rows[0]
    slowest = max(layout["step_seconds"]["value"] for layout in layouts)
    assert f"; {len(layouts) - 1} other schedules, up to {slowest:.4g} s" in rows[0]


def test_a_search_divides_experts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --cluster h100 --world-size 8"
    found = planned(capsys, f"{flags} --search --tp 2 --max-pp 1 --max-micro-batch-size 1 --top 100000")
    assert {(row["layout"]["ep"], row["layout"]["etp"]) for row in found["layouts"]} >= {
        (1, 2),
        (2, 2),
        (4, 2),
        (2, 1),
        (8, 1),
    }
    best = found["layouts"][0]
    plan = planned(capsys, f"{flags} {best['flags']}")
    assert plan["step_seconds"]["value"] == pytest.approx(best["step_seconds"]["value"])
    assert plan["active_parameters"]["value"] < plan["parameters"]["value"]
    assert plan["step_parts"]["experts"]["value"] > 0 or best["layout"]["ep"] == 1


def test_the_published_sizes_of_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    for preset, total, active in (("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.35)):
        plan = planned(capsys, f"pretrain_gpt.py --preset {preset} --dp 8 --ep 8 --zero-stage 1 --cluster b200")
        assert plan["parameters"]["value"] / 1e9 == pytest.approx(total, rel=3e-3)
        assert plan["active_parameters"]["value"] / 1e9 == pytest.approx(active, rel=3e-3)


def test_devices_have_the_memory_that_drivers_report() -> None:
    """What CUDA tells a program of devices whose names have round numbers; an MI250X is two devices of 64 GiB."""
    reported = {"a100-40g": 42_298_834_944, "h100": 79.11 * GIB, "mi250x": 67_092_480 * 1024}
    for name, size in reported.items():
        assert CLUSTERS[name].device.memory_bytes == pytest.approx(size, rel=5e-4), name


def test_a_search_divides_sequences_that_are_long(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "pretrain_gpt.py --preset llama-3-8b-128k --cluster h100 --world-size 8 --global-batch-size 8 --num-layers 4"
    )
    found = planned(capsys, f"{flags} --search --top 100000 --max-pp 1")
    tried = {row["layout"]["cp"] for row in found["layouts"]}
    assert {1, 2, 4, 8} >= tried > {1} and found["layouts"][0]["layout"]["cp"] > 1
    plan = planned(capsys, f"{flags} {found['layouts'][0]['flags']}")
    assert plan["step_seconds"]["value"] == pytest.approx(found["layouts"][0]["step_seconds"]["value"])
    limited = planned(capsys, f"{flags} --search --top 100000 --max-pp 1 --max-cp 1")
    assert {row["layout"]["cp"] for row in limited["layouts"]} <= {1}


def test_a_search_computes_the_memory_of_the_rank_that_takes_most() -> None:
    """Of ranks with equal layers only the first is computed: every rank of every layout takes no more."""
    flags = "--mock-data --train-iters 9 --vocab-size 5000 --num-layers 7 --hidden-size 256 --num-attention-heads 4"
    config = parse(*flags.split(), "--global-batch-size", "24", "--precision", "bf16")
    limits = {"micro_batch_size": 2, "tp": 2}
    found = search(config, CLUSTERS["h100"], Constraints(world_size=6, most=limits))
    assert {layout.config.parallel.schedule for layout in found.layouts} == {"1f1b", "interleaved", "zero-bubble"}
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


def test_the_rows_of_a_search_are_planned_with_the_same_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every schedule. The times of the frontier are simulated, as those of a plan are."""
    flags = "pretrain_gpt.py --preset gpt2-xl --cluster a100-40g --global-batch-size 48 --world-size 16"
    given = "--pp 4 --tp 1 --micro-batch-size 2 --recompute none"
    found = planned(capsys, f"{flags} --search --top 100000 {given}")
    assert all(row["simulated"] for row in found["frontier"])
    rows = {
        (row["layout"]["schedule"], row["layout"]["virtual_stages"], row["simulated"]): row for row in found["layouts"]
    }
    assert {schedule for schedule, *_ in rows} == {"1f1b", "interleaved", "zero-bubble"}
    for row in [*found["frontier"], *rows.values()]:
        plan = planned(capsys, f"{flags} {row['flags']}")
        assert plan["peak_bytes"] == row["peak_bytes"], row["flags"]
        if row["simulated"]:
            assert plan["step_seconds"]["value"] == pytest.approx(row["step_seconds"]["value"]), row["flags"]


def test_a_search_refuses_what_the_plan_says_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    """With a split backward a rank in the middle of the pipeline takes most: 12.40 GiB, and 13 GB are 12.1."""
    given = "--pp 4 --tp 1 --schedule zero-bubble --micro-batch-size 2 --zero-stage 1 --recompute none"
    flags = f"pretrain_gpt.py --preset gpt2-xl --cluster a100-40g --global-batch-size 48 --world-size 16 {given}"
    peak = planned(capsys, flags)["peak_bytes"]
    assert peak / GIB == pytest.approx(12.40, abs=0.005)
    assert main([*flags.split(), "--search", "--max-memory-gb", "13"]) == 2
    assert f"the smallest needs {peak / 1e9:.3g} GB per rank" in capsys.readouterr().err


def test_a_search_lists_no_recomputation_that_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that differ in recomputation alone are rows of different memory."""
    flags = "pretrain_gpt.py --preset gpt2-medium --cluster cpu --global-batch-size 32 --world-size 8 --search"
    assert main([*flags.split(), "--top", "1000"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    memory: dict[str, list[float]] = {}
    for row in rows:
        layout = re.sub(r" --(schedule|virtual-stages|pipeline-balance|recompute) \S+", "", row[6].split("`")[1])
        memory.setdefault(layout, []).append(float(row[5]))
    several = [sizes for sizes in memory.values() if len(sizes) > 1]
    assert several and all(a != b for sizes in several for a, b in itertools.combinations(sizes, 2))


def test_a_search_tries_every_recomputation_that_saves_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Fused attention keeps nothing that `selective` could drop; on a CPU it does, where dropout is."""
    flags = "--preset gpt2-large --global-batch-size 8 --world-size 8 --search --max-pp 1 --max-micro-batch-size 1"
    gpu = planned(capsys, f"pretrain_gpt.py {flags} --cluster a100-40g --top 100000")
    cpu = planned(capsys, f"pretrain_gpt.py {flags} --cluster cpu --top 100000")
    kinds = [{row["flags"].split("--recompute ")[1] for row in found["layouts"]} for found in (gpu, cpu)]
    assert kinds == [{"none", "light", "full"}, {"none", "light", "selective", "full"}]


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


def test_a_plan_and_a_search_name_the_same_things_alike(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset mixtral-8x7b --num-layers 4 --global-batch-size 16 --cluster h100 --world-size 8"
    found = planned(capsys, f"{flags} --search --top 3 --tokens 1e9")
    plan = planned(capsys, f"{flags} {found['layouts'][0]['flags']} --tokens 1e9")
    run = {"model", "precision", "seq_length", "global_batch_size", "cluster", "world_size", "capacity_bytes"}
    assert {key: found[key] for key in run} == {key: plan[key] for key in run}
    assert plan["model"]["preset"] == "mixtral-8x7b" and plan["model"]["num_layers"] == 4
    assert plan["model"]["parameters"] == plan["parameters"]["value"]
    assert plan["model"]["active_parameters"] == plan["active_parameters"]["value"]
    assert (plan["precision"], plan["seq_length"], plan["global_batch_size"]) == ("bf16", 4096, 16)
    assert plan["fits"] and all(row["fits"] for row in found["layouts"])
    best = found["layouts"][0]
    assert best["layout"] == plan["layout"]
    assert best["flags"] == plan["flags"]
    assert best["peak_bytes"] == pytest.approx(plan["peak_bytes"])
    assert best["throughput"]["tokens/s"]["value"] == pytest.approx(plan["throughput"]["tokens/s"]["value"])
    assert best["training"]["days"]["value"] == pytest.approx(plan["training"]["days"]["value"])


@pytest.mark.parametrize(
    ("flags", "flag", "shown"),
    [
        ("--preset gpt2-small --cluster h100", "--preset", "no entry point is given"),
        ("--cluster h100 --preset gpt2-small --tp 5", "--preset", "--tp 5 must divide"),
        ("pretrain_gtp.py --preset gpt2-small", "--preset", "did you mean pretrain_gpt.py?"),
    ],
)
def test_without_an_entry_point_no_flag_loses_its_value(
    flags: str, flag: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(flags.split()))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert f"{flag} needs a value" not in text
    assert shown in text


def test_the_picture_of_a_search_shows_its_list_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "found.svg"
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 32 --cluster a100-40g --world-size 8"
    found = planned(capsys, f"{flags} --search --max-tp 2 --max-micro-batch-size 1 --picture {picture}")
    text = picture.read_text(encoding="utf-8")
    width = float(re.search(r'width="([0-9.]+)"', text).group(1))  # type: ignore[union-attr]
    longest = max(len(row["flags"]) for row in found["frontier"][:12])
    assert width > 74 + 5.3 * (longest + 20)  # of DejaVu Sans at 11.5, as measured in a PNG


def test_a_frontier_has_no_two_layouts_that_are_alike() -> None:
    """And the axes of its picture have round numbers, also for a single layout."""
    config = make_config((1, 1, 1), "")
    sizes = [(1.0, 9.0), (1.002, 8.0), (1.004, 6.0), (1.006, 5.99), (1.2, 5.0), (1.2, 7.0), (1.3, 4.99), (2.0, 3.0)]
    layouts = [Layout(config=config, seconds=seconds, memory_bytes=size * GIB) for seconds, size in sizes]
    found = Found(
        layouts=layouts,
        tried=8,
        left_out=0,
        least_memory=None,
        capacity=10 * GIB,
        cluster=CLUSTERS["h100"],
        wall_seconds=1.0,
    )
    assert [layout.seconds for layout in found.frontier] == [1.004, 1.2, 2.0]
    texts = [mark.text for mark in frontier_picture(found).marks if isinstance(mark, Words)]
    assert [text for text in texts if re.fullmatch(r"[0-9.]+", text)][3:] == ["0", "2", "4", "6", "8", "10"]
    assert [text for text in texts if re.fullmatch(r"[0-9.]+ s", text)] == [f"{n / 5:.1f} s" for n in range(5, 11)]
    one = dataclasses.replace(found, layouts=layouts[:1])
    texts = [mark.text for mark in frontier_picture(one).marks if isinstance(mark, Words)]
    assert [text for text in texts if text.endswith(" s")] == [f"{n / 10:.1f} s" for n in range(10, 16)]


def test_pictures(tmp_path: Path) -> None:
    line, memory = tmp_path / "line.svg", tmp_path / "memory.svg"
    assert main([*BLOOM.split(), "--timeline", str(line), "--memory-timeline", str(memory)]) == 0
    assert "transfer" in line.read_text(encoding="utf-8")
    assert memory.read_text(encoding="utf-8").count("peak ") == 12


def test_the_time_line_says_that_it_has_fewer_microbatches_and_which_bubble_is_whose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "line.svg"
    plan = planned(capsys, f"{BLOOM} --timeline {path}")
    text = path.read_text(encoding="utf-8")
    assert "1f1b, 12 ranks, a100-80g: a step with 24 microbatches in place of 128" in text
    drawn = float(re.search(r"bubble ([0-9.]+)% of what is drawn; with 128 microbatches: step", text).group(1))  # type: ignore[union-attr]
    whole = float(re.search(r"step [0-9.]+ s, bubble ([0-9.]+)% of it", text).group(1))  # type: ignore[union-attr]
    assert whole / 100 == pytest.approx(plan["step_parts"]["bubble"]["value"] / plan["step_seconds"]["value"], abs=1e-3)
    assert 25 < drawn < 33  # of equal stages (p - 1) / (m + p - 1) = 31 %
    assert whole < 10


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved --virtual-stages 2", "zero-bubble"])
def test_every_box_of_a_time_line_has_its_number_and_no_transfer_crosses_one(schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "line.svg"
    flags = BLOOM.replace("--schedule 1f1b", f"--schedule {schedule}")
    assert main([*flags.split(), "--timeline", str(path)]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    boxes = [number for number, line in enumerate(lines) if "of microbatch" in line]
    numbers = [
        line for line in lines if re.search(r'text-anchor="middle">[0-9]+</text>', line) and "#6b7280" not in line
    ]
    transfers = [number for number, line in enumerate(lines) if line.startswith("<line") and "#c2410c" in line]
    assert len(numbers) == len(boxes) > 500
    assert len(transfers) > 500
    assert max(transfers[:-1]) < min(boxes)  # the last is that of the legend


def test_activations_that_are_few_beside_the_state_are_drawn_by_a_scale_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    assert main([*BLOOM.split(), "--memory-timeline", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "the dark strip is not to scale: the height of a row above it is" in text
    heights = [float(found) for found in re.findall(r'height="([0-9.]+)" fill="#9db7d9"', text)]
    assert max(heights) == pytest.approx(36, abs=0.5)  # of a row of 46 pixels
    assert sum(height > 4 for height in heights) > 0.9 * len(heights)


def test_what_waits_for_weight_gradients_is_a_term_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "pretrain_gpt.py --preset gpt2-large --tp 2 --pp 4 --dp 2 --global-batch-size 64 --cluster h100"
    name = "kept for weight gradients"
    whole = planned(capsys, f"{flags} --schedule 1f1b")["memory"]
    assert not any(rank["bytes"][name] for rank in whole)
    picture = tmp_path / "memory.svg"
    split = planned(capsys, f"{flags} --schedule zero-bubble --memory-timeline {picture}")["memory"]
    for rank, other in zip(split, whole, strict=True):
        assert rank["bytes"]["activations"] == pytest.approx(other["bytes"]["activations"], rel=0.15)
        assert sum(rank["bytes"].values()) == pytest.approx(rank["peak"]["value"])
        assert rank["bytes"][name] > 0
    # The last rank has one microbatch in flight, and three more whose weights' gradients are still to be computed.
    assert split[-1]["bytes"][name] > 3 * split[-1]["bytes"]["activations"]
    text = picture.read_text(encoding="utf-8")
    assert "yellow: kept for weight gradients" in text
    assert "the height of a row is" in text  # a twentieth of the device's memory would be a line
    drawn = re.findall(r"kept for weight gradients: ([0-9.]+) GiB", text)
    fullest = max(rank["peak"]["value"] for rank in split) / GIB
    assert max(map(float, drawn)) == pytest.approx(fullest, rel=0.02)


def test_calibration_predicts_the_run_that_it_is_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config((1, 1, 1), tmp_path)
    save_toml(config, tmp_path / "config.toml")
    records = [{"step": step, "perf/step_time_s": seconds} for step, seconds in enumerate((9.0, 0.5, 0.5, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert main(["--calibrate", str(tmp_path)]) == 0
    capsys.readouterr()
    cluster = tmp_path / "cluster.toml"
    plan = planned(capsys, f"pretrain_gpt.py --config {tmp_path / 'config.toml'} --cluster {cluster}")
    assert plan["step_seconds"]["value"] == pytest.approx(0.5, rel=1e-3)
    assert plan["step_seconds"]["origin"] == "fitted"


def test_calibration_refuses_a_cluster_without_the_peak_and_flags_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_toml(make_config((1, 1, 1), tmp_path), tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time_s": 0.5}', encoding="utf-8")
    cluster = tmp_path / "own.toml"
    text = "\n".join(line for line in to_toml(CLUSTERS["h100"]).splitlines() if not line.startswith("fp32 ="))
    cluster.write_text(text, encoding="utf-8")
    assert main(["--calibrate", str(tmp_path), "--cluster", str(cluster)]) == 2
    assert "has no peak for --precision fp32" in capsys.readouterr().err
    assert main(["--calibrate", str(tmp_path), "--tp", "3"]) == 2
    assert "--tp has no effect with --calibrate" in capsys.readouterr().err


def test_calibration_takes_runs_of_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--mock-data --vocab-size 64 --train-iters 4 --num-layers 2 --hidden-size 32 --num-attention-heads 2"
    config = parse_config(flags.split(), prog="pretrain_bert.py", description="", kind=BertConfig)
    save_toml(config, tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time_s": 0.5}', encoding="utf-8")
    assert main(["pretrain_bert.py", "--calibrate", str(tmp_path)]) == 0
    assert "predicted with it: 0.5 s (+0.0%)" in capsys.readouterr().out


def test_a_search_has_layouts_for_fewer_samples_than_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset gpt2-large --global-batch-size 2 --cluster a100-40g --world-size 8 --search"
    found = planned(capsys, f"{flags} --max-pp 1 --max-micro-batch-size 1")
    assert {row["layout"]["dp"] for row in found["layouts"]} == {2}


@pytest.mark.parametrize(("name", "said"), [("missing", "is not a directory"), (".", "config.toml is missing")])
def test_a_directory_without_a_run_is_refused(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--calibrate", str(tmp_path / name)]) == 2
    text = capsys.readouterr().err
    assert f"--calibrate {tmp_path / name}" in text
    assert f"{said}: give the --output-dir of a run" in text
    assert "--config" not in text


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("memory_gb = 1e300", "memory_gb = 1e+300 must be a number from 0.001 to 1,000,000"),
        ("memory_gb = 1e-300", "memory_gb = 1e-300 must be a number from 0.001 to 1,000,000"),
        ("node_latency_us = -1", "node_latency_us = -1 must be a number from 0 to 10,000,000"),
        ("gpus_per_node = 0", "gpus_per_node = 0 must be a whole number from 1 to 100,000"),
        ("[peak_tflops]\nbf16 = 1e-308", "peak_tflops.bf16 = 1e-308 must be a number from 1e-06 to 1,000,000"),
        ("[efficiency]\nlinks = 1e-300", "efficiency.links = 1e-300 must be at least 0.001"),
    ],
)
def test_a_number_that_no_machine_has_is_refused_with_its_bounds(field: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'based_on = "h100"\n{field}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert refused.value.problems == (f"{path}: {said}",)


@pytest.mark.parametrize(
    ("name", "meant"), [("nope", ""), ("a100", "(did you mean a100-80g?)"), ("h10", "(did you mean h100?)")]
)
def test_a_cluster_is_suggested_only_where_its_name_is_near(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        cluster_named(name)
    assert refused.value.problems[0].partition(" in .toml")[2].strip() == meant


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--calibrate {tmp}", ["{tmp}: config.toml is missing", "{tmp}: metrics.jsonl cannot be read"]),
        ("--calibrate {tmp}/none", ["--calibrate {tmp}/none is not a directory"]),
        ("--goodput", ["--goodput: expected one argument"]),
        (
            "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 4 --search --max-memory-gb 0.1",
            ["--search: no layout of --world-size 4 fits h100"],
        ),
    ],
)
def test_every_refusal_is_a_list(
    flags: str, problems: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags.replace("{tmp}", str(tmp_path)).split()) == 2
    first, *listed, last = capsys.readouterr().err.splitlines()
    assert first == f"megacore: refused: {len(problems)} problem{'s' * (len(problems) > 1)}"
    assert last == "Flags and their defaults: plan.py --help"
    for line, said in zip(listed, problems, strict=True):
        assert line.startswith("  - ") and said.replace("{tmp}", str(tmp_path)) in line


def test_the_help_is_that_of_the_named_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain_bert.py", "--help"]) == 0
    assert capsys.readouterr().out.startswith(
        "usage: plan.py pretrain_bert.py --cluster NAME [flags of pretrain_bert.py]"
    )


def test_dry_run_plans_in_place_of_training() -> None:
    flags = "--dry-run --world-size 4 --mock-data --preset gpt2-tiny --tp 2 --train-iters 10 --cluster cpu"
    command = [sys.executable, "pretrain_gpt.py", *flags.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "# Plan: gpt2-tiny on 4 x cpu" in run.stdout


def test_the_terms_of_a_rank_add_up_to_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Or the report says which do not exist together; what lies in host memory is listed apart."""
    flags = "pretrain_gpt.py --preset gpt2-xl --cluster a100-40g --global-batch-size 48"
    together = [
        "--pp 4 --dp 4 --schedule zero-bubble --micro-batch-size 2",
        "--dp 16 --zero-stage 2",
        "--pp 4 --dp 4 --schedule interleaved --virtual-stages 4 --zero-stage 3",
        "--pp 2 --dp 8 --optimizer muon --zero-stage 2",
        "--dp 16 --zero-stage 2 --offload-optimizer",
        "--dp 16 --offload-activations",
    ]
    apart = ["--dp 16 --zero-stage 1 --train-iters 1", "--dp 16 --zero-stage 2 --micro-batch-size 3"]
    for layout in [*together, *apart]:
        plan = planned(capsys, f"{flags} {layout}")
        differ = [sum(rank["bytes"].values()) / rank["peak"]["value"] - 1 for rank in plan["memory"]]
        assert min(differ) > -1e-9, layout
        assert main([*flags.split(), *layout.split()]) == 0
        says = "add up to more than a peak" in capsys.readouterr().out
        assert says == (max(differ) > 0.01) == (layout not in together), layout
        on_host = [sum(rank["host_bytes"].values()) for rank in plan["memory"]]
        assert all(on_host) == ("offload" in layout), layout


def test_a_plan_shows_what_is_sent_of_tied_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """Once a step, by the first and the last stage: a shard of the table in fp32. The ranks are in different nodes."""
    flags = "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 12 --dp 8 --global-batch-size 2048 --cluster a100-80g"
    table = 250880 // 4 * 14336 * 4
    for zero, shards in (("0", 1), ("1", 8)):
        sent = planned(capsys, f"{flags} --zero-stage {zero}")["bytes_per_rank_and_step"]
        assert sent["tied gradients, between nodes"]["value"] == table / shards
    assert main([*flags.split(), "--zero-stage", "0"]) == 0
    assert f"| tied gradients | between nodes | {table / 1e6:,.3f} |" in capsys.readouterr().out
