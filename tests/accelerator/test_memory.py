"""What a device holds while a run is built on ZeRO-3, and what it is too small for; what the step in host memory copies
and waits for."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.convert.from_hf import open_model
from megacore.convert.start import WeightsFromHF
from megacore.errors import ConfigError
from megacore.layers.context import BuildContext
from megacore.models.gpt import GPTHead
from megacore.ops import cross_entropy
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.loss import vocabulary_share
from megacore.parallel.mesh import build_mesh
from megacore.parallel.random import RandomStreams
from megacore.plan import fit
from megacore.tracer.step_trace import fake_step
from megacore.train.callbacks import Callback
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.accelerator.device import counting, limit_memory, needs_pretend, slow
from tests.distributed import run_distributed
from tests.parallel.test_tensor import world_group
from tests.parity.hf_models import make_model, save_model
from tests.parity.runs import Layout, RaggedData, losses_around_a_skip, make_config, make_trainer

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
        owned=sum(bucket._shard_params.nbytes for bucket in buckets),
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
        window = s // 4 if case == "window" else None
        outer = torch.ones(1, HEADS, s, SIZE, device=device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        out = ops.attention(query, key, value, causal=True, window=window, documents=documents, alibi=alibi)
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
            losses = head((x, labels))
        losses.sum().backward()
        found.append(torch.accelerator.max_memory_allocated(device) - before)
        del head, x, losses
    return found


def test_a_head_in_chunks_holds_one_chunk_of_the_logits() -> None:
    """At a vocabulary of 128,000; besides a chunk, the weight's gradient and a chunk of it that is copied there."""
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
