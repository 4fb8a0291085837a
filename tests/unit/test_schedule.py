"""Every schedule that the builders can make, proven for all small cases, and held to the closed forms."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from megacore.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
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
from megacore.pipeline.schedule_file import check_schedule, load_schedule
from megacore.pipeline.simulator import Costs, Simulator, simulate
from megacore.pipeline.validation import held, in_flight, prove
from tools.plan import main

KINDS = [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), *(("interleaved", v) for v in (1, 2, 3, 4))]
SOME = (1, 2, 3, 4, 5, 7, 8, 13, 16, 32)  # microbatches; the slow test takes all from 1 to 32


def check(name: str, virtual: int, ranks: int, microbatches: int) -> None:
    """Everything that is promised of one schedule."""
    schedule = build_schedule(name, ranks, microbatches, virtual)
    prove(schedule)
    form = (ranks - 1) / ({"interleaved": virtual, "zero-bubble": 3}.get(name, 1) * microbatches)
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    if microbatches >= ranks or name in ("1f1b", "gpipe"):
        assert timeline.idle_share == pytest.approx(form / (1 + form), abs=1e-9)
    for rank in range(ranks):
        if name in ("1f1b", "zero-bubble"):
            assert in_flight(schedule, rank) <= ranks - rank
            assert held(schedule, rank) <= ranks
        if name == "gpipe":
            assert held(schedule, rank) == microbatches


@pytest.mark.parametrize("name, virtual", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_promise_of_every_schedule(name: str, virtual: int, ranks: int) -> None:
    for microbatches in SOME:
        check(name, virtual, ranks, microbatches)


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


@pytest.mark.slow
@pytest.mark.parametrize("name, virtual", KINDS)
def test_every_promise_for_every_number_of_microbatches(name: str, virtual: int) -> None:
    for ranks in range(1, 9):
        for microbatches in range(1, 33):
            check(name, virtual, ranks, microbatches)


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

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.csv"
    path.write_text(text)
    return path


def test_cells_become_the_schedule_and_transfers_are_added(tmp_path: Path) -> None:
    schedule = load_schedule(written(tmp_path, GOOD))
    found = [" ".join(map(str, schedule.computations(rank))) for rank in range(2)]
    assert found == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert (schedule.ranks, schedule.virtual_stages, schedule.microbatches) == (2, 1, 2)
    assert sum(action.op.is_transfer for actions in schedule.actions for action in actions) == 8


@pytest.mark.parametrize("name, virtual", [("gpipe", 1), ("zero-bubble", 1), ("interleaved", 3)])
def test_a_built_in_one_survives_the_way_through_a_file(name: str, virtual: int, tmp_path: Path) -> None:
    built = build_schedule(name, 3, 5, virtual)
    rows = [",".join(map(str, built.computations(rank))) for rank in range(3)]
    assert load_schedule(written(tmp_path, "\n".join(rows))).actions == built.actions


@pytest.mark.parametrize("pp, batch, fits", [(2, 2, True), (2, 4, False), (4, 2, False)])
def test_it_must_fit_the_run(pp: int, batch: int, fits: bool, tmp_path: Path) -> None:
    config = Config(
        parallel=ParallelConfig(pp=pp, schedule_csv=str(written(tmp_path, GOOD))),
        model=ModelConfig(vocab_size=8),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1, global_batch_size=batch),
    ).resolve(pp)
    if fits:
        check_schedule(config)
        return
    expected = rf"is for --pp 2, .* 2 microbatches per replica, but the run has --pp {pp}"
    with pytest.raises(ScheduleError, match=expected):
        check_schedule(config)


def test_a_plan_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, GOOD)
    flags = f"--preset gpt2-small --pp 2 --global-batch-size 2 --micro-batch-size 1 --schedule-csv {file}"
    assert main(["pretrain_gpt.py", *flags.split(), "--cluster", "h100"]) == 0
    report = capsys.readouterr().out
    assert f"--schedule-csv {file}" in report
    assert "schedule auto" not in report
