"""Every Triton kernel against double precision: on a GPU, or in Triton's interpreter (test_interpreter.py).

The interpreter takes milliseconds per program of a kernel. There, `make test` tries each comparison in fp32 and in one
of fp16 and bf16, in turn, and large ones in bf16; `make test-slow` tries the others. Some inputs are smaller.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import ops
from megacore.ops import loss
from megacore.ops.block_attention import attend, attend_backward
from megacore.ops.visibility import Visibility
from tests.kernels.comparisons import DTYPES, Comparison, compare, comparisons
from tests.kernels.conftest import INTERPRETING

pytestmark = pytest.mark.on_device
# Of what `make test` leaves out in the interpreter; a GPU tries all.
LATER = [pytest.mark.slow] if INTERPRETING else []


def in_turn() -> list[Any]:
    """Every comparison in every precision."""
    left_out = itertools.cycle(("bf16", "fp16"))
    return [
        pytest.param(
            comparison, dtype, marks=LATER if (dtype != "bf16" if comparison.is_large else dtype == later) else []
        )
        for comparison, later in zip(comparisons(), left_out, strict=False)
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("comparison", "dtype"), in_turn(), ids=str)
def test_kernel_is_its_formula(comparison: Comparison, dtype: str, device: torch.device) -> None:
    with ops.kernels_chosen("triton"):
        compare(comparison, comparison.operator, DTYPES[dtype], device)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_cross_entropy_of_shifted_logits(shift: float, device: torch.device) -> None:
    """The largest logit is subtracted before anything is summed: a shift costs what it takes from the logits alone."""
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(0)).to(device) + shift
    targets = torch.tensor([0, 89, 40, 7], device=device)
    options = ops.CrossEntropyOptions(label_smoothing=0.1)
    with ops.kernels_chosen("triton"):
        found = ops.cross_entropy(logits, targets, options=options)
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shares", [1, 3])
def test_statistics_of_shares_are_merged(shares: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do that each hold some columns; the last has none. More tokens than a program merges."""
    tokens = 300
    if INTERPRETING:
        tokens = 34
        monkeypatch.setattr(importlib.import_module("megacore.kernels.cross_entropy"), "TOKENS", 32)
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(tokens, 37, generator=generator) * 3).to(device)
    targets = torch.randint(0, 37, (tokens,), generator=generator).to(device)
    targets[:3] = torch.tensor([-100, 37, -1])
    options = ops.CrossEntropyOptions(label_smoothing=0.1, z_loss=0.01)
    ends = [37 * i // shares for i in range(shares + 1)]
    bounds = [*itertools.pairwise(ends), (37, 37)]
    with ops.kernels_chosen("triton"):
        expected = ops.cross_entropy(logits, targets, options=options)
        share = ops.VocabularyShare(tuple(bounds))
        own = [
            loss.statistics(logits[:, a:].contiguous(), targets, share=share, start=a, columns=b - a, options=options)
            for a, b in bounds[:-1]
        ]
        nothing = torch.tensor([-1e30, 0.0, 0.0], device=device)[:, None].expand(3, tokens)
        parts = torch.stack([*own, nothing])
        merged = loss.merged(parts, targets, bounds=bounds, vocab_size=37, options=options)
        found, _ = loss.losses(merged, targets, share=ops.VocabularyShare(((0, 37),)), options=options)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_softmax_of_large_scores_is_finite(device: torch.device) -> None:
    x = torch.tensor([[[[1000.0, 999.0, -1000.0, 1000.0]]]], device=device)
    with ops.kernels_chosen("triton"):
        y = ops.fused_softmax(x)
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [40, 16500])
def test_softmax_of_nothing_but_minus_infinity_is_zero(width: int, device: torch.device) -> None:
    x = torch.full((1, 1, 2, width), -torch.inf, device=device, requires_grad=True)
    with ops.kernels_chosen("triton"):
        y = ops.fused_softmax(x, causal=True)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.all(y == 0) and torch.all(gradient == 0)


