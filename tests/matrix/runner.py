"""Trains what a row of the table asks for and compares it. Equal runs are made once, those of a world size in one call.

A layout is written as words: `tp2 pp2 dp2 z3 sp recompute=full` is what must change nothing, beside the model and its
training, which are a row's program and changes. What stands before a `|` is of both runs that are compared, so
`tp2 | pp2 zb` is held against tp2 alone; without a `|` the other run is that of one process.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacore.layers import moe
from megacore.ops import fp8
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.matrix.programs import PROGRAMS, Changes, size_of
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.reference import plain_torch
from tests.parity.runs import Outcome, agree, bitwise, differences, make_config, make_trainer, near, outcome_of

NUMBERED = {
    **{name: name for name in ("tp", "pp", "dp", "cp", "ep", "etp")}, "z": "zero_stage", "mb": "micro_batch_size",
    "shards": "zero_shard_size", "chunks": "loss_chunks", "virtual": "virtual_stages", "blocks": "reproducible_blocks",
}  # fmt: skip
WORDS: dict[str, Changes] = {
    "sp": {"sequence_parallel": True},
    "gpipe": {"schedule": "gpipe"},
    "zb": {"schedule": "zero-bubble"},
    "interleaved": {"schedule": "interleaved"},
    "zb-v": {"schedule": "zb-v", "virtual_stages": 2},
    "dualpipev": {"schedule": "dualpipev", "virtual_stages": 2},
    "offload": {"offload_optimizer": True},
    "waits": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "own-schedule": {"schedule_csv": str(Path(__file__).with_name("schedule.csv"))},
    "compiled": {"compile": True, "compile_backend": "aot-eager"},
    "in-blocks": {"attention_block": 5},
}


def changes_of(words: str) -> Changes:
    """What the words of a layout stand for, by field name."""
    changes: Changes = {}
    for word in words.split():
        name, has_value, value = word.partition("=")
        if word == "|":
            continue
        letters = word.rstrip("0123456789")
        if has_value:
            changes[name] = ast.literal_eval(value) if value[0] in "0123456789(TFN" else value
        elif word in WORDS:
            changes |= WORDS[word]
        else:
            changes[NUMBERED[letters]] = int(word[len(letters) :])
    return changes


# ---- relations: what two runs have in common


@dataclass(frozen=True)
class Relation:
    """What is compared, and with which run.

    Attributes:
        compare: raises where a run (first) is not as it should be beside the other one.
        is_exact: no number is rounded in another way, so that no router's choice may change either.
        reference: `run`: of the layout's left side; `torch`: torch.optim.AdamW on transformers' GPT-2; `saved`: the run
            of the row's first layout, which saves half-way, and which each layout resumes there.
    """

    compare: Callable[[Outcome, Outcome], None]
    is_exact: bool = False
    reference: str = "run"


def with_weights(rtol: float, atol: float) -> Relation:
    """fp32 rounding, and the weights after the last step."""

    def compare(found: Outcome, expected: Outcome) -> None:
        agree(found, expected)
        for name, value in expected.final.items():
            torch.testing.assert_close(found.final[name], value, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")  # noqa: B023

    return Relation(compare)


def _is_torchs(found: Outcome, expected: Outcome) -> None:
    assert min(expected.norms) > 0.5, "clipping is meant to be active"
    agree(found, expected)
    near("losses", found.losses, expected.losses, 1e-6)
    near("norms", found.norms, expected.norms, 1e-6)
    for name, value in expected.final.items():
        torch.testing.assert_close(found.final[name], value, rtol=0, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023
    for kind, name in itertools.product(("exp_avg", "exp_avg_sq"), expected.final):
        # Of the tensor's own size, since second moments are at most 1e-5: tighter than 1e-6 for every tensor.
        value = expected.moments[kind][name]
        error = (found.moments[kind][name] - value).abs().max()
        assert error <= 1e-5 * value.abs().max(), f"{kind} of {name}: {error}"


def _is_learned_alike(found: Outcome, expected: Outcome) -> None:
    agree(found, expected)
    for name, weight in expected.final.items():
        if not name.endswith("qkv.bias"):  # the key's gradient is zero but for rounding, which Adam scales up
            change, error = (weight - expected.initial[name]).norm(), (found.final[name] - weight).norm()
            assert error <= 2e-3 * change + 1e-7, f"{name}: {error / change} of its change"


def _learns_alike(found: Outcome, expected: Outcome) -> None:
    near("losses", found.losses, expected.losses, 1e-5)
    frozen = [name for name, value in expected.final.items() if torch.equal(value, expected.initial[name])]
    assert frozen and all(torch.equal(found.final[name], expected.initial[name]) for name in frozen)


def _agrees_and_stays(found: Outcome, expected: Outcome) -> None:
    agree(found, expected)
    _learns_alike(found, expected)


def _is_a_long_sum(found: Outcome, expected: Outcome) -> None:
    near("losses", found.losses, expected.losses, 1e-6)
    near("norms", found.norms, expected.norms, 1e-6)
    # A gradient sums a term of each position, in fp32: of 16,384 of them the two differ by up to 1.5e-6.
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), f"gradient of {name}"


def near_fp32(losses: float, norms: float) -> Relation:
    """16 bits beside 32: the weights begin alike."""

    def compare(found: Outcome, expected: Outcome) -> None:
        near("losses", found.losses, expected.losses, losses)
        near("norms", found.norms, expected.norms, norms)
        assert not (differ := differences(found.initial, expected.initial)), f"initial {differ}"

    return Relation(compare)


def near_to(rel: float) -> Relation:
    """Losses, norms and gradients to a rounding."""

    def compare(found: Outcome, expected: Outcome) -> None:
        near("losses", found.losses, expected.losses, rel)
        near("norms", found.norms, expected.norms, rel)
        for name, gradient in expected.gradients.items():
            error = (found.gradients[name] - gradient).abs().max()
            assert error <= rel * gradient.abs().max() + 1e-8, f"gradient of {name}: {error}"

    return Relation(compare)


def follows(steps: int, rel: float) -> Relation:
    """Sums or moments in few bits beside those in all: alike for some steps, and near to the end, but not equal."""

    def compare(found: Outcome, expected: Outcome) -> None:
        near("losses", found.losses[:steps], expected.losses[:steps], 1e-5)
        near("losses", found.losses, expected.losses, rel)
        near("norms", found.norms[:1], expected.norms[:1], 1e-2)
        assert found.losses[-2:] != expected.losses[-2:], "nothing is compressed"

    return Relation(compare)


def resharded(rel: float) -> Relation:
    """Another layout begins with the bits that were saved; the layout of the save goes on with them."""

    def compare(found: Outcome, expected: Outcome) -> None:
        assert not (differ := differences(found.initial, expected.initial)), f"loaded {differ}"
        near("losses", found.losses, expected.losses, rel)

    return Relation(compare, is_exact=True, reference="saved")


FP32 = Relation(agree)  # to fp32 rounding: losses, norms, gradients; initial weights to the bit
WEIGHTS = with_weights(1e-5, 2e-6)
SGD_WEIGHTS = with_weights(1e-4, 1e-6)
LEARNED = Relation(_is_learned_alike)
# For an optimizer whose update lies where the gradient was, or adds weight decay to it.
UPDATED = Relation(lambda found, expected: _is_learned_alike(found, replace(expected, gradients={})))
LOSSES_NEAR = Relation(lambda found, expected: near("losses", found.losses, expected.losses, 1e-5))
LEARNS_ALIKE = Relation(_learns_alike)  # losses, and what is frozen stays
FROZEN = Relation(_agrees_and_stays)
LONG = Relation(_is_a_long_sum)  # of many positions
TORCH = Relation(_is_torchs, reference="torch")
TORCH_RUN = Relation(agree, reference="torch")  # of many steps, with AdamW's usual epsilon
BITWISE = Relation(bitwise, is_exact=True)
# Gradients are clipped in host memory then, and stay as they were on the device.
OFFLOADED = Relation(lambda found, expected: bitwise(found, expected, ("initial", "final")), is_exact=True)
LOSSES = Relation(
    lambda found, expected: bitwise(replace(found, norms=[], moments={}), replace(expected, norms=[]), ()),
    is_exact=True,
)
NEAR_FP32, SIXTEEN_BITS, CONTEXT_BITS = near_fp32(2e-3, 3e-2), near_fp32(2e-2, 0.1), near_fp32(2e-2, 5e-2)
RESUME = Relation(bitwise, is_exact=True, reference="saved")
RESHARD, RESHARD_NEAR = resharded(1e-6), resharded(1e-5)
RESHARD_INT8, RESHARD_INT8_ALONE = resharded(1e-4), resharded(1e-3)
COMPILED, COMPILED_BF16 = near_to(1e-5), near_to(2**-8)
FOLLOWS, FOLLOWS_ONEBIT = follows(1, 2e-3), follows(2, 1e-2)


# ---- rows


@dataclass(frozen=True)
class Row:
    """One promise.

    Attributes:
        id: its name, by which a failure is reported.
        program: a name of `PROGRAMS`.
        changes: by field name, of the model and its training: of both runs that are compared.
        layouts: words each, see above.
        relation: what both runs have in common.
        more: layouts in `make test-slow`.
        slow: only in `make test-slow`.
        whole: in `make test-slow` with five blocks and eight steps; in `make test` small, unless it is `slow`.
    """

    id: str
    program: str
    changes: Changes
    layouts: Sequence[str]
    relation: Relation = FP32
    more: Sequence[str] = ()
    slow: bool = False
    whole: bool = False


def items_of(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """One test a row, or three: small, and whole and with more layouts in `make test-slow`."""
    params = [pytest.param(replace(row, whole=False), id=row.id) for row in rows if not row.slow]
    for row in rows:
        name = row.id if row.slow else f"{row.id}-whole"
        if row.slow or row.whole:
            params.append(pytest.param(row, id=name, marks=pytest.mark.slow))
        if row.more:
            params.append(pytest.param(replace(row, layouts=row.more), id=f"{row.id}-more", marks=pytest.mark.slow))
    assert len({param.id for param in params}) == len(params), "rows with the same id"
    return pytest.mark.parametrize("row", params)


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        changes: by field name, tp, pp and dp included.
        part: `whole`; `begins`: saves half-way, and what comes out is of the rest; `rest`: resumes there; `torch`: not
            on ranks, but plain torch's.
        folder: of the checkpoint.
    """

    changes: tuple[tuple[str, Any], ...]
    part: str = "whole"
    folder: str = ""

    @property
    def ranks(self) -> int:
        degrees = dict(self.changes)
        return math.prod(degrees.get(name, 1) for name in ("tp", "pp", "dp", "cp"))


