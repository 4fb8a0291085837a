"""Orthogonal factors of matrices by a Newton-Schulz iteration (Jordan et al. 2024, "Muon"). For a matrix with the
singular value decomposition U S V^T, the iteration approaches U V^T. Its quintic polynomial has the steepest slope at
zero, and does not converge: after five steps the singular values are between about 0.7 and 1.2."""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7


def orthogonalized(matrix: Tensor, *, steps: int) -> Tensor:
    """The approximate U V^T of `matrix`, [r, c], or [n, r, c] for several, in the dtype of the products."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=_B, alpha=_C)
        x = add_product(x, polynomial, x, beta=_A)
    return x.mT if is_tall else x
