"""Train a narrowed configuration for a few steps on this rank of a mesh, and record the tensors of every step. A record
is a slice of a global tensor: `assemble` puts the slices of all ranks together, and notices where two ranks that hold
the same elements disagree. The model starts from a real checkpoint, so that loading is verified as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megacore.config import ResolvedConfig
from megacore.config.bert import ResolvedBertConfig
from megacore.data.bert.build import build_bert_datasets
from megacore.data.gpt.mock import random_documents
from megacore.data.loading.loader import BatchLoader, DeviceLoader
from megacore.models.spec import DescribesLayers
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.context import SequenceShards
from megacore.parallel.mesh import Mesh
from megacore.parallel.sharding import ShardSpec, Slices
from megacore.pipeline.stage import tensors_of
from megacore.train.bert_task import BertTask
from megacore.train.expert_balance import ExpertBalance
from megacore.train.gpt_task import GPTTask
from megacore.train.step import StepResult, TrainStep
from megacore.train.task import Task
from megacore.verify.masks import masks_recorded
from megacore.verify.narrow import STEPS, WARMUP_STEPS
from megacore.zero.local_segments import LocalSegment

Array = NDArray[Any]

KINDS = (
    "loaded weight",
    "loaded moment",
    "token count",
    "dropout mask",
    "output",
    "expert load",
    "loss",
    "gradient",
    "gradient norm",
    "clip limit",
    "moment",
    "weight change",
    "expert bias",
    "published weight",
    "evaluation",
)
"""What is compared, in the order in which a step makes it."""
EXACT_KINDS = ("loaded weight", "loaded moment", "token count", "dropout mask", "expert load", "expert bias")
"""Kinds that no rounding touches."""
# No value yet: a NaN that no computation gives.
_NONE = np.uint64(0x7FF8_0000_4E6F_6E65).view(np.float64)


class Key(NamedTuple):
    """One compared tensor: the step (0 is before the first), what it is, and its name."""

    step: int
    kind: str
    name: str

    def __str__(self) -> str:
        when = f" of step {self.step}" if self.step else ""
        return f"{self.kind} {self.name}{when}" if self.name else f"{self.kind}{when}"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one rank holds of a tensor."""

    key: Key
    shape: tuple[int, ...]  # of the global tensor
    slices: Slices  # of the global tensor that the rank's local tensor holds
    local_shape: tuple[int, ...]  # of the local tensor, padding included
    start: int  # first element of the flattened local tensor in `values`
    values: Array


@dataclass(frozen=True, kw_only=True)
class Record:
    """Tensors of a run."""

    tensors: dict[Key, Array] = field(default_factory=dict)  # whole, fp64
    # Of tensors that several ranks hold, those whose copies differ, with the ranks and by how much.
    disagreements: dict[Key, str] = field(default_factory=dict)


class UnevenData:
    """Random samples, each with another number of tokens that count, so that a wrong weighting shows."""

    def __init__(self, config: ResolvedConfig, samples: int) -> None:
        self._vocab_size, self._length, self._samples = config.model.vocab_size, config.data.seq_length, samples
        self._seed = config.training.seed % 2**32
        self._boundaries = bool(config.beside_hidden_states)
        self._pads = "padding" in config.beside_hidden_states

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Array]:
        random = np.random.default_rng([self._seed, index])
        window = random.integers(0, self._vocab_size, self._length + 1)
        mask = random.random(self._length) < random.uniform(0.2, 1.0)
        mask[random.integers(self._length)] = True
        sample: dict[str, Array] = {"tokens": window[:-1], "labels": window[1:], "loss_mask": mask.astype(np.float32)}
        if self._boundaries:
            sample |= random_documents(self._length, random)
        if self._pads:
            padding = np.arange(self._length) >= random.integers(1, self._length + 1)
            sample |= {"padding": padding.astype(np.int64), "loss_mask": sample["loss_mask"] * ~padding}
            sample["loss_mask"][0] = 1.0
        return sample


def make_task(config: ResolvedConfig, mesh: Mesh, layers: DescribesLayers) -> Task:
    """The task of a GPT, whose model `layers` describes, or of a BERT."""
    return BertTask(config, mesh) if isinstance(config, ResolvedBertConfig) else GPTTask(config, mesh, layers=layers)


