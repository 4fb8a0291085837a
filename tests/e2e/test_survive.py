"""A run that loses ranks continues (`--survive`), with the numbers of one that loses none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.audit.check import History
from megacore.audit.ledger import FILE
from megacore.job_directory import job_directory
from megacore.survive.copies import keepers, record_of
from tests.e2e import launching
from tests.e2e.launching import END, PROGRAM, START, losses, records_of, small_run, started, under_torchrun
from tests.parallel.test_checkpoint import stored
from tests.patience import patience, until

pytestmark = launching.needs_proc
STEPS = 12
RUN = {"train_iters": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "reproducible": True, "hidden_size": 32}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of the run that nothing happens to, in one process."""
    output = tmp_path_factory.mktemp("alone")
    launching.losses_of_one_process(output, **RUN)
    return output


def children(output: Path) -> dict[int, int]:
    """The processes that train into a directory, by the ranks of their keepers."""
    return {rank: said["child"] for rank, said in keepers() if said["output_dir"] == str(output)}


def logged(output: Path) -> int:
    """The last step that is logged."""
    return max(losses(output), default=0) if (output / "metrics.jsonl").exists() else 0


def check(output: Path, reference: Path, recoveries: int) -> None:
    """A run that was disturbed has each step once, and the losses and weights of the one that was not."""
    assert [r["step"] for r in records_of(output) if "train/loss" in r] == list(range(1, STEPS + 1))
    assert losses(output) == losses(reference)
    ours, theirs = (stored(path / f"step_{STEPS:08d}") for path in (output, reference))
    assert all(torch.equal(value, theirs[kind][name]) for kind in theirs for name, value in ours[kind].items())
    assert (output / "events.jsonl").read_text().count('"recovery"') == recoveries and not children(output)


@pytest.mark.parametrize(
    ("layout", "strikes"),
    [
        ({"tp": 2}, [(3, "KILL", [1]), (6, "STOP", [0])]),
        pytest.param(
            {"pp": 2, "dp": 2, "zero_stage": 1}, [(2, "KILL", [0, 1, 2]), (5, "STOP", [3])], marks=pytest.mark.slow
        ),
        pytest.param({"dp": 4, "zero_stage": 3, "save_interval": 1}, [(4, "KILL", [2])], marks=pytest.mark.slow),
    ],
)
def test_killed_and_stopped_ranks_are_replaced(layout: Any, strikes: Any, alone: Path, tmp_path: Path) -> None:
    output, ranks = tmp_path / "out", layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    flags = small_run(output, survive=True, ledger=True, **RUN, **layout)
    with under_torchrun(tmp_path / "logs", ranks, PROGRAM, *flags) as job:
        for step, name, struck in strikes:
            until(lambda: logged(output) >= step, START, job.said())  # noqa: B023
            of = children(output)
            for rank in struck:
                os.kill(of[rank], getattr(signal, f"SIG{name}"))
        assert job.ends(START)[0] == 0, job.said()
    check(output, alone, len(strikes))
    history = History(output / FILE)
    assert [line.kind for line in history.lines].count("start") == 1 + len(strikes)
    assert sorted(history.steps) == list(range(1, STEPS + 1))


def test_the_others_continue_without_a_lost_rank_and_with_it_when_it_is_back(alone: Path, tmp_path: Path) -> None:
    """The keepers are started by hand, as Slurm does: no agent ends all of them with one."""
    output, port = tmp_path / "out", launching.free_port()
    flags = small_run(output, survive=True, dp=2, **RUN)
    with (
        started(PROGRAM, tmp_path / "first.err", *flags, **launching.by_hand(0, port)) as first,
        started(PROGRAM, tmp_path / "second.err", *flags, **launching.by_hand(1, port)) as second,
    ):
        until(lambda: logged(output) >= 2, START, "no step 2")
        second.kill_all()
        until(lambda: logged(output) >= 4, START, (tmp_path / "first.err").read_text())
        with started(PROGRAM, tmp_path / "third.err", *flags, **launching.by_hand(1, port)) as third:
            assert (first.wait(patience(START)), third.wait(patience(END))) == (0, 0)
    said = (tmp_path / "first.err").read_text()
    assert "1 rank (one process) continue from step" in said and "rank 1 is back: 2 ranks (dp 2) continue" in said
    check(output, alone, 2)


