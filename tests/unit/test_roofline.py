"""What the recorder of a step counts, against formulas and numbers by hand; times are golden (`tools:operators`).
Which transfers go between nodes, by listing every group of every role."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import operators
from megacore import ops
from megacore.config import ResolvedConfig
from megacore.config.dimensions import DIMENSIONS
from megacore.models.flops import flops_per_sequence
from megacore.models.outline import outline
from megacore.ops.visibility import Visibility
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.mesh import groups_of_experts, groups_of_role
from megacore.plan.devices import Device, Link, Range
from megacore.plan.roofline import (
    Crossing,
    Launch,
    Pattern,
    StepEvents,
    Transfer,
    crossing,
    groups_between_nodes,
    transfer_seconds,
)
from megacore.plan.traffic import Sent, rank_traffic, stage_message, tied_gradients
from megacore.tracer import operator_costs, step_trace
from megacore.tracer.step_trace import Recorder, record_step
from tests.parity.runs import make_config
from tools.plan import main

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "num_query_groups": 2,
    "vocab_size": 128,
    "precision": "bf16",
}


def config_of(tp: int, dp: int, **changes: Any) -> ResolvedConfig:
    return make_config((tp, 1, dp), "unused", **{"num_layers": 2, **changes})


@cache
def recorded(tp: int, dp: int, changes: tuple[tuple[str, Any], ...]) -> tuple[ResolvedConfig, StepEvents]:
    config = config_of(tp, dp, **dict(changes))
    return config, record_step(config)


def step_of(tp: int = 1, dp: int = 1, **changes: Any) -> tuple[ResolvedConfig, StepEvents]:
    """Equal steps are recorded once."""
    return recorded(tp, dp, tuple(sorted(changes.items())))


@pytest.mark.parametrize(("tp", "changes"), [(1, {"vocab_size": 128}), (2, LLAMA)], ids=["gpt2", "llama"])
def test_flops_of_the_operators_are_those_of_the_formula(tp: int, changes: dict[str, Any]) -> None:
    config, events = step_of(tp, **changes)
    sequences = config.training.micro_batch_size
    expected = sequences * flops_per_sequence(config.model, config.data.seq_length) / tp
    assert sum(event.flops for event in events.one if isinstance(event, Launch)) == expected
    assert sum(event.flops for event in events.two if isinstance(event, Launch)) == 2 * expected


MIXTURE: dict[str, Any] = {
    **LLAMA, "num_experts": 8, "moe_ffn_hidden_size": 64, "moe_shared_expert_size": 32, "moe_first_dense_layers": 1,
}  # fmt: skip


def test_experts_multiply_and_send_the_rows_of_the_tokens_that_use_them() -> None:
    """dp 2, ep 2: a rank sends half of its rows, tokens x k x h in bf16, four times per block. The router's product is
    in fp32."""
    config, events = step_of(1, 2, ep=2, **MIXTURE)
    sequences, length = config.training.micro_batch_size, config.data.seq_length
    flops = sum(event.flops for event in events.one if isinstance(event, Launch))
    assert flops == sequences * flops_per_sequence(config.model, length)
    rows = [t for t in events.one if isinstance(t, Transfer) and t.pattern == "all-to-all" and t.bytes > 1024]
    assert [t.bytes for t in rows] == 4 * [2.0 * sequences * length * 2 * config.model.hidden_size]
    assert {(t.role, t.ranks) for t in rows} == {("replicas", 2)}  # the ranks of both are the same


def test_elementwise_operators_move_each_byte_once() -> None:
    """bf16; [b, s, h] is n numbers, its rows have an fp32 statistic, and the MLP is f wide."""
    config, events = step_of(**LLAMA)
    rows = config.training.micro_batch_size * config.data.seq_length
    n, f, h = rows * config.model.hidden_size, rows * config.model.inner_size, config.model.hidden_size
    first: dict[str, float] = {}
    for event in events.one:
        if isinstance(event, Launch):
            first.setdefault(event.name, event.bytes)
    assert first["norm_forward"] == 2 * (n + n + h) + 4 * rows
    assert first["swiglu_forward"] == 2 * 3 * f
    assert first["swiglu_backward"] == 2 * 5 * f
    assert first["cross_entropy_gradient_"] >= 2 * 2 * rows * config.model.vocab_size  # read, and written in its place


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_operators_of_a_step_do_not_grow_with_the_replicas(
    zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views included, since the program makes each of them: stage 0 made one for each replica and gradient."""
    calls = 0

    class Counting(Recorder):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            out = super().__torch_dispatch__(func, types, args, kwargs)
            calls += len(out) if isinstance(out, (list, tuple)) else 1
            return out

    monkeypatch.setattr(step_trace, "Recorder", Counting)
    counts = []
    for dp in (8, 128):
        calls = 0
        given = {"num_layers": 1, "zero_stage": zero_stage, "micro_batch_size": 1, "global_batch_size": dp}
        record_step(config_of(1, dp, **given))
        counts.append(calls)
    assert counts[1] <= counts[0] + 32, counts  # what is left over by a division is an operator more


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 20])
def test_visible_pairs_are_those_of_the_mask(causal: bool, window: int | None) -> None:
    view, length = Visibility(causal=causal, window=window), 9
    for start, stop in itertools.combinations(range(length + 1), 2):
        mask = view.mask(range(start, stop), range(length), torch.device("cpu"))
        seen = (stop - start) * length if mask is None else int(mask.sum())
        assert view.pairs(range(start, stop), length) == seen


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [({"window_size": 512}, 2048 * 512 - 512 * 511 / 2), ({"position_embedding_type": "alibi"}, 2048 * 2049 / 2)],
    ids=["window", "alibi"],
)
def test_attention_computes_the_pairs_that_are_seen(changes: dict[str, Any], pairs: float) -> None:
    """Forward two products of head size by pair, backward five; FLOPs by convention do not know causality."""
    config, events = step_of(num_layers=1, seq_length=2048, vocab_size=128, **changes)
    work = {e.name: e.work for e in events.one if isinstance(e, Launch) and e.kind == "attention"}
    forward = 4.0 * config.training.micro_batch_size * config.model.hidden_size * pairs
    assert work == {"attention": forward, "attention_backward": 2.5 * forward}
    expected = config.training.micro_batch_size * flops_per_sequence(config.model, 2048)
    assert sum(event.flops for event in events.one if isinstance(event, Launch)) == expected


