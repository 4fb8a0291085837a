"""What a device holds while a run is built on ZeRO-3, and what it is too small for; what --offload-params and the
optimizer's step copy and wait for."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.config import SpikeConfig
from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.errors import ConfigError
from megacore.layers.context import BuildContext
from megacore.models.gpt import GPTHead
from megacore.models.outline import outline
from megacore.ops import cross_entropy
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.loss import Scored, vocabulary_share
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from megacore.parallel.random import RandomStreams
from megacore.plan import fit
from megacore.tracer.step_trace import fake_step
from megacore.train.callbacks import Callback
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.accelerator.device import Counters, counting, limit_memory, needs_pretend, slow
from tests.accelerator.largest_model import HOST as ON_HOST
from tests.accelerator.largest_model import PLAIN, largest
from tests.accelerator.test_training import Case, Changes, case_of, cases_of
from tests.distributed import run_distributed
from tests.parallel.test_spikes import GUARD, POISON, STEPS, Losses, Text, state_of, trainer_on
from tests.parallel.test_tensor import world_group
from tests.parity import runs
from tests.parity.hf_models import make_model, save_model
from tests.parity.runs import Layout, RaggedData, losses_around_a_skip, make_config, make_trainer
from tests.plans.published import traced

pytestmark = needs_pretend
SMALL = 1 << 12  # bytes: numbers that ranks agree on
DEEP = {"num_layers": 12, "global_batch_size": 4, "hidden_size": 64, "num_attention_heads": 4}


@dataclass(frozen=True)
class Held:
    """Bytes of the device: most at once while building, what is left afterwards; and in fp32 the largest layer and the
    whole stage."""

    peak: int
    kept: int
    layer: int
    stage: int


def build(rank: int, world_size: int, directory: str, precision: str, hf: str | None, load: str | None) -> Held:
    """Build a trainer on ZeRO-3, from the seed, from transformers' weights or from a checkpoint."""
    options = {"device": "pretend", "zero_stage": 3, "precision": precision, "micro_batch_size": 1, "load": load}
    config = make_config((1, 1, world_size), directory, **DEEP, **options)
    if hf is not None:
        config = dataclasses.replace(config, model=open_model(Path(hf)).config)
    mesh = build_mesh(config.parallel)
    task = GPTTask(config, mesh, weights=None if hf is None else WeightsFromHF(Path(hf)))
    before = torch.accelerator.memory_allocated(mesh.device)
    torch.accelerator.reset_peak_memory_stats(mesh.device)
    trainer = Trainer(config, mesh, task, RaggedData(8), None)
    sizes = [4 * sum(b.layout.size for b in layer.buckets) for layer in trainer.model.data_parallel.layers]
    peak = torch.accelerator.max_memory_allocated(mesh.device) - before
    return Held(peak, torch.accelerator.memory_allocated(mesh.device) - before, max(sizes), sum(sizes))


def save_one(rank: int, world_size: int, directory: str) -> None:
    config = make_config((1, 1, 1), directory, **DEEP)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    trainer.save()


@pytest.mark.parametrize(("source", "precision"), [("seed", "bf16"), ("hf", "fp32"), ("load", "bf16")])
def test_one_layer_at_most_is_whole_while_a_run_is_built(source: str, precision: str, tmp_path: Path) -> None:
    hf = load = None
    if source == "hf":
        hf = str(save_model(make_model("gpt2"), tmp_path / "hf"))
    if source == "load":
        load = str(tmp_path / "saved")
        run_distributed(save_one, 1, load)
    for held in run_distributed(build, 4, str(tmp_path / "run"), precision, hf, load, backend="pretend"):
        allowed = held.kept + held.layer + SMALL
        assert 0 < held.peak <= allowed, held
        assert allowed < held.stage, "a whole stage in fp32 must not be allowed"


def left_of_runs(rank: int, world_size: int, directory: str, cases: list[tuple[Layout, dict[str, Any]]]) -> list[int]:
    """Bytes of the device that are left of each of two runs of two steps, one after the other."""
    left = []
    for layout, changes in cases:
        config = make_config(layout, directory, device="pretend", **{"num_layers": 2, **changes})
        mesh = build_mesh(config.parallel)
        for _ in range(2):
            before = torch.accelerator.memory_allocated(mesh.device)
            trainer = make_trainer(config, mesh)
            for _ in range(2):
                trainer.train_step(next(trainer.batches))
            held = torch.accelerator.memory_allocated(mesh.device) - before
            trainer.callbacks.call(Callback.on_stop, None)
            del trainer
            while gc.collect():  # what C++ holds is only seen as garbage once its owner is gone
                pass
            left.append(torch.accelerator.memory_allocated(mesh.device) - before)
            assert held > 8 * SMALL
    return left


