"""Context parallelism computes what one process does: attention against the loop over positions in double precision,
training against one process, and no bit of what a position must not see."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore import ops
from megacore.config import AdamWConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megacore.errors import UserError
from megacore.layers.attention import SelfAttention
from megacore.layers.block import TransformerBlock
from megacore.layers.context import BuildContext
from megacore.layers.linear_attention import GatedDeltaNet
from megacore.layers.rotary import Rotary
from megacore.models.gpt import GPTEmbedding, GPTHead
from megacore.ops import causal_attention
from megacore.ops.visibility import Visibility
from megacore.parallel.collectives import all_gather
from megacore.parallel.context import ContextComm, SequenceShards, context_attention
from megacore.parallel.mesh import Group, build_mesh
from megacore.parallel.random import RandomStreams
from megacore.train.engine import Layer
from tests.distributed import run_distributed
from tests.kernels.test_attention import brute_force
from tests.parallel.test_engine import engine_of
from tests.parity.runs import SEQUENCE, VOCAB, make_config

# ---- which positions a rank holds


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_hold_every_position_once_and_as_many_scores(ranks: int) -> None:
    length = 24
    shards = [SequenceShards(Group(ranks=tuple(range(ranks)), rank=rank)) for rank in range(ranks)]
    held = [[position for of in each.ranges(length) for position in of] for each in shards]
    assert sorted(itertools.chain(*held)) == list(range(length))
    assert len({sum(position + 1 for position in positions) for positions in held}) == 1  # keys that they see
    numbers = torch.arange(2 * length).view(2, length)
    for each, positions in zip(shards, held, strict=True):
        assert each.take(numbers, 1).tolist() == numbers[:, positions].tolist()
        assert each.whole_length(len(positions)) == length


def test_what_layers_cannot_compute_is_refused_where_they_are_built() -> None:
    """As by the command line: nothing validates the configuration of a model of one's own."""
    shards, device = SequenceShards(Group(ranks=(0, 1, 2)), "ulysses"), torch.device("meta")
    context = BuildContext(sequence=shards, device=device, streams=RandomStreams(0, torch.device("cpu")))
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=8).resolve(seq_length=12)
    with pytest.raises(UserError, match=r"ulysses divides the 4 query heads .* 3, .*: use --cp-comm ring"):
        SelfAttention(config, context, "attention")
    with pytest.raises(UserError, match="--layer-pattern f,q: 'q' is not known: use w, f, n, l or m, with"):
        dataclasses.replace(config, layer_pattern="f,q").attention_kinds  # noqa: B018
    linear = dataclasses.replace(config, layer_pattern="l")
    block = TransformerBlock(linear, context, "blocks.0", attention=SelfAttention)
    assert isinstance(block.attention, GatedDeltaNet), "an attention of one's own takes no linear block"


# ---- attention

S, HEADS, D = 16, 4, 8
# With 2 ranks chunks have 4 positions, with 4 ranks 2. Documents: one of length 1, of prime length and longer than a
# chunk, and ends at edges of chunks; in the second sequence padding in front, over whole chunks, and at the end.
DOCUMENTS = torch.tensor(
    [[1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4, 5, 5, 5, 5], [0, 0, 7, 7, 7, 8, 0, 0, 0, 0, 0, 0, 9, 9, 9, 0]]
)
VIEWS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both ways": {"causal": False},
    "a window within a chunk": {"causal": True, "window": 2},
    "a window of several chunks": {"causal": True, "window": 7},
    "two on either side": {"causal": False, "window": 4},
    "documents": {"causal": True, "documents": DOCUMENTS},
    "documents both ways": {"causal": False, "documents": DOCUMENTS},
    "documents, window": {"causal": True, "documents": DOCUMENTS, "window": 3},
    "nothing but padding": {"causal": True, "documents": torch.zeros_like(DOCUMENTS)},
}


