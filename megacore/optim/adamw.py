"""AdamW: decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101); and Adam (Kingma and Ba 2015, arXiv
1412.6980)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megacore.config import ResolvedConfig
from megacore.config.optimizers import AdamConfig, AdamWConfig, StateKind
from megacore.ops import AdamWStep, adamw_
from megacore.ops.adamw import DECAY_GROUP
from megacore.optim.block_moments import SCALES, BlockMoments
from megacore.optim.moments import KeptMoments
from megacore.optim.optimizer import AdamLike
from megacore.optim.rounded_moments import RoundedMoments
from megacore.parallel.mesh import Mesh
from megacore.zero.bucket import Bucket
from megacore.zero.layout import ALIGNMENT
from megacore.zero.local_segments import LocalRun, LocalSegment

assert ALIGNMENT % DECAY_GROUP == 0, "no group of elements has parts of two parameters"


def fused_(
    operator: Callable[..., None],
    tensors: Sequence[list[Tensor]],
    *,
    beta1: float,
    settings: AdamWConfig,
    lr: float,
    weight_decay: float,
) -> None:
    """Update weights and fp32 moments in place by PyTorch's fused operators, and count the steps.

    Args:
        operator: `adam` or `adamw` of torch.optim.
        tensors: as `AdamLike.adam_tensors` gives them.
        settings: beta2 and epsilon.
        weight_decay: in units of the learning rate.
    """
    weights, gradients, means, squares, steps = tensors
    rates = {"beta1": beta1, "beta2": settings.adam_beta2, "lr": lr, "weight_decay": weight_decay}
    rates["eps"] = settings.adam_eps
    operator(weights, gradients, means, squares, [], steps, fused=True, amsgrad=False, maximize=False, **rates)


class AdamW(AdamLike[AdamWConfig]):
    """Elementwise: a shard is updated as it would be within the whole parameter. PyTorch's fused operator; on devices
    with Triton, one launch for the shard of a bucket (megacore/ops/adamw.py), whose moments are flat for that."""

    has_one_pass: ClassVar[bool] = True

    def __init__(
        self, runs: Sequence[LocalRun], settings: AdamWConfig, *, weight_decay: float, adam: AdamWConfig | None = None
    ) -> None:
        super().__init__(runs, settings, weight_decay=weight_decay, adam=adam)
        self._moments: dict[tuple[Bucket, str], Tensor] = {}  # by bucket and kind: see `_moment`
        self._decays: dict[Bucket, Tensor] = {}
        self._kept: KeptMoments | None = None  # None: fp32

    def attach(self, segments: Sequence[LocalSegment], mesh: Mesh, config: ResolvedConfig) -> None:
        if self.settings.moments_dtype == "bf16":
            self._kept = RoundedMoments(segments, self.settings.state, self.state, seed=config.training.seed)
        elif self.settings.moments_dtype == "int8":
            self._kept = BlockMoments(segments, self.settings.state, self.state, mesh=mesh)

    @property
    def defers(self) -> bool:
        return self._kept is not None and self._kept.waits

    def finish(self) -> None:
        if self._kept is not None:
            self._kept.settle()

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        step = partial(fused_, adamw, beta1=self.momentum, settings=self.settings, lr=lr, weight_decay=weight_decay)
        if self._kept is None:
            step(self.adam_tensors(runs, gradients))
            return
        for run, gradient, count in zip(runs, gradients, self.steps(runs), strict=True):
            for part in self._kept.parts[run]:
                moments, weights = self._kept.read(part), run.master.detach()[part.in_run]
                step([[weights], [gradient[part.in_run]], [moments.mean], [moments.square], [count.clone()]])
                self._kept.write(part, moments, count + 1)
            count += 1

    def step_shard(self, runs: Sequence[LocalRun], *, lr: float, factor: Tensor, number: int) -> None:
        bucket = runs[0].bucket
        if (gradients := bucket.shard_gradients) is None:
            return
        decaying = {run.is_matrix for run in runs}
        numbers = AdamWStep(
            step=number,
            lr=lr,
            betas=(self.momentum, self.settings.adam_beta2),
            epsilon=self.settings.adam_eps,
            weight_decay=self.weight_decay if True in decaying else 0.0,
        )
        adamw_(
            bucket.master,
            gradients,
            self._moment(bucket, "exp_avg"),
            self._moment(bucket, "exp_avg_sq"),
            update=numbers,
            factor=factor,
            copy=bucket.shard_to_write(),
            decays=self._decays_of(bucket, runs) if len(decaying) > 1 else None,
        )

    def values(self, local: LocalSegment, name: str) -> Tensor | None:
        moments = [kind.name for kind in self.settings.state]
        if self._kept is not None and name in moments:
            return self._kept.values(local, moments.index(name))
        return None if name.endswith(SCALES) else super().values(local, name)

    def set_values(self, local: LocalSegment, kind: StateKind, values: Tensor) -> None:
        if self._kept is not None and kind in self.settings.state:
            self._kept.set_values(local, self.settings.state.index(kind), values)
        else:
            super().set_values(local, kind, values)

    def resume(self, updates: int) -> None:
        super().resume(updates)
        self.finish()

    def tensor(self, run: LocalRun, kind: StateKind) -> Tensor:
        if run.bucket.options.one_pass and kind in self.settings.state:
            return self._moment(run.bucket, kind.name)[run.shard_slice]
        return super().tensor(run, kind)

    def _moment(self, bucket: Bucket, name: str) -> Tensor:
        """A moment of a whole shard, whose parts are the state of its runs; zeros where there was none."""
        if (bucket, name) not in self._moments:
            whole = self._moments[bucket, name] = torch.zeros_like(bucket.master)
            for run in self.runs:
                if run.bucket is bucket:
                    self.state[run][name] = whole[run.shard_slice]
        return self._moments[bucket, name]

    def _decays_of(self, bucket: Bucket, runs: Sequence[LocalRun]) -> Tensor:
        """Which groups of elements of a shard belong to matrices, as `adamw_` takes it."""
        if bucket not in self._decays:
            groups = torch.zeros(bucket.master.numel() // DECAY_GROUP, dtype=torch.uint8, device=bucket.master.device)
            for run in runs:
                if run.is_matrix:
                    groups[run.shard_slice.start // DECAY_GROUP : -(-run.shard_slice.stop // DECAY_GROUP)].fill_(1)
            self._decays[bucket] = groups
        return self._decays[bucket]


class Adam(AdamLike[AdamConfig]):
    """With L2 regularization: the weight decay is added to the gradient. Elementwise, as AdamW."""

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        tensors = self.adam_tensors(runs, gradients)
        fused_(adam, tensors, beta1=self.momentum, settings=self.adam, lr=lr, weight_decay=weight_decay)
