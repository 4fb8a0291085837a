"""tools/plan.py: what it prints of a layout, and the ways out of one that does not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.commands.dry_run import dry_run
from megacore.plan.memory import GIB
from tests.unit.planning import BLOOM, planned, with_flags
from tools.plan import main

ROOT = Path(__file__).resolve().parent.parent.parent


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


def test_a_run_is_planned_by_its_output_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, words in (
        ('[model]\npreset = "gpt2-small"\n', ["pretrain_gpt.py", "--preset", "gpt2-small"]),
        ('[model]\npreset = "bert-base"\n\n[bert]\n', ["pretrain_bert.py", "--preset", "bert-base"]),
    ):
        (tmp_path / "config.toml").write_text(content, encoding="utf-8")
        plans = []
        for run in ([str(tmp_path)], words):
            assert main([*run, "--cluster", "h100", "--world-size", "8"]) == 0
            plans.append(capsys.readouterr().out)
        assert plans[0] == plans[1]


SMALL = "pretrain_gpt.py --preset gpt2-small --cluster a100-80g --global-batch-size 64"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", None),
        ("--optimizer lion --offload-activations", "--optimizer lion --offload-activations"),
        ("--dp 2 --zero-stage 1 --offload-optimizer", "--offload-optimizer"),
        ("--num-query-groups 2 --mup-base-width 256 --lr 1e-3", "--num-query-groups 2 --mup-base-width 256"),
        ("--grad-reduce-dtype bf16 --window-size 256 --lr 1e-4", "--window-size 256 --grad-reduce-dtype bf16"),
        ("--pp 2 --pipeline-layout E,6*t|6*t,H", "--pipeline-layout E,6*t|6*t,H"),
    ],
)
def test_a_report_names_what_is_not_the_default(
    flags: str, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words and in JSON; not what the line of the layout has, and not learning rates and the like."""
    assert main(f"{SMALL} {flags}".split()) == 0
    found = re.findall(r"^- other settings that are not the default: `(.*)`$", capsys.readouterr().out, re.MULTILINE)
    assert found == ([] if line is None else [line])
    assert " ".join(planned(capsys, f"{SMALL} {flags}")["settings"]) == (line or "")


MIXTURE = "pretrain_gpt.py --preset mixtral-8x7b --tp 2 --dp 8 --ep 8 --zero-stage 1 --global-batch-size 64"
BLOOM_ON_TWO_STAGES = "pretrain_gpt.py --preset bloom-176b --tp 4 --pp 2 --dp 4 --cluster h100"
ON_LAPTOP = "pretrain_gpt.py --preset gpt2-small --dp 2 --tokens 1e8 --cluster laptop"
# Half of a report, and the flags that bring it; without them it is not there.
SAID = {
    "padded from 50,257 to 50,432)": f"{SMALL} --tp 2",  # by hand: pieces of 128 for each rank
    "- onebitadam sends whole gradients in its warm-up": (
        f"{SMALL} --dp 2 --optimizer onebitadam --onebit-freeze-step 100"
    ),
    "--pipeline-balance uniform ": f"{SMALL} --pp 2 --pipeline-balance uniform",
    "| pipeline bubble |": f"{SMALL} --pp 2",
    "schedule gpipe": f"{SMALL} --tp 2 --schedule gpipe",
    "DOES NOT FIT: pipeline rank 1": f"{BLOOM_ON_TWO_STAGES} --pipeline-balance parameters",
    "The upper end of this range does not fit into 76.7 GiB.": f"{MIXTURE} --cluster h100",
    "- no price: it is 0 USD per device and hour; --price-per-hour USD sets another": ON_LAPTOP,
    " USD at 0.5 USD per device and hour (assumed; ": f"{ON_LAPTOP} --price-per-hour 0.5",
    "- software that runs the step: torch-eager": f"{SMALL} --software torch-eager",
    # By hand: a shard of the table in fp32, sent once by the first and the last stage.
    f"| tied gradients | between nodes | {250880 // 4 * 14336 * 4 / 8e6:,.3f} |": BLOOM,
}


