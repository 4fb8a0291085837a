"""The mesh by role: groups from the table of dimensions, a further dimension by one line, and parameters that are split
in two dimensions or name a replica group of their own."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.checkpoint.load import load_checkpoint, read_together
from megacore.checkpoint.save import CheckpointSaver
from megacore.checkpoint.state import TrainingState
from megacore.config import AdamWConfig
from megacore.config.dimensions import DIMENSIONS, Dimension, coordinates_of, describe_rank
from megacore.optim.adamw import AdamW
from megacore.optim.update import counted_segments, totals
from megacore.parallel.mesh import ALONE, Group, Mesh, build_mesh, groups_of_role
from megacore.parallel.sharding import ShardedParameter, ShardSpec, replicated, split_evenly
from megacore.zero.data_parallel import DataParallel
from megacore.zero.options import ZeroOptions
from tests.distributed import run_distributed
from tests.parity.runs import Layout, Outcome, bitwise, make_config, make_trainer, outcome_of

# ---- groups

DEGREES = {"pp": 2, "dp": 2, "cp": 3, "tp": 2}


@pytest.mark.parametrize(
    ("role", "along"),
    [
        ("pipeline", {"pp"}),
        ("batch", {"dp"}),
        ("sequence", {"cp"}),
        ("layer", {"tp"}),
        ("loss", {"dp", "cp"}),
        ("replicas", {"dp", "cp"}),
        ("copies", set()),
    ],
)
def test_a_group_is_the_ranks_that_differ_in_what_its_role_divides(role: str, along: set[str]) -> None:
    places = list(itertools.product(*(range(degree) for degree in DEGREES.values())))  # in the order of the ranks
    expected: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        fixed = tuple(n for name, n in zip(DEGREES, place, strict=True) if name not in along)
        expected.setdefault(fixed, []).append(rank)
        assert tuple(coordinates_of(rank, DEGREES).values()) == place
    assert sorted(groups_of_role(role, DIMENSIONS, DEGREES)) == sorted(map(tuple, expected.values()))
    assert describe_rank(23, DEGREES) == "pp 1, dp 1, cp 2, tp 1"
    assert describe_rank(7, DEGREES | {"cp": 1}) == "pp 1, dp 1, tp 1"  # named only where there are several


# ---- a fourth dimension, which replicates


def with_copies(degree: int) -> tuple[Dimension, ...]:
    return (*DIMENSIONS[:2], Dimension("copy", degree, "nothing"), *DIMENSIONS[2:])


def train_copies(
    rank: int, world_size: int, layout: Layout, degrees: list[int | None], directory: str, changes: dict[str, Any]
) -> list[Outcome]:
    """Train and save on meshes with so many copies; None: without the dimension."""
    outcomes = []
    for degree in degrees:
        config = make_config(layout, f"{directory}/{degree}", num_layers=2, train_iters=3, **changes)
        mesh = build_mesh(config.parallel, DIMENSIONS if degree is None else with_copies(degree))
        trainer = make_trainer(config, mesh)
        outcomes.append(outcome_of(trainer))
        trainer.save()
        counted = totals([], mesh, loss=float(mesh.batch.is_first), votes=[int(rank == world_size - 1)])
        assert (float(counted.loss), counted.votes.tolist()) == (1.0, [1.0])  # a loss once, a vote from every rank
    return outcomes


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param((2, 1, 1), {"sequence_parallel": True}, id="tp", marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {"zero_stage": 2}, id="dp"),
    ],
)
def test_a_dimension_that_replicates_changes_no_number(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    ranks = math.prod(layout)
    plain, one = run_distributed(train_copies, ranks, layout, [None, 1], str(tmp_path), changes)[0]
    (two,) = run_distributed(train_copies, 2 * ranks, layout, [2], str(tmp_path), changes)[0]
    bitwise(one, plain)
    bitwise(two, plain)
    manifests = {
        degree: json.loads((tmp_path / degree / "step_00000003" / "manifest.json").read_text())
        for degree in ("None", "1", "2")
    }
    expected = manifests["None"]["files"]
    for degree in ("1", "2"):
        assert manifests[degree]["files"] == expected  # each once, byte for byte
        assert manifests[degree]["topology"] == manifests["None"]["topology"] | {"copy": int(degree)}


# ---- a parameter that is split in two dimensions

SHAPES = {"both": (10, 7), "columns": (3, 9), "norm": (5,)}
KINDS = ("model", *(kind.name for kind in AdamWConfig().state))


def value(name: str, kind: str) -> Tensor:
    """The global tensor."""
    seed = 10 * list(SHAPES).index(name) + KINDS.index(kind)
    return torch.rand(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class Blocks(nn.Module):
    """A matrix whose rows and columns are split, one whose columns are, both padded, and a replicated vector."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        where = mesh.coordinates(mesh.world.rank)
        rows = {0: split_evenly(10, where["rows"], mesh.degrees["rows"])}
        columns = {1: split_evenly(7, where["columns"], mesh.degrees["columns"])}
        self.both = padded("both", ShardSpec.split(SHAPES["both"], rows | columns))
        self.columns = padded(
            "columns", ShardSpec.split(SHAPES["columns"], {1: split_evenly(9, *position(mesh.layer))})
        )
        self.norm = replicated(5)
        for name, parameter in self.named_parameters():
            assert isinstance(parameter, ShardedParameter)
            parameter.named(name)
            parameter.data.zero_()
            parameter.spec.unpadded(parameter.data).copy_(parameter.spec.take(value(name, "model")))


