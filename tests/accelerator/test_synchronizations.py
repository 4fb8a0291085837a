"""How often a step waits for the accelerator, and what it copies there: once, for the decision to apply the update, and
the next batch; whatever the layout, the schedule and the number of microbatches. How many matrix products a
step has, and what they write.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.config import ParallelConfig
from megacore.config.optimizers import OPTIMIZERS
from megacore.data.loading.loader import BatchLoader, DeviceLoader, Microbatch
from megacore.errors import DataError
from megacore.models.plain import Layer
from megacore.parallel import collectives as communication
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.products import TORCH, Products, adds_in_fp32
from megacore.pipeline.runtime import ActionTimer
from megacore.pipeline.schedule import Action, Op
from megacore.plan.memory import plan_memory
from megacore.train import parallelize as recipe
from megacore.train.engine import PipelineEngine
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from megacore.train.trainer import Trainer
from tests.accelerator.device import counting, needs_pretend
from tests.accelerator.test_training import TABLES, case_of, steps_of
from tests.distributed import RankFailed, run_distributed
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import Layout, make_config, make_trainer
from tests.patience import patience

pytestmark = needs_pretend
Options = dict[str, Any]
STEPS = 3
OWN_GROUPS: list[Options] = [
    {"optimizer": "muon", "muon_split_qkv": "heads"},
    {"param_group": ("blocks.0.*:lr=0.5", "*.bias:freeze")},
]
DEVICE: Options = {"device": "pretend", "train_iters": STEPS, "log_interval": STEPS, "num_layers": 2}


def case_of_row(row: dict[str, Any]) -> Any:
    """Of a layout, what is tried one after the other, and how often a step waits besides."""
    runs = [case_of(words) for words in row["runs"]]
    marks = [pytest.mark.slow] * row.get("slow", False)
    return pytest.param(runs[0][0], [options for _, options in runs], row.get("waits", 0), marks=marks)


EVERY = [*({"optimizer": name, "precision": "bf16"} for name in OPTIMIZERS), *OWN_GROUPS]
CASES = [*map(case_of_row, TABLES["synchronizations"])]
CASES += [pytest.param((1, 1, dp), EVERY, 0, marks=pytest.mark.slow) for dp in (1, 2)]


def trainer_of(layout: Layout, output_dir: str, mesh: Mesh | None, options: Options) -> Trainer:
    make, start = (make_bert_config, make_bert_trainer) if "bert_style" in options else (make_config, make_trainer)
    config: Any = make(layout, output_dir, **DEVICE | options)
    return start(config, mesh or build_mesh(config.parallel))


def bytes_of_a_step(trainer: Trainer) -> int:
    batch = trainer.batches.current
    assert batch is not None
    fields = [value for microbatch in batch.microbatches for value in vars(microbatch).values()]
    return sum(value.nbytes for value in fields if isinstance(value, Tensor))


def count(rank: int, world_size: int, output_dir: str, layout: Layout, variants: list[Options], waits: int) -> None:
    mesh: Mesh | None = None
    for number, options in enumerate(variants):
        trainer = trainer_of(layout, f"{output_dir}/{number}", mesh, options)
        mesh = trainer.mesh
        steps = steps_of(trainer)
        assert [step.host_syncs for step in steps] == [1 + waits] * (STEPS - 1), (options, steps[1].sync_causes)
        for step in steps:
            assert sum("in assign" in cause for cause in step.sync_causes) == waits, step.sync_causes
            assert sum("in to_host" in cause for cause in step.sync_causes) == 1, step.sync_causes
        if not waits:
            batch = bytes_of_a_step(trainer)
            assert [step.bytes_to_device for step in steps] == [batch] * (STEPS - 2) + [0], options
            assert max(step.bytes_to_host for step in steps) <= 8 * 16, options


@pytest.mark.parametrize(("layout", "variants", "waits"), CASES)
def test_a_step_waits_once_and_copies_the_next_batch_alone(
    tmp_path: Path, layout: Layout, variants: list[Options], waits: int
) -> None:
    ranks = math.prod(layout) * variants[0].get("cp", 1)
    run_distributed(count, ranks, str(tmp_path), layout, variants, waits, backend="pretend", timeout=180)


def skipping(rank: int, world_size: int, output_dir: str) -> list[list[int]]:
    """Host synchronisations of steps whose gradients overflow, of one block, and of three with offload."""
    scale = {"precision": "fp16", "initial_loss_scale": 2.0**120, "hysteresis": STEPS + 1}
    mesh: Mesh | None = None
    found = []
    for blocks, offload in ((1, False), (3, True)):
        options = {**scale, "num_layers": blocks, "offload_optimizer": offload}
        trainer = trainer_of((1, 1, world_size), f"{output_dir}/{blocks}-{offload}", mesh, options)
        mesh = trainer.mesh
        found.append([step.host_syncs for step in steps_of(trainer)])
        assert trainer.update.skipped_steps == STEPS
    return found


def test_a_skipped_step_waits_a_few_times_whatever_the_number_of_parameters(tmp_path: Path) -> None:
    """For the decision, for which gradients were finite, and for the largest entries; several ranks exchange these."""
    (counts,) = run_distributed(skipping, 1, str(tmp_path / "one"), backend="pretend", init=False)
    assert counts == [[3] * (STEPS - 1)] * 2
    for small, large in run_distributed(skipping, 2, str(tmp_path / "two"), backend="pretend"):
        assert large == small


# ---- the engine


def engine_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Host synchronisations and copied bytes of three steps; in the last one replica meets a size that is new."""
    layers = [Layer(name, partial(torch.nn.Linear, 8, 8)) for name in ("one", "two", "three")]
    engine = PipelineEngine(
        layers,
        loss=torch.nn.functional.mse_loss,
        train_iters=8,
        num_microbatches=4,
        parallel=ParallelConfig(dp=world_size, zero_stage=3, device="pretend"),
    )
    found = []
    for step in range(4):
        samples = 3 if step == 3 and rank == 1 else 2
        pairs = [(torch.randn(samples, 8).pin_memory(), torch.randn(samples, 8).pin_memory()) for _ in range(4)]
        with counting() as counters:
            engine.train_batch(pairs)
        found.append((counters.host_syncs, counters.bytes_to_device))
    return found[1:]