def seen(causal: bool, window: int | None = None, documents: Tensor | None = None) -> Tensor:
    """Who sees whom, [b, s, s], by a loop."""
    matrix = torch.zeros(2, S, S, dtype=torch.bool)
    for b, i, j in ((b, i, j) for b in range(2) for i in range(S) for j in range(S)):
        near = window is None or (i - j < window if causal else abs(i - j) <= window // 2)
        same = documents is None or bool(documents[b, i] == documents[b, j] != 0)
        matrix[b, i, j] = near and same and not (causal and j > i)
    return matrix


def drawn(groups: int, seed: int = 5) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, as the projections lay them out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, S, count, D) for count in (HEADS, groups, groups, HEADS)]
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]


def attended(
    tensors: Sequence[Tensor], shards: SequenceShards, view: Visibility, slopes: Tensor | None
) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values, for the whole sequence, on every rank."""
    *operands, d_out = (shards.take(x, 2) for x in tensors)
    for x in operands:
        x.requires_grad_()
    query, key, value = operands
    out = context_attention(query, key, value, shards, view=view, slopes=slopes)
    assert out.transpose(1, 2).is_contiguous()  # as the output projection reads it
    found = [out.detach(), *torch.autograd.grad(out, operands, d_out)]
    whole = []
    for x in found:
        pieces = torch.cat(list(all_gather(x.contiguous(), shards.group)), 2)
        whole.append(pieces[:, :, torch.tensor(shards.order(S)).argsort()])
    return whole


Key = tuple[str, int, bool, ContextComm]  # the view's name, the number of groups, whether there is ALiBi


def attend_on_ranks(
    rank: int, world_size: int, cases: Sequence[Key], dtype: torch.dtype = torch.float32
) -> dict[Key, list[list[Tensor]]]:
    """Each case, and the same where one position of each sequence is another."""
    group, results = build_mesh(make_config((1, 1, 1), "", cp=world_size).parallel).sequence, {}
    causal_attention.SMALLEST = 1  # so that these short sequences are divided as long ones are
    for name, groups, alibi, comm in cases:
        slopes = torch.tensor(ops.alibi_slopes(HEADS)) if alibi else None
        changed = drawn(groups)
        for x, other in zip(changed[:3], drawn(groups, seed=6), strict=False):
            x[:, :, PROBED] = 100.0 * other[:, :, PROBED]
        view, shards = Visibility(**VIEWS[name]), SequenceShards(group, comm)
        given = ([x.to(dtype) for x in tensors] for tensors in (drawn(groups), changed))
        results[name, groups, alibi, comm] = [attended(tensors, shards, view, slopes) for tensors in given]
    return results if rank == 0 else {}


PROBED = 5  # in the middle of a document, and the only position of one
ATTENTIONS: list[Key] = [
    (name, groups, alibi, comm)
    for comm in get_args(ContextComm)
    for name, options in VIEWS.items()
    for groups, alibi in ((2, False), (1, True))
    if comm != "ring" or options["causal"]
] + [("causal", 4, False, comm) for comm in get_args(ContextComm)]
# In `make test` each way of communication with masks that differ most; in `make test-slow` all.
FEW_ATTENTIONS: list[Key] = [
    ("causal", 2, False, "ring"),
    ("a window of several chunks", 1, True, "ring"),
    ("documents", 2, False, "ring"),
    ("documents, window", 1, True, "ring"),
    ("nothing but padding", 2, False, "ring"),
    ("both ways", 2, False, "ulysses"),
    ("documents, window", 1, True, "ulysses"),
    ("documents", 2, False, "allgather"),
    ("two on either side", 1, True, "allgather"),
    ("nothing but padding", 2, False, "allgather"),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(4, FEW_ATTENTIONS, id="few-4"),
        pytest.param(2, ATTENTIONS, id="all-2", marks=pytest.mark.slow),
        pytest.param(4, ATTENTIONS, id="all-4", marks=pytest.mark.slow),
    ],
)
def test_attention_is_the_loop_and_leaks_nothing(ranks: int, cases: Sequence[Key]) -> None:
    results = run_distributed(attend_on_ranks, ranks, cases)[0]
    for (name, groups, alibi, _), (found, changed) in results.items():
        *ours, d_out = drawn(groups)
        exact = [x.double().requires_grad_() for x in ours]
        slopes = ops.alibi_slopes(HEADS) if alibi else None
        expected = brute_force(*exact, **VIEWS[name], slopes=slopes)
        wanted = torch.autograd.grad(expected, exact, d_out.double(), allow_unused=True)
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=2e-6)
        for gradient, want, x in zip(found[1:], wanted, exact, strict=True):
            want = torch.zeros_like(x) if want is None else want
            torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-5)
        for unaffected, before, after in zip(_unaffected(VIEWS[name]), found, changed, strict=True):
            assert torch.equal(before.transpose(1, 2)[unaffected], after.transpose(1, 2)[unaffected]), name
            assert not unaffected.all() or "padding" in name


def _unaffected(view: Mapping[str, Any]) -> list[Tensor]:
    """The positions [b, s] whose result, and gradients of query, key and value, do not depend on the probed one."""
    sees = seen(**view)
    result = sees[:, :, PROBED].clone()  # whose result reads the probed key and value
    result[:, PROBED] |= sees[:, PROBED].any(1)  # and its query
    # The gradient of a key sums over the queries that see it, and each of these terms reads all that the query sees.
    keys = torch.einsum("bij,bi->bj", sees.float(), result.float()) > 0
    return [~result, ~result, ~keys, ~keys]


# ---- the engine


class TrueVocabulary(nn.Module):
    """Logits of the true vocabulary."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits[..., :VOCAB]