def position(group: Group) -> tuple[int, int]:
    return group.rank, group.size


def padded(name: str, spec: ShardSpec) -> ShardedParameter:
    return ShardedParameter(torch.empty([size + 2 for size in spec.local_shape]), replace(spec, name=name))


def state_of(mesh: Mesh, stage: int, *, filled: bool) -> TrainingState:
    """Weights and moments of this rank, with the values of `value` or zero."""
    layer = Blocks(mesh)
    local = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    data_parallel = DataParallel([[layer]], mesh, options=ZeroOptions(stage=stage), bucket_bytes=1 << 20)
    optimizer = AdamW(data_parallel.runs, AdamWConfig(), weight_decay=0.01)
    for owned in data_parallel.segments:
        for kind in KINDS[1:]:
            optimizer.tensors(kind, [owned.run])
            part = torch.zeros_like(local[owned.spec.name])
            owned.spec.unpadded(part).copy_(owned.spec.take(value(owned.spec.name, kind)))
            segment = owned.segment
            held = owned.state(optimizer, kind)
            assert held is not None
            held.copy_(part.view(-1)[segment.start : segment.stop] if filled else torch.zeros_like(held))
        if not filled:
            owned.master.zero_()
    data_parallel.publish()
    return TrainingState(
        step=1,
        consumed_samples=1,
        data_parallel=data_parallel,
        optimizer=optimizer,
        counters={"updates": 1},
    )


def grid(rows: int, columns: int) -> tuple[Dimension, ...]:
    return (*DIMENSIONS[:2], Dimension("rows", rows, "matrices"), Dimension("columns", columns, "matrices"))


def save_and_load(rank: int, world_size: int, directory: str, targets: list[tuple[int, int, int]]) -> None:
    """Save on 2 x 2 ranks, and load on others: rows, columns, replicas."""
    if world_size == 4:
        config = make_config((1, 1, 1), directory)
        mesh = build_mesh(config.parallel, grid(2, 2))
        saver = CheckpointSaver(config, mesh)
        saver.begin(state_of(mesh, 0, filled=True))
        assert saver.finish() is not None
    for rows, columns, replicas in targets:
        config = make_config((1, 1, replicas), directory)
        mesh = build_mesh(config.parallel, grid(rows, columns))
        state = state_of(mesh, 3, filled=False)
        load_checkpoint(*read_together(Path(directory), mesh.world), state, mesh.world)
        found = list(state.entries())
        assert len(found) == len(KINDS) * len(SHAPES)
        for kind, spec, tensor, _ in found:
            assert torch.equal(tensor, spec.take(value(spec.name, kind))), (kind, spec)