LEFT: dict[int, list[tuple[Layout, dict[str, Any]]]] = {
    1: [((1, 1, 1), {"precision": "bf16", "loss_chunks": 2, "recompute": "full"})],
    2: [
        ((1, 1, 2), {"zero_stage": 3, "precision": "bf16"}),
        ((1, 2, 1), {"schedule": "zero-bubble"}),
        ((2, 1, 1), {"optimizer": "muon", "sequence_parallel": True}),
    ],
}


@pytest.mark.parametrize("ranks", LEFT)
def test_a_run_that_is_over_leaves_nothing_on_the_device(ranks: int, tmp_path: Path) -> None:
    found = run_distributed(left_of_runs, ranks, str(tmp_path), LEFT[ranks], backend="pretend")
    assert all(left <= 2 * SMALL for of_rank in found for left in of_rank), found


def refused(rank: int, world_size: int, directory: str, changes: dict[str, Any]) -> str:
    """What a rank says where the device of the last one has 32 MiB, and the host 64 KiB; nothing is allocated."""
    fit.host_memory = partial(AvailableMemory, 2.0**16, "a small host")
    config = make_config((1, world_size, 1), directory, device="pretend", **changes)
    mesh = build_mesh(config.parallel)
    task, before = GPTTask(config, mesh), torch.accelerator.memory_allocated(mesh.device)
    if rank == world_size - 1:
        taken = torch.empty(1 << 20, device=mesh.device)  # 4 MiB
        limit_memory(before + (32 << 20))
    torch.accelerator.reset_peak_memory_stats(mesh.device)
    with pytest.raises(ConfigError) as error:
        Trainer(config, mesh, task, RaggedData(8), None)
    held = taken.nbytes if rank == world_size - 1 else 0
    assert torch.accelerator.max_memory_allocated(mesh.device) - before - held < SMALL  # what ranks tell each other
    return str(error.value)


def test_what_one_device_has_no_room_for_is_refused_on_all_before_it_is_built(tmp_path: Path) -> None:
    said = run_distributed(refused, 2, str(tmp_path), {"ffn_hidden_size": 1 << 15}, backend="pretend")
    assert said[0] == said[1]
    assert "but 28.0 MiB are available (free on pretend:1, which has " in said[0]
    assert "(rank 1: pp 1, dp 0, tp 0)" in said[0]


def test_what_the_host_has_no_room_for_is_not_offloaded(tmp_path: Path) -> None:
    for said in run_distributed(refused, 2, str(tmp_path), {"offload_optimizer": True}, backend="pretend"):
        assert re.search(r"--offload-optimizer needs 1\.\d MiB of host memory for 2 ranks .*, but 64\.0 KiB are", said)


@dataclass(frozen=True)
class Copies:
    """Of one step with offload: bytes to the host and to the device, where the host waited how often, and what the rank
    owns: bytes in the device's format, and buckets; and how these travelled back."""

    down: int
    up: int
    waits: dict[str, int]
    owned: int
    buckets: int
    uploads: list[tuple[bool, bool]]
    downloads: list[tuple[bool, bool]]


