"""What ZeRO holds for a moment: on stage 3 the parameters of two layers at most, and on stages 2 and 3 the whole
gradients of two buckets at most (one being filled, one being reduced). On stages 1 to 3 one reduction is under way at a
time on a CPU, where each has memory for the other ranks' terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh
from megacore.zero.bucket import Bucket
from megacore.zero.data_parallel import DataParallel
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer


@dataclass
class Peaks:
    """Bytes seen so far, and the bytes of this stage's parts in fp32.

    Attributes:
        parameters: most bytes of gathered parameters at once.
        gradients: most bytes of whole gradients at once.
        reductions: most reductions under way at once.
        left: bytes of gathered parameters after the step.
        layers: bytes of the parameters that each layer needs.
        buckets: bytes of each bucket.
    """

    parameters: int = 0
    gradients: int = 0
    reductions: int = 0
    left: int = 0
    layers: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)


def gathered(data_parallel: DataParallel) -> int:
    return sum(bucket._full.untyped_storage().nbytes() for bucket in data_parallel.buckets)


def whole_gradients(data_parallel: DataParallel) -> int:
    """Those being filled and those under reduction."""
    total = 0
    for bucket in data_parallel.buckets:
        held = [bucket._gradients, None if bucket._reducing is None else bucket._reducing[2]]
        total += sum(g.untyped_storage().nbytes() for g in held if g is not None)
    return total


def watch(data_parallel: DataParallel, peaks: Peaks) -> None:
    """Look after everything that gathers or lets go of parameters, or that fills or reduces gradients."""

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            peaks.parameters = max(peaks.parameters, gathered(data_parallel))
            peaks.gradients = max(peaks.gradients, whole_gradients(data_parallel))
            under_way = sum(bucket._reducing is not None for bucket in data_parallel.buckets)
            peaks.reductions = max(peaks.reductions, under_way)
            return result

        return call

    for name in ("prefetch", "wait", "release", "add", "reduce", "finish_reduction"):
        setattr(Bucket, name, watched(getattr(Bucket, name)))


def peaks_of(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> Peaks:
    config = make_config(layout, directory, micro_batch_size=1, **changes)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    data_parallel, peaks = trainer.model.data_parallel, Peaks()
    watch(data_parallel, peaks)
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    sizes = {id(bucket): 4 * bucket.layout.size for bucket in data_parallel.buckets}
    peaks.left = gathered(data_parallel)
    peaks.layers = [sum(sizes[id(bucket)] for bucket in needs) for needs in data_parallel._needs]
    peaks.buckets = list(sizes.values())
    return peaks


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_stage_3_gathers_two_layers_at_most(
    layout: Layout, recompute: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tp, pp, dp = layout
    directory = str(tmp_path_factory.mktemp("run"))
    changes = {"zero_stage": 3, "recompute": recompute}
    for peaks in run_distributed(peaks_of, tp * pp * dp, layout, directory, changes):
        neighbours = [one + other for one, other in zip(peaks.layers, peaks.layers[1:], strict=False)]
        assert max(peaks.layers) <= peaks.parameters <= max(neighbours)
        assert peaks.parameters < sum(peaks.layers)
        assert peaks.left == 0


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_two_buckets_gradients_are_whole_at_most(
    layout: Layout, stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tp, pp, dp = layout
    directory = str(tmp_path_factory.mktemp("run"))
    for peaks in run_distributed(peaks_of, tp * pp * dp, layout, directory, {"zero_stage": stage}):
        assert len(peaks.buckets) > 3
        assert max(peaks.buckets) <= peaks.gradients <= sum(sorted(peaks.buckets)[-2:])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_one_reduction_is_under_way_at_a_time(
    layout: Layout, stage: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tp, pp, dp = layout
    directory = str(tmp_path_factory.mktemp("run"))
    for peaks in run_distributed(peaks_of, tp * pp * dp, layout, directory, {"zero_stage": stage}):
        assert len(peaks.buckets) > 3
        assert peaks.reductions == 1
