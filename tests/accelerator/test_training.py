"""Everything that trains runs on the pretend accelerator, and gives the losses of the CPU.

A group of runs shares its ranks: one launch on the device, and, for runs that are compared with one process, one
reference on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import runpy
import tomllib
from collections import defaultdict
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import published
from megacore.errors import TrainingDiverged
from megacore.parallel.collectives import copy_to_group, reduce_from_group
from megacore.parallel.mesh import ALONE, build_mesh, compute_reproducibly
from megacore.parallel.sequence import gather_sequence, reduce_scatter_sequence
from megacore.train.callbacks import Callback, Run
from megacore.train.step import StepResult
from tests.accelerator.device import Counters, counting, needs_pretend
from tests.distributed import run_distributed
from tests.e2e.launching import BERT_PROGRAM, PROGRAM, ROOT, small_run, under_torchrun, words
from tests.matrix.runner import changes_of
from tests.parallel.test_checkpoint import stored
from tests.parallel.test_tensor import losses_of_two_steps, world_group
from tests.parity import test_any_model as any_model
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import SEQUENCE, Layout, make_config, make_trainer
from tools.fill_mask import main as fill_mask
from tools.generate import main as generate
from tools.train_tokenizer import main as train_tokenizer

pytestmark = needs_pretend

STEPS = 2
# Relative, of losses and of gradient norms. 16 bits round at other places where a layout or the attention adds in
# another order; measured 6e-4 and 4e-3 in bf16, 2e-5 and 3e-4 in fp16.
TOLERANCES = {"fp32": (1e-6, 1e-6), "bf16": (1e-3, 1e-2), "fp16": (5e-5, 1e-3)}
Changes = dict[str, Any]
Case = tuple[Layout, Changes]
TABLES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))
OWN: dict[str, Changes] = TABLES["words"]


def case_of(words: str) -> Case:
    """A layout and its changes in words."""
    own = [word for word in words.split() if word in OWN]
    changes = changes_of(" ".join(word for word in words.split() if word not in OWN))
    layout = changes.pop("tp", 1), changes.pop("pp", 1), changes.pop("dp", 1)
    for word in own:
        changes |= OWN[word]
    return layout, changes


def cases_of(subject: str) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Those of a subject of cases.toml, and further ones, by the number of ranks."""
    usual, more = ({int(n): cases for n, cases in TABLES[subject][kind].items()} for kind in ("usual", "more"))
    return usual, more


CASES, MORE = cases_of("training")


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
    parallel = "zero_stage overlap_grad_reduce overlap_param_gather schedule virtual_stages sequence_parallel cp ep"
    parallel += " cp_comm offload_optimizer offload_activations distribute_saved_activations reproducible"
    changes = {name: value for name, value in json.loads(text).items() if name not in parallel.split()}
    return losses_and_norms(((1, 1, 1), changes), "cpu", directory)


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [*((CASES[ranks], ranks) for ranks in CASES), *(pytest.param(MORE[n], n, marks=pytest.mark.slow) for n in MORE)],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_training_gives_the_cpus_losses(cases: list[str], ranks: int, folder: str) -> None:
    init, arguments = ranks > 1, (list(map(case_of, cases)), "pretend", folder)
    (found, *_) = run_distributed(train_all, ranks, *arguments, backend="pretend", init=init, timeout=600)
    for case, figures in zip(arguments[0], found, strict=True):
        precision = case[1].get("precision", "fp32")
        losses, norms = TOLERANCES[precision]
        expected = on_cpu(json.dumps(case[1], sort_keys=True), folder)
        assert figures[::2] == pytest.approx(expected[::2], rel=losses), case
        assert figures[1::2] == pytest.approx(expected[1::2], rel=norms), case


@pytest.mark.parametrize(("plain", "more"), TABLES["bits"]["cases"])
def test_bit_for_bit(plain: str, more: str, folder: str) -> None:
    cases = [case_of(plain), case_of(f"{plain} {more}")]
    found = run_distributed(train_all, 2, cases, "pretend", folder, backend="pretend", timeout=600)[0]
    assert found[0] == found[1]


ENGINES = ["cnn dp2 z3", "tokens pp2 zb", "bare pp2 uniform"]


