"""Soft caps of scores and of logits, against the formula over all of them in fp64."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from megacore import ops
from megacore.ops.block_attention import block_attention
from megacore.ops.visibility import Visibility
from megacore.parallel.linear_cross_entropy import ChunkedLoss
from megacore.parallel.mesh import ALONE
from megacore.parallel.products import TORCH
from tests.kernels.loop import CASES, B, S, drawn, outer, with_all_weights

CAP = 0.7
attention = import_module("megacore.ops.attention")  # the package exports the function of this name


def within(found: Tensor, expected: Tensor, also: float = 0.0) -> None:
    """fp32 rounding, relative to the largest entry; `also` is an absolute error allowed besides."""
    assert (found.double() - expected).abs().max() <= 5e-6 * expected.abs().max() + also


@pytest.mark.parametrize("way", ["sdpa", "fused-softmax", "tiles of 3"])
@pytest.mark.parametrize(("case", "alibi"), [(case, number % 2 == 0) for number, case in enumerate(CASES)])
def test_capped_scores_are_the_formula(case: str, alibi: bool, way: str) -> None:
    options = CASES[case]
    ours = [(4 * x).detach().requires_grad_() for x in drawn(2)]  # scores far above the cap
    exact = [x.detach().double().requires_grad_() for x in ours]
    slopes = torch.tensor(ops.alibi_slopes(4)) if alibi else None
    if way == "tiles of 3":
        found, _ = block_attention(*ours, view=Visibility(**options), slopes=slopes, soft_cap=CAP, block=3)
    else:
        bias = None if slopes is None else ops.Alibi(slopes)
        found = ops.attention(*ours, **options, alibi=bias, soft_cap=CAP, implementation=way)  # type: ignore[arg-type]
    documents = options.get("documents")
    real = torch.ones(B, 1, S, 1) if documents is None else (documents != 0).view(B, 1, S, 1)
    seen = Visibility(**options).mask(range(S), range(S), torch.device("cpu"))
    expected = with_all_weights(*exact, seen=seen, slopes=slopes, cap=CAP)[0] * real
    within(found * real, expected)
    weights = outer(found) * real
    gradients = torch.autograd.grad((found * weights).sum(), ours)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    # A query that sees one key: the gradient of its score is a difference of equal numbers, 0 or their rounding.
    rounding = torch.finfo(torch.float32).eps * max(float(want.abs().max()) for want in wanted)
    for gradient, want in zip(gradients, wanted, strict=True):
        within(gradient, want, also=rounding)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_capped_logits_are_the_formula(chunks: int, split: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 7, 16), (136, 16)))
    targets = torch.randint(0, 131, (2, 7), generator=generator)
    scale = torch.rand(2, 7, generator=generator)
    layer = ChunkedLoss(
        vocab_size=131,
        chunks=chunks,
        group=ALONE,
        sequence_parallel=False,
        split_backward=split,
        products=TORCH,
        soft_cap=CAP,
    )
    found = layer.losses(x, weight, None, targets, ops.CrossEntropyOptions(z_loss=1e-2))
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    logits = CAP * torch.tanh((wide[0] @ wide[1].T)[..., :131] / CAP)
    log_z = logits.logsumexp(-1)
    expected = log_z - logits.gather(-1, targets[..., None])[..., 0] + 1e-2 * log_z.square()
    within(found, expected)
    gradients = torch.autograd.grad((found * scale).sum(), (x, weight))
    wanted = torch.autograd.grad((expected * scale).sum(), wide)
    for gradient, want in zip(gradients, wanted, strict=True):
        within(gradient, want)
