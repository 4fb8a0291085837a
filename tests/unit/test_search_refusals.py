"""tools/plan.py --search: what it refuses, and whether the message says the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.planning import planned
from tools.plan import main


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            "--max-tp 0 --min-pp 200",
            [
                "--max-tp 0 must be at least 1",
                "--min-pp 200 leaves no --pp: --pp must divide --world-size 64 and be at most --num-layers 12, so it "
                "can only be 1, 2, 4 or 8: use --min-pp 8 or less\n",
            ],
        ),
        (
            "--min-tp 16 --min-cp 3 --max-cp 3 --min-dp 8",
            [
                "--min-tp 16 x --min-cp 3 x --min-dp 8 = 384 must be at most --world-size 64: use --min-tp 4 "
                "--min-cp 2\n",
                "--min-tp 16 leaves no --tp: --tp must divide --world-size 64 and --num-attention-heads 12, so it can "
                "only be 1, 2 or 4: use --min-tp 4 or less\n",
                "--min-cp 3 and --max-cp 3 leave no --cp: --cp must divide --world-size 64 and --seq-length 1024, so "
                "it can only be 1, 2, 4, 8, 16, 32 or 64: use --min-cp 2 or less, or --max-cp 4 or more\n",
            ],
        ),
        ("--tp 24", ["--tp 24 must divide --num-attention-heads 12: use 1, 2 or 4\n"]),
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
            "--search: --max-tp 1 x --max-pp 1 x --max-dp 1 = 1 must be at least --world-size 64: use --max-dp 64, or "
            "--world-size 1\n",
        ),
        (
            "--max-dp 3 --max-tp 2",
            "--search: --max-tp 2 x --pp 8 (the largest possible: it must divide --world-size 64 and be at most "
            "--num-layers 12) x --max-dp 3 (2 is possible) = 32 must be at least --world-size 64",
        ),
        ("--tp 2 --pp 4 --dp 4", "--search: --tp 2 x --pp 4 x --dp 4 = 32 must be at least --world-size 64"),
        ("--tp 4 --min-dp 32", "--tp 4 x --min-dp 32 = 128 must be at most --world-size 64"),
        (
            "--tp 4 --min-dp 32",
            "--world-size 64: use --tp 1 or 2, or --min-dp 16 or less, or --world-size 128\n",
        ),
        (
            "--min-pp 9 --max-pp 3",
            "--min-pp 9 must be at most --max-pp 3: use --min-pp 2 or less, or --max-pp 16 or more\n",
        ),
        ("--tp 2 --min-tp 4", "--tp 2 must be at least --min-tp 4: leave one of them out\n"),
        ("--pp 8 --max-pp 4", "--pp 8 must be at most --max-pp 4: leave one of them out\n"),
        (
            "--tp 3",
            "--tp 3 is not possible: --tp must divide --world-size 64 and --num-attention-heads 12, so it can only be "
            "1, 2 or 4\n",
        ),
        (
            "--schedule interleaved --max-virtual-stages 1",
            "--max-virtual-stages 1 leaves no --virtual-stages for --schedule interleaved, which has 2 or more",
        ),
        (
            "--schedule interleaved --min-pp 7",
            "--search: no valid layout of --world-size 64 has --schedule interleaved and --min-pp 7: use --schedule "
            "1f1b or zero-bubble, or --min-pp 4\n",
        ),
        (
            "--virtual-stages 2 --max-pp 1",
            "--search: no valid layout of --world-size 64 has --virtual-stages 2 and --max-pp 1: use --virtual-stages "
            "1, or --max-pp 2\n",
        ),
        ("--virtual-stages 12 --min-pp 2", "has --virtual-stages 12: use --virtual-stages 3, 4, 5 or 6\n"),
        (
            "--micro-batch-size 8 --min-dp 16",
            "has --micro-batch-size 8 and --min-dp 16: use --micro-batch-size 1, 2 or 4, or --min-dp 8, or "
            "--global-batch-size 128\n",
        ),
        ("--max-memory-gb 200", "--max-memory-gb 200 must be at most 82.3, which is what a rank may take of h100"),
        (
            "--preset mixtral-8x7b --etp 2 --max-tp 1",
            "has --etp 2 and --max-tp 1: use --etp 1, or --max-tp 2\n",
        ),
        ("--preset mixtral-8x7b --ep 8 --max-ep 4", "--ep 8 must be at most --max-ep 4"),
        (
            "--preset mixtral-8x7b --ep 3",
            "--ep 3 is not possible: --ep must divide --world-size 64 and --num-experts 8, so it can only be 1, 2, "
            "4 or 8\n",
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--global-batch-size 7 --tp 1 --pp 1",
            "--dp 1 (the largest possible: it must divide --world-size 8 and --global-batch-size 7) = 1 must be at "
            "least --world-size 8: use --pp 8, or --world-size 7, or --global-batch-size 8\n",
        ),
        ("--global-batch-size 8 --max-tp 2 --max-pp 1 --max-dp 2", "use --max-tp 4, or --max-pp 2, or --max-dp 4, or "),
        (
            "--world-size 1009 --seq-length 8192 --max-position-embeddings 8192 --global-batch-size 1",
            "= 1 must be at least --world-size 1009: use --world-size 1, or --global-batch-size 1009\n",
        ),
        ("--world-size 1024 --max-tp 1 --max-pp 1 --dp 8", "use --dp 1024, or --world-size 8\n"),
        ("--tp 1 --pp 1 --dp 2 --seq-length 1022", "use --tp 4, or --pp 4, or --dp 8, or --world-size 2\n"),
    ],
)
def test_too_few_ranks_name_values_that_work(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = "" if "--world-size" in flags else "--world-size 8"
    run = f"pretrain_gpt.py --preset gpt2-small --cluster h100 {world} --search {flags}"
    assert main(run.split()) == 2
    assert said in (text := capsys.readouterr().err), text


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--max-cp 2 --cp-comm ring --attention-dropout 0", {"cp": {2}}),
        ("--min-cp 2 --cp-comm ulysses --attention-dropout 0", {"cp": {2}}),
        ("--zero-shard-size 2", {"zero_stage": {1, 2, 3}, "dp": {2, 4, 8}}),
        ("--zero-shard-size 2 --global-batch-size 64", {"zero_stage": {1, 2, 3}, "dp": {2, 4, 8}}),
        ("--distribute-saved-activations --recompute full", {"tp": {2, 4}, "sequence_parallel": {False}}),
        ("--distribute-saved-activations", {"tp": {2, 4}, "recompute": {"full"}}),
        ("--offload-params --offload-optimizer", {"zero_stage": {3}, "pp": {1, 2, 4, 8}, "dp": {1, 2, 4, 8}}),
        ("--offload-params --offload-optimizer --tp 4 --pp 2", {"zero_stage": {3}, "dp": {1}}),
    ],
)
def test_flags_that_need_what_a_search_chooses_restrict_it(
    flags: str, kept: dict[str, set[object]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, for one layout, each of them is refused."""
    run = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 8 --search --json --top 100000 {flags}"
    assert main(run.split()) == 0
    layouts = [row["layout"] for row in json.loads(capsys.readouterr().out)["layouts"]]
    assert {name: {layout[name] for layout in layouts} for name in kept} == kept


