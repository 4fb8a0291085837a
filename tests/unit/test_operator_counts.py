"""How many operators a block launches does not grow, and none of them copies what it could read in place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import operators
from megacore import ops
from megacore.parallel.experts import ExpertRanks

MOST = {"Llama": (10, 15), "GPT-2": (9, 18), "GPT-2, dropout": (10, 20)}


@pytest.fixture(autouse=True, scope="module")
def no_group_stays() -> Iterator[None]:
    """The ranks of a split block belong to a job of these tests alone."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", MOST)
def test_operators_of_a_block(shape: str) -> None:
    count = operators.count_block(shape, 1)
    found = count.forward.total(), count.backward.total()
    assert found[0] <= MOST[shape][0] and found[1] <= MOST[shape][1], f"{count}: {count.forward}, {count.backward}"
    assert "aten::clone" not in count.forward + count.backward


@pytest.mark.parametrize("shape", MOST)
def test_a_split_block_adds_its_collectives_alone(shape: str) -> None:
    """The biases of the row-parallel layers are added by a rank's product."""
    one, split = operators.count_block(shape, 1), operators.count_block(shape, 8)
    assert split.forward.total() == one.forward.total() + 2
    assert split.backward.total() == one.backward.total() + 2
    assert split.forward["c10d::allreduce_"] == split.backward["c10d::allreduce_"] == 2


def test_nothing_copies_what_it_could_read_in_place() -> None:
    """Neither a split block before its sums, which a backward in halves has too, nor the parts of split experts."""
    ranks = ExpertRanks(layer=operators.group_of(operators.RANKS))
    experts = operators.count_block(operators.MIXTRAL, 1, experts=ranks)
    assert experts.forward["c10d::allreduce_"] == 1 and experts.backward["c10d::allreduce_"] == 2
    counts = [experts, *(operators.count_block(shape, 8) for shape in MOST)]
    for shape in MOST:
        counts.append(operators.count_block(shape, operators.RANKS, split_backward=True))
        assert counts[-1].forward["c10d::allreduce_"] == counts[-1].backward["c10d::allreduce_"] == 2
    assert not any("aten::clone" in count.forward + count.backward for count in counts)


def test_operators_of_a_block_whose_sequences_are_divided() -> None:
    """Putting the sequence together, or taking it apart, is one copy whatever the number of ranks."""
    for comm, most in zip(operators.CONTEXT_COMMS, [(16, 28), (68, 99), (17, 24)], strict=True):
        count = operators.count_divided(comm)
        found = count.forward.total(), count.backward.total()
        assert found[0] <= most[0] and found[1] <= most[1], f"{comm}: {count.forward}, {count.backward}"


def test_operators_of_a_block_with_experts() -> None:
    """One launch computes a product of all experts. The host waits for the numbers of rows alone."""
    one, split = operators.count_experts(1), operators.count_experts(operators.RANKS)
    assert one.forward.total() <= 36 and one.backward.total() <= 36
    assert split.forward.total() <= 50 and split.backward.total() <= 40
    assert (one.waits, split.waits) == (1, 1)
    for names in (split.forward, split.backward):
        assert not {"aten::bincount", "aten::repeat_interleave", "aten::clone"}.intersection(names)


def test_operators_of_the_output_layer_and_loss() -> None:
    one, split = operators.count_head(1), operators.count_head(8)
    assert one.forward.total() <= 6 and one.backward.total() <= 9
    assert split.forward.total() <= 8 and split.backward.total() <= 10


def test_the_page_has_the_counts() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/reports/measured.md"
    assert operators.table() in page.read_text(), f"{page}: write the table of python benchmarks/operators.py"


# ---- calls of the host -----------------------------------------------------------------------------------------------

OWN = tuple(str(Path(operators.__file__).parents[1] / name) for name in ("megacore", "kernels"))
MOST_CALLS = {"Llama": 102, "GPT-2": 56, "GPT-2, dropout": 94}  # on Python 3.11


@pytest.mark.parametrize("shape", MOST_CALLS)
def test_a_block_calls_few_functions_of_megacore(shape: str) -> None:
    """Forward and backward: what the host does for a block beside torch's own work."""
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        called[frame.f_code.co_qualname] += event == "call" and frame.f_code.co_filename.startswith(OWN)

    with FakeTensorMode(), ops.kernels_chosen("triton"):
        layer, x = operators.build(shape, 1, 1), operators.hidden_states()
        grad = torch.zeros_like(layer(x))  # and what is made once
        sys.setprofile(note)
        try:
            layer(x).backward(grad)
        finally:
            sys.setprofile(None)
    assert called.total() <= MOST_CALLS[shape], +called
