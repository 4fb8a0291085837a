"""What torch's kernel for sequences of different lengths is given: here a stand-in with its documented meaning."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import ops
from megacore.ops import varlen_attention
from megacore.ops.visibility import Visibility
from tests.kernels.loop import CASES, DOCUMENTS, B, S, brute_force, drawn, is_the_loop

attention = import_module("megacore.ops.attention")  # the package exports the function of this name
CALLS: list[dict[str, Any]] = []


def stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Of [total, heads, d]: sequence by sequence, position by position."""
    CALLS.append({"window_size": window_size, "longest": max_q, "runs": len(cu_seq_q) - 1})
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k
    assert int(cu_seq_q[-1]) == len(query) and int(cu_seq_q.diff().max()) == max_q and int(cu_seq_q.diff().min()) > 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = (max_q if side == -1 else side for side in window_size)
    shared_by, rows = query.shape[1] // key.shape[1], []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        for i in range(start, stop):
            seen = slice(max(start, i - left), min(stop, i + right + 1))
            keys, values = (x[seen].repeat_interleave(shared_by, 1) for x in (key, value))  # [seen, n, d]
            scores = torch.einsum("nd,knd->nk", query[i], keys) / query.shape[-1] ** 0.5
            rows.append(torch.einsum("nk,knd->nd", torch.softmax(scores, -1), values))
    return torch.stack(rows)


def stand_in_of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """That of torch 2.11, which shares key heads unasked."""
    bounds = cu_seq_q, cu_seq_k, max_q, max_k
    return stand_in(query, key, value, *bounds, window_size=window_size, enable_gqa=True)


@pytest.fixture(params=[stand_in, stand_in_of_2_11], ids=lambda kernel: kernel.__name__)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The stand-in, for every device and dtype; what it was called with."""
    monkeypatch.setattr(varlen_attention, "varlen_attn", lambda: varlen_attention.usable(request.param))
    monkeypatch.setattr(varlen_attention, "runs_here", lambda query: True)
    monkeypatch.setattr(varlen_attention, "fits", lambda dtype, head_size: True)
    monkeypatch.setattr(attention, "WHOLE", 4)
    CALLS.clear()
    return CALLS


RESTRICTED = [name for name in CASES if name not in ("causal", "both ways", "a window beyond the sequence")]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("case", RESTRICTED)
def test_the_kernel_sees_what_the_loop_sees(case: str, groups: int, kernel: list[dict[str, Any]]) -> None:
    ours = [x.requires_grad_() for x in drawn(groups)]
    found = ops.attention(*ours, view=Visibility(**CASES[case]))
    assert len(kernel) == 1
    is_the_loop(found, ours, case)


def test_documents_are_read_once_for_all_layers(kernel: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device once a microbatch."""
    read: list[Tensor] = []
    find = varlen_attention.find_runs

    def reading(documents: Tensor) -> Any:
        read.append(documents)
        return find(documents)

    monkeypatch.setattr(varlen_attention, "find_runs", reading)
    for documents in (DOCUMENTS.clone(), DOCUMENTS.clone()):
        for _ in range(3):
            ops.attention(*drawn(4), view=Visibility(causal=True, documents=documents))
    assert len(read) == 2 and len(kernel) == 6
    ops.attention(*drawn(4), view=Visibility(causal=True, window=3))
    assert len(read) == 2 and kernel[-1] == {"window_size": (2, 0), "longest": S, "runs": B}


def test_a_document_in_two_pieces_is_left_to_blocks(kernel: list[dict[str, Any]]) -> None:
    documents = DOCUMENTS.clone()
    documents[0, -1] = 1  # as at the front
    found = ops.attention(*drawn(2), view=Visibility(causal=True, documents=documents))
    expected = brute_force(*(x.double() for x in drawn(2)), causal=True, documents=documents)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    assert not kernel


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"alibi": True}], ids=str)
def test_what_the_kernel_does_not_know_is_left_to_blocks(option: dict[str, Any], kernel: list[dict[str, Any]]) -> None:
    alibi = ops.Alibi(torch.tensor(ops.alibi_slopes(4))) if "alibi" in option else None
    ops.attention(*drawn(4), view=Visibility(causal=True, window=3), dropout=option.get("dropout", 0.0), alibi=alibi)
    assert not kernel


@pytest.mark.parametrize(
    ("dtype", "head_size", "fits"),
    [(torch.bfloat16, 128, True), (torch.float16, 256, True), (torch.float32, 64, False), (torch.float16, 20, False)],
    ids=str,
)
def test_flash_attention_is_for_sixteen_bits_and_round_heads(dtype: torch.dtype, head_size: int, fits: bool) -> None:
    assert varlen_attention.fits(dtype, head_size) == fits


def test_an_older_torch_without_windows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> None: ...

    class OnCuda:
        is_cuda = True
        device, dtype, shape = torch.device("cuda"), torch.bfloat16, (1, 1, 4, 64)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kernel, runs in ((stand_in, True), (stand_in_of_2_11, True), (older, False)):
        monkeypatch.setattr(varlen_attention, "varlen_attn", partial(varlen_attention.usable, kernel))
        assert varlen_attention.can_attend(OnCuda(), alibi=False, dropout=0.0) == runs  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("case", RESTRICTED)
def test_torchs_kernel_is_the_loop(case: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WHOLE", 4)
    ours = [x.cuda().requires_grad_() for x in drawn(groups, dtype=torch.bfloat16)]
    exact = [x.detach().cpu().double().requires_grad_() for x in ours]
    options: dict[str, Any] = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in CASES[case].items()}
    assert varlen_attention.can_attend(ours[0], alibi=False, dropout=0.0)
    assert varlen_attention.varlen_attention(ours[0], ours[1], ours[2], Visibility(**options)) is not None
    found = ops.attention(*ours, view=Visibility(**options))
    expected = brute_force(*exact, **CASES[case])
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(found.float().sum(), ours)
    wanted = torch.autograd.grad(expected.sum(), exact, allow_unused=True)
    for gradient, want in zip(gradients, wanted, strict=True):
        want = torch.zeros_like(gradient).cpu().double() if want is None else want
        torch.testing.assert_close(gradient.cpu().double(), want, rtol=3e-2, atol=0.1)
