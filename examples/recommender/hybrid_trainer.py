"""Train with large tables divided over the ranks and everything else on each of them; save, and load on other ranks.

Every number is the same to the last bit on any number of ranks. A batch is always cut into as many blocks. Each rank
computes some of them, and the gradients of all blocks are summed in order. (An all-reduce of the ranks' sums would send
fewer bytes, but sums of sums round differently.)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from clicks import LARGE_FIELDS, Clicks
from dense_models import MODELS
from hashed_table import owners
from megacore.config.missing_files import unwritable
from megacore.errors import CheckpointError, ConfigError, UserError
from megacore.parallel.collectives import all_gather, barrier
from megacore.parallel.mesh import Group
from megacore.parallel.random import seeded
from sharded_embedding import ShardedEmbedding

ROW_LR, DENSE_LR = 0.05, 2e-3


class Recommender:
    """A model, half of it divided over the ranks of a group.

    Args:
        name: of one of `MODELS`.
        group: the ranks; their number divides the blocks.
        blocks: into which every batch is cut.

    Attributes:
        step: how many steps were taken.
    """

    def __init__(self, name: str, group: Group, blocks: int) -> None:
        with seeded(1):
            self.dense = MODELS[name]()
        self.group, self.blocks, self.step = group, blocks, 0
        self.embedding = ShardedEmbedding(self.dense.columns, group)
        self._parameters = list(self.dense.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=DENSE_LR)

    def train(self, batch: Clicks) -> float:
        """Take a step; the mean loss of the whole batch, which every rank is given."""
        self.step += 1
        mine = batch.part(self.group.rank, self.group.size)
        route = self.embedding.route(mine.ids[:, LARGE_FIELDS].flatten())
        rows = self.embedding.look_up(route, self.step).view(len(mine), len(LARGE_FIELDS), -1)
        results = [self._gradients(block, large, len(batch)) for block, large in self._blocks(mine, rows)]
        self.embedding.update(route, torch.cat([large for large, _ in results]).flatten(0, 1), ROW_LR)
        # [blocks, 1 + dense parameters]: the loss and the gradients of each
        total = all_gather(torch.stack([dense for _, dense in results]), self.group).flatten(0, 1).sum(0)
        start = 1
        for parameter in self._parameters:
            parameter.grad = total[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self._optimizer.step()
        return total[0].item()

    @torch.no_grad()
    def scores(self, batch: Clicks) -> Tensor:
        """The logits of the whole batch, which every rank is given."""
        mine = batch.part(self.group.rank, self.group.size)
        rows = self.embedding.peek(self.embedding.route(mine.ids[:, LARGE_FIELDS].flatten()))
        rows = rows.view(len(mine), len(LARGE_FIELDS), -1)
        logits = [self.dense(block.counts, block.ids, large) for block, large in self._blocks(mine, rows)]
        return all_gather(torch.cat(logits), self.group).flatten()

    def _blocks(self, mine: Clicks, rows: Tensor) -> Iterator[tuple[Clicks, Tensor]]:
        count = self.blocks // self.group.size
        for i, large in enumerate(rows.chunk(count)):
            yield mine.part(i, count), large

    def _gradients(self, block: Clicks, large: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        """Gradients of the large fields' embeddings, and the loss with the gradients of all else in one tensor."""
        large = large.detach().requires_grad_()
        logits = self.dense(block.counts, block.ids, large)
        loss = F.binary_cross_entropy_with_logits(logits, block.labels, reduction="sum") / samples
        of_rows, *of_dense = torch.autograd.grad(loss, [large, *self._parameters])
        return of_rows, torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in of_dense)])

    @staticmethod
    def require_savable(directory: Path) -> None:
        """Refuse a directory that `save` could not write, or whose contents it would replace, before training.

        Raises:
            UserError: it holds something else than a checkpoint, or no file can be made there.
        """
        if problems := unwritable("--save", directory):
            raise ConfigError(problems)
        if any(directory.glob("*")) and not (directory / "dense.safetensors").exists():
            raise UserError(f"--save {directory} exists, and is no checkpoint of this script: name a new directory")

    def save(self, directory: Path) -> None:
        """Write a checkpoint that `load` reads on any number of ranks; it appears whole or not at all."""
        directory = directory.absolute()
        unfinished = directory.with_name(directory.name + ".tmp")
        if self.group.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier(self.group)
        save_file(self.embedding.table.state(), unfinished / f"rows-{self.group.rank}.safetensors")
        barrier(self.group)
        if self.group.is_first:
            moments = self._optimizer.state_dict()["state"]
            adam = {f"adam.{i}.{name}": value for i, state in moments.items() for name, value in state.items()}
            step = {"step": torch.tensor(self.step)}
            save_file({**self.dense.state_dict(), **adam, **step}, unfinished / "dense.safetensors")
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
        barrier(self.group)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint; each rank takes the rows that it holds now.

        Raises:
            CheckpointError: there is none, or it is of another model.
        """
        if not (directory / "dense.safetensors").exists():
            raise CheckpointError(f"--load {directory} has no dense.safetensors: use a directory that --save wrote")
        dense = load_file(directory / "dense.safetensors")
        self.step = int(dense.pop("step"))
        adam = {name: dense.pop(name) for name in list(dense) if name.startswith("adam.")}
        try:
            self.dense.load_state_dict(dense)
        except RuntimeError as error:
            raise CheckpointError(f"--load {directory} is of another model: use its --model") from error
        whole, moments = self._optimizer.state_dict(), dict[int, dict[str, Tensor]]()
        for name, value in adam.items():
            _, number, kind = name.split(".")
            moments.setdefault(int(number), {})[kind] = value
        self._optimizer.load_state_dict({**whole, "state": moments})
        for path in sorted(directory.glob("rows-*.safetensors")):
            state = load_file(path)
            is_mine = owners(state["ids"], self.group.size) == self.group.rank
            self.embedding.table.add({name: value[is_mine] for name, value in state.items()})
