"""The copies from and to host memory in a trace: all that the device copies, by kind, in their order."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from tests.accelerator.device import Counters, counting, needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import SEQUENCE, make_config, make_trainer

pytestmark = needs_pretend
Changes = dict[str, Any]
MICROBATCHES, MICRO_BATCH, LAYERS = 2, 2, 4
SHAPE: Changes = {"num_layers": LAYERS, "hidden_size": 64, "micro_batch_size": MICRO_BATCH, "precision": "bf16"}
SHAPE |= {"untie_embeddings_and_output_weights": True}
BATCH_BYTES = MICROBATCHES * MICRO_BATCH * SEQUENCE * (8 + 8 + 4)  # tokens, labels and the mask of the loss
SMALL = 256  # figures of a step


class Counted(Callback):
    """Counts what the device copies in a step, which is traced."""

    def __init__(self, step: int) -> None:
        self._step, self._stack = step, ExitStack()
        self.counters = Counters()

    def on_step_begin(self, run: Run, step: int) -> None:
        if step == self._step:
            self.counters = self._stack.enter_context(counting())

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._stack.close()


def traced(rank: int, world_size: int, directory: str, changes: Changes) -> tuple[Counters, int, int]:
    """What the device copies in step 2, and bytes of the rank's shards of parameters and of gradients."""
    common = {"device": "pretend", "train_iters": 3, "trace": True, "trace_steps": 2}
    batch = MICROBATCHES * MICRO_BATCH * world_size
    config = make_config((1, 1, world_size), directory, global_batch_size=batch, **common, **SHAPE, **changes)
    counted = Counted(2)  # after step 3 the ranks send each other their traces
    trainer = make_trainer(config, build_mesh(config.parallel), callbacks=[counted])
    trainer.run()
    sizes = [bucket.layout.shard_size for bucket in trainer.model.data_parallel.buckets]
    return counted.counters, 2 * sum(sizes), 4 * sum(sizes)


def copies(directory: Path, rank: int, step: int) -> dict[str, list[dict[str, Any]]]:
    """The copies of a rank in a step, by the name of their row."""
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    assert len(set(rows.values())) == len(rows)
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == "copy" and event["pid"] == rank and event["args"]["step"] == step:
            assert rows[event["tid"]] == event["name"]
            found[event["name"]].append(event)
    return found


# Of all state: parameters before forward and backward of two microbatches, and a sixteenth that is checked; gradients
# once a microbatch, and back before the second and for the norm.
CASES: dict[str, tuple[int, Changes, dict[str, float]]] = {
    "optimizer": (1, {"offload_optimizer": True}, {"gradients to host": 1, "parameters to device": 1}),
    "params": (
        2, {"offload_optimizer": True, "offload_params": True, "zero_stage": 3},
        {"gradients to host": 2, "gradients to device": 2, "parameters to device": 4 + 1 / 16},
    ),
    "activations": (1, {"offload_activations": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_all_that_the_device_copies_is_traced(case: str, tmp_path: Path) -> None:
    ranks, changes, kinds = CASES[case]
    outcomes = run_distributed(traced, ranks, str(tmp_path), changes, backend="pretend", init=ranks > 1)
    for rank, (counted, params, grads) in enumerate(outcomes):
        found = copies(tmp_path, rank, 2)
        sizes = {name: sum(event["args"]["bytes"] for event in row) for name, row in found.items()}
        expected = {name: times * (params if "parameters" in name else grads) for name, times in kinds.items()}
        if "offload_activations" in changes:  # all but the last two blocks of a microbatch leave and come back
            assert sizes.keys() == {"activations to host", "activations to device"}
            one = MICRO_BATCH * SEQUENCE * 64 * 2
            assert sizes["activations to device"] >= MICROBATCHES * (LAYERS - 2) * one
            assert sizes["activations to host"] >= MICROBATCHES * LAYERS * one
        else:
            assert sizes == pytest.approx(expected, rel=0.01)
        for direction, figure in (("device", counted.bytes_to_device), ("host", counted.bytes_to_host)):
            traced_bytes = sum(size for name, size in sizes.items() if name.endswith(direction))
            assert 0 <= figure - traced_bytes <= BATCH_BYTES + SMALL
        for row in found.values():
            assert all(event["dur"] >= 0 for event in row)
            assert all(one["ts"] + one["dur"] <= other["ts"] + 0.15 for one, other in pairwise(row))
        assert copies(tmp_path, rank, 3).keys() == found.keys()
        assert not copies(tmp_path, rank, 1)
