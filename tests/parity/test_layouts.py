"""The same numbers on every layout: initial weights bit for bit; losses, norms, gradients and weights to fp32
rounding."""

from __future__ import annotations

import pytest
import torch

from tests.parity.runs import Layout, Run, Size, agree, in_both_sizes, small, whole

LAYOUTS: list[Layout] = [
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 3, 1),
    (1, 4, 1),
    (1, 1, 2),
    (1, 1, 4),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (2, 3, 1),
    (4, 2, 1),
    (4, 1, 2),
    (1, 4, 2),
    (1, 2, 4),
    (2, 2, 2),
]
# Degree 4 stands in other layouts, and so does each pair of dimensions: these run in `make test-slow` only.
LATER: list[Layout] = [(4, 2, 1), (1, 4, 2), (1, 2, 4)]


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        *((layout, small) for layout in LAYOUTS if layout not in LATER),
        ((1, 2, 2), whole),
        *(pytest.param(layout, whole, marks=pytest.mark.slow) for layout in LAYOUTS if layout != (1, 2, 2)),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_adamw_with_clipping_equals_one_process(layout: Layout, size: Size, run: Run) -> None:
    one = run((1, 1, 1), **size(layout))
    assert min(one.norms) > 0.5, "clipping is meant to be active"
    agree(run(layout, **size(layout)), one)


@in_both_sizes
@pytest.mark.parametrize(
    "layout", [(2, 1, 1), (1, 3, 1), (1, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_sgd_untied_equals_one_process(layout: Layout, size: Size, run: Run) -> None:
    """AdamW forgives a gradient that is wrong by a factor; plain SGD does not."""
    changes = {
        **size(layout),
        "optimizer": "sgd",
        "sgd_momentum": 0.0,
        "lr": 0.1,
        "clip_grad": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    found, one = run(layout, **changes), run((1, 1, 1), **changes)
    agree(found, one)
    for name, value in one.final.items():
        torch.testing.assert_close(found.final[name], value, rtol=1e-4, atol=1e-6)


@in_both_sizes
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 2)], ids=str)
def test_hidden_dropout_does_not_depend_on_the_layout(layout: Layout, size: Size, run: Run) -> None:
    """Masks are functions of names and indices: with equal micro-batches even dropout is the same on every layout."""
    changes = {**size(layout), "hidden_dropout": 0.2, "micro_batch_size": 1}
    one = run((1, 1, 1), **changes)
    assert one.losses != run((1, 1, 1), **size(layout)).losses
    agree(run(layout, **changes), one)


@in_both_sizes
def test_attention_dropout_does_not_depend_on_pipeline_and_data_layout(size: Size, run: Run) -> None:
    changes = {**size((1, 2, 2)), "attention_dropout": 0.2, "micro_batch_size": 1}
    agree(run((1, 2, 2), **changes), run((1, 1, 1), **changes))


def test_two_runs_are_bitwise_equal(run: Run) -> None:
    changes = {**small((2, 1, 2)), "seed": 7}
    first, second = run((2, 1, 2), **changes), run((2, 1, 2), **changes, log_interval=11)  # trained anew
    assert first.losses == second.losses
    assert all(torch.equal(first.final[name], second.final[name]) for name in first.final)


def test_another_seed_is_another_run(run: Run) -> None:
    changes = small((2, 1, 2))
    assert run((2, 1, 2), **changes, seed=7).losses[0] != run((2, 1, 2), **changes).losses[0]
