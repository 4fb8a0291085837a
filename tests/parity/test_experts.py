"""Mixtures of experts: rows that reach their experts and come back, and biases that balance them.

That every layout computes what one process computes are rows of tests/matrix."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.checkpoint.check import check_load
from megacore.checkpoint.manifest import find_checkpoint, read_manifest, trained_model
from megacore.errors import CheckpointError
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import model_of
from megacore.layers import moe
from megacore.models.gpt import gpt_layers
from megacore.ops.grouped import RowGroups
from megacore.parallel.experts import ExpertRanks, GroupedLinear, assign, combine, dispatch
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.products import TORCH
from megacore.parallel.sharding import split_evenly
from megacore.train.expert_balance import ExpertBalance
from tests.distributed import run_distributed
from tests.matrix.programs import LATENT, PARTS, PROGRAMS
from tests.parity.runs import make_config, make_trainer, trainer_of

# ---- rows

TOKENS, HIDDEN, WIDTH, EXPERTS = (5, 1, 7, 4), 6, 3, 8
ROUTINGS = ["random", "all to one expert", "all to the last rank", "one token each"]


def indices_of(routing: str, rank: int, ranks: int) -> Tensor:
    """[t, 2] ascending, of a rank's tokens."""
    tokens = 1 if routing == "one token each" else TOKENS[rank]
    if routing == "all to one expert":
        return torch.tensor([[0, 1]]).expand(tokens, 2)
    first = EXPERTS - EXPERTS // ranks if routing == "all to the last rank" else 0
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randperm(EXPERTS - first, generator=generator)[:2].sort().values + first for _ in range(tokens)]
    return torch.stack(rows)


def drawn(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, weights, and the gradient of what comes back."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    return x.requires_grad_(), torch.rand(tokens, 2, generator=generator).requires_grad_(), grad


def matrices() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)


def mixed(rank: int, world_size: int) -> dict[str, tuple[Tensor, ...]]:
    """A linear layer of each expert, over all ranks: outputs and gradients of each routing."""
    group = build_mesh(make_config((1, 1, world_size), "", ep=world_size).parallel).dispatch
    results: dict[str, tuple[Tensor, ...]] = {}
    for routing in ROUTINGS:
        indices = indices_of(routing, rank, world_size)
        x, weights, grad = drawn(rank, len(indices))
        linear = GroupedLinear(
            EXPERTS, HIDDEN, HIDDEN, ranks=ExpertRanks(dispatch=group), split=1, products=TORCH, device=x.device
        )
        linear.weight.data.copy_(linear.weight.spec.take(matrices()))
        assignment = assign(indices, EXPERTS, group)
        rows = linear(dispatch(x, assignment, group), RowGroups(assignment.counts[0]))
        y = combine(rows, weights, assignment, group)
        y.backward(grad)
        assert x.grad is not None and weights.grad is not None and linear.weight.grad is not None
        results[routing] = (y.detach(), x.grad, weights.grad, linear.weight.grad)
    return results


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_reach_their_experts_and_come_back(ranks: int) -> None:
    """Also where a rank gets no row, or all of them: against a loop over tokens in one process."""
    results = run_distributed(mixed, ranks, stay=True)
    for routing in ROUTINGS:
        weight = matrices().requires_grad_()
        for rank in range(ranks):
            indices = indices_of(routing, rank, ranks)
            x, weights, grad = drawn(rank, len(indices))
            of_chosen = torch.einsum("tcoi,ti->tco", weight[indices], x)  # [t, 2, o]
            expected = (weights[..., None] * of_chosen).sum(1)
            expected.backward(grad)
            found = results[rank][routing]
            for one, other in zip(found, (expected.detach(), x.grad, weights.grad), strict=False):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for rank in range(ranks):
            start, stop = split_evenly(EXPERTS, rank, ranks)
            assert weight.grad is not None
            torch.testing.assert_close(results[rank][routing][3], weight.grad[start:stop], rtol=1e-5, atol=1e-6)


# ---- balance


