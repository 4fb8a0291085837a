"""The plain-torch form of every operator against double precision, torch's own functions and torch's own checks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import ops
from megacore.ops import dropout
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.kernels.comparisons import DTYPES, Comparison, compare, comparisons
from tests.unit.packaging_builds import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("comparison", comparisons(), ids=str)
def test_reference_is_its_formula(comparison: Comparison, dtype: str) -> None:
    with ops.kernels_chosen("torch"):
        # Norms and GELU run as torch's own functions outside Triton; the form behind the operator is what is tried.
        compare(comparison, comparison.reference or comparison.operator, DTYPES[dtype], CPU)


def on_a_device(rank: int, world_size: int) -> None:
    with ops.kernels_chosen("torch"):
        for comparison in comparisons():
            if "rotary" not in comparison.name:  # its oracle uses complex numbers, which that device lacks
                function = comparison.reference or comparison.operator
                compare(comparison, function, torch.float32, torch.device("pretend", rank))


@needs_pretend
def test_comparisons_have_all_their_tensors_on_the_device() -> None:
    """As on a GPU, whose tensors do not mix with the host's."""
    run_distributed(on_a_device, 1, backend="pretend", init=False)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 2}], ids=str)
def test_softmax_of_nothing_but_minus_infinity_is_zero(options: dict[str, Any]) -> None:
    """As in the kernel: a score of -inf hides a key as a mask does, and a query then may see nothing."""
    x = torch.randn(1, 2, 3, 5)
    x[0, 1, 1] = -torch.inf
    x.requires_grad_()
    y = ops.fused_softmax(x, **options)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.all(y[0, 1, 1] == 0) and torch.all(gradient[0, 1, 1] == 0)
    assert torch.isfinite(y).all() and torch.isfinite(gradient).all()
    torch.testing.assert_close(y[0, 0].sum(-1), torch.ones(3))


def test_cross_entropy_in_place_where_no_gradient_is_wanted() -> None:
    """There is nothing to write then, and the logits stay as they are, leaves or not."""
    options, weight = ops.CrossEntropyOptions(in_place=True), torch.randn(4, 5, requires_grad=True)
    with torch.no_grad():
        logits = torch.randn(3, 4) @ weight
        expected = F.cross_entropy(logits, IDS, reduction="none")
        torch.testing.assert_close(ops.cross_entropy(logits, IDS, options=options), expected)
        torch.testing.assert_close(ops.cross_entropy(logits.requires_grad_(), IDS, options=options), expected)
    torch.testing.assert_close(ops.cross_entropy(logits.detach(), IDS, options=options), expected)


