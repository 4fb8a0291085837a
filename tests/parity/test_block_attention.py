"""Runs whose attention is computed in blocks, as that of long sequences is, give what whole masks give."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from tests.distributed import run_distributed
from tests.parity.bert_runs import train_bert
from tests.parity.runs import Layout, Outcome, Run, agree, bitwise, train

WINDOW: dict[str, Any] = {"window_size": 6, "position_embedding_type": "rope", "num_query_groups": 2}
ALIBI: dict[str, Any] = {"position_embedding_type": "alibi"}
# Tensor-parallel ranks share the key head.
SHARED: dict[str, Any] = {"num_query_groups": 1, "reset_attention_mask": True}
SHARED_ALIBI: dict[str, Any] = ALIBI | {"num_query_groups": 1, "window_size": 6}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
SHORT: dict[str, Any] = {"num_layers": 2, "train_iters": 3}


def in_blocks(
    rank: int, world_size: int, layout: Layout, output_dir: str, changes: dict[str, Any], whole: int
) -> Outcome | None:
    """A run in which sequences of more than `whole` positions are cut into blocks of 5."""
    attention = import_module("megacore.ops.attention")  # the package exports the function of this name
    with mock.patch.object(attention, "WHOLE", whole), mock.patch.object(attention, "BLOCK", 5):
        return (train_bert if "bert_style" in changes else train)(rank, world_size, layout, output_dir, changes)


def blocks(layout: Layout, directory: Any, changes: dict[str, Any]) -> Outcome:
    ranks = layout[0] * layout[1] * layout[2]
    outcome = run_distributed(in_blocks, ranks, layout, str(directory), changes, 8, timeout=120)[0]
    assert isinstance(outcome, Outcome)
    return outcome


@pytest.mark.parametrize(
    "model", [WINDOW, ALIBI, WINDOW | ALIBI | {"recompute": "selective"}, SHARED, SHARED_ALIBI], ids=str
)
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_blocks_equal_whole_masks(layout: Layout, model: dict[str, Any], run: Run, tmp_path: Any) -> None:
    """With tensor parallelism, and in a pipeline whose schedule splits backward, against one process."""
    changes = SHORT | model
    split = {"schedule": "zero-bubble", "micro_batch_size": 1} if layout[1] > 1 else {}
    agree(blocks(layout, tmp_path, changes | split), run((1, 1, 1), **changes))


@pytest.mark.slow
@pytest.mark.parametrize("model", [SHARED, SHARED_ALIBI | {"window_size": 300}], ids=str)
def test_long_sequences_are_those_of_one_process(model: dict[str, Any], run: Run) -> None:
    """Beyond the length up to which masks are whole."""
    changes = SHORT | model | {"seq_length": 1100, "global_batch_size": 2, "micro_batch_size": 1}
    agree(run((2, 1, 1), **changes), run((1, 1, 1), **changes))


@pytest.mark.parametrize("style, recompute", [("classic", "none"), ("modern", "full")])
def test_blocks_of_padding_and_of_packed_documents_equal_whole_masks(
    style: str, recompute: str, run_bert: Run, tmp_path: Any
) -> None:
    """The modern style with windows in all but every third block."""
    changes = SHORT | {"bert_style": style}
    agree(blocks((2, 1, 1), tmp_path, changes | {"recompute": recompute}), run_bert((1, 1, 1), **changes))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_dropout_in_blocks_is_drawn_again_as_it_was(recompute: str, tmp_path: Any) -> None:
    changes = SHORT | WINDOW | DROPOUT
    plain = blocks((1, 1, 1), tmp_path / "plain", changes)
    bitwise(blocks((1, 1, 1), tmp_path / "again", changes | {"recompute": recompute}), plain)
    assert plain.losses != blocks((1, 1, 1), tmp_path / "none", SHORT | WINDOW).losses
