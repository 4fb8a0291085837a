"""LAMB: Adam whose step for a matrix has the norm of the matrix (You et al. 2020, arXiv 1904.00962, algorithm 2). The
trust ratio is that of the whole parameter, however it is divided over ranks: the sums of squares of all parts of all
parameters are added up in one collective per step. Vectors (biases, norm weights), which do not decay, have the ratio
1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from megacore.config import ResolvedConfig
from megacore.config.optimizers import LambConfig, OptimizerSettings
from megacore.optim.optimizer import AdamLike
from megacore.optim.parameter_norms import ParameterNorms
from megacore.parallel.mesh import Mesh
from megacore.zero.local_segments import LocalRun, LocalSegment


class _Rates(NamedTuple):
    """Of a run, in the step under way."""

    lr: float
    weight_decay: float


L = TypeVar("L", bound=OptimizerSettings)


class LambStep(AdamLike[L]):
    """Updates moments bucket by bucket. Computes the step twice, for its norm and to take it: no memory holds it
    meanwhile."""

    @property
    def defers(self) -> bool:
        return True

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        self._norms = ParameterNorms(segments, mesh, exact=config.training.reproducible)
        self._rates: dict[LocalRun, _Rates] = {}
        self._limits = self.settings if isinstance(self.settings, LambConfig) else config.lamb

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        beta2 = self.adam.adam_beta2
        means, squares = self.tensors("exp_avg", runs), self.tensors("exp_avg_sq", runs)
        for gradient, mean, square, step in zip(gradients, means, squares, self.steps(runs), strict=True):
            step += 1
            mean.lerp_(gradient, 1 - self.momentum)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.note_rates(runs, lr=lr, weight_decay=weight_decay)

    def note_rates(self, runs: Sequence[LocalRun], *, lr: float, weight_decay: float) -> None:
        self._rates |= dict.fromkeys(runs, _Rates(lr, weight_decay))

    def ratios(self) -> Tensor:
        """The factor of the step of each parameter in the table of norms, fp64; all ranks call this together."""
        table = self._norms.table(columns=2)
        for run in self._rates:
            if not run.is_matrix:
                continue
            step = self._step_of(run)
            for part in self._norms.parts_of[run]:
                self._norms.add(table, part, (run.master[part.in_run], step[part.in_run]))
        weights, steps = self._norms.summed(table).sqrt().unbind(1)
        ratios = (weights / steps).clamp(self._limits.lamb_min_coeff, self._limits.lamb_max_coeff)
        return ratios.where((weights > 0) & (steps > 0), 1.0)

    @torch.no_grad()
    def finish(self) -> None:
        ratios = self.ratios()
        for run, rates in self._rates.items():
            step = self._step_of(run)
            for part in self._norms.parts_of[run] if run.is_matrix else ():
                step[part.in_run] *= ratios[part.row].to(step.device)
            run.master.sub_(step, alpha=rates.lr)
        self._rates.clear()

    def _step_of(self, run: LocalRun) -> Tensor:
        """Adam's step of a run with its weight decay, without the learning rate."""
        state, step = self.state[run], self.steps([run])[0]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        root = (square / (1 - self.adam.adam_beta2**step)).sqrt_().add_(self.adam.adam_eps)
        return (mean / (1 - self.momentum**step)).div_(root).add_(run.master, alpha=self._rates[run].weight_decay)


class Lamb(LambStep[LambConfig]):
    """LAMB on every layout."""
