"""tools/plan.py: what it prints of a layout, and the ways out of one that does not fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.commands.dry_run import dry_run
from megacore.config import Config
from megacore.config.bert import BertConfig
from megacore.models.flops import block_flops, head_flops
from megacore.plan.cluster import CLUSTERS
from megacore.plan.memory import GIB
from megacore.plan.other_settings import other_settings
from megacore.plan.planner import step_flops
from tests.unit.planning import BLOOM, planned, resolved
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


def test_every_preset_has_its_own_defaults() -> None:
    for kind in (Config, BertConfig):
        for preset in kind.presets:
            assert other_settings(resolved(f"--preset {preset} --mock-data --train-iters 1", kind)) == []


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


@pytest.mark.parametrize(
    "flags",
    [
        "llama-3-8b --dp 2",
        "gpt2-small --pp 4 --schedule interleaved --virtual-stages 2 --global-batch-size 100000",
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


def test_the_software_that_runs_the_step_is_named_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{BLOOM} --no-sequence-parallel --attention fused-softmax"
    own, theirs = planned(capsys, flags), planned(capsys, f"{flags} --software megatron-lm")
    assert (own["software"], theirs["software"]) == ("megacore", "megatron-lm")
    # Nothing of it runs beside computing, neither sums of tensor parallelism nor reductions between replicas.
    assert set(theirs["hidden_seconds"].values()) == {0.0}
    assert theirs["step_parts"]["replicas"]["value"] > own["step_parts"]["replicas"]["value"]
    assert theirs["step_seconds"]["value"] > own["step_seconds"]["value"]
    for key in ("parameters", "bytes_per_rank_and_step"):  # these do not depend on it
        assert theirs[key] == own[key]


@pytest.mark.parametrize("layout", ["--dp 2 --zero-stage 2", "--tp 2"])
def test_on_a_cpu_nothing_travels_beside_computing(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """gloo copies and adds on the cores that compute."""
    flags = "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
    flags += " --vocab-size 8192 --global-batch-size 8 --micro-batch-size 4 --cluster cpu"
    plan = planned(capsys, f"{flags} {layout}")
    assert set(plan["hidden_seconds"].values()) == {0.0}
    assert sum(plan["step_parts"][part]["value"] for part in ("tensor", "replicas")) > 0.0


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
    f"{INTERLEAVED} --micro-batch-size 11 --global-batch-size 176 --cluster a100-40g": (
        "--schedule 1f1b --virtual-stages 1"
    ),
    f"{LONG} --dp 8 --cluster a100-40g": "--tp 2 --dp 4 --global-batch-size 8",
    "gpt2-medium --dp 4 --recompute full --micro-batch-size 1 --global-batch-size 8 --cluster laptop": (
        "--dp 2 --global-batch-size 8, with 2 ranks on the machine"
    ),
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
        changed, kept = re.split(", |: ", way)[0].split(), given.split()
        for flag in (word for word in changed if word in kept and word.startswith("--")):
            at = kept.index(flag)
            del kept[at : at + 2]
        if "machines with as much memory" in way:
            of_machine = re.search(r"\((gpus_per_node = \d+)\)", way)
            assert of_machine is not None
            cluster = tmp_path / "machines.toml"
            cluster.write_text(f'based_on = "{plan["cluster"]}"\n{of_machine[1]}', encoding="utf-8")
            kept[kept.index("--cluster") + 1] = str(cluster)
        again = planned(capsys, " ".join([*kept, *changed]))
        assert again["fits"], way
        peak = again["peak_bytes"] / GIB
        assert f": {peak:,.1f} GiB" in way, (peak, way)


@pytest.mark.parametrize(("length", "is_first"), [(262_144, True), (1_048_576, False)])
def test_much_shorter_sequences_do_not_come_before_other_ways_out(
    length: int, is_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """About 240,000 positions fit."""
    saving = "--recompute full --offload-optimizer --offload-params --zero-stage 3 --global-batch-size 1"
    long = f"--preset llama-3.2-1b --seq-length {length} --max-position-embeddings {length}"
    first, *_ = planned(capsys, f"pretrain_gpt.py {long} {saving} --cluster a100-40g")["ways_out"]
    assert first.startswith("--seq-length ") == is_first


def test_a_plan_loads_only_what_it_needs() -> None:
    """What takes longer to load than a plan takes."""
    idle = {"torch", "numpy", "tokenizers", "rich", "multiprocessing.connection", "http.client"}
    words = [*BLOOM.split(), "--estimate"]
    code = f"import sys, tools.plan as t; t.main({words!r}); sys.exit(bool({idle!r} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_the_published_sizes_of_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    for preset, (total, active) in {"mixtral-8x7b": (46.7, 12.9), "qwen3-235b-a22b": (235.1, 22.2)}.items():
        plan = planned(capsys, f"pretrain_gpt.py --preset {preset} --dp 8 --ep 8 --zero-stage 1 --cluster b200")
        assert plan["parameters"]["value"] / 1e9 == pytest.approx(total, rel=3e-3)
        assert plan["active_parameters"]["value"] / 1e9 == pytest.approx(active, rel=3e-3)


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


def test_the_terms_of_a_rank_add_up_to_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Or the report says which do not exist together; what lies in host memory is listed apart."""
    flags = "pretrain_gpt.py --preset gpt2-xl --cluster a100-40g --global-batch-size 48"
    together = [
        "--pp 4 --dp 4 --schedule zero-bubble --micro-batch-size 2",
        "--dp 16 --zero-stage 2 --offload-optimizer",
        "--pp 4 --dp 4 --schedule interleaved --virtual-stages 4 --zero-stage 3",
    ]
    apart = [
        "--dp 16 --zero-stage 1 --train-iters 1",
        "--dp 16 --zero-stage 2 --micro-batch-size 3",
    ]
    for layout in [*together, *apart]:
        plan = planned(capsys, f"{flags} {layout}")
        differ = [sum(rank["bytes"].values()) / rank["peak"]["value"] - 1 for rank in plan["memory"]]
        assert min(differ) > -1e-9, layout
        assert main([*flags.split(), *layout.split()]) == 0
        says = "add up to more than the peak" in capsys.readouterr().out
        assert says == (max(differ) > 0.01) == (layout not in together), layout
        on_host = [sum(rank["host_bytes"].values()) for rank in plan["memory"]]
        assert all(on_host) == ("offload" in layout), layout


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


