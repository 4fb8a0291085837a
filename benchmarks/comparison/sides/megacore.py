"""megacore, with the defaults of its flags."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.comparison.configuration import layout_configuration
from benchmarks.comparison.job import Job, Layout, Step
from benchmarks.workload import megacore_step, megacore_trainer
from megacore.models.outline import outline
from megacore.parallel.mesh import build_mesh
from megacore.parallel.sharding import ShardedParameter
from megacore.pipeline.schedule_choice import choose_schedule, is_open
from megacore.train.planning import planner


class FileWeights:
    """Initial weights from compare.py's file."""

    def __init__(self, path: str) -> None:
        self._path = path

    @torch.no_grad()
    def fill(self, parameters: Iterable[ShardedParameter]) -> None:
        """Give a rank's named parameters their values, in place."""
        with np.load(self._path) as values:
            for parameter in parameters:
                parameter.zero_()
                spec = parameter.spec
                spec.unpadded(parameter).copy_(spec.take(torch.from_numpy(values[spec.name])))


class FileDataset:
    """Samples of compare.py's file, again and again."""

    def __init__(self, job: Job) -> None:
        self._tokens: NDArray[np.int64] = np.load(job.tokens, mmap_mode="r")
        self._mask = np.ones(job.sizes.seq, np.float32)

    def __len__(self) -> int:
        """As many samples as no run needs."""
        return 10_000_000

    def __getitem__(self, index: int) -> dict[str, NDArray]:
        """A sample as every dataset gives it."""
        sample = self._tokens[index % len(self._tokens)]
        return {"tokens": sample[:-1].copy(), "labels": sample[1:].copy(), "loss_mask": self._mask}


def name(layout: Layout) -> str:
    """What is measured."""
    return "megacore"


def build(job: Job) -> Step:
    """A step of the trainer."""
    layout = job.layout
    schedule = "auto" if layout.schedule == "default" else layout.schedule
    more = {"virtual_stages": layout.virtual_stages, "device": "cpu"}
    config = layout_configuration(job.sizes, layout, job.directory, schedule=schedule, **more)
    if is_open(config):
        schedules = planner().schedules_by_time(config, outline(config), on_cpu=True)
        config = choose_schedule(config, schedules, lambda _: True)
    weights = None if job.weights is None else FileWeights(job.weights)
    step = megacore_step(megacore_trainer(config, build_mesh(config.parallel), weights=weights, data=FileDataset(job)))
    return lambda: float(step().loss)
