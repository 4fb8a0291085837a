"""1-bit Adam and 1-bit LAMB: after a warm-up the replicas sum the momentum, in a bit per element, and no gradients.

In the warm-up they are AdamW and LAMB. Then the variance stays as it is. Every replica updates the momentum with its
own gradient, and the mean of these momenta is the next one; what its compression leaves out is added to the next
message (zero/compressed.py). Elements whose variance is 0, because their gradient was 0 in the whole warm-up, stay
where they are: a bit has no zero, and nothing says how large a step of theirs may be. Steps of elements with a tiny
variance are limited by `adam_eps` only.

- Tang et al. 2021, "1-bit Adam" (arXiv 2102.02888), algorithm 1.
- Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), algorithm 1. Its scaling of momenta is not needed here: blocks have
  scales of their own.

The bias of both moments is corrected, as in AdamW and LAMB, which the papers' algorithms leave out; that of the
variance by the updates of the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megacore.config import ResolvedConfig
from megacore.config.optimizers import OneBitAdamConfig, OneBitLambConfig, OptimizerSettings
from megacore.optim.adamw import fused_
from megacore.optim.lamb import LambStep
from megacore.optim.optimizer import AdamLike, scale_gradients
from megacore.parallel.collectives import all_reduce_job_
from megacore.parallel.mesh import Mesh
from megacore.zero.bucket import Bucket
from megacore.zero.local_segments import LocalRun, LocalSegment

S = TypeVar("S", bound=OptimizerSettings)


class _SharedMomentum(AdamLike[S], Generic[S]):
    """The momentum of an optimizer with the state `exp_avg` and `exp_avg_sq`, on ZeRO stage 0."""

    _warm_up = 1
    _done = 0  # updates before the one under way
    _frozen_after: int | None = None  # updates in which the variance was computed; None: it still is

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        super().attach(segments, mesh, config)
        self._warm_up = config.onebitadam.warm_up(config.training.train_iters)
        self._restricted: set[Bucket] = set()  # whose elements without variance are known

    @property
    def is_frozen(self) -> bool:
        return self._frozen_after is not None

    def begin_step(self, updates: int) -> bool:
        self._done = updates
        if self._frozen_after is None and self._done >= self._warm_up:
            self._frozen_after = self._done
            self.freeze()
        return not self.is_frozen

    def freeze(self) -> None:
        """The warm-up is over."""

    def series(self) -> dict[str, list[float]]:
        return {} if self._frozen_after is None else {"onebit_frozen_after": [float(self._frozen_after)]}

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        for number in series.get("onebit_frozen_after", ()):
            self._frozen_after = int(number)

    def step(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor | None], *, lr: float, factor: Tensor) -> None:
        if self.is_frozen:
            present = [(run, grad) for run, grad in zip(runs, gradients, strict=True) if grad is not None]
            scale_gradients([grad for _, grad in present], factor)
            self._update_momentum(present)
            factor = torch.ones(())
        super().step(runs, gradients, lr=lr, factor=factor)

    def _update_momentum(self, present: Sequence[tuple[LocalRun, Tensor]]) -> None:
        """Of the runs of one bucket, with gradients that are this rank's share of their sum over the replicas."""
        if not present:
            return
        bucket = present[0][0].bucket
        old = self.tensors("exp_avg", [run for run, _ in present])
        if bucket.compressed is None:  # there are no replicas
            squares = self.tensors("exp_avg_sq", [run for run, _ in present])
            for (run, gradient), mean, square in zip(present, old, squares, strict=True):
                new = torch.lerp(mean, gradient, 1 - self.momentum)
                self.take_momentum(run, mean, new.mul_(square > 0))
            return
        share, terms = self.momentum / bucket.group.size, bucket.master.new_zeros(bucket.layout.size)
        if bucket not in self._restricted:
            counted = terms.bool()
            squares = self.tensors("exp_avg_sq", [run for run, _ in present])
            for (run, _), square in zip(present, squares, strict=True):
                counted[run.shard_slice] = square > 0
            bucket.compressed.restrict(counted)
            self._restricted.add(bucket)
        for (run, gradient), mean in zip(present, old, strict=True):
            torch.mul(mean, share, out=terms[run.shard_slice]).add_(gradient, alpha=1 - self.momentum)
        bucket.compressed.begin(terms)
        summed = bucket.compressed.whole_sum()
        for (run, _), mean in zip(present, old, strict=True):
            self.take_momentum(run, mean, summed[run.shard_slice])

    def take_momentum(self, run: LocalRun, mean: Tensor, new: Tensor) -> None:
        mean.copy_(new)

    def root(self, run: LocalRun, kind: str, updates: int) -> Tensor:
        """Adam's denominator from a variance that `updates` updates have made."""
        square, beta2 = self.state[run][kind], self.adam.adam_beta2
        return (square / (1 - beta2**updates)).sqrt_().add_(self.adam.adam_eps)

    def count(self, runs: Sequence[LocalRun]) -> None:
        for step in self.steps(runs):
            step += 1

    @property
    def correction(self) -> float:
        """What the momentum is divided by, for its bias."""
        return 1 - self.momentum ** (self._done + 1)