def case_of(row: Row, words: str, layout: str | None = None, **options: Any) -> Case:
    """The run of a layout, or of another one with the same model."""
    of_program = PROGRAMS[row.program] | row.changes
    stages, changes = changes_of(words).get("pp", 1), changes_of(words if layout is None else layout)
    size = size_of(stages, reproducible=of_program.get("reproducible", False), whole=row.whole)
    return Case(tuple(sorted((size | of_program | changes).items())), **options)


def other_of(row: Row, words: str) -> Case:
    """The run that a layout's is compared with."""
    return case_of(row, words, words.rpartition(" | ")[0])


# ---- on the ranks


def train_cases(rank: int, ranks: int, directory: str, cases: Sequence[Case]) -> list[tuple[Outcome, float]]:
    """What comes out of each on the first rank, and how near a router came to another choice."""
    meshes: dict[tuple[Any, ...], Mesh] = {}
    found = []
    for case in cases:
        try:
            with smallest_gap() if "num_experts" in dict(case.changes) else nullcontext([1.0]) as gaps:
                outcome = _outcome(case, directory, meshes)
        except BaseException as error:
            error.add_note(f"in {case}")
            raise
        found.append((outcome, gaps[0]))
    return found if rank == 0 else []


def _outcome(case: Case, directory: str, meshes: dict[tuple[Any, ...], Mesh]) -> Outcome:
    changes = dict(case.changes)
    layout = changes.pop("tp", 1), changes.pop("pp", 1), changes.pop("dp", 1)
    is_bert = "bert_style" in changes
    changes |= {"load": case.folder} if case.part == "rest" else {}
    block, tile = changes.pop("attention_block", None), changes.pop("fp8_tile", None)
    config: Any = (make_bert_config if is_bert else make_config)(layout, case.folder or directory, **changes)
    torch.use_deterministic_algorithms(False)
    if config.training.reproducible:
        compute_reproducibly()
    key = (*layout, *(changes.get(name) for name in ("cp", "ep", "etp", "zero_shard_size")))
    if key not in meshes:
        meshes[key] = build_mesh(config.parallel)
    with fp8_tiles(tile) if tile else nullcontext():
        trainer: Trainer = (make_bert_trainer if is_bert else make_trainer)(config, meshes[key])
    if case.part == "begins":
        while trainer.step < config.training.train_iters // 2:
            trainer.train_step(next(trainer.batches))
        trainer.save()
        trainer.saving.finish()
    with attention_in_blocks(block) if block else nullcontext():
        return outcome_of(trainer, moments=config.optimizer.optimizer == "adamw" or config.training.reproducible)