@pytest.mark.parametrize("of_context", ["", "cp_comm = 'ring'\n"])
def test_a_search_tries_the_values_of_a_file_and_its_flags_replace_them(
    of_context: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\npreset = 'gpt2-small'\nattention_dropout = 0.0\n[training]\nrecompute = 'full'\n[parallel]\n"
        f"{of_context}cp = 2\npp = 2\nzero_stage = 1\nvirtual_stages = 2\nschedule = 'interleaved'\n"
    )
    flags = f"pretrain_gpt.py --config {file} --mock-data --train-iters 9 --vocab-size 50257 --cluster h100"
    found = planned(capsys, f"{flags} --world-size 8 --search --top 100000")["layouts"]
    assert {row["layout"]["cp"] for row in found} == ({2} if of_context else {1, 2})
    for row in [next(row for row in found if row["layout"]["pp"] == pp) for pp in (1, 2, 4)]:
        plan = planned(capsys, f"{flags} {row['flags']}")
        assert {**plan["layout"], "num_microbatches": 0} == {**row["layout"], "num_microbatches": 0}
        assert plan["world_size"] == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tp 1 --distribute-saved-activations --recompute full", "has no effect with --tp 1: leave it out"),
        ("--recompute none --distribute-saved-activations", "has no effect with --recompute none: leave it out, or"),
        ("--offload-params --offload-optimizer --zero-stage 1", "--offload-params needs --zero-stage 3, with any --dp"),
        (
            "--zero-shard-size 16",
            "--zero-shard-size 16 must divide the number of --dp x --cp ranks, 8: use 2, 4 or 8\n",
        ),
        ("--zero-shard-size 3 --max-dp 4", "must divide the number of --dp x --cp ranks, 4: use 2 or 4\n"),
        ("--zero-shard-size 2 --max-zero-stage 0", "has no effect with --zero-stage 0: leave it out\n"),
        (
            "--offload-params --offload-optimizer --max-zero-stage 2",
            "--offload-params needs --zero-stage 3, with any --dp: leave --offload-params out\n",
        ),
        ("--max-tp 1 --distribute-saved-activations --recompute full", "no effect with --tp 1: leave it out\n"),
        (
            "--max-cp 2 --cp-comm ring",
            "--attention-dropout 0.1 is not possible with --cp 2, because its ranks would draw other masks than one "
            "process, and --cp-comm ring has no effect with --cp 1: use --attention-dropout 0 (--hidden-dropout "
            "works), or leave it out\n",
        ),
        (
            "--global-batch-size 7 --micro-batch-size 2",
            "--global-batch-size 7 must be a multiple of --micro-batch-size 2 x --dp 1 = 2: use 6 or 8, or",
        ),
        ("--cp-comm ring", "--cp-comm ring has no effect with --cp 1: leave it out"),
        ("--min-cp 2 --cp-comm ring", "--attention-dropout 0.1 is not possible with --cp 2"),
        (
            "--tp 2 --sequence-parallel --distribute-saved-activations",
            "has --sequence-parallel (--distribute-saved-activations has no effect with --sequence-parallel, which",
        ),
        ("--min-cp 2", "has --min-cp 2 (--attention-dropout 0.1 is not possible with --cp 2, because"),
        ("--pipeline-layout E,6*t|6*t,H", "is for one layout: leave it out, or leave --search out\n"),
    ],
)
def test_what_no_value_of_a_search_allows_is_one_problem(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 8 --search {flags}"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(run.split()))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert said in text and text.count("\n  - ") == 1, text


def test_a_degree_that_does_not_divide_the_ranks_is_refused_without_a_batch_that_nobody_gave(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 8 --search --dp 3"
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(flags.split()))
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "--dp 3 is not possible: --dp must divide --world-size 8, so it can only be 1, 2, 4 or 8" in text
    assert text.count("\n  - ") == 1


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--tensor-model-parallel-size 4", "`--tp 4`"),
        ("--recompute-granularity full --recompute-method uniform", "`--recompute full`"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "`--recompute full`"),
        ("--use-distributed-optimizer", "`--zero-stage 1`"),
        ("--enable-zbh1-pipeline", "`--schedule zero-bubble`"),
        ("--num-virtual-stages-per-pipeline-rank 2", "`--schedule interleaved`, `--virtual-stages 2`"),
    ],
)
def test_a_search_keeps_what_flags_of_megatron_give(flags: str, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 8 --search --top 1"
    assert main([*run.split(), *flags.split()]) == 0
    assert f"As given, and not searched for: {kept}." in capsys.readouterr().out


def test_a_wrong_flag_of_megatron_is_refused_in_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 16 --search"
    flags = "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 4"
    with pytest.raises(SystemExit):
        raise SystemExit(main([*run.split(), *flags.split()]))
    assert "--num-layers-per-virtual-pipeline-stage 2 must divide the 3 layers per rank" in capsys.readouterr().err


def test_a_way_out_of_a_contradiction_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "pretrain_gpt.py --preset gpt2-small --global-batch-size 64 --cluster h100 --world-size 64 --search"
    for given, ways in (
        ("--tp 4 --min-dp 32", ("--tp 2 --min-dp 32", "--tp 4 --min-dp 16")),
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
        (
            "--schedule zero-bubble --max-pp 1",
            ["--search tries --schedule zero-bubble only in pipelines, and --max-pp 1 leaves none"],
        ),
        (
            "--schedule interleaved --pipeline-balance time --pp 1",
            [
                "--search tries --schedule interleaved only in pipelines, and --pp 1 leaves none: leave one",
                "--search tries --pipeline-balance time only in pipelines",
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


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ("--preset bloom-176b --world-size 8 --global-batch-size 1", ["--world-size 64"]),
        ("--preset bloom-176b --world-size 8 --global-batch-size 1 --max-tp 4", ["--world-size 48", "fewer limits"]),
    ],
)
def test_a_search_without_a_layout_that_fits_names_ranks_that_are_enough(
    flags: str, ways: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"pretrain_gpt.py --cluster h100 --search {flags}"
    assert main(given.split()) == 2
    said = capsys.readouterr().err.splitlines()[1]
    assert ("the given limits" in said) == ("fewer limits" in ways)
    assert said.rpartition(": use ")[2].split(", or ") == ways
    more = ways[0].split()[1]
    assert main(given.replace("--world-size 8", f"--world-size {more}").split()) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 48}, {"micro_batch_size": {2}}),
        ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch_size": {2}}),
        ({"train_batch_size": 12, "zero_optimization": {"stage": 2}}, {"zero_stage": {2}}),
    ],
)
def test_a_search_keeps_what_a_deepspeed_configuration_gives(
    keys: dict[str, object], kept: dict[str, set[object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan with the flags of a layout and the same file has the layout and the batch."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(keys))
    run = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --deepspeed-config {file}"
    report = planned(capsys, f"{run} --world-size 8 --search --top 100000")
    found = report["layouts"]
    assert {name: {row["layout"][name] for row in found} for name in kept} == kept
    for row in (found[0], found[-1]):
        plan = planned(capsys, f"{run} {row['flags']}")
        assert {**plan["layout"], "num_microbatches": 0} == {**row["layout"], "num_microbatches": 0}
        assert plan["global_batch_size"] == report["global_batch_size"]


def test_a_number_of_microbatches_is_for_one_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}')
    run = f"pretrain_gpt.py --preset gpt2-small --cluster h100 --deepspeed-config {file} --world-size 8 --search"
    with pytest.raises(SystemExit):
        raise SystemExit(main(run.split()))
    text = capsys.readouterr().err
    assert "gradient_accumulation_steps 4 is for one layout" in text and text.count("\n  - ") == 1, text


def test_the_recomputed_blocks_of_a_file_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag takes them back."""
    file = tmp_path / "run.toml"
    file.write_text("[model]\npreset = 'gpt2-small'\n[training]\nrecompute = 'full'\nrecompute_num_layers = 2\n")
    run = f"pretrain_gpt.py --config {file} --cluster h100"
    found = planned(capsys, f"{run} --world-size 8 --search --top 100000")["layouts"]
    assert {(row["layout"]["recompute"], row["layout"]["recompute_num_layers"]) for row in found} == {("full", 2)}
    assert planned(capsys, f"{run} {found[0]['flags']}")["layout"]["recompute_num_layers"] == 2


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("--min-pp 13 --min-tp 64 --min-dp 128", "= 106496 must be at most --world-size 64: use "),
        ("--min-pp 8 --min-tp 4 --min-dp 16", "= 512 must be at most --world-size 64: use "),
    ],
)
def test_limits_that_are_lowered_as_proposed_leave_layouts(
    limits: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = "pretrain_gpt.py --preset gpt2-small --cluster h100 --world-size 64 --search --max-micro-batch-size 1"
    with pytest.raises(SystemExit):
        raise SystemExit(main([*run.split(), *limits.split()]))
    text = capsys.readouterr().err
    assert said in text, text
    proposed = text.partition(said)[2].splitlines()[0].partition(",")[0].removesuffix(" or less").split()
    lowered = dict(zip(limits.split()[::2], limits.split()[1::2], strict=True))
    lowered |= dict(zip(proposed[::2], proposed[1::2], strict=True))
    assert main([*run.split(), *(word for pair in lowered.items() for word in pair), "--top", "1"]) == 0