def test_the_engines_batch() -> None:
    sample = 4 * 2 * 8 * 4
    old, new = (1, 2 * sample), (1, 3 * sample)
    assert run_distributed(engine_steps, 2, backend="pretend") == [[old] * 3, [old] * 2 + [new]]


# ---- the next batch


class Samples:
    """Sample k is full of the number k, and one cannot be read; 12 of them."""

    def __init__(self, bad: int) -> None:
        self.bad, self.read = bad, 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read += 1
        if number == self.bad:
            raise DataError(f"sample {number} cannot be read")
        tokens = np.full(3, number)
        return {"tokens": tokens, "labels": tokens, "loss_mask": np.ones(3, np.float32)}


def loader_of(samples: Samples, **changes: Any) -> DeviceLoader:
    sizes: Options = {"micro_batch_size": 4, "global_batch_size": 4, "rank": 0, "ranks": 1}
    loader = BatchLoader(samples, Microbatch, **sizes | changes, pin_memory=True)
    return DeviceLoader(loader, torch.device("pretend", 0))


def fetch(rank: int, world_size: int) -> None:
    samples = Samples(bad=7)
    loader = loader_of(samples, micro_batch_size=2)
    first = next(loader)
    assert (loader.consumed_samples, samples.read) == (4, 4)
    with counting() as counters:
        loader.prefetch()  # which finds that the second step cannot be read
        loader.prefetch()
    assert (loader.consumed_samples, samples.read, counters.host_syncs) == (4, 8, 0)
    assert [microbatch.tokens[:, 0].tolist() for microbatch in first] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="sample 7 cannot be read"):
        next(loader)
    assert loader.consumed_samples == 4

    loader, seen = loader_of(Samples(bad=-1), consumed_samples=4), []
    for (microbatch,) in loader:
        loader.prefetch()
        seen.append((microbatch.index, microbatch.tokens[:, 0].tolist(), loader.consumed_samples))
    assert seen == [(1, [4, 5, 6, 7], 8), (2, [8, 9, 10, 11], 12)]


