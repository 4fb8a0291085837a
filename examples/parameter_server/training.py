"""A worker's loop, and the same training on one process."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from client import ParameterClient
from tasks import Lines, Model, gradient

WIDTH = 32  # parameters of a key


@dataclass(frozen=True)
class Plan:
    """What every worker does.

    Attributes:
        model: what is trained.
        steps: of each worker.
        workers: how many there are.
        batch: lines of one worker's step.
        lr: learning rate of SGD.
        straggle: seconds that a worker sleeps in one of four steps, at random: what a busy machine would do.
    """

    model: Model
    steps: int
    workers: int
    batch: int = 32
    lr: float = 2.0
    straggle: float = 0.0

    @property
    def keys(self) -> int:
        return -(-self.model.size // WIDTH)

    def initial_values(self) -> Tensor:
        """[keys, WIDTH], the last key filled up with zeros."""
        values = torch.zeros(self.keys * WIDTH, dtype=torch.float64)
        values[: self.model.size] = self.model.initial()
        return values.view(self.keys, WIDTH)

    def update(self, values: Tensor, lines: Lines, worker: int, step: int) -> Tensor:
        """What a worker adds to all values in one step, [keys, WIDTH]; the workers' updates add up to one SGD step."""
        batch = lines.batch(step * self.workers + worker, self.batch)
        change = torch.zeros_like(values).view(-1)
        weights = values.flatten()[: self.model.size]
        change[: self.model.size] = -self.lr / self.workers * gradient(self.model, weights, batch)
        return change.view_as(values)


def work(client: ParameterClient, plan: Plan, lines: Lines, worker: int) -> float:
    """Train as one of the workers; the seconds that it took."""
    unlucky = random.Random(worker)
    began = time.perf_counter()
    for step in range(plan.steps):
        values = client.pull()
        if unlucky.random() < 0.25:
            time.sleep(plan.straggle)
        client.push(plan.update(values, lines, worker, step))
    return time.perf_counter() - began


def train_alone(plan: Plan, lines: Lines) -> Tensor:
    """What bulk-synchronous workers must arrive at: one process that takes their updates in turn."""
    values = plan.initial_values()
    for step in range(plan.steps):
        updates = [plan.update(values, lines, worker, step) for worker in range(plan.workers)]
        values = values + torch.stack(updates).sum(0)
    return values