def test_the_engine_trains_any_model_as_plain_torch_does() -> None:
    cases = [f"{case} device=pretend" for case in ENGINES]
    found = run_distributed(any_model.train_all, 2, cases, backend="pretend", timeout=120)[0]
    for case, result in zip(ENGINES, found, strict=True):
        name = case.split()[0]
        expected = any_model.reference(name)
        assert result.losses == pytest.approx(expected.losses, rel=1e-6), name
        assert result.norms == pytest.approx(expected.norms, rel=1e-6), name
        if name != "cnn":  # batch norm's running statistics are those of a replica
            assert result.evaluated == pytest.approx(expected.evaluated, rel=1e-6), name


# ---- checkpoints of runs on the accelerator --------------------------------------------------------------------------


SAVED: list[Changes] = [{"zero_stage": 0, "async_save": True}, {"zero_stage": 3}]
SAVED += [{"zero_stage": 1, "offload_optimizer": True, "async_save": behind} for behind in (False, True)]


def train_and_save(rank: int, world_size: int, directory: str, device: str, cases: list[dict[str, Any]]) -> None:
    """Two steps of each case, saved into a directory of its own."""
    for number, options in enumerate(cases):
        changes = {"train_iters": 2, "num_layers": 2, "optimizer": "sgd", "device": device, **options}
        config = make_config((1, 1, 2), Path(directory, f"{device}-{number}"), **changes)
        make_trainer(config, build_mesh(config.parallel)).run()


def test_what_is_saved_equals_a_run_on_the_cpu(tmp_path: Path) -> None:
    run_distributed(train_and_save, 2, str(tmp_path), "pretend", SAVED, backend="pretend")
    run_distributed(train_and_save, 2, str(tmp_path), "cpu", [{}])
    (on_cpu,) = published(tmp_path / "cpu-0")
    for number, options in enumerate(SAVED):
        (on_device,) = published(tmp_path / f"pretend-{number}")
        assert whole(on_device, ALONE) is None, options
        for kind in ("model", "momentum_buffer"):
            found, expected = stored(on_device)[kind], stored(on_cpu)[kind]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{options} {kind} {name}")


# ---- random generators and strides --------------------------------------------------------


def test_steps_with_dropout_leave_the_devices_generators_as_they_were() -> None:
    run_distributed(losses_of_two_steps, 1, "pretend", backend="pretend", init=False)


def regions_of_strided_tensors(rank: int, size: int) -> None:
    group, device = world_group(rank, size), torch.device("pretend", rank)
    for region in (copy_to_group, reduce_from_group, gather_sequence, reduce_scatter_sequence):
        x = torch.ones(6, 4, 8, device=device).transpose(0, 1).requires_grad_()
        found = region(x, group)
        found.backward(torch.ones(8, device=device).expand(found.shape))
        found = region(x, group)
        found.backward(torch.ones(found.shape[::-1], device=device).permute(2, 1, 0))


def test_collectives_are_given_contiguous_tensors() -> None:
    """The device's collectives refuse others, as NCCL does."""
    run_distributed(regions_of_strided_tensors, 2, backend="pretend")


# ---- traces ----------------------------------------------------------------------------------------------------------

MICROBATCHES, MICRO_BATCH, LAYERS = 2, 2, 4
SHAPE: Changes = {"num_layers": LAYERS, "hidden_size": 64, "micro_batch_size": MICRO_BATCH, "precision": "bf16"}
SHAPE |= {"untie_embeddings_and_output_weights": True, "device": "pretend"}
SHAPE |= {"train_iters": 3, "trace": True, "trace_steps": 2}
BATCH_BYTES = MICROBATCHES * MICRO_BATCH * SEQUENCE * (8 + 8 + 4)  # tokens, labels and the mask of the loss
SMALL = 256  # figures of a step


def steps_of(trainer: Any) -> list[Counters]:
    """What every step of a run did after the first, from the end of the one before to its own."""
    found: list[Counters] = []
    with ExitStack() as stack:

        class Counting(Callback):
            def on_step_end(self, run: Run, result: StepResult) -> None:
                stack.close()
                found.append(stack.enter_context(counting()))

        trainer.callbacks.members.append(Counting())
        with suppress(TrainingDiverged):  # where every step is skipped
            trainer.run()
    return found[:-1]


