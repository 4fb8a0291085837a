"""A head that computes loss and gradients a chunk of the tokens at a time trains like one that holds all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megacore.ops import CrossEntropyOptions
from megacore.parallel.canonical import ONE_BLOCK, Blocks
from megacore.parallel.loss import ChunkedLoss, Scored
from megacore.parallel.mesh import ALONE, build_mesh
from megacore.parallel.products import TORCH
from tests.distributed import run_distributed
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import make_config, make_trainer


def evaluations(rank: int, world_size: int, directory: str) -> list[list[float]]:
    """What an evaluation of GPT and of BERT sums up, with all logits and in chunks, before and after a step."""
    found = []
    mesh = build_mesh(make_config((world_size, 1, 1), directory).parallel)
    for name in ("gpt", "bert"):
        for chunks in (1, 3):
            changes = {"loss_chunks": chunks, "label_smoothing": 0.1, "train_iters": 2, "num_layers": 2}
            layout = (world_size, 1, 1)
            if name == "gpt":
                config = make_config(layout, f"{directory}/{name}{chunks}", **changes)
                trainer = make_trainer(config, mesh)
            else:
                bert = make_bert_config(layout, f"{directory}/{name}{chunks}", **changes)
                trainer = make_bert_trainer(bert, mesh)
            batch = next(trainer.batches)
            sums = [trainer.model.runtime.evaluate(batch).flatten()]
            trainer.train_step(batch)
            sums.append(trainer.model.runtime.evaluate(batch).flatten())
            found.append(torch.cat(sums).tolist())
    return found


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_evaluation_in_chunks_sums_up_the_same(tp: int, tmp_path: Path) -> None:
    """The likeliest tokens too, of which BERT's accuracy is made."""
    for gpt, gpt_chunks, bert, bert_chunks in run_distributed(evaluations, tp, str(tmp_path), stay=True):
        assert gpt_chunks == pytest.approx(gpt, rel=1e-6)
        assert bert_chunks == pytest.approx(bert, rel=1e-6)


# ---- the operator, against all logits in fp64

TOKENS, HIDDEN, VOCABULARY, ROWS = 24, 16, 131, 136


def gradients(
    chunks: int, dtype: torch.dtype, *, factor: float = 1.0, biased: bool = True, options: CrossEntropyOptions
) -> list[Tensor]:
    """The loss, and the gradients of input, weight and bias under unequal weights of the tokens; 0 chunks: of all
    logits. The gradient of the loss is 1.5, and `factor` what was expected."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, TOKENS // 2, HIDDEN), (ROWS, HIDDEN), (ROWS,))
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype) for shape in shapes]
    x, weight, bias = (value.requires_grad_() for value in values)
    given = bias if biased else None
    targets = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    targets[0, 3] = options.ignore_index
    weights = torch.linspace(0.0, 2.0, TOKENS, dtype=torch.float64).view(2, -1)
    if chunks == 0:
        wide = torch.nn.functional.linear(x, weight, given)[..., :VOCABULARY]
        log_z = wide.logsumexp(-1)
        smoothing = options.label_smoothing
        hit = wide.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        losses = log_z - (1 - smoothing) * hit - smoothing * wide.mean(-1) + options.z_loss * log_z.square()
        losses = losses.masked_fill(targets == options.ignore_index, 0.0)
        loss = (losses * weights).sum()
    else:
        share: dict[str, Any] = {"group": ALONE, "sequence_parallel": False, "products": TORCH}
        layer = ChunkedLoss(vocab_size=VOCABULARY, chunks=chunks, **share)
        loss = layer.summed(x, weight, given, Scored(targets, weights.float(), torch.tensor([factor])), options)
    (loss * 1.5).backward()
    return [loss.detach(), *(leaf.grad for leaf in (x, weight, bias)[: 3 if biased else 2] if leaf.grad is not None)]


OPTIONS = [CrossEntropyOptions(), CrossEntropyOptions(label_smoothing=0.1, z_loss=1e-2, ignore_index=-1)]


@pytest.mark.parametrize("factor", [1.5, 1024.0, 0.0], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothing"])
@pytest.mark.parametrize("chunks", [1, 5, 200])
def test_the_operator_is_a_linear_layer_and_cross_entropy(
    chunks: int, options: CrossEntropyOptions, factor: float
) -> None:
    """Whatever gradient of the loss was expected: the one that comes counts. Any chunks take three products."""
    expected = gradients(0, torch.float64, options=options)
    with FlopCounterMode(display=False) as counter:
        gradients_found = gradients(chunks, torch.float32, factor=factor, options=options)
    assert counter.get_total_flops() == 3 * 2 * TOKENS * HIDDEN * ROWS
    for found, exact in zip(gradients_found, expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
        assert found.dim() == 0 or not found[VOCABULARY:].any(), "padding has a gradient"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_chunks_are_as_exact_as_of_all_logits(dtype: torch.dtype) -> None:
    expected = gradients(0, torch.float64, biased=False, options=OPTIONS[0])
    whole, chunked = (gradients(chunks, dtype, biased=False, options=OPTIONS[0]) for chunks in (1, 4))
    for one, other, exact in zip(whole, chunked, expected, strict=True):
        error, allowed = (other.double() - exact).norm(), (one.double() - exact).norm()
        assert error <= 1.1 * allowed + 1e-6


@pytest.mark.parametrize("blocks", [ONE_BLOCK, Blocks(4)], ids=["whole", "blocks"])
def test_of_equal_logits_the_first_token_is_the_likeliest(blocks: Blocks) -> None:
    layer = ChunkedLoss(vocab_size=9, chunks=2, group=ALONE, sequence_parallel=False, products=TORCH, blocks=blocks)
    x, weight = torch.ones(1, 2, 4), torch.zeros(9, 4)
    weight[[3, 7]] = 1.0
    scored = Scored(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), torch.ones(()))
    _, likeliest = layer.summed_and_likeliest(x, weight, None, scored, OPTIONS[0])
    assert likeliest.tolist() == [[3, 3]]
