"""What ranks hold: between steps what the formulas say; for a moment no more than ZeRO promises. What
they hold while a run is built is in tests/accelerator/test_memory.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megacore.parallel.mesh import build_mesh
from megacore.plan.state import state_bytes
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from megacore.zero.bucket import Bucket, Member
from megacore.zero.data_parallel import DataParallel
from megacore.zero.memory import measured_bytes
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer, trainer_of

Changes = dict[str, Any]
STAGES: list[Changes] = [{"zero_stage": s, "precision": precision} for s in range(4) for precision in ("fp32", "bf16")]
MIXTURE: Changes = {"num_experts": 8, "activation": "swiglu", "disable_bias_linear": True, "num_layers": 2, "ep": 2}
SHARDS: Changes = {"zero_shard_size": 2, "num_layers": 2}
KEPT: list[Changes] = [{"moments_dtype": "bf16"}, {"moments_dtype": "int8"}, {"ema_decay": 0.7}]
USUAL: list[Changes] = [
    *({"zero_stage": s, "precision": ("fp32", "bf16")[s % 2], "num_layers": 2} for s in range(4)),
    {"zero_stage": 2, **SHARDS},
    {"zero_stage": 1, **MIXTURE},
    *({"zero_stage": s, "precision": "bf16", "num_layers": 2, "lora_rank": 8} for s in (1, 3)),
]
CASES: dict[int, list[Changes]] = {  # by the number of ranks
    1: [*STAGES, *KEPT],
    2: STAGES,
    4: [*STAGES, *({"zero_stage": s, **SHARDS} for s in (1, 2, 3)), *({"zero_stage": s, **MIXTURE} for s in range(4))],
    8: STAGES,
}
Held = tuple[dict[str, int], dict[str, float]]  # measured, predicted


def bytes_held(rank: int, dp: int, directory: str, cases: list[Changes]) -> list[Held]:
    """What a rank holds after a step."""
    found = []
    for changes in cases:
        trainer = trainer_of((1, 1, dp), directory, **{"hidden_size": 64, "micro_batch_size": 1, **changes})
        trainer.train_step(next(trainer.batches))
        measured = measured_bytes(trainer.model.data_parallel, trainer.update.optimizer)
        found.append((measured, trainer.metrics.predicted_memory))
        trainer.model.data_parallel.ready()
    return found


@pytest.mark.parametrize(
    ("dp", "cases"),
    [(1, KEPT), (4, USUAL), *(pytest.param(*item, marks=pytest.mark.slow) for item in CASES.items())],
    ids=str,
)
def test_measured_is_predicted(dp: int, cases: list[Changes], tmp_path: Path) -> None:
    for found in run_distributed(bytes_held, dp, str(tmp_path), cases, timeout=180, stay=True):
        for changes, (measured, predicted) in zip(cases, found, strict=True):
            for kind, expected in predicted.items():
                assert measured[kind] == pytest.approx(expected, rel=0.03), (changes, kind)


@pytest.mark.parametrize("stage, expected", [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_sixteen_bits_by_hand(stage: int, expected: float) -> None:
    """The published bytes a parameter, with fp32 gradients, at eight ranks."""
    config = make_config((1, 1, 8), "output", zero_stage=stage, precision="bf16")
    assert sum(state_bytes(1, config).values()) == pytest.approx(expected)


# ---- for a moment


@dataclass
class Peaks:
    """Bytes seen so far, and the bytes of this stage's parts in fp32.

    Attributes:
        parameters: most bytes of gathered parameters at once.
        gradients: most bytes of whole gradients at once, filled or under reduction.
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

    def look(self, data_parallel: DataParallel) -> None:
        """Note what is held now."""
        reducing = [bucket.reducing[2] for bucket in data_parallel.buckets if bucket.reducing is not None]
        filling = [bucket.full_gradients for bucket in data_parallel.buckets]
        whole = sum(g.untyped_storage().nbytes() for g in (*filling, *reducing) if g is not None)
        self.left = sum(bucket.full_params.untyped_storage().nbytes() for bucket in data_parallel.buckets)
        self.parameters, self.gradients = max(self.parameters, self.left), max(self.gradients, whole)
        self.reductions = max(self.reductions, len(reducing))