def traced(rank: int, world_size: int, directory: str, changes: Changes) -> tuple[Counters, int, int]:
    """What the device copies in step 2, and bytes of the rank's shards of parameters and of gradients."""
    batch = MICROBATCHES * MICRO_BATCH * world_size
    config = make_config((1, 1, world_size), directory, global_batch_size=batch, **SHAPE, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    counted, *_ = steps_of(trainer)  # after step 3 the ranks send each other their traces
    sizes = [bucket.layout.shard_size for bucket in trainer.model.data_parallel.buckets]
    return counted, 2 * sum(sizes), 4 * sum(sizes)


def copies(directory: Path, rank: int, step: int) -> dict[str, list[dict[str, Any]]]:
    """The copies of a rank in a step, by the name of their row."""
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    assert len(set(rows.values())) == len(rows)
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == "copy" and event["pid"] == rank and event["args"]["step"] == step:
            assert rows[event["tid"]] == event["name"]
            found[event["name"]].append(event)
    return found


# Of all state: parameters before forward and backward of two microbatches, and a sixteenth that is checked; gradients
# once a microbatch, and back before the second and for the norm.
TRACED: dict[str, tuple[int, Changes, dict[str, float]]] = {
    "optimizer": (1, {"offload_optimizer": True}, {"gradients to host": 1, "parameters to device": 1}),
    "params": (
        2, {"offload_optimizer": True, "offload_params": True, "zero_stage": 3},
        {"gradients to host": 2, "gradients to device": 2, "parameters to device": 4 + 1 / 16},
    ),
    "activations": (1, {"offload_activations": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TRACED)
def test_all_that_the_device_copies_is_traced(case: str, tmp_path: Path) -> None:
    ranks, changes, kinds = TRACED[case]
    outcomes = run_distributed(traced, ranks, str(tmp_path), changes, backend="pretend", init=ranks > 1)
    for rank, (counted, params, grads) in enumerate(outcomes):
        found = copies(tmp_path, rank, 2)
        sizes = {name: sum(event["args"]["bytes"] for event in row) for name, row in found.items()}
        expected = {name: times * (params if "parameters" in name else grads) for name, times in kinds.items()}
        if "offload_activations" in changes:  # all but the last two blocks of a microbatch leave and come back
            assert sizes.keys() == {"activations to host", "activations to device"}
            one = MICRO_BATCH * SEQUENCE * 64 * 2
            assert sizes["activations to device"] >= MICROBATCHES * (LAYERS - 2) * one
            assert sizes["activations to host"] >= MICROBATCHES * LAYERS * one
        else:
            assert sizes == pytest.approx(expected, rel=0.01)
        for direction, figure in (("device", counted.bytes_to_device), ("host", counted.bytes_to_host)):
            traced_bytes = sum(size for name, size in sizes.items() if name.endswith(direction))
            assert 0 <= figure - traced_bytes <= BATCH_BYTES + SMALL
        for row in found.values():
            assert all(event["dur"] >= 0 for event in row)
            assert all(one["ts"] + one["dur"] <= other["ts"] + 0.15 for one, other in pairwise(row))
        assert copies(tmp_path, rank, 3).keys() == found.keys()
        assert not copies(tmp_path, rank, 1)


# ---- programs


Figures = dict[tuple[int, str], float]
OPTIONS: dict[str, Any] = {"global_batch_size": 4, "save_interval": 2, "eval_interval": 2, "eval_iters": 1, "lr": 1e-3}
OPTIONS |= {"hidden_dropout": 0, "attention_dropout": 0}  # masks differ between degrees of tp
SOURCE: dict[str, Any] = {"dp": 2, "zero_stage": 2, "offload_optimizer": True, "async_save": True}
TARGETS: list[Any] = [
    {"tp": 2},
    pytest.param({"tp": 2, "dp": 2, "zero_stage": 3}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "schedule": "zero-bubble", "async_save": True}, marks=pytest.mark.slow),
]


def train(rank: int, world_size: int, flags: list[str], program: str) -> int:
    status: int = runpy.run_path(str({"gpt": PROGRAM, "bert": BERT_PROGRAM}[program]))["main"](flags)
    return status


def run(directory: Path, device: str, *, program: str = "gpt", **changes: Any) -> Figures:
    """Train, and return the losses and gradient norms that were logged."""
    ranks = changes.get("tp", 1) * changes.get("pp", 1) * changes.get("dp", 1)
    preset = {"gpt": "gpt2-tiny", "bert": "bert-tiny"}[program]
    flags = small_run(directory, device=device, **{**OPTIONS, "preset": preset, **changes})
    backend = "pretend" if device == "pretend" else "gloo"
    statuses = run_distributed(train, ranks, flags, program, backend=backend, init=False, timeout=120)
    assert statuses == [0] * ranks
    keys, found = ("train/loss", "train/grad_norm", "eval/loss"), Figures()
    for record in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        found |= {(record["step"], key): record[key] for key in keys if key in record}
    return found


def later(figures: Figures) -> Figures:
    """Those of the steps after the checkpoint."""
    return {place: value for place, value in figures.items() if place[0] > 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("tokenizer"), random.Random(0)
    text = folder / "text.jsonl"
    lines = (" ".join(f"word{draw.randrange(40)}" for _ in range(12)) for _ in range(200))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert train_tokenizer(words(input=text, model="wordpiece", vocab_size=120, output=folder / "words")) == 0
    return folder / "words"


@pytest.fixture(scope="module")
def of_the_cpu(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, Figures]:
    directory = tmp_path_factory.mktemp("cpu")
    return directory, run(directory, "cpu", tokenizer=tokenizer, vocab_size=None)


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, Figures]:
    directory = tmp_path_factory.mktemp("device")
    return directory, run(directory, "pretend", tokenizer=tokenizer, vocab_size=None, **SOURCE)


def test_a_run_logs_what_it_logs_on_the_cpu(of_the_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures]) -> None:
    assert {key for _, key in of_the_cpu[1]} == {"train/loss", "train/grad_norm", "eval/loss"}
    assert on_device[1] == pytest.approx(of_the_cpu[1], rel=1e-6)


@pytest.mark.parametrize("changes", TARGETS, ids=str)
def test_it_continues_from_a_checkpoint_of_another_layout(
    of_the_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures], tmp_path: Path, tokenizer: Path, changes: Any
) -> None:
    options: dict[str, Any] = {"load": on_device[0] / "step_00000002", "tokenizer": tokenizer, "vocab_size": None}
    assert run(tmp_path, "pretend", **options, **changes) == pytest.approx(later(of_the_cpu[1]), rel=1e-6)
    # Without tensor parallelism nothing is split, and another layout decides anew.
    written = re.findall(r"^sequence_parallel = (\w+)$", (tmp_path / "config.toml").read_text(), re.MULTILINE)
    assert written == (["true"] if changes.get("tp", 1) > 1 else [])


