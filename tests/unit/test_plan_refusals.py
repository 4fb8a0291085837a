"""tools/plan.py: what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacore.commands.dry_run import dry_run
from megacore.config.cli import save_toml
from megacore.plan.cluster import CLUSTERS, to_toml
from tests.parity.runs import make_config
from tests.unit.planning import planned
from tools.plan import main


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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc refuses new files to root too")
def test_pictures_that_cannot_be_written_are_refused_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    flags = f"pretrain_gpt.py --preset gpt2-small --cluster moon --timeline {pipe} --memory-timeline /proc/m.svg"
    assert main(flags.split()) == 2
    out, text = capsys.readouterr()
    assert not out
    for part in (
        "3 problems",
        "--cluster moon",
        f"--timeline {pipe} is not a regular file",
        "--memory-timeline /proc/m.svg cannot be written: /proc takes no new files",
    ):
        assert part in text


def test_two_pictures_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.svg"
    flags = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --timeline {path} --memory-timeline {path}"
    assert main(flags.split()) == 2
    assert f"--timeline and --memory-timeline are both {path}" in capsys.readouterr().err


def test_calibration_refuses_a_cluster_without_the_peak_and_flags_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_toml(make_config((1, 1, 1), tmp_path), tmp_path / "config.toml")
    (tmp_path / "metrics.jsonl").write_text('{"perf/step_time_s": 0.5}\n' * 4, encoding="utf-8")
    cluster = tmp_path / "own.toml"
    text = "\n".join(line for line in to_toml(CLUSTERS["h100"]).splitlines() if not line.startswith("fp32 ="))
    cluster.write_text(text, encoding="utf-8")
    assert main(["--calibrate", str(tmp_path), "--cluster", str(cluster)]) == 2
    assert "has no peak for --precision fp32" in capsys.readouterr().err
    assert main(["--calibrate", str(tmp_path), "--tp", "3"]) == 2
    assert "--tp has no effect with --calibrate" in capsys.readouterr().err
    assert main(["--calibrate", str(tmp_path), "--clustr", "cpu"]) == 2
    assert "--clustr is not a flag: did you mean --cluster?" in capsys.readouterr().err


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
    ("flags", "problems"),
    [
        ("--calibrate {tmp}", ["{tmp}: config.toml is missing", "{tmp}: metrics.jsonl is missing"]),
        ("--calibrate {tmp}/none", ["--calibrate {tmp}/none is not a directory"]),
        ("--calibrate", ["--calibrate needs a value: --calibrate RUN"]),
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


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--cluster", ["--cluster needs a value: --cluster NAME"]),
        (
            "--cluster --search",
            ["--cluster needs a value: --cluster NAME", "--search needs --world-size: the number of ranks"],
        ),
        (
            "--cluster h100 --search=yes --world-size=65 --goodput=2 --tokens",
            [
                "--search yes: a switch takes no value: use --search",
                "--tokens needs a value: --tokens N",
                "--goodput 2 must be a number from 0.01 to 1",
            ],
        ),
        (
            "--cluster none.toml --json='1' --top",
            [
                "--json '1': a switch takes no value: use --json",
                "--top needs a value: --top N",
                "--cluster none.toml: there is no such file",
            ],
        ),
    ],
)
def test_a_flag_that_cannot_be_read_hides_no_other_problem(
    flags: str, problems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --tp 5 --pp 13"
    known = [
        "--tp 5 must divide --num-attention-heads 12",
        "--tp 5 must divide --ffn-hidden-size",
        "--pp 13 must be at",
    ]
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([*run.split(), *flags.split()]))
    assert stop.value.code == 2
    listed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    for line, said in zip(sorted(listed), sorted([*known, *problems]), strict=True):
        assert line.startswith(f"  - {said}"), line


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--preset gpt2-small --clustr h100", ["--clustr is not a flag: did you mean --cluster?"]),
        (
            "--preset gpt2-small --cluster h100 --timelin x.svg --top 3",
            ["--timelin is not a flag: did you mean --timeline?", "--top has no"],
        ),
        (
            "--preset gpt2-small --cluster h100 --goodput 0.5",
            ["--goodput has no effect without --tokens: add --tokens, or leave it out"],
        ),
        ("--preset gpt2-small --cluster h100 --price-per-hour 3", ["--price-per-hour has no effect without --tokens"]),
        (
            "--preset gpt2-small --cluster h100 --cluster=a100-80g",
            ["--cluster is given twice, as --cluster h100 and as --cluster a100-80g"],
        ),
        (
            "--preset gpt2-small --cluster h100 --device cpu",
            ["--device cpu: the cluster h100 has accelerators: leave it out, or use"],
        ),
        (
            "--preset gpt2-small --cluster cpu --device cuda",
            ["--device cuda: the cluster cpu computes on CPUs: leave it out, or use"],
        ),
        ("--preset gpt2-small --cluster h100 --json=yes", ["--json yes: a switch takes no value: use --json"]),
        (
            "--preset gpt2-small --cluster h100 --dry-run full",
            ["--dry-run has no effect here, as plan.py always plans"],
        ),
        (
            "--cluster h100 --preset gpt2-small foo",
            ["'foo' belongs to no flag (it follows --preset gpt2-small): leave it out"],
        ),
        (
            "--cluster h100 --preset gpt2-small --train-iters 10 foo",
            ["'foo' belongs to no flag (it follows --train-iters 10)"],
        ),
        (
            "--preset gpt2-small --cluster h100 --timeline .svg",
            ["--timeline .svg must end in .svg or .png: use --timeline out.svg"],
        ),
    ],
)
def test_a_refusal_says_what_was_given_and_nothing_else(
    flags: str, problems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["pretrain_gpt.py", *flags.split()]))
    assert stop.value.code == 2
    listed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    for line, said in zip(sorted(listed), sorted(problems), strict=True):
        assert line.startswith(f"  - {said}"), line


def test_a_flag_of_ours_may_have_underscores_as_those_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "pretrain_gpt.py --preset gpt2-small --cluster h100 --world_size 2 --tokens=1e9")
    assert plan["world_size"] == 2


def test_the_entry_point_may_follow_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--preset gpt2-small --cluster h100 pretrain_gpt.py")["model"]["preset"] == "gpt2-small"


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ("--preset mixtral-8x7b --ep 8 --dp 6 --global-batch-size 48", "(--dp 6): use --ep 1 or 2, or --dp 8"),
        ("--preset llama-3-8b --world-size 6 --tp 4", "use --tp 1 or 2, or start 4 or 8 processes"),
        (
            "--preset gpt2-small --tp 5",
            "--ffn-hidden-size 3072 (4 x --hidden-size): use --tp 1, 2, 3, 4, 6 or 12",
        ),
        ("--preset gpt2-small --tp 5 --pp 13 --world-size 64", "64 processes: use --tp 4 --pp 8"),
        (
            "--preset gpt2-small --num-layers 6 --pp 4 --schedule interleaved --virtual-stages 2",
            "must be at most --num-layers 6: use --pp 2 or 3, or --num-layers 8 or more",
        ),
        (
            "--preset gpt2-small --schedule interleaved --virtual-stages 3",
            "needs a pipeline: use --pp 2, 3 or 4, or leave --schedule and --virtual-stages out",
        ),
        (
            "--preset gpt2-small --virtual-stages 4",
            "1 problem\n  - --virtual-stages 4 needs --schedule interleaved and a pipeline: use --pp 2 --schedule "
            "interleaved, or leave --virtual-stages out\n",
        ),
        (
            "--preset gpt2-small --virtual-stages 4 --schedule gpipe --world-size 3",
            "use --pp 3 --schedule interleaved, or leave --virtual-stages out\n",
        ),
        (
            "--preset gpt2-small --recompute-num-layers 99 --recompute none",
            "--num-layers 12: use --recompute full --recompute-num-layers 12, or leave it out",
        ),
        (
            "--preset gpt2-small --tp 2 --sequence-parallel --seq-length 1023",
            "1022 or 1024, or --tp 3, or leave",
        ),
        ("--preset gpt2-small --seq-length 99999999999", "at most 100000000: use 128, 256, 512 or 1024"),
        ("--preset gpt2-small --peak-tflops 1e300", "--peak-tflops 1e+300 must be at least 1e-06 and at most 1000000"),
        ("--preset gpt2-small --peak-tflops nan", "--peak-tflops nan is not a finite number"),
        ("--preset gpt2-small --device cud", "--device cud is not known: use auto, cpu, cuda,"),
    ],
)
def test_a_way_out_leads_to_no_other_refusal(flags: str, ways: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["pretrain_gpt.py", "--cluster", "h100", *flags.split()]))
    assert stop.value.code == 2
    assert ways in capsys.readouterr().err


def test_a_file_that_is_no_schedule_is_refused_in_words_of_the_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xff\x00\x01")
    assert main(f"pretrain_gpt.py --preset gpt2-small --cluster h100 --pp 2 --schedule-csv {path}".split()) == 2
    said = f"--schedule-csv {path} cannot be read as a schedule, because it is not a CSV file: write one row per rank"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--dry-run=full --timeline x.svg --cluster nope",
            "--timeline has no effect with --dry-run=full, which computes",
        ),
        ("--dry-run=full --tokens 3e9 --cluster nope", "--tokens has no effect with --dry-run=full"),
        (
            "--dry-run --calibrate run --cluster nope",
            "--calibrate is a flag of tools/plan.py: use python tools/plan.py",
        ),
        ("--dry-run --cluster nope --world-size", "--world-size needs a value: --world-size N"),
        ("--dry-run maybe --cluster nope", "--dry-run maybe is not known: use plan or full"),
        (
            "--dry-run=full --dry-run --cluster nope",
            "--dry-run is given twice, as --dry-run full and as --dry-run plan",
        ),
        ("--dry-run=ful --bogus 3", "--dry-run ful is not known: use plan or full (did you mean full?)"),
        ("--dry-run 'ful' --bogus 3", "--dry-run 'ful' is not known: use plan or full (did you mean full?)"),
        ("--dry-run ful --bogus 3", "--bogus is not a flag"),
        ("--dry-run --cluster nope --clustr x", "--clustr is not a flag: did you mean --cluster?"),
        ("--dry-run --cluster cpu --device cuda", "--device cuda: the cluster cpu computes on CPUs"),
    ],
)
def test_a_dry_run_refuses_flags_of_other_modes(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = "--mock-data --preset gpt2-small --train-iters 2"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(dry_run([*run.split(), *flags.split()], "pretrain_gpt.py"))
    assert stop.value.code == 2
    assert f"  - {said}" in capsys.readouterr().err


def test_what_a_full_dry_run_cannot_do_is_reported_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[parallel]\ndevice = "cpu"\n', encoding="utf-8")
    flags = f"--mock-data --preset gpt2-small --train-iters 2 --dry-run=full --compile --config {file} --timeline x.svg"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(dry_run(flags.split(), "pretrain_gpt.py"))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "3 problems" in text
    assert "  - --compile: compiled code does not run on fake tensors" in text
    assert "  - device = cpu: --dry-run=full takes the job for one of h100; add --cluster cpu" in text
    assert "  - --timeline has no effect with --dry-run=full" in text


def test_a_full_dry_run_reports_what_it_cannot_do_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\ncompile = true\n", encoding="utf-8")
    run = "--preset gpt2-small --mock-data --train-iters 2 --dry-run=full"
    for flags, said in (
        ("--compile --tp 5", ["--tp 5 must divide", "--compile: compiled code does not run"]),
        (f"--config {file} --tp 5", ["--tp 5 must divide", "--compile: compiled code does not run"]),
        ("--compile", ["--compile: compiled code does not run"]),
    ):
        with pytest.raises(SystemExit) as stop:
            raise SystemExit(dry_run([*run.split(), *flags.split()], "pretrain_gpt.py"))
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert all(part in text for part in said) and text.count("fake tensors") == 1, text


def test_whole_experts_per_rank_need_no_flag_on_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset mixtral-8x7b --tp 2 --dp 4 --ep 8 --etp 1 --global-batch-size 8 --cluster"
    assert planned(capsys, f"{flags} h100")["layout"] == planned(capsys, f"{flags} h100 --sequence-parallel")["layout"]
    assert main(f"{flags} cpu".split()) == 2
    assert "--etp 1 with --tp 2 needs --sequence-parallel" in capsys.readouterr().err


EMPTY = (
    ("--cluster h100 --timeline=", "--timeline"),
    ("--cluster=", "--cluster"),
    ("--cluster h100 --world-size=", "--world-size"),
    ("--cluster h100 --software=", "--software"),
    ("--cluster h100 --config=", "--config"),
)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What is said of a command line that is refused."""
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("flags", "flag"), EMPTY)
def test_an_empty_value_is_refused_by_name(flags: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one word with its flag, and in another."""
    before, _, name = flags.rstrip("=").rpartition("--")
    for argv in (flags.split(), [*before.split(), f"--{name}", ""]):
        said = refused(capsys, ["pretrain_gpt.py", "--preset", "gpt2-small", *argv])
        assert f"refused: 1 problem\n  - {flag} is empty: give it a value, or leave the flag out\n" in said


def test_empty_values_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain_gpt.py", "--preset", "gpt2-small", "--schedule=", "--timeline=", "--cluster="]
    said = refused(capsys, words)
    assert "3 problems" in said and "--schedule is empty: use auto, 1f1b, " in said
    assert "1 problem\n  - --calibrate is empty: " in refused(capsys, ["--calibrate", ""])


def test_a_directory_is_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, ["pretrain_gpt.py", "--preset", "gpt2-small", "--cluster", str(tmp_path)])
    assert f"--cluster {tmp_path} is a directory: use a100-40g, " in said
    assert "or a file that ends in .toml" in said


def test_a_file_that_is_no_toml_has_no_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a file that sets fields needs to be told how its keys are shown."""
    file, given = tmp_path / "run.toml", "pretrain_gpt.py --preset gpt2-small --cluster h100 --config"
    for text, says in (("[model\nnum_layers = ", False), ("[parallel]\ntp = 5\n", True)):
        file.write_text(text, encoding="utf-8")
        assert ("are shown as their flags" in refused(capsys, [*given.split(), str(file)])) == says


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        (
            "--preset llama-3-8b --recompute-num-layers 50",
            [
                "--recompute-num-layers 50 has no effect with --recompute none: leave it out\n",
                "must be at most --num-layers 32: use --recompute full --recompute-num-layers 32, or leave it out\n",
            ],
        ),
        ("--preset llama-3-8b --recompute-num-layers 5", ["--recompute none: leave it out, or use --recompute full\n"]),
        (
            "--preset gpt2-small --offload-params",
            ["use --zero-stage 3 --offload-optimizer, or leave --offload-params out\n"],
        ),
        (
            "--preset gpt2-small --offload-params --zero-stage 4",
            ["at least 0 and at most 3: use --zero-stage 3 --offload-optimizer\n"],
        ),
        (
            "--preset mixtral-8x7b --cp 4 --ep 4 --tp 3 --etp 3",
            ["14336: use --tp 2 --etp 2\n", "heads 32: the change proposed above solves this too\n"],
        ),
    ],
)
def test_what_is_proposed_is_accepted_at_once(flags: str, ways: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, ["pretrain_gpt.py", "--cluster", "h100", *flags.split()])
    assert all(way in said for way in ways), said


def test_a_head_that_is_no_whole_number_of_dimensions_is_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, ["pretrain_gpt.py", "--cluster", "h100", "--preset", "llama-3-8b", "--hidden-size", "1000"])
    assert "--rotary-percent" not in said and "must be a multiple of --num-attention-heads" in said
