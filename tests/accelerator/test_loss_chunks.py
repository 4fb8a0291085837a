"""What the head and the loss hold, on the pretend accelerator."""

from __future__ import annotations

import torch

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