class Transfers(TorchDispatchMode):
    """Notes of each copy to the device whether it leaves the format as it is, and whether it is from pinned memory: a
    GPU does all others while the host waits. Of each copy to the host, whether it is a few numbers, and whether it is
    in the stream that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[tuple[bool, bool]] = []
        self.downloads: list[tuple[bool, bool]] = []
        self._main = torch.accelerator.current_stream()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if target.device.type != "cpu" and source.device.type == "cpu":
                self.uploads.append((target.dtype == source.dtype, source.is_pinned()))
            if target.device.type == "cpu" and source.device.type != "cpu":
                in_main = torch.accelerator.current_stream() == self._main
                self.downloads.append((source.numel() < 16, in_main))
        return operator(*args, **(kwargs or {}))


def copies_of(rank: int, world_size: int, directory: str) -> Copies:
    options = {"zero_stage": 2, "precision": "bf16", "grad_reduce_dtype": "bf16", "offload_optimizer": True}
    config = make_config((1, 1, world_size), directory, device="pretend", **options)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    batch = next(trainer.batches)
    with counting() as counted:
        trainer.train_step(batch)
    with Transfers() as step:
        trainer.train_step(next(trainer.batches))
    with Transfers() as publication:
        trainer.model.data_parallel.publish()
    buckets = trainer.model.data_parallel.buckets
    return Copies(
        down=counted.bytes_to_host,
        up=counted.bytes_to_device,
        waits=Counter(cause.rpartition(" in ")[2] for cause in counted.sync_causes),
        owned=sum(bucket.shard_params.nbytes for bucket in buckets),
        buckets=len(buckets),
        uploads=publication.uploads,
        downloads=step.downloads,
    )


def test_weights_go_back_while_the_next_bucket_is_updated(tmp_path: Path) -> None:
    """The host waits for the decision, and never for weights; of gradients the pretend device is always done. These are
    queued behind the decision, beside what the device computes. Both travel in the device's format."""
    for found in run_distributed(copies_of, 2, str(tmp_path), backend="pretend"):
        assert found.waits == {"to_host": 1}
        assert found.downloads == [(True, True)] + [(False, False)] * found.buckets
        assert found.uploads == [(True, True)] * found.buckets
        assert found.down == pytest.approx(found.owned, abs=SMALL)
        assert found.up == pytest.approx(found.owned, abs=SMALL)  # the batch is small


def losses_by_offload(rank: int, world_size: int, directory: str, cases: list[Any]) -> list[list[list[float]]]:
    """Of each case: of steps one of which is skipped, on the device and with offload."""
    found = []
    fp16: dict[str, Any] = {"precision": "fp16", "initial_loss_scale": 1024.0, "hysteresis": 2, "device": "pretend"}
    for number, (is_slow, offload, options) in enumerate(cases):
        each = [fp16 | options, fp16 | options | offload]
        configs = [make_config((1, 1, world_size), f"{directory}/{number}{len(one)}", **one) for one in each]
        with slow() if is_slow else nullcontext():
            found.append([losses_around_a_skip(config) for config in configs])
    return found


def test_gradients_of_a_skipped_step_on_their_way_to_the_host_do_no_harm(tmp_path: Path) -> None:
    """The device says so where their memory is written to before they are copied; it may be slow."""
    optimizer, parameters = {"offload_optimizer": True}, {"offload_optimizer": True, "offload_params": True}
    cases = [
        (False, optimizer, {"zero_stage": 2, "num_layers": 2}),
        (True, parameters, {"zero_stage": 3, "num_layers": 1}),
    ]
    for of_rank in run_distributed(losses_by_offload, 2, str(tmp_path), cases, backend="pretend"):
        assert [offloaded for _, offloaded in of_rank] == [plain for plain, _ in of_rank]


# ---- what attention holds at 8192 positions on a device without a fused operator -------------------------------------

HEADS, GROUPS, SIZE, BLOCK = 2, 1, 16, 512


@dataclass(frozen=True)
class Peak:
    """Bytes beyond queries, keys and values: most at once in a forward and a backward, and what is kept in between."""

    peak: int
    kept: int