def test_the_next_step_is_fetched_ahead_and_counts_once_it_is_due() -> None:
    run_distributed(fetch, 1, backend="pretend", init=False)


def used_and_dropped(rank: int, world_size: int, *, holds: bool) -> list[int]:
    """The sums of two steps, of which nobody keeps the first while the device may still read it but the loader."""
    loader = loader_of(Samples(bad=-1))
    (first,) = next(loader)
    total = first.tokens.sum()
    del first
    if not holds:
        loader.current = None
    loader.prefetch()
    found = [int(total)]  # the program has waited
    (second,) = next(loader)
    return [*found, int(second.tokens.sum())]


def test_a_steps_memory_is_held_while_the_device_reads_it() -> None:
    run = partial(run_distributed, backend="pretend", init=False)
    assert run(partial(used_and_dropped, holds=True), 1) == [[3 * 6, 3 * 22]]
    with pytest.raises(RankFailed, match="memory is freed that aten::sum still reads on another stream"):
        run(partial(used_and_dropped, holds=False), 1)


# ---- times


def timed(rank: int, world_size: int) -> None:
    """Host and accelerator are compared until nothing comes between the looks at their two clocks."""
    assert any(is_timed_right() for _ in range(50))


def is_timed_right() -> bool:
    """Measure a step; whether its times are those of the host's clock."""
    timer, action = ActionTimer(torch.device("pretend", 0)), Action(Op.FORWARD, 0, 0)
    x = torch.ones(4, device="pretend")
    with timer.measure(action):  # in no step: not noted
        x += 1
    timer.enabled = True
    before = time.time()
    with counting() as counters, timer.measure_step():
        for _ in range(2):
            with timer.measure(action), timer.posting([action]):
                x += 1
                time.sleep(0.02)
    assert counters.host_syncs == 0
    after = time.time()
    found = timer.read()
    assert [(action.kind, action.actions) for action in found.actions] == [("compute", (action,))] * 2
    first, second = found.actions
    assert found.start <= first.start <= first.end <= second.start <= second.end <= found.end
    assert found.busy_seconds == pytest.approx(sum(t.end - t.start for t in found.actions))
    assert found.busy_seconds >= 0.039
    return before - 0.005 <= found.start and found.end <= after + 0.005


def test_an_accelerators_actions_are_timed_without_waiting_for_it() -> None:
    run_distributed(timed, 1, backend="pretend", init=False)


# ---- long sequences --------------------------------------------------------------------------------------------------

Changes = dict[str, Any]

LENGTH, WORDS = 1024, 2048
LONG: Changes = {"seq_length": LENGTH, "vocab_size": WORDS, "num_layers": 1, "position_embedding_type": "rope"}
LONG |= {"micro_batch_size": 1, "global_batch_size": 1, "num_attention_heads": 2, "loss_chunks": 8}
SHORT: Changes = {"seq_length": 256, "num_layers": 2}


@dataclass(frozen=True)
class Held:
    """Of a second step: bytes that it keeps from forward to backward beside the gradient of the head's weight, its
    peak, and both by formula, beyond what is on the device between steps; and the losses and norms of both steps."""

    kept: int
    peak: int
    planned_kept: float
    planned: float
    numbers: list[float]


def settled_bytes(device: torch.device) -> int:
    """Bytes of the device once the threads of transfers that are done have dropped what they sent."""
    least, end = torch.accelerator.memory_allocated(device), time.monotonic() + patience(0.03)
    while time.monotonic() < end:
        time.sleep(0.01)
        least = min(least, torch.accelerator.memory_allocated(device))
    return least


class Noting(GPTTask):
    """Notes the bytes of the device between forward and backward."""

    kept = 0

    def loss(self, output: Tensor, microbatch: Microbatch) -> Tensor:
        self.kept = settled_bytes(output.device)
        return super().loss(output, microbatch)


