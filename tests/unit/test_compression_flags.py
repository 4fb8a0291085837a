"""What 1-bit optimizers and compressed gradients do not work with is refused by name, all of it at once; and what the
planner counts for them."""

from __future__ import annotations

from dataclasses import replace

from megacore.config.compression import error_bytes
from tests.parity.runs import make_config


def test_the_errors_are_planned() -> None:
    config = make_config((1, 1, 4), "output", micro_batch_size=1)
    compressed = replace(config, precision=replace(config.precision, grad_reduce_compression="int8"))
    sharded = replace(compressed, parallel=replace(config.parallel, zero_stage=1))
    one_bit = replace(config, optimizer=replace(config.optimizer, optimizer="onebitadam"))
    assert [error_bytes(each, 100) for each in (config, compressed, sharded, one_bit)] == [0, 500, 400, 625]