def test_a_parameter_split_in_two_dimensions_is_saved_and_loaded_on_other_layouts(tmp_path: Path) -> None:
    run_distributed(save_and_load, 4, str(tmp_path), [(2, 2, 1), (4, 1, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4)])
    save_and_load(0, 1, str(tmp_path), [(1, 1, 1)])
    manifest = json.loads((tmp_path / "step_00000001" / "manifest.json").read_text())
    assert manifest["schema"] == 3
    pieces = manifest["tensors"]["model"]["both"]["pieces"]
    assert sorted((p["start"], p["stop"]) for p in pieces) == [
        ([0, 0], [5, 3]),
        ([0, 3], [5, 7]),
        ([5, 0], [10, 3]),
        ([5, 3], [10, 7]),
    ]


# ---- a parameter that names another replica group


@dataclass(frozen=True, kw_only=True)
class MeshWithExperts(Mesh):
    """`experts`: ranks that hold the same part of what pairs of ranks split."""

    experts: Group = ALONE


class Mixture(nn.Module):
    """A dense matrix, and one whose rows pairs of ranks split."""

    def __init__(self, pair: int) -> None:
        super().__init__()
        spec = ShardSpec.split((8, 3), {0: split_evenly(8, pair, 2)})
        self.dense = ShardedParameter(torch.ones(5, 3), ShardSpec(name="dense", shape=(5, 3)))
        self.experts = ShardedParameter(torch.ones(4, 3), replace(spec, name="experts", replica_role="experts"))

    def forward(self, x: Tensor) -> Tensor:
        """[3] -> a scalar, whose gradients are 2 x (dense) and x^2 (experts) in every row."""
        return 2.0 * (self.dense @ x).sum() + (self.experts @ x.square()).sum()


def train_experts(rank: int, world_size: int, stage: int) -> None:
    config = make_config((1, 1, 4), "unused")
    mesh = build_mesh(config.parallel)
    handles = [dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))]
    experts = Group(ranks=(rank % 2, rank % 2 + 2), rank=rank // 2, handle=handles[rank % 2])
    mixed = MeshWithExperts(**{field.name: getattr(mesh, field.name) for field in fields(mesh)}, experts=experts)
    layer = Mixture(rank % 2)
    data_parallel = DataParallel([[layer]], mixed, options=ZeroOptions(stage=stage), bucket_bytes=1 << 20)
    assert [bucket.group.size for bucket in data_parallel.buckets] == [2, 4]
    data_parallel.begin_step(1.0)
    inputs = torch.arange(24.0).view(2, 4, 3)  # microbatches, ranks
    for number, x in enumerate(inputs[:, rank]):
        data_parallel.begin_backward(0, last=number == 1)
        data_parallel.run_layer(0, 0, layer, x).backward()
        data_parallel.end_backward(0)
    data_parallel.finish()
    dense = 2.0 * inputs.sum((0, 1)).expand(5, 3)
    pairs = [inputs[:, pair::2].square().sum((0, 1)).expand(4, 3) for pair in range(2)]
    for owned in data_parallel.segments:
        expected = dense if owned.spec.name == "dense" else pairs[rank % 2]
        assert owned.gradient is not None
        assert torch.equal(owned.gradient, expected.reshape(-1)[owned.segment.start : owned.segment.stop])
    norm = totals(counted_segments(data_parallel.segments, mixed), mixed).norm
    assert float(norm) == pytest.approx(float(torch.cat([dense, *pairs]).double().norm()), rel=1e-12)


def all_stages(rank: int, world_size: int, stages: Iterable[int]) -> None:
    for stage in stages:
        train_experts(rank, world_size, stage)


def test_a_parameter_is_reduced_and_counted_over_the_replica_group_that_it_names() -> None:
    run_distributed(all_stages, 4, range(4))
