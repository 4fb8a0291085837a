"""Stages by cost and by hand; schedules, proven for small cases and held to closed forms; the fastest of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import weakref
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
from megacore.config.parallel import V_SCHEDULES, ChosenSchedule, StagesThatFit
from megacore.config.pipeline_layout import parse_layout
from megacore.config.toml import save_toml
from megacore.models.outline import outline
from megacore.models.spec import LayerSpec
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import Mesh
from megacore.parallel.recompute import computed_again
from megacore.pipeline.backward import input_half
from megacore.pipeline.partition import partition
from megacore.pipeline.schedule import (
    Action,
    Op,
    Schedule,
    ScheduleError,
    build_schedule,
    computations,
    one_forward_one_backward,
    with_transfers,
    zero_bubble,
)
from megacore.pipeline.schedule_choice import choose_schedule, is_open, with_stages_that_fit
from megacore.pipeline.schedule_file import load_schedule
from megacore.pipeline.simulator import Costs, Simulator, simulate
from megacore.pipeline.validation import held, in_flight, prove
from megacore.plan.cluster import CLUSTERS
from megacore.plan.fastest_schedule import VIRTUAL_STAGES, schedules_by_time
from megacore.plan.memory import plan_memory
from megacore.plan.planner import make_plan, scheduled
from megacore.plan.suggestions import Limits
from megacore.train import launch
from tests.patience import patience


def layer(cost: int, *, is_block: bool) -> LayerSpec:
    build = lambda: None  # noqa: E731
    return LayerSpec(name="x", build=build, parameters=cost, flops=cost * cost, is_block=is_block)  # type: ignore[arg-type]


def test_bloom_stages() -> None:
    """70 blocks on 12 stages with a 250,880-word table at both ends: 5, ten times 6, 5."""
    h, table = 14336, 250_880 * 14336
    end, block = layer(table, is_block=False), layer(12 * h * h, is_block=True)
    layers = [end, *[block] * 70, end]
    stages = partition(layers, 12, [layer.parameters for layer in layers])
    blocks = [sum(layers[i].is_block for i in stage) for stage in stages]
    assert blocks == [5, *[6] * 10, 5]


def test_a_layout_by_hand() -> None:
    assert parse_layout("E,2*t|t|3*t,H", stages=3, blocks=6) == [range(3), range(3, 4), range(4, 8)]
    assert parse_layout(" E | 2*t , t | H", stages=3, blocks=3) == [range(1), range(1, 4), range(4, 5)]
    with pytest.raises(ValueError, match="is not E, t or H"):  # others stand in tests/tools.toml
        parse_layout("E,t|" + "9" * 5000 + "*t|t,H", stages=3, blocks=4)


# ---- by time


def test_partition_has_the_smallest_sum_of_squares_that_stages_in_order_give() -> None:
    """As the table of all ends and starts gives it, which the partition does not fill where no best one can lie."""
    random = Random(1)
    for _ in range(150):
        blocks = random.randint(1, 9)
        size = random.choice([1.0, 1.3, 1e9])
        inner = [random.choice([size, size, random.random()]) for _ in range(blocks)]
        edges = random.choice([(0.01, 3.0), (0.0, 0.0), (4.0, 0.2)])
        cost = [edges[0], *inner, edges[1]]
        layers = [layer(1, is_block=0 < i <= blocks) for i in range(len(cost))]
        stages = random.randint(1, blocks)
        assert partition(layers, stages, cost) == whole_table(cost, stages)


def whole_table(cost: list[float], stages: int) -> list[range]:
    """Stages of blocks between an embedding and a head."""
    sums = [0, *itertools.accumulate(cost)]
    best: dict[int, tuple[float, float, list[range]]] = {0: (0.0, 0.0, [])}
    for _ in range(stages):
        row = {}
        for end in range(2, len(cost) + 1):
            parts = [(start, sums[end] - sums[start]) for start in best if max(start, 1) < min(end, len(cost) - 1)]
            options = [
                (max(best[start][0], part), best[start][1] + part * part, [*best[start][2], range(start, end)])
                for start, part in parts
            ]
            if options:
                row[end] = min(options, key=lambda option: (*option[:2], option[2][-1].start))
        best = row
    return best[len(cost)][2]


# ---- backward in two parts -------------------------------------------------------------------------------------------


LAYERS = 4


class Gated(nn.Module):
    """Two branches, of which the walk through the graph sees one after all that lies before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.gate(x)) * self.up(x))
        return found


