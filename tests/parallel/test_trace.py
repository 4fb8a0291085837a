"""A traced run: each action once a step, in order and not before what it needs; and both bubbles of metrics.jsonl. A
profiled one: each rank's trace has the steps that were asked for."""

from __future__ import annotations

import gzip
import json
import math
import tomllib
import warnings
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config import ResolvedConfig, ResolvedExperts
from megacore.layers import moe
from megacore.models.outline import outline
from megacore.parallel import direct
from megacore.parallel.mesh import Group, build_mesh
from megacore.pipeline.layer_time import layer_seconds
from megacore.pipeline.schedule import build_schedule, requirements, result
from megacore.plan.memory import plan_memory
from megacore.plan.traffic import rank_traffic
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.matrix.runner import changes_of
from tests.parity.runs import VOCAB, Layout, make_config, make_trainer

Event = dict[str, Any]
PLAIN: dict[str, Any] = {"train_iters": 5, "log_interval": 1, "trace": True, "num_layers": 4}


def run(rank: int, world_size: int, layout: Layout, output_dir: str, changes: dict[str, Any]) -> tuple[float, ...]:
    """Train on one rank; returns the predicted seconds of every stage."""
    config = make_config(layout, output_dir, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.run()
    return tuple(sum(layer_seconds(config, trainer.task.layers[i]) for i in stage) for stage in trainer.model.stages)


def train(layout: Layout, output_dir: Path, **changes: Any) -> tuple[float, ...]:
    ranks = math.prod(layout) * changes.get("cp", 1)
    found = run_distributed(run, ranks, layout, str(output_dir), PLAIN | changes)[0]
    assert isinstance(found, tuple)
    return found


def events_of(output_dir: Path) -> list[Event]:
    content = json.loads((output_dir / "trace.json").read_text())
    assert isinstance(content["traceEvents"], list)
    return content["traceEvents"]


def rows(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """(rank, step) -> what the rank did in it, in order."""
    found = defaultdict(list)
    for event in sorted(
        (e for e in events if e["ph"] == "X" and e["cat"] not in ("pass", "update", "collective", "copy")),
        key=lambda e: e["ts"],
    ):
        found[event["pid"], event["args"]["step"]].append(event)
    return found


def computed(row: list[Event]) -> list[Event]:
    return [event for event in row if event["cat"] == "compute"]


MORE = (((1, 2, 1), "zero-bubble", 1), ((1, 2, 1), "interleaved", 2))
CASES: list[Any] = [((1, 2, 2), "zb-v", 2), *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout, str, int]:
    """A run's output directory, layout, schedule and number of stages a rank."""
    layout, schedule, virtual = request.param
    output_dir = tmp_path_factory.mktemp("traced")
    train(layout, output_dir, schedule=schedule, virtual_stages=virtual)
    return output_dir, layout, schedule, virtual


def test_each_action_is_there_once_a_step_in_order_without_overlap(traced: tuple[Path, Layout, str, int]) -> None:
    output_dir, (_, pp, dp), name, virtual = traced
    schedule = build_schedule(name, pp, 4 // dp, virtual)  # 8 samples, 2 a microbatch
    found = rows(events_of(output_dir))
    assert set(found) == {(rank, step) for rank in range(pp * dp) for step in (2, 3, 4)}
    for (rank, _), row in found.items():
        actions = schedule.actions[rank // dp]
        assert [event["name"] for event in computed(row)] == [str(a) for a in actions if not a.op.is_transfer]
        for event in computed(row):
            assert event["name"].startswith(str(event["args"]["stage"]))
            assert event["name"].endswith(str(event["args"]["microbatch"]))
        posted = [name for e in row if e["cat"] == "post" for name in e["name"].removeprefix("post ").split(", ")]
        assert posted == [str(action) for action in actions if action.op.is_transfer]
        waited = Counter(e["name"].removeprefix("wait: ") for e in row if e["cat"] == "wait")
        assert waited == Counter([*(str(action) for action in actions if action.op.is_receive), "for the last sends"])
        assert all(one["ts"] + one["dur"] <= other["ts"] + 0.05 for one, other in pairwise(row))


def test_nothing_begins_before_what_it_needs(traced: tuple[Path, Layout, str, int]) -> None:
    output_dir, (_, pp, dp), name, virtual = traced
    schedule = build_schedule(name, pp, 4 // dp, virtual)
    found = rows(events_of(output_dir))
    for step in (2, 3, 4):
        for replica in range(dp):
            begins, ends = {}, {}
            for rank in range(pp):
                events = computed(found[rank * dp + replica, step])
                for event, action in zip(events, schedule.computations(rank), strict=True):
                    begins[action] = event["ts"]
                    ends[result(action)] = event["ts"] + event["dur"]
            for action, begin in begins.items():
                assert all(ends[key] <= begin + 1 for key in requirements(action, schedule.stages)), action


def test_arrows_lead_to_other_ranks_from_what_they_need(traced: tuple[Path, Layout, str, int]) -> None:
    output_dir, (_, pp, dp), name, virtual = traced
    schedule = build_schedule(name, pp, 4 // dp, virtual)
    events = events_of(output_dir)
    boxes_of = rows(events)

    def box(arrow: Event) -> tuple[int, str]:
        """Replica and name of the computation that an end of an arrow is bound to."""
        all_steps = [event for (rank, _), row in boxes_of.items() if rank == arrow["pid"] for event in computed(row)]
        (found,) = (e["name"] for e in all_steps if e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"])
        return arrow["pid"] % dp, found

    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    drawn = Counter((box(starts[number]), box(ends[number])) for number in ends)
    rank_of = {result(action): rank for rank in range(pp) for action in schedule.computations(rank)}
    names = {result(action): str(action) for rank in range(pp) for action in schedule.computations(rank)}
    expected = {
        ((replica, names[key]), (replica, str(action)))
        for replica in range(dp)
        for rank in range(pp)
        for action in schedule.computations(rank)
        for key in requirements(action, schedule.stages)
        if rank_of[key] != rank
    }
    assert starts.keys() == ends.keys()
    assert drawn == Counter(dict.fromkeys(expected, 3))  # steps


def test_the_collectives_of_tensor_and_data_parallelism_are_there(tmp_path: Path) -> None:
    train((2, 1, 2), tmp_path, train_iters=3, trace_steps=1, num_layers=2)
    events = events_of(tmp_path)
    of_rank: dict[int, list[Event]] = {rank: [] for rank in range(4)}
    for event in events:
        if event.get("cat") == "collective":
            of_rank[event["pid"]].append(event)
    posted = [[(e["name"], e["args"]["bytes"]) for e in row] for row in of_rank.values()]
    assert posted[0] == posted[1] == posted[2] == posted[3]
    names = Counter(name for name, _ in posted[0])
    blocks, microbatches = 2, 2
    # A block leaves two tensor-parallel regions forward and two backward; posted, and waited for.
    assert names["all-reduce over tp"] >= 2 * 4 * blocks * microbatches
    gradients = names["reduce-scatter over dp"] + names["all-reduce over dp"]
    assert gradients > 0
    (update,) = (e for e in events if e.get("cat") == "update" and e["pid"] == 0)
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= update["ts"] + update["dur"] + 1 for e in of_rank[0])
    for name, groups in (("over tp", ((0, 1), (2, 3))), ("over dp", ((0, 2), (1, 3)))):
        for group in groups:  # what is waited for last ends on no member before it has begun on all
            last = [next(e for e in reversed(of_rank[rank]) if e["name"] == f"all-reduce {name}") for rank in group]
            assert all(e["ts"] + e["dur"] >= max(other["ts"] for other in last) - 1 for e in last)


@needs_pretend
@pytest.mark.parametrize(("schedule", "crossed"), [("zb-v", [0, 0, 0, 0]), ("dualpipev", [15, 15, 36, 36])])
def test_dualpipev_computes_while_rows_of_experts_travel(schedule: str, crossed: list[int], tmp_path: Path) -> None:
    """Between where a rank posts an exchange and waits for it, it posts one of another microbatch: in each pair (5 on
    the first rank, 12 on the last) both of the forward's, and the first of the backward's."""
    experts = {
        "num_experts": 4,
        "moe_ffn_hidden_size": 16,
        "activation": "swiglu",
        "disable_bias_linear": True,
        "ep": 2,
    }
    few = {"global_batch_size": 16, "micro_batch_size": 1, "train_iters": 3, "trace_steps": 1, "device": "pretend"}
    changes = PLAIN | experts | few | {"schedule": schedule, "virtual_stages": 2}
    run_distributed(run, 4, (1, 2, 2), str(tmp_path), changes, backend="pretend")
    sent: list[dict[int, list[float]]] = [{}, {}, {}, {}]  # by rank and exchange: when it was posted, and waited for
    for event in events_of(tmp_path):
        if event["name"].startswith("all-to-all") and not event["args"]["bytes"]:  # as many rows as there are
            sent[event["pid"]].setdefault(event["args"]["number"], []).append(event["ts"])
    times = [list(of_rank.values()) for of_rank in sent]
    assert [sum(any(a < c < b for c, _ in found) for a, b in found) for found in times] == crossed


def test_ranks_that_divide_sequences_are_traced_and_share_the_flops(tmp_path: Path) -> None:
    """FLOPs by hand as in tests/parity/test_evaluation.py, of 8 sequences; the time of a step is that of both ranks."""
    changes: dict[str, Any] = {"cp": 2, "cp_comm": "ulysses", "peak_tflops": 2e-3}
    train((1, 1, 1), tmp_path, train_iters=3, trace_steps=1, num_layers=2, **changes)
    events = events_of(tmp_path)
    assert {e["args"]["cp"] for e in events if e["name"] == "process_name"} == {0, 1}
    sent = [Counter(e["name"] for e in events if e.get("cat") == "collective" and e["pid"] == rank) for rank in (0, 1)]
    blocks, microbatches = 2, 4
    # Before and after attention, forward and backward; posted, and waited for.
    assert [names["all-to-all over all ranks"] for names in sent] == 2 * [2 * 4 * blocks * microbatches]
    *_, record = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    flops = 3 * blocks * (24 * 8 * 16 * 32**2 + 4 * 8 * 16**2 * 32) + 6 * 8 * 16 * 32 * VOCAB
    assert record["perf/tflops_per_rank"] == pytest.approx(flops / 2 / record["perf/step_time_s"] / 1e12, rel=1e-6)
    assert record["perf/mfu"] == pytest.approx(record["perf/tflops_per_rank"] / 2e-3, rel=1e-6)


def test_the_measured_bubble_is_the_traces(traced: tuple[Path, Layout, str, int]) -> None:
    """What no rank computes between the first begin and the last end of any computation of the pipeline counts, the
    wait for the others after a rank's own last one too."""
    output_dir, (_, pp, dp), _, _ = traced
    found = rows(events_of(output_dir))
    records = {r["step"]: r for r in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())}
    for step in (2, 3, 4):
        idle = []
        for replica in range(dp):
            events = [event for rank in range(pp) for event in computed(found[rank * dp + replica, step])]
            moments = sorted({moment for e in events for moment in (e["ts"], e["ts"] + e["dur"])})
            unused = 0.0
            for start, stop in pairwise(moments):
                working = sum(e["ts"] <= start and stop <= e["ts"] + e["dur"] for e in events)
                unused += (pp - working) * (stop - start)
            idle.append(unused / (moments[-1] - moments[0]) / pp)
        assert 0 < records[step]["perf/bubble_measured"] < 1
        assert records[step]["perf/bubble_measured"] == pytest.approx(sum(idle) / len(idle), abs=1e-3)


def test_the_predicted_bubble_is_the_formula_for_two_stages(tmp_path: Path) -> None:
    """The last stage is the slower one: it waits for its first input, works without a break, and the first stage's last
    backward follows. So the pass takes f0 + m 3 f1 + 2 f0, of which the ranks work 3 m (f0 + f1)."""
    f0, f1 = train((1, 2, 1), tmp_path / "two")
    m = 4
    assert f1 > f0
    idle = 1 - 3 * m * (f0 + f1) / (2 * (f0 + 3 * m * f1 + 2 * f0))
    for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["perf/bubble_predicted"] == pytest.approx(idle, rel=1e-12)


def test_which_steps_are_traced(tmp_path: Path) -> None:
    """From the second on, as many as are asked for; the first where there is no other."""
    for name, changes, steps in (("one", {"train_iters": 1}, {1}), ("few", {"trace_steps": 1}, {2})):
        run(0, 1, (1, 1, 1), str(tmp_path / name), PLAIN | changes)
        assert {event["args"]["step"] for event in events_of(tmp_path / name) if event["ph"] == "X"} == steps
    run(0, 1, (1, 1, 1), str(tmp_path / "none"), PLAIN | {"trace": False, "train_iters": 1})
    assert not (tmp_path / "none" / "trace.json").exists()


# ---- --profile-steps


def run_profiled(rank: int, world_size: int, output_dir: str, profile_steps: str | None) -> None:
    config = make_config((1, 1, 2), output_dir, train_iters=4, num_layers=1, profile_steps=profile_steps)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*Profiler")
        make_trainer(config, build_mesh(config.parallel)).run()


def losses_of(directory: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_rank_writes_a_trace_of_the_steps(tmp_path: Path) -> None:
    run_distributed(run_profiled, 2, str(tmp_path / "profiled"), "2:3")
    run_distributed(run_profiled, 2, str(tmp_path / "plain"), None)
    assert losses_of(tmp_path / "profiled") == losses_of(tmp_path / "plain")
    files = sorted((tmp_path / "profiled" / "profile").iterdir())
    assert [file.name for file in files] == ["rank_0.json.gz", "rank_1.json.gz"]
    for file in files:
        names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
        assert names.count("aten::embedding") == 2 * 2  # in each of 2 steps, for each of the rank's 2 microbatches
        assert "gloo:all_reduce" in names


# ---- transfers


FEW = 200
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256, "num_layers": 2}
Counts = Counter[int]  # bytes sent by the distance of a group's ranks


class Counting:
    """Counts what this rank sends. A sum to all is counted as a ring's, twice (n - 1) / n of the tensor."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: Counts = Counter()
        reduce, exchange, batch = dist.all_reduce, direct.exchange, dist.batch_isend_irecv
        exchange_rows = dist.all_to_all_single
        start_sum, sums = direct.start_sum, list[Tensor]()  # those of a few numbers that are begun

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            ranks = dist.get_process_group_ranks(group)
            self._add(ranks[1] - ranks[0], 2 * (len(ranks) - 1) * _bytes(tensor) // len(ranks), _bytes(tensor))
            return reduce(tensor, op=op, group=group, async_op=async_op)

        def exchanged(outgoing: list[Tensor], incoming: list[Tensor], group: Group) -> Any:
            others = [tensor for rank, tensor in enumerate(outgoing) if rank != group.rank and not sums]
            self._add(group.ranks[1] - group.ranks[0], sum(map(_bytes, others)), sum(map(_bytes, others)))
            return exchange(outgoing, incoming, group)

        def summed(tensor: Tensor, group: Group) -> Any:
            assert _bytes(tensor) < FEW
            sums.append(tensor)
            try:
                return start_sum(tensor, group)
            finally:
                sums.clear()

        def batched(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    ranks = dist.get_process_group_ranks(operation.group)
                    self._add(ranks[1] - ranks[0], _bytes(operation.tensor), _bytes(operation.tensor))
            return batch(operations)

        def rows_exchanged(
            received: Tensor, rows: Tensor, receive: list[int], send: list[int], group: Any, async_op: bool
        ) -> Any:
            ranks = dist.get_process_group_ranks(group)
            others = sum(send) - send[ranks.index(dist.get_rank())]
            self._add(ranks[1] - ranks[0], others * _bytes(rows) // max(len(rows), 1), _bytes(rows))
            return exchange_rows(received, rows, receive, send, group=group, async_op=async_op)

        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "all_to_all_single", rows_exchanged)
        patch.setattr(direct, "exchange", exchanged)
        patch.setattr(direct, "start_sum", summed)
        patch.setattr(dist, "batch_isend_irecv", batched)

    def _add(self, distance: int, sent: int, size: int) -> None:
        if size >= FEW:
            self.sent[distance] += sent


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def evenly(logits: Tensor, experts: ResolvedExperts, bias: Tensor | None = None, *_: Any) -> moe.Choice:
    """Chooses each expert equally often, as is planned."""
    b, s, number = logits.shape
    chosen = experts.moe_router_topk
    indices = ((torch.arange(b * s).view(b, s, 1) * chosen + torch.arange(chosen)) % number).sort(-1).values
    scores = logits.softmax(-1)
    return moe.Choice(indices, scores.gather(-1, indices), scores)


def config_of(words: str, directory: Any) -> ResolvedConfig:
    changes = changes_of(words)
    tp, pp, dp = (changes.pop(name, 1) for name in ("tp", "pp", "dp"))
    return make_config((tp, pp, dp), directory, **(SIZES | changes), train_iters=2)


def sent_per_step(rank: int, world_size: int, cases: list[str], directory: str) -> list[tuple[int, Counts]]:
    """The rank's parameters, and what it sends in the second step, by case."""
    found = []
    for case in cases:
        config = config_of(case, directory)
        trainer = make_trainer(config, build_mesh(config.parallel))
        held = sum(parameter.numel() for parameter in trainer.model.data_parallel.parameters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "choose", evenly)
            trainer.train_step(next(trainer.batches))
            counting = Counting(patch)
            trainer.train_step(next(trainer.batches))
            found.append((held, counting.sent))
    return found


TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("traffic.toml").read_text(encoding="utf-8"))
TRANSFERS = {name: [words.format(**TABLE["parts"]) for words in cases] for name, cases in TABLE["cases"].items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "usual")) for name in TRANSFERS]
)
def test_bytes_sent(name: str, tmp_path: Any) -> None:
    ranks, cases = 4 if name == "four ranks" else 2, TRANSFERS[name]
    counted = run_distributed(sent_per_step, ranks, cases, str(tmp_path), timeout=240)
    for number, case in enumerate(cases):
        config = config_of(case, tmp_path)
        layers, of_stage = outline(config), ranks // config.parallel.pp
        memory = plan_memory(config, layers, on_cpu=True)
        for rank, found in enumerate(counted):
            planned: Counts = Counter()
            for sent in rank_traffic(config, layers, rank // of_stage):
                distance = of_stage if sent.role == "pipeline" else sent.stride
                planned[distance] += round(sent.sent_bytes) if sent.bytes >= FEW else 0
            expected = Counter({key: size for key, size in planned.items() if size})
            assert _mean_of_shards(config, counted, number, rank) == expected, f"{case}, rank {rank}"
            assert found[number][0] == memory[rank // of_stage].parameters, f"{case}, rank {rank}"


def _mean_of_shards(config: ResolvedConfig, counted: list[list[tuple[int, Counts]]], case: int, rank: int) -> Counts:
    """What a rank has sent. With ZeRO and sequence parallelism the mean over its replicas: of the parameters that a
    layer group holds whole, a shard may have all or none."""
    parallel = config.parallel
    if not (parallel.zero_stage and parallel.sequence_parallel):
        return counted[rank][case][1]
    replicas = range(rank % parallel.tp, len(counted), parallel.tp)
    assert parallel.pp == 1 == parallel.cp
    total = sum((counted[replica][case][1] for replica in replicas), Counter())
    return Counter({distance: size // len(replicas) for distance, size in total.items()})


COMPRESSED = {  # and by what factor fewer bytes are sent
    "dp2 optimizer=onebitadam onebit_freeze_step=1": 4 * 2048 / 260,
    "dp2 grad_reduce_compression=int8": 4 * 256 / 260,
    "dp2 z1 grad_reduce_compression=bf16": 2.0,
}


def test_compressed_sums_send_the_bytes_that_are_planned(tmp_path: Any) -> None:
    """But for the padding of vectors to blocks."""
    counted = run_distributed(sent_per_step, 2, list(COMPRESSED), str(tmp_path))[0]
    for (case, ratio), (parameters, found) in zip(COMPRESSED.items(), counted, strict=True):
        config = config_of(case, tmp_path)
        (planned,) = [s.sent_bytes for s in rank_traffic(config, outline(config), 0) if s.what == "gradients"]
        is_sharded = bool(config.parallel.zero_stage)
        gathered = 4 * parameters / 2 if is_sharded else 0
        full = 4 * parameters / 2 * (1 if is_sharded else 2)
        assert planned == pytest.approx(full / ratio, rel=1e-6), case
        assert planned <= found[1] - gathered <= 1.12 * planned, case
