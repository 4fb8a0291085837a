"""Every optimizer against torch.optim or its paper's formula in fp64, for twenty steps; updates, schedules."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megacore import config
from megacore.commands.lr_range import PICTURE, TABLE
from megacore.commands.pretrain_gpt import train
from megacore.config import OptimizerConfig, OptimizerSettings
from megacore.config.optimizers import MuonConfig
from megacore.config.rampup import BatchSizes, Ramp
from megacore.optim.lr_schedules import learning_rate, momentum, weight_decay
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.optim.update import SquareSum, clip_factor, totals
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.zero.data_parallel import DataParallel
from megacore.zero.layout import FlatLayout, assign_buckets, assign_whole
from megacore.zero.options import ZeroOptions
from megacore.zero.packing import least_shard, pack
from tests.parity.runs import make_config
from tests.unit.refusals import GOOD, parse
from tools import draw_lr

STEPS, LR, DECAY = 20, 1e-2, 0.1
SHAPES = {
    "embedding.tokens.weight": (11, 6), "blocks.0.up.weight": (12, 6), "blocks.0.up.bias": (12,),
    "blocks.0.attention.qkv.weight": (18, 6), "blocks.0.down.weight": (6, 12), "blocks.0.norm.weight": (6,),
}  # fmt: skip
ADAM = config.AdamWConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
Weights = dict[str, Tensor]
Reference = Callable[[Weights, list[Weights]], None]


class Parameters(torch.nn.Module):
    """A layer with the parameters of SHAPES."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for number, (name, value) in enumerate(weights.items()):
            spec = ShardSpec(name=name, shape=tuple(value.shape))
            self.register_parameter(f"p{number}", ShardedParameter(value.float().clone(), spec))


def drawn(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}


