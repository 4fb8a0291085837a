"""tools/plan.py: what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacore.commands.plan import dry_run
from megacore.config.cli import save_toml
from megacore.errors import ConfigError
from megacore.plan.cluster import CLUSTERS, cluster_named, load_cluster, to_toml
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--max-tp 1 --max-pp 1 --max-dp 1",
            "--search: --max-tp 1 x --max-pp 1 x --max-dp 1 = 1 must be at least --world-size 64: use larger ones, or "
            "at most --world-size 1",
        ),
        (
            "--max-dp 3 --max-tp 2",
            "--search: --max-tp 2 x --pp 8 (the largest of those that are at most --num-layers 12) x --max-dp 3 (2 is "
            "possible) = 32 must be at least --world-size 64",
        ),
        ("--tp 2 --pp 4 --dp 4", "--search: --tp 2 x --pp 4 x --dp 4 = 32 must be at least --world-size 64"),
        ("--tp 4 --min-dp 32", "--tp 4 x --min-dp 32 = 128 must be at most --world-size 64"),
        ("--tp 2 --min-tp 4", "--tp 2 must be at least --min-tp 4"),
        ("--pp 8 --max-pp 4", "--pp 8 must be at most --max-pp 4"),
        (
            "--tp 3",
            "--tp 3 is not possible: those that divide --world-size 64 and divide --num-attention-heads 12 are 1, 2",
        ),
        (
            "--schedule interleaved --max-virtual-stages 1",
            "--max-virtual-stages 1 leaves no --virtual-stages for --schedule interleaved, which has 2 or more",
        ),
        (
            "--schedule interleaved --min-pp 7",
            "--search: no valid layout of --world-size 64 has --schedule interleaved and --min-pp 7: use --schedule "
            "1f1b or zero-bubble, or --min-pp 4, or another",
        ),
        (
            "--virtual-stages 2 --max-pp 1",
            "--search: no valid layout of --world-size 64 has --virtual-stages 2 and --max-pp 1: use --virtual-stages "
            "1, or --max-pp 2, or another",
        ),
        ("--virtual-stages 12 --min-pp 2", "has --virtual-stages 12: use --virtual-stages 3, 4, 5 or 6, or another"),
        (
            "--micro-batch-size 8 --min-dp 16",
            "has --micro-batch-size 8 and --min-dp 16: use --micro-batch-size 1, 2 or 4, or --min-dp 8, or another",
        ),
        ("--max-memory-gb 200", "--max-memory-gb 200 must be at most 82.3, which is what a rank may take of h100"),
        (
            "--preset mixtral-8x7b --etp 2 --max-tp 1",
            "has --etp 2 and --max-tp 1: use --etp 1, or --max-tp 2, or another",
        ),
        ("--preset mixtral-8x7b --ep 8 --max-ep 4", "--ep 8 must be at most --max-ep 4"),
        (
            "--preset mixtral-8x7b --ep 3",
            "--ep 3 is not possible: those that divide --world-size 64 and divide --num-exp",
        ),
    ],
)
def test_flags_of_a_search_that_contradict_each_other_are_one_problem(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "" if "--preset" in flags else "--preset gpt2-small"
    given = f"pretrain_gpt.py --global-batch-size 64 --cluster h100 --world-size 64 --search {model} {flags}"
    assert main(given.split()) == 2
    text = capsys.readouterr().err
    assert said in text and text.count("\n  - ") == 1, text


def test_a_way_out_of_a_contradiction_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset gpt2-small --global-batch-size 64 --cluster h100 --world-size 64 --search"
    for given, ways in (
        ("--micro-batch-size 8 --min-dp 16", ("--micro-batch-size 4 --min-dp 16", "--micro-batch-size 8 --min-dp 8")),
        ("--virtual-stages 12 --min-pp 2", ("--virtual-stages 3 --min-pp 2", "--virtual-stages 6 --min-pp 2")),
        (
            "--schedule interleaved --min-pp 7",
            ("--schedule zero-bubble --min-pp 7", "--schedule interleaved --min-pp 4"),
        ),
    ):
        assert main([*flags.split(), *given.split()]) == 2
        for way in ways:
            assert main([*flags.split(), *way.split()]) == 0, way
    capsys.readouterr()


def test_every_contradiction_of_a_search_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset mixtral-8x7b --global-batch-size 64 --cluster h100 --world-size 64 --search"
    limits = "--min-dp 3 --max-dp 3 --min-tp 8 --max-tp 4 --ep 5 --max-memory-gb 100 --zero-stage 2 --max-zero-stage 1"
    assert main(["pretrain_gpt.py", *flags.split(), *limits.split()]) == 2
    text = capsys.readouterr().err
    for said in (
        "--min-tp 8 must be at most --max-tp 4",
        "--max-memory-gb 100 must be at most 82.3",
        "--min-dp 3 and --max-dp 3 leave no --dp",
        "--ep 5 is not possible",
        "--zero-stage 2 must be at most --max-zero-stage 1",
    ):
        assert said in text
    assert text.count("\n  - ") == 5


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--schedule zero-bubble --max-pp 1", ["--schedule zero-bubble has no effect with --max-pp 1"]),
        (
            "--schedule interleaved --pipeline-balance time --pp 1",
            [
                "--schedule interleaved has no effect with --pp 1, which leaves no pipeline: leave one of them out",
                "--pipeline-balance time has no effect with --pp 1",
            ],
        ),
        ("--sequence-parallel --max-tp 1", ["--sequence-parallel has no effect with --max-tp 1: leave one of them"]),
        ("--max-virtual-stages 4 --schedule 1f1b", ["--max-virtual-stages 4 has no effect with --schedule 1f1b"]),
        (
            "--min-tp 2 --tp 2 --max-tp 2",
            ["--min-tp 2 has no effect with --tp 2: leave one of them", "--max-tp 2 has no effect with --tp 2"],
        ),
        ("--zero-stage 1 --max-zero-stage 2", ["--max-zero-stage 2 has no effect with --zero-stage 1"]),
        (
            "--recompute-num-layers 13",
            ["--recompute-num-layers 13 is for --recompute full: add", "--recompute-num-layers 13 must be at most"],
        ),
        ("--recompute none --recompute-num-layers 3", ["--recompute-num-layers 3 has no effect with --recompute none"]),
        ("--max-memory-gb 0", ["--max-memory-gb 0 must be a number above 0, as in 80"]),
        ("--max-memory-gb nan", ["--max-memory-gb nan must be a number above 0"]),
    ],
)
def test_what_changes_nothing_in_a_search_is_refused(
    flags: str, problems: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 8 --search"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([*run.split(), *flags.split()]))
    assert stop.value.code == 2
    listed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]
    for line, said in zip(sorted(listed), sorted(problems), strict=True):
        assert line.startswith(f"  - {said}"), line


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
    assert 'based_on = "h900" is not known' in refused.value.problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak_tflops = 300", "peak_tflops = 300 must be a table, as in [peak_tflops] and bf16 = 312"),
        ("name = 3", 'name = 3 must be one line of text in quotes, as in name = "mine"'),
        ("source = 3", 'source = 3 must be one line of text in quotes, as in source = "mine"'),
        ('source = "a\\nb"', 'source = "a\\nb" must be one line of text in quotes'),
        ("gpus_per_node = true", "gpus_per_node = true must be a whole number"),
        ('memory_gb = "80"', 'memory_gb = "80" must be a number'),
        ("memory_gb = [true, 1979-05-27]", "memory_gb = [true, 1979-05-27] must be a number"),
        ("on_cpu = 'yes'", 'on_cpu = "yes" must be true or false'),
        ("[memory_gb]\nbytes = 'x'", 'memory_gb = {bytes = "x"} must be a number'),
        (
            "[peak_tflops]\nbf17 = 3",
            "peak_tflops.bf17 is not a format: use fp32, tf32, bf16 or fp16 (did you mean bf16?)",
        ),
        ("[efficiency]\nlink = 0.5", "efficiency.link is not known: use products, attention, memory, links"),
    ],
)
def test_a_field_of_another_type_is_not_called_missing(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'based_on = "h100"\n{text}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    (problem,) = refused.value.problems
    assert said in problem


def test_a_misspelled_base_is_suggested(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('based_on = "h10"\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_cluster(path)
    assert refused.value.problems[0].endswith("(did you mean h100?)")


def make_odd_file(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        contents = {"empty": b"", "binary": b"\xff\x00", "nested": b"a = " + b"[" * 100_000, "huge": b"#" * (1 << 21)}
        path.write_bytes(contents[kind])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("directory", "cannot be read: Is a directory"),
        ("pipe", "cannot be read: is not a regular file"),
        ("empty", "is empty: give its fields"),
        ("binary", "is not valid TOML: it is not text in UTF-8"),
        ("nested", "is not valid TOML: its values are nested too deeply"),
        ("huge", "cannot be read: has 2,097,152 bytes, more than the 1,048,576 that are read"),
    ],
)
def test_an_odd_cluster_file_is_refused_and_not_waited_for(kind: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    make_odd_file(path, kind)
    with pytest.raises(ConfigError) as refused:
        cluster_named(str(path))
    (problem,) = refused.value.problems
    assert problem.startswith(f"--cluster {path} {said}")


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
        ("--calibrate {tmp}", ["{tmp}: config.toml is missing", "{tmp}: metrics.jsonl is missing"]),
        ("--calibrate {tmp}/none", ["--calibrate {tmp}/none is not a directory"]),
        ("--calibrate", ["--calibrate needs a value: --calibrate DIR"]),
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
        ("--cluster h100 --preset gpt2-small foo", ["--preset gpt2-small foo: 'foo' belongs to no flag"]),
        ("--cluster h100 --preset gpt2-small --train-iters 10 foo", ["--train-iters 10 foo: 'foo' belongs to no flag"]),
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