def peaks(rank: int, world_size: int, case: str, lengths: list[int]) -> list[Peak]:
    device = torch.device("pretend", rank)
    found = []
    for s in lengths:
        query, key, value = (
            torch.randn(1, s, heads, SIZE, device=device).transpose(1, 2).requires_grad_()
            for heads in (HEADS, GROUPS, GROUPS)
        )
        documents = (torch.arange(s) // (s // 3) + 1).view(1, s).to(device) if case == "documents" else None
        alibi = ops.Alibi(torch.tensor(ops.alibi_slopes(HEADS), device=device)) if case == "alibi" else None
        view = ops.Visibility(causal=True, window=s // 4 if case == "window" else None, documents=documents)
        outer = torch.ones(1, HEADS, s, SIZE, device=device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        out = ops.attention(query, key, value, view=view, alibi=alibi)
        kept = torch.accelerator.memory_allocated(device) - before
        out.backward(outer)
        found.append(Peak(torch.accelerator.max_memory_allocated(device) - before, kept))
        del query, key, value, documents, alibi, outer, out
    return found


@pytest.mark.parametrize(
    "case", ["documents", *(pytest.param(case, marks=pytest.mark.slow) for case in ("window", "alibi"))]
)
def test_attention_at_8192_holds_tiles_and_what_grows_with_the_length(case: str) -> None:
    """Half the length: half of all but the tiles."""
    half, whole = run_distributed(peaks, 1, case, [4096, 8192], backend="pretend", init=False)[0]
    out, logarithms = 4 * 8192 * HEADS * SIZE, 4 * 8192 * HEADS
    rows = 4 * 8192 * (2 * HEADS + 2 * GROUPS) * SIZE  # the result, and the gradients of queries, keys and values
    masked = out if case == "documents" else 0  # what the result of padding is taken from
    assert whole.kept <= 1.01 * (out + logarithms + masked + (8192 if case == "documents" else 0)) + 4096
    tile = 4 * HEADS * BLOCK**2
    assert whole.peak <= 2 * rows + 8 * tile
    assert whole.peak - half.peak <= rows  # of the half that is more
    assert whole.peak < 4 * HEADS * 8192**2 // 16, "less than a sixteenth of one head's weights for each head"


# ---- what the head and the loss hold, on the pretend accelerator -----------------------------------------------------

VOCABULARY, HIDDEN, TOKENS = 128_000, 64, 256
LOGITS = 4 * TOKENS * VOCABULARY  # bytes in fp32
WEIGHT = 4 * VOCABULARY * HIDDEN


def peak_of_head(rank: int, world_size: int, chunks: list[int]) -> list[int]:
    """Bytes beyond the head's parameters and input at the peak of a forward and a backward, for numbers of chunks."""
    device = torch.device("pretend", rank)
    found = []
    for count in chunks:
        config = make_config((1, 1, 1), "unused", vocab_size=VOCABULARY, hidden_size=HIDDEN, loss_chunks=count)
        context = BuildContext.of(
            config, layer_group=world_group(rank, 1), device=device, streams=RandomStreams(1, device)
        )
        head = GPTHead(config.model, context)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, TOKENS, HIDDEN, device=device).requires_grad_()
        labels = torch.arange(TOKENS, device=device).view(1, -1) * 499
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        if count == 1:
            losses = cross_entropy(head(x), labels, share=vocabulary_share(VOCABULARY), options=context.loss_options)
        else:
            losses = head((x, *Scored(labels, torch.ones_like(labels), torch.ones((), device=device))))
        losses.sum().backward()
        found.append(torch.accelerator.max_memory_allocated(device) - before)
        del head, x, losses
    return found


def test_a_head_in_chunks_holds_one_chunk_of_the_logits() -> None:
    """At a vocabulary of 128,000; besides a chunk, the weight's gradient, to which each chunk adds."""
    ((whole, four, sixteen),) = run_distributed(peak_of_head, 1, [1, 4, 16], backend="pretend", init=False)
    small = 16 * TOKENS * HIDDEN * 4
    assert whole >= LOGITS + WEIGHT
    assert four <= (LOGITS + WEIGHT) / 4 + WEIGHT + small
    assert sixteen <= (LOGITS + WEIGHT) / 16 + WEIGHT + small


# ---- muon's update on ranks that shard -------------------------------------------------------------------------------

BLOCKS = 4
MUON: dict[str, Any] = {"optimizer": "muon", "hidden_size": 64, "num_layers": BLOCKS, "lr_warmup_iters": 0, "lr": 1e-3}
LARGEST = 4 * 4 * 64 * 64  # bytes of the MLP's matrices


def memory_of_update(rank: int, ranks: int, directory: str, *, layout: Layout, stage: int) -> tuple[int, int]:
    """Bytes of a rank's optimizer state, and the most that the second update needs beside what was there before."""
    config = make_config(layout, directory, device="pretend", zero_stage=stage, global_batch_size=4, **MUON)
    trainer = make_trainer(config, build_mesh(config.parallel))
    trainer.train_step(next(trainer.batches))
    step = trainer.train_steps
    step.compute_gradients(next(trainer.batches))
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    step.update_weights()
    peak = torch.accelerator.max_memory_allocated() - before
    state = trainer.update.optimizer.state.values()
    return sum(tensor.nbytes for tensors in state for tensor in tensors.values()), peak


@needs_pretend
@pytest.mark.parametrize(("layout", "stage", "matrices"), [((1, 1, 2), 1, 5), ((2, 1, 1), 0, 7)], ids=str)
def test_a_rank_holds_its_share_and_one_matrix(layout: Layout, stage: int, matrices: int, tmp_path: Path) -> None:
    """The share is half of the momenta of the matrices and of AdamW's moments. One matrix is in the iteration, as its
    argument, before and after a product, and with the squares that this multiplies. A tensor parallel rank has the
    slices of two besides, as they are and as it sends them."""
    work = partial(memory_of_update, layout=layout, stage=stage)
    momenta = 4 * BLOCKS * 12 * 64**2
    for share, most in run_distributed(work, 2, str(tmp_path), backend="pretend"):
        assert share < 0.5 * momenta + 2 * LARGEST
        assert most <= matrices * LARGEST


def test_shards_hold_equal_parts_of_the_matrices(tmp_path: Path) -> None:
    """However large the embedding beside them is."""
    shape: dict[str, Any] = {"vocab_size": 8192, "bucket_size_mb": 25, "num_layers": 12, "precision": "bf16"}
    config = make_config((1, 1, 4), tmp_path, **(MUON | shape), zero_stage=1)
    work = [0] * 4
    with fake_step(config) as step:
        for bucket in step.model.data_parallel.buckets:
            sizes = {p.spec.name: sorted(p.shape) for p in bucket.parameters if p.spec.name in bucket.unsplit}
            assert len(sizes) in (0, len(bucket.parameters))
            for shard in range(4):
                for segment in bucket.layout.segments(shard):
                    if segment.name in sizes:
                        rows, columns = sizes[segment.name]
                        work[shard] += 4 * rows**2 * columns + 2 * rows**3
        assert step.model.data_parallel.padding < 0.01
    assert max(work) <= 1.05 * sum(work) / 4


# ---- --offload-params ------------------------------------------------------------------------------------------------

HOST: Changes = {"offload_params": True, "offload_optimizer": True}
BF16: Changes = {"precision": "bf16"}
CASES, MORE = cases_of("offload_params")


def both(rank: int, world_size: int, cases: list[Case], directory: str) -> list[list[runs.Outcome]] | None:
    """Each case on ZeRO-3, with its state on the device and in host memory."""
    found = []
    for number, (layout, changes) in enumerate(cases):
        outcomes = []
        for where in ({}, HOST):
            common = {"zero_stage": 3, "train_iters": 2, "num_layers": 3, "device": "pretend"}
            config = runs.make_config(layout, f"{directory}/{number}{len(where)}", **(common | changes | where))
            if config.training.reproducible:
                compute_reproducibly()
            outcomes.append(
                runs.train_on(build_mesh(config.parallel), config, moments=changes.get("optimizer") != "muon")
            )
        found.append(outcomes)
    return found if rank == 0 else None


@pytest.mark.parametrize(
    ("words", "ranks"),
    [*((CASES[ranks], ranks) for ranks in CASES), *(pytest.param(MORE[n], n, marks=pytest.mark.slow) for n in MORE)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_no_bit_differs_from_stage_3_on_the_device(words: list[str], ranks: int, tmp_path: Path) -> None:
    cases = [case_of(one) for one in words]
    options: Changes = {"backend": "pretend", "init": ranks > 1, "timeout": 60 * len(cases)}
    found = run_distributed(both, ranks, cases, str(tmp_path), **options)[0]
    for (plain, on_host), (_, changes) in zip(found, cases, strict=True):
        if "clip_grad" in changes:
            assert on_host.norms == pytest.approx(plain.norms, rel=1e-7)
            on_host = dataclasses.replace(on_host, norms=plain.norms)
        runs.bitwise(on_host, plain)


def alone(work: Any, *arguments: Any, **options: Any) -> Any:
    """What one process on the device gives."""
    return run_distributed(work, 1, *arguments, backend="pretend", init=False, **options)[0]


@pytest.mark.slow
def test_thirteen_times_the_model_fits_on_a_device(tmp_path: Path) -> None:
    """ZeRO-Offload's figure (arXiv 2101.06840, section 6.2.1): blocks of a model that completes a step on one device,
    with mixed precision and AdamW, and blocks of one with its state in host memory. Both recompute."""
    common: Changes = {"limit": 8 << 20, "shape": {"hidden_size": 64, "recompute": "full"}}
    works = [partial(largest, most=most, flags=flags, **common) for flags, most in ((PLAIN, 40), (ON_HOST, 130))]
    plain, on_host = (alone(work, str(tmp_path)) for work in works)
    assert plain.is_limit
    assert 5 < plain.blocks <= (8 << 20) / (18 * 12 * 64**2)
    assert on_host.blocks >= 13 * plain.blocks
    assert on_host.on_host >= 17 * on_host.parameters


@dataclass(frozen=True)
class Steady:
    """Of a steady step: what the host waited for, bytes each way, bytes of the rank's shards of parameters and of
    gradients, most bytes on the device beyond the batch, and those of the formula."""

    waits: dict[str, int]
    up: int
    down: int
    params: int
    grads: int
    peak: int


def steady(rank: int, world_size: int, directory: str, *, slowly: bool, changes: Changes) -> Steady:
    """The second step of a run with its state in host memory."""
    layout: runs.Layout = (1, 1, world_size)
    config = runs.make_config(layout, directory, device="pretend", zero_stage=3, **HOST, **changes)
    mesh = build_mesh(config.parallel)
    before = torch.accelerator.memory_allocated()
    trainer = runs.make_trainer(config, mesh)
    trainer.train_step(next(trainer.batches))
    batch = next(trainer.batches)
    torch.accelerator.reset_peak_memory_stats()
    with slow() if slowly else nullcontext(), counting() as counted:
        trainer.train_step(batch)
    peak = torch.accelerator.max_memory_allocated() - before
    buckets = trainer.model.data_parallel.buckets
    return Steady(
        waits=Counter(cause.rpartition(" in ")[2] for cause in counted.sync_causes),
        up=counted.bytes_to_device,
        down=counted.bytes_to_host,
        params=sum(bucket.shard_params.nbytes for bucket in buckets),
        grads=4 * sum(bucket.layout.shard_size for bucket in buckets),
        peak=peak,
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_waits_once_and_holds_what_is_planned(replicas: int, tmp_path: Path) -> None:
    """Of two microbatches: parameters travel before each forward and backward; the sum of gradients to the host and,
    before the second, back; for the norm once more. A part of the parameters is checked."""
    shape = {"hidden_size": 128, "num_layers": 8, "micro_batch_size": 2, "global_batch_size": 4 * replicas}
    work = partial(steady, slowly=False, changes=shape | BF16)
    config = runs.make_config((1, 1, replicas), tmp_path, zero_stage=3, kernels="torch", **HOST, **shape, **BF16)
    (planned,) = traced(config, outline(config), on_cpu=False)
    for found in run_distributed(work, replicas, str(tmp_path), backend="pretend", init=replicas > 1):
        assert found.waits == {"to_host": 1}
        assert found.up == pytest.approx(4 * found.params + 2 * found.grads + found.params / 16, rel=0.01)
        assert found.down == pytest.approx(2 * found.grads, rel=0.01)
        assert found.peak == pytest.approx(planned.expected_tensors, rel=0.1)  # copies keep memory a little longer


def test_the_host_waits_once_and_for_gradients_that_it_updates(tmp_path: Path) -> None:
    """Where copies are done before anybody asks for them, for the decision alone. test_training.py counts the bytes."""
    work = partial(steady, changes=BF16 | {"num_layers": 2})
    soon, late = (alone(partial(work, slowly=is_slow), str(tmp_path / f"{is_slow}")) for is_slow in (False, True))
    assert soon.waits == {"to_host": 1}
    assert late.waits.keys() <= {"to_host", "downloaded", "wait_for_reads"}
    assert late.waits["to_host"] == 1


def rolled_back(rank: int, world_size: int, directory: str, changes: Changes) -> list[tuple[Any, dict[str, Any]]]:
    """Losses and state of a run with a spike, which is rolled back, on the device and in host memory."""
    found = []
    for where in ({}, HOST):
        losses, guard = Losses(), SpikeConfig(on_spike="rollback", spike_skip_batches=1, **GUARD)
        options = {"device": "pretend", "zero_stage": 3, "num_layers": 1, **changes, **where}
        output = Path(directory, str(len(where)))
        run = trainer_on(None, (1, 1, world_size), output, Text(POISON), losses, guard, **options)
        run.run()
        run.saving.finish()
        assert run.step == STEPS
        assert len(run.rollbacks.done) == 1
        assert losses.skipped == [10]
        found.append((losses.by_step, state_of(run)))
    return found


def test_a_rollback_gives_the_bits_of_stage_3_on_the_device(tmp_path: Path) -> None:
    ((plain, on_host),) = run_distributed(
        rolled_back, 1, str(tmp_path), BF16 | {"clip_grad": 0.0}, backend="pretend", timeout=120
    )
    assert on_host[0] == plain[0]
    assert on_host[1].keys() == plain[1].keys()
    assert not [name for name, value in plain[1].items() if not torch.equal(on_host[1][name], value)]


def resumed(rank: int, world_size: int, directory: str, changes: list[Changes]) -> tuple[list[float], dict[str, Any]]:
    """A step with each of these, where each goes on from the checkpoint of the one before: losses and weights."""
    losses = []
    for number, one in enumerate(changes):
        load = {} if number == 0 else {"load": f"{directory}/{number - 1}"}
        common = {"num_layers": 1, "train_iters": 3, "reproducible": True, "zero_stage": 3, "micro_batch_size": 1}
        common |= {"global_batch_size": 4}
        config = runs.make_config(
            (1, 1, world_size), f"{directory}/{number}", device="pretend", **common, **load, **one
        )
        compute_reproducibly()
        mesh = build_mesh(config.parallel)
        trainer = runs.make_trainer(config, mesh)
        losses.append(float(trainer.train_step(next(trainer.batches)).loss))
        trainer.save()
    return losses, runs.gather(trainer, mesh, lambda owned: owned.master)


def test_checkpoints_go_from_host_to_device_and_back(tmp_path: Path) -> None:
    """With exact sums, bitwise, on another number of replicas too."""
    on_two = run_distributed(resumed, 2, str(tmp_path / "a"), [HOST, {}, HOST], backend="pretend")[0]
    on_one = alone(resumed, str(tmp_path / "b"), [{}, {}, {}])
    assert on_two[0] == on_one[0]
    assert not runs.differences(on_two[1], on_one[1])


# ---- the optimizer's step --------------------------------------------------------------------------------------------

Options = dict[str, Any]
WIDE: Options = {"device": "pretend", "hidden_size": 256, "num_layers": 2, "bucket_size_mb": 2.0, "train_iters": 3}
ROW = 4096  # numbers that the norm sums in fp32; what is left of a bucket it sums in fp64
# Operators that only write what they are given, and those that look at memory in another way or allocate it.
WRITES_ONLY = {"copy_", "fill_", "zero_"}
FREE = {"alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "reshape", "select", "slice",
        "split", "split_with_sizes", "unbind", "unsqueeze", "view", "_unsafe_view"}  # fmt: skip


@dataclass
class Traffic(TorchDispatchMode):
    """Bytes of the device that operators read and write, each tensor once an operator, and the operators' names."""

    counters: Counters
    bytes: int = 0
    names: Counter[str] = field(default_factory=Counter)
    before_waiting: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in FREE:
            return result
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if name == "_fused_adamw_":
            written.discard("grads")  # they would be with a `grad_scale`
        only_written = written if name in WRITES_ONLY else {"copy"} if name == "adamw_" else set()
        moved = sum(_size(value) for key, value in given.items() if key not in only_written)
        moved += sum(_size(given[key]) for key in written if key in given)
        moved += 0 if written else _size(result)
        self.bytes += moved
        self.names[name] += 1
        if not self.counters.sync_causes:
            self.before_waiting[name] += 1
        return result


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) and value.device.type == "pretend" else 0


@dataclass(frozen=True)
class Step:
    """What the ending of a step moves and launches, from the reduced gradients on; what operators move before, once the
    reductions are done; how many buckets are no whole number of rows, and how much more
    memory than before it takes at once."""

    bytes_per_parameter: float
    reduction_bytes_per_parameter: float
    launches: int
    names: Counter[str]
    before_waiting: Counter[str]
    waits: list[str]
    buckets: int
    remainders: int
    peak: int
    bucket_bytes: int


def endings(rank: int, world_size: int, output_dir: str, cases: list[tuple[Options, bool]]) -> list[Step]:
    """Of each case: options, and whether the update is in one pass."""
    return [
        ending(world_size, f"{output_dir}/{number}", one_pass, options)
        for number, (options, one_pass) in enumerate(cases)
    ]


def steps_of(output_dir: Path, ranks: int, *cases: tuple[Options, bool]) -> list[Step]:
    arguments = (str(output_dir), list(cases))
    found: list[Step] = run_distributed(endings, ranks, *arguments, backend="pretend", init=ranks > 1)[0]
    return found


def ending(world_size: int, output_dir: str, one_pass: bool, options: Options) -> Step:
    config = make_config((1, 1, world_size), output_dir, **{**WIDE, "global_batch_size": 2 * world_size, **options})
    mesh = build_mesh(config.parallel)
    # Triton is chosen while the model is built: the operators then run in plain torch, each counted as the one kernel
    # that it is.
    with ops.kernels_chosen("triton" if one_pass else "torch"):
        trainer = make_trainer(config, mesh)
    trainer.train_step(next(trainer.batches))
    apply, found = trainer.update.apply, list[Step]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        data_parallel = trainer.model.data_parallel
        with counting() as counters, Traffic(counters) as reduced:
            data_parallel.finish()  # what still runs of the reductions
        torch.accelerator.reset_peak_memory_stats(mesh.device)
        held = torch.accelerator.memory_allocated(mesh.device)
        with counting() as counters, Traffic(counters) as traffic:
            outcome = apply(*args, **kwargs)
        assert outcome.skipped is None and outcome.norm > config.optimizer.clip_grad > 0
        shards = [bucket.master.numel() for bucket in data_parallel.buckets]
        found.append(
            Step(
                bytes_per_parameter=traffic.bytes / sum(shards),
                reduction_bytes_per_parameter=reduced.bytes / sum(shards),
                launches=traffic.names.total(),
                names=traffic.names,
                before_waiting=traffic.before_waiting,
                waits=list(counters.sync_causes),
                buckets=len(shards),
                remainders=sum(numbers % ROW > 0 for numbers in shards),
                peak=torch.accelerator.max_memory_allocated(mesh.device) - held,
                bucket_bytes=4 * max(shards),
            )
        )
        return outcome

    trainer.update.apply = counted  # type: ignore[method-assign]
    trainer.train_step(next(trainer.batches))
    (step,) = found
    return step


CUT: Options = {"precision": "bf16", "clip_grad": 1e-3}


# By ranks: options, whether the update is in one pass, and bytes.
BYTES: dict[int, list[tuple[Options, bool, int]]] = {
    1: [
        (CUT, False, 46),  # by operators: the gradient is scaled, and the weights are copied, in passes of their own
        (CUT, True, 34),
        ({**CUT, "grad_reduce_dtype": "bf16"}, True, 30),
    ],
    2: [({**CUT, "zero_stage": 1}, True, 34)],
}


@pytest.mark.parametrize("ranks", BYTES)
def test_bytes_a_parameter(ranks: int, tmp_path: Path) -> None:
    """The norm reads the gradient (4 bytes); the update reads it and three states (16), and writes these (12) and the
    16-bit weights (2). Of sums that are not whole rows, of what decays and of the norm's own sums there is a little."""
    cases = [(options, one_pass) for options, one_pass, _ in BYTES[ranks]]
    for step, (_, one_pass, expected) in zip(steps_of(tmp_path, ranks, *cases), BYTES[ranks], strict=True):
        assert expected <= step.bytes_per_parameter < expected + 0.5, step.names
        assert step.reduction_bytes_per_parameter == 0  # the collective has written the sum where it is read
        assert len(step.waits) == 1 and "in to_host" in step.waits[0]
        if one_pass:
            assert step.names["adamw_"] == step.before_waiting["adamw_"] == step.buckets
            assert not {"mul_", "_foreach_mul_", "_fused_adamw_", "clone"}.intersection(step.names)


def test_launches_grow_with_the_number_of_buckets_alone(tmp_path: Path) -> None:
    """A bucket takes two, for its norm and its update, and one more if it is no whole number of rows, whatever
    parameters it has."""
    few = {**CUT, "disable_bias_linear": True}
    cases = [({**options, "bucket_size_mb": mb}, True) for options, mb in ((few, 1.0), (CUT, 1.0), (CUT, 8.0))]
    steps = steps_of(tmp_path, 2, *cases)
    assert len({step.buckets for step in steps}) > 1
    (rest,) = {step.launches - 2 * step.buckets - step.remainders for step in steps}
    assert rest <= 52


def test_gradients_of_16_bits_are_not_widened_all_at_once(tmp_path: Path) -> None:
    options = {**CUT, "grad_reduce_dtype": "bf16", "num_layers": 4}
    by_operators, in_one_pass = steps_of(tmp_path, 1, (options, False), (options, True))
    assert min(by_operators.buckets, in_one_pass.buckets) >= 4
    # The plain form of the operator makes new states before it writes them; of a kernel's they are registers.
    assert by_operators.peak <= 2 * by_operators.bucket_bytes
    assert in_one_pass.peak <= 8 * in_one_pass.bucket_bytes
