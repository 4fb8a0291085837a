"""`--dry-run=full`: it passes where a run does, counts what a run holds, and names the layer where a run would fail."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch._subclasses import fake_tensor

from megacore.models.gpt import gpt_layers
from megacore.models.spec import LayerSpec
from megacore.tracer.dry_run import RankReport, rank_kinds, run_ranks
from megacore.tracer.fake_job import absent_accelerator
from megacore.train import gpt_task
from tests.distributed import run_distributed
from tests.parity.runs import Layout, make_config
from tests.unit.planning import wrong_figures

Changes = dict[str, Any]
Case = tuple[Layout, Changes]
LLAMA: Changes = {"normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope"}
SCHEDULES: dict[str, Changes] = {"gpipe": {}, "1f1b": {}, "interleaved": {"virtual_stages": 2}, "zero-bubble": {}}
IN_A_V: Changes = {"virtual_stages": 2, "recompute": "light", "zero_stage": 3}
RECOMPUTED: Sequence[Changes] = (LLAMA, {"recompute": "light"}, {"recompute": "full"}, {})


def dry_runs(rank: int, world_size: int, cases: Sequence[Case]) -> list[list[RankReport]]:
    """In a process of its own, to which torch shows a further kind of device; `on_cpu` is a case's device."""
    absent_accelerator()  # before the first backward, when torch counts its devices
    found = []
    for layout, case in cases:
        changes = dict(case)
        on_cpu = changes.pop("on_cpu", False)
        blocks = layout[1] * changes.get("virtual_stages", 1)
        config = make_config(layout, "unused", **{"num_layers": blocks, **changes})
        with mock.patch.object(fake_tensor.log, "exception", side_effect=AssertionError("torch logs an error")):
            found.append(list(run_ranks(config, on_cpu=on_cpu, workers=1)))
    return found


def in_a_process(*cases: Case) -> list[list[RankReport]]:
    found: list[list[RankReport]] = run_distributed(dry_runs, 1, cases, init=False, timeout=120)[0]
    return found