def test_biases_follow_the_counts_of_training_forwards(tmp_path: Path) -> None:
    """Against counts of what was chosen in training, each microbatch once, also where it is computed again."""
    bias = PROGRAMS["bias"] | {"recompute": "full", "train_iters": 2, "num_layers": 2, "eval_iters": 1}
    trainer = trainer_of((1, 1, 1), tmp_path, **bias)
    balance, choices, choose = trainer.train_steps.hook(ExpertBalance), list[Tensor](), moe.choose
    assert balance is not None

    def watched(logits: Tensor, experts: Any, bias: Tensor, chosen: Tensor | None, *others: Any) -> moe.Choice:
        choices.append(choose(logits, experts, bias, chosen, *others).indices)
        preferred = (logits.detach().softmax(-1) + bias).sort(-1, descending=True).values
        gaps[0] = min(gaps[0], float((preferred[..., 1] - preferred[..., 2]).min()))
        return choose(logits, experts, bias, chosen, *others)

    expected, gaps = torch.zeros(4), [1.0]
    for _ in range(2):
        choices.clear()
        gaps[0] = 1.0
        with mock.patch.object(moe, "choose", watched):
            trainer.train_step(next(trainer.batches))
        assert len(choices) == 8  # of 4 microbatches, each computed again
        counts = torch.zeros(4, dtype=torch.int64)
        for indices in choices[::2]:
            counts += torch.tensor([int((indices == expert).sum()) for expert in range(4)])
        assert counts.sum() == 8 * 16 * 2
        (load,) = balance.loads().values()
        assert torch.equal(load, counts)
        expected += 0.01 * (counts.double().mean() - counts).sign().float()
        (found,) = balance.buffers().values()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
        violation = float(counts.max() / counts.double().mean() - 1)
        assert balance.figures() == {
            "moe/max_violation": pytest.approx(violation),
            "moe/mean_violation": pytest.approx(violation),
            "moe/idle_experts": int((counts == 0).sum()),
            "moe/smallest_gap": pytest.approx(gaps[0]),
            "moe/block_1/max_violation": pytest.approx(violation),
            "moe/block_1/min_load": pytest.approx(float(counts.min() / counts.double().mean())),
            "moe/block_1/smallest_gap": pytest.approx(gaps[0]),
        }
    trainer.evaluate()
    balance.after_update(trainer.train_steps, mock.Mock(skipped="not finite"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_bias_is_fp32_in_sixteen_bits(tmp_path: Path) -> None:
    """1e-3 and sums of it are no numbers of bf16. A checkpoint holds it, and generation reads it."""
    bias = PROGRAMS["bias"] | {"moe_router_bias_update_rate": 1e-3, "train_iters": 2, "num_layers": 2}
    trainer = trainer_of((1, 1, 1), tmp_path, **bias, precision="bf16")
    balance, expected, rate = trainer.train_steps.hook(ExpertBalance), torch.zeros(4), torch.tensor(1e-3)
    assert balance is not None
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        (load,) = balance.loads().values()
        expected += rate * (load.double().mean() - load).sign().float()
    (found,) = balance.buffers().values()
    assert found.dtype == torch.float32 and found.any() and torch.equal(found, expected)
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    whole = model_of(directory, partial(gpt_layers, model), torch.device("cpu"))
    (read,) = (buffer for name, buffer in whole.named_buffers() if name.endswith("router.bias"))
    assert torch.equal(read, found)
    with pytest.raises(CheckpointError, match="--num-experts 4 there, 8 here"):
        check_load(make_config((1, 1, 1), tmp_path / "one", load=str(tmp_path), **bias | {"num_experts": 8}))


# ---- latent attention, with experts

CPU = torch.device("cpu")


def test_a_checkpoint_generates_what_the_trained_model_predicts(tmp_path: Path) -> None:
    changes = LATENT | PARTS["latent-experts"] | {"train_iters": 1, "lr_warmup_iters": 0}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=CPU))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    stage = model_of(directory, partial(gpt_layers, model), CPU)
    tokens = [5, 9, 2]
    found = list(generate(stage, model, tokens, max_new_tokens=4, sampling=Sampling(temperature=0.0)))
    trained = trainer.model.chunks[0].eval()
    with torch.no_grad():
        for _ in range(4):
            tokens = [*tokens, int(trained(torch.tensor([tokens]))[0, -1, : model.vocab_size].argmax())]
    assert found == tokens[3:]