@torch.library.custom_op("tests::paged_attention", mutates_args=())
def paged_attention(query: torch.Tensor) -> torch.Tensor:
    return query.clone()


def test_an_operator_of_unknown_cost_is_an_error() -> None:
    image, weight = torch.zeros(1, 1, 8), torch.zeros(1, 1, 3)
    for name, run in (
        ("aten::convolution", lambda: torch.nn.functional.conv1d(image, weight)),
        ("tests::paged_attention", lambda: paged_attention(image)),
    ):
        with pytest.raises(NotImplementedError, match=f"cost of the operator {name} is not known"), Recorder():
            run()


def test_every_operator_of_megacore_has_a_cost() -> None:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("megacore::")}
    known = set(operator_costs.COSTS) | {f"megacore::{name}" for name in operator_costs.MEMORY_ONLY}
    assert names and names == {name for name in known if name.startswith("megacore::")}


def test_bytes_of_operators() -> None:
    """A repeated element lies in memory once, a copy's target is not read, and picked rows are read alone."""
    a, b = torch.zeros(64), torch.zeros(64)
    with Recorder() as recorder:
        a.add_(b)
        a.copy_(b)
        a + b[:1].expand(64)
        torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(1000, 8))
        b.view(8, 8).t()
    moved = {event.name: event.bytes for event in recorder.taken() if isinstance(event, Launch)}
    assert moved["add_"] == 3 * 256 and moved["copy_"] == 2 * 256
    assert moved["add"] == 2 * 256 + 4
    assert moved["embedding"] == 3 * 8 + 2 * 3 * 8 * 4
    assert not {"view", "t", "expand"} & moved.keys()


