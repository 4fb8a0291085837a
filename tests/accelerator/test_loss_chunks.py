"""What the head and the loss hold and launch, on the pretend accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.layers.context import BuildContext
from megacore.models.gpt import GPTHead
from megacore.ops import cross_entropy
from megacore.parallel.cross_entropy import vocabulary_share
from megacore.parallel.random import RandomStreams
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parallel.test_tensor import world_group
from tests.parity.runs import make_config

pytestmark = needs_pretend
VOCABULARY, HIDDEN, TOKENS = 128_000, 64, 256
LOGITS = 4 * TOKENS * VOCABULARY  # bytes in fp32
WEIGHT = 4 * VOCABULARY * HIDDEN
# Views, and the copies of the pretend device's collectives.
FREE = ("view", "slice", "select", "detach", "unbind", "split", "expand", "t", "alias", "unsqueeze", "copy_")


def peak_of_head(rank: int, world_size: int, chunks: list[int]) -> list[int]:
    """Bytes beyond the head's parameters and input at the peak of a forward and a backward, for numbers of chunks."""
    device = torch.device("pretend", rank)
    found = []
    for count in chunks:
        config = make_config((1, 1, 1), "unused", vocab_size=VOCABULARY, hidden_size=HIDDEN, loss_chunks=count)
        context = BuildContext.of(
            config, layer_group=world_group(rank, 1), device=device, streams=RandomStreams(1, device)
        )
        head = GPTHead(config.model, context)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, TOKENS, HIDDEN, device=device).requires_grad_()
        labels = torch.arange(TOKENS, device=device).view(1, -1) * 499
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        if count == 1:
            losses = cross_entropy(head(x), labels, share=vocabulary_share(VOCABULARY), options=context.loss_options)
        else:
            losses = head((x, labels))
        losses.sum().backward()
        found.append(torch.accelerator.max_memory_allocated(device) - before)
        del head, x, losses
    return found


def test_a_head_in_chunks_holds_one_chunk_of_the_logits() -> None:
    """At a vocabulary of 128,000; besides a chunk, the weight's gradient and a chunk of it that is copied there."""
    ((whole, four, sixteen),) = run_distributed(peak_of_head, 1, [1, 4, 16], backend="pretend", init=False)
    small = 16 * TOKENS * HIDDEN * 4
    assert whole >= LOGITS + WEIGHT
    assert four <= (LOGITS + WEIGHT) / 4 + WEIGHT + small
    assert sixteen <= (LOGITS + WEIGHT) / 16 + WEIGHT + small


class Launches(TorchDispatchMode):
    """The operators that a device would launch, each of ours as one; views and communication are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__.removeprefix("_unsafe_")
        if operator.namespace != "c10d" and name not in FREE and not name.startswith(("empty", "new_empty", "_")):
            self.names.append(name)
        return operator(*args, **(kwargs or {}))


def launches_of_head(rank: int, world_size: int, chunks: int) -> list[str]:
    """What the head's forward and its loss launch on a rank."""
    device = torch.device("pretend", rank)
    config = make_config((world_size, 1, 1), "unused", num_attention_heads=8, loss_chunks=chunks, z_loss=1e-3)
    group = world_group(rank, world_size)
    context = BuildContext.of(config, layer_group=group, device=device, streams=RandomStreams(1, device))
    head = GPTHead(config.model, context)
    for parameter in head.parameters():
        torch.nn.init.ones_(parameter)
    x, labels = torch.ones(1, 8, 32, device=device).requires_grad_(), torch.ones(1, 8, device=device).long()
    with Launches() as launched:
        if chunks == 1:
            share = vocabulary_share(config.model.vocab_size, group)
            losses = cross_entropy(head(x), labels, share=share, options=context.loss_options)
        else:
            losses = head((x, labels))
    assert losses.isfinite().all()
    return launched.names


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_ranks_statistics_are_merged_in_one_launch(chunks: int) -> None:
    """Whatever the number of ranks; a chunk is a product and its statistics."""
    for names in run_distributed(launches_of_head, 4, chunks, backend="pretend"):
        merges = 1 if chunks == 1 else 2
        assert names.count("cross_entropy_merged") == merges
        assert names.count("cross_entropy_losses") == 1
        assert names.count("cross_entropy_statistics") == chunks
        assert len(names) <= 6 + merges + 2 * chunks, names
