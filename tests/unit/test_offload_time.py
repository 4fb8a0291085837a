"""What offloading takes of a planned step, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from megacore.config import ResolvedConfig
from megacore.models.outline import outline
from megacore.plan.cluster import CLUSTERS
from megacore.plan.planner import largest_term, make_plan
from megacore.plan.step_time import StepTime, step_time
from tests.unit.refusals import parse

PARAMETERS = 8_030_261_248
# Copies reach 50 GB/s each way, and the update 100 GB/s.
DEVICE = CLUSTERS["h100"].device
LINK, MEMORY = 50e9, 100e9
CLUSTER = dataclasses.replace(
    CLUSTERS["h100"],
    device=dataclasses.replace(
        DEVICE,
        host_link=LINK / DEVICE.link_efficiency.expected,
        host_bandwidth=MEMORY / DEVICE.memory_efficiency.expected,
    ),
)


def config_of(flags: str) -> ResolvedConfig:
    shared = "--mock-data --preset llama-3-8b --train-iters 10 --precision bf16 --recompute full --global-batch-size 2"
    return parse(*f"{shared} --micro-batch-size 1 {flags}".split(), planned=True)


def timed(flags: str) -> StepTime:
    config = config_of(flags)
    return step_time(config, outline(config), CLUSTER)


def test_the_update_in_host_memory_takes_its_bandwidth() -> None:
    plain, found = timed(""), timed("--offload-optimizer")
    # Per parameter: moments and weights are read and written, the gradient twice, and the 16-bit weight.
    assert found.optimizer == pytest.approx(38 * PARAMETERS / MEMORY)
    assert plain.host == found.host == plain.hidden["host memory"] == 0
    assert found.seconds == pytest.approx(plain.seconds - plain.optimizer + found.optimizer)


def test_copies_of_parameters_hide_behind_computing() -> None:
    found = timed("--zero-stage 3 --offload-optimizer --offload-params")
    computing = (found.gemm + found.attention + found.memory + found.tensor) / 2
    # Of 2 microbatches each: 2 bytes before forward and before backward; of one the sum of the other, 4 bytes.
    copies, norm = (4 + 4 / 2) * PARAMETERS / LINK, 4 * PARAMETERS / LINK
    assert found.host == pytest.approx(2 * max(copies - computing, 0) + norm)
    assert found.host + found.hidden["host memory"] == pytest.approx(2 * copies + norm)
    assert found.hidden["host memory"] > 0
    parts = found.gemm + found.attention + found.memory + found.tensor + found.optimizer + found.host
    assert found.seconds == pytest.approx(parts)


def test_activations_are_copied_both_ways() -> None:
    found = timed("--offload-activations --seq-length 8192 --dp 2")
    kept = 32 * 8192 * 4096 * 2  # the inputs of 32 blocks
    assert found.host + found.hidden["host memory"] == pytest.approx(kept / LINK, rel=0.01)


def test_a_cpu_copies_nothing() -> None:
    config = config_of("--zero-stage 3 --offload-optimizer --offload-params --device cpu")
    found = step_time(config, outline(config), CLUSTERS["cpu"])
    assert found.host == found.hidden["host memory"] == 0


def test_what_is_in_host_memory_is_not_the_largest_term_of_a_device() -> None:
    found = make_plan(config_of("--zero-stage 3 --offload-optimizer --offload-params"), CLUSTER)
    assert found.fullest.on_host > 100e9
    name, size = largest_term(found.fullest)
    assert name == "activations"
    assert size < found.fullest.expected
