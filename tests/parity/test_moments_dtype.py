"""--moments-dtype: what is rounded and how. That every layout keeps the same bits are rows of tests/matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megacore.config import AdamWConfig
from megacore.optim.block_moments import decoded_mean, decoded_square, encoded_mean, encoded_square
from megacore.optim.rounded_moments import random_bits, rounded
from tests.parity.runs import trainer_of
from tests.unit.test_optimizers import ADAM, drawn, updated


def test_random_rounding_takes_the_two_neighbours_with_the_exact_mean() -> None:
    bits = random_bits(torch.arange(100_000), 12345, torch.tensor(7.0))
    for value in (1.0 + 1 / 1024, -3.3e-5, 7e8):
        found = rounded(torch.full((100_000,), value), bits)
        low, high = float(found.min()), float(found.max())
        assert torch.equal(found, found.bfloat16().float())
        assert low < value < high
        assert high - low <= abs(value) / 128
        assert float(found.double().mean()) == pytest.approx(value, abs=(high - low) / 100)  # 6 deviations
    exact = torch.tensor([0.0, 1.5, -(2.0**-100), torch.inf, -torch.inf, torch.nan])
    assert torch.equal(rounded(exact, torch.full((6,), 0xFFFF)).nan_to_num(), exact.nan_to_num())


def test_random_bits_are_those_of_splitmix() -> None:
    """The reference in Python's integers: position and step go in by odd factors."""
    mask = (1 << 64) - 1
    for index, key, step in ((0, 0, 1), (123456789012, (1 << 63) + 5, 99)):
        bits = (index * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + key) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
        found = random_bits(torch.tensor([index]), key, torch.tensor(float(step)))
        assert int(found) & mask == bits


def test_8_bits_are_the_nearest_of_a_table() -> None:
    """Against brute force over all codes: nearest in the domain of the root, in fp64."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 0, 4096)
    scale = values.abs().max()
    found = decoded_mean(encoded_mean(values, scale.expand(4096)), scale.expand(4096)).double()
    codes = np.arange(-127, 128)
    roots = np.sign(values.double().numpy()) * np.sqrt(values.double().abs().numpy() / float(scale))
    nearest = codes[np.abs(codes[:, None] / 127 - roots).argmin(0)]
    torch.testing.assert_close(
        found, torch.from_numpy(np.sign(nearest) * (nearest / 127) ** 2 * float(scale)), rtol=1e-6, atol=0
    )

    squares = values.square()
    largest = squares.max()
    found = decoded_square(encoded_square(squares, largest.expand(4096)), largest.expand(4096)).double()
    codes = np.arange(1, 256)
    nearest = codes[np.abs(codes[:, None] / 255 - (squares.double().numpy() / float(largest)) ** 0.25).argmin(0)]
    torch.testing.assert_close(found, torch.from_numpy((nearest / 255) ** 4 * float(largest)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1.0, 3.3e-4, 7.7e-21, 1e12])
def test_values_that_were_8_bits_stay_as_they_are(scale: float) -> None:
    scales = torch.full((256,), scale)
    means = torch.arange(-127, 128, dtype=torch.int8)
    assert torch.equal(encoded_mean(decoded_mean(means, scales[:255]), scales[:255]), means)
    squares = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(encoded_square(decoded_square(squares, scales), scales), squares)
    zeros = torch.zeros(3)
    assert not encoded_mean(zeros, zeros).any()
    assert not encoded_square(zeros, zeros).any()


def test_steps_are_close_to_those_of_fp32() -> None:
    weights, gradients = drawn(0), [drawn(seed) for seed in range(1, 21)]
    exact = updated(ADAM, weights, gradients)
    for dtype, bound in (("bf16", 0.01), ("int8", 0.04)):
        settings = AdamWConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, moments_dtype=dtype)  # type: ignore[arg-type]
        for name, value in updated(settings, weights, gradients).items():
            change = (exact[name] - weights[name].float()).norm()
            assert 0 < (value - exact[name]).norm() < bound * change, (dtype, name)


def test_a_checkpoint_of_fp32_is_continued_in_8_bits(tmp_path: Path) -> None:
    before = trainer_of((1, 1, 1), tmp_path, num_layers=2)
    before.train_step(next(before.batches))
    before.save()
    after = trainer_of((1, 1, 1), tmp_path, num_layers=2, moments_dtype="int8", load=str(tmp_path))
    for local, other in zip(before.model.data_parallel.segments, after.model.data_parallel.segments, strict=True):
        exact, found = (t.update.optimizer.values(s, "exp_avg") for t, s in ((before, local), (after, other)))
        assert exact is not None
        assert found is not None
        assert float((exact - found).abs().max()) <= 1.001 / 127 * float(exact.abs().max())
