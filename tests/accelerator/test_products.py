"""The matrix products of a step on the pretend accelerator: how many there are, what they write, and what is copied."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.parallel import collectives as communication
from megacore.parallel.mesh import build_mesh
from megacore.parallel.products import TORCH, Products, adds_in_fp32
from megacore.train import parallelize as recipe
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config, make_trainer

pytestmark = needs_pretend
LLAMA: dict[str, Any] = {
    "activation": "swiglu", "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 64, "num_layers": 2, "train_iters": 2,
}  # fmt: skip
BF16: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 2}
MICROBATCHES = 4  # of a step of `make_config`


@dataclass
class Traced:
    """What a step launched.

    Attributes:
        products: by name.
        added: shapes of matrices that were added or copied into an fp32 buffer.
        clones: how many tensors [b, s, h] were copied; attention and rotation in plain torch copy others.
        written: bytes of the results of products.
        collectives: by name.
        figures: loss and gradient norm of every step.
    """

    products: Counter[str] = field(default_factory=Counter)
    added: list[tuple[int, ...]] = field(default_factory=list)
    clones: int = 0
    written: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    figures: list[float] = field(default_factory=list)


class Trace(TorchDispatchMode):
    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        if name.startswith(("aten.mm", "aten.addmm")):
            self.traced.products[name] += 1
            self.traced.written += result.nbytes
        elif name in ("aten.add_.Tensor", "aten.copy_.default") and args[0].dim() == 2:
            if args[0].dtype == torch.float32 and args[1].dtype == torch.bfloat16:
                self.traced.added.append(tuple(args[0].shape))
        elif name == "aten.clone.default" and args[0].device.type == "pretend" and args[0].dim() == 3:
            self.traced.clones += 1
        return result


@contextmanager
def counted(collectives: Counter[str]) -> Iterator[None]:
    """Count the collectives that the code inside starts."""
    places = [(dist, "all_reduce"), (communication, "all_gather_flat"), (communication, "reduce_scatter_flat")]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            collectives[name.removesuffix("_flat")] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, counting(name, getattr(place, name))))
        yield


Variant = dict[str, Any]


def traced_steps(rank: int, world_size: int, layout: Layout, directory: str, variants: list[Variant]) -> list[Traced]:
    """Of each of them two steps, of which the second is traced; `apart`: products do not add to sums."""
    found, options = [], recipe.zero_options
    for variant in variants:
        changes, traced = dict(variant), Traced()
        products_add = {"products_add": False} if changes.pop("apart", False) else {}
        with patch.object(recipe, "zero_options", lambda *args, new=products_add: replace(options(*args), **new)):
            config = make_config(layout, directory, device="pretend", **LLAMA | BF16 | changes)
            trainer = make_trainer(config, build_mesh(config.parallel))
        for step in range(2):
            with ExitStack() as stack:
                if step == 1:
                    stack.enter_context(Trace(traced))
                    stack.enter_context(counted(traced.collectives))
                result = trainer.train_step(next(trainer.batches))
            traced.figures += [float(result.loss), float(result.grad_norm)]
        found.append(traced)
    return found


def traced_variants(layout: Layout, directory: Any, *variants: Variant) -> list[Traced]:
    ranks = math.prod(layout)
    arguments = (layout, str(directory), list(variants))
    found: list[Traced] = run_distributed(traced_steps, ranks, *arguments, backend="pretend", init=ranks > 1)[0]
    return found


LATER = pytest.param((1, 1, 2), {"zero_stage": 3, "micro_batch_size": 1}, 8, marks=pytest.mark.slow)


@pytest.mark.parametrize(("layout", "changes", "forward"), [((1, 1, 1), {"recompute": "full"}, 8 + 6), LATER], ids=str)
def test_products_add_to_weight_gradients(layout: Layout, changes: Any, forward: int, tmp_path: Any) -> None:
    """A block has qkv, output, gate and up together, and down, which is not computed again; then there is the head."""
    direct, apart = traced_variants(layout, tmp_path, changes, changes | {"apart": True})
    linears = 2 * 4 + 1
    assert direct.products["aten.addmm.dtype_out"] == MICROBATCHES * linears
    assert direct.products.total() == MICROBATCHES * (2 * linears + forward + 1)
    assert not direct.added
    assert len(apart.added) == MICROBATCHES * (2 * 5 + 1)  # gate and up have a gradient each; the embedding adds rows
    assert apart.products["aten.addmm.dtype_out"] == 0
    # bf16 keeps 8 bits (4e-3), and a gradient of its own is rounded once more than one added by the product.
    assert direct.figures[::2] == pytest.approx(apart.figures[::2], rel=5e-4)
    assert direct.figures[1::2] == pytest.approx(apart.figures[1::2], rel=2e-3)


@pytest.mark.parametrize(
    ("sequence_parallel", "replicas"), [(False, 1), (True, 1), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_recomputation_ends_before_the_last_product_and_its_collective(
    sequence_parallel: bool, replicas: int, tmp_path: Any
) -> None:
    """A block's product `down` and the sum of its output over ranks run once, also with ZeRO 3, whose weights are
    gathered again for backward. Collectives of sequence parallelism, and the products beside them, are one a sample;
    nothing is copied around them at two samples a microbatch, where the pieces of the sequence are not in order."""
    microbatches, samples = MICROBATCHES // replicas, BF16["micro_batch_size"]
    common = {"zero_stage": 3 if replicas > 1 else 0, "sequence_parallel": sequence_parallel}
    variants = [{"recompute": "none"}, {"recompute": "light"}, {"recompute": "full"}]
    variants += [{"schedule": "zero-bubble"}] if sequence_parallel else []
    found = traced_variants((2, 1, replicas), tmp_path, *(common | one for one in variants))
    kept, light, again = found[:3]
    assert kept.figures == light.figures == again.figures
    assert kept.collectives == light.collectives and kept.products == light.products
    blocks = 2 * microbatches
    collectives, products = again.collectives - kept.collectives, again.products - kept.products
    if sequence_parallel:  # qkv and gate with up gather; the output layer of attention scatters
        assert collectives == {"all_gather": 2 * blocks * samples, "reduce_scatter": blocks * samples}
        assert products.total() == 3 * blocks * samples
        assert [one.clones for one in found] == [0] * 4
    else:
        assert collectives == {"all_reduce": blocks}
        assert products.total() == 3 * blocks


def test_recomputation_of_a_split_backward_ends_before_the_last_product(tmp_path: Any) -> None:
    """A block is computed again for its input's gradient and for each of 7 operators with weights: all its 5 products
    but the last. Only a schedule from a file splits the backward of such blocks."""
    halves = tmp_path / "halves.csv"
    halves.write_text(",".join(f"0F{n},0I{n},0W{n}" for n in range(MICROBATCHES)) + "\n", encoding="utf-8")
    variants = [{"schedule_csv": str(halves), "recompute": recompute} for recompute in ("none", "full")]
    kept, again = traced_variants((1, 1, 1), tmp_path, *variants)
    assert kept.figures == again.figures
    assert again.products.total() - kept.products.total() == MICROBATCHES * 2 * (1 + 7) * 4


def errors(rank: int, world_size: int) -> tuple[float, float]:
    """Of sums of eight gradients in bf16 against fp64: added by the product, and after it."""
    device, random = torch.device("pretend", rank), torch.Generator().manual_seed(0)
    assert adds_in_fp32(device, torch.bfloat16)
    assert not adds_in_fp32(device, torch.float32)
    assert not adds_in_fp32(torch.device("cpu"), torch.bfloat16)
    exact = torch.zeros(24, 16, dtype=torch.float64)
    sums = [torch.full((24, 16), torch.nan, device=device) for _ in range(2)]
    for number in range(8):
        grad, x = (torch.randn(64, n, generator=random).bfloat16() for n in (24, 16))
        exact += grad.double().t() @ x.double()
        for way, total in zip((TORCH, Products()), sums, strict=True):
            way.add_weight_gradient(total, grad.to(device), x.to(device), has_terms=number > 0)
    found = [float((total.cpu() - exact).abs().max()) for total in sums]
    return found[0], found[1]


def test_a_sum_of_products_is_not_rounded_to_16_bits() -> None:
    ((direct, apart),) = run_distributed(errors, 1, backend="pretend", init=False)
    assert direct < 1e-4
    assert apart > 1e-2
