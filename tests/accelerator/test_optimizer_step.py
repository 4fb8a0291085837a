"""What the optimizer's step moves and launches on a device: bytes a parameter, operators, waits and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacore import ops
from megacore.parallel.mesh import build_mesh
from tests.accelerator.device import Counters, counting, needs_pretend
from tests.distributed import run_distributed
from tests.parity.runs import make_config, make_trainer

pytestmark = needs_pretend
Options = dict[str, Any]
SIZE: Options = {"device": "pretend", "hidden_size": 256, "num_layers": 2, "bucket_size_mb": 2.0, "train_iters": 3}
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
    config = make_config((1, 1, world_size), output_dir, **{**SIZE, "global_batch_size": 2 * world_size, **options})
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


BF16: Options = {"precision": "bf16", "clip_grad": 1e-3}


# By ranks: options, whether the update is in one pass, and bytes.
BYTES: dict[int, list[tuple[Options, bool, int]]] = {
    1: [
        (BF16, False, 46),  # by operators: the gradient is scaled, and the weights are copied, in passes of their own
        (BF16, True, 34),
        ({**BF16, "grad_reduce_dtype": "bf16"}, True, 30),
    ],
    2: [({**BF16, "zero_stage": 1}, True, 34)],
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
    few = {**BF16, "disable_bias_linear": True}
    cases = [({**options, "bucket_size_mb": mb}, True) for options, mb in ((few, 1.0), (BF16, 1.0), (BF16, 8.0))]
    steps = steps_of(tmp_path, 1, *cases)
    assert len({step.buckets for step in steps}) > 1
    (rest,) = {step.launches - 2 * step.buckets - step.remainders for step in steps}
    assert rest <= 52


def test_gradients_of_16_bits_are_not_widened_all_at_once(tmp_path: Path) -> None:
    options = {**BF16, "grad_reduce_dtype": "bf16", "num_layers": 4}
    by_operators, in_one_pass = steps_of(tmp_path, 1, (options, False), (options, True))
    assert min(by_operators.buckets, in_one_pass.buckets) >= 4
    # The plain form of the operator makes new states before it writes them; of a kernel's they are registers.
    assert by_operators.peak <= 2 * by_operators.bucket_bytes
    assert in_one_pass.peak <= 8 * in_one_pass.bucket_bytes