def held(rank: int, world_size: int, directory: str, cases: list[Changes]) -> list[Held]:
    """Of each configuration."""
    found = []
    for number, changes in enumerate(cases):
        layout = (changes.get("tp", 1), 1, 1)
        others = {name: value for name, value in changes.items() if name != "tp"}
        config = make_config(layout, f"{directory}/{number}", device="pretend", **LONG | others)
        mesh = build_mesh(config.parallel)
        step = TrainStep(task := Noting(config, mesh), config, mesh)
        numbers, before = [], 0
        for seed in range(2):
            draw, length = torch.Generator().manual_seed(seed), config.data.seq_length
            tokens, labels = torch.randint(0, WORDS, (2, 1, length), generator=draw).to(mesh.device)
            mask = torch.ones(1, length, device=mesh.device)
            before = settled_bytes(mesh.device)
            torch.accelerator.reset_peak_memory_stats(mesh.device)
            step.compute_gradients([Microbatch(index=seed, tokens=tokens, labels=labels, loss_mask=mask)])
            peak = torch.accelerator.max_memory_allocated(mesh.device) - before
            result = step.update_weights()
            numbers += [float(result.loss), float(result.grad_norm)]
        (planned,) = plan_memory(config, task.layers, on_cpu=False)
        in_backward = planned.activations + planned.working
        kept = task.kept - before - 4 * WORDS * config.model.hidden_size
        found.append(Held(kept, peak, planned.activations, in_backward, numbers))
    return found


@pytest.mark.parametrize("comm", ["ring", pytest.param("allgather", marks=pytest.mark.slow)])
def test_ranks_hold_their_share_and_no_square_of_the_sequence(comm: str, tmp_path: Path) -> None:
    """A square of the sequence in fp32, or the logits of all its positions, would be larger than the whole peak."""
    (two,) = run_distributed(held, 2, str(tmp_path / "two"), [{"cp": 2, "cp_comm": "ring"}], backend="pretend")[0]
    (four,) = run_distributed(held, 4, str(tmp_path / "four"), [{"cp": 4, "cp_comm": comm}], backend="pretend")[0]
    assert four.numbers == pytest.approx(two.numbers, rel=1e-5)
    assert four.kept == pytest.approx(two.kept / 2, rel=0.05)
    assert four.peak < 4 * LENGTH**2 < 4 * LENGTH * WORDS


def test_offloaded_activations_come_back_bit_for_bit_and_two_blocks_are_held(tmp_path: Path) -> None:
    deep, off = SHORT | {"num_layers": 6}, {"offload_activations": True}
    selective = {"recompute": "selective"}
    split = {"schedule": "zero-bubble"}
    cases = [SHORT, deep, deep | off, deep | split | selective, deep | split | selective | off]
    two, whole, offloaded, *others = run_distributed(held, 1, str(tmp_path), cases, backend="pretend", init=False)[0]
    assert offloaded.numbers == whole.numbers
    assert 0.5 * two.kept < offloaded.kept <= two.kept < 0.5 * whole.kept
    assert offloaded.peak == pytest.approx(two.peak, rel=0.05)
    assert offloaded.planned == pytest.approx(two.planned, rel=0.01)
    without, of_two = others
    assert of_two.numbers == without.numbers and of_two.kept < 0.5 * without.kept


@pytest.mark.slow
def test_divided_inputs_of_recomputed_blocks_come_back_bit_for_bit(tmp_path: Path) -> None:
    full = SHORT | {"num_layers": 4, "recompute": "full", "tp": 2, "sequence_parallel": False}
    cases = [full, full | {"distribute_saved_activations": True}]
    whole, divided = run_distributed(held, 2, str(tmp_path), cases, backend="pretend")[0]
    assert divided.numbers == whole.numbers
    assert whole.kept - divided.kept == pytest.approx(whole.planned_kept - divided.planned_kept, rel=0.1)


# ---- products


