"""An optimizer as anybody may add one: it needs whole matrices and keeps state of three shapes. On every number of
replicas and every ZeRO stage it gives the bits of one process, and its state moves between layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from megacore.config import ResolvedConfig, validate
from megacore.config.fields import Range
from megacore.config.optimizers import OPTIMIZERS, OptimizerSettings, StateKind
from megacore.optim.optimizer import Optimizer
from megacore.optim.optimizers import OPTIMIZER_CLASSES
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from megacore.train.trainer import Trainer
from megacore.zero.local_segments import LocalRun
from tests.distributed import run_distributed
from tests.matrix.programs import UNCUT
from tests.parity.runs import Outcome, bitwise, make_config, make_trainer, outcome_of

STEPS = 4
KINDS = ("momentum", "row_norms", "norm")


@dataclass(frozen=True, kw_only=True)
class NormalizedConfig(OptimizerSettings):
    """Settings of --optimizer normalized."""

    normalized_momentum: Annotated[float, Range(0, below=1)] = 0.5
    """Momentum of the matrices."""

    @property
    def state(self) -> tuple[StateKind, ...]:
        return (
            StateKind(name="momentum", parameters="whole"),
            StateKind(name="row_norms", per="row", parameters="whole"),
            StateKind(name="norm", per="parameter", parameters="whole"),
        )

    def takes_whole(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and name.startswith("blocks.")


class Normalized(Optimizer[NormalizedConfig]):
    """Steps of length 1 for matrices of blocks, divided by the running norms of its rows too; plain SGD for the
    rest."""

    def update(self, runs: Sequence[LocalRun], gradients: Sequence[Tensor], *, lr: float, weight_decay: float) -> None:
        for run, gradient in zip(runs, gradients, strict=True):
            if run.shape is None:
                run.master.sub_(gradient, alpha=lr)
                continue
            momentum, row_norms, norm = (self.tensor(run, kind) for kind in self.kinds)
            momentum.mul_(self.settings.normalized_momentum).add_(gradient.view(run.shape))
            norm.copy_(torch.linalg.vector_norm(momentum))
            row_norms.lerp_(torch.linalg.vector_norm(momentum, dim=1), 0.5)
            step = momentum / norm / (1 + row_norms).unsqueeze(1)
            run.master.mul_(1 - lr * weight_decay).sub_(step.view(-1), alpha=lr)


@dataclass(frozen=True, kw_only=True)
class NormalizedRun(ResolvedConfig):
    normalized: NormalizedConfig = field(default_factory=NormalizedConfig)


def register() -> None:
    OPTIMIZERS["normalized"], OPTIMIZER_CLASSES[NormalizedConfig] = NormalizedConfig, Normalized


def trainer_of(dp: int, directory: str, **changes: Any) -> Trainer:
    register()
    compute_reproducibly()
    fixed = UNCUT | {"optimizer": "normalized", "global_batch_size": 4, "train_iters": STEPS, "num_layers": 2}
    config = make_config((1, 1, dp), directory, **fixed, **changes)
    config = NormalizedRun(**{section.name: getattr(config, section.name) for section in dataclasses.fields(config)})
    return make_trainer(config, build_mesh(config.parallel))


def state_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """Every kind of state that this rank holds, by the name of the matrix."""
    held: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for owned in trainer.model.data_parallel.segments:
        for kind in KINDS:
            if (tensor := owned.state(trainer.update.optimizer, kind)) is not None:
                held[kind][owned.spec.name] = tensor.clone()
    return held


@dataclass(frozen=True)
class Result:
    """What one rank saw: the run, the state it holds at the end, and the share of its buckets that is padding."""

    outcome: Outcome
    state: dict[str, dict[str, Tensor]]
    padding: float


def runs_of(rank: int, dp: int, directory: str, variants: list[dict[str, Any]]) -> list[Result]:
    results = []
    for changes in variants:
        trainer = trainer_of(dp, directory, **changes)
        outcome = outcome_of(trainer)
        results.append(Result(outcome, state_of(trainer), trainer.model.data_parallel.padding))
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_distributed(runs_of, 1, str(tmp_path_factory.mktemp("alone")), [{}])[0][0]


EVEN: list[dict[str, Any]] = [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 1, "offload_optimizer": True}]
ODD: list[dict[str, Any]] = [{"zero_stage": 1}, {"zero_stage": 3}]


@pytest.mark.parametrize(
    ("dp", "variants"),
    [
        (2, EVEN[1:]),
        (4, ODD[1:]),
        *(pytest.param(dp, stages, marks=pytest.mark.slow) for dp in (2, 4) for stages in (EVEN, ODD)),
    ],
    ids=str,
)
def test_every_stage_gives_the_bits_of_one_process(
    dp: int, variants: list[dict[str, Any]], alone: Result, tmp_path: Path
) -> None:
    ranks = run_distributed(runs_of, dp, str(tmp_path), variants)
    for number, changes in enumerate(variants):
        bitwise(ranks[0][number].outcome, alone.outcome, kinds=("initial", "final"))
        held = {kind: [rank[number].state[kind] for rank in ranks] for kind in KINDS}
        for kind, of_ranks in held.items():
            together = {name: tensor for tensors in of_ranks for name, tensor in tensors.items()}
            assert together.keys() == alone.state[kind].keys()
            assert all(torch.equal(tensor, alone.state[kind][name]) for name, tensor in together.items()), kind
            copies = dp if changes["zero_stage"] == 0 else 1
            assert sum(map(len, of_ranks)) == copies * len(together), "a matrix is cut"
        assert ranks[0][number].padding < (0.35 if changes["zero_stage"] == 3 else 0.2)


def saved(rank: int, dp: int, directory: str) -> None:
    trainer = trainer_of(dp, directory, zero_stage=1)
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()


def resumed(rank: int, dp: int, directory: str, stage: int) -> list[float]:
    trainer = trainer_of(dp, directory, zero_stage=stage, load=directory)
    return [float(trainer.train_step(next(trainer.batches)).loss) for _ in range(2)]


def test_its_state_moves_between_layouts(alone: Result, tmp_path: Path) -> None:
    run_distributed(saved, 2, str(tmp_path))
    for dp, stage in ((1, 0), (2, 3)):
        assert run_distributed(resumed, dp, str(tmp_path), stage)[0] == alone.outcome.losses[2:]


def test_tensor_parallelism_and_idle_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "normalized", NormalizedConfig)
    config = make_config((2, 1, 1), "output", optimizer="normalized")
    run = NormalizedRun(**{section.name: getattr(config, section.name) for section in dataclasses.fields(config)})
    (problem,) = validate(run, 2)
    assert problem.startswith("--optimizer normalized needs whole matrices, which --tp 2 splits: use --tp 1")
    adamw, idle = dataclasses.replace(run.optimizer, optimizer="adamw"), NormalizedConfig(normalized_momentum=0.25)
    (problem,) = validate(dataclasses.replace(run, optimizer=adamw, normalized=idle), 2)
    assert problem.startswith("--normalized-momentum 0.25 has no effect with --optimizer adamw")