def pair(row: int, shift: int) -> Case:
    """A combination of schedule, ZeRO stage, recomputation, precision and device; 16 have every pair of them."""
    schedule, stage = list(SCHEDULES)[row], (row + shift) % 4
    changes: Changes = {"schedule": schedule, "zero_stage": stage, **RECOMPUTED[(row + stage) % 4]}
    changes |= {"precision": ("fp32", "bf16")[(row + stage // 2) % 2], "on_cpu": (row // 2 + stage) % 2 == 0}
    return (1, 2, 2), changes | SCHEDULES[schedule]


MUON: Changes = {"optimizer": "muon", "micro_batch_size": 1}
BUCKETS: Changes = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512, "num_layers": 3, "zero_stage": 2}
BUCKETS |= {"precision": "bf16", "bucket_size_mb": 1, "seq_length": 32, "disable_bias_linear": True}
SMALL: Changes = {"hidden_size": 64, "vocab_size": 512, "num_layers": 2, "zero_stage": 0, "micro_batch_size": 1}
OFFLOADED: Changes = {"zero_stage": 3, "offload_optimizer": True, "offload_params": True, "precision": "bf16"}
USUAL: list[Case] = [pair(2, 0), pair(3, 0), ((2, 1, 1), OFFLOADED), ((1, 1, 8), LLAMA | MUON | BUCKETS)]
MORE: list[Case] = [
    *(((1, 2, 2), {"schedule": name, **IN_A_V, "on_cpu": name == "zb-v"}) for name in ("zb-v", "dualpipev")),
    *(pair(row, shift) for shift in range(4) for row in range(4)),
    ((2, 1, 1), {"recompute": "full", "zero_stage": 1, "precision": "bf16"}),
    ((2, 1, 1), {"recompute": "selective", "reproducible": True, **LLAMA}),
    ((2, 1, 1), {"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "fp16"}),
    ((2, 1, 1), {"offload_activations": True, "recompute": "full", "precision": "bf16"}),
    ((1, 1, 16), {**MUON, "num_layers": 2, "zero_stage": 1, "global_batch_size": 16}),  # ranks without a matrix
    ((1, 1, 2), {"optimizer": "adafactor", **BUCKETS, "zero_stage": 3}),
    ((1, 1, 2), {"optimizer": "onebitadam", "precision": "bf16", **SMALL}),  # small buckets are padded
]


@pytest.mark.parametrize("cases", [USUAL, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"])
def test_a_step_is_taken_and_holds_what_is_planned(cases: list[Case]) -> None:
    for reports, case in zip(in_a_process(*cases), cases, strict=True):
        assert [(report.result, report.problem) for report in reports] == [("OK", None)] * len(reports), case
        if case[0] != (1, 1, 16):
            assert [(r.differences, r.parameters) for r in reports] == [([], r.planned.parameters) for r in reports]


@pytest.mark.slow
def test_peaks_by_hand() -> None:
    """Of ZeRO 1 gradients are reduced where they lie: no shard of them exists beside the buffer. Attention with dropout
    keeps its weights on a CPU: 12 bytes for each of b a s s weights of a block, of softmax, the mask and what is left.
    """
    sizes = {"seq_length": 256, "on_cpu": True, "num_layers": 2, "num_attention_heads": 4, "micro_batch_size": 1}
    (zero, _), (plain,), (dropped,) = in_a_process(
        ((1, 1, 2), {"zero_stage": 1, "hidden_size": 256, "num_layers": 4, "vocab_size": 1024}),
        *(((1, 1, 1), {**sizes, "attention_dropout": rate}) for rate in (0.0, 0.1)),
    )
    assert zero.result == plain.result == dropped.result == "OK"
    assert zero.peak == pytest.approx(zero.planned.expected_tensors, rel=0.02)
    assert dropped.peak - plain.peak == pytest.approx(2 * 12 * 4 * 256**2, rel=0.2)


def test_kinds_are_the_ends_of_each_dimension_in_each_stage() -> None:
    # rank = (pp x 8 + dp) x 4 + tp
    expected = [(pp * 8 + dp) * 4 + tp for pp in range(12) for dp in (0, 7) for tp in (0, 3)]
    kinds = rank_kinds(make_config((4, 12, 8), "unused", num_layers=12, num_attention_heads=4))
    assert sorted(itertools.chain(*kinds)) == expected
    # The first rank of each stage is a kind; the others of the stages between the first and the last are alike.
    assert [kind for kind in kinds if kind[0] % 32 == 0] == [[pp * 32] for pp in range(12)]
    assert [kind for kind in kinds if len(kind) > 1] == [[pp * 32 + end for pp in range(1, 11)] for end in (3, 28, 31)]


def test_stages_with_other_layers_are_other_kinds() -> None:
    config = make_config((1, 4, 2), "unused", num_layers=5, pipeline_layout="E,t|2*t|t|t,H")
    assert rank_kinds(config) == [[0], [1], [2], [3], [4], [5], [6], [7]]


# ---- errors


# What the middle stage returns, and the words of the message.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Sequence[str]]] = {
    "shape": (lambda x: x[..., :-1], ["blocks.1", "31] torch.float32", "32] torch.float32"]),
    "dtype": (lambda x: x.double(), ["blocks.1", "torch.float64", "torch.float32"]),
    "device": (lambda x: x + x.new_zeros(1, device="cpu"), ["blocks.1", "gpu:0", "cpu"]),
}


def planted(rank: int, world_size: int, name: str) -> list[RankReport]:
    """Of a pipeline of three stages whose middle one, block 1, returns something else than it should."""
    spoil, _ = WRONG[name]

    def layers(*args: Any) -> list[LayerSpec]:
        specs = gpt_layers(*args)
        (spec,) = (spec for spec in specs if spec.name == "blocks.1")
        object.__setattr__(spec, "build", partial(spoiled, spec.build, spoil))
        return specs

    with mock.patch.dict(gpt_task.GPTTask.__init__.__kwdefaults__, layers=layers):
        return list(run_ranks(make_config((1, 3, 1), "unused", num_layers=3), on_cpu=False, workers=1))


def spoiled(build: Callable[[], Any], spoil: Callable[[Tensor], Tensor]) -> Any:
    layer = build()
    forward = layer.forward
    layer.forward = lambda x: spoil(forward(x))
    return layer


@pytest.mark.parametrize(
    "name", ["device", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shape", "dtype"))]
)
def test_an_error_in_a_middle_stage_names_its_layer(name: str) -> None:
    reports = run_distributed(planted, 1, name, init=False, timeout=120)[0]
    assert [report.result for report in reports] == ["OK", "fails", "OK"]
    assert not [words for words in WRONG[name][1] if words not in reports[1].problem], reports[1].problem


# ---- the command

TINY = (
    "--mock-data --vocab-size 97 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--train-iters 2 --global-batch-size 8 --micro-batch-size 1 --dry-run=full"
)
SPLIT = "--dp 8 --offload-optimizer"
LINES = {  # an entry point, and flags; {} is a directory with descriptions of clusters
    "gpt": "pretrain_gpt --pp 2 --world-size 4 --schedule gpipe --zero-stage 1 --offload-optimizer",
    "bert": "pretrain_bert --tp 2 --dp 1 --cluster cpu --json",
    "h100": "pretrain_gpt --tp 2 --dp 1 --cluster h100 --json",
    "little memory": f"pretrain_gpt {SPLIT} --cluster {{}}/memory_gb.toml",
    "little host memory": f"pretrain_gpt {SPLIT} --cluster {{}}/host_memory_gb.toml --json",
}


def commands(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What each line prints, which succeeds without a message."""
    outputs = {}
    for name, line in LINES.items():
        entry, *flags = line.format(folder).split()
        main, out, err = importlib.import_module(entry).main, io.StringIO(), io.StringIO()
        # A test's ranks may start no processes.
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("megacore.commands.dry_run_report.available_cores", return_value=1),
        ):
            assert (main([*TINY.split(), *flags]), err.getvalue()) == (0, "")
        outputs[name] = out.getvalue()
    return outputs


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("clusters")
    for field in ("memory_gb", "host_memory_gb"):
        (folder / f"{field}.toml").write_text(f'based_on = "h100"\n{field} = 0.001\n', encoding="utf-8")
    found: dict[str, str] = run_distributed(commands, 1, str(folder), init=False)[0]
    return found


def test_the_command_of_gpt(outputs: dict[str, str]) -> None:
    out = outputs["gpt"]
    assert "# Dry run: model on 4 accelerators, pp 2 x dp 2 x tp 1" in out
    assert "\n- layout: `--tp 1 --pp 2 --dp 2 --schedule gpipe --micro-batch-size " in out
    assert re.search(r"\n- other settings that are not the default: `[^`]*--offload-optimizer", out)
    assert "peak during it, in MiB: counted" in out
    assert re.search(r"\n\| 0 \| 0 \| [0-9,]+( \| 0\.[0-9]*[1-9][0-9]*){4} \| [+-][0-9]+\.[0-9]% \| ", out)
    assert out.endswith("4 kinds of rank, 4 of them OK\n")


def test_the_command_of_bert(outputs: dict[str, str]) -> None:
    found = json.loads(outputs["bert"])
    assert [rank["result"] for rank in found["ranks"]] == ["OK", "OK"]
    assert list(wrong_figures(found)) == []
    assert (found["cluster"], found["fits"], found["world_size"], found["layout"]["tp"]) == ("cpu", True, 2, 2)
    assert [rank["coordinates"]["tp_rank"] for rank in found["ranks"]] == [0, 1]
    first = found["ranks"][0]
    assert first["counted"]["parameters"] == first["planned"]["parameters"]["value"]
    assert first["counted"]["tensor_peak_bytes"] == pytest.approx(first["planned"]["tensor_peak"]["value"], rel=0.05)
    assert found["ranks"][1]["planned"]["tensor_peak"] is None


def test_the_flags_are_those_of_what_ran(outputs: dict[str, str]) -> None:
    """Accelerators split sequences by default, and CPUs do not."""
    for name, splits in (("h100", True), ("bert", False)):
        found = json.loads(outputs[name])
        assert found["layout"]["sequence_parallel"] is splits
        assert ("--no-sequence-parallel" in found["flags"].split()) is not splits


def test_a_job_that_does_not_fit_the_given_cluster_is_noted(outputs: dict[str, str]) -> None:
    """Only a cluster that was given counts."""
    (note,) = (line for line in outputs["little memory"].splitlines() if "DOES NOT FIT" in line)
    assert "DOES NOT FIT: pipeline rank 0, " in note
    found = json.loads(outputs["little host memory"])
    assert found["fits"] is False
    assert list(wrong_figures(found)) == []
    assert "DOES NOT FIT" not in outputs["gpt"]
