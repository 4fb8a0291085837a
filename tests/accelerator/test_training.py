"""Everything that trains runs on the pretend accelerator, and gives the losses of the CPU.

A group of runs shares its ranks: one launch on the device, and, for runs that are compared with one process, one
reference on the CPU.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from megacore.parallel.mesh import build_mesh, compute_reproducibly
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity import test_any_model as any_model
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import Layout, make_config, make_trainer

pytestmark = needs_pretend

STEPS = 2
# Relative, of losses and of gradient norms. 16 bits round at other places where a layout or the attention adds in
# another order; measured 6e-4 and 4e-3 in bf16, 2e-5 and 3e-4 in fp16.
TOLERANCES = {"fp32": (1e-6, 1e-6), "bf16": (1e-3, 1e-2), "fp16": (5e-5, 1e-3)}
Changes = dict[str, Any]
Case = tuple[Layout, Changes]
WAIT: Changes = {"overlap_grad_reduce": False, "overlap_param_gather": False}
INTERLEAVED: Changes = {"schedule": "interleaved", "virtual_stages": 2}
TWICE: Changes = INTERLEAVED | {"num_layers": 4}
SPLIT: Changes = {"schedule": "zero-bubble"}
GPIPE: Changes = {"schedule": "gpipe"}
SELECTIVE: Changes = {"recompute": "selective"}
FULL: Changes = {"recompute": "full"}
OFFLOAD: Changes = {"offload_optimizer": True}
SP: Changes = {"sequence_parallel": True}
BF16: Changes = {"precision": "bf16"}
FP16: Changes = {"precision": "fp16", "initial_loss_scale": 1024.0}
UNFUSED: Changes = {"attention": "fused-softmax"}
SGD: Changes = {"optimizer": "sgd", "lr": 0.05}
BERT: Changes = {"bert": True}
OFF: Changes = {"offload_activations": True}
DIVIDED: Changes = {"distribute_saved_activations": True, "recompute": "full"}
# One dense block, then one with experts, which may be offloaded, divided, or computed again.
EXPERTS: Changes = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_first_dense_layers": 1,
    "moe_aux_loss_coeff": 0.1,
    "activation": "swiglu",
    "disable_bias_linear": True,
}
GATED: Changes = {"activation": "swiglu", "disable_bias_linear": True, "normalization": "RMSNorm"}


def context(comm: str, ranks: int = 2) -> Changes:
    return {"cp": ranks, "cp_comm": comm}


def zero(stage: int) -> Changes:
    return {"zero_stage": stage}


# Every feature; MORE has it with further kinds of parallelism that it meets.
CASES: dict[int, list[Case]] = {
    1: [
        ((1, 1, 1), FULL | UNFUSED | {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ((1, 1, 1), BERT | OFFLOAD),
        ((1, 1, 1), GATED | OFF),
    ],
    2: [
        ((1, 1, 2), zero(0) | FP16 | OFFLOAD),
        ((1, 1, 2), zero(2) | WAIT | BF16 | UNFUSED),
        ((1, 1, 2), zero(3) | WAIT | BERT),
        ((1, 2, 1), TWICE | BF16),
        ((1, 1, 1), context("ring") | GATED | zero(1)),
        ((1, 1, 1), context("ulysses") | BF16 | SELECTIVE | OFF),
        ((1, 1, 2), EXPERTS | OFF | {"ep": 2, "moe_expert_capacity_factor": 1.0}),
        ((2, 1, 1), EXPERTS | DIVIDED | OFF),
        # With biases, which are added once, however many ranks a product is divided over.
        ((2, 1, 1), DIVIDED | OFF),
        ((2, 1, 1), SP | FULL),
        ((1, 1, 2), zero(1) | {"reproducible": True}),  # last: it cannot be undone in a process
    ],
    4: [((1, 2, 2), zero(3) | SPLIT | WAIT | SELECTIVE), ((2, 1, 2), zero(3) | SP | BF16 | GATED)],
}
MORE: dict[int, list[Case]] = {
    2: [
        ((1, 1, 2), zero(0) | WAIT | FULL),
        ((1, 1, 2), zero(1) | OFFLOAD | SELECTIVE),
        ((1, 1, 2), zero(3) | FP16),
        ((1, 2, 1), BERT),
        ((1, 2, 1), GPIPE | FULL | OFFLOAD),
        ((1, 2, 1), SPLIT | SELECTIVE | SGD),
        ((2, 1, 1), SELECTIVE | OFFLOAD | FP16),
        ((2, 1, 1), BERT | SP | BF16),
        ((1, 2, 1), SPLIT | GATED | BF16),
        ((2, 1, 1), GATED | SP),
        ((1, 1, 1), context("allgather") | BERT | zero(3)),
    ],
    4: [
        ((1, 2, 2), zero(1) | {"schedule": "1f1b"}),
        ((1, 2, 2), zero(2) | TWICE | OFFLOAD),
        ((2, 1, 2), zero(2) | SP | SELECTIVE),
        ((2, 2, 1), TWICE | SP | FULL),
        ((2, 2, 1), SPLIT | BERT),
        ((1, 1, 4), zero(3) | OFFLOAD | WAIT),
    ],
}


def trainer_of(case: Case, device: str, directory: str) -> Any:
    layout, changes = case
    # One sample a microbatch where there is a pipeline to fill; elsewhere two, which is twice as fast.
    plain = {"train_iters": STEPS, "eval_iters": 1, "num_layers": 2, "device": device}
    plain["micro_batch_size"] = 1 if layout[1] > 1 else 2
    changes = plain | changes
    make = (make_bert_config, make_bert_trainer) if changes.pop("bert", False) else (make_config, make_trainer)
    config = make[0](layout, directory, **changes)
    if config.training.reproducible:
        compute_reproducibly()
    return make[1](config, build_mesh(config.parallel))  # type: ignore[arg-type]


def losses_and_norms(case: Case, device: str, directory: str) -> list[float]:
    """The figures of each step, then the loss of evaluation."""
    trainer, found = trainer_of(case, device, directory), []
    for _ in range(STEPS):
        result = trainer.train_step(next(trainer.batches))
        found += [float(result.loss), float(result.grad_norm)]
    return [*found, float(trainer.evaluate())]


def train_all(rank: int, world_size: int, cases: list[Case], device: str, directory: str) -> list[list[float]]:
    return [losses_and_norms(case, device, directory) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@cache
def on_cpu(text: str, directory: str) -> list[float]:
    """The same numerics in one process on the CPU."""
    parallel = {"zero_stage", "overlap_grad_reduce", "overlap_param_gather", "schedule", "virtual_stages"}
    parallel |= {"sequence_parallel", "offload_optimizer", "reproducible", "cp", "cp_comm"}
    parallel |= {"offload_activations", "distribute_saved_activations", "ep"}
    changes = {name: value for name, value in json.loads(text).items() if name not in parallel}
    return losses_and_norms(((1, 1, 1), changes), "cpu", directory)


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [(CASES[ranks], ranks) for ranks in CASES]
    + [pytest.param(MORE[ranks], ranks, marks=pytest.mark.slow) for ranks in MORE],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_training_gives_the_cpus_losses(cases: list[Case], ranks: int, folder: str) -> None:
    init, arguments = ranks > 1, (cases, "pretend", folder)
    (found, *_) = run_distributed(train_all, ranks, *arguments, backend="pretend", init=init, timeout=600)
    for case, figures in zip(cases, found, strict=True):
        precision = case[1].get("precision", "fp32")
        losses, norms = TOLERANCES[precision]
        expected = on_cpu(json.dumps(case[1], sort_keys=True), folder)
        assert figures[::2] == pytest.approx(expected[::2], rel=losses), case
        assert figures[1::2] == pytest.approx(expected[1::2], rel=norms), case


def test_offloaded_activations_of_a_split_backward_change_no_bit(folder: str) -> None:
    cases = [((1, 2, 1), SPLIT | BF16 | {"num_layers": 6, "micro_batch_size": 2} | offload) for offload in ({}, OFF)]
    found = run_distributed(train_all, 2, cases, "pretend", folder, backend="pretend", timeout=600)[0]
    assert found[0] == found[1]


ENGINES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("cnn", 1, 2, {"zero_stage": 3}),
    ("tokens", 2, 1, SPLIT),
    ("bare", 2, 1, {"pipeline_balance": "uniform"}),
]


def test_the_engine_trains_any_model_as_plain_torch_does() -> None:
    cases = [(name, pp, dp, {"device": "pretend", **changes}) for name, pp, dp, changes in ENGINES]
    found = run_distributed(any_model.train_all, 2, cases, backend="pretend", timeout=120)[0]
    for (name, _, dp, _), result in zip(cases, found, strict=True):
        expected = any_model.reference(name)
        assert result.losses == pytest.approx(expected.losses, rel=1e-6), name
        assert result.norms == pytest.approx(expected.norms, rel=1e-6), name
        if name != "cnn" or dp == 1:  # batch norm's running statistics are those of a replica
            assert result.evaluated == pytest.approx(expected.evaluated, rel=1e-6), name
