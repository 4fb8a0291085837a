"""How often a step waits for the accelerator, and what it copies there: once, for the decision to apply the update, and
the next batch; whatever the layout, the schedule and the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.data.loader import DeviceLoader, Microbatch
from megacore.errors import DataError
from megacore.models.gpt import GPTLoss
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.train.engine import PipelineEngine
from megacore.train.trainer import Trainer
from tests.accelerator.device import Counters, counting, needs_pretend
from tests.distributed import run_distributed
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import Layout, make_config, make_trainer

pytestmark = needs_pretend
Options = dict[str, Any]
STEPS = 5
DEVICE: Options = {"device": "pretend", "train_iters": STEPS, "log_interval": STEPS}

# Of each layout, what is tried one after the other.
CASES: list[tuple[Layout, list[Options]]] = [
    (
        (1, 1, 1),
        [
            {"micro_batch_size": 8},
            {"micro_batch_size": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1},
            {"precision": "fp16", "clip_grad": 0.0},
            {"optimizer": "sgd", "recompute": "full", "reproducible": True},
            {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swiglu", "window_size": 5},
            {"position_embedding_type": "alibi", "num_query_groups": 2, "attention": "fused-softmax"},
            {"bert_style": "classic", "sentence_task": "sop"},
            {"bert_style": "modern", "window_size": 4},
        ],
    ),
    (
        (2, 1, 1),
        [
            {"micro_batch_size": 8, "precision": "bf16"},
            {"sequence_parallel": True, "recompute": "selective", "label_smoothing": 0.1},
            {"bert_style": "classic"},
        ],
    ),
    (
        (1, 2, 1),
        [
            *({"schedule": schedule} for schedule in ("1f1b", "gpipe", "zero-bubble")),
            {"schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 1},
            {"bert_style": "modern", "schedule": "1f1b", "precision": "bf16"},
        ],
    ),
    (
        (1, 1, 2),
        [
            *({"zero_stage": stage} for stage in range(4)),
            {"zero_stage": 2, "precision": "bf16", "micro_batch_size": 1},
            {"zero_stage": 1, "overlap_grad_reduce": False, "overlap_param_gather": False},
            {"zero_stage": 3, "reproducible": True},
        ],
    ),
    ((2, 2, 2), [{"zero_stage": 2, "micro_batch_size": 2, "sequence_parallel": True}]),
]


def trainer_of(layout: Layout, output_dir: str, mesh: Mesh | None, options: Options) -> Trainer:
    make, start = (make_bert_config, make_bert_trainer) if "bert_style" in options else (make_config, make_trainer)
    config: Any = make(layout, output_dir, **DEVICE, **options)
    return start(config, mesh or build_mesh(config.parallel))


def steps_of(trainer: Trainer) -> list[Counters]:
    """What every step of a run did after the first, from the end of the one before to its own."""
    found: list[Counters] = []
    with ExitStack() as stack:

        def step_done(_: int) -> None:
            stack.close()
            found.append(stack.enter_context(counting()))

        trainer.report.step_done = step_done  # type: ignore[method-assign]
        trainer.run()
    return found[:-1]


def bytes_of_a_step(trainer: Trainer) -> int:
    batch = trainer.batches._current
    assert batch is not None
    fields = [value for microbatch in batch.microbatches for value in vars(microbatch).values()]
    return sum(value.nbytes for value in fields if isinstance(value, Tensor))


def count(rank: int, world_size: int, layout: Layout, output_dir: str, variants: list[Options]) -> None:
    mesh: Mesh | None = None
    for number, options in enumerate(variants):
        trainer = trainer_of(layout, f"{output_dir}/{number}", mesh, options)
        mesh = trainer.mesh
        steps = steps_of(trainer)
        batch = bytes_of_a_step(trainer)
        assert [step.host_syncs for step in steps] == [1] * (STEPS - 1), (options, steps[1].sync_causes)
        assert [step.bytes_to_device for step in steps] == [batch] * (STEPS - 2) + [0], options
        assert all("to_host" in cause for step in steps for cause in step.sync_causes), steps[1].sync_causes
        assert max(step.bytes_to_host for step in steps) <= 8 * 16, options


@pytest.mark.parametrize(("layout", "variants"), CASES, ids=lambda value: str(value) if len(value) == 3 else "")
def test_a_step_waits_once_and_copies_the_next_batch_alone(
    tmp_path: Path, layout: Layout, variants: list[Options]
) -> None:
    run_distributed(count, layout[0] * layout[1] * layout[2], layout, str(tmp_path), variants, backend="pretend")
