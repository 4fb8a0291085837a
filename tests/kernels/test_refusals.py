"""Arguments that an operator cannot work with are refused by name, before a kernel or torch stumbles over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import ops

CPU = torch.device("cpu")
IDS = torch.tensor([0, 1, 2])
EMPTY = torch.ones(3, 0)
ROWS, ROW = torch.ones(3, 8), torch.ones(8)
SCORES = torch.ones(1, 1, 3, 3)
HEADS = torch.ones(1, 2, 3, 4)
TWO = ((0, 2), (2, 4))


def adamw(*, factor: Tensor | None = None, decays: Tensor | None = None, **numbers: Any) -> None:
    """A step of four parameters, but for what is given."""
    update = ops.AdamWStep(**{"step": 1, "lr": 1e-3, **numbers})
    ops.adamw_(*[torch.ones(4)] * 4, update=update, factor=factor, decays=decays)


def attended(query: Tensor = HEADS, key: Tensor = HEADS, value: Tensor = HEADS, **options: Any) -> Tensor:
    """Causal attention, but for what is given."""
    seen = {name: options.pop(name) for name in ("window", "documents") if name in options}
    return ops.attention(query, key, value, view=ops.Visibility(causal=True, **seen), **options)


def dropped(x: Tensor = ROWS, *, probability: float = 0.1, seed: Any = 0) -> Tensor:
    """dropout_add, but for what is given."""
    return ops.dropout_add(x, x, probability=probability, seed=seed)


def share(*arguments: Any) -> Tensor:
    """Cross-entropy of four columns of a share."""
    return ops.cross_entropy(torch.ones(3, 4), IDS, share=ops.VocabularyShare(*arguments))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "key's dtype": (lambda: attended(key=HEADS.half(), value=HEADS.half()), "key is float16: it must be float32, like"),
    "value's dtype": (lambda: attended(value=HEADS.half()), "value is float16: it must be float32, like query"),
    "key's device": (lambda: attended(key=HEADS.to("meta")), "key is on meta: it must be on cpu, like query"),
    "value's strides": (
        lambda: attended(value=torch.ones(1, 2, 4, 3).transpose(2, 3)),
        r"value has shape \(1, 2, 3, 4\) and strides \(24, 12, 1, 3\): its last dimension must be contiguous; call",
    ),
    "integers": (lambda: attended(*[HEADS.long()] * 3), "query is int64: it must be float32, float16 or bfloat16"),
    "implementation": (
        lambda: attended(implementation="flash"),
        "implementation is 'flash': it must be one of auto, sdpa, fused-softmax",
    ),
    "key heads": (lambda: attended(torch.ones(1, 4, 3, 4), *[torch.ones(1, 3, 3, 4)] * 2), "dividing query's 4 heads"),
    "values": (lambda: attended(value=HEADS[:, :, :2]), "value has shape"),
    "window": (lambda: attended(window=0), "window is 0"),
    "documents": (lambda: attended(documents=IDS[None, :2]), "documents has shape"),
    "documents' type": (lambda: attended(documents=torch.zeros(1, 3)), "documents is float32"),
    "half a window of attention": (lambda: attended(window=2.5), "window is 2.5: it must be a whole number"),
    "dropout": (lambda: attended(dropout=1.5), r"dropout is 1.5: it must be in \[0, 1\)"),
    "label_smoothing above": (lambda: ops.CrossEntropyOptions(label_smoothing=1.5), "label_smoothing is 1.5"),
    "dtype": (lambda: ops.rms_norm(ROWS.double(), ROW), "x is float64: it must be"),
    "mixed dtypes": (lambda: ops.rms_norm(ROWS, ROW.half()), "weight is float16: it must be float32"),
    "a bias' shape": (lambda: ops.layer_norm(ROWS, ROW, ROW[:7]), r"bias has shape \(7,\)"),
    "strides": (lambda: ops.layer_norm(torch.ones(8, 3).t(), ROW, ROW), r"call x.contiguous\(\)"),
    "a weight's device": (lambda: ops.rms_norm(ROWS, ROW.to("meta")), "weight is on meta: it must be"),
    "epsilon": (lambda: ops.rms_norm(ROWS, ROW, 0.0), "epsilon is 0.0"),
    "residual": (lambda: ops.add_rms_norm(ROWS, ROWS[:1], ROW), r"residual has shape \(1, 8\)"),
    "scores": (lambda: ops.fused_softmax(ROWS), r"x has shape \(3, 8\): it must be \[b, heads, sq, sk\]"),
    "no window": (lambda: ops.fused_softmax(SCORES, window=0), "window is 0"),
    "targets": (lambda: ops.cross_entropy(ROWS, torch.ones(3)), "targets is float32: it must be int64"),
    "a leaf": (
        lambda: ops.cross_entropy(
            torch.ones(3, 4, requires_grad=True), IDS, options=ops.CrossEntropyOptions(in_place=True)
        ),
        "logits is a leaf",
    ),
    "angles": (lambda: ops.rotary(torch.ones(1, 2, 1, 4), torch.ones(2, 3), torch.ones(2, 3)), "cos has 3 columns"),
    "groups": (
        lambda: ops.split_rotary(torch.ones(1, 2, 4, 4), torch.ones(2, 2), torch.ones(2, 2), groups=2),
        "packed has 4 heads: 2 groups need",
    ),
    "rows": (lambda: ops.swiglu(torch.ones(8, 3).t(), ROWS), r"gate has shape .* call gate.contiguous\(\)"),
    "bias": (lambda: ops.bias_gelu(ROWS, ROW[:3]), r"bias has shape \(3,\): it must be \(8,\)"),
    "probability": (lambda: dropped(probability=1.0), "probability is 1.0"),
    "seed": (lambda: dropped(seed=-1), "seed is -1"),
    "step": (lambda: adamw(step=0), "step is 0: the first step is 1"),
    "flat": (lambda: ops.adamw_(*[ROWS] * 4, update=ops.AdamWStep(step=1, lr=1e-3)), "parameter has shape"),
    "choice": (lambda: ops.choose_kernels("cuda"), "choice is 'cuda': it must be one of auto, triton, torch"),  # type: ignore[arg-type]
    "z_loss": (lambda: ops.CrossEntropyOptions(z_loss=-1.0), "z_loss is -1.0: it must be finite and not negative"),
    "no dimension of logits": (lambda: ops.cross_entropy(torch.tensor(1.0), IDS[0]), r"logits has shape \(\): its"),
    "no logits": (lambda: ops.cross_entropy(EMPTY, IDS), r"logits has shape \(3, 0\): its last dimension must"),
    "rank": (lambda: share(TWO, 5), r"rank is 5: it must be in \[0, 2\)"),
    "bounds": (lambda: share(((2, 4), (0, 2))), "bounds is .* in order"),
    "no bounds": (lambda: share(()), r"bounds is \(\)"),
    "exchange": (lambda: share(TWO, 0), "exchange gave the tensors of 1 ranks: it must give those of 2, like bounds"),
    "beta1": (lambda: adamw(betas=(1.0, 0.9)), r"betas is \(1.0, 0.9\): both must be in \[0, 1\)"),
    "beta2": (lambda: adamw(betas=(0.9, -0.1)), r"betas is \(0.9, -0.1\)"),
    "lr": (lambda: adamw(lr=-1.0), "lr is -1.0: it must be finite and not negative"),
    "adamw's epsilon": (lambda: adamw(epsilon=-1e-8), "epsilon is -1e-08"),
    "weight_decay": (lambda: adamw(weight_decay=-0.1), "weight_decay is -0.1"),
    "factor": (lambda: adamw(factor=torch.ones(1, 1)), r"factor has shape \(1, 1\): it must be one number"),
    "decays' dtype": (lambda: adamw(decays=torch.ones(1)), "decays is torch.float32: it must be torch.uint8"),
    "decays' shape": (
        lambda: adamw(decays=torch.ones(4, dtype=torch.uint8)),
        r"decays has shape \(4,\): it must be \(1,\), one for each 32 elements of parameter",
    ),
    "half a step": (lambda: adamw(step=1.5), "step is 1.5: it must be a whole number"),
    "gelu of nothing": (lambda: ops.gelu(EMPTY), r"x has shape \(3, 0\)"),
    "geglu's types": (lambda: ops.geglu(ROWS.long(), ROWS.long()), "gate is int64"),
    "half a window": (lambda: ops.fused_softmax(SCORES, window=2.5), "window is 2.5: it must be a whole number"),  # type: ignore[arg-type]
    "half an offset": (lambda: ops.fused_softmax(SCORES, offset=0.5), "offset is 0.5: it must be a whole number"),  # type: ignore[arg-type]
    "scale": (lambda: ops.fused_softmax(SCORES, scale=float("inf")), "scale is inf: it must be positive and finite"),
    "half a seed": (lambda: dropped(seed=1.5), "seed is 1.5: it must be a whole number"),
    "dropout of nothing": (lambda: dropped(EMPTY), r"x has shape \(3, 0\)"),
    "mask's seed": (lambda: ops.dropout_mask((2, 3), probability=0.1, seed=-1, device=CPU), "seed is -1: it must be"),
    "mask's shape": (lambda: ops.dropout_mask((), probability=0.1, seed=1, device=CPU), r"shape is \(\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


ON_A_CPU: dict[str, tuple[Callable[[], Any], str]] = {
    "rms_norm": (lambda: ops.rms_norm(ROWS, ROW), "x"),
    "cross_entropy": (lambda: ops.cross_entropy(ROWS, IDS), "logits"),
    "swiglu": (lambda: ops.swiglu(ROWS, ROWS), "gate"),
    "dropout_add": (dropped, "x"),
    "adamw_": (adamw, "parameter"),
}


@pytest.mark.parametrize("name", ON_A_CPU)
def test_triton_refuses_a_tensor_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call, argument = ON_A_CPU[name]
    with (
        ops.kernels_chosen("triton"),
        pytest.raises(ValueError, match=f"{argument} is on cpu, and the chosen impl.* use --kernels auto or torch"),
    ):
        call()


def test_squared_relu_is_the_square_of_relu() -> None:
    x = torch.linspace(-2, 2, 24).view(3, 8).t().requires_grad_()
    dy = torch.linspace(-1, 1, 24).view(8, 3)
    (expected,) = torch.autograd.grad(torch.relu(x).square(), x, dy)
    y = ops.squared_relu(x)
    torch.testing.assert_close(y, torch.relu(x).square(), rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected, rtol=1e-7, atol=0)


def test_geglu_takes_the_halves_of_a_wider_tensor() -> None:
    both = torch.randn(3, 8, requires_grad=True)
    gate, up = both.chunk(2, -1)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ops.geglu(gate, up), expected, rtol=0, atol=0)
