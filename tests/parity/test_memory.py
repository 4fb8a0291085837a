"""What ranks hold: between steps what the formulas say; for a moment no more than ZeRO promises; and while a run is
built on ZeRO-3 one whole layer at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megacore.config import ParallelConfig
from megacore.models.plain import Layer
from megacore.parallel.mesh import build_mesh
from megacore.plan.state import state_bytes
from megacore.train.engine import PipelineEngine
from megacore.train.trainer import Trainer
from megacore.zero.bucket import Bucket
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
    for found in run_distributed(bytes_held, dp, str(tmp_path), cases, timeout=180):
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
        reducing = [bucket._reducing[2] for bucket in data_parallel.buckets if bucket._reducing is not None]
        filling = [bucket._gradients for bucket in data_parallel.buckets]
        whole = sum(g.untyped_storage().nbytes() for g in (*filling, *reducing) if g is not None)
        self.left = sum(bucket._full.untyped_storage().nbytes() for bucket in data_parallel.buckets)
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
        peaks.layers = [sum(sizes[id(bucket)] for bucket in needs) for needs in data_parallel._needs]
        peaks.buckets = list(sizes.values())
        found.append(peaks)
        data_parallel.ready()
    return found


@pytest.mark.parametrize("layout", [(1, 1, 2), pytest.param((1, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_zero_holds_little_for_a_moment(layout: Layout, tmp_path: Path) -> None:
    """On stage 3 the parameters of two layers at most, on stages 2 and 3 the whole gradients of two buckets (one being
    filled, one being reduced), and one reduction is under way at a time: each has memory for the other ranks' terms."""
    for of_rank in run_distributed(peaks_of, 2 * layout[1], layout, str(tmp_path), timeout=120):
        for changes, peaks in zip(MOMENTS, of_rank, strict=True):
            assert len(peaks.buckets) > 3 and peaks.reductions == 1, changes
            if changes["zero_stage"] >= 2:
                assert max(peaks.buckets) <= peaks.gradients <= sum(sorted(peaks.buckets)[-2:]), changes
            if changes["zero_stage"] == 3:
                neighbours = [one + other for one, other in zip(peaks.layers, peaks.layers[1:], strict=False)]
                assert max(peaks.layers) <= peaks.parameters <= max(neighbours) < sum(peaks.layers), changes
                assert peaks.left == 0, changes


# ---- while a run is built: torch's profiler counts what the allocator gives and takes

SMALL = 1 << 16  # bytes: seeds, numbers that ranks agree on, blocks of random values
SIZES: Changes = {"hidden_size": 128, "num_attention_heads": 4, "num_layers": 12}


@dataclass(frozen=True)
class Built:
    """Bytes: most at once while building, what is left afterwards, the largest layer and the whole stage in fp32."""

    peak: int
    kept: int
    layer: int
    stage: int


def held_while(build: Callable[[], Trainer | PipelineEngine]) -> Built:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        built = build()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels = [0, *accumulate(changes)]
    layers = [4 * sum(bucket.layout.size for bucket in needs) for needs in built.model.data_parallel._needs]
    return Built(peak=max(levels), kept=levels[-1], layer=max(layers), stage=sum(layers))


def builds(rank: int, world_size: int, directory: str, saved: str) -> list[Built]:
    """From the seed and from a checkpoint, in 32 and 16 bits; and layers that come with their values."""
    found = []
    for load, precision in product((None, saved), ("fp32", "bf16")):
        changes = {"zero_stage": 3, "precision": precision, "load": load, "micro_batch_size": 1, **SIZES}
        config = make_config((1, 1, world_size), directory, **changes)
        found.append(held_while(partial(make_trainer, config, build_mesh(config.parallel))))
    layers = [Layer(str(number), nn.Linear, 256, 256) for number in range(6)]
    parallel = ParallelConfig(dp=world_size, zero_stage=3, device="cpu")
    engine = partial(PipelineEngine, layers, loss=nn.MSELoss(), train_iters=1, parallel=parallel)
    return [*found, held_while(engine)]


def save_one(rank: int, world_size: int, directory: str) -> None:
    trainer = trainer_of((1, 1, 1), directory, **SIZES)
    trainer.train_step(next(trainer.batches))
    trainer.save()


def test_a_run_is_built_and_loaded_layer_by_layer(tmp_path: Path) -> None:
    run_distributed(save_one, 1, str(tmp_path / "saved"))
    for of_rank in run_distributed(builds, 4, str(tmp_path / "run"), str(tmp_path / "saved")):
        for held in of_rank:
            allowed = held.kept + held.layer + SMALL
            assert 0 < held.peak <= allowed, held
            assert allowed < held.stage, "a whole stage in fp32 must not be allowed"