def batches(config: ResolvedConfig, mesh: Mesh, task: Task, *, after: int) -> Iterator[Sequence[Any]]:
    """This rank's microbatches of each step. `task`: has the type of microbatches."""
    training = config.training
    samples = (WARMUP_STEPS + STEPS) * training.global_batch_size
    data: Any = UnevenData(config, samples)
    if isinstance(config, ResolvedBertConfig):
        data = build_bert_datasets(config, train_samples=samples).train
    loader = BatchLoader(
        data,
        task.batch_type,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        rank=mesh.batch.rank,
        ranks=mesh.batch.size,
        consumed_samples=after * training.global_batch_size,
        pin_memory=mesh.device.type != "cpu",
    )
    return DeviceLoader(loader, mesh.device)


class Recorder:
    """Runs steps of a model on this rank and keeps what they made. `steps`: the model with its optimizer."""

    def __init__(self, steps: TrainStep) -> None:
        self.steps, self.mesh, self.pieces, self._step = steps, steps.mesh, list[Piece](), 0
        self._shapes = {name: tuple(p.shape) for name, p in steps.model.parameters.items()}
        # What this rank updates, in the order in which forward uses the parameters.
        position = {name: number for number, name in enumerate(self._shapes)}
        self._segments = sorted(steps.model.data_parallel.segments, key=lambda local: position[local.spec.name])

    def run(self, microbatches: Iterable[Sequence[Any]], *, masks: AbstractContextManager[None] | None = None) -> None:
        """Train `STEPS` steps. `masks`: open while the steps run, and decides how masks are drawn; None: as the layout
        draws them."""
        self.note_state()
        with self.watching(), masks or nullcontext():
            source = iter(microbatches)
            for step in range(1, STEPS + 1):
                batch = next(source)
                self.keep_step(step, partial(self.train_step, batch))
        # The weights that the next forward would use, of every rank.
        for bucket in self.steps.model.data_parallel.buckets:
            bucket.wait()
            for parameter in bucket.parameters:
                self._keep("published weight", parameter.spec.name, parameter, parameter.spec)
            bucket.release()
        # Of the losses; what BERT gets right is counted in whole predictions, which rounding may change.
        terms = len(self.steps.task.loss_names) or None
        self._keep("evaluation", "", self.steps.evaluate([batch]).means.reshape(-1)[:terms])

    def note_state(self) -> None:
        for local in self._segments:
            self._keep_segment("loaded weight", local, local.master)
        self._keep_moments("loaded moment")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside what steps make on the way."""
        with ExitStack() as stack:
            if not self.steps.config.training.compile:
                stack.enter_context(masks_recorded(self._note_mask))
            self._watch(stack)
            yield

    def train_step(self, microbatches: Sequence[Any]) -> StepResult:
        self.steps.compute_gradients(microbatches)
        return self.steps.update_weights()

    def keep_step(self, step: int, take: Callable[[], StepResult]) -> StepResult:
        """Record a step. `take`: computes it, and updates the weights."""
        self._step, before = step, [local.master.detach().double().clone() for local in self._segments]
        result = take()
        self._keep("token count", "", result.counts.reshape(-1))
        self._keep("loss", "", result.means.reshape(-1))
        self._keep("gradient norm", "", result.grad_norm.reshape(-1))
        if math.isfinite(result.clip_limit) and self.steps.config.optimizer.clip_grad_adaptive:
            self._keep("clip limit", "", torch.tensor([result.clip_limit], dtype=torch.float64))
        if (balance := self.steps.hook(ExpertBalance)) is not None:
            for kind, tensors in (("expert load", balance.loads()), ("expert bias", balance.buffers())):
                for name, tensor in tensors.items():
                    self._keep(kind, name, tensor)
        self._keep_moments("moment")
        for local, weights in zip(self._segments, before, strict=True):
            self._keep_segment("weight change", local, local.master.double() - weights)
        return result

    # ---- what a step makes on the way

    def _note_mask(self, name: str, digest: int) -> None:
        self._keep("dropout mask", name, torch.tensor([digest], dtype=torch.float64))

    def _watch(self, stack: ExitStack) -> None:
        """Record outputs of layers as they are computed, and gradients once every reduction is done."""
        for chunk in self.steps.model.chunks:
            for name, layer in zip(chunk.names, chunk.layers, strict=True):
                if name != self.steps.task.layers[-1].name:  # it gives logits, split over ranks, or the loss
                    stack.enter_context(layer.register_forward_hook(partial(self._note_output, name)))
        data_parallel = self.steps.model.data_parallel
        convert = data_parallel.convert_exact_sums

        def converted() -> None:
            convert()
            for local in self._segments:
                if (gradient := local.gradient) is not None:
                    self._keep_segment("gradient", local, gradient / self.steps.update.scaler.scale)

        stack.enter_context(patch.object(data_parallel, "convert_exact_sums", converted))

    def _note_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden, shards = tensors_of(output)[0], SequenceShards(self.mesh.sequence)
        b, s, h = hidden.shape
        is_split = self.steps.config.parallel.sequence_parallel
        length = shards.whole_length(s * (self.mesh.layer.size if is_split else 1))
        first = s * self.mesh.layer.rank if is_split else 0  # among the positions of the ranks that divide the sequence
        for of in shards.ranges(length):
            skipped, taken = max(first, 0), min(first + s, len(of))
            if skipped < taken:
                positions, part = of[skipped:taken], hidden[:, skipped - first : taken - first]
                spec = ShardSpec.split((b, length, h), {1: (positions.start, positions.stop)})
                self._keep("output", f"{name}, microbatch {self.steps.task.streams.microbatch}", part, spec)
            first -= len(of)

    # ---- pieces

    def _keep_moments(self, kind: str) -> None:
        optimizer = self.steps.update.optimizer
        for state in optimizer.kinds:
            for local in self._segments:
                if (value := optimizer.values(local, state.name)) is not None:
                    self._keep_segment(kind, local, value, suffix=f" {state.name}")

    def _keep_segment(self, kind: str, local: LocalSegment, value: Tensor, *, suffix: str = "") -> None:
        shape, start = self._shapes[local.spec.name], local.segment.start
        self._keep(kind, local.spec.name + suffix, value, local.spec, local_shape=shape, start=start)

    def _keep(
        self,
        kind: str,
        name: str,
        values: Tensor,
        spec: ShardSpec | None = None,
        *,
        local_shape: tuple[int, ...] | None = None,
        start: int = 0,
    ) -> None:
        """A copy of this rank's part of a tensor: of what `spec` says, or of one that every rank has whole."""
        spec = spec or ShardSpec(shape=tuple(values.shape))
        self.pieces.append(
            Piece(
                key=Key(self._step, kind, name),
                shape=spec.shape,
                slices=spec.slices,
                local_shape=tuple(values.shape) if local_shape is None else local_shape,
                start=start,
                values=values.detach().double().reshape(-1).numpy(force=True).copy(),
            )
        )