def test_checkpoints_travel_between_the_device_and_the_cpu(
    of_the_cpu: tuple[Path, Figures], on_device: tuple[Path, Figures], tmp_path: Path, tokenizer: Path
) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": None}
    for number, (source, device) in enumerate(((on_device, "cpu"), (of_the_cpu, "pretend"))):
        found = run(tmp_path / str(number), device, load=source[0] / "step_00000002", **options)
        assert found == pytest.approx(later(of_the_cpu[1]), rel=1e-6)


def say(rank: int, world_size: int, tool: Any, flags: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert tool(flags) == 0
    return said.getvalue()


def test_generate_says_the_same(of_the_cpu: tuple[Path, Figures]) -> None:
    ask = partial(words, checkpoint=of_the_cpu[0], prompt="word3 word5", max_new_tokens=6)
    found = run_distributed(say, 1, generate, ask(device="pretend"), backend="pretend", init=False)
    assert found == [say(0, 1, generate, ask(device="cpu"))]


@pytest.mark.slow
def test_bert_trains_and_fill_mask_says_the_same(tmp_path: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"program": "bert", "tokenizer": tokenizer, "vocab_size": None}
    expected = run(tmp_path / "cpu", "cpu", **options)
    found = run(tmp_path / "device", "pretend", dp=2, zero_stage=1, **options)
    assert found == pytest.approx(expected, rel=1e-6)
    ask = [*words(checkpoint=tmp_path / "device", top_k=3), "word3 [MASK] word5 [MASK]"]
    said = run_distributed(say, 1, fill_mask, [*ask, "--device", "pretend"], backend="pretend", init=False)
    assert said == [say(0, 1, fill_mask, [*ask, "--device", "cpu"])]


@pytest.mark.slow
def test_torchrun_starts_a_script_on_it(tmp_path: Path) -> None:
    runner = ROOT / "tests" / "accelerator" / "run.py"
    flags = small_run(tmp_path / "out", device="pretend", dp=2, train_iters=2)
    with under_torchrun(tmp_path / "logs", 2, runner, PROGRAM, *flags) as job:
        status, text = job.ends(within=120)
    assert (status, job.said()) == (0, ""), text
    assert "device    pretend, pretend" in job.said("stdout")
    assert "saved" in job.said("stdout")
