"""Attention in blocks against the loop over positions, against whole masks, and against itself on parts."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.ops import block_attention
from megacore.ops.block_attention import Scene
from megacore.ops.visibility import Visibility
from tests.kernels.loop import CASES, B, D, S, drawn, gradients_are, is_the_loop, outer, with_all_weights

WAYS = ["fused", "tiles"]
attention = import_module("megacore.ops.attention")  # the package exports the function of this name


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a block is computed: by torch's fused operator, or as on devices that have none."""
    if request.param == "tiles":
        monkeypatch.setattr(block_attention, "_uses_fused", lambda query, scene: False)
    return str(request.param)


def real_positions(documents: Tensor | None) -> Tensor:
    """1 where there is no padding: [b, 1, s, 1]."""
    return torch.ones(B, 1, S, 1) if documents is None else (documents != 0).view(B, 1, S, 1).float()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("groups", "alibi"), [(2, True), (1, False)])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_the_loop(case: str, groups: int, alibi: bool) -> None:
    ours = [x.requires_grad_() for x in drawn(groups)]
    slopes = torch.tensor(ops.alibi_slopes(4)) if alibi else None
    found, _ = block_attention.block_attention(*ours, view=Visibility(**CASES[case]), slopes=slopes, block=3)
    assert found.transpose(1, 2).stride() == torch.empty(B, S, 4, D).stride()
    is_the_loop(found * real_positions(CASES[case].get("documents")), ours, case, alibi=alibi)


@pytest.mark.parametrize("case", ["causal", "documents both ways, window", "three on either side"])
@pytest.mark.parametrize("groups", [4, 2])
def test_dropout_is_the_masks_of_the_tiles(groups: int, case: str) -> None:
    """Of the weights after the softmax; the same masks forward and backward, and again with the same seed."""
    ours = [x.requires_grad_() for x in drawn(groups)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    view, block, p = Visibility(**CASES[case]), 4, 0.3
    torch.manual_seed(7)
    found, _ = block_attention.block_attention(*ours, view=view, dropout=p, block=block)
    torch.manual_seed(7)
    again, _ = block_attention.block_attention(*ours, view=view, dropout=p, block=block)
    assert torch.equal(found, again)
    torch.manual_seed(7)
    scene = Scene(view=view, dropout=p, seeds=torch.randint(2**63 - 1, (3, 3)), block=block)
    left = torch.zeros(B, 4, S, S)
    for queries in block_attention.blocks(range(S), block):
        for keys in block_attention.blocks(view.keys(queries, S), block):
            part = left[:, :, queries.start : queries.stop, keys.start : keys.stop]
            kept = scene.kept(queries, keys, part)
            assert kept is not None
            part.copy_(kept)
    assert 0.1 < (left == 0).float().mean() < 0.9
    seen = view.mask(range(S), range(S), torch.device("cpu"))
    assert seen is not None
    expected = with_all_weights(*exact, seen=seen, left=left.double())[0]
    real = real_positions(view.documents)
    torch.testing.assert_close(found.double() * real, expected * real, rtol=1e-5, atol=2e-6)
    gradients_are(found * real, ours, torch.autograd.grad((expected * real * outer(expected)).sum(), exact))


def test_dropout_drops_as_often_as_it_says_and_elsewhere_in_every_tile() -> None:
    scene = Scene(view=Visibility(causal=False), dropout=0.25, seeds=torch.randint(2**63 - 1, (2, 2)), block=256)
    places = [(range(i, i + 256), range(j, j + 256)) for i in (0, 256) for j in (0, 256)]
    tiles = [scene.kept(*place, torch.empty(1, 2, 256, 256)) for place in places]
    for number, tile in enumerate(tiles):
        assert tile is not None
        # Of 131,072 draws the share strays by 0.0012.
        assert float((tile == 0).float().mean()) == pytest.approx(0.25, abs=0.006)
        assert set(tile.unique().tolist()) == {0.0, float(torch.tensor(1.0 / 0.75))}
        assert not any(torch.equal(tile, other) for other in tiles[:number] if other is not None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case]["causal"] and "padding" not in case])
def test_queries_see_what_there_is_of_earlier_keys(case: str) -> None:
    """What a rank of a ring computes; where a query sees none of the keys, nothing."""
    query, key, value = drawn(2)
    options, keys, first = dict(CASES[case]), slice(1, 5), 6
    documents = options.pop("documents", None)
    view = Visibility(**options, documents=None if documents is None else documents[:, keys.start :])
    part = query[:, :, first:], key[:, :, keys], value[:, :, keys]
    offset = first - keys.start
    found, sums = block_attention.attend(*part, view=view, offset=offset)
    seen = Visibility(**options, documents=documents).mask(range(first, S), range(1, 5), torch.device("cpu"))
    seen = torch.ones(1, 1, S - first, 4, dtype=torch.bool) if seen is None else seen
    exact = [part[0].double(), *(x.double().repeat_interleave(2, 1) for x in part[1:])]
    scores = exact[0] @ exact[1].transpose(-1, -2) / math.sqrt(D)
    total = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    expected = (scores.exp() * seen / total.exp().clamp_min(1e-300)[..., None]) @ exact[2]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)
    nothing = total.isneginf()
    torch.testing.assert_close(sums.double()[~nothing], total[~nothing], rtol=1e-5, atol=2e-6)
    assert (sums[nothing] == block_attention.NOTHING).all() and (documents is None or nothing.any())
    d_out = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    more = torch.logaddexp(sums, torch.zeros_like(sums))  # of keys elsewhere
    gradients = block_attention.attend_backward(d_out, found, more, part, view=view, offset=offset)
    for gradient, x in zip(gradients, part, strict=True):
        assert torch.isfinite(gradient).all() and gradient.shape == x.shape
    assert not gradients[0].transpose(1, 2)[nothing.transpose(1, 2)].any()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("case", ["documents", "last four", "documents both ways, window"])