@contextmanager
def attention_in_blocks(size: int) -> Iterator[None]:
    """Compute attention in blocks, as that of long sequences is."""
    attention = import_module("megacore.ops.attention")  # the package exports the function of this name
    with mock.patch.object(attention, "WHOLE", 8), mock.patch.object(attention, "BLOCK", size):
        yield


@contextmanager
def fp8_tiles(size: int) -> Iterator[None]:
    """Build models whose --fp8 blockwise has a scale for each so many numbers, so that small ones have several."""
    recipe = fp8.Recipe(name="blockwise", rows=(1, size), weights=(size, size))
    with mock.patch.dict(fp8.RECIPES, blockwise=recipe):
        yield


@contextmanager
def smallest_gap() -> Iterator[list[float]]:
    """How far the last logit that is chosen is above the first that is not, at least. Where this is within rounding,
    layouts may choose different experts, and numbers cannot be compared."""
    gaps, choose = [1.0], moe.choose

    def watched(logits: Tensor, experts: Any, *others: Any) -> moe.Choice:
        if experts.moe_router_topk < experts.num_experts:
            scores, chosen = logits.detach().sort(-1, descending=True).values, experts.moe_router_topk
            gaps[0] = min(gaps[0], float((scores[..., chosen - 1] - scores[..., chosen]).min()))
        return choose(logits, experts, *others)

    with mock.patch.object(moe, "choose", watched):
        yield gaps


