"""Muon's update on ranks that shard: equal shares of the work, and few matrices at a time beyond a rank's share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.parallel.mesh import build_mesh
from megacore.tracer.step_trace import fake_step
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

BLOCKS = 4
MUON: dict[str, Any] = {"optimizer": "muon", "hidden_size": 64, "num_layers": BLOCKS, "lr_warmup_iters": 0, "lr": 1e-3}
LARGEST = 4 * 4 * 64 * 64  # bytes of the MLP's matrices


def memory_of_update(rank: int, ranks: int, directory: str, *, layout: Layout, stage: int) -> tuple[int, int]:
    """Bytes of a rank's optimizer state, and the most that the second update needs beside what was there before."""
    config = make_config(layout, directory, device="pretend", zero_stage=stage, global_batch_size=4, **MUON)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    step = trainer.train_steps
    step.compute_gradients(next(trainer.batches))
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    step.update_weights()
    peak = torch.accelerator.max_memory_allocated() - before
    state = trainer.update.optimizer.state.values()
    return sum(tensor.nbytes for tensors in state for tensor in tensors.values()), peak


@needs_pretend
@pytest.mark.parametrize(("layout", "stage", "matrices"), [((1, 1, 2), 1, 5), ((2, 1, 1), 0, 7)], ids=str)
def test_a_rank_holds_its_share_and_one_matrix(layout: Layout, stage: int, matrices: int, tmp_path: Path) -> None:
    """The share is half of the momenta of the matrices and of AdamW's moments. One matrix is in the iteration, as its
    argument, before and after a product, and with the squares that this multiplies. A tensor parallel rank has the
    slices of two besides, as they are and as it sends them."""
    work = partial(memory_of_update, layout=layout, stage=stage)
    momenta = 4 * BLOCKS * 12 * 64**2
    for share, most in run_distributed(work, 2, str(tmp_path), backend="pretend"):
        assert share < 0.5 * momenta + 2 * LARGEST
        assert most <= matrices * LARGEST


def test_shards_hold_equal_parts_of_the_matrices(tmp_path: Path) -> None:
    """However large the embedding beside them is."""
    shape: dict[str, Any] = {"vocab_size": 8192, "bucket_size_mb": 25, "num_layers": 12, "precision": "bf16"}
    config = make_config((1, 1, 4), tmp_path, **(MUON | shape), zero_stage=1)
    work = [0] * 4
    with fake_step(config) as step:
        for bucket in step.model.data_parallel.buckets:
            sizes = {p.spec.name: sorted(p.shape) for p in bucket.parameters if p.spec.name in bucket.unsplit}
            assert len(sizes) in (0, len(bucket.parameters))
            for shard in range(4):
                for segment in bucket.layout.segments(shard):
                    if segment.name in sizes:
                        rows, columns = sizes[segment.name]
                        work[shard] += 4 * rows**2 * columns + 2 * rows**3
        assert step.model.data_parallel.padding < 0.01
    assert max(work) <= 1.05 * sum(work) / 4