@contextmanager
def watched(data_parallel: DataParallel, peaks: Peaks) -> Iterator[None]:
    """Look after everything that gathers or lets go of parameters, or that fills or reduces gradients."""

    def watching(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            peaks.look(data_parallel)
            return result

        return call

    with ExitStack() as stack:
        for name in ("prefetch", "wait", "release", "add", "reduce", "finish_reduction"):
            stack.enter_context(mock.patch.object(Bucket, name, watching(getattr(Bucket, name))))
        yield


MOMENTS: list[Changes] = [*({"zero_stage": s} for s in (1, 2, 3)), {"zero_stage": 3, "recompute": "full"}]


def peaks_of(rank: int, world_size: int, layout: Layout, directory: str) -> list[Peaks]:
    found = []
    for changes in MOMENTS:
        config = make_config(layout, directory, micro_batch_size=1, **changes)
        trainer, peaks = make_trainer(config, build_mesh(config.parallel)), Peaks()
        data_parallel = trainer.model.data_parallel
        with watched(data_parallel, peaks):
            for _ in range(2):
                trainer.train_step(next(trainer.batches))
        peaks.look(data_parallel)
        sizes = {id(bucket): 4 * bucket.layout.size for bucket in data_parallel.buckets}
        peaks.layers = [sum(sizes[id(bucket)] for bucket in layer.buckets) for layer in data_parallel.layers]
        peaks.buckets = list(sizes.values())
        found.append(peaks)
        data_parallel.ready()
    return found


@pytest.mark.parametrize("layout", [(1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_zero_holds_little_for_a_moment(layout: Layout, tmp_path: Path) -> None:
    """On stage 3 the parameters of two layers at most, on stages 2 and 3 the whole gradients of two buckets (one being
    filled, one being reduced), and one reduction is under way at a time: each has memory for the other ranks' terms."""
    for of_rank in run_distributed(peaks_of, 2 * layout[1], layout, str(tmp_path), timeout=120, stay=True):
        for changes, peaks in zip(MOMENTS, of_rank, strict=True):
            assert len(peaks.buckets) > 3 and peaks.reductions == 1, changes
            if changes["zero_stage"] >= 2:
                assert max(peaks.buckets) <= peaks.gradients <= sum(sorted(peaks.buckets)[-2:]), changes
            if changes["zero_stage"] == 3:
                neighbours = [one + other for one, other in zip(peaks.layers, peaks.layers[1:], strict=False)]
                assert max(peaks.layers) <= peaks.parameters <= max(neighbours) < sum(peaks.layers), changes
                assert peaks.left == 0, changes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_dropped_frees_its_memory_at_once(precision: str, tmp_path: Path) -> None:
    """Without the collector of cycles, which comes at any time."""
    config = make_config((1, 1, 1), tmp_path, precision=precision)
    mesh = build_mesh(config.parallel)
    step = TrainStep(GPTTask(config, mesh), config, mesh)
    parameter = weakref.ref(next(iter(step.model.parameters.values())))
    gc.disable()
    try:
        del step
        assert parameter() is None
    finally:
        gc.enable()


def test_no_gradient_is_left_when_its_bucket_is_reduced(tmp_path: Path) -> None:
    """The one that completes a bucket may be the largest; the reduction takes memory."""
    trainer = trainer_of((1, 1, 1), tmp_path, precision="bf16")
    added: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def add(bucket: Bucket, member: Member, gradient: Tensor, *, real: Any = Bucket.add) -> None:
        added.append(weakref.ref(gradient))
        real(bucket, member, gradient)

    def reduce(bucket: Bucket, *, real: Any = Bucket.reduce) -> None:
        left.append(sum(gradient() is not None for gradient in added))
        real(bucket)

    with mock.patch.object(Bucket, "add", add), mock.patch.object(Bucket, "reduce", reduce):
        trainer.train_step(next(trainer.batches))
    assert len(added) > len(left) > 3 and not any(left)
