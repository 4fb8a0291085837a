"""Figures that layouts have in common are computed once (megacore/plan/once.py)."""

from __future__ import annotations

import dataclasses

from megacore.config import ResolvedConfig
from megacore.plan.once import SharedResults, once_per_layers, once_per_microbatches, once_per_split, once_per_state
from tests.unit.refusals import parse

calls = list[str]()


@once_per_layers
def _of_layers(config: ResolvedConfig, thing: list[int], *, number: float) -> int:
    calls.append("layers")
    return len(calls)


@once_per_split
def _of_names(config: ResolvedConfig, **named: int) -> tuple[str, ...]:
    return tuple(named)


@once_per_state
def _of_state(config: ResolvedConfig) -> int:
    calls.append("state")
    return len(calls)


@once_per_microbatches
def _of_microbatches(config: ResolvedConfig) -> int:
    calls.append("microbatches")
    return len(calls)


def test_arguments_of_other_names_are_other_arguments() -> None:
    config = parse("--mock-data", "--vocab-size", "64", "--train-iters", "1", planned=True)
    assert [_of_names(config, first=1), _of_names(config, other=1)] == [("first",), ("other",)]


def test_stages_0_and_1_of_zero_have_microbatches_in_common() -> None:
    calls.clear()
    base = parse("--mock-data", "--vocab-size", "64", "--train-iters", "1", "--global-batch-size", "16", planned=True)
    results = SharedResults()

    def found(*, batch: int = 16, **of_parallel: object) -> int:
        training = dataclasses.replace(base.training, global_batch_size=batch)
        parallel = dataclasses.replace(base.parallel, **of_parallel)  # type: ignore[arg-type]
        config = dataclasses.replace(base, training=training, parallel=parallel)
        results.share_with(config)
        return _of_microbatches(config)

    assert [found(zero_stage=stage) for stage in (0, 1, 2, 3)] == [1, 1, 2, 3]
    assert found(batch=32) == 4 and found(schedule="gpipe") == 5 and found(virtual_stages=2) == 6


def test_layouts_compute_once_what_they_have_in_common() -> None:
    calls.clear()
    base = parse("--mock-data", "--vocab-size", "64", "--train-iters", "1", "--global-batch-size", "16", planned=True)
    results, thing = SharedResults(), [1]

    def layout(*, micro_batch_size: int = 1, zero_stage: int = 0) -> ResolvedConfig:
        training = dataclasses.replace(base.training, micro_batch_size=micro_batch_size)
        parallel = dataclasses.replace(base.parallel, zero_stage=zero_stage)
        config = dataclasses.replace(base, training=training, parallel=parallel)
        results.share_with(config)
        return config

    first = _of_layers(layout(), thing, number=1.0), _of_state(layout())
    assert first == (1, 2)
    # ZeRO changes the state and not the layers, and the microbatch the layers and not the state.
    sharded, larger = layout(zero_stage=1), layout(micro_batch_size=2)
    assert _of_layers(sharded, thing, number=1.0) == first[0] and _of_state(sharded) == 3
    assert _of_state(larger) == first[1] and _of_layers(larger, thing, number=1.0) == 4
    # Other objects are other arguments, and so are other values of keywords.
    assert _of_layers(layout(), thing, number=2.0) == 5 and _of_layers(layout(), [1], number=1.0) == 6
    # Without a search each configuration has its own.
    assert _of_state(base) == 7 and _of_state(base) == 7
