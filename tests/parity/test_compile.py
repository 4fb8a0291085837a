"""`--compile` captures a block without graph breaks and compiles it once; generated kernels change no number beyond
rounding. The backend `aot-eager` runs captured graphs with torch's operators; rows of tests/matrix compare them on
every layout. What cannot work is refused."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from megacore import ops
from megacore.parallel.compiled import compile_function, compile_layer, why_not_compile
from megacore.parallel.mesh import build_mesh
from tests.distributed import run_distributed
from tests.matrix.programs import LLAMA
from tests.parity.runs import Layout, make_config, make_trainer, trainer_of
from tests.unit.packaging_builds import ROOT

Changes = dict[str, Any]
GPT: Changes = {"hidden_dropout": 0.2, "micro_batch_size": 1}
CAPTURED: Changes = {"compile": True, "compile_backend": "aot-eager"}


def train(
    rank: int, world_size: int, layout: Layout, output_dir: str, changes: Changes
) -> tuple[dict[str, int], list[float]]:
    """Graphs and graph breaks, losses and norms of three steps, each with an evaluation; nothing is compiled after the
    first."""
    settings = torch._dynamo.config.recompile_limit, torch._functorch.config.donated_buffer
    config = make_config(layout, output_dir, num_layers=3, train_iters=3, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    torch._dynamo.utils.counters.clear()
    numbers = []
    for step in range(config.training.train_iters):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            batch = next(trainer.batches)
            result = trainer.train_step(batch)
            evaluated = trainer.train_steps.evaluate([batch]).means
            numbers += [float(result.loss), float(result.grad_norm), float(evaluated)]
    assert settings == (torch._dynamo.config.recompile_limit, torch._functorch.config.donated_buffer)
    counters = torch._dynamo.utils.counters
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}, numbers


@pytest.mark.parametrize(
    "layout, changes",
    [
        ((1, 1, 1), {**GPT, "recompute": "selective"}),
        pytest.param((1, 1, 1), {"loss_chunks": 2}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1), {**LLAMA, "num_query_groups": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_blocks_are_one_graph_that_changes_no_number(layout: Layout, changes: Changes, tmp_path: Path) -> None:
    """Three blocks, three steps of several microbatches: one graph to train and one to evaluate, each captured once; so
    is the loss, unless the head computes it in chunks."""
    found, plain = (
        run_distributed(train, math.prod(layout), layout, str(tmp_path), changes | compiled, timeout=180)
        for compiled in (CAPTURED, {})
    )
    for (counted, numbers), (_, expected) in zip(found, plain, strict=True):
        assert counted == {"graphs": 2 if "loss_chunks" in changes else 4, "breaks": 0}
        assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_compiled_loss_writes_its_gradient_over_the_logits() -> None:
    """A copy would be the largest tensor of the step."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 16, generator=generator) for size in (34, 512))
    labels, mask = torch.randint(0, 512, (2, 17), generator=generator), torch.rand(2, 17, generator=generator)
    weight.requires_grad_()
    options = ops.CrossEntropyOptions(in_place=True)

    def backward(loss_sum: Callable[..., torch.Tensor]) -> torch.Tensor:
        logits, arrived = (x @ weight.t()).view(2, 17, 512), list[int]()
        logits.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
        loss_sum(logits, labels, mask, options=options).backward()
        assert arrived == [logits.data_ptr()]
        return logits.detach()

    torch.testing.assert_close(
        backward(compile_function(ops.summed_cross_entropy)), backward(ops.summed_cross_entropy), rtol=1e-6, atol=1e-8
    )


CPU = torch.device("cpu")


def test_a_missing_compiler_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert shutil.which("no-such-compiler") is None
    reason = why_not_compile("inductor", CPU)
    assert reason is not None and "no-such-compiler is not installed" in reason and "aot-eager" in reason
    assert why_not_compile("aot-eager", CPU) is None
    assert why_not_compile("inductor", torch.device("cuda")) is None


def test_names_and_class_of_a_layer_stay() -> None:
    layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = list(layer.state_dict())
    compile_layer(layer, backend="aot-eager")
    assert list(layer.state_dict()) == names and type(layer) is nn.Sequential


# ---- the files of a step


# The files that a step of GPT-2 runs through on one process. Add a file if the step needs another subject, and not in
# order to split one; remove a file that is gone.
FILES = """
data/loading/loader
layers/attention layers/block layers/norm
models/gpt
ops/activation ops/attention ops/dispatch ops/loss ops/norm
optim/adamw optim/lr_schedules optim/optimizer optim/spikes optim/update
parallel/tensor
pipeline/runtime pipeline/stage
train/callbacks train/gpt_task train/step train/stopping train/trainer
parallel/heartbeat
zero/bucket zero/data_parallel
"""


def test_a_steady_step_runs_through_these_files(tmp_path: Path) -> None:
    trainer, package, files = trainer_of((1, 1, 1), tmp_path), str(ROOT / "megacore") + "/", set[Path]()
    trainer.train_step(next(trainer.batches))  # the first makes the schedule, buffers and state

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(Path(frame.f_code.co_filename).relative_to(package))

    sys.setprofile(note)
    try:
        trainer.train_step(next(trainer.batches))
    finally:
        sys.setprofile(None)
    assert {file.with_suffix("").as_posix() for file in files} == set(FILES.split()), "see the comment at FILES"
