"""A message of the wrong size that gloo takes without a word ends the run in the same step, with the rank that sent it.

gloo aborts the receiver of a longer message, but takes a shorter one and leaves the rest of the tensor as it was.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import TrainingStopped
from megacore.parallel.heartbeat import Channel, Current
from megacore.parallel.mesh import build_mesh
from megacore.pipeline.transport import Send, Transport
from megacore.watch.ledger import Ledger
from megacore.watch.same_operations import Difference, first_difference, odd_ones
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer
from tests.unit.watch_records import identity

GROUP, PAIR = Channel((0, 1, 2)), Channel((1, 0), is_message=True)


class Shortened(Transport):
    """Sends half of each tensor in one call."""

    calls = 0

    def post(self, transfers: Sequence[Any]) -> Any:
        sends = any(isinstance(transfer, Send) for transfer in transfers)
        self.calls += sends
        if sends and self.calls == 14:
            transfers = [
                dataclasses.replace(one, tensors=tuple(t.flatten()[: t.numel() // 2] for t in one.tensors))
                if isinstance(one, Send)
                else one
                for one in transfers
            ]
        return super().post(transfers)


def train(rank: int, world_size: int, output_dir: str, at: int) -> str:
    config = make_config((1, 2, 1), output_dir, num_layers=2, train_iters=6)
    degrees = {"pp": 2, "dp": 1, "tp": 1}
    Current.heartbeat = Ledger(Path(output_dir), identity(rank, world_size, pid=os.getpid(), degrees=degrees))
    trainer = make_trainer(config, build_mesh(config.parallel))
    if rank == at:
        trainer.model.runtime.transport.__class__ = Shortened
    with pytest.raises(TrainingStopped) as raised:
        trainer.run()
    return str(raised.value)


@pytest.mark.parametrize("at", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_short_message_is_noticed_in_its_step_and_its_sender_named(at: int, tmp_path: Path) -> None:
    said = run_distributed(train, 2, str(tmp_path), at)
    assert said[0] == said[1]
    assert said[0].startswith(f"ranks communicate with different sizes in step 4: operation 14 from rank {at} to rank ")
    assert f"; rank {at} (pp {at}, dp 0, tp 0) left what it does in every step" in said[0]
    assert not list(tmp_path.glob("step_*"))


def test_who_differs_is_the_one_that_changed_or_a_minority() -> None:
    same, other = [(1, "all-reduce", 8), (2, "all-reduce", 16)], [(1, "all-reduce", 8), (2, "all-reduce", 24)]
    found = first_difference([{GROUP: same}, {GROUP: other}, {GROUP: same}])
    assert found == Difference(
        GROUP, 2, {0: "all-reduce of 16 bytes", 1: "all-reduce of 24 bytes", 2: "all-reduce of 16 bytes"}
    )
    assert found.in_words() == (
        "operation 2 of ranks 0 to 2 (ranks 0, 2: all-reduce of 16 bytes, rank 1: all-reduce of 24 bytes)"
    )
    assert odd_ones(found.posted, []) == ([1], "differs from the others")
    assert odd_ones(found.posted, [0])[0] == [0]
    assert odd_ones({0: "a", 1: "b"}, [])[0] == odd_ones({0: "a", 1: "b"}, [0, 1])[0] == []
    assert first_difference([{GROUP: same}, {GROUP: same[1:]}, {GROUP: same}]) is None  # older ones are forgotten
    missing = first_difference([{PAIR: [(1, "message", 4)]}, {PAIR: [(1, "message", 4), (2, "message", 4)]}])
    assert missing == Difference(PAIR, 2, {1: "message of 4 bytes", 0: "none"})