def test_a_device_that_is_large_enough_is_no_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50304"
    batch = "--micro-batch-size 1000000 --global-batch-size 1000000"
    plan = planned(capsys, f"pretrain_gpt.py {flags} {batch} --precision bf16 --cluster h100")
    needed = [
        float(one.replace(",", "")) for one in re.findall(r"devices with at least ([\d.,]+) GiB", str(plan["ways_out"]))
    ]
    assert needed and min(needed) > CLUSTERS["h100"].device.memory_bytes / GIB, plan["ways_out"]


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


# ---- recomputed blocks -----------------------------------------------------------------------------------------------

SHAPE = "--hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192 --micro-batch-size 1"
SHAPE += " --global-batch-size 8 --mock-data --train-iters 1 --recompute full"


@pytest.mark.parametrize(
    ("flags", "repeated"),
    [
        ("--pp 2 --pipeline-layout E,t|6*t,H --recompute-num-layers 2", 1 + 2),
        ("--pp 2 --pipeline-layout E,3*t|4*t,H --recompute-num-layers 2", 2 + 2),
        (
            "--pp 2 --schedule interleaved --virtual-stages 2 --pipeline-layout E,t|t|3*t|2*t,H "
            "--recompute-num-layers 2",
            1 + 1 + 2 + 2,
        ),
        ("--pp 2 --recompute-num-layers 7", 7),
        ("--pp 2", 7),
        ("--recompute-num-layers 3", 3),
    ],
)
def test_the_first_blocks_of_every_stage_are_computed_again(flags: str, repeated: int) -> None:
    config = resolved(f"--num-layers 7 {SHAPE} {flags}")
    one, head = (256 * part for part in (block_flops(config.model, 256), head_flops(config.model)))
    again = step_flops(config, attention="full", hardware=True) - step_flops(config, attention="full", hardware=False)
    assert again == pytest.approx(8 * repeated * one)
    assert step_flops(config, attention="full", hardware=False) == pytest.approx(8 * 3 * (7 * one + head))


# ---- units of sizes --------------------------------------------------------------------------------------------------

OF_TWO_LAYERS = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 256 --seq-length 64"
)


@pytest.mark.parametrize("cluster", ["laptop", "h100"])
def test_no_column_of_a_small_model_reads_zero(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "memory.svg"
    flags = f"{OF_TWO_LAYERS} --cluster {cluster} --pp 2 --global-batch-size 8 --memory-timeline {picture}"
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert "## Memory per rank in MiB, " in text and "GiB usable" in text
    table = text.partition("## Memory")[2].partition("\n\nFits")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| [0-9]", line)]
    assert len(rows) == 2
    for column in list(zip(*rows, strict=True))[2:]:
        assert any(float(cell.strip("*").replace(",", "")) > 0 for cell in column), column
    assert re.search(r"Fits: the highest peak is on pipeline rank \d, [\d,.]+ MiB", text)
    drawn = picture.read_text(encoding="utf-8")
    assert "0.00 GiB" not in drawn and re.search(r"peak [\d,.]+ MiB", drawn)
