"""How many operators a transformer block and the output layer launch, forward and backward; counted without a GPU.

    python benchmarks/operators.py

The models compute on fake tensors, with the operators that they use on a GPU. Each operator that a GPU would run is
counted, collectives included; views and allocations are not. Some operators launch more than one kernel: torch's flash
attention does backward, and so do our norms. Experts are computed by the grouped kernels, and the tokens are
divided over them evenly.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.config import Config, ResolvedModel, TrainingConfig
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.context import ContextComm, SequenceShards
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.loss import vocabulary_share
from megacore.parallel.mesh import ALONE, Group
from megacore.parallel.random import RandomStreams
from megacore.tracer.step_trace import FREE
from tools import generated_pages as pages

MICRO_BATCH, POSITIONS, HIDDEN, VOCABULARY, RANKS = 2, 64, 256, 1024, 8
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope", "disable_bias_linear": True,
    "num_query_groups": 8, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
GPT2: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {"Llama": LLAMA, "GPT-2": GPT2, "GPT-2, dropout": GPT2 | {"hidden_dropout": 0.1}}
EXPERTS, CHOSEN = 8, 2
MIXTRAL = f"Llama, {EXPERTS} experts"
CONTEXT_COMMS: tuple[ContextComm, ...] = ("allgather", "ring", "ulysses")


@dataclass(frozen=True)
class Count:
    """Operators by name, forward and backward.

    Attributes:
        forward: of the forward.
        backward: of the backward.
        waits: how often the host waits for numbers of the device.
    """

    forward: Counter[str]
    backward: Counter[str]
    waits: int = 0

    def __str__(self) -> str:
        return f"{self.forward.total()} + {self.backward.total()}"


class Launches(TorchDispatchMode):
    """Counts operators that a GPU would run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.split("::")[1] not in FREE:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def model_of(shape: str, tp: int) -> ResolvedModel:
    """A model of two blocks in the named shape."""
    values = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 16, "vocab_size": VOCABULARY, "tp": tp,
        "num_experts": EXPERTS if shape == MIXTRAL else None, "moe_router_topk": CHOSEN, "seq_length": POSITIONS,
        "mock_data": True, "micro_batch_size": MICRO_BATCH, **(LLAMA if shape == MIXTRAL else SHAPES[shape]),
    }  # fmt: skip
    return Config(training=TrainingConfig(train_iters=1)).with_values(values).resolve(tp).model


def group_of(tp: int) -> Group:
    """Ranks of which this process is the first; the others are not there."""
    if tp == 1:
        return ALONE
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    handle = dist.new_group(list(range(tp)))
    return Group(ranks=tuple(range(tp)), rank=0, handle=handle, name=handle.group_name)


def build(shape: str, tp: int, number: int, **options: Any) -> nn.Module:
    """Layer `number` of a model in bf16, its parameters in one buffer, last first, as in training: 0 is the embedding,
    1 a block, -1 the output layer; `options` are fields of its context."""
    context = BuildContext(layer_group=group_of(tp), device=CPU, streams=RandomStreams(0, CPU), **options)
    layer = gpt_layers(model_of(shape, tp), context)[number].build()
    parameters = list(layer.parameters())[::-1]
    buffer = torch.empty(sum(p.numel() for p in parameters), dtype=torch.bfloat16)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    return layer


def hidden_states() -> Tensor:
    """What enters a layer."""
    return torch.zeros(MICRO_BATCH, POSITIONS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)


@contextmanager
def numbers_of_experts() -> Iterator[mock.Mock]:
    """Inside, fake tensors that the host reads have the numbers of tokens that are divided evenly: over experts, and
    over as many ranks. Counts how often it reads."""

    def even(tensor: FakeTensor) -> list[int]:
        return [MICRO_BATCH * POSITIONS * CHOSEN // EXPERTS] * tensor.numel()

    with mock.patch.object(FakeTensor, "tolist", autospec=True, side_effect=even) as read:
        yield read


def count_block(shape: str, tp: int, **options: Any) -> Count:
    """Operators of one block; `options` are fields of its context."""
    with FakeTensorMode(), ops.kernels_chosen("triton"), numbers_of_experts() as read:
        layer, x = build(shape, tp, 1, **options), hidden_states()
        layer(x)  # what is made once, such as the tables of the rotation
        read.reset_mock()
        with Launches() as forward:
            y = layer(x)
        grad = torch.zeros_like(y)
        with Launches() as backward:
            y.backward(grad)
    return Count(forward.names, backward.names, read.call_count)


def count_divided(comm: ContextComm) -> Count:
    """Operators of a Llama block whose sequences are divided over the ranks."""
    return count_block("Llama", 1, sequence=SequenceShards(group_of(RANKS), comm))


def count_experts(ep: int) -> Count:
    """Operators of a block with experts, which are divided over ranks."""
    return count_block(MIXTRAL, 1, experts=ExpertRanks(dispatch=group_of(ep)))


def count_head(tp: int) -> Count:
    """Operators of a Llama's output layer and loss."""
    group = group_of(tp)
    with FakeTensorMode(), ops.kernels_chosen("triton"):
        layer, x = build("Llama", tp, -1), hidden_states()
        labels = torch.zeros(MICRO_BATCH, POSITIONS, dtype=torch.int64)
        mask, one = torch.ones(MICRO_BATCH, POSITIONS), torch.ones(())
        options = ops.CrossEntropyOptions(in_place=True)
        with Launches() as forward:
            losses = ops.cross_entropy(layer(x), labels, share=vocabulary_share(VOCABULARY, group), options=options)
            loss = torch.sum(losses * mask)
        with Launches() as backward:
            loss.backward(one)
    return Count(forward.names, backward.names)


def table() -> str:
    """The counts of today as Markdown."""
    counts = [
        *((f"block, {shape}", f"tp {tp}", count_block(shape, tp)) for shape in ("Llama", "GPT-2") for tp in (1, RANKS)),
        *(("block, Llama", f"cp {RANKS}, {comm}", count_divided(comm)) for comm in CONTEXT_COMMS),
        *((f"block, {MIXTRAL}", f"ep {ep}", count_experts(ep)) for ep in (1, RANKS)),
        *(("output layer and loss", f"tp {tp}", count_head(tp)) for tp in (1, RANKS)),
    ]
    rows = []
    for name, ranks, count in counts:
        both = count.forward + count.backward
        collectives = sum(number for op, number in both.items() if op.startswith("c10d::"))
        rows.append((name, ranks, count, collectives, both["aten::clone"], count.waits))
    return pages.table(("layer", "ranks", "forward + backward", "collectives", "copies", "waits"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
