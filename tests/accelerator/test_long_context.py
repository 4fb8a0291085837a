"""What a device holds where sequences are long: ranks that divide them hold a share, and offloaded activations lie in
host memory, from which they come back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.data.loading.loader import Microbatch
from megacore.parallel.mesh import build_mesh
from megacore.plan.memory import plan_memory
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import make_config

pytestmark = needs_pretend
Changes = dict[str, Any]

LENGTH, WORDS = 1024, 2048
LONG: Changes = {
    "seq_length": LENGTH,
    "vocab_size": WORDS,
    "num_layers": 2,
    "num_query_groups": 4,
    "position_embedding_type": "rope",
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "loss_chunks": 8,
}


class Noting(GPTTask):
    """Notes the bytes of the device between forward and backward."""

    kept = 0

    def loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        self.kept = torch.accelerator.memory_allocated(output.device)
        return super().loss(output, microbatch)


def held(rank: int, world_size: int, directory: str, cases: list[Changes]) -> list[tuple[int, int, float, list[float]]]:
    """Of a second step: bytes that it keeps from forward to backward, its peak and the peak by formula, beyond what
    lies on the device between steps; and the losses and norms of both."""
    found = []
    for number, changes in enumerate(cases):
        layout = (changes.get("tp", 1), 1, 1)
        others = {name: value for name, value in changes.items() if name != "tp"}
        config = make_config(layout, f"{directory}/{number}", device="pretend", **LONG | others)
        mesh = build_mesh(config.parallel)
        step = TrainStep(task := Noting(config, mesh), config, mesh)
        numbers, before = [], 0
        for seed in range(2):
            tokens = torch.randint(0, WORDS, (2, 1, LENGTH), generator=torch.Generator().manual_seed(seed))
            tokens, labels = tokens.to(mesh.device)
            mask = torch.ones(1, LENGTH, device=mesh.device)
            before = torch.accelerator.memory_allocated(mesh.device)
            torch.accelerator.reset_peak_memory_stats(mesh.device)
            step.compute_gradients([Microbatch(index=seed, tokens=tokens, labels=labels, loss_mask=mask)])
            peak = torch.accelerator.max_memory_allocated(mesh.device) - before
            result = step.update_weights()
            numbers += [float(result.loss), float(result.grad_norm)]
        (planned,) = plan_memory(config, task.layers, on_cpu=False)
        found.append((task.kept - before, peak, planned.activations + planned.working, numbers))
    return found


def test_ranks_hold_their_share_and_no_square_of_the_sequence(tmp_path: Path) -> None:
    """A square of the sequence in fp32, or the logits of all its positions, would be larger than the whole peak."""
    ((kept, _, _, numbers),) = run_distributed(held, 1, str(tmp_path / "one"), [{}], backend="pretend", init=False)[0]
    comms = [{"cp": 4, "cp_comm": comm} for comm in ("ring", "allgather", "ulysses")]
    for one, peak, _, ours in run_distributed(held, 4, str(tmp_path / "four"), comms, backend="pretend")[0]:
        assert ours == pytest.approx(numbers, rel=1e-5)
        assert one == pytest.approx(kept / 4, rel=0.05)
        assert peak < 4 * LENGTH**2 < 4 * LENGTH * WORDS


def test_offloaded_activations_come_back_bit_for_bit_and_two_blocks_are_held(tmp_path: Path) -> None:
    deep: Changes = {"num_layers": 12}
    cases = [deep | more for more in ({}, {"recompute": "selective"}, {"recompute": "full"})]
    both = [case | {"offload_activations": on} for case in cases for on in (False, True)]
    found = run_distributed(held, 1, str(tmp_path), both, backend="pretend", init=False)[0]
    for (kept, peak, planned, numbers), (less, lower, formula, ours) in zip(found[::2], found[1::2], strict=True):
        assert ours == numbers
        assert less < 0.3 * kept and lower < peak
        assert peak - lower == pytest.approx(planned - formula, rel=0.1)


def test_divided_inputs_of_recomputed_blocks_come_back_bit_for_bit(tmp_path: Path) -> None:
    deep: Changes = {"num_layers": 12, "recompute": "full", "tp": 2}
    cases = [deep | {"distribute_saved_activations": on} for on in (False, True)]
    (kept, _, planned, numbers), (less, _, formula, ours) = run_distributed(
        held, 2, str(tmp_path), cases, backend="pretend"
    )[0]
    assert ours == numbers
    assert kept - less == pytest.approx(planned - formula, rel=0.1)
