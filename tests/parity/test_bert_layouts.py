"""BERT's evaluation on several ranks, and that its microbatches differ as tests/matrix needs: in numbers of masked
tokens and of pairs, none included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.parity.bert_runs import RaggedPairs, make_bert_config, make_bert_trainer
from tests.parity.runs import BATCH, Layout


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