LLAMA: dict[str, Any] = {
    "activation": "swiglu", "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 64, "num_layers": 2, "train_iters": 2,
}  # fmt: skip
BF16: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 2}
MICROBATCHES = 4  # of a step of `make_config`


@dataclass
class Traced:
    """What a step launched.

    Attributes:
        products: by name.
        added: shapes of matrices that were added or copied into an fp32 buffer.
        clones: how many tensors [b, s, h] were copied; attention and rotation in plain torch copy others.
        written: bytes of the results of products.
        collectives: by name.
        figures: loss and gradient norm of every step.
    """

    products: Counter[str] = field(default_factory=Counter)
    added: list[tuple[int, ...]] = field(default_factory=list)
    clones: int = 0
    written: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    figures: list[float] = field(default_factory=list)


class Trace(TorchDispatchMode):
    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.traced = traced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), str(func)
        if name.startswith(("aten.mm", "aten.addmm")):
            self.traced.products[name] += 1
            self.traced.written += result.nbytes
        elif name in ("aten.add_.Tensor", "aten.copy_.default") and args[0].dim() == 2:
            if args[0].dtype == torch.float32 and args[1].dtype == torch.bfloat16:
                self.traced.added.append(tuple(args[0].shape))
        elif name == "aten.clone.default" and args[0].device.type == "pretend" and args[0].dim() == 3:
            self.traced.clones += 1
        return result


@contextmanager
def counted(collectives: Counter[str]) -> Iterator[None]:
    """Count the collectives that the code inside starts."""
    places = [(dist, "all_reduce"), (communication, "all_gather_flat"), (communication, "reduce_scatter_flat")]

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            collectives[name.removesuffix("_flat")] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, counting(name, getattr(place, name))))
        yield


Variant = dict[str, Any]


def traced_steps(rank: int, world_size: int, layout: Layout, directory: str, variants: list[Variant]) -> list[Traced]:
    """Of each of them two steps, of which the second is traced; `apart`: products do not add to sums."""
    found, options = [], recipe.zero_options
    for variant in variants:
        changes, traced = dict(variant), Traced()
        products_add = {"products_add": False} if changes.pop("apart", False) else {}
        with patch.object(recipe, "zero_options", lambda *args, new=products_add: replace(options(*args), **new)):
            config = make_config(layout, directory, device="pretend", **LLAMA | BF16 | changes)
            trainer = make_trainer(config, build_mesh(config.parallel))
        for step in range(2):
            with ExitStack() as stack:
                if step == 1:
                    stack.enter_context(Trace(traced))
                    stack.enter_context(counted(traced.collectives))
                result = trainer.train_step(next(trainer.batches))
            traced.figures += [float(result.loss), float(result.grad_norm)]
        found.append(traced)
    return found


def traced_variants(layout: Layout, directory: Any, *variants: Variant) -> list[Traced]:
    ranks = math.prod(layout)
    arguments = (layout, str(directory), list(variants))
    found: list[Traced] = run_distributed(traced_steps, ranks, *arguments, backend="pretend", init=ranks > 1)[0]
    return found


LATER = pytest.param((1, 1, 2), {"zero_stage": 3, "micro_batch_size": 1}, 8, marks=pytest.mark.slow)


@pytest.mark.parametrize(("layout", "changes", "forward"), [((1, 1, 1), {"recompute": "full"}, 8 + 6), LATER], ids=str)
def test_products_add_to_weight_gradients(layout: Layout, changes: Any, forward: int, tmp_path: Any) -> None:
    """A block has qkv, output, gate and up together, and down, which is not computed again; then there is the head."""
    direct, apart = traced_variants(layout, tmp_path, changes, changes | {"apart": True})
    linears = 2 * 4 + 1
    assert direct.products["aten.addmm.dtype_out"] == MICROBATCHES * linears
    assert direct.products.total() == MICROBATCHES * (2 * linears + forward + 1)
    assert not direct.added
    assert len(apart.added) == MICROBATCHES * (2 * 5 + 1)  # gate and up have a gradient each; the embedding adds rows
    assert apart.products["aten.addmm.dtype_out"] == 0
    # bf16 keeps 8 bits (4e-3), and a gradient of its own is rounded once more than one added by the product.
    assert direct.figures[::2] == pytest.approx(apart.figures[::2], rel=5e-4)
    assert direct.figures[1::2] == pytest.approx(apart.figures[1::2], rel=2e-3)


