"""Each tensor-parallel layer against its torch.nn twin, forward and backward."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from megacore.config.model import padded_rows
from megacore.data.gpt.mock import MockDataset
from megacore.data.loading.loader import BatchLoader, Microbatch
from megacore.layers.norm import JointHeadNorm, NormOfEachHead
from megacore.ops import Attention, CrossEntropyOptions, cross_entropy
from megacore.parallel.async_tp import Messages, SymmetricMemory, Way, exchange
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.loss import vocab_parallel_argmax, vocabulary_share
from megacore.parallel.mesh import ALONE, Group, build_mesh
from megacore.parallel.sharding import ShardedParameter, split_evenly
from megacore.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer


def close(actual: Tensor | None, expected: Tensor | None, *, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def world_group(rank: int, size: int) -> Group:
    world: Any = torch.distributed.group.WORLD if size > 1 else None
    return Group(ranks=tuple(range(size)), rank=rank, handle=world, name=world.group_name if world else "")


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def give(parameter: ShardedParameter | None, full: Tensor) -> None:
    """Set a parallel parameter to its slice of a full tensor, padding to zero."""
    assert parameter is not None
    with torch.no_grad():
        parameter.zero_()
        parameter.spec.unpadded(parameter).copy_(parameter.spec.take(full))


def check_slice(parameter: ShardedParameter | None, full_gradient: Tensor | None) -> None:
    assert parameter is not None
    assert parameter.grad is not None
    assert full_gradient is not None
    close(parameter.spec.unpadded(parameter.grad), parameter.spec.take(full_gradient), rtol=1e-5)


def part(x: Tensor, group: Group) -> Tensor:
    """This rank's slice of the last dimension."""
    return x.chunk(group.size, -1)[group.rank].contiguous()


def linear_is_linear(
    group: Group, kind: type[ColumnParallelLinear] | type[RowParallelLinear], bias: bool, way: Way | None = None
) -> None:
    def positions(whole: Tensor) -> Tensor:
        return whole if way is None else whole.chunk(group.size, 1)[group.rank].contiguous()

    layer = kind(12, 16, group=group, bias=bias, sequence_parallel=way is not None)
    twin = torch.nn.Linear(12, 16, bias=bias)
    if way is not None:
        exchange(layer, group, way)
    for seed, (name, parameter) in enumerate(twin.named_parameters()):
        parameter.data.copy_(seeded(*parameter.shape, seed=seed))
        give(getattr(layer, name), parameter.data)
    x, grad = seeded(5, 4, 12, seed=2).requires_grad_(), seeded(5, 4, 16, seed=3)
    splits_columns = kind is ColumnParallelLinear
    own = (positions(x) if splits_columns else part(x, group)).detach().clone().requires_grad_()
    y, expected = layer(own), twin(x)
    close(y, part(expected, group) if splits_columns else positions(expected), rtol=1e-6, atol=2e-6)
    y.backward(part(grad, group) if splits_columns else positions(grad))
    expected.backward(grad)
    assert x.grad is not None
    close(own.grad, positions(x.grad) if splits_columns else part(x.grad, group), rtol=1e-5, atol=1e-6)
    if way is not None and layer.bias is not None and not splits_columns:  # of this rank's positions
        all_reduce_(layer.bias.grad, group)  # type: ignore[arg-type]
    for name, parameter in twin.named_parameters():
        check_slice(getattr(layer, name), parameter.grad)


def embedding_is_embedding(group: Group, vocab: int) -> None:
    twin = torch.nn.Embedding(vocab, 6)
    layer = VocabParallelEmbedding(vocab, 6, group=group, multiple=4)
    table, tokens = seeded(vocab, 6), torch.arange(2 * vocab).view(2, vocab) % vocab  # every id, edges included
    give(layer.weight, table)
    twin.weight.data.copy_(table)
    y, expected = layer(tokens), twin(tokens)
    assert torch.equal(y, expected)
    grad = seeded(2, vocab, 6, seed=1)
    y.backward(grad)
    expected.backward(grad)
    check_slice(layer.weight, twin.weight.grad)
    spec = layer.weight.spec
    assert layer.weight.grad is not None
    assert layer.weight.shape[0] == padded_rows(vocab, group.size, 4)
    assert torch.all(layer.weight.grad[spec.local_shape[0] :] == 0)


def cross_entropy_is_cross_entropy(group: Group, vocab: int, options: CrossEntropyOptions, shift: float) -> None:
    full = seeded(7, 3, vocab) + shift
    targets = torch.arange(21).view(7, 3) % vocab
    targets[0, 1] = targets[6, 2] = options.ignore_index
    weights = seeded(7, 3, seed=4)
    start, stop = split_evenly(vocab, group.rank, group.size)
    local = F.pad(full[..., start:stop], (0, 5), value=99.0)  # padding that would win the softmax
    local.requires_grad_()
    loss = cross_entropy(local, targets, share=vocabulary_share(vocab, group), options=options)
    loss.backward(weights)

    full.requires_grad_()
    smoothing: dict[str, Any] = {"ignore_index": options.ignore_index, "label_smoothing": options.label_smoothing}
    expected = F.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="none", **smoothing).view(7, 3)
    if options.z_loss:
        log_z = full.logsumexp(-1)
        expected = expected + (options.z_loss * log_z.square()).masked_fill(targets == options.ignore_index, 0.0)
    expected.backward(weights)
    # A shift of 1e4 leaves the logits themselves with 1e-3 of rounding; the loss of the rounded logits stays exact.
    close(loss, expected, rtol=1e-6, atol=1e-6)
    assert local.grad is not None
    assert full.grad is not None
    close(local.grad[..., : stop - start], full.grad[..., start:stop])
    assert torch.all(local.grad[..., stop - start :] == 0)
    assert torch.all(loss[targets == options.ignore_index] == 0)


