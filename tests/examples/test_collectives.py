"""examples/collectives: every collective against sums and copies that are computed without communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import algorithms
import collectives
from cost_model import counted_cost, expected_cost
from draw_messages import draw
from megacore.config import ParallelConfig
from megacore.drawing.canvas import to_svg
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group, join_job
from tests.distributed import run_distributed
from tests.examples.conftest import printed
from wire import Message, Wire

WIDTH = 3


def inputs(ranks: int) -> Tensor:
    """[rank, part, element]: what every rank starts with."""
    return torch.randint(-50, 50, (ranks, ranks, WIDTH), generator=torch.Generator().manual_seed(ranks)).float()


def expected(name: str, rank: int, root: int, x: Tensor) -> Tensor | None:
    """The result of a rank, from every rank's input; None: it has no meaning."""
    results = {
        "broadcast": x[root],
        "scatter": x[root, rank],
        "gather": x[torch.arange(len(x)), torch.arange(len(x))] if rank == root else None,
        "reduce": x.sum(0) if rank == root else None,
        "all_gather": x[torch.arange(len(x)), torch.arange(len(x))],
        "reduce_scatter": x.sum(0)[rank],
        "all_to_all": x[:, rank],
    }
    return results.get(name, x.sum(0))


def call(name: str, wire: Wire, x: Tensor, root: int) -> Tensor:
    function: Any = getattr(algorithms, name)
    mine = x[wire.rank].clone()
    if name in ("broadcast", "reduce", "scatter"):
        return function(wire, mine, root)
    if name == "gather":
        return function(wire, mine[wire.rank], root)
    return function(wire, mine[wire.rank] if name == "all_gather" else mine)


def check_all(rank: int, ranks: int) -> dict[str, tuple[list[Message], int]]:
    """Compare every result on this rank; the messages of all ranks, and the rounds."""
    _, group = join_job(ParallelConfig(device="cpu"))
    x, record = inputs(ranks), {}
    names = [name for name in COLLECTIVES if ranks in (2, 4) or name != "all_reduce_halving"]
    for name in names:
        for root in (ranks - 1, 0) if name in ROOTED else (0,):
            wire = Wire(group)
            found, wanted = call(name, wire, x, root), expected(name, rank, root, x)
            assert wanted is None or torch.equal(found, wanted), f"{name} from {root}"
        messages = [message for sent in all_gather_objects(wire.sent, group) for message in sent]
        record[name] = messages, wire.rounds
    return record


ROOTED = ("broadcast", "scatter", "gather", "reduce")
ALL_REDUCES = ("all_reduce_ring", "all_reduce_tree", "all_reduce_halving")
COLLECTIVES = (*ROOTED, "all_gather", "reduce_scatter", *ALL_REDUCES, "all_to_all")


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_collective_is_right_and_costs_what_the_formula_says(ranks: int) -> None:
    for record in run_distributed(check_all, ranks):
        for name, (messages, rounds) in record.items():
            assert counted_cost(messages, rounds) == expected_cost(name, ranks, 4 * ranks * WIDTH), name
            pairs = [(message.round, message.source) for message in messages]
            assert len(set(pairs)) == len(pairs), "a rank sends one message in a round"


def test_the_picture_names_every_message() -> None:
    messages = [Message(0, 0, 2, 8, "part 2,3"), Message(1, 0, 1, 4, "part 1"), Message(1, 2, 3, 4, "part 3")]
    text = to_svg(draw("scatter of 4 ranks", messages, 4, 2))
    assert all(f">{message.content}</text>" in text for message in messages)


def test_halving_refuses_ranks_that_have_no_partner() -> None:
    wire = Wire(Group(ranks=(0, 1, 2)))
    with pytest.raises(ValueError, match="3 ranks are not a power of two"):
        algorithms.all_reduce_halving(wire, torch.zeros(3))


def test_the_script_agrees_with_the_library_and_draws(tmp_path: Path) -> None:
    argv = ["--bytes", "480", "--repeats", "1", "--pictures", str(tmp_path)]
    (status, text), *others = run_distributed(printed, 4, collectives.main, argv, init=False)
    assert status == 0
    assert others == [(0, "")] * 3
    *lines, pictures = text.splitlines()[3:]
    assert pictures == f"pictures: {tmp_path}/*.svg"
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows] == [[name, "yes"] for name in COLLECTIVES]
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == sorted(COLLECTIVES)
