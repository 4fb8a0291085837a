"""BERT's numbers are the same on every layout: losses, norms, gradients and weights to fp32 rounding, though
microbatches and ranks have unequal numbers of masked tokens and of pairs, none included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.bert_runs import RaggedPairs, make_bert_config, make_bert_trainer
from tests.parity.runs import BATCH, Layout, Outcome, Run, Size, agree, bitwise, in_both_sizes, small

Case = tuple[Layout, dict[str, Any]]
SPLIT = {"sequence_parallel": True}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
FAST: list[Case] = [
    ((2, 2, 1), SPLIT),
    ((1, 2, 2), {"zero_stage": 2}),
    ((2, 1, 2), {"zero_stage": 3, **SPLIT}),
    ((1, 2, 1), {**INTERLEAVED, "num_layers": 5}),
    ((1, 1, 1), {"schedule": "zero-bubble"}),
    ((1, 1, 2), {"schedule": "zero-bubble", "zero_stage": 3}),  # the head has two branches, of which one is first
]
SLOW: list[Case] = [
    ((2, 1, 1), {}),
    ((4, 1, 1), {}),
    ((4, 1, 1), SPLIT),
    ((1, 4, 1), {}),
    ((1, 3, 1), {"schedule": "zero-bubble"}),
    ((1, 1, 2), {"zero_stage": 1}),
    ((1, 1, 4), {"zero_stage": 2}),
    ((1, 1, 4), {"zero_stage": 3, "recompute": "full"}),
    ((1, 2, 2), {"zero_stage": 3}),
    ((2, 2, 1), {"schedule": "zero-bubble", **SPLIT}),
    ((1, 4, 2), {"schedule": "gpipe"}),
    ((2, 2, 2), {}),
    ((2, 2, 2), {"zero_stage": 3, "recompute": "selective", **SPLIT}),
    ((2, 2, 2), {"zero_stage": 1, **INTERLEAVED, "num_layers": 6}),
]


def expected(run_bert: Run, changes: dict[str, Any]) -> Outcome:
    """The one-process run of the same model."""
    same = ("num_layers", "train_iters", "lr_warmup_iters")
    return run_bert((1, 1, 1), **{name: value for name, value in changes.items() if name in same})


@in_both_sizes
@pytest.mark.parametrize(("layout", "changes"), FAST, ids=str)
def test_classic_equals_one_process(layout: Layout, changes: dict[str, Any], size: Size, run_bert: Run) -> None:
    changes = size(layout) | changes
    agree(run_bert(layout, **changes), expected(run_bert, changes))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "changes"), SLOW, ids=str)
def test_classic_equals_one_process_on_more_layouts(layout: Layout, changes: dict[str, Any], run_bert: Run) -> None:
    agree(run_bert(layout, **changes), expected(run_bert, changes))


MODERN = {"bert_style": "modern", "window_size": 6}


@in_both_sizes
@pytest.mark.parametrize(
    ("layout", "changes", "model"),
    [((2, 2, 1), SPLIT, {}), ((2, 1, 1), SPLIT, {"normalization": "RMSNorm", "norm_bias": True})],
    ids=str,
)
def test_modern_equals_one_process(
    layout: Layout, changes: dict[str, Any], model: dict[str, Any], size: Size, run_bert: Run
) -> None:
    model = model | size(layout)
    agree(run_bert(layout, **MODERN, **changes, **model), run_bert((1, 1, 1), **MODERN, **model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((4, 1, 1), {}),
        ((1, 3, 1), {"schedule": "zero-bubble"}),
        ((2, 1, 2), {"schedule": "zero-bubble", "zero_stage": 3}),
        ((1, 2, 1), INTERLEAVED),
        ((1, 1, 4), {"zero_stage": 3, "recompute": "full"}),
        ((2, 2, 2), {"zero_stage": 2, **SPLIT}),
    ],
    ids=str,
)
def test_modern_equals_one_process_on_more_layouts(layout: Layout, changes: dict[str, Any], run_bert: Run) -> None:
    agree(run_bert(layout, **MODERN, **changes), run_bert((1, 1, 1), **MODERN))


@in_both_sizes
def test_reproducible_is_bitwise_the_same(size: Size, run_bert: Run) -> None:
    changes = {**size((1, 2, 2)), "reproducible": True, "micro_batch_size": 1, "train_iters": 3 if size is small else 8}
    bitwise(run_bert((1, 2, 2), zero_stage=2, **changes), run_bert((1, 1, 1), **changes))


def test_an_evaluation_is_the_same_on_every_layout(tmp_path: Path) -> None:
    found = [
        run_distributed(evaluated, world, layout, str(tmp_path / str(world)), timeout=120)[0]
        for world, layout in ((1, (1, 1, 1)), (4, (2, 2, 1)))
    ]
    one = found[0]
    assert one is not None
    assert one["eval/loss"] == pytest.approx(one["eval/mlm_loss"] + one["eval/sentence_loss"], rel=1e-12)
    assert 0 <= one["eval/mlm_accuracy"] < 0.1 < one["eval/sentence_accuracy"] < 0.9
    assert found[1] == pytest.approx(one, rel=1e-6)


def evaluated(rank: int, world_size: int, layout: Layout, output_dir: str) -> dict[str, float] | None:
    """What an evaluation before the first step reports, on rank 0."""
    config = make_bert_config(layout, output_dir, eval_iters=5, sequence_parallel=layout[0] > 1)
    trainer = make_bert_trainer(config, build_mesh(config.parallel))
    trainer.evaluate()
    if rank:
        return None
    (record,) = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def test_some_microbatches_have_nothing_to_predict() -> None:
    """Otherwise the layouts above would prove less than they seem to."""
    data = RaggedPairs(20 * BATCH, packed=False, pairs=True)
    samples = [data[i] for i in range(len(data))]
    microbatches = list(zip(samples[::2], samples[1::2], strict=True))
    masked = [sum(float(sample["loss_mask"].sum()) for sample in microbatch) for microbatch in microbatches]
    pairs = [sum(int(sample["sentence_labels"] >= 0) for sample in microbatch) for microbatch in microbatches]
    assert min(masked) == 0
    assert len(set(masked)) > 10
    assert set(pairs) == {0, 1, 2}
