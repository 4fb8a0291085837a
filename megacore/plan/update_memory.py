"""What exists for a moment while weights are updated, when there are no activations: a tied table's gradients of other
stages, copies of gradients in fp32, and what the optimizer computes with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role, shard_ranks
from megacore.config.optimizers import Updated
from megacore.models.size import ELEMENT_BYTES, vocabulary_rows
from megacore.plan.cut import OnRank
from megacore.plan.experts import expert_copies, expert_share
from megacore.plan.once import once_per_state
from megacore.plan.orthogonal_memory import orthogonalizing_bytes
from megacore.plan.state import PlannedLayer, term_bytes, updates_in_one_pass, zero_stage
from megacore.plan.unreduced import Piece, bucket_members, pieces
from megacore.plan.whole_matrices import of_chunk, update_buckets
from megacore.zero.buckets import grown

# Elements of a tied table's gradient that are summed at a time (parallel/direct.py).
_SUMMED_AT_ONCE = 1 << 24


@once_per_state
def updating_bytes(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool) -> float:
    """The most that exists beside the state of a rank.

    Args:
        config: a resolved configuration.
        on_rank: what the rank holds.
        on_cpu: whether it computes in host memory.
    """
    return max(_of_tied_sum(config, on_rank), _of_optimizer(config, on_rank, on_cpu=on_cpu))


def _of_tied_sum(config: ResolvedConfig, on_rank: OnRank) -> float:
    """The part of a tied table's gradient that another stage sends: where the first and the last stage are on ranks of
    their own, and others are between them."""
    if config.parallel.pp <= 2:
        return 0.0  # a collective of the whole pipeline, in place
    holds = any(layer.name in ("embedding", "head") for chunk in on_rank.chunks for layer in chunk)
    if config.model.untie_embeddings_and_output_weights or not config.model.vocab_size or not holds:
        return 0.0
    table = vocabulary_rows(config.model, ranks_of_role("layer", config.parallel)) * config.model.hidden_size
    shards = shard_ranks(config.parallel) if zero_stage(config) >= 1 else 1
    return term_bytes(config) * min(table / shards, _SUMMED_AT_ONCE)


def _of_optimizer(config: ResolvedConfig, on_rank: OnRank, *, on_cpu: bool) -> float:
    """Copies in fp32 of the gradients of the bucket that is updated, and the temporary tensors of the optimizer."""
    settings, parallel = config.optimizer_settings, config.parallel
    if parallel.offload_optimizer or updates_in_one_pass(config, on_cpu=on_cpu):
        return 0.0
    found = [0.0]
    for chunk, sizes in zip(on_rank.chunks, on_rank.by_layer, strict=True):
        for updated in _updated(config, chunk, sizes, on_cpu=on_cpu):
            of_bucket, at_end = settings.temporary_bytes(updated)
            copies = 4.0 * updated.elements if updated.is_copied else 0.0
            found += [copies + of_bucket, at_end]
        if settings.joins_slices:
            found += _of_matrices(config, chunk, sizes, on_cpu=on_cpu)
    return max(found)


def _of_matrices(
    config: ResolvedConfig, chunk: Sequence[PlannedLayer], sizes: Sequence[int], *, on_cpu: bool
) -> Iterator[float]:
    """Of each bucket with matrices that the optimizer takes whole: the copies in fp32 of the gradients that the rank
    updates, and what their directions take. Where a bucket has others too, its matrices are those of the stage that are
    no larger than the largest one."""
    copied = 4.0 if _is_copied(config) else 0.0
    if _mixes(config):
        held = [matrix for _, matrix in of_chunk(config, chunk, on_cpu=on_cpu)]
        for members in _members(config, chunk, sizes, on_cpu=on_cpu):
            largest = max((piece.size for piece in members if piece.whole), default=0)
            matrices = [matrix for matrix in held if matrix.size <= largest]
            directions = orthogonalizing_bytes(config, matrices, at_once=False, share=1.0)
            yield copied * sum(piece.size for piece in members) + directions
        return
    is_sharded = zero_stage(config) > 0
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    for bucket in update_buckets(config, chunk, on_cpu=on_cpu):
        ranks = copies if bucket.of_experts else shards
        at_once = not is_sharded and ranks > 1
        directions = orthogonalizing_bytes(config, bucket.matrices, at_once=at_once, share=1 / ranks)
        yield copied * bucket.size / (ranks if is_sharded else 1) + directions


def _updated(
    config: ResolvedConfig, chunk: Sequence[PlannedLayer], sizes: Sequence[int], *, on_cpu: bool
) -> Iterator[Updated]:
    """What the rank updates of each bucket of a stage with layers of `sizes` parameters, of equal buckets once. A run
    has parameters without a vector between them."""
    stage = zero_stage(config)
    ranks = {True: expert_copies(config.parallel), False: shard_ranks(config.parallel)} if stage else {}
    is_copied, counts_tables = _is_copied(config), any(layer.name == "embedding" for layer in chunk)
    for members in dict.fromkeys(map(tuple, _members(config, chunk, sizes, on_cpu=on_cpu))):
        shards = ranks.get(members[0].kind == "experts", 1)
        elements = sum(piece.size for piece in members) / shards
        parts = [min(_largest_part(config, chunk, piece), elements) for piece in members]
        counted = [size for piece, size in zip(members, parts, strict=True) if counts_tables or piece.kind != "apart"]
        run = min(max(piece.size for piece in members), elements)
        yield Updated(elements, run, max(parts), max(counted, default=0.0), is_copied)


def _is_copied(config: ResolvedConfig) -> bool:
    """Whether gradients are copied to fp32."""
    return ELEMENT_BYTES[config.precision.grad_reduce_dtype] != 4 and not config.training.reproducible


def _mixes(config: ResolvedConfig) -> bool:
    """Whether matrices that the optimizer takes whole share buckets with other parameters: no rank shards any."""
    return ranks_of_role("replicas", config.parallel) == expert_copies(config.parallel) == 1


def _members(
    config: ResolvedConfig, chunk: Sequence[PlannedLayer], sizes: Sequence[int], *, on_cpu: bool
) -> list[list[Piece]]:
    """The parameters of each kind of bucket of a stage; on ZeRO's stage 3 it has those of a layer. Where shards may not
    split matrices they count as a bucket each."""
    layers = tuple(
        pieces(config, layer, size, experts=True, on_cpu=on_cpu) for layer, size in zip(chunk, sizes, strict=True)
    )
    shards, copies = shard_ranks(config.parallel), expert_copies(config.parallel)
    limit = min(int(config.parallel.bucket_size_mb * 2**20), sum(sizes))
    limits = (grown(limit, shards), grown(limit, copies))
    mixes = _mixes(config)
    kinds = list(dict.fromkeys(layers))  # equal layers have equal buckets
    stages = [(kind,) for kind in kinds] if zero_stage(config) == 3 else [layers]
    whole = [[piece] for kind in kinds for piece in kind if piece.whole and not mixes]
    return [*(members for stage in stages for members in bucket_members(stage, limits, mixes=mixes)), *whole]


def _largest_part(config: ResolvedConfig, chunk: Sequence[PlannedLayer], piece: Piece) -> float:
    """Elements of the largest parameter of a piece; the matrix of every expert is one."""
    if piece.kind != "experts":
        return piece.size
    shares = [share for one in chunk if one.block and (share := expert_share(config, one.block)) is not None]
    return piece.size / max(share.held for share in shares)
