"""Attention against a loop in double precision over who sees whom, in both implementations, forward and backward."""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend

from megacore import ops
from megacore.ops import Attention, varlen_attention
from megacore.ops.attention import AttentionShape, attention_backend, slower_attention, visible
from megacore.ops.block_attention import block_attention
from megacore.ops.visibility import Visibility
from megacore.parallel.loss import ChunkedLoss, Scored
from megacore.parallel.mesh import ALONE
from megacore.parallel.products import TORCH
from tests.kernels.loop import CASES, DOCUMENTS, B, D, S, brute_force, drawn, is_the_loop, outer, with_all_weights


@pytest.mark.parametrize("implementation", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize(("groups", "alibi"), [(4, False), (2, True), (1, False)])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_loop(case: str, groups: int, alibi: bool, implementation: Attention) -> None:
    ours = [x.requires_grad_() for x in drawn(groups)]
    bias = ops.Alibi(torch.tensor(ops.alibi_slopes(4))) if alibi else None
    found = ops.attention(*ours, view=Visibility(**CASES[case]), alibi=bias, implementation=implementation)
    is_the_loop(found, ours, case, alibi=alibi)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("case", ["causal", "three on either side", "documents both ways"])
def test_products_beyond_the_range_of_fp16_overflow_nowhere(case: str, alibi: bool) -> None:
    """q k^T of equal rows is 80,000, and fp16 ends at 65,504; q k^T / sqrt(d) is well within."""
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(3)])  # of orthogonal rows
    rows = 100.0 * signs[torch.arange(S) % 3]
    half = [rows.half().expand(B, 4, S, D), rows.half().expand(B, 2, S, D), drawn(2)[2].half()]
    ours = [x.clone().requires_grad_() for x in half]
    exact = [x.double().requires_grad_() for x in half]
    slopes = ops.alibi_slopes(4) if alibi else None
    bias = None if slopes is None else ops.Alibi(torch.tensor(slopes))
    found = ops.attention(*ours, view=Visibility(**CASES[case]), alibi=bias, implementation="fused-softmax")
    expected = brute_force(*exact, **CASES[case], slopes=slopes)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(6)).half()
    gradients = torch.autograd.grad((found * weights).sum(), ours)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for gradient, want in zip(gradients, wanted, strict=True):
        # Queries' and keys' are sums of 100 / sqrt(8) times numbers of about 1 that have 11 bits, and may cancel.
        torch.testing.assert_close(gradient.double(), want, rtol=5e-3, atol=5e-3 * 100.0 / math.sqrt(D))


def test_scaling_the_query_first_costs_no_bit_of_fp32() -> None:
    generator, head_size = torch.Generator().manual_seed(5), 20
    query, key, value = torch.randn(3, B, 4, S, head_size, generator=generator)
    scores = query @ key.transpose(-1, -2)
    expected = ops.fused_softmax(scores, scale=1.0 / math.sqrt(head_size), causal=True) @ value
    found = ops.attention(query, key, value, view=Visibility(causal=True), implementation="fused-softmax")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("groups", [4, 2])