def argmax_is_argmax(group: Group, vocab: int) -> None:
    logits = seeded(5, 3, vocab)
    start, stop = split_evenly(vocab, group.rank, group.size)
    local = torch.full((5, 3, padded_rows(vocab, group.size, 8)), 100.0)  # the padding is larger than all
    local[..., : stop - start] = logits[..., start:stop]
    assert torch.equal(vocab_parallel_argmax(local, vocabulary_share(vocab, group)), logits.argmax(-1))


CROSS_ENTROPIES: list[tuple[int, CrossEntropyOptions, float]] = [
    (33, CrossEntropyOptions(), 0.0),
    (33, CrossEntropyOptions(label_smoothing=0.1), 0.0),
    (33, CrossEntropyOptions(z_loss=1e-2, label_smoothing=0.2, ignore_index=-1), 0.0),
    (3, CrossEntropyOptions(z_loss=1e-2, label_smoothing=0.2), 0.0),
    (33, CrossEntropyOptions(), 1e4),
    (33, CrossEntropyOptions(), -1e4),
]


# Torch's operators as it says they work, without symmetric memory.
FUSED = {
    name: getattr(symmetric, f"_{name}_fallback") for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
}


def every_layer(rank: int, size: int) -> None:
    group = world_group(rank, size)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for bias in (True, False):
            linear_is_linear(group, kind, bias)
            for way in (Messages(), SymmetricMemory()) if size > 1 else ():
                with patch.multiple(torch.ops.symm_mem, **FUSED):
                    linear_is_linear(group, kind, bias, way)
    for vocab in (17, 3, 32):
        embedding_is_embedding(group, vocab)
    for vocab, options, shift in CROSS_ENTROPIES:
        cross_entropy_is_cross_entropy(group, vocab, options, shift)
    argmax_is_argmax(group, 33)


@pytest.mark.parametrize("size", [1, 4])
def test_parallel_layers_are_their_twins(size: int) -> None:
    run_distributed(every_layer, size, stay=True)


def test_an_indivisible_width_is_refused() -> None:
    for layer in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(ValueError, match="13 does not divide over 4"):
            layer(13, 13, group=Group(ranks=(0, 1, 2, 3)))


def test_a_target_that_no_id_is_gives_nan() -> None:
    targets = torch.tensor([0, 9, -1, 5])
    loss = cross_entropy(seeded(4, 12), targets, share=vocabulary_share(9))
    assert torch.equal(loss.isnan(), torch.tensor([False, True, True, False]))


# ---- generators ------------------------------------------------------------------------------------------------------

Losses = dict[tuple[str, str], list[float]]


def losses_of_two_steps(rank: int, world_size: int, device: str = "cpu") -> Losses:
    """By attention and recomputation; building the trainer, reading and training change no state of the generator."""
    found: Losses = {}
    for attention, recompute in itertools.product(get_args(Attention), ("none", "selective", "full")):
        changes = {"device": device, "hidden_dropout": 0.1, "attention_dropout": 0.2, "attention": attention}
        with tempfile.TemporaryDirectory() as directory:
            config = make_config((1, 1, 1), directory, recompute=recompute, **changes)
            before = torch.manual_seed(len(found)).get_state()
            trainer = make_trainer(config, build_mesh(config.parallel))
            found[attention, recompute] = [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(2)]
            assert torch.equal(torch.get_rng_state(), before), (attention, recompute)
            if device != "cpu":
                assert torch.equal(torch.get_device_module(device).get_rng_state(), before), (attention, recompute)
    return found


def test_steps_with_dropout_leave_the_generator_as_it_was() -> None:
    (found,) = run_distributed(losses_of_two_steps, 1)
    for attention in get_args(Attention):
        assert found[attention, "none"] == found[attention, "selective"] == found[attention, "full"]
    assert found["auto", "none"] == found["sdpa", "none"]
    assert found["auto", "none"] == pytest.approx(found["fused-softmax", "none"], rel=1e-5)  # the same masks


def test_reading_ahead_leaves_the_generator_as_it_was() -> None:
    data = MockDataset(vocab_size=7, seq_length=4, num_samples=2, seed=3)
    before = torch.get_rng_state()
    loader = BatchLoader(data, Microbatch, micro_batch_size=1, global_batch_size=1, rank=0, ranks=1, num_workers=1)
    read, after = len(list(loader)), torch.get_rng_state()
    del loader  # ends its process, whatever the test finds
    assert read == 2
    assert torch.equal(after, before)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("kind", [NormOfEachHead, JointHeadNorm])
def test_a_norm_of_heads_multiplies_by_one_plus_its_weight(
    normalization: str, kind: type[NormOfEachHead] | type[JointHeadNorm], tmp_path: Path
) -> None:
    config = make_config((1, 1, 1), tmp_path, normalization=normalization, layernorm_1p=True, norm_bias=False).model
    norm, x = kind(config, 4, ranks=ALONE, group=ALONE), seeded(2, 3, 4, config.head_size)
    assert norm.weight is not None
    give(norm.weight, seeded(norm.weight.numel(), seed=1))
    vectors = x if kind is NormOfEachHead else x.flatten(2)
    twin = F.rms_norm if normalization == "RMSNorm" else F.layer_norm
    plain = twin(vectors, vectors.shape[-1:], eps=config.norm_epsilon).view_as(x)
    close(norm(x), plain * (1.0 + norm.weight.view(4, -1)), rtol=1e-5)