def test_what_a_mask_hides_is_exactly_zero(device: torch.device) -> None:
    """Whatever stands there, -inf and NaN included: what is hidden is not read, or not used."""
    x = torch.randn(1, 1, 17, 17, device=device)
    later = torch.ones(17, 17, dtype=torch.bool, device=device).triu(1)
    with ops.kernels_chosen("triton"):
        expected = ops.fused_softmax(x, causal=True)
        for value in (torch.nan, torch.inf, -torch.inf, 1e30):
            y = ops.fused_softmax(x.masked_fill(later, value), causal=True)
            assert torch.equal(y, expected)
            assert torch.all(y[0, 0][later] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_of_matrices_and_vectors_is_as_exact_as_torchs(dtype: torch.dtype, device: torch.device) -> None:
    """Weight decay of every other 32 elements; each error against double precision beside that of torch's operator."""
    count, steps = 32 * 66 + 9, 3
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(count, generator=generator).to(device)
    gradients = [torch.randn(count, generator=generator).to(device, dtype) for _ in range(steps)]
    decays = (torch.arange(67, device=device) % 2).to(torch.uint8)
    with_decay = decays.bool().repeat_interleave(32)[:count]
    factor = torch.tensor(0.3, device=device)

    def torchs(precision: torch.dtype) -> torch.Tensor:
        parts = [torch.nn.Parameter(start[part].to(precision)) for part in (with_decay, ~with_decay)]
        groups = [{"params": [part], "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]
        adamw = torch.optim.AdamW(groups, lr=1e-2, fused=precision is torch.float32)
        for gradient in gradients:
            for part, chosen in zip(parts, (with_decay, ~with_decay), strict=True):
                part.grad = gradient[chosen].to(precision) * factor.to(precision)
            adamw.step()
        whole = torch.empty(count, dtype=precision, device=device)
        whole[with_decay], whole[~with_decay] = (part.detach() for part in parts)
        return whole

    exact, plain = torchs(torch.float64), torchs(torch.float32)
    parameter, mean, square = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    copy = torch.empty(count, dtype=torch.bfloat16, device=device)
    with ops.kernels_chosen("triton"):
        for step, gradient in enumerate(gradients, 1):
            states, update = (parameter, gradient, mean, square), ops.AdamWStep(step=step, lr=1e-2, weight_decay=0.1)
            ops.adamw_(*states, update=update, factor=factor, copy=copy, decays=decays)
        before = [tensor.clone() for tensor in (parameter, mean, square, copy)]
        skipped, update = torch.tensor(torch.nan, device=device), ops.AdamWStep(step=steps + 1, lr=1e-2)
        ops.adamw_(*states, update=update, factor=skipped, copy=copy, decays=decays)
    assert all(torch.equal(*pair) for pair in zip(before, (parameter, mean, square, copy), strict=True))
    assert (parameter - exact).norm() <= 1.1 * (plain - exact).norm()
    assert (parameter - exact).abs().max() <= 1.5 * (plain - exact).abs().max()


def test_the_same_bits_twice(device: torch.device) -> None:
    """Nothing is added in the order of arrival. The interpreter runs one program at a time: a few small rows do."""
    rows, width = (9, 30) if INTERPRETING else (70, 300)
    x = torch.randn(rows, width, device=device, requires_grad=True)
    weight = torch.ones(width, device=device, requires_grad=True)
    bias = torch.zeros(width, device=device, requires_grad=True)
    dy = torch.randn(rows, width, device=device)
    with ops.kernels_chosen("triton"):
        first, second = (torch.autograd.grad(ops.layer_norm(x, weight, bias), [x, weight, bias], dy) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("rows", "width", "rms"),
    [
        *((70, 2100, True), (40, 16, False)),
        *(pytest.param(*case, marks=LATER) for case in ((130, 2100, False), (7, 2049, True), (140, 40, True))),
    ],
)
def test_shares_of_many_processors_add_up(
    rows: int, width: int, rms: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dweight and dbias from as many shares as a GPU makes; the interpreter's few processors leave one to a column."""
    kernel = importlib.import_module("megacore.kernels.norm")
    monkeypatch.setattr(kernel, "processors", lambda _: 132)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, width, generator=generator).to(device) for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator).to(device).requires_grad_() for _ in range(2))
    exact_weight, exact_bias = (leaf.detach().double().requires_grad_() for leaf in (weight, bias))
    with ops.kernels_chosen("triton"):
        y = ops.rms_norm(x, weight) if rms else ops.layer_norm(x, weight, bias)
        found = torch.autograd.grad(y, [weight] if rms else [weight, bias], dy)
    if rms:
        expected = torch.nn.functional.rms_norm(x.double(), (width,), exact_weight, 1e-5)
    else:
        expected = torch.nn.functional.layer_norm(x.double(), (width,), exact_weight, exact_bias, 1e-5)
    leaves = [exact_weight] if rms else [exact_weight, exact_bias]
    wanted = torch.autograd.grad(expected, leaves, dy.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=3e-6 * float(other.abs().max()))


def test_nothing_in_nothing_out(device: torch.device) -> None:
    """Zero rows: no kernel can be launched for them, and gradients of parameters are zero."""
    weight = torch.ones(8, device=device, requires_grad=True)
    x = torch.empty(0, 8, device=device, requires_grad=True)
    with ops.kernels_chosen("triton"):
        y = ops.layer_norm(x, weight, torch.zeros(8, device=device)) + ops.gelu(x) + ops.swiglu(x, x)
        (grad,) = torch.autograd.grad(y.sum(), weight)
        assert ops.dropout_add(x, x, probability=0.1, seed=1).shape == (0, 8)
        assert ops.cross_entropy(x.detach(), torch.empty(0, dtype=torch.long, device=device)).shape == (0,)
    assert torch.all(grad == 0)


@pytest.mark.parametrize(
    ("offset", "window", "dtype"),
    [
        *((2, None, torch.float32), (4, 5, torch.bfloat16)),
        *(pytest.param(*case, marks=LATER) for case in ((12, None, torch.bfloat16), (0, 3, torch.float32))),
    ],
)
def test_attention_of_a_part_of_the_keys_is_not_rounded(
    offset: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """As a ring needs it, against the operator on the CPU: queries beyond the keys, results and gradients in fp32,
    the latter of all queries and of some."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, d_out = (torch.randn(1, heads, 4, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4))
    view = Visibility(causal=True, window=window)

    def computed(query: Tensor, key: Tensor, value: Tensor, d_out: Tensor) -> list[Tensor]:
        results = list(attend(query, key, value, view=view, offset=offset, in_fp32=True))
        for first in (0, 1):
            d_rows, out, logarithm, rows = (x[:, :, first:] for x in (d_out, *results[:2], query))
            results += attend_backward(d_rows, out, logarithm, (rows, key, value), view=view, offset=offset + first)
        return results

    expected = computed(query, key, value, d_out)
    assert {x.dtype for x in expected} == {torch.float32}
    with ops.kernels_chosen("triton"):
        of_kernel = computed(*(x.to(device) for x in (query, key, value, d_out)))
    error = 1e-5 if dtype == torch.float32 else 1e-2  # a device rounds weights to bf16 before their product
    for ours, theirs in zip(of_kernel, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.cpu(), theirs, rtol=error, atol=error)