def arrivals(layers: nn.Sequential) -> list[tuple[int, str]]:
    """Layer and name of each weight, once gradients appear."""
    found: list[tuple[int, str]] = []
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, place=(number, name): found.append(place))
    return found


def test_the_second_half_goes_back_layer_by_layer() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*[Gated() for _ in range(LAYERS)])
    x = torch.randn(3, 8)
    layers(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layers.named_parameters()}
    layers.zero_grad()

    order = arrivals(layers)
    first = layers[0](x)  # the anchor where the input needs no gradient
    loss = layers[1:](first).square().sum()
    _, half = input_half([get_gradient_edge(loss)], [torch.ones(())], [get_gradient_edge(first)])
    assert order == []
    half.run()
    assert len(order) == len(set(order)) == len(expected)
    numbers = [number for number, _ in order]
    assert numbers == sorted(numbers, reverse=True)
    for name, parameter in layers.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name  # type: ignore[arg-type]


# ---- recomputation ---------------------------------------------------------------------------------------------------


def test_an_operator_that_keeps_its_output_is_freed_after_a_backward_that_keeps_the_graph() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = x.relu()
    with computed_again(y, x.relu):
        output = layer(y).tanh()  # tanh keeps its output
    freed = weakref.ref(output.untyped_storage())
    output.sum().backward(retain_graph=True)
    del output
    assert freed() is None


# ---- schedules -------------------------------------------------------------------------------------------------------


KINDS = [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), *(("interleaved", v) for v in (1, 2, 3, 4))]
KINDS += [("zb-v", 2), ("dualpipev", 2)]
SOME = (1, 2, 3, 4, 5, 7, 8, 13, 16, 32)  # microbatches; the slow test takes all from 1 to 32


def check(name: str, virtual: int, ranks: int, microbatches: int) -> None:
    """Everything that is promised of one schedule."""
    schedule = build_schedule(name, ranks, microbatches, virtual)
    prove(schedule)
    factors = {"interleaved": virtual, "zero-bubble": 3, "zb-v": 6, "dualpipev": 6}
    form = (ranks - 1) / (factors.get(name, 1) * microbatches)
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    if microbatches >= ranks * (1 + schedule.is_v) or name in ("1f1b", "gpipe"):
        assert timeline.idle_share == pytest.approx(form / (1 + form), abs=1e-9)
    for rank in range(ranks):
        if name in ("1f1b", "zero-bubble"):
            assert in_flight(schedule, rank) <= ranks - rank
            assert held(schedule, rank) <= ranks
        if name == "gpipe":
            assert held(schedule, rank) == microbatches
        if schedule.is_v:  # of half stages
            assert held(schedule, rank) <= 2 * ranks + (name == "dualpipev")
            assert {action.stage for action in schedule.computations(rank)} == {rank, 2 * ranks - 1 - rank}
    prove(
        build_schedule("forward-only-v" if schedule.is_v else "forward-only", ranks, microbatches, virtual),
        trains=False,
    )


@pytest.mark.parametrize("name, theirs", [("zb-v", ScheduleZBVZeroBubble), ("dualpipev", ScheduleDualPipeV)])
def test_the_orders_of_a_v_are_torchs(name: str, theirs: Any) -> None:
    """Except that a gap of ZB-V is filled with the weight gradients that have waited longest, of either stage."""
    for ranks, further in itertools.product((1, 2, 3, 4, 8), (0, 1, 9)):
        given = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=2 * ranks + further)
        for rank, found in enumerate(computations(name, ranks, 2 * ranks + further, 2)):
            actions = filter(None, theirs._calculate_single_rank_operations(given, rank))
            names = [str(one) for action in actions for one in action.sub_actions or (action,)]
            pairs = zip(names, map(str, found), strict=True)
            assert all(a == b or (name == "zb-v" and "W" in a and "W" in b) for a, b in pairs)


@pytest.mark.parametrize("name, virtual", KINDS)
@pytest.mark.parametrize(
    ("ranks", "counts"), [((1, 2, 3, 5, 8), SOME), pytest.param(range(1, 9), range(1, 33), marks=pytest.mark.slow)]
)
def test_every_promise_of_every_schedule(name: str, virtual: int, ranks: Any, counts: Any) -> None:
    for number, microbatches in itertools.product(ranks, counts):
        check(name, virtual, number, microbatches)