def test_what_is_not_seen_changes_no_bit(case: str) -> None:
    view, middle = Visibility(**CASES[case]), 5
    seen = view.mask(range(S), range(S), torch.device("cpu"))
    assert seen is not None
    before, after = drawn(2), drawn(2)
    for sequence in range(B):
        hidden = ~seen.expand(B, 1, S, S)[sequence, 0, middle]
        for x in after[1:]:
            x[sequence].transpose(0, 1)[hidden] = 1e4
    found = (block_attention.block_attention(*tensors, view=view, block=4)[0] for tensors in (before, after))
    assert torch.equal(*(result[:, :, middle] for result in found))


LENGTH = 600
LONG: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 300},
    "documents": {"causal": True, "documents": torch.arange(LENGTH).expand(1, -1) // 170 + 1},
    "padding, both ways": {"causal": False, "documents": (torch.arange(LENGTH) < 500).long().expand(1, -1)},
    "alibi": {"causal": True, "alibi": True},
    "alibi, both ways": {"causal": False, "alibi": True},
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("case", "dtype"), [(case, (torch.float32, torch.bfloat16)[turn % 2]) for turn, case in enumerate(LONG)], ids=str
)
def test_long_sequences_lose_nothing_against_whole_masks(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 positions, of which blocks are 512: the error against fp64 is that of whole masks, outputs and gradients."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(1, heads, LENGTH, 16, generator=generator).to(dtype) for heads in (4, 2, 2)]
    d_out = torch.randn(1, 4, LENGTH, 16, generator=generator).to(dtype)
    options = dict(LONG[case])
    slopes = torch.tensor(ops.alibi_slopes(4)) if options.pop("alibi", False) else None
    view = Visibility(**options)

    def results(whole: int) -> list[Tensor]:
        monkeypatch.setattr(attention, "WHOLE", whole)
        leaves = [x.detach().requires_grad_() for x in drawn]
        out = ops.attention(*leaves, view=view, alibi=None if slopes is None else ops.Alibi(slopes))
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    exact = [x.double().requires_grad_() for x in drawn]
    seen = view.mask(range(LENGTH), range(LENGTH), torch.device("cpu"))
    expected = with_all_weights(*exact, seen=seen, slopes=slopes)[0]
    if view.documents is not None:
        expected = expected * (view.documents != 0).view(1, 1, -1, 1)
    wanted = [expected.detach(), *torch.autograd.grad(expected, exact, d_out.double())]
    for blocks, whole, want in zip(results(LENGTH - 1), results(LENGTH), wanted, strict=True):
        errors = [float((x.double() - want).abs().max() / want.abs().max()) for x in (blocks, whole)]
        assert errors[0] <= max(1.5 * errors[1], 1e-6), errors


def test_short_sequences_are_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What up to 1024 positions give does not depend on blocks."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(attention, "block_attention", refuse)
    query, key, value = torch.randn(3, 1, 2, 1025, 8)
    short = [x[:, :, :1024] for x in (query, key, value)]
    view = Visibility(causal=True, window=5)
    ops.attention(*short, view=view, dropout=0.1)
    ops.attention(query, key, value, view=Visibility(causal=True, window=1025))  # hides nothing
    ops.attention(query, key, value, view=view, implementation="fused-softmax")
    with pytest.raises(AssertionError):
        ops.attention(query, key, value, view=view)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        for x in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("case", ["window", "documents", "alibi"])
def test_on_the_cpu_no_tensor_is_larger_than_a_block_of_queries_times_the_sequence(case: str) -> None:
    s, n, d = 4608, 2, 8
    query, key, value, d_out = torch.randn(4, 1, n, s, d)
    documents = torch.arange(s).expand(1, -1) // 750 + 1 if case == "documents" else None
    view = Visibility(causal=True, window=500 if case == "window" else None, documents=documents)
    slopes = torch.tensor(ops.alibi_slopes(n)) if case == "alibi" else None
    scene = Scene(view=view, slopes=slopes)
    with Largest() as largest:
        result = block_attention._attend(query, key, value, scene, 0)
        block_attention._attend_backward(d_out, (query, key, value), result, scene, 0)
    bound = {"window": 8 * 512 * 1012, "documents": 8 * 512 * (750 + 512), "alibi": 8 * n * 128 * s}[case]
    assert largest.bytes <= bound < 4 * n * s * s // 16


@pytest.mark.parametrize("case", [pytest.param("documents, window", marks=pytest.mark.slow), "causal"])
def test_the_operator_keeps_torchs_rules(case: str) -> None:
    """Fake tensors, gradients, no aliases: what torch.compile relies on."""
    view = Visibility(**CASES[case])
    slopes = torch.tensor(ops.alibi_slopes(4))
    tensors = [x.requires_grad_() for x in drawn(2)]
    rest = (view.documents, slopes, slopes, None, view.causal, view.window, None, 0.0, 4, 0, False)
    torch.library.opcheck(torch.ops.megacore.block_attention.default, (*tensors, *rest))