def test_dropout_in_fp32_is_torchs_to_the_bit(groups: int) -> None:
    """F.dropout of the weights before the product, with the same draws: outputs and gradients."""
    query, key, value = ours = [x.detach().requires_grad_() for x in drawn(groups)]
    torch.manual_seed(7)
    found = ops.attention(query, key, value, view=Visibility(causal=True), dropout=0.3, implementation="fused-softmax")
    repeated = [x.repeat_interleave(4 // groups, 1) if groups < 4 else x for x in (key, value)]
    scores = query @ repeated[0].transpose(-1, -2)
    torch.manual_seed(7)
    dropped = F.dropout(ops.fused_softmax(scores, scale=1.0 / math.sqrt(D), causal=True), 0.3)
    expected = dropped @ repeated[1]
    assert torch.equal(found, expected)
    outer = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    gradients = [torch.autograd.grad(mixed, ours, outer, retain_graph=True) for mixed in (found, expected)]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_leaves_the_mean_as_it_is(dtype: torch.dtype, implementation: Attention) -> None:
    """Over n = 2^22 weights of equal size the mean of the result strays by sqrt(p / (1 - p) / n) = 1.6e-4 of itself,
    and is held to five times that. A factor of 1 / 0.9 in bf16 makes it 1.6e-3 too small."""
    generator, p = torch.Generator().manual_seed(5), 0.1
    value = (1.0 + torch.rand(16, 64, 64, 4, generator=generator)).to(dtype).requires_grad_()
    query = torch.zeros_like(value)
    outer = (1.0 + torch.rand(16, 64, 64, 4, generator=generator)).to(dtype)
    torch.manual_seed(7)
    found = ops.attention(query, query, value, view=Visibility(causal=False), dropout=p, implementation=implementation)
    (gradient,) = torch.autograd.grad(found, value, outer)
    strays = 5.0 * math.sqrt(p / (1.0 - p) / 2**22)
    assert float(found.detach().double().mean() / value.detach().double().mean()) == pytest.approx(1.0, abs=strays)
    assert float(gradient.double().mean() / outer.double().mean()) == pytest.approx(1.0, abs=strays)


@pytest.mark.parametrize("implementation", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_leaks_from_padding_or_other_documents(
    dtype: torch.dtype, causal: bool, implementation: Attention
) -> None:
    """Bit for bit, outputs and gradients, whatever padding and neighbours hold; and padding itself gives zeros."""
    before, after = drawn(2, dtype=dtype), drawn(2, dtype=dtype)
    others = torch.tensor([[False] * 3 + [True] * 8, [True] + [False] * 3 + [True] * 7])
    for x in after:
        x.transpose(1, 2)[others] = 1e4
    results = []
    for tensors in (before, after):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = ops.attention(*leaves, view=Visibility(causal=causal, documents=DOCUMENTS), implementation=implementation)
        assert torch.all(out.transpose(1, 2)[DOCUMENTS == 0] == 0)
        kept = out.transpose(1, 2)[~others]
        gradients = torch.autograd.grad(kept.float().square().sum(), leaves)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        results.append([kept, *(gradient.transpose(1, 2)[~others] for gradient in gradients)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_slopes_are_the_published_ones() -> None:
    """Press et al. 2022, section 3: 1/2, 1/4, ... 1/256 for 8 heads; 16 interleave; 12 take every second of those."""
    eight = [2.0**-i for i in range(1, 9)]
    assert ops.alibi_slopes(8) == eight
    assert ops.alibi_slopes(16) == pytest.approx([2.0 ** (-i / 2) for i in range(1, 17)])
    assert ops.alibi_slopes(12) == pytest.approx(eight + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)])
    assert ops.alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("first", ["fake", "inference", "meta", "none"])
@pytest.mark.parametrize("way", ["window", "alibi"])
def test_masks_do_not_depend_on_who_asked_first(way: str, first: str) -> None:
    """A dry run, an evaluation or a model elsewhere leaves nothing behind that a training step would stumble over."""
    alibi = ops.Alibi(torch.tensor(ops.alibi_slopes(4))) if way == "alibi" else None
    view = Visibility(causal=True, window=None if alibi else 3)
    for implementation in get_args(Attention):
        before: dict[str, AbstractContextManager[Any]] = {
            "fake": FakeTensorMode(allow_non_fake_inputs=True),
            "inference": torch.inference_mode(),
            "meta": torch.device("meta"),
            "none": nullcontext(),
        }
        with before[first]:
            sized = [torch.empty(B, 4, S, D) for _ in range(3)]
            ops.attention(*sized, view=view, alibi=alibi, implementation=implementation)
        ours = [x.requires_grad_() for x in drawn(4)]
        found = ops.attention(*ours, view=view, alibi=alibi, implementation=implementation)
        slopes = None if alibi is None else ops.alibi_slopes(4)
        expected = brute_force(*(x.double() for x in ours), causal=True, window=view.window, slopes=slopes)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
        found.sum().backward()
        with FakeTensorMode(allow_non_fake_inputs=True):  # and a dry run after it
            sized = [torch.empty(B, 4, S, D) for _ in range(3)]
            assert ops.attention(*sized, view=view, alibi=alibi, implementation=implementation).shape == (B, 4, S, D)


def test_one_mask_outlives_its_forward_pass() -> None:
    """Lengths that are gone do not keep their s x s numbers."""
    earlier: list[weakref.ref[Tensor]] = []
    for length in (5, 7, 9):
        masks = [visible(Visibility(causal=True, window=3), length, torch.device("cpu")) for _ in range(2)]
        assert masks[0] is masks[1] and masks[0] is not None
        assert all(mask() is None for mask in earlier)
        earlier.append(weakref.ref(masks[0]))


# ---- soft caps of scores and of logits, against the formula over all of them in fp64 ---------------------------------

CAP = 0.7


def within(found: Tensor, expected: Tensor, also: float = 0.0) -> None:
    """fp32 rounding, relative to the largest entry; `also` is an absolute error allowed besides."""
    assert (found.double() - expected).abs().max() <= 5e-6 * expected.abs().max() + also


@pytest.mark.parametrize("way", ["sdpa", "fused-softmax", "tiles of 3"])
@pytest.mark.parametrize("extra", ["cap", "sinks", "cap, sinks"])
@pytest.mark.parametrize(("case", "alibi"), [(case, number % 2 == 0) for number, case in enumerate(CASES)])
def test_capped_scores_and_sinks_are_the_formula(case: str, alibi: bool, extra: str, way: str) -> None:
    options = CASES[case]
    ours = [(x * (4 if "cap" in extra else 1)).detach().requires_grad_() for x in drawn(2)]  # scores far above the cap
    ours += [torch.tensor([-3.0, 0.5, 9.0, 1.5], requires_grad=True)] * ("sinks" in extra)
    exact = [x.detach().double().requires_grad_() for x in ours]
    sinks, cap = ours[3] if "sinks" in extra else None, CAP if "cap" in extra else None
    more: dict[str, Any] = {"sinks": sinks, "soft_cap": cap}
    slopes = torch.tensor(ops.alibi_slopes(4)) if alibi else None
    if way == "tiles of 3":
        found, _ = block_attention(*ours[:3], view=Visibility(**options), slopes=slopes, **more, block=3)
    else:
        bias = None if slopes is None else ops.Alibi(slopes)
        found = ops.attention(*ours[:3], view=Visibility(**options), alibi=bias, **more, implementation=way)  # type: ignore[arg-type]
    documents = options.get("documents")
    real = torch.ones(B, 1, S, 1) if documents is None else (documents != 0).view(B, 1, S, 1)
    seen = Visibility(**options).mask(range(S), range(S), torch.device("cpu"))
    wide = exact[3] if "sinks" in extra else None
    expected = with_all_weights(*exact[:3], seen=seen, slopes=slopes, cap=cap, sinks=wide)[0] * real
    within(found * real, expected)
    weights = outer(found) * real
    gradients = torch.autograd.grad((found * weights).sum(), ours)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    # A query that sees one key: the gradient of its score is a difference of equal numbers, 0 or their rounding.
    rounding = torch.finfo(torch.float32).eps * max(float(want.abs().max()) for want in wanted)
    for gradient, want in zip(gradients, wanted, strict=True):
        within(gradient, want, also=rounding)


@pytest.mark.parametrize("chunks", [1, 3])
def test_capped_logits_are_the_formula(chunks: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 7, 16), (136, 16)))
    targets = torch.randint(0, 131, (2, 7), generator=generator)
    scale = torch.rand(2, 7, generator=generator)
    layer = ChunkedLoss(
        vocab_size=131, chunks=chunks, group=ALONE, sequence_parallel=False, products=TORCH, soft_cap=CAP
    )
    scored = Scored(targets, scale, torch.ones(()))
    found = layer.summed(x, weight, None, scored, ops.CrossEntropyOptions(z_loss=1e-2))
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    logits = CAP * torch.tanh((wide[0] @ wide[1].T)[..., :131] / CAP)
    log_z = logits.logsumexp(-1)
    losses = log_z - logits.gather(-1, targets[..., None])[..., 0] + 1e-2 * log_z.square()
    expected = (losses * scale).sum()
    within(found, expected)
    gradients = torch.autograd.grad(found, (x, weight))
    wanted = torch.autograd.grad(expected, wide)
    for gradient, want in zip(gradients, wanted, strict=True):
        within(gradient, want)


# ---- which kernel computes attention on a CPU ------------------------------------------------------------------------

attention = import_module("megacore.ops.attention")  # the package exports the function of this name
PLAIN: dict[str, Any] = {"heads": 4, "groups": 2, "head_size": 64, "seq_length": 128, "dtype": torch.bfloat16}


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "flash"), ({"dropout": 0.1}, "math"), ({"masked": True}, "flash"), ({"seq_length": 2048}, "flash"),
     ({"seq_length": 2048, "masked": True}, "blocks"), ({"seq_length": 2048, "dropout": 0.1}, "blocks")],
    ids=str,
)  # fmt: skip
def test_on_the_cpu_torch_is_asked(changes: dict[str, Any], expected: str) -> None:
    assert attention_backend(torch.device("cpu"), AttentionShape(**PLAIN | changes)) == expected