@pytest.mark.parametrize("said", SAID)
def test_a_report_says_what_is_special(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, is_there in ((SAID[said], True), (SMALL, False)):
        assert main(flags.split()) == 0
        assert (said in capsys.readouterr().out) == is_there


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


LONG = "llama-3-8b-128k --seq-length 65536 --zero-stage 3 --recompute full --micro-batch-size 1 --global-batch-size 8"


DOES_NOT_FIT = {
    "gpt2-xl --pp 4 --schedule gpipe --micro-batch-size 8 --global-batch-size 128 --cluster a100-40g": (
        "--schedule 1f1b"
    ),
    f"{LONG} --dp 8 --cluster a100-40g": "--tp 2 --dp 4 --global-batch-size 8",
    "bloom-176b --cluster laptop --micro-batch-size 1": ("--preset qwen3-0.6b --seq-length 2048, a smaller model"),
    "llama-3-8b --cluster laptop": (
        "--recompute full --tp 8 --pp 2, on 16 machines with as much memory (gpus_per_node = 1)"
    ),
    "mixtral-8x7b --tp 4 --dp 2 --global-batch-size 8 --cluster h100": (
        "--dp 4 --zero-stage 3 --global-batch-size 8, on 16 devices"
    ),
}


@pytest.mark.parametrize(("flags", "known"), DOES_NOT_FIT.items())
def test_the_ways_out_fit_when_they_are_planned(
    flags: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each as flags in place of those that do not fit, with the memory that it names; more machines as a cluster file,
    as the report says."""
    given = f"pretrain_gpt.py --preset {flags}"
    plan = planned(capsys, given)
    assert not plan["fits"]
    assert len(plan["ways_out"]) == 3
    assert any(way.startswith(f"{known}: ") for way in plan["ways_out"]), plan["ways_out"]
    for way in plan["ways_out"]:
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
        peak = again["peak_bytes"] / GIB
        assert f": {peak:,.1f} GiB" in way, (peak, way)


def test_a_plan_loads_only_what_it_needs() -> None:
    """What takes longer to load than a plan takes."""
    idle = {"torch", "numpy", "tokenizers", "rich", "multiprocessing.connection", "http.client"}
    words = [*BLOOM.split(), "--estimate"]
    code = f"import sys, tools.plan as t; t.main({words!r}); sys.exit(bool({idle!r} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--disable-bias-linear --num-experts 8 --moe-router-topk 2 --ep 8", 8),
        ("--tp 2 --dp 2", 4),
        ("--tp 2 --pp 8", 16),
        ("--tp 2 --world-size 4", 4),
    ],
)
def test_a_dry_run_has_the_processes_of_its_launcher_where_its_degrees_allow_it(
    flags: str, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = f"--mock-data --vocab-size 64 --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 {flags}"
    assert dry_run(f"{run} --global-batch-size 8 --train-iters 2 --dry-run".split(), "pretrain_gpt.py") == 0
    assert f" on {ranks} x laptop\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--zero-stage 1", ["--zero-stage 1 changes nothing with one data-parallel rank (--dp 1)"]),
        ("--zero-stage 1 --dp 2", []),
        ("--software megatron-lm", []),  # whose usual flags nobody has typed
        ("--software megatron-lm --schedule 1f1b", ["--schedule 1f1b changes nothing without a pipeline (--pp 1)"]),
        ("--zero-stage 1 --pipeline-balance time --search --world-size 2", []),  # which has layouts with more ranks
    ],
)
def test_a_flag_that_changes_nothing_is_noted_if_it_is_given(
    flags: str, noted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"pretrain_gpt.py --preset gpt2-small --global-batch-size 8 --cluster h100 {flags}".split()) == 0
    assert capsys.readouterr().err.splitlines() == [f"megacore: note: {note}" for note in noted]


def test_a_plan_of_a_file_needs_no_data_and_no_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a plan without a file does not."""
    file = tmp_path / "run.toml"
    file.write_text("[model]\npreset = 'gpt2-small'\n")
    of_file = planned(capsys, f"pretrain_gpt.py --config {file} --cluster h100")
    assert of_file == planned(capsys, "pretrain_gpt.py --preset gpt2-small --cluster h100")
    for ending in ("bin", "idx"):
        (tmp_path / f"corpus.{ending}").touch()
    file.write_text(f"[model]\npreset = 'gpt2-small'\n[data]\ntrain_data_path = ['{tmp_path}/corpus']\n")
    assert of_file == planned(capsys, f"pretrain_gpt.py --config {file} --cluster h100")