def test_collectives_are_recorded_with_their_group() -> None:
    """tp 2 x dp 2, sequence parallel, ZeRO 1: bytes of what is gathered and reduced."""
    config, events = step_of(2, 2, sequence_parallel=True, zero_stage=1, **LLAMA)
    sent = [event for event in events.one if isinstance(event, Transfer)]
    samples = config.training.micro_batch_size
    sample = 2 * config.data.seq_length * config.model.hidden_size
    layer = [t for t in sent if t.role == "layer" and t.bytes == sample]
    # Of two blocks and the embedding, one each sample; the head gathers too. Backward gathers inputs and gradients.
    for pattern in ("reduce-scatter", "all-gather"):
        forward = [t for t in sent if t.role == "layer" and t.pattern == pattern and t.phase == "forward"]
        assert len([t for t in forward if t in layer]) == 5 * samples
        assert sum(t.bytes for t in forward if t in layer) == 5 * samples * sample
    replicas = [t for t in sent if t.role == "replicas" and t.bytes > 64]
    assert {t.pattern for t in replicas} == {"reduce-scatter", "all-gather"}
    assert all((t.ranks, t.stride) == (2, 2) for t in replicas)
    reduced, gathered_back = (
        sum(t.bytes for t in replicas if t.pattern == p) for p in ("reduce-scatter", "all-gather")
    )
    assert reduced == 2 * gathered_back  # gradients in fp32, weights in bf16
    waited = {number for event in (*events.one, *events.two) if isinstance(event, Launch) for number in event.waits}
    assert {t.number for t in layer} <= waited
    # The product of a sample does not wait for the sum of the one before it, which lies in the same tensor.
    sums = {t.number for t in layer if t.pattern == "reduce-scatter" and t.phase == "forward"}
    products = [e for e in events.one if isinstance(e, Launch) and e.kind == "product" and e.phase == "forward"]
    assert products and not any(sums.intersection(product.waits) for product in products)


# ---- devices and the tool


TINY = ["pretrain_gpt.py", "--operators", "--cluster", "h200", "--preset", "gpt2-tiny"]


