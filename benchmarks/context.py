"""The attention of context parallelism on CPUs, beside torch's; benchmarks/ways.py compares training.

    python -m benchmarks.context --ranks 4 --rounds 7

Both attentions divide the same sequences over the same ranks, causal, and compute output and all gradients, in turn.
torch's is the loop of torch.distributed.tensor.experimental.context_parallel with load balancing. On a CPU its context
manager finds no operator that it knows, so that the loop is called here with the operator that
`F.scaled_dot_product_attention` calls there: torch's ring, and its exchange by one all-gather. Ours calls the same
operator. Outputs and gradients are compared first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from benchmarks.in_turn import beside, take_turns
from benchmarks.workload import add_sizes
from megacore.config import ParallelConfig
from megacore.ops.visibility import Visibility
from megacore.parallel.collectives import barrier
from megacore.parallel.context import ContextComm, SequenceShards, context_attention
from megacore.parallel.mesh import Group, build_mesh
from tests.distributed import run_distributed

_aten = torch.ops.aten
Run = Callable[[], Any]


class _TorchRing(torch.autograd.Function):
    """torch's loop around its operator for CPUs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        out, logarithm, *_ = theirs._templated_ring_attention(
            group,
            2,
            _aten._scaled_dot_product_flash_attention_for_cpu,
            query=query,
            key=key,
            value=value,
            is_causal=True,
        )
        ctx.save_for_backward(query, key, value, out, logarithm)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logarithm = ctx.saved_tensors
        gradients = theirs._templated_ring_attention_backward(
            ctx.group,
            2,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=d_out,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logarithm,
            is_causal=True,
            dropout_p=0.0,
        )
        return *gradients[:3], None


def _attentions(group: Group, operands: list[Tensor], d_out: Tensor) -> dict[str, Run]:
    """By name: output and gradients of this rank's positions."""

    def ours(comm: ContextComm) -> Run:
        shards = SequenceShards(group, comm)
        query, key, value = operands
        view = Visibility(causal=True)
        return lambda: _differentiated(context_attention(query, key, value, shards, view=view), operands, d_out)

    def torchs(method: str) -> Run:
        def run() -> list[Tensor]:
            theirs.set_rotate_method(method)
            theirs._cp_options.enable_load_balance = True
            return _differentiated(_TorchRing.apply(*operands, group.handle), operands, d_out)

        return run

    return {
        **{f"megacore, {comm}": ours(comm) for comm in get_args(ContextComm)},
        "torch, ring": torchs("alltoall"),
        "torch, allgather": torchs("allgather"),
    }


def _differentiated(out: Tensor, operands: list[Tensor], d_out: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, operands, d_out)]


def attend(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each attention, by name."""
    torch.set_num_threads(1)
    mesh = build_mesh(ParallelConfig(cp=world_size, device="cpu"))
    shards, draw = SequenceShards(mesh.sequence), torch.Generator().manual_seed(1)
    shape = 1, options.seq, options.heads, options.hidden // options.heads
    *operands, d_out = (
        shards.take(torch.randn(shape, generator=draw), 1).transpose(1, 2).contiguous() for _ in range(4)
    )
    for x in operands:
        x.requires_grad_()
    runs = _attentions(mesh.sequence, operands, d_out)
    first, *others = (run() for run in runs.values())
    for other in others:
        for x, y in zip(first, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    return take_turns(runs, options.rounds, lambda: barrier(mesh.world))


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, ranks=2, rounds=5, seq=4096)
    options = parser.parse_args(argv)
    seconds = run_distributed(attend, options.ranks, options, timeout=600)[0]
    print(f"Attention, forward and backward, {options.ranks} ranks\n")
    print(beside(seconds, "torch, ring", options.seq))
    return 0


if __name__ == "__main__":
    sys.exit(main())
