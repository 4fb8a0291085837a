"""How many operators a block launches does not grow, and none of them copies what it could read in place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from benchmarks.operators import count_block

MOST = {"Llama": (12, 20), "GPT-2": (10, 23), "GPT-2, dropout": (16, 27)}


@pytest.fixture(autouse=True, scope="module")
def no_group_stays() -> Iterator[None]:
    """The ranks of a split block belong to a job of these tests alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", MOST)
def test_operators_of_a_block(shape: str) -> None:
    count = count_block(shape, 1)
    found = count.forward.total(), count.backward.total()
    assert found[0] <= MOST[shape][0] and found[1] <= MOST[shape][1], f"{count}: {count.forward}, {count.backward}"
    assert "aten::clone" not in count.forward + count.backward


@pytest.mark.parametrize("shape", MOST)
def test_a_split_block_adds_its_collectives_alone(shape: str) -> None:
    """With the biases of the row-parallel layers, which are added after the sum."""
    one, split = count_block(shape, 1), count_block(shape, 8)
    biases = 0 if shape == "Llama" else 2
    assert split.forward.total() == one.forward.total() + 2 + biases
    assert split.backward.total() == one.backward.total() + 2
    assert split.forward["c10d::allreduce_"] == split.backward["c10d::allreduce_"] == 2
    assert "aten::clone" not in split.forward + split.backward