def test_a_second_derivative_of_cross_entropy_is_refused() -> None:
    """Its gradient is made in place, where autograd does not look; without a word it would be taken for a constant."""
    logits = torch.randn(3, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.cross_entropy(logits, IDS).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        torch.autograd.grad((gradient * logits).sum(), logits)


def test_philox_gives_the_published_bits() -> None:
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""
    zero = torch.zeros((), dtype=torch.int64)
    words = [int(word) for word in dropout.philox(0, (zero, zero, zero, zero))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = zero + 0xFFFFFFFF
    words = [int(word) for word in dropout.philox(2**64 - 1, (ones, ones, ones, ones))]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    mask = ops.dropout_mask((500, 1000), probability=0.1, seed=3, device=CPU)
    assert abs(mask.float().mean().item() - 0.9) < 2e-3  # 5 standard deviations
    assert not torch.equal(mask, ops.dropout_mask((500, 1000), probability=0.1, seed=4, device=CPU))
    x, zero = torch.ones(50, 10), torch.zeros(50, 10)
    y = ops.dropout_add(x, zero, probability=0.1, seed=3)
    assert torch.equal(y != 0, ops.dropout_mask((50, 10), probability=0.1, seed=3, device=CPU))
    assert torch.equal(ops.dropout_add(x, zero, probability=0.0, seed=3), x)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs(decay: float) -> None:
    parameter, twin = torch.randn(999), torch.nn.Parameter(torch.empty(999))
    twin.data.copy_(parameter)
    adamw = torch.optim.AdamW([twin], lr=1e-2, weight_decay=decay)
    mean, square, copy = torch.zeros(999), torch.zeros(999), torch.empty(999, dtype=torch.bfloat16)
    for step in range(1, 6):
        twin.grad = torch.randn(999)
        numbers = ops.AdamWStep(step=step, lr=1e-2, weight_decay=decay)
        ops.adamw_(parameter, twin.grad, mean, square, update=numbers, copy=copy)
        adamw.step()
        torch.testing.assert_close(parameter, twin.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(copy, parameter.bfloat16())


def test_adamw_skips_a_step_whose_factor_is_nan_and_decays_matrices_alone() -> None:
    parameter, gradient = torch.randn(80), torch.zeros(80)
    mean, square, copy = torch.zeros(80), torch.zeros(80), torch.zeros(80, dtype=torch.bfloat16)
    decays, start = torch.tensor([0, 1, 0], dtype=torch.uint8), parameter.clone()
    numbers = ops.AdamWStep(step=1, lr=0.5, weight_decay=0.5)
    options: dict[str, Any] = {"update": numbers, "copy": copy, "decays": decays}
    ops.adamw_(parameter, gradient, mean, square, factor=torch.tensor(torch.nan), **options)
    assert torch.equal(parameter, start) and not copy.any() and not mean.any() and not square.any()
    ops.adamw_(parameter, gradient, mean, square, **options)
    expected = torch.cat([start[:32], 0.75 * start[32:64], start[64:]])
    assert torch.equal(parameter, expected) and torch.equal(copy, expected.bfloat16())


def _float(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


IDS, ONES = torch.tensor([1, 0, -100]), torch.ones(3)
CHECKED: dict[str, tuple[str, tuple[Any, ...]]] = {  # by torch's name of the operator
    "layer_norm": ("norm_forward", (_float(3, 8), None, _float(8), _float(8), 1e-5, False)),
    "add_rms_norm": ("norm_forward", (_float(3, 8), _float(3, 8), _float(8), None, 1e-5, True)),
    "softmax": ("softmax_forward", (_float(1, 2, 4, 6), 0.5, True, 2, 3)),
    "rotary": ("rotary", (_float(1, 3, 2, 8), torch.randn(3, 4), torch.randn(3, 4), False)),
    "split_rotary": ("split_rotary", (_float(1, 3, 6, 8), torch.randn(3, 4), torch.randn(3, 4), 2)),
    "gelu": ("gelu_forward", (_float(3, 8), _float(8))),
    "swiglu": ("swiglu_forward", (_float(3, 8), _float(3, 8))),
    "swiglu_of_halves": ("swiglu_of_halves", (_float(3, 8),)),
    "dropout": ("dropout_add", (_float(3, 8), _float(3, 8), 7, 2**30, 1.25)),
    "cross_entropy": ("cross_entropy_statistics", (_float(3, 8, grad=False), IDS, 0, 7, -100, 1.0, 0.0)),
    "loss_gradient": ("cross_entropy_gradient_", (_float(3, 8, grad=False), IDS, *[ONES] * 3, 0, 7, -100, 1.0, 0.0)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_operator_is_well_formed(name: str) -> None:
    """Schema, mutation, shapes under fake tensors, autograd registration and tracing with dynamic shapes."""
    operator, arguments = CHECKED[name]
    torch.library.opcheck(getattr(torch.ops.megacore, operator).default, arguments)


def test_operators_run_on_fake_tensors() -> None:
    """As in a dry run: no kernel is needed for the shapes to come out."""
    with torch._subclasses.FakeTensorMode(), ops.kernels_chosen("triton"):
        x, weight = torch.empty(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
        y = ops.gelu(ops.layer_norm(x, weight, weight))
        losses = ops.cross_entropy(y, torch.zeros(4, dtype=torch.long))
        losses.sum().backward()
        assert x.grad is not None and x.grad.shape == (4, 8)


def test_operators_run_where_triton_is_not_installed() -> None:
    code = """
import sys
sys.modules["triton"] = None  # importing it fails from here on
import torch
from megacore import ops
y = ops.gelu(ops.layer_norm(torch.randn(3, 8), torch.ones(8), torch.zeros(8)))
ops.cross_entropy(ops.rms_norm(y, torch.ones(8)), torch.zeros(3, dtype=torch.long))
print(ops.implementations(y.device, "auto")["layer_norm"], "|", ops.why_not("triton", y.device))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | needs Triton, which is not installed")


def test_triton_on_a_cpu_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "use --kernels auto or torch" in str(ops.why_not("triton", CPU))
