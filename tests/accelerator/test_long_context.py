"""What a device holds where sequences are long: ranks that divide them hold a share, and offloaded activations lie in
host memory, from which they come back bit for bit."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
from tests.patience import patience

pytestmark = needs_pretend
Changes = dict[str, Any]

LENGTH, WORDS = 1024, 2048
LONG: Changes = {"seq_length": LENGTH, "vocab_size": WORDS, "num_layers": 1, "position_embedding_type": "rope"}
LONG |= {"micro_batch_size": 1, "global_batch_size": 1, "num_attention_heads": 2, "loss_chunks": 8}
SHORT: Changes = {"seq_length": 256, "num_layers": 2}


@dataclass(frozen=True)
class Held:
    """Of a second step: bytes that it keeps from forward to backward, its peak, and both by formula, beyond what is on
    the device between steps; and the losses and norms of both steps."""

    kept: int
    peak: int
    planned_kept: float
    planned: float
    numbers: list[float]


def settled_bytes(device: torch.device) -> int:
    """Bytes of the device once the threads of transfers that are done have dropped what they sent."""
    least, end = torch.accelerator.memory_allocated(device), time.monotonic() + patience(0.03)
    while time.monotonic() < end:
        time.sleep(0.01)
        least = min(least, torch.accelerator.memory_allocated(device))
    return least


class Noting(GPTTask):
    """Notes the bytes of the device between forward and backward."""

    kept = 0

    def loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        self.kept = settled_bytes(output.device)
        return super().loss(output, microbatch)


def held(rank: int, world_size: int, directory: str, cases: list[Changes]) -> list[Held]:
    """Of each configuration."""
    found = []
    for number, changes in enumerate(cases):
        layout = (changes.get("tp", 1), 1, 1)
        others = {name: value for name, value in changes.items() if name != "tp"}
        config = make_config(layout, f"{directory}/{number}", device="pretend", **LONG | others)
        mesh = build_mesh(config.parallel)
        step = TrainStep(task := Noting(config, mesh), config, mesh)
        numbers, before = [], 0
        for seed in range(2):
            draw, length = torch.Generator().manual_seed(seed), config.data.seq_length
            tokens, labels = torch.randint(0, WORDS, (2, 1, length), generator=draw).to(mesh.device)
            mask = torch.ones(1, length, device=mesh.device)
            before = settled_bytes(mesh.device)
            torch.accelerator.reset_peak_memory_stats(mesh.device)
            step.compute_gradients([Microbatch(index=seed, tokens=tokens, labels=labels, loss_mask=mask)])
            peak = torch.accelerator.max_memory_allocated(mesh.device) - before
            result = step.update_weights()
            numbers += [float(result.loss), float(result.grad_norm)]
        (planned,) = plan_memory(config, task.layers, on_cpu=False)
        in_backward = planned.activations + planned.working
        found.append(Held(task.kept - before, peak, planned.activations, in_backward, numbers))
    return found


@pytest.mark.parametrize("comm", ["ring", pytest.param("allgather", marks=pytest.mark.slow)])
def test_ranks_hold_their_share_and_no_square_of_the_sequence(comm: str, tmp_path: Path) -> None:
    """A square of the sequence in fp32, or the logits of all its positions, would be larger than the whole peak."""
    (two,) = run_distributed(held, 2, str(tmp_path / "two"), [{"cp": 2, "cp_comm": "ring"}], backend="pretend")[0]
    (four,) = run_distributed(held, 4, str(tmp_path / "four"), [{"cp": 4, "cp_comm": comm}], backend="pretend")[0]
    assert four.numbers == pytest.approx(two.numbers, rel=1e-5)
    assert four.kept == pytest.approx(two.kept / 2, rel=0.05)
    assert four.peak < 4 * LENGTH**2 < 4 * LENGTH * WORDS


def test_offloaded_activations_come_back_bit_for_bit_and_two_blocks_are_held(tmp_path: Path) -> None:
    deep, off = SHORT | {"num_layers": 6}, {"offload_activations": True}
    selective = {"recompute": "selective"}
    split = {"schedule": "zero-bubble"}
    cases = [SHORT, deep, deep | off, deep | split | selective, deep | split | selective | off]
    two, whole, offloaded, *others = run_distributed(held, 1, str(tmp_path), cases, backend="pretend", init=False)[0]
    assert offloaded.numbers == whole.numbers
    assert 0.5 * two.kept < offloaded.kept <= two.kept < 0.5 * whole.kept
    assert offloaded.peak == pytest.approx(two.peak, rel=0.05)
    assert offloaded.planned == pytest.approx(two.planned, rel=0.01)
    without, of_two = others
    assert of_two.numbers == without.numbers and of_two.kept < 0.5 * without.kept


@pytest.mark.slow
def test_divided_inputs_of_recomputed_blocks_come_back_bit_for_bit(tmp_path: Path) -> None:
    full = SHORT | {"num_layers": 4, "recompute": "full", "tp": 2, "sequence_parallel": False}
    cases = [full, full | {"distribute_saved_activations": True}]
    whole, divided = run_distributed(held, 2, str(tmp_path), cases, backend="pretend")[0]
    assert divided.numbers == whole.numbers
    assert whole.kept - divided.kept == pytest.approx(whole.planned_kept - divided.planned_kept, rel=0.1)