TWO_DEVICES = """
import torch
from megacore.parallel.mesh import dist
torch.accelerator.device_count, begin = lambda: 2, dist.init_process_group
def init(*args, **options):
    assert int(os.environ["LOCAL_RANK"]) < 2
    begin(*args, **options)
dist.init_process_group = init
"""


def test_a_spare_takes_the_place_of_a_lost_rank(alone: Path, tmp_path: Path) -> None:
    """The layout stays, the spare has its device, and the lost rank is a spare when it is back. What a killed job of
    the same name has left in memory is not taken."""
    output, port, events = tmp_path / "out", launching.free_port(), tmp_path / "out" / "events.jsonl"
    environment = launching.environment() | {name: str(v) for name, v in launching.by_hand(0, port, 3).items()}
    left = job_directory("survive", environment, str(output)) / "g3" / "slot-1"
    left.mkdir(parents=True)
    (left / record_of(0)).write_text(json.dumps({"step": 5000, "ranks": 1, "files": {}}))
    program = launching.patched_program(tmp_path, TWO_DEVICES)
    flags = small_run(output, survive=True, spare_ranks=1, dp=2, **RUN)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(program, tmp_path / f"{rank}.err", *flags, **launching.by_hand(rank, port, 3)))
            for rank in range(3)
        ]
        until(lambda: logged(output) >= 2, START, "no step 2")
        assert {rank for rank, child in children(output).items() if child} == {0, 1}
        ranks[1].kill_all()
        until(lambda: '"recovery"' in events.read_text(), START, (tmp_path / "0.err").read_text())
        with started(program, tmp_path / "back.err", *flags, **launching.by_hand(1, port, 3)) as back:
            assert [one.wait(patience(START)) for one in (ranks[0], ranks[2], back)] == [0, 0, 0]
    assert "the keeper of rank 1 is lost: 2 ranks (dp 2) continue from step" in (tmp_path / "0.err").read_text()
    check(output, alone, 1)


def test_a_newer_whole_checkpoint_is_taken_and_the_flags_of_the_start(alone: Path, tmp_path: Path) -> None:
    output, settings, said = tmp_path / "out", tmp_path / "set.toml", tmp_path / "said"
    settings.write_text("[training]\nseed = 1234")
    flags = [*small_run(output, survive=True, survive_interval=10, save_interval=2, **RUN), "--config", str(settings)]
    with started(PROGRAM, said, *flags) as job:
        until(lambda: logged(output) >= 5, START, "no step 5")
        settings.write_text("[training]\nseed = none")
        (child,) = children(output).values()
        os.kill(child, signal.SIGSTOP)
        newest = max(path.parent for path in output.glob("step_*/manifest.json"))
        next(newest.glob("*.safetensors")).write_bytes(b"damaged")
        os.kill(child, signal.SIGKILL)
        assert job.wait(patience(START)) == 0, said.read_text()
    assert f"{newest} cannot be continued: 1 rank (one process) continue from step" in said.read_text()
    check(output, alone, 1)


def test_a_failure_of_the_program_ends_the_run(tmp_path: Path) -> None:
    """It would come again."""
    flags = small_run(tmp_path / "out", survive=True, dp=2, **{**RUN, "lr": 1e30, "reproducible": None})
    with under_torchrun(tmp_path / "logs", 2, PROGRAM, *flags, "--max-bad-steps", "1") as job:
        assert job.ends(START)[0] == 1 and job.said().count("megacore: stopped") == 1 and "survive" not in job.said()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "strikes"), [(1, 0), (3, 1)])
def test_a_run_that_tries_other_settings_has_the_same_numbers(
    steps: int, strikes: int, alone: Path, tmp_path: Path
) -> None:
    """Also where a rank dies while some are tried: the run goes back to those before, and the round goes on."""
    output = tmp_path / "out"
    flags = small_run(output, survive=True, ledger=True, retune=True, retune_after=steps, tp=2, pp=2, **RUN)
    with under_torchrun(tmp_path / "logs", 4, PROGRAM, *flags) as job:
        if strikes:
            until(lambda: logged(output) >= 5 and bool(children(output)[1]), START, job.said())
            os.kill(children(output)[1], signal.SIGKILL)
        assert job.ends(START)[0] == 0 and job.said().count("not try again") == strikes, job.said()
    check(output, alone, strikes)
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    layouts = [event["degrees"] for event in events if event["event"] == "launch"]
    assert layouts[2 * strikes] == layouts[0] != layouts[1] and str(events).count("'event': 'retune'") == 1
    assert sorted(History(output / FILE).steps) == list(range(1, STEPS + 1))