@pytest.mark.parametrize(
    ("sequence_parallel", "replicas"), [(False, 1), (True, 1), pytest.param(True, 2, marks=pytest.mark.slow)]
)
def test_recomputation_ends_before_the_last_product_and_its_collective(
    sequence_parallel: bool, replicas: int, tmp_path: Any
) -> None:
    """A block's product `down` and the sum of its output over ranks run once, also with ZeRO 3, whose weights are
    gathered again for backward. Collectives of sequence parallelism, and the products beside them, are one a sample;
    nothing is copied around them at two samples a microbatch, where the pieces of the sequence are not in order."""
    microbatches, samples = MICROBATCHES // replicas, BF16["micro_batch_size"]
    common = {"zero_stage": 3 if replicas > 1 else 0, "sequence_parallel": sequence_parallel}
    variants = [{"recompute": "none"}, {"recompute": "light"}, {"recompute": "full"}]
    variants += [{"schedule": "zero-bubble"}] if sequence_parallel else []
    found = traced_variants((2, 1, replicas), tmp_path, *(common | one for one in variants))
    kept, light, again = found[:3]
    assert kept.figures == light.figures == again.figures
    assert kept.collectives == light.collectives and kept.products == light.products
    blocks = 2 * microbatches
    collectives, products = again.collectives - kept.collectives, again.products - kept.products
    if sequence_parallel:  # qkv and gate with up gather; the output layer of attention scatters
        assert collectives == {"all_gather": 2 * blocks * samples, "reduce_scatter": blocks * samples}
        assert products.total() == 3 * blocks * samples
        assert [one.clones for one in found] == [0] * 4
    else:
        assert collectives == {"all_reduce": blocks}
        assert products.total() == 3 * blocks


def test_recomputation_of_a_split_backward_ends_before_the_last_product(tmp_path: Any) -> None:
    """A block is computed again for its input's gradient and for each of 7 operators with weights: all its 5 products
    but the last. Only a schedule from a file splits the backward of such blocks."""
    halves = tmp_path / "halves.csv"
    halves.write_text(",".join(f"0F{n},0I{n},0W{n}" for n in range(MICROBATCHES)) + "\n", encoding="utf-8")
    variants = [{"schedule_csv": str(halves), "recompute": recompute} for recompute in ("none", "full")]
    kept, again = traced_variants((1, 1, 1), tmp_path, *variants)
    assert kept.figures == again.figures
    assert again.products.total() - kept.products.total() == MICROBATCHES * 2 * (1 + 7) * 4


def errors(rank: int, world_size: int) -> tuple[float, float]:
    """Of sums of eight gradients in bf16 against fp64: added by the product, and after it."""
    device, random = torch.device("pretend", rank), torch.Generator().manual_seed(0)
    assert adds_in_fp32(device, torch.bfloat16)
    assert not adds_in_fp32(device, torch.float32)
    assert not adds_in_fp32(torch.device("cpu"), torch.bfloat16)
    exact = torch.zeros(24, 16, dtype=torch.float64)
    sums = [torch.full((24, 16), torch.nan, device=device) for _ in range(2)]
    for number in range(8):
        grad, x = (torch.randn(64, n, generator=random).bfloat16() for n in (24, 16))
        exact += grad.double().t() @ x.double()
        for way, total in zip((TORCH, Products()), sums, strict=True):
            way.add_weight_gradient(total, grad.to(device), x.to(device), has_terms=number > 0)
    found = [float((total.cpu() - exact).abs().max()) for total in sums]
    return found[0], found[1]


def test_a_sum_of_products_is_not_rounded_to_16_bits() -> None:
    ((direct, apart),) = run_distributed(errors, 1, backend="pretend", init=False)
    assert direct < 1e-4
    assert apart > 1e-2
