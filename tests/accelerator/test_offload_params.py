"""Parameters and gradients in host memory: the bits of ZeRO-3 on every layout, and what is left on the device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import SpikeConfig
from megacore.models.outline import outline
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from tests.accelerator.device import counting, needs_pretend, slow
from tests.accelerator.largest_model import HOST as ON_HOST
from tests.accelerator.largest_model import PLAIN, largest
from tests.accelerator.test_training import Case, Changes, case_of, cases_of
from tests.distributed import run_distributed
from tests.parallel.test_spikes import GUARD, POISON, STEPS, Losses, Text, state_of, trainer_on
from tests.parity import runs
from tests.plans.published import traced

pytestmark = needs_pretend
HOST: Changes = {"offload_params": True, "offload_optimizer": True}
BF16: Changes = {"precision": "bf16"}
CASES, MORE = cases_of("offload_params")


def both(rank: int, world_size: int, cases: list[Case], directory: str) -> list[list[runs.Outcome]] | None:
    """Each case on ZeRO-3, with its state on the device and in host memory."""
    found = []
    for number, (layout, changes) in enumerate(cases):
        outcomes = []
        for where in ({}, HOST):
            common = {"zero_stage": 3, "train_iters": 2, "num_layers": 3, "device": "pretend"}
            config = runs.make_config(layout, f"{directory}/{number}{len(where)}", **(common | changes | where))
            if config.training.reproducible:
                compute_reproducibly()
            outcomes.append(
                runs.train_on(build_mesh(config.parallel), config, moments=changes.get("optimizer") != "muon")
            )
        found.append(outcomes)
    return found if rank == 0 else None


@pytest.mark.parametrize(
    ("words", "ranks"),
    [*((CASES[ranks], ranks) for ranks in CASES), *(pytest.param(MORE[n], n, marks=pytest.mark.slow) for n in MORE)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_no_bit_differs_from_stage_3_on_the_device(words: list[str], ranks: int, tmp_path: Path) -> None:
    cases = [case_of(one) for one in words]
    options: Changes = {"backend": "pretend", "init": ranks > 1, "timeout": 60 * len(cases)}
    found = run_distributed(both, ranks, cases, str(tmp_path), **options)[0]
    for (plain, on_host), (_, changes) in zip(found, cases, strict=True):
        if "clip_grad" in changes:
            assert on_host.norms == pytest.approx(plain.norms, rel=1e-7)
            on_host = dataclasses.replace(on_host, norms=plain.norms)
        runs.bitwise(on_host, plain)


def alone(work: Any, *arguments: Any, **options: Any) -> Any:
    """What one process on the device gives."""
    return run_distributed(work, 1, *arguments, backend="pretend", init=False, **options)[0]


@pytest.mark.slow
def test_thirteen_times_the_model_fits_on_a_device(tmp_path: Path) -> None:
    """ZeRO-Offload's figure (arXiv 2101.06840, section 6.2.1): blocks of a model that completes a step on one device,
    with mixed precision and AdamW, and blocks of one with its state in host memory. Both recompute."""
    common: Changes = {"limit": 8 << 20, "shape": {"hidden_size": 64, "recompute": "full"}}
    works = [partial(largest, most=most, flags=flags, **common) for flags, most in ((PLAIN, 40), (ON_HOST, 130))]
    plain, on_host = (alone(work, str(tmp_path)) for work in works)
    assert plain.is_limit
    assert 5 < plain.blocks <= (8 << 20) / (18 * 12 * 64**2)
    assert on_host.blocks >= 13 * plain.blocks
    assert on_host.on_host >= 17 * on_host.parameters


@dataclass(frozen=True)
class Steady:
    """Of a steady step: what the host waited for, bytes each way, bytes of the rank's shards of parameters and of
    gradients, most bytes on the device beyond the batch, and those of the formula."""

    waits: dict[str, int]
    up: int
    down: int
    params: int
    grads: int
    peak: int


def steady(rank: int, world_size: int, directory: str, *, slowly: bool, changes: Changes) -> Steady:
    """The second step of a run with its state in host memory."""
    layout: runs.Layout = (1, 1, world_size)
    config = runs.make_config(layout, directory, device="pretend", zero_stage=3, **HOST, **changes)
    mesh = build_mesh(config.parallel)
    before = torch.accelerator.memory_allocated()
    trainer = runs.make_trainer(config, mesh)
    trainer.train_step(next(trainer.batches))
    batch = next(trainer.batches)
    torch.accelerator.reset_peak_memory_stats()
    with slow() if slowly else nullcontext(), counting() as counted:
        trainer.train_step(batch)
    peak = torch.accelerator.max_memory_allocated() - before
    buckets = trainer.model.data_parallel.buckets
    return Steady(
        waits=Counter(cause.rpartition(" in ")[2] for cause in counted.sync_causes),
        up=counted.bytes_to_device,
        down=counted.bytes_to_host,
        params=sum(bucket._shard_params.nbytes for bucket in buckets),
        grads=4 * sum(bucket.layout.shard_size for bucket in buckets),
        peak=peak,
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_waits_once_and_holds_what_is_planned(replicas: int, tmp_path: Path) -> None:
    """Of two microbatches: parameters travel before each forward and backward; the sum of gradients to the host and,
    before the second, back; for the norm once more. A part of the parameters is checked."""
    shape = {"hidden_size": 128, "num_layers": 8, "micro_batch_size": 2, "global_batch_size": 4 * replicas}
    work = partial(steady, slowly=False, changes=shape | BF16)
    config = runs.make_config((1, 1, replicas), tmp_path, zero_stage=3, kernels="torch", **HOST, **shape, **BF16)
    (planned,) = traced(config, outline(config), on_cpu=False)
    for found in run_distributed(work, replicas, str(tmp_path), backend="pretend", init=replicas > 1):
        assert found.waits == {"to_host": 1}
        assert found.up == pytest.approx(4 * found.params + 2 * found.grads + found.params / 16, rel=0.01)
        assert found.down == pytest.approx(2 * found.grads, rel=0.01)
        assert found.peak == pytest.approx(planned.expected_tensors, rel=0.1)  # copies keep memory a little longer


def test_the_host_waits_once_and_for_gradients_that_it_updates(tmp_path: Path) -> None:
    """Where copies are done before anybody asks for them, for the decision alone. test_trace.py counts the bytes."""
    work = partial(steady, changes=BF16 | {"num_layers": 2})
    soon, late = (alone(partial(work, slowly=is_slow), str(tmp_path / f"{is_slow}")) for is_slow in (False, True))
    assert soon.waits == {"to_host": 1}
    assert late.waits.keys() <= {"to_host", "downloaded", "wait_for_reads"}
    assert late.waits["to_host"] == 1


def rolled_back(rank: int, world_size: int, directory: str, changes: Changes) -> list[tuple[Any, dict[str, Any]]]:
    """Losses and state of a run with a spike, which is rolled back, on the device and in host memory."""
    found = []
    for where in ({}, HOST):
        losses, guard = Losses(), SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
        options = {"device": "pretend", "zero_stage": 3, "num_layers": 1, **changes, **where}
        output = Path(directory, str(len(where)))
        run = trainer_on(None, (1, 1, world_size), output, Text(POISON), losses, guard, **options)
        run.run()
        run.saving.finish()
        assert run.step == STEPS
        assert len(run.rollbacks.done) == 1
        assert losses.skipped == [10]
        found.append((losses.by_step, state_of(run)))
    return found


def test_a_rollback_gives_the_bits_of_stage_3_on_the_device(tmp_path: Path) -> None:
    ((plain, on_host),) = run_distributed(
        rolled_back, 1, str(tmp_path), BF16 | {"clip_grad": 0.0}, backend="pretend", timeout=120
    )
    assert on_host[0] == plain[0]
    assert on_host[1].keys() == plain[1].keys()
    assert not [name for name, value in plain[1].items() if not torch.equal(on_host[1][name], value)]


def resumed(rank: int, world_size: int, directory: str, changes: list[Changes]) -> tuple[list[float], dict[str, Any]]:
    """A step with each of these, where each goes on from the checkpoint of the one before: losses and weights."""
    losses = []
    for number, one in enumerate(changes):
        load = {} if number == 0 else {"load": f"{directory}/{number - 1}"}
        common = {"num_layers": 1, "train_iters": 3, "reproducible": True, "zero_stage": 3, "micro_batch_size": 1}
        common |= {"global_batch_size": 4}
        config = runs.make_config(
            (1, 1, world_size), f"{directory}/{number}", device="pretend", **common, **load, **one
        )
        compute_reproducibly()
        mesh = build_mesh(config.parallel)
        trainer = runs.make_trainer(config, mesh)
        losses.append(float(trainer.train_step(next(trainer.batches)).loss))
        trainer.save()
    return losses, runs.gather(trainer, mesh, lambda owned: owned.master)


def test_checkpoints_go_from_host_to_device_and_back(tmp_path: Path) -> None:
    """With exact sums, bitwise, on another number of replicas too."""
    on_two = run_distributed(resumed, 2, str(tmp_path / "a"), [HOST, {}, HOST], backend="pretend")[0]
    on_one = alone(resumed, str(tmp_path / "b"), [{}, {}, {}])
    assert on_two[0] == on_one[0]
    assert not runs.differences(on_two[1], on_one[1])