def updated(
    settings: OptimizerSettings, weights: Weights, gradients: list[Weights], *, dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Weights:  # fmt: skip
    """The weights after megacore's updates, from gradients of a dtype that are clipped by a factor."""
    alone = Mesh(device=torch.device("cpu"))
    options = ZeroOptions(optimizer=settings, compute_dtype=dtype, reduce_dtype=dtype)
    data_parallel = DataParallel([[Parameters(weights)]], alone, options=options, bucket_bytes=1 << 20)
    kind = OPTIMIZER_CLASSES[type(settings)]
    optimizer = kind(data_parallel.runs, settings, weight_decay=DECAY, adam=ADAM)
    run = make_config((1, 1, 1), "output", hidden_size=6, num_attention_heads=2)
    optimizer.attach(data_parallel.segments, alone, run)
    for of_step in gradients:
        for bucket in data_parallel.in_order_of_use():
            runs = bucket.runs
            for parameter in bucket.parameters:
                parameter.grad = of_step[parameter.spec.name].to(dtype).clone()
            flat = [None if (gradient := run.gradient) is None else gradient.float() for run in runs]
            with torch.no_grad():
                optimizer.step(runs, flat, lr=LR, factor=torch.full((), factor))
        optimizer.finish()
    return {local.spec.name: local.master.view(local.spec.shape).clone() for local in data_parallel.segments}


def torchs(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Reference:
    """An optimizer of torch.optim; vectors do not decay."""

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        matrices = [weight for weight in weights.values() if weight.dim() > 1]
        vectors = [weight for weight in weights.values() if weight.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make(groups, lr=LR, weight_decay=DECAY, **options)
        for of_step in gradients:
            for name, weight in weights.items():
                weight.grad = of_step[name].clone()
            optimizer.step()

    return reference


def decay_of(weight: Tensor) -> float:
    return DECAY if weight.dim() > 1 else 0.0


def lion(weights: Weights, gradients: list[Weights]) -> None:
    """Chen et al. 2023, algorithm 2."""
    for name, weight in weights.items():
        momentum = torch.zeros_like(weight)
        for of_step in gradients:
            direction = torch.sign(0.8 * momentum + 0.2 * of_step[name])
            weight -= LR * (direction + decay_of(weight) * weight)
            momentum = 0.95 * momentum + 0.05 * of_step[name]


def lamb(least: float, most: float) -> Reference:
    """You et al. 2020, algorithm 2, with limits of the trust ratio; vectors and matrices of zeros have the ratio 1."""

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        for name, weight in weights.items():
            mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
            for number, of_step in enumerate(gradients, start=1):
                mean = 0.8 * mean + 0.2 * of_step[name]
                square = 0.95 * square + 0.05 * of_step[name] ** 2
                r = mean / (1 - 0.8**number) / ((square / (1 - 0.95**number)).sqrt() + 1e-6)
                step = r + decay_of(weight) * weight
                has_ratio = weight.dim() > 1 and weight.any()
                ratio = min(max(float(weight.norm() / step.norm()), least), most) if has_ratio else 1.0
                weight -= LR * ratio * step

    return reference


def iterated(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return iterated(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def muon(scale: Callable[[int, int], float]) -> Reference:
    """Liu et al. 2025, section 2; in the projection of queries, keys and values a matrix is that of one head."""
    heads = [slice(start, start + 3) for start in range(0, 18, 3)]

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        for name, weight in weights.items():
            if not name.startswith("blocks.") or weight.dim() == 1:
                ADAMW({name: weight}, gradients)
                continue
            momentum = torch.zeros_like(weight)
            for of_step in gradients:
                momentum = 0.9 * momentum + 0.1 * of_step[name]
                step = torch.empty_like(weight)
                for rows in heads if "qkv" in name else [slice(None)]:
                    matrix = momentum[rows]
                    step[rows] = 0.2 * scale(*matrix.shape) ** 0.5 * iterated(matrix)
                weight *= 1 - LR * DECAY
                weight -= LR * step

    return reference


def torchs_muon(weights: Weights, gradients: list[Weights]) -> None:
    """In fp32, because its iteration is in bf16 and would round otherwise."""
    matrices = {n: w.float() for n, w in weights.items() if n.startswith("blocks.") and w.dim() == 2}
    optimizer = torch.optim.Muon(matrices.values(), lr=LR, weight_decay=DECAY, momentum=0.9)
    for of_step in gradients:
        for name, weight in matrices.items():
            weight.grad = of_step[name].float()
        optimizer.step()
    others = {name: weight for name, weight in weights.items() if name not in matrices}
    ADAMW(others, gradients)
    for name, weight in matrices.items():
        weights[name].copy_(weight)


def torchs_adafactor(eps1: float, eps2: float = 1e-2) -> Reference:
    """The embedding is not factored, as if it were a vector, and decays all the same."""
    options: dict[str, Any] = {"beta2_decay": -0.7, "eps": (eps1, eps2), "d": 1.0}

    def reference(weights: Weights, gradients: list[Weights]) -> None:
        name = "embedding.tokens.weight"
        others = {other: weight for other, weight in weights.items() if other != name}
        torchs(torch.optim.Adafactor, **options)(others, gradients)
        flat = weights[name].view(-1)
        optimizer = torch.optim.Adafactor([flat], lr=LR, weight_decay=DECAY, **options)
        for of_step in gradients:
            flat.grad = of_step[name].reshape(-1)
            optimizer.step()

    return reference


ADAMW = torchs(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6)
SGD: dict[str, Any] = {"sgd_momentum": 0.8}
HEADS: dict[str, Any] = {"muon_momentum": 0.9, "muon_nesterov": False, "muon_split_qkv": "heads"}
FACTORED: dict[str, Any] = {"adafactor_beta2_decay": -0.7, "adafactor_eps2": 1e-2}
FLOORS = {"adafactor_eps1": 0.9, "adafactor_eps2": 2.0}  # above the means of squares, and above the weights
MUON: dict[str, Any] = {"muon_momentum": 0.9, "muon_ns_dtype": "bf16", "muon_scale_mode": "shape_scaling"}
CASES: dict[str, tuple[OptimizerSettings, Reference]] = {
    "adamw": (ADAM, ADAMW),
    "adam": (config.AdamConfig(), torchs(torch.optim.Adam, betas=(0.8, 0.95), eps=1e-6)),
    "sgd": (config.SGDConfig(**SGD), torchs(torch.optim.SGD, momentum=0.8)),
    "nesterov": (config.SGDConfig(**SGD, sgd_nesterov=True), torchs(torch.optim.SGD, momentum=0.8, nesterov=True)),
    "sgd-plain": (config.SGDConfig(sgd_momentum=0.0), torchs(torch.optim.SGD)),
    "lamb": (config.LambConfig(), lamb(0.0, math.inf)),
    "lamb-limits": (config.LambConfig(lamb_min_coeff=0.5, lamb_max_coeff=1.1), lamb(0.5, 1.1)),
    "muon": (config.MuonConfig(**HEADS), muon(max)),
    "muon-rms": (config.MuonConfig(**HEADS, muon_scale_mode="unit_rms_norm"), muon(operator.truediv)),
    "muon-torch": (config.MuonConfig(**MUON, muon_extra_scale_factor=1.0, muon_split_qkv="none"), torchs_muon),
    "adafactor": (config.AdafactorConfig(**FACTORED), torchs_adafactor(1e-7)),
    "adafactor-floor": (config.AdafactorConfig(**FACTORED | FLOORS), torchs_adafactor(0.9, 2.0)),
    "lion": (config.LionConfig(lion_beta1=0.8, lion_beta2=0.95), lion),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_an_independent_implementation(case: str) -> None:
    settings, reference = CASES[case]
    weights, gradients = drawn(0), [drawn(step) for step in range(1, STEPS + 1)]
    weights["blocks.0.down.weight"].zero_()
    found = updated(settings, weights, gradients)
    expected = {name: value.clone() for name, value in weights.items()}
    with torch.no_grad():
        reference(expected, gradients)
    for name, value in expected.items():
        assert not torch.equal(value, weights[name]), name
        error = (found[name].double() - value).abs().max() / value.abs().max()
        assert error <= 1e-6, f"{name}: {error}"


def test_adafactor_takes_the_same_steps_from_gradients_in_16_bits() -> None:
    weights = drawn(0)
    gradients = [{name: value.bfloat16() for name, value in drawn(step).items()} for step in range(1, STEPS + 1)]
    found, expected = (
        updated(config.AdafactorConfig(), weights, gradients, dtype=dtype, factor=0.3)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_every_optimizer_is_compared() -> None:
    elsewhere = {config.OneBitAdamConfig, config.OneBitLambConfig}  # tests/parity/test_precision.py
    assert {type(settings) for settings, _ in CASES.values()} == set(OPTIMIZER_CLASSES) - elsewhere


# ---- groups, clipping and updates ------------------------------------------------------------------------------------

ALONE = Mesh(device=torch.device("cpu"))


def rate(step: int, **changes: object) -> float:
    return learning_rate(step, OptimizerConfig(lr=0.1, min_lr=0.01, **changes), train_iters=1000)  # type: ignore[arg-type]


def parameter(*shape: int, name: str = "p") -> ShardedParameter:
    return ShardedParameter(torch.zeros(shape), ShardSpec(name=name, shape=shape))


@pytest.mark.parametrize(
    "style, step, expected",
    [("linear", 550, 0.055), ("linear", 5000, 0.01), ("cosine", 550, 0.055), ("constant", 999, 0.1),
     ("inverse-square-root", 400, 0.05), ("inverse-square-root", 100_000_000, 0.01)],
)  # fmt: skip
def test_decay_by_hand(style: str, step: int, expected: float) -> None:
    assert rate(step, lr_decay_style=style, lr_warmup_iters=100) == pytest.approx(expected)


def test_rates_of_the_first_steps() -> None:
    assert rate(4, lr_decay_style="inverse-square-root") == pytest.approx(0.05), "no warm-up is as long as one step"


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


def test_a_loss_that_is_not_finite_poisons_the_norm_and_votes_travel_with_it() -> None:
    for poison in (math.inf, math.nan):
        assert not totals([], ALONE, loss=poison).norm.isfinite()
        assert not totals([], ALONE, overflow_poison=poison).norm.isfinite()
    loss = torch.tensor([math.nan, 2.0])
    found = totals([], ALONE, loss=loss, votes=[0, 1, 3]).to_host()
    assert found.votes.tolist() == [0, 1, 3]
    assert found.loss.isfinite().tolist() == [False, True]
    assert totals([], ALONE, loss=1.0, votes=[0, 1, 3]).norm == 0.0
    # A small norm, and a limit of 0, change nothing.
    assert [float(clip_factor(torch.tensor(2.0), x)) for x in (10.0, 0.0, 0.5)] == pytest.approx([1.0, 1.0, 0.25])


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


# ---- schedules -------------------------------------------------------------------------------------------------------

TOTAL = 40


def rates(**changes: Any) -> list[float]:
    config = OptimizerConfig(lr=0.1, **{"min_lr": 0.0, **changes})
    return [learning_rate(step, config, train_iters=TOTAL) for step in range(1, TOTAL + 1)]


def torchs_rates(scheduler: Any, **options: Any) -> tuple[list[float], list[float]]:
    """The rates and momenta that a scheduler of torch gives to SGD."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.95)
    schedule = scheduler(optimizer, **options)
    found = []
    for _ in range(TOTAL):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.step()
    return [rate for rate, _ in found], [value for _, value in found]


@pytest.mark.parametrize(("style", "theirs"), [("cosine", "cos"), ("linear", "linear")])
def test_1cycle_is_torchs_with_its_momentum(style: str, theirs: str) -> None:
    options: dict[str, Any] = {"max_lr": 0.1, "total_steps": TOTAL + 1, "pct_start": 12 / (TOTAL + 1)}
    options |= {"final_div_factor": 1e9, "anneal_strategy": theirs}
    # torch ends one step later than it counts: its last of T steps is number T - 1 from 0.
    expected, momenta = torchs_rates(torch.optim.lr_scheduler.OneCycleLR, **options, max_momentum=0.95)
    changes: dict[str, Any] = {"lr_decay_style": "1cycle", "lr_warmup_iters": 12, "lr_cycle_style": style}
    changes["lr_decay_iters"] = TOTAL + 1
    assert rates(**changes) == pytest.approx(expected, rel=1e-6, abs=1e-11)
    config = OptimizerConfig(lr=0.1, **changes)
    found = [momentum(step, config, usual=0.95, train_iters=TOTAL) for step in range(1, TOTAL + 1)]
    assert found == pytest.approx(momenta, rel=1e-9)


@pytest.mark.parametrize(("factor", "warmup"), [(1, 0), (2, 0), (2, 5)])
def test_restarts_are_torchs(factor: int, warmup: int) -> None:
    options = {"T_0": 6, "T_mult": factor, "eta_min": 0.01}
    expected, _ = torchs_rates(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, **options)
    changes: dict[str, Any] = {"lr_decay_style": "cosine-restarts", "lr_restart_iters": 6, "min_lr": 0.01}
    found = rates(**changes, lr_restart_factor=float(factor), lr_warmup_iters=warmup)
    begin = max(warmup, 1)  # the first update of ours is number 1, that of torch number 0
    assert found[begin - 1 : -1] == pytest.approx(expected[begin - warmup : TOTAL - warmup][: TOTAL - begin], rel=1e-9)
    assert found[-1] == 0.01


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 8])
def test_a_step_has_the_rate_of_megatrons_next_step(style: str, warmup: int) -> None:
    """Megatron-LM's rate depends on the steps before the one that it is for (docs/guides/coming-from-megatron.md)."""
    shape = {"linear": lambda x: 1 - x, "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x))}[style]
    theirs = [0.01 + (0.1 - 0.01) * before / warmup for before in range(warmup)]
    theirs += [0.1 * shape((before - warmup) / (TOTAL - warmup)) for before in range(warmup, TOTAL + 1)]
    first = {"lr_warmup_init": 0.01} if warmup else {}
    ours = rates(lr_decay_style=style, lr_warmup_iters=warmup, **first)
    assert ours == pytest.approx(theirs[1:])
    assert theirs[0] == pytest.approx(0.01 if warmup else 0.1)


def test_polynomial_is_torchs() -> None:
    expected, _ = torchs_rates(torch.optim.lr_scheduler.PolynomialLR, total_iters=TOTAL, power=3.0)
    assert rates(lr_decay_style="polynomial", lr_decay_power=3.0)[:-1] == pytest.approx(expected[1:], rel=1e-9)


LINEAR, COSINE = 0.02 + 0.28 / TOTAL, 0.02 + 0.28 * 0.5 * (1 - math.cos(math.pi / TOTAL))


@pytest.mark.parametrize(
    ("style", "expected"),
    [("constant", [0.1, 0.1, 0.1]), ("linear", [LINEAR, 0.16, 0.3]), ("cosine", [COSINE, 0.16, 0.3])],
)
def test_weight_decay_changes_over_the_run(style: str, expected: list[float]) -> None:
    ends = {} if style == "constant" else {"start_weight_decay": 0.02, "end_weight_decay": 0.3}
    config = OptimizerConfig(weight_decay=0.1, weight_decay_incr_style=style, **ends)  # type: ignore[arg-type]
    assert [weight_decay(step, config, train_iters=TOTAL) for step in (1, TOTAL // 2, TOTAL)] == pytest.approx(expected)


def test_a_range_test_leaves_its_curve_and_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a rate for each step, also of a ramp of the batch."""
    changes: dict[str, Any] = {"lr_range_test": True, "lr_range_test_start": 1e-4, "lr": 10.0, "num_layers": 1}
    changes["rampup_batch_size"] = ("4", "4", "8")
    config = make_config((1, 1, 1), tmp_path, **changes, lr_warmup_iters=0, train_iters=60)
    train(config, Mesh(device=torch.device("cpu")))  # as the entry point does
    rows = (tmp_path / TABLE).read_text(encoding="utf-8").splitlines()[1:]
    expected = [1e-4 * 1e5 ** (i / 59) for i in range(len(rows))]
    assert [float(row.split(",")[0]) for row in rows] == pytest.approx(expected)
    assert 10 < len(rows) < 60, "the loss diverges before the last rate"
    assert "<line" in (tmp_path / PICTURE).read_text(encoding="utf-8")
    assert "range test: the loss falls fastest at a learning rate of" in capsys.readouterr().out


def test_a_picture_has_every_value_that_changes(tmp_path: Path) -> None:
    flags = "--train-iters 50 --lr-warmup-iters 15 --lr-decay-style 1cycle --tp 2 --weight-decay-incr-style linear"
    more = "--lr 6e-5 --start-weight-decay 0 --end-weight-decay 0.1"
    assert draw_lr.main([*flags.split(), *more.split(), "-o", str(tmp_path / "a.svg")]) == 0
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert all(f">{title}<" in text for title in ("learning rate", "weight decay", "momentum", "0.00001", "0.00005"))
    assert text.count("<line") >= 3 * 49
    assert parse(*GOOD).optimizer.lr_decay_style == "cosine"


# ---- ramps of the batch ----------------------------------------------------------------------------------------------

RAMPS = [(1536, 16, 16, 5_859_375), (2048, 192, 16, 9_765_625), (64, 8, 8, 1000), (16, 4, 12, 7), (32, 32, 8, 100)]


def reference(full: int, start: int, increment: int, samples: int, steps: int) -> list[int]:
    """The sizes as Megatron-LM's calculator gives them from the samples consumed so far."""
    increments, consumed, sizes = (full - start) // increment, 0, list[int]()
    for _ in range(steps):
        level = increments if consumed >= samples else consumed * increments // samples
        sizes.append(start + level * increment)
        consumed += sizes[-1]
    return sizes


@pytest.mark.parametrize(("full", "start", "increment", "samples"), RAMPS)
def test_sizes_follow_the_samples(full: int, start: int, increment: int, samples: int) -> None:
    ramp = BatchSizes(full, Ramp(start, increment, samples))
    steps = ramp.steps(samples) + 50
    expected = reference(full, start, increment, samples, steps)
    assert [ramp.of_step(step) for step in range(1, steps + 1)] == expected
    assert expected[-1] == full
    total = 0
    for step, size in enumerate(expected, 1):
        assert ramp.steps(total) == ramp.steps(total + size - 1) == step - 1
        total += size
        assert ramp.samples(step) == total
    assert ramp.samples(0) == 0


# ---- matrices that no shard may split --------------------------------------------------------------------------------


Shape = tuple[int, int]
REPLICAS = (2, 4, 8, 16, 32, 64)
LEAST = 25 << 20  # bytes


def llama(hidden: int, keys: int, ffn: int) -> list[Shape]:
    return [(hidden + 2 * keys, hidden), (hidden, hidden), (ffn, hidden), (ffn, hidden), (hidden, ffn)]


def gpt(hidden: int) -> list[Shape]:
    return [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]


MODELS = {
    "GPT-2 124M": gpt(768) * 12,
    "Llama 3.2 1B": llama(2048, 512, 8192) * 16,
    "Llama 3 8B": llama(4096, 1024, 14336) * 32,
    "GPT-3 13B": gpt(5120) * 40,
    "Llama 3 70B": llama(8192, 1024, 28672) * 80,
}
# Where no padding of 1% or less exists: it in percent, and the largest share of the work over the mean.
FORCED = {
    ("GPT-2 124M", 32): (25.0, 1.34),
    ("GPT-2 124M", 64): (43.8, 1.72),
    ("Llama 3.2 1B", 32): (9.4, 1.06),
    ("Llama 3.2 1B", 64): (9.4, 1.06),
    ("Llama 3 8B", 64): (7.1, 1.05),
    ("GPT-3 13B", 64): (6.2, 1.05),
    ("Llama 3 70B", 64): (1.9, 1.05),
}


class Found(NamedTuple):
    """Of the buckets of a model: the share that is padding, the largest share of the work over the mean, and the share
    of the matrices that is in the first bucket."""

    padding: float
    work: float
    first: float


@functools.cache
def found(model: str, replicas: int) -> Found:
    """As data parallelism makes the buckets, on parameters without memory."""
    parameters = [
        ShardedParameter(torch.empty(shape, device="meta"), ShardSpec(name=f"blocks.{i}.weight", shape=shape))
        for i, shape in enumerate(MODELS[model])
    ]
    total, work_of = sum(parameter.numel() for parameter in parameters), MuonConfig().work_of
    busy, size = [0.0] * replicas, 0
    buckets = assign_whole(parameters, {"replicas": replicas}, {"replicas": min(LEAST, total)})
    assert [p for bucket in buckets for p in bucket] == parameters[::-1]
    for members in buckets:
        works = {p.spec.name: work_of(p.spec.shape) for p in members}
        layout = FlatLayout(members, replicas, works, busy=busy)
        busy, size = layout.busy, size + layout.size
        held = [segment.name for shard in range(replicas) for segment in layout.segments(shard)]
        assert Counter(held) == Counter(works.keys()), "a matrix is cut"
    assert sum(busy) == pytest.approx(sum(work_of(p.spec.shape) for p in parameters))
    return Found(1 - total / size, max(busy) * replicas / sum(busy), sum(p.numel() for p in buckets[0]) / total)


@pytest.mark.parametrize("model", MODELS)
def test_padding_is_below_one_percent_where_the_matrices_allow_it(model: str) -> None:
    for replicas in REPLICAS:
        of_model = found(model, replicas)
        padding, work = FORCED.get((model, replicas), (1.0, 1.05))
        assert of_model.padding <= padding / 100 + 5e-4, replicas
        assert of_model.work <= work, replicas
        if replicas <= 8:
            assert of_model.first <= 0.5, "the first reduction begins late"


def best_of_all(sizes: list[int], shards: int) -> int:
    """The smallest shard of all packings."""
    placements = itertools.product(range(shards), repeat=len(sizes))
    return min(
        max(sum(s for s, shard in zip(sizes, placed, strict=True) if shard == k) for k in range(shards))
        for placed in placements
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_packings_are_near_the_best_of_all(shards: int) -> None:
    lots = random.Random(shards)
    optimal = 0
    for _ in range(20):
        sizes = [lots.choice([3, 4, 6, 10, 14]) for _ in range(lots.randint(1, 7))]
        found_packing, best, held = pack(sizes, shards), best_of_all(sizes, shards), Counter[int]()
        for size, shard in zip(sizes, found_packing.shard_of, strict=True):
            held[shard] += size
        assert max(held.values()) == found_packing.shard_size
        assert set(held) <= set(range(shards))
        assert least_shard(tuple(sorted(Counter(sizes).items(), reverse=True)), shards) <= best
        assert best <= found_packing.shard_size <= 4 / 3 * best  # Graham 1969
        optimal += found_packing.shard_size == best
    assert optimal >= 19