def train_engine(rank: int, world_size: int, cp: int, pp: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses and norms of three steps, and the weights, with a sum that is counted and with a mean."""
    parallel = {"cp": cp, "zero_stage": 1, "schedule": "zero-bubble"}
    mesh = build_mesh(ParallelConfig(pp=pp, cp=cp, device="cpu"))
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=VOCAB, hidden_dropout=0.0)
    model = dataclasses.replace(model, attention_dropout=0.0, position_embedding_type="rope")
    resolved, streams = model.resolve(seq_length=SEQUENCE), RandomStreams(1, mesh.device)
    shards = SequenceShards(mesh.sequence, "ring")
    context = BuildContext(layer_group=mesh.layer, sequence=shards, device=mesh.device, streams=streams)
    rotary = Rotary.of(resolved, shards)
    layers = [
        Layer("embedding", GPTEmbedding, resolved, context),
        *(Layer(f"block{i}", TransformerBlock, resolved, context, f"block{i}", rotary=rotary) for i in range(2)),
        Layer("head", GPTHead, resolved, context),
        Layer("logits", TrueVocabulary),
    ]
    usual: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "train_iters": 3, "count": counted}
    usual |= {
        "optimizer": OptimizerConfig(lr=1e-3, lr_warmup_iters=0),
        "optimizer_settings": AdamWConfig(adam_eps=1e-4),
    }
    results = []
    for reduction in ("sum", "mean"):
        loss = partial(cross_entropy, reduction=reduction)
        engine = engine_of(layers, pp, parallel=parallel, loss=loss, reduction=reduction, **usual)
        numbers = []
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            tokens, targets = torch.randint(0, VOCAB, (2, 4, SEQUENCE), generator=draw)
            targets[0, 3:] = -100
            targets[2:, : SEQUENCE // 4] = targets[2:, -(SEQUENCE // 4) :] = -100  # all that one of 2 ranks holds
            numbers += [float(engine.train_batch(engine.split(tokens, targets))), float(engine.grad_norm)]
        results.append((numbers, engine.state_dict()))
    return results if rank == 0 else []


def counted(targets: Tensor) -> Tensor:
    return (targets >= 0).sum()


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def test_the_engine_trains_layers_of_megacore_as_one_process_does() -> None:
    (expected, found) = (run_distributed(train_engine, cp * pp, cp, pp)[0] for cp, pp in ((1, 1), (2, 2)))
    for (numbers, weights), (ours, values) in zip(expected, found, strict=True):
        assert ours == pytest.approx(numbers, rel=1e-5) and ours[:2] == pytest.approx(numbers[:2], rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=2e-6)