class OneBitAdam(_SharedMomentum[OneBitAdamConfig]):
    """AdamW whose momentum is compressed after the warm-up."""

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        if self._frozen_after is not None:
            self.count(runs)
            for run, mean in zip(runs, self.tensors("exp_avg", runs), strict=True):
                root = self.root(run, "exp_avg_sq", self._frozen_after)
                run.master.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / self.correction)
            return
        tensors = self.adam_tensors(runs, gradients)
        fused_(adamw, tensors, beta1=self.momentum, settings=self.adam, lr=lr, weight_decay=weight_decay)


class OneBitLamb(_SharedMomentum[OneBitLambConfig], LambStep[OneBitLambConfig]):
    """LAMB whose momentum is compressed after the warm-up. A matrix then has the mean of its trust ratios in the
    warm-up, times a factor that follows the variance. That is estimated from the gradients which the compressed momenta
    stand for; the weight decay's part of the step takes no part in it."""

    _weight = 0.0  # of the ratios in their running mean

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        super().attach(segments, mesh, config)
        self._mesh = mesh
        rows = len(self._norms.table(columns=1))
        self._means = torch.zeros(rows, dtype=torch.float64, device=mesh.device)  # of the ratios of each parameter
        self._factors = torch.ones_like(self._means)

    def series(self) -> dict[str, list[float]]:
        own = {"onebit_ratios": [self._weight, *self._means.tolist()], "onebit_factors": self._factors.tolist()}
        return super().series() | own

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        super().load_series(series)
        if "onebit_ratios" in series:
            self._weight, *means = series["onebit_ratios"]
            self._means.copy_(torch.tensor(means, dtype=torch.float64))
            self._factors.copy_(torch.tensor(series["onebit_factors"], dtype=torch.float64))

    def freeze(self) -> None:
        for run in self.runs:
            fresh, square = self.tensors("exp_avg_sq_fresh", [run])[0], self.tensors("exp_avg_sq", [run])[0]
            fresh.copy_(square)

    def take_momentum(self, run: LocalRun, mean: Tensor, new: Tensor) -> None:
        gradient = self.momentum * mean
        torch.sub(new, gradient, out=gradient).div_(1 - self.momentum)
        fresh, beta2 = self.tensors("exp_avg_sq_fresh", [run])[0], self.adam.adam_beta2
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean.copy_(new)

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        if not self.is_frozen:
            super().update(runs, gradients, lr=lr, weight_decay=weight_decay)
            return
        self.count(runs)
        self.note_rates(runs, lr=lr, weight_decay=weight_decay)

    def ratios(self) -> Tensor:
        if not self.is_frozen:
            ratios, beta = super().ratios(), self.settings.onebit_coeff_beta
            self._means.lerp_(ratios, 1 - beta)
            self._weight = beta * self._weight + 1 - beta
            return ratios
        settings, wanted = self.settings, self._wanted_factors()
        wanted = wanted.clamp(settings.onebit_factor_min, settings.onebit_factor_max)
        most = settings.onebit_factor_threshold
        self._factors = wanted.clamp(self._factors * (1 - most), self._factors * (1 + most))
        return self._means / self._weight * self._factors

    def _wanted_factors(self) -> Tensor:
        """By how much each parameter's variance has shrunk, at most over its elements, as a factor of the step."""
        assert self._frozen_after is not None
        table = self._norms.table(columns=2)
        largest = torch.zeros_like(self._factors)
        for run, rates in self._rates.items():
            if not run.is_matrix:
                continue
            frozen = self.root(run, "exp_avg_sq", self._frozen_after)
            shrunk = self.root(run, "exp_avg_sq_fresh", self._done + 1)
            torch.div(frozen, shrunk, out=shrunk)
            plain = torch.div(self.state[run]["exp_avg"] / self.correction, frozen, out=frozen)
            for part in self._norms.parts_of[run]:
                of_part = plain[part.in_run]
                whole = of_part.add(run.master[part.in_run], alpha=rates.weight_decay)
                self._norms.add(table, part, (of_part, whole))
                largest[part.row] = torch.maximum(largest[part.row], shrunk[part.in_run].max())
        norms = self._norms.summed(table).sqrt()
        if self._mesh.world.size > 1:
            all_reduce_job_(largest, self._mesh, "max")
        share = (norms[:, 0] / norms[:, 1]).clamp(max=1.0).nan_to_num(1.0)
        return largest * share + (1 - share)

    def _step_of(self, run: LocalRun) -> Tensor:
        if self._frozen_after is None:
            return super()._step_of(run)
        root = self.root(run, "exp_avg_sq", self._frozen_after)
        plain = (self.state[run]["exp_avg"] / self.correction).div_(root)
        return plain.add_(run.master, alpha=self._rates[run].weight_decay)
