"""Adafactor: the second moments of a matrix from their means over rows and columns (Shazeer and Stern 2018, arXiv
1804.04235), with decoupled weight decay, as in torch.optim.Adafactor.

Matrices of blocks are taken whole and factored. All other parameters may be divided over ranks and keep the second
moment of every element. Steps are scaled by root mean squares of whole parameters, which one collective per step adds
up. Until then the step of a parameter lies where its gradient was, in fp32; from a gradient in 16 bits it is computed
again, so that no memory holds it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.optimizers import AdafactorConfig
from megacore.optim.optimizer import Optimizer, scale_gradients
from megacore.optim.parameter_norms import ParameterNorms
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment


class _Step(NamedTuple):
    """Of a run: gradient / root of its second moment, flat, or None if it is computed again; and the rates."""

    direction: Tensor | None
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
        self._begin()

    def _begin(self) -> None:
        self._pending: dict[LocalRun, _Step] = {}
        self._table = self._norms.table(columns=2)

    def step(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor | None], *, lr: float, factor: Tensor) -> None:
        self._factor = factor
        super().step(runs, gradients, lr=lr, factor=factor)

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        for run, gradient, step in zip(runs, gradients, self.steps(runs), strict=True):
            step += 1
            weight = step**self.settings.adafactor_beta2_decay
            shaped = gradient if run.shape is None else gradient.view(run.shape)
            if run.shape is None:
                (moment,) = self.tensors("exp_avg_sq", [run])
                moment.lerp_(gradient.square(), weight)
            else:
                (rows,), (columns,) = self.tensors("exp_avg_sq_row", [run]), self.tensors("exp_avg_sq_col", [run])
                rows.lerp_(torch.linalg.vector_norm(shaped, dim=1).square_().div_(shaped.shape[1]), weight)
                columns.lerp_(torch.linalg.vector_norm(shaped, dim=0).square_().div_(shaped.shape[0]), weight)
            self._divide(run, gradient)
            for part in self._norms.parts_of[run]:
                self._norms.add(self._table, part, (run.master[part.in_run], gradient[part.in_run]))
            self._pending[run] = _Step(None if run.gradient_is_copied else gradient, lr, weight_decay)

    def _divide(self, run: LocalRun, gradient: Tensor) -> None:
        """Divide a flat gradient in place by the root of the run's second moment."""
        if run.shape is None:
            (moment,) = self.tensors("exp_avg_sq", [run])
            root = moment.clone()
        else:
            (rows,), (columns,) = self.tensors("exp_avg_sq_row", [run]), self.tensors("exp_avg_sq_col", [run])
            root = torch.outer(rows, columns).div_(rows.mean().clamp_(min=self.settings.adafactor_eps1))
        gradient.view(root.shape).mul_(root.clamp_(min=self.settings.adafactor_eps1**2).rsqrt_())

    @torch.no_grad()
    def finish(self) -> None:
        sums = self._norms.summed(self._table)
        for run, step in self._pending.items():
            direction = self._direction(run) if step.direction is None else step.direction
            (number,) = self.steps([run])
            for part in self._norms.parts_of[run]:
                weight, size = (sums[part.row] / part.size).sqrt().to(number.device).unbind()
                rate = number.rsqrt().clamp(max=step.lr) * weight.clamp(min=self.settings.adafactor_eps2)
                direction[part.in_run] *= rate / (size / self.settings.adafactor_clip).clamp(min=1.0)
            run.master.mul_(1 - step.lr * step.weight_decay).sub_(direction)
        self._begin()

    def _direction(self, run: LocalRun) -> Tensor:
        gradient = run.gradient
        assert gradient is not None
        direction = gradient.float()
        scale_gradients([direction], self._factor)
        self._divide(run, direction)
        return direction