def load_steps(config: ResolvedConfig, mesh: Mesh, checkpoint: Path, layers: DescribesLayers) -> TrainStep:
    """A model of this layout from a checkpoint."""
    steps = TrainStep(make_task(config, mesh, layers), config, mesh)
    steps.load(checkpoint)
    return steps


def assemble(pieces: Mapping[int, Sequence[Piece]]) -> Record:
    """Whole tensors from the pieces of every rank."""
    record = Record()
    locals_: dict[tuple[Key, Slices], Array] = {}
    parts: dict[tuple[Key, Slices], Piece] = {}
    for rank, of_rank in pieces.items():
        for piece in of_rank:
            part_of = piece.key, piece.slices
            parts.setdefault(part_of, piece)
            local = locals_.setdefault(part_of, np.full(int(np.prod(piece.local_shape)), _NONE))
            part = local[piece.start : piece.start + piece.values.size]
            _merge(record, piece.key, part, piece.values, rank)
    for (key, slices), local in locals_.items():
        piece = parts[key, slices]
        whole = record.tensors.setdefault(key, np.full(piece.shape, _NONE))
        shaped = local.reshape(piece.local_shape)
        unpadded = shaped[tuple(slice(stop - start) for start, stop in slices)]
        view = whole[tuple(slice(*bounds) for bounds in slices)]
        _merge(record, key, view, unpadded, None)
    return record


def _merge(record: Record, key: Key, held: Array, new: Array, rank: int | None) -> None:
    """Put values where none are, and note where others are that differ."""
    there = held.view(np.int64) != _NONE.view(np.int64)
    differs = there & (held != new) & ~(np.isnan(held) & np.isnan(new))
    if differs.any() and key not in record.disagreements:
        worst = float(np.max(np.abs(np.where(differs, held - new, 0.0))))
        who = "" if rank is None else f" (rank {rank} and a rank before it)"
        record.disagreements[key] = f"its copies differ by up to {worst:.3g}{who}"
    np.copyto(held, new, where=~there)


def gather(recorder: Recorder, mesh: Mesh) -> Record | None:
    """The record of all ranks, on rank 0; all ranks call this together."""
    everyone = all_gather_objects(recorder.pieces, mesh.world)
    return assemble(dict(enumerate(everyone))) if mesh.world.rank == 0 else None
