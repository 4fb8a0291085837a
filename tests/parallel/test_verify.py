"""tools/verify.py: layouts agree with one process, planted defects are found and named, and nothing compared is a
failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pkgutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.pipeline_layout import parse_layout
from megacore.config.presets import BERT_PRESETS
from megacore.config.validation import validate
from megacore.ops import dispatch
from megacore.optim import adamw
from megacore.pipeline.schedule import build_schedule
from megacore.train import gpt_task
from megacore.train.step import TrainStep
from megacore.verify import faults, reference
from megacore.verify.command import main
from megacore.verify.compare import compare
from megacore.verify.defects import BY_NAME, DEFECTS
from megacore.verify.narrow import narrow, one_process
from megacore.verify.ranks import run_rank
from megacore.verify.reference import Reference
from megacore.verify.request import Request, make_parser, request_of
from megacore.verify.run import Key, Piece, Record, assemble
from tests.distributed import run_distributed
from tests.parity.runs import make_config

TABLE = tomllib.loads(Path(__file__).with_name("verify.toml").read_text(encoding="utf-8"))
GPT = TABLE["parts"]["gpt"]


def read(*words: str) -> Request:
    """What a command line asks for."""
    parser = make_parser()
    return request_of(parser, parser.parse_args(words))


def verify(rank: int, world_size: int, words: str, path: str, defects: tuple[str, ...]) -> int:
    """Verify on the ranks of the test's job; the exit status."""
    request = read(*words.split(), "--json", path)
    planted = tuple(BY_NAME[name] for name in defects)
    return run_rank(dataclasses.replace(request, defects=planted, self_test=bool(defects)))


def result_of(words: str, path: Path, ranks: int, *defects: str) -> dict[str, Any]:
    statuses = run_distributed(verify, ranks, words, str(path), defects, init=False, timeout=120)
    result: dict[str, Any] = json.loads(path.read_text())
    assert statuses == [result["status"]] * ranks
    return result


# ---- layouts


def test_tensor_parallelism_agrees_and_planted_defects_are_found(tmp_path: Path) -> None:
    defects = ("missing-tp-backward-sum", "shared-dropout-stream")
    result = result_of(f"{GPT} --tp 2 --sequence-parallel --hidden-dropout 0.1", tmp_path / "result.json", 2, *defects)
    assert result["status"] == 0
    clean = result["result"]
    assert clean["agrees"] and clean["compared"] > 300 and clean["differing"] == 0
    assert clean["loss_difference"][0] <= 1e-6
    assert {row["kind"] for row in clean["rows"]} >= {"gradient", "moment", "dropout mask", "loss", "weight change"}
    for name in defects:
        found = result["defects"][name]
        assert not found["agrees"] and found["first"]["kind"] in BY_NAME[name].kinds, name


@pytest.mark.slow
def test_a_reproducible_layout_agrees_to_the_bit(tmp_path: Path) -> None:
    words = f"{GPT} --tp 2 --reproducible --hidden-dropout 0.1 --attention-dropout 0.1"
    result = result_of(words, tmp_path / "result.json", 2)
    assert result["status"] == 0
    assert {(row["tolerance"], row["difference"]) for row in result["result"]["rows"]} == {(0.0, 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("words", TABLE["layouts"].values(), ids=TABLE["layouts"])
def test_every_defect_that_a_layout_can_have_is_found(words: str, tmp_path: Path) -> None:
    words = words.format(**TABLE["parts"])
    program, *flags = words.split()
    config = read(program, *flags).config
    possible = [defect.name for defect in DEFECTS if defect.possible(config)]
    result = result_of(words, tmp_path / "result.json", config.parallel.ranks, *possible)
    assert result["result"]["agrees"]
    wrong = [
        name
        for name, found in result["defects"].items()
        if found["agrees"] or found["first"]["kind"] not in BY_NAME[name].kinds
    ]
    assert result["defects"].keys() == set(possible) and not wrong


@pytest.mark.slow
def test_the_tool_starts_its_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*f"{GPT} --dp 2".split(), "--json", str(tmp_path / "result.json")]) == 0
    output = capfd.readouterr().out
    assert "result: everything that was compared agrees" in output and "not covered: " in output
    assert "correct" not in output
    assert main([*f"{GPT} --dp 2".split(), "--defect", "missing-dp-sum"]) == 1


def test_a_run_with_spares_is_verified_without_them() -> None:
    assert read(*f"{GPT} --tp 2 --survive spare-ranks=1".split()).config.parallel.ranks == 2


# ---- the reference itself