@pytest.mark.parametrize(
    ("capability", "chosen", "changes", "expected"),
    [
        ((9, 0), SDPBackend.CUDNN_ATTENTION, {}, None),
        ((9, 0), SDPBackend.FLASH_ATTENTION, {}, "flash kernel on this device, where cudnn"),
        ((8, 0), SDPBackend.MATH, {}, "math kernel on this device, where flash"),
        ((9, 0), SDPBackend.MATH, {"dtype": torch.float32}, None),
        ((9, 0), SDPBackend.EFFICIENT_ATTENTION, {"masked": True}, None),
        ((9, 0), SDPBackend.MATH, {"masked": True}, "torch.backends.cuda.mem_efficient_sdp_enabled()"),
    ],
    ids=str,
)
def test_a_slower_kernel_than_the_device_has_is_warned_of(
    capability: tuple[int, int], chosen: SDPBackend, changes: dict[str, Any], expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    empty = torch.empty
    asked: list[tuple[Tensor, ...]] = []

    def choice(*operands: Any, **_: Any) -> int:
        asked.append(operands)
        return int(chosen.value)

    monkeypatch.setattr(attention.torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(attention.torch, "zeros", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
    monkeypatch.setattr(attention.torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(attention, "on_cuda", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    warning = slower_attention(CUDA, AttentionShape(**PLAIN | changes))
    assert len(asked) == 1 and asked[0][0].shape == (1, 4, 128, 64)
    if expected is None:
        assert warning is None
    else:
        assert warning is not None and expected in warning
        assert "4 heads of 64 over 2 of keys, 128 positions" in warning


# ---- documents -------------------------------------------------------------------------------------------------------

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