# ---- in the test


@dataclass
class Runner:
    """Runs and comparisons of the rows of one file.

    Attributes:
        directory: for what runs write.
        kept: what came out of each run.
    """

    directory: Path
    kept: dict[Case, tuple[Outcome, float]] = field(default_factory=dict)

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Make the runs that nobody made before."""
        missing = [case for case in dict.fromkeys(cases) if case not in self.kept]
        for ranks, group in itertools.groupby(sorted(missing, key=lambda case: case.ranks), lambda case: case.ranks):
            these = list(group)
            seconds = 60.0 + 60.0 * len(these)
            found = run_distributed(train_cases, ranks, str(self.directory), these, timeout=seconds, stay=True)[0]
            self.kept |= dict(zip(these, found, strict=True))
        return [self.kept[case][0] for case in cases]

    def check(self, row: Row) -> None:
        """Compare every layout of a row; say of each that fails what differs."""
        if "num_experts" in (PROGRAMS[row.program] | row.changes) and not row.relation.is_exact:
            row = self._with_clear_choices(row)
        found, expected = self._pairs(row)
        failures = []
        for words, one, other in zip(row.layouts, found, expected, strict=True):
            is_where_saved = row.relation.reference == "saved" and words == row.layouts[0]
            try:
                (BITWISE if is_where_saved else row.relation).compare(one, other)
                assert differences(one.initial, one.final), "no weight has changed"
            except AssertionError as error:
                failures.append(f"{row.id}, {words or 'one process'}: {error}")
        assert not failures, "\n".join(failures)

    def _pairs(self, row: Row) -> tuple[list[Outcome], list[Outcome]]:
        """What comes out of each layout, and of the run that it is compared with."""
        if row.relation.reference == "saved":
            folder = str(self.directory / row.id)
            (first,) = self.outcomes([case_of(row, row.layouts[0], part="begins", folder=folder)])
            cases = [case_of(row, words, part="rest", folder=folder) for words in row.layouts]
            return self.outcomes(cases), [first] * len(cases)
        cases = [case_of(row, words) for words in row.layouts]
        if row.relation.reference == "torch":
            plain = [case_of(row, words, "mb1", part="torch") for words in row.layouts]  # takes the batch as one
            for case in set(plain) - self.kept.keys():
                self.kept[case] = plain_torch(self.directory, **dict(case.changes)), 1.0
            return self.outcomes(cases), self.outcomes(plain)
        others = [other_of(row, words) for words in row.layouts]
        outcomes = self.outcomes([*others, *cases])
        return outcomes[len(others) :], outcomes[: len(others)]

    def _with_clear_choices(self, row: Row) -> Row:
        """The row with the first seed for which no router's choice is close."""
        for seed in range(1, 20):
            seeded = replace(row, changes=row.changes | {"seed": seed})
            base = [other_of(seeded, words) for words in row.layouts]
            self.outcomes(base)
            if min(self.kept[case][1] for case in base) > 1e-5:
                return seeded
        raise AssertionError(f"{row.id}: every seed has choices that rounding may change")
