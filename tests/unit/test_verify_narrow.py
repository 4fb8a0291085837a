"""What tools/verify.py trains instead of the whole model: valid, small, and of the same structure and layout."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from megacore.config.pipeline_layout import parse_layout
from megacore.config.presets import BERT_PRESETS
from megacore.config.validation import validate
from megacore.pipeline.schedule import build_schedule
from megacore.verify.narrow import narrow, one_process

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


def test_a_written_pipeline_keeps_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved("--pp 3 --num-layers 12 --pipeline-layout E,1*t|7*t|4*t,H --vocab-size 512", monkeypatch)
    copy = narrow(config).config
    assert copy.parallel.pipeline_layout == "E,t|t,t|t,t,H"
    assert len(parse_layout(copy.parallel.pipeline_layout, stages=3, blocks=copy.model.num_layers)) == 3
