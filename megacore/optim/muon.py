"""Muon: matrices of blocks move along orthogonalized momentum, all other parameters by AdamW (Jordan et al. 2024;
scales and weight decay as in Liu et al. 2025, arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megacore.config import ResolvedConfig
from megacore.config.optimizers import MuonConfig
from megacore.errors import ConfigError
from megacore.optim.adamw import fused_
from megacore.optim.optimizer import AdamLike
from megacore.optim.whole_matrices import WholeMatrices
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment

_A, _B, _C = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7


def orthogonalized(matrix: Tensor, *, steps: int) -> Tensor:
    """The approximate U V^T of `matrix`, [r, c], or [n, r, c] for several, in the dtype of the products, where U S V^T
    is its singular value decomposition. This Newton-Schulz iteration's quintic polynomial has the steepest slope at
    zero, and does not converge: after five steps the singular values are between about 0.7 and 1.2."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=_B, alpha=_C)
        x = add_product(x, polynomial, x, beta=_A)
    return x.mT if is_tall else x


class Muon(AdamLike[MuonConfig]):
    """Momentum is that of the rank's own part; the iteration sees whole matrices, each computed once among the ranks
    that hold the matrix (megacore/optim/whole_matrices.py)."""

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        whole = [local for local in segments if local.run.shape is not None]
        # A dry run does not know what other ranks hold.
        if mesh.backend != "fake" and not any(all_gather_objects(bool(whole), mesh.world)):
            raise ConfigError(
                [
                    f"--optimizer parameters={self.settings.muon_parameters}: no matrix has such a name, so that Muon "
                    "would be AdamW: use a pattern of the global names, such as blocks.*"
                ]
            )
        self._segment = {local.run: local for local in whole}
        self._matrices = WholeMatrices(whole, mesh)
        model = config.model
        self._head, self._groups = model.head_size, model.query_groups
        self._shared_by = model.num_attention_heads // self._groups
        self._rows_of_kinds = [rows.to(mesh.device) for rows in self._by_kind()]
        self._scales: dict[str, Tensor] = {}  # of the rows of this rank's slices, where the weights are
        narrow = self.settings.muon_ns_dtype == "bf16" or (
            self.settings.muon_ns_dtype == "auto" and config.precision.precision != "fp32"
        )
        self._dtype = torch.bfloat16 if narrow else torch.float32

    @property
    def usual_momentum(self) -> float:
        return self.settings.muon_momentum

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        pairs = list(zip(runs, gradients, strict=True))
        if others := [(run, gradient) for run, gradient in pairs if run.shape is None]:
            tensors = self.adam_tensors([run for run, _ in others], [gradient for _, gradient in others])
            fused_(adamw, tensors, beta1=self.adam.adam_beta1, settings=self.adam, lr=lr, weight_decay=weight_decay)
        if whole := [(run, gradient) for run, gradient in pairs if run.shape is not None]:
            at_once = self._matrices.at_once(whole[0][0].bucket) or len(whole)
            for first in range(0, len(whole), at_once):
                self._update_matrices(whole[first : first + at_once], lr=lr, weight_decay=weight_decay)

    def _update_matrices(self, pairs: Sequence[tuple[LocalRun, Tensor]], *, lr: float, weight_decay: float) -> None:
        directions: dict[str, Tensor] = {}
        for (run, gradient), momentum in zip(pairs, self.tensors("momentum", [run for run, _ in pairs]), strict=True):
            directions[self._segment[run].spec.name] = self._direction(gradient.view(momentum.shape), momentum)
        results = self._matrices.apply(pairs[0][0].bucket, directions, self._orthogonalized)
        for run, _ in pairs:
            spec, shape = self._segment[run].spec, run.shape
            assert shape is not None
            step = results[spec.name].to(run.master.device)
            master = run.master.view(shape)
            master.mul_(1 - lr * weight_decay)
            if self._is_split(spec.name):
                if spec.name not in self._scales:
                    self._scales[spec.name] = self._row_scales(spec.name)[slice(*spec.slices[0])].to(step.device)
                master.sub_(step.float() * (lr * self._scales[spec.name]))
            else:
                master.sub_(step, alpha=lr * self._scale(*self._matrices.shape(spec.name)[-2:]))

    def _direction(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        """The direction of a matrix, or of a slice of it, before it is made orthogonal; updates the momentum."""
        momentum.lerp_(gradient, 1 - self.momentum)
        direction = gradient.lerp(momentum, self.momentum) if self.settings.muon_nesterov else momentum
        return direction.to(self._dtype)

    def _orthogonalized(self, name: str, matrix: Tensor) -> Tensor:
        """The orthogonal factor of a whole parameter, or of the matrices that it consists of."""
        steps = self.settings.muon_num_ns_steps
        if not self._is_split(name):
            return orthogonalized(matrix, steps=steps)
        if self.settings.muon_split_qkv == "heads":
            return orthogonalized(matrix.view(-1, self._head, matrix.shape[1]), steps=steps).reshape(matrix.shape)
        result = torch.empty_like(matrix)
        for rows in self._rows_of_kinds:
            result[rows] = orthogonalized(matrix[rows], steps=steps)
        return result

    def _is_split(self, name: str) -> bool:
        rows = self._groups * (self._shared_by + 2) * self._head
        is_joint = name.endswith(".attention.qkv.weight") and self._matrices.shape(name)[0] == rows
        return self.settings.muon_split_qkv != "none" and is_joint

    def _by_kind(self) -> list[Tensor]:
        """The rows of all queries, all keys and all values of their layer, where they lie by head group."""
        rows = torch.arange(self._groups * (self._shared_by + 2) * self._head)
        by_group = rows.view(self._groups, self._shared_by + 2, self._head)
        return [part.reshape(-1) for part in by_group.split([self._shared_by, 1, 1], dim=1)]

    def _row_scales(self, name: str) -> Tensor:
        """The scale of each row of the whole parameter, [rows, 1] fp32."""
        rows, width = self._matrices.shape(name)
        if self.settings.muon_split_qkv == "heads":
            return torch.full((rows, 1), self._scale(self._head, width))
        scales = torch.empty(rows, 1)
        for of_kind in self._by_kind():
            scales[of_kind] = self._scale(len(of_kind), width)
        return scales

    def _scale(self, rows: int, columns: int) -> float:
        match self.settings.muon_scale_mode:
            case "spectral":
                scale = math.sqrt(max(rows, columns))
            case "unit_rms_norm":
                scale = math.sqrt(rows / columns)
            case _:
                scale = math.sqrt(max(1.0, rows / columns))
        return scale * self.settings.muon_extra_scale_factor