@pytest.mark.parametrize("name, virtual", KINDS)
def test_transfers_do_not_change_what_is_simulated(name: str, virtual: int) -> None:
    numbers = random.Random(1)
    for ranks in (2, 3, 5):
        stages = ranks * virtual
        for microbatches, transfer in ((1, 0.3), (ranks, 0.0), (2 * ranks + 1, 0.3), (16, 5.0)):
            f, b, w = ([numbers.random() for _ in range(stages)] for _ in range(3))
            costs = Costs(forward=f, input_grad=b, weight_grad=w, transfer=transfer)
            without = Simulator.of_computations(computations(name, ranks, microbatches, virtual), stages)
            assert without.timeline(costs) == simulate(build_schedule(name, ranks, microbatches, virtual), costs)


def test_1f1b_by_hand() -> None:
    assert " ".join(map(str, one_forward_one_backward(0, 2, 3))) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert " ".join(map(str, one_forward_one_backward(1, 2, 3))) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert " ".join(map(str, zero_bubble(1, 2, 3))) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"


def test_the_proof_is_told_whether_to_train() -> None:
    """The last rank's own backwards do not say what the others must do."""
    with pytest.raises(ScheduleError, match="rank 0 never does 0B0"):
        prove(build_schedule("forward-only", 3, 2))
    schedule = build_schedule("1f1b", 3, 2)
    with pytest.raises(ScheduleError, match="rank 2 never does 2B0"):
        prove(altered(schedule, 2, [a for a in schedule.actions[2] if a.op not in (Op.BACKWARD, Op.SEND_GRAD)]))
    with pytest.raises(ScheduleError, match="rank 0 does 0B0, but nothing is trained"):
        prove(schedule, trains=False)


# ---- planted faults


