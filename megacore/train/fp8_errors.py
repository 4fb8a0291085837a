"""The guarantee of --fp8: layers whose products are too far from those in 16 bits leave fp8.

In step 1 and every `--fp8 check-every` steps a sample of the rows of each product is computed in 16 bits too. Squares
of the errors and of the products are summed over microbatches and ranks, in one all-reduce after the update. A layer
whose error is above `--fp8 budget` is named, and computed in 16 bits from the next step on, on all ranks and after a
resume. A sample with numbers that are not finite judges nothing: the same numbers spoil the step in any format.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from megacore.config import ResolvedConfig
from megacore.errors import ConfigError
from megacore.parallel.collectives import all_gather_objects, all_reduce_
from megacore.parallel.fp8 import Fp8Products, fp8_products
from megacore.parallel.mesh import Mesh
from megacore.pipeline.stage import Stage
from megacore.train.step_hooks import StepHook

if TYPE_CHECKING:
    from megacore.optim.update import Outcome
    from megacore.train.step import TrainStep

_SERIES = "fp8/"
_PRODUCTS = ("output", "input gradient")


class Fp8Errors(StepHook):
    """Measures all layers; all ranks call each method together. Raises ConfigError where no layer multiplies in fp8."""

    def __init__(self, chunks: Sequence[Stage], config: ResolvedConfig, mesh: Mesh) -> None:
        self._mesh, self._every, self._budget = mesh, config.precision.fp8_check_every, config.precision.fp8_budget
        # Stage 3 has no memory for whole weights, and a single microbatch reads each quantised weight once.
        self._keeps_weights = config.parallel.zero_stage < 3 and config.microbatches > 1
        self._layers: dict[str, Fp8Products] = {one.name: one for chunk in chunks for one in fp8_products(chunk)}
        self.errors: dict[str, float] = {}  # of the last measurement, relative, by layer: the larger of its products'
        self.left: dict[str, list[float]] = {}  # step and error of each layer that left fp8, by its name
        if isinstance(torch.empty(0), FakeTensor):  # numbers that do not exist have no error
            self._every = 0
            return
        self._names = sorted({name for of_rank in all_gather_objects([*self._layers], mesh.world) for name in of_rank})
        if not self._names:
            given = f"--fp8 {config.precision.fp8}"
            raise ConfigError([f"{given}: no block has a linear layer that is not skipped: leave {given} out"])

    def begin_step(self, step: int, loss_scale: float) -> None:
        measures = self._every > 0 and (step - 1) % self._every == 0
        for layer in self._layers.values():
            layer.measures, layer.squares = measures, None
            layer.kept = {} if self._keeps_weights else None

    def after_update(self, steps: TrainStep, outcome: Outcome) -> None:
        """Take layers with errors above the budget out of fp8; not in a skipped step, which a diagnosis may compute
        again."""
        for layer in self._layers.values():
            layer.kept = None
        if self._every == 0 or (steps.step - 1) % self._every:
            return
        squares = torch.zeros(len(self._names), 2, 3, dtype=torch.float64, device=self._mesh.device)
        for number, name in enumerate(self._names):
            if name in self._layers and (own := self._layers[name].squares) is not None:
                squares[number] = own
        self.errors = {}
        for name, of_products in zip(self._names, all_reduce_(squares, self._mesh.world).tolist(), strict=True):
            for product, (error, size, lost) in zip(_PRODUCTS, of_products, strict=True):
                if lost or not math.isfinite(error + size):
                    self._say(f"{steps.step}: {name}: {lost:g} operands of its {product} are not finite: not measured")
                elif size > 0:
                    self._judge(name, product, math.sqrt(error / size), None if outcome.skipped else steps.step)
        self._apply()

    def figures(self) -> dict[str, float | None]:
        """The largest error of the last measurement, and how many layers have left fp8."""
        largest = max(self.errors.values(), default=None)
        return {"train/fp8_largest_error": largest, "train/fp8_layers_left": float(len(self.left))}

    def series(self) -> dict[str, list[float]]:
        return {_SERIES + name: found for name, found in self.left.items()}

    def load_series(self, series: Mapping[str, Sequence[float]]) -> None:
        found = {key.removeprefix(_SERIES): value for key, value in series.items() if key.startswith(_SERIES)}
        self.left = {name: list(value) for name, value in found.items()}
        self._apply()

    def _judge(self, name: str, product: str, error: float, step: int | None) -> None:
        self.errors[name] = max(error, self.errors.get(name, 0.0))
        if step is not None and error > self._budget and name not in self.left:
            self.left[name] = [float(step), error]
            self._say(
                f"{step}: {name}: the error of its {product} in fp8 is {error:.2g}, above --fp8 "
                f"budget={self._budget:g}: it is computed in 16 bits from now on"
            )

    def _apply(self) -> None:
        for name, layer in self._layers.items():
            layer.in_sixteen_bits, layer.measures, layer.kept = name in self.left, False, None

    def _say(self, text: str) -> None:
        if self._mesh.world.is_first:
            print(f"megacore: warning: step {text}", file=sys.stderr, flush=True)
