"""What an optimizer such as Muon holds for a moment to make the directions of matrices orthogonal (optim/muon.py,
optim/whole_matrices.py, optim/newton_schulz.py)."""

from __future__ import annotations

from collections.abc import Iterable

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.plan.whole_matrices import Matrix


def orthogonalizing_bytes(config: ResolvedConfig, matrices: Iterable[Matrix], *, at_once: bool, share: float) -> float:
    """The most that exists beside gradients and state while matrices of one bucket are updated.

    Args:
        config: a resolved configuration.
        matrices: those of the bucket.
        at_once: whether replicas share the directions of all of them; otherwise slices of as many are given together
            as ranks hold slices, one by one where no rank has slices.
        share: of the directions that this rank computes.
    """
    e, held = config.optimizer_settings.direction_bytes(config.precision.precision), list(matrices)
    if not at_once:
        return max((_of_one(config, matrix) for matrix in held), default=0.0)
    given = e * sum(matrix.size for matrix in held)  # and as much for the results
    computed = max((_of_one(config, matrix) - e * _given(config, matrix) for matrix in held), default=0.0)
    own = max(given * share - e * max((matrix.size for matrix in held), default=0), 0.0)
    return 2 * given + own + computed


def _ranks(config: ResolvedConfig, matrix: Matrix) -> int:
    """That hold slices of a matrix."""
    if matrix.of_expert:
        return config.parallel.expert_split
    return ranks_of_role("layer", config.parallel) if matrix.is_cut else 1


def _given(config: ResolvedConfig, matrix: Matrix) -> int:
    """Elements of the slices that are given together with that of a matrix, if they are as large."""
    return matrix.size * _ranks(config, matrix)


def _of_one(config: ResolvedConfig, matrix: Matrix) -> float:
    """Of a matrix, or of as many as ranks hold slices of it.

    - A direction exists in fp32 before it is rounded.
    - An iteration holds X, the next X, X X^T and a polynomial of it; of a split matrix also the rows that are taken,
      and the result.
    - A matrix whose slices are joined exists whole, and its result once more as it is sent.
    - The step of a split matrix is multiplied by the scales of its rows in fp32.
    """
    settings = config.optimizer_settings
    e, ranks = settings.direction_bytes(config.precision.precision), _ranks(config, matrix)
    is_split = len(matrix.products) > 1
    sizes = [product.number * product.rows * product.columns for product in matrix.products]
    grams = [product.number * min(product.rows, product.columns) ** 2 for product in matrix.products]
    copies = 3 if is_split else 2
    iteration = e * max(copies * size + 2 * gram for size, gram in zip(sizes, grams, strict=True))
    given, whole = e * _given(config, matrix), e * sum(sizes)
    joined = whole if ranks > 1 else 0.0
    computed = joined + iteration + (whole if is_split else 0.0)
    sent = 3 * whole if ranks > 1 else whole
    rounded = 4.0 * matrix.size if e < 4 else 0.0
    is_scaled = is_split or (settings.split_qkv == "heads" and matrix.products[0].number > 1 and not matrix.of_expert)
    scaled = given + (4.0 * matrix.size * (2 if e < 4 else 1) if is_scaled else 0.0)
    return given + max(rounded, computed, sent, scaled)