def altered(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = tuple(tuple(actions) if r == rank else old for r, old in enumerate(schedule.actions))
    return dataclasses.replace(schedule, actions=lists)


Fault = tuple[str, ...] | Action  # two names: swapped; one: left out; an action: done as well


def faulty(schedule: Schedule, rank: int, fault: Fault) -> Schedule:
    actions = list(schedule.actions[rank])
    if isinstance(fault, Action):
        return altered(schedule, rank, [*actions, fault])
    i, *other = (list(map(str, actions)).index(name) for name in fault)
    for j in other:
        actions[i], actions[j] = actions[j], actions[i]
    if not other:
        del actions[i]
    return altered(schedule, rank, actions)


@pytest.mark.parametrize(
    "rank, fault, said",
    [
        (0, ("0F1", "0B1"), "rank 0: 0B1 comes before its output"),
        (1, ("recv input for 1F2",), "rank 1: 1F2 comes before its output"),
        (1, ("send grad of 1F0",), "rank 1: send grad of 1F0 is missing"),
        (2, Action(Op.BACKWARD, 1, 2), "rank 2 does 2B1 more than once"),
        (2, ("2B3",), "rank 2 never does 2B3"),
        (0, ("send output of 0F0", "send output of 0F1"), "rank 0: send output of 0F1 comes before it is computed"),
        (1, ("recv input for 1F2", "recv input for 1F3"), "rank 1: 1F2 comes before its output of stage 0 is there"),
        (1, Action(Op.FORWARD, 9, 1), "rank 1: 1F9 does not exist"),
        (1, Action(Op.FORWARD, 0, 2), "rank 1: 2F0 belongs on rank 2"),
        (2, Action(Op.INPUT_GRAD, 0, 2), "rank 2 does 2B0 twice, whole and in two"),
    ],
    ids=str,
)
def test_a_planted_fault_is_refused_by_name(rank: int, fault: Fault, said: str) -> None:
    schedule = build_schedule("1f1b", 3, 4)
    prove(schedule)
    with pytest.raises(ScheduleError, match=said):
        prove(faulty(schedule, rank, fault))


def test_orders_that_wait_for_each_other_are_refused() -> None:
    order = [list(one_forward_one_backward(rank, 2, 2)) for rank in range(2)]
    order[0] = [order[0][0], order[0][2], order[0][1], order[0][3]]  # 0F0 0B0 0F1 0B1: fine, only slower
    prove(with_transfers("slow", order, virtual_stages=1, microbatches=2))
    order[1] = [order[1][i] for i in (2, 3, 0, 1)]  # 1F1 1B1 1F0 1B0
    with pytest.raises(ScheduleError, match="rank 0 waits to do 0B0; rank 1 waits to do 1F1"):
        with_transfers("stuck", order, virtual_stages=1, microbatches=2)


def test_transfers_that_would_block_are_refused() -> None:
    """Each rank sends before it posts the receive of what the other sends: fine as long as sends return at once."""
    lines = [
        "F0 send-output0 F1 send-output1 F2 send-output2 recv-grad0 I0 W0 recv-grad1 I1 W1 recv-grad2 I2 W2",
        "recv-input0 F0 I0 send-grad0 W0 recv-input1 F1 I1 send-grad1 W1 recv-input2 F2 I2 send-grad2 W2",
    ]
    actions = tuple(
        tuple(Action(Op(word[:-1].replace("-", " ")), int(word[-1]), rank) for word in line.split())
        for rank, line in enumerate(lines)
    )
    schedule = Schedule(name="mine", ranks=2, virtual_stages=1, microbatches=3, actions=actions)
    simulate(schedule, Costs.uniform(2))
    said = "transfers that block would wait for ever: rank 0 at send output of 0F1; rank 1 at send grad of 1F0"
    with pytest.raises(ScheduleError, match=f"^{said}$"):
        prove(schedule)
    order = [schedule.computations(rank) for rank in range(2)]
    prove(with_transfers("mine", order, virtual_stages=1, microbatches=3))  # the same ones, well placed transfers


# ---- schedules of files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, virtual", [("gpipe", 1), ("zero-bubble", 1), ("interleaved", 3), ("zb-v", 2)])
def test_a_built_in_one_survives_the_way_through_a_file(name: str, virtual: int, tmp_path: Path) -> None:
    built = build_schedule(name, 3, 5, virtual)
    rows = [",".join(map(str, built.computations(rank))) for rank in range(3)]
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    assert load_schedule(tmp_path / "mine.csv").actions == built.actions


# ---- the fastest schedule --------------------------------------------------------------------------------------------


W1 = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192"
W1 += " --micro-batch-size 2 --global-batch-size 8 --untie-embeddings-and-output-weights"
LAPTOP = CLUSTERS["laptop"]


def planned(flags: str) -> ResolvedConfig:
    words = [*flags.split(), "--mock-data", "--train-iters", "1"]
    return parse_config(words, prog="pretrain_gpt.py", description="", kind=Config, planned=True)


def shape(config: ResolvedConfig) -> tuple[str, int]:
    return config.parallel.schedule, config.parallel.virtual_stages


@pytest.mark.parametrize(
    ("flags", "cluster"),
    [
        (f"{W1} --pp 2 --global-batch-size 2", "laptop"),
        ("--preset mixtral-8x7b --tp 2 --pp 4 --dp 4 --ep 4 --precision bf16 --global-batch-size 64", "h100"),
        # With sequence parallelism, which is the default on accelerators and changes the order here.
        ("--preset llama-3-8b --tp 2 --pp 4 --precision bf16 --global-batch-size 4 --seq-length 1024", "h100"),
        # Four stages per rank have the shorter pipeline, zero bubble the shorter step: its busiest rank computes less,
        # and so waits less for the slowest node.
        ("--preset llama-3-8b --tp 2 --pp 4 --dp 8 --zero-stage 1 --precision bf16 --global-batch-size 64", "h100"),
    ],
)
def test_the_order_is_that_of_whole_steps(flags: str, cluster: str) -> None:
    """Each schedule by its name, in the prediction of a step that tools/plan.py prints."""
    flags = flags.replace("--global-batch-size 8", "") if flags.count("global-batch") == 2 else flags
    config = planned(flags)
    layers = outline(config)
    found = schedules_by_time(config, layers, CLUSTERS[cluster])
    seconds = {}
    staged = (
        *(("interleaved", v) for v in VIRTUAL_STAGES),
        *((name, 2) for name in V_SCHEDULES if not CLUSTERS[cluster].on_cpu),
    )
    for name, stages in (("1f1b", 1), ("zero-bubble", 1), *staged):
        if config.parallel.pp * stages <= config.model.num_layers:
            named = planned(f"{flags} --schedule {name}" + (f" --virtual-stages {stages}" if stages > 1 else ""))
            seconds[name, stages] = make_plan(named, CLUSTERS[cluster]).time.seconds
    assert found[-1] == ("1f1b", 1)
    assert found[0] == min(seconds, key=seconds.__getitem__)
    assert [seconds[one] for one in found] == sorted(seconds[one] for one in found)


def test_backward_of_blocks_that_are_computed_again_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """In two halves each of their operators would compute the block again."""
    recomputed = planned(f"{W1} --pp 2 --recompute full --schedule zero-bubble")
    assert shape(recomputed) == ("1f1b", 1) and not recomputed.parallel.may_split_backward
    assert "the schedule is 1F1B" in capsys.readouterr().err
    assert shape(planned(f"{W1} --pp 2 --recompute light --schedule zero-bubble")) == ("zero-bubble", 1)
    open_config = planned(f"{W1} --pp 2 --recompute full")
    choices = schedules_by_time(open_config, outline(open_config), LAPTOP)
    assert "zero-bubble" not in {name for name, _ in choices}


def test_the_choice_is_quick() -> None:
    """A launch waits for it."""
    flags = "--preset bloom-176b --tp 4 --pp 12 --dp 8 --precision bf16 --global-batch-size 2048 --micro-batch-size 2"
    config = planned(flags)
    began = time.process_time()
    scheduled(config, CLUSTERS["a100-80g"])
    assert time.process_time() - began < patience(1)  # about 0.3 s


def test_memory_decides() -> None:
    config = planned("--preset llama-3-8b --pp 4 --tp 2 --precision bf16 --global-batch-size 32")
    choices = schedules_by_time(config, outline(config), CLUSTERS["h100"])
    assert len(choices) > 1
    asked: list[ResolvedConfig] = []

    def refuses(candidate: ResolvedConfig) -> bool:
        asked.append(candidate)
        return False

    last = choose_schedule(config, choices, refuses)
    assert shape(last) == choices[-1]
    assert list(map(shape, asked)) == choices[:-1]
    assert dataclasses.replace(last, parallel=config.parallel) == config  # paths, which may differ between nodes
    assert shape(choose_schedule(config, choices, lambda one: True)) == choices[0]
    assert shape(scheduled(planned(f"{W1} --pp 2"), LAPTOP)) == ("zero-bubble", 1)
    small = dataclasses.replace(LAPTOP, device=dataclasses.replace(LAPTOP.device, memory_bytes=1e6))
    assert shape(scheduled(planned(f"{W1} --pp 2"), small)) == ("1f1b", 1)


def test_a_file_lets_the_next_run_choose(tmp_path: Path) -> None:
    """It may have another layout: interleaved, for one, needs more blocks the more ranks there are."""
    flags = "--preset llama-3-8b --pp 4 --tp 2 --precision bf16 --global-batch-size 32"
    config = scheduled(planned(flags), CLUSTERS["h100"])
    assert isinstance(config.parallel, ChosenSchedule)
    file = tmp_path / "config.toml"
    save_toml(config, file)
    again = parse_config(["--config", str(file)], prog="", description="", kind=Config, planned=True)
    assert is_open(again)
    assert shape(scheduled(again, CLUSTERS["h100"])) == shape(config)
    argv = ["--config", str(file), "--pp", "32", "--dp", "1"]
    assert parse_config(argv, prog="", description="", kind=Config, planned=True).parallel.pp == 32


# ---- stages


def test_stages_by_time_give_way_where_only_those_by_parameters_fit() -> None:
    """GPT-2 small on four stages, as above. A file keeps what the flag says."""
    flags = "--preset gpt2-small --pp 4 --recompute full --micro-batch-size 1"
    for schedule in ("--schedule 1f1b", ""):
        by_time = planned(f"{flags} {schedule}")
        by_parameters = planned(f"{flags} {schedule} --pipeline-balance parameters")
        most, least = (
            max(rank.expected for rank in plan_memory(config, outline(config), on_cpu=False))
            for config in (by_time, by_parameters)
        )
        for available, balance in ((most + 1, "time"), ((most + least) / 2, "parameters"), (least - 1, "time")):
            limits = Limits(memory=AvailableMemory(available, ""), on_cpu=False, local_ranks=1)
            parallel = with_stages_that_fit(by_time, limits.fits).parallel
            assert parallel.pipeline_balance == balance
            assert parallel.as_written() == by_time.parallel.as_written()


@pytest.mark.parametrize("balance", ["time", "parameters"])
@pytest.mark.parametrize("schedule", ["", "--schedule 1f1b"])
def test_a_launch_takes_the_stages_that_fit(schedule: str, balance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(candidate: ResolvedConfig, mesh: Mesh, layers: object) -> bool:
        return balance in ("time", candidate.parallel.pipeline_balance)

    monkeypatch.setattr(launch, "fits_everywhere", fits)
    config = planned(f"--preset gpt2-small --pp 4 --micro-batch-size 1 {schedule}")
    parallel = launch.with_pipeline(config, Mesh(device=torch.device("cpu"))).parallel
    assert parallel.pipeline_balance == balance
    assert isinstance(parallel, StagesThatFit) == (balance == "parameters")
    assert isinstance(parallel, ChosenSchedule) == (not schedule)
