"""What 1-bit optimizers and compressed gradients do not work with is refused by name, all of it at once; and what the
planner counts for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megacore.config import (
    Config,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
    validate,
)
from megacore.config.compression import error_bytes
from megacore.config.optimizers import OneBitAdamConfig
from tests.parity.runs import make_config


def problems(**sections: Any) -> list[str]:
    training = sections.pop("training", TrainingConfig(train_iters=10))
    return validate(Config(training=training, **sections), 4)


@pytest.mark.parametrize("name", ["onebitadam", "onebitlamb"])
def test_what_one_bit_does_not_work_with_is_refused_at_once(name: str) -> None:
    found = problems(
        optimizer=OptimizerConfig(optimizer=name),
        onebitadam=OneBitAdamConfig(onebit_freeze_step=10),
        parallel=ParallelConfig(dp=4, zero_stage=2, offload_optimizer=True),
        precision=PrecisionConfig(grad_reduce_compression="int8"),
        training=TrainingConfig(train_iters=10, reproducible=True),
        logging=LoggingConfig(gradient_noise_interval=5),
    )
    other = {"onebitadam": "adamw", "onebitlamb": "lamb"}[name]
    for said in (
        "with --zero-stage 2, because every replica needs the whole momentum: use --zero-stage 0, or --optimizer "
        f"{other} with --grad-reduce-compression int8",
        "with --offload-optimizer, because",
        "with --grad-reduce-compression int8, because",
        "with --reproducible, because",
        "with --gradient-noise-interval 5, because",
        "--onebit-freeze-step 10 must be below --train-iters 10, because nothing would be compressed: use 9 or less",
    ):
        assert any(said in problem for problem in found), said


def test_what_compressed_gradients_do_not_work_with_is_refused() -> None:
    found = problems(
        parallel=ParallelConfig(dp=4, zero_stage=1, zero_shard_size=2),
        precision=PrecisionConfig(grad_reduce_compression="bf16"),
        training=TrainingConfig(train_iters=10, reproducible=True),
    )
    assert any("--grad-reduce-compression bf16 is not possible with --zero-shard-size 2" in each for each in found)
    assert any("exact sums of gradients, but --grad-reduce-compression bf16 rounds" in each for each in found)


def test_settings_of_one_bit_have_no_effect_with_other_optimizers() -> None:
    found = problems(onebitadam=OneBitAdamConfig(onebit_freeze_step=3), parallel=ParallelConfig(dp=4))
    assert any("--onebit-freeze-step 3 has no effect with --optimizer adamw" in problem for problem in found)


def test_the_errors_are_planned() -> None:
    config = make_config((1, 1, 4), "output", micro_batch_size=1)
    compressed = replace(config, precision=replace(config.precision, grad_reduce_compression="int8"))
    sharded = replace(compressed, parallel=replace(config.parallel, zero_stage=1))
    one_bit = replace(config, optimizer=replace(config.optimizer, optimizer="onebitadam"))
    assert [error_bytes(each, 100) for each in (config, compressed, sharded, one_bit)] == [0, 500, 400, 625]
