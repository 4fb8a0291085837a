"""--reproducible-blocks: in how many blocks the sums are computed that tensor parallelism would cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megacore.config.messages import divisors, one_of
from megacore.config.schema import Config

_MOST = 8  # blocks by default: one for each device of a usual node
_ELEMENTS = 64  # of the vector registers that one iteration of an operator fills at most


def canonical_blocks(config: Config) -> int:
    """The number of blocks; 1: sums are cut where the layout cuts them.

    Args:
        config: valid by itself.
    """
    if not config.training.reproducible:
        return 1
    given = config.training.reproducible_blocks
    return given if given is not None else max(_possible(config))


def _possible(config: Config) -> list[int]:
    """The numbers of blocks up to `_MOST` into which the model can be divided."""
    return [count for count in (1, 2, 4, 8) if count <= _MOST and not list(_indivisible(config, count))]


def _indivisible(config: Config, count: int) -> Iterator[str]:
    """What cannot be divided into so many blocks, by its flag."""
    model, length = config.model, config.data.seq_length
    if count == 1:
        return
    yield from _uncut(config)
    heads, inner = model.num_attention_heads, model.inner_size
    if heads % count:
        yield f"--num-attention-heads {heads}"
    if model.query_groups % count and count % model.query_groups:
        yield f"--num-query-groups {model.query_groups}"
    if inner % count:
        yield f"--ffn-hidden-size {inner}"
    elif length * inner // count % _ELEMENTS:
        yield f"--seq-length x --ffn-hidden-size / {_ELEMENTS}, which is {length * inner / _ELEMENTS:g}"
    if (heads + 2 * model.query_groups) * model.head_size % count:
        yield f"the {(heads + 2 * model.query_groups) * model.head_size} rows of the projection of all heads"
    if length < count:
        yield f"--seq-length {length}"


def _uncut(config: Config) -> Iterator[str]:
    """What computes sums that are not divided into blocks yet, by its flag."""
    model = config.model
    flags = {
        "--num-experts": getattr(config, "experts", None) is not None and config.experts.num_experts is not None,
        "--multi-latent-attention": model.multi_latent_attention,
        "--qk-layernorm-all-heads": model.qk_layernorm_all_heads,
    }
    yield from (flag for flag, given in flags.items() if given)


def _blocks(config: Config, world_size: int) -> Iterator[str]:
    given, reproducible = config.training.reproducible_blocks, config.training.reproducible
    if given is None:
        return
    if not reproducible:
        yield f"--reproducible-blocks {given} says how --reproducible computes: add --reproducible, or leave it out"
    elif given & (given - 1):
        below = 1 << (given.bit_length() - 1)
        yield f"--reproducible-blocks {given} must be a power of two: use {below} or {2 * below}"
    elif given > 1 and (uncut := list(_uncut(config))):
        yield (
            f"--reproducible-blocks {given} is not possible with {' and '.join(uncut)}, whose sums have one block: "
            "leave it out"
        )
    elif undivided := list(_indivisible(config, given)):
        yield (
            f"--reproducible-blocks {given} must divide {' and '.join(undivided)}: use "
            f"{one_of(_possible(config))}, or leave it out"
        )


def _tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    tp, count = config.parallel.tp, canonical_blocks(config)
    if config.training.reproducible and count > 1 and count & (count - 1) == 0 and count % tp:
        yield (
            f"--reproducible computes sums in {count} blocks, which --tp {tp} must divide: use "
            f"--tp {one_of(divisors(count))}, or --reproducible-blocks 1, with which another --tp rounds differently"
        )


def _compiled(config: Config, world_size: int) -> Iterator[str]:
    if config.training.compile and canonical_blocks(config) > 1:
        yield (
            "--reproducible computes sums in blocks, which --compile would fuse differently in each layout: "
            "add --reproducible-blocks 1, with which another --tp rounds differently, or leave --compile out"
        )


_MODEL = frozenset(
    ("reproducible_blocks", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size", "seq_length",
     "kv_channels")
)  # fmt: skip
REPRODUCIBLE_RULES: list[tuple[frozenset[str], Callable[[Config, int], Iterator[str]]]] = [
    (_MODEL, _blocks),
    (_MODEL | {"tp"}, _tensor_parallel),
    (_MODEL | {"compile"}, _compiled),
]
"""Constraints, each with the fields that it reads."""
