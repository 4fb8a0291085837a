"""Adafactor: the second moments of a matrix from their means over rows and columns (Shazeer and Stern 2018, arXiv
1804.04235), with decoupled weight decay, as in torch.optim.Adafactor.

Matrices of blocks are taken whole and factored. All other parameters may be divided over ranks and keep the second
moment of every element. Steps are scaled by root mean squares of whole parameters, which one collective per step adds
up; until then the step of a parameter lies where its gradient was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.optimizers import AdafactorConfig
from megacore.optim.optimizer import Optimizer
from megacore.optim.parameter_norms import ParameterNorms
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment


class _Step(NamedTuple):
    """Of a run: the gradient divided by the root of its second moment, and the rates."""

    direction: Tensor
    lr: float
    weight_decay: float


class Adafactor(Optimizer[AdafactorConfig]):
    """Without momentum."""

    counts_updates: ClassVar[bool] = True

    @property
    def defers(self) -> bool:
        return True

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        self._norms = ParameterNorms(segments, mesh, exact=config.training.reproducible)
        self._pending: dict[LocalRun, _Step] = {}

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        for run, gradient, step in zip(runs, gradients, self.steps(runs), strict=True):
            step += 1
            direction = gradient if run.shape is None else gradient.view(run.shape)
            root = self._second_moment(run, direction, step**self.settings.adafactor_beta2_decay)
            direction.mul_(root.clamp_(min=self.settings.adafactor_eps1**2).rsqrt_())
            self._pending[run] = _Step(gradient, lr, weight_decay)

    def _second_moment(self, run: LocalRun, gradient: Tensor, weight: Tensor) -> Tensor:
        """Take in a gradient.

        Args:
            run: of these elements.
            gradient: of the shape of the state.
            weight: of this gradient in the moving means.

        Returns:
            A new tensor of the gradient's shape.
        """
        if run.shape is None:
            (moment,) = self.tensors("exp_avg_sq", [run])
            return moment.lerp_(gradient.square(), weight).clone()
        (rows,), (columns,) = self.tensors("exp_avg_sq_row", [run]), self.tensors("exp_avg_sq_col", [run])
        rows.lerp_(torch.linalg.vector_norm(gradient, dim=1).square_().div_(gradient.shape[1]), weight)
        columns.lerp_(torch.linalg.vector_norm(gradient, dim=0).square_().div_(gradient.shape[0]), weight)
        return torch.outer(rows, columns).div_(rows.mean().clamp_(min=self.settings.adafactor_eps1))

    @torch.no_grad()
    def finish(self) -> None:
        table = self._norms.table(columns=2)
        for run, step in self._pending.items():
            for part in self._norms.parts_of[run]:
                self._norms.add(table, part, (run.master[part.in_run], step.direction[part.in_run]))
        sums = self._norms.summed(table)
        for run, step in self._pending.items():
            (number,) = self.steps([run])
            for part in self._norms.parts_of[run]:
                weight, size = (sums[part.row] / part.size).sqrt().to(number.device).unbind()
                rate = number.rsqrt().clamp(max=step.lr) * weight.clamp(min=self.settings.adafactor_eps2)
                step.direction[part.in_run] *= rate / (size / self.settings.adafactor_clip).clamp(min=1.0)
            run.master.mul_(1 - step.lr * step.weight_decay).sub_(step.direction)
        self._pending.clear()