def test_guards_that_change_updates_are_compared_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adaptive clipping takes part; the spike guard is off, because a skipped step has nothing to compare."""
    clips = "--clip-grad 0 --clip-grad-adaptive --clip-grad-adaptive z-threshold=0.001 --lr-warmup-iters 100"
    skips = "--on-spike skip --on-spike window=4 --on-spike threshold=0.001"
    assert main([*f"{GPT} {clips} {skips}".split(), "--json", str(tmp_path / "result.json")]) == 0
    output = capsys.readouterr().out
    assert "torch.optim.AdamW on its gradients: agree" in output
    assert "--clip-grad-adaptive warmup-iters=25 -> 4" in output and "--on-spike skip -> none" in output
    assert "not covered: the spike guard (--on-spike)" in output
    compared = json.loads((tmp_path / "result.json").read_text())["result"]["rows"]
    assert [row["step"] for row in compared if row["kind"] == "clip limit"]


def test_a_wrong_update_on_both_sides_is_found_by_torchs_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    right = adamw.adamw

    def too_fast(*args: Any, lr: float, **options: Any) -> None:
        right(*args, lr=1.01 * lr, **options)

    with patch.object(adamw, "adamw", too_fast):
        assert main(GPT.split()) == 1
    assert "torch.optim.AdamW on its gradients: DIFFER" in capsys.readouterr().out


def test_a_wrong_loss_on_both_sides_is_found_by_torchs_cross_entropy(capsys: pytest.CaptureFixture[str]) -> None:
    right = gpt_task.summed_cross_entropy

    def shifted(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(logits, labels.roll(1, 1), mask, **options)

    with patch.object(gpt_task, "summed_cross_entropy", shifted):
        assert main(GPT.split()) == 1
    assert "torch.autograd over its layers: DIFFER" in capsys.readouterr().out


# ---- judging


def record(**values: float) -> Record:
    return Record(tensors={Key(1, "gradient", name): np.array([value]) for name, value in values.items()})


def reference_of(found: Record, *perturbed: Record) -> Reference:
    return Reference(
        checkpoint=Path("none"), record=found, perturbed=perturbed, loss_spread=(), micro_batch_sizes=(1, 2), checks=()
    )


@pytest.fixture(scope="module")
def config() -> ResolvedConfig:
    return narrow(make_config((1, 1, 1), "none")).config


@contextlib.contextmanager
def in_fp64(steps: TrainStep) -> Iterator[None]:
    """What a model computes inside is computed in fp64, from the same weights."""
    for parameter in steps.model.parameters.values():
        parameter.data = parameter.data.double()
    floats = (*dispatch.FLOATS, torch.float64)
    with patch.object(torch.Tensor, "float", torch.Tensor.double), patch.object(dispatch, "FLOATS", floats):
        yield


@pytest.mark.parametrize("flags", ["--hidden-dropout 0.1 --activation swiglu", "{experts} --moe-aux-loss-coeff 0.1"])
def test_gradients_are_as_near_to_fp64_as_their_arithmetic_says(flags: str, tmp_path: Path) -> None:
    check = reference.check_gradients

    def against_fp64(config: ResolvedConfig, steps: TrainStep, *records: Any) -> Iterator[reference.Check]:
        with in_fp64(steps):
            for found in check(config, steps, *records):
                assert (found.worst <= found.tolerance / 4 and 0 < found.tolerance < 1e-4) or not found.tolerance
                yield found

    with patch.object(reference, "check_gradients", against_fp64):
        assert main(f"{GPT} {flags.format(**TABLE['parts'])}".split()) == 0


def test_nothing_compared_is_a_failure(config: ResolvedConfig) -> None:
    assert not compare(Record(), reference_of(Record()), config).agrees


@pytest.mark.parametrize("found", [record(a=np.nan), record(a=np.inf), record(), record(a=1.0, b=1.0)])
def test_what_is_not_finite_missing_or_too_much_differs(found: Record, config: ResolvedConfig) -> None:
    assert not compare(found, reference_of(record(a=1.0)), config).agrees


@pytest.mark.parametrize("copies", [(np.nan, 1.0), (1.0, np.nan), (1.0, np.inf), (np.nan, np.nan)])
def test_copies_of_ranks_disagree_unless_they_are_the_same(copies: tuple[float, float]) -> None:
    key, place = Key(1, "gradient", "a"), {"shape": (2,), "slices": ((0, 2),), "local_shape": (2,), "start": 0}
    pieces = {rank: [Piece(key=key, values=np.array([1.0, copy]), **place)] for rank, copy in enumerate(copies)}  # type: ignore[arg-type]
    assert (key in assemble(pieces).disagreements) == (copies[0] is not copies[1])


# ---- the defects


def test_defects_are_made_at_public_names() -> None:
    for defect in DEFECTS:
        assert callable(getattr(faults, defect.fault)) and defect.kinds, defect.name
        for call in defect.calls or ():
            assert not any(part.startswith("_") for part in call.split(".")), call
            pkgutil.resolve_name(f"megacore.{call}")


# ---- narrow models ---------------------------------------------------------------------------------------------------


LAYOUTS = [
    *("--tp 1", "--tp 2 --sequence-parallel", "--pp 2"),
    "--pp 2 --schedule interleaved --virtual-stages 2 --global-batch-size 24",
    *("--pp 4 --schedule zero-bubble", "--dp 4 --zero-stage 3"),
    "--tp 4 --pp 2 --dp 2 --zero-stage 1 --micro-batch-size 4 --global-batch-size 64",
    "--tp 2 --dp 3 --recompute full --recompute-num-layers 5",
    "--cp 4 --cp-comm ulysses --attention-dropout 0",
    "--tp 2 --cp 4 --dp 2 --attention-dropout 0",
]


def resolved(words: str, monkeypatch: pytest.MonkeyPatch, kind: type[Any] = Config) -> ResolvedConfig:
    given = words.split()
    ranks = math.prod(int(given[given.index(name) + 1]) for name in ("--tp", "--cp", "--pp", "--dp") if name in given)
    for name, value in {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    argv = [*given, "--mock-data", "--train-iters", "9"]
    config: ResolvedConfig = parse_config(argv, prog="test", description="", kind=kind)
    return config


def check(config: ResolvedConfig) -> None:
    copy, model = narrow(config).config, config.model
    ranks = config.parallel.ranks
    assert validate(copy, ranks) == []
    assert validate(one_process(copy), 1) == []
    small = copy.model
    for name in ("tp", "pp", "dp", "schedule", "virtual_stages", "zero_stage"):
        assert getattr(copy.parallel, name) == getattr(config.parallel, name)
    assert copy.parallel.cp == 1 or copy.context_comm == config.context_comm
    assert copy.parallel.sequence_parallel is bool(config.parallel.sequence_parallel)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        assert getattr(small, name) <= getattr(model, name), name
    assert small.hidden_size <= 1024 and copy.data.seq_length <= 64 and small.vocab_size <= 139
    assert small.vocab_size % config.parallel.tp or config.parallel.tp == 1
    assert (small.num_query_groups < small.num_attention_heads) == (model.num_query_groups < model.num_attention_heads)
    stages = config.parallel.pp * config.parallel.virtual_stages
    assert (small.num_layers % stages == 0) == (model.num_layers % stages == 0)
    microbatches = copy.training.global_batch_size // (copy.training.micro_batch_size * config.parallel.dp)
    assert microbatches >= 2
    build_schedule(copy.parallel.schedule_name, copy.parallel.pp, microbatches, copy.parallel.virtual_stages)
    assert copy.precision.precision == "fp32" and copy.checkpoint.load is None


# The others are refused, and so never narrowed.
DENSE = {name: shape for name, shape in Config.presets.items() if "num_experts" not in shape}


def is_valid(preset: str, layout: str) -> bool:
    """Whether the preset itself can be trained in the layout."""
    shape = Config.presets[preset]
    words = layout.split()
    dividing = "--cp" if "ulysses" in words else "--tp"
    ranks = int(words[words.index(dividing) + 1]) if dividing in words else 1
    groups = int(shape.get("num_query_groups", shape["num_attention_heads"]))
    divides = int(shape["num_attention_heads"]) % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0)
    return divides and int(shape["num_layers"]) >= 5


@pytest.mark.parametrize(
    ("preset", "layout"),
    # By default every preset in one or two layouts, and every layout several times.
    [
        pytest.param(preset, layout, marks=[pytest.mark.slow] * ((i + j) % 7 != 0))
        for i, preset in enumerate(sorted(DENSE.keys() - BERT_PRESETS.keys()))
        for j, layout in enumerate(LAYOUTS)
        if is_valid(preset, layout)
    ],
)
def test_every_preset_narrows_to_a_valid_model(preset: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(resolved(f"{layout} --preset {preset}", monkeypatch))


@pytest.mark.parametrize("preset", sorted(BERT_PRESETS))
def test_every_bert_preset_narrows_to_a_valid_model(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(resolved(f"--tp 2 --pp 2 --preset {preset}", monkeypatch, BertConfig))


def test_more_ranks_than_query_groups_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--tp 8 --num-attention-heads 32 --hidden-size 1024 --num-query-groups 2 --vocab-size 512"
    check(config := resolved(words, monkeypatch))
    assert narrow(config).config.model.num_query_groups == 2


@pytest.mark.parametrize("layout", ["--cp 4", "--tp 2 --cp 8", "--cp 4 --reproducible"])
def test_linear_attention_narrows_to_a_valid_model(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = "--layer-pattern 3*l,f --num-attention-heads 16 --hidden-size 512 --vocab-size 512 --seq-length 256"
    check(config := resolved(f"{layout} {shape}", monkeypatch))
    assert narrow(config).config.model.attention_kinds == "lf"


def test_a_written_pipeline_keeps_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved("--pp 3 --num-layers 12 --pipeline-layout E,1*t|7*t|4*t,H --vocab-size 512", monkeypatch)
    copy = narrow(config).config
    assert copy.parallel.pipeline_layout == "E,t|t,t|t,t,H"
    assert len(parse_layout(copy.parallel.pipeline_layout, stages=3, blocks=copy.model.num_layers)) == 3
