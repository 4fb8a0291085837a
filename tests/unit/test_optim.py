"""Learning rates by hand, the norm against fp64, and which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch

from megacore.config import OptimizerConfig
from megacore.optim.lr_schedules import learning_rate
from megacore.optim.optimizer import scale_gradients
from megacore.optim.update import SquareSum, clip_factor, totals
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.zero.data_parallel import DataParallel
from megacore.zero.layout import FlatLayout, assign_buckets
from megacore.zero.options import ZeroOptions

ALONE = Mesh(device=torch.device("cpu"))


def rate(step: int, **changes: object) -> float:
    return learning_rate(step, OptimizerConfig(lr=0.1, min_lr=0.01, **changes), train_iters=1000)  # type: ignore[arg-type]


def parameter(*shape: int, name: str = "p") -> ShardedParameter:
    return ShardedParameter(torch.zeros(shape), ShardSpec(name=name, shape=shape))


MIDDLE = 0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    "style, step, expected",
    [("linear", 550, 0.055), ("linear", 1000, 0.01), ("linear", 5000, 0.01), ("cosine", 550, 0.055),
     ("cosine", 325, MIDDLE), ("cosine", 1000, 0.01), ("constant", 999, 0.1), ("inverse-square-root", 400, 0.05),
     ("inverse-square-root", 100_000_000, 0.01)],
)  # fmt: skip
def test_decay_by_hand(style: str, step: int, expected: float) -> None:
    assert rate(step, lr_decay_style=style, lr_warmup_iters=100) == pytest.approx(expected)


def test_rates_of_the_first_steps() -> None:
    assert rate(4, lr_decay_style="inverse-square-root") == pytest.approx(0.05), "no warm-up is as long as one step"
    assert rate(10, lr_warmup_style="log", lr_warmup_iters=100) == pytest.approx(0.05)


EXPONENTIAL, ROOT = 0.01 + 0.09 * (2 / math.sqrt(2) - 1), 0.01 + 0.09 * (1 - math.sqrt(0.5))


@pytest.mark.parametrize(
    "style, half", [("linear", 0.055), ("cosine", 0.055), ("exponential", EXPONENTIAL), ("minus_sqrt", ROOT)]
)
def test_wsd_holds_then_decays(style: str, half: float) -> None:
    changes = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 200, "lr_wsd_decay_style": style, "lr_warmup_iters": 100}
    found = [rate(step, **changes) for step in (100, 800, 900, 1000)]
    assert found == pytest.approx([0.1, 0.1, half, 0.01])


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3_000_001])
def test_square_sum_is_that_of_double_precision(size: int) -> None:
    values, found = torch.randn(size, generator=torch.Generator().manual_seed(size)), SquareSum()
    expected = 4 * values.double().square().sum().item()
    found.add(values.clone())
    found.add(values, weight=3)
    values.zero_()
    assert float(found.value()) == pytest.approx(expected, rel=3e-7)
    assert SquareSum().value() == 0.0


class Layer(torch.nn.Module):
    """A matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameter(3, 4, name="w"), parameter(5, name="b")


def data_parallel(layer: Layer) -> DataParallel:
    return DataParallel([[layer]], ALONE, options=ZeroOptions(), bucket_bytes=1 << 20)


def test_norm_and_clipping_are_torchs() -> None:
    layer, theirs = Layer(), [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5))]
    segments = data_parallel(layer).segments
    for mine, other in zip((layer.weight, layer.bias), theirs, strict=True):
        other.grad = torch.randn(other.shape)
        mine.grad = other.grad.clone()
    norm = totals(segments, ALONE).norm
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.3)
    scale_gradients([owned.gradient for owned in segments if owned.gradient is not None], clip_factor(norm, 0.3))
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, other in zip((layer.weight, layer.bias), theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_loss_that_is_not_finite_poisons_the_norm_and_votes_travel_with_it() -> None:
    for poison in (math.inf, math.nan):
        assert not totals([], ALONE, loss=poison).norm.isfinite()
        assert not totals([], ALONE, overflow=poison).norm.isfinite()
    loss = torch.tensor([math.nan, 2.0])
    found = totals([], ALONE, loss=loss, votes=[0, 1, 3]).to_host()
    assert found.votes.tolist() == [0, 1, 3]
    assert found.loss.isfinite().tolist() == [False, True]
    assert totals([], ALONE, loss=1.0, votes=[0, 1, 3]).norm == 0.0


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [100, 1, 1, 50], [95 * 95] * 3])
def test_shards_hold_every_element_exactly_once(sizes: list[int], shards: int) -> None:
    layout = FlatLayout([parameter(n, name=str(i)) for i, n in enumerate(sizes)], shards)
    assert layout.size == layout.shard_size * shards
    found: dict[str, list[int]] = {str(i): [] for i in range(len(sizes))}
    for shard in range(shards):
        for segment in layout.segments(shard):
            assert 0 <= segment.shard_slice.start < segment.shard_slice.stop <= layout.shard_size
            flat = layout.slice_of(segment.name).start + segment.start
            assert shard * layout.shard_size + segment.offset == flat
            found[segment.name] += range(segment.start, segment.stop)
    assert [found[str(i)] for i in range(len(sizes))] == [list(range(n)) for n in sizes]


@pytest.mark.parametrize("limit, sizes", [(1, [1] * 6), (80, [2, 2, 2]), (1000, [6])])
def test_buckets_are_filled_in_reverse_and_hold_everything_once(limit: int, sizes: list[int]) -> None:
    parameters = [parameter(10, name=str(i)) for i in range(6)]  # 40 bytes each
    buckets = assign_buckets(parameters, {"replicas": limit})
    assert [len(bucket) for bucket in buckets] == sizes
    assert [p.spec.name for bucket in buckets for p in bucket] == ["5", "4", "3", "2", "1", "0"]


def test_the_mean_loss_has_the_count_of_each_sum() -> None:
    """As of BERT's two losses, whose counts differ."""
    sums, per_count = torch.tensor([6.0, 4.0]), torch.tensor([0.5, 0.25], dtype=torch.float64)
    assert totals([], ALONE, loss=sums, per_count=per_count).mean == 4.0