def test_the_tool_prints_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--dp", "8", "--zero-stage", "2", "--global-batch-size", "8", "--hidden-size", "512"]
    assert main([*TINY, *layout, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimate"] is True and found["device"] == "h200"
    seconds, flops = found["step_seconds"], sum(row["flops"] for row in found["operators"])
    assert seconds["fast"] < seconds["expected"] < seconds["slow"]
    assert found["mfu_full_attention"]["expected"] == pytest.approx(flops / seconds["expected"] / 989.4e12, rel=1e-6)
    assert found["mfu_causal_attention"]["expected"] < found["mfu_full_attention"]["expected"]
    # By hand: 30 of AdamW, 1/8 of the check of a 16th of the bf16 weights, a byte for 32 elements that says whether
    # they decay, and 4 of the norm.
    assert found["update_bytes_per_parameter"] == pytest.approx(34.16, abs=0.1)


@pytest.mark.slow
def test_launches_of_a_step_of_gpt2_xl(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset gpt2-xl --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --json"
    assert main([*TINY, *words.split()]) == 0
    rows = json.loads(capsys.readouterr().out)["operators"]
    update = sum(row["launches"] for row in rows if row["phase"] == "update")
    assert update <= 200 and sum(row["launches"] for row in rows) <= 1900


# ---- which link a transfer takes -------------------------------------------------------------------------------------


Groups = Iterable[tuple[int, ...]]
NODES = range(1, 17)
SIZES: dict[str, Any] = {"num_attention_heads": 60, "hidden_size": 240, "num_layers": 10, "seq_length": 7200}


def random_layout(seed: int) -> ResolvedConfig:
    """Any degrees from 1 to 5, sometimes with experts, several stages per rank, or shards that are replicated."""
    at = random.Random(seed)
    tp, cp, dp, pp = (at.randint(1, 5) for _ in range(4))
    changes: dict[str, Any] = {"cp": cp, "zero_stage": at.randint(0, 3), "sequence_parallel": tp > 1}
    changes |= {"global_batch_size": 4 * dp, "micro_batch_size": 1}
    if pp > 1 and at.random() < 0.3:
        changes |= {"schedule": "interleaved", "virtual_stages": 2, "global_batch_size": pp * dp}
    if at.random() < 0.4:
        split = at.choice([tp, 1])
        ep = at.choice([n for n in range(1, 61) if dp * cp * tp // split % n == 0 and 60 % n == 0])
        changes |= {"num_experts": 60, "ep": ep, "etp": split, "activation": "swiglu", "disable_bias_linear": True}
    elif changes["zero_stage"]:
        changes["zero_shard_size"] = at.choice([n for n in range(2, 26) if dp * cp % n == 0] or [None])
    return make_config((tp, pp, dp), "output", **SIZES, **changes)


def families(config: ResolvedConfig) -> dict[str, list[Groups]]:
    """The groups that transfers of a role may run in."""
    parallel = config.parallel
    of = {role: groups_of_role(role, DIMENSIONS, parallel.degrees) for role in ("layer", "sequence", "replicas")}
    split = parallel.ep, parallel.expert_split
    roles = ("expert_layer", "dispatch", "expert_replicas")
    experts = {role: groups_of_experts(role, DIMENSIONS, parallel.degrees, split) for role in roles}
    n = parallel.zero_shard_size or len(of["replicas"][0])
    shards = [ranks[i : i + n] for ranks in of["replicas"] for i in range(0, len(ranks), n)]
    across = [ranks[i::n] for ranks in of["replicas"] for i in range(n)]
    return {
        "layer": [of["layer"], experts["expert_layer"]],
        "sequence": [of["sequence"]],
        "experts": [experts["dispatch"]],
        "replicas": [shards, across, of["replicas"], experts["expert_replicas"]],
    }


def groups_of(sent: Sent, config: ResolvedConfig) -> Groups:
    """Of the groups of its role those with its ranks, by the number and distance of ranks in the first one."""
    for groups in families(config)[sent.role]:
        first = next(iter(groups))
        if len(first) == sent.ranks and first[1] - first[0] == sent.stride:
            return groups
    raise AssertionError(f"no group of {sent}")


def across(groups: Groups, node: int) -> Crossing:
    """Of the groups that have ranks in several nodes: how many of them, and of their ranks, the node with the most has;
    and the fewest ranks of one in a node."""
    found, together, least = Counter[int](), Counter[int](), list[int]()
    for ranks in groups:
        inside = Counter(rank // node for rank in ranks)
        if len(inside) > 1:
            found.update(inside.keys())
            together.update(inside)
            least += inside.values()
    return Crossing(max(found.values(), default=0), max(together.values(), default=0), min(least, default=0))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 10))])
def test_a_transfer_is_between_nodes_where_one_of_its_groups_is(seed: int) -> None:
    config = random_layout(seed)
    layers, pp, world = outline(config), config.parallel.pp, config.parallel.ranks
    for rank in range(pp):
        for sent in (one for one in rank_traffic(config, layers, rank) if one.role != "pipeline"):
            groups = list(groups_of(sent, config))
            assert sorted(sum(groups, ())) == list(range(world))
            for node in NODES:
                found = across(groups, node)
                assert crossing(sent.ranks, sent.stride, sent.among, node) == found, (sent, node)
                assert sent.link(node) == ("network" if found.groups else "node"), (sent, node)
    if pp == 1:
        return
    pipelines = list(groups_of_role("pipeline", DIMENSIONS, config.parallel.degrees))
    message, tied = stage_message(config), tied_gradients(config)
    assert tied is not None
    for node in NODES:
        assert (
            groups_between_nodes(message.ranks, message.stride, message.among, node) == across(pipelines, node).groups
        )
        ends = [(ranks[0], ranks[-1]) for ranks in pipelines]
        assert groups_between_nodes(tied.ranks, tied.stride, tied.among, node) == across(ends, node).groups


SURE = Range(1.0, 1.0, 1.0)
# Nodes of 8 ranks; links of 100 GB/s, and a network card of 2 GB/s for each rank.
DEVICE = Device(
    name="ideal", reported_as="ideal", memory_bytes=1e9, memory_bandwidth=1e12, link_efficiency=SURE,
    node_link=Link(bandwidth=1e11, latency=0.0), network=Link(bandwidth=2e9, latency=0.0), network_efficiency=SURE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "ranks", "stride", "world", "seconds"),
    [
        ("all-gather", 3, 1, 6, 2 / 3 * 0.1 / 100),  # one node
        # 6 7 8 and 15 16 17: 8 and 15 are alone in the second node, each with its card.
        ("all-gather", 3, 1, 24, 2 / 3 * 0.1 / 2),
        ("all-gather", 6, 1, 12, 5 / 6 * 0.1 / 4),  # 6 to 11: 6 and 7 are in the first node
        ("all-gather", 2, 3, 12, 1 / 2 * 0.1 / 2),  # 6 9 and 7 10, but not 8 11: two of the eight cards
        ("all-gather", 4, 4, 64, 3 / 4 * 0.1 / 4),  # two ranks of each of four groups in a node
        ("all-gather", 16, 1, 64, 15 / 16 * 0.1 / 16),  # one ring has all eight cards
        # In an all-to-all each rank sends over its own card.
        ("all-to-all", 8, 1, 64, 7 / 8 * 0.1 / 100),  # one node
        ("all-to-all", 64, 1, 64, 56 / 64 * 0.1 / 2),  # 8 ranks a node: 56 of 64 parts leave it
        ("all-to-all", 16, 2, 64, 12 / 16 * 0.1 / 2),  # 4 of each of two groups in a node
        ("all-to-all", 6, 1, 12, 4 / 6 * 0.1 / 2),  # 6 and 7 of 6 to 11 send four parts
        # A message goes over one.
        ("message", 8, 1, 64, 0.1 / 100),
        ("message", 16, 4, 64, 0.1 / 2),  # four rings that cross at once
        ("message", 4, 4, 16, 0.1 / 2),  # pipelines of stages of four ranks
    ],
)
def test_a_transfer_has_the_network_cards_of_its_ranks(
    pattern: Pattern, ranks: int, stride: int, world: int, seconds: float
) -> None:
    transfer = Transfer(
        name="t", phase="forward", number=1, role="layer", pattern=pattern, bytes=1e8, ranks=ranks, stride=stride,
        among=range(world),
    )  # fmt: skip
    assert transfer_seconds(transfer, DEVICE) == pytest.approx(seconds, rel=1e-9)


# ---- operators of a block


MOST = {"Llama": (10, 15), "GPT-2": (9, 18), "GPT-2, dropout": (10, 20)}


@pytest.fixture(autouse=True, scope="module")
def no_group_stays() -> Iterator[None]:
    """The ranks of a split block belong to a job of these tests alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", MOST)
def test_operators_of_a_block(shape: str) -> None:
    count = operators.count_block(shape, 1)
    found = count.forward.total(), count.backward.total()
    assert found[0] <= MOST[shape][0] and found[1] <= MOST[shape][1], f"{count}: {count.forward}, {count.backward}"
    assert "aten::clone" not in count.forward + count.backward


@pytest.mark.parametrize("shape", MOST)
def test_a_split_block_adds_its_collectives_alone(shape: str) -> None:
    """The biases of the row-parallel layers are added by a rank's product."""
    one, split = operators.count_block(shape, 1), operators.count_block(shape, 8)
    assert split.forward.total() == one.forward.total() + 2
    assert split.backward.total() == one.backward.total() + 2
    assert split.forward["c10d::allreduce_"] == split.backward["c10d::allreduce_"] == 2


def test_nothing_copies_what_it_could_read_in_place() -> None:
    """Neither a split block before its sums, which a backward in halves has too, nor the parts of split experts."""
    ranks = ExpertRanks(layer=operators.group_of(operators.RANKS))
    experts = operators.count_block(operators.MIXTRAL, 1, experts=ranks)
    assert experts.forward["c10d::allreduce_"] == 1 and experts.backward["c10d::allreduce_"] == 2
    counts = [experts, *(operators.count_block(shape, 8) for shape in MOST)]
    for shape in MOST:
        counts.append(operators.count_block(shape, operators.RANKS, split_backward=True))
        assert counts[-1].forward["c10d::allreduce_"] == counts[-1].backward["c10d::allreduce_"] == 2
    assert not any("aten::clone" in count.forward + count.backward for count in counts)


def test_operators_of_a_block_whose_sequences_are_divided() -> None:
    """Putting the sequence together, or taking it apart, is one copy whatever the number of ranks."""
    for comm, most in zip(operators.CONTEXT_COMMS, [(16, 28), (68, 99), (17, 24)], strict=True):
        count = operators.count_divided(comm)
        found = count.forward.total(), count.backward.total()
        assert found[0] <= most[0] and found[1] <= most[1], f"{comm}: {count.forward}, {count.backward}"


def test_operators_of_a_block_with_experts() -> None:
    """One launch computes a product of all experts. The host waits for the numbers of rows alone."""
    one, split = operators.count_experts(1), operators.count_experts(operators.RANKS)
    assert one.forward.total() <= 36 and one.backward.total() <= 36
    assert split.forward.total() <= 50 and split.backward.total() <= 40
    assert (one.waits, split.waits) == (1, 1)
    for names in (split.forward, split.backward):
        assert not {"aten::bincount", "aten::repeat_interleave", "aten::clone"}.intersection(names)


def test_operators_of_the_output_layer_and_loss() -> None:
    one, split = operators.count_head(1), operators.count_head(8)
    assert one.forward.total() <= 6 and one.backward.total() <= 9
    assert split.forward.total() <= 8 and split.backward.total() <= 10


def test_the_page_has_the_counts() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/reports/measured.md"
    assert operators.table() in page.read_text(), f"{page}: write the table of python benchmarks/operators.py"


# ---- calls of the host -----------------------------------------------------------------------------------------------

OWN = tuple(str(Path(operators.__file__).parents[1] / name) for name in ("megacore", "kernels"))
MOST_CALLS = {"Llama": 102, "GPT-2": 56, "GPT-2, dropout": 94}  # on Python 3.11


@pytest.mark.parametrize("shape", MOST_CALLS)
def test_a_block_calls_few_functions_of_megacore(shape: str) -> None:
    """Forward and backward: what the host does for a block beside torch's own work."""
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        called[frame.f_code.co_qualname] += event == "call" and frame.f_code.co_filename.startswith(OWN)

    with FakeTensorMode(), ops.kernels_chosen("triton"):
        layer, x = operators.build(shape, 1, 1), operators.hidden_states()
        grad = torch.zeros_like(layer(x))  # and what is made once
        sys.setprofile(note)
        try:
            layer(x).backward(grad)
        finally:
            sys.setprofile(None)
    assert called.total() <= MOST_CALLS[shape], +called
