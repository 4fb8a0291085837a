"""DeepSpeed's checkpoints, written here in the structure of its files from known tensors: what comes out is those
tensors, bit for bit. tests/parity/test_conversion.py reads files that DeepSpeed itself has written."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS, all_keys, tables
from megacore.arrive.megatron import FOREIGN
from megacore.config import OptimizerConfig
from megacore.config.bert import BertConfig
from megacore.config.flags import all_fields, flags_by_name
from megacore.convert.deepspeed_files import open_deepspeed
from megacore.errors import CheckpointError
from megacore.optim.lr_schedules import learning_rate, momentum
from tests.e2e.launching import words
from tests.unit import refusals
from tests.unit.hostile import Payload
from tests.unit.refusals import GOOD, parse
from tests.unit.test_megatron_files import ARGS, GPT, VOCAB, legacy_blocks, padded, require_tensors, rows, tensors_of
from tools.convert_checkpoint import main as convert

RANKS = 2


def net() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"emb.weight": (5, 3), "a.weight": (3, 3), "a.bias": (3,), "b.weight": (7, 3)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def put(path: Path, name: str, state: dict[str, Any]) -> None:
    (path / "global_step3").mkdir(parents=True, exist_ok=True)
    (path / "latest").write_text("global_step3")
    torch.save(state, path / "global_step3" / name)


def write(
    path: Path, weights: dict[str, Tensor], stage: int, *, groups: int = 1, buffers: dict[str, Tensor] | None = None
) -> None:
    """The files of a stage: weights in bf16, and the flat fp32 ones of two ranks."""
    names = list(weights)
    grouped = [names[i::groups] for i in range(groups)]
    shapes = [OrderedDict((name, weights[name].shape) for name in group) for group in grouped]
    buffers = {"count": torch.tensor(4)} if buffers is None else buffers
    module = {name: value.bfloat16() for name, value in weights.items()} | buffers
    common = {"param_shapes": shapes, "buffer_names": list(buffers), "ds_version": "0.19.8", "shared_params": {}}
    if stage < 3:
        put(path, "mp_rank_00_model_states.pt", {"module": module, **common})
    for rank in range(RANKS):
        parts = []
        for group in grouped:  # stage 3 divides every weight, the others all of a group together
            flat = [weights[name].flatten() for name in group]
            wholes, multiple = (flat, RANKS) if stage == 3 else ([torch.cat(flat)], 2 * RANKS)
            filled = [torch.cat([whole, torch.zeros(-whole.numel() % multiple)]) for whole in wholes]
            parts.append(torch.cat([whole.chunk(RANKS)[rank] for whole in filled]))
        if stage == 3:
            empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in weights} | buffers
            put(path, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", {"module": empty, **common})
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {key: parts, "zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS] * groups}
        name = f"{'' if stage == 3 else 'bf16_'}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        put(path, name, {"optimizer_state_dict": state, "ds_config": {}})


def to_megacore(folder: Path, **flags: Any) -> int:
    """Convert `ds` to `out`."""
    flags = {"input": folder / "ds", "output": folder / "out", **flags}
    return convert([*words(**flags), "--from", "deepspeed", "--to", "megacore"])


@pytest.mark.parametrize(("stage", "groups"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_sharded_weights_are_joined_in_fp32(stage: int, groups: int, tmp_path: Path) -> None:
    weights = net()
    write(tmp_path, weights, stage, groups=groups)
    found = open_deepspeed(tmp_path).weights()
    assert found.keys() == weights.keys() | {"count"}
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_without_an_optimizer_the_weights_are_those_of_the_model(tmp_path: Path) -> None:
    weights = net()
    write(tmp_path, weights, 1)
    for file in (tmp_path / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    found = open_deepspeed(tmp_path / "global_step3").weights()
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in weights.items())


def test_missing_and_contradicting_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, net(), 3)
    for lacks, said in (
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "has 1 files of the optimizer's state of 2 ranks"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "is of ZeRO stage 3, and lacks"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "lacks the file of data-parallel rank 0"),
    ):
        (tmp_path / "global_step3" / lacks).unlink()
        with pytest.raises(CheckpointError, match=said):
            open_deepspeed(tmp_path).weights()
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="which is no directory beside it"):
        open_deepspeed(tmp_path)


@pytest.mark.parametrize(
    ("file", "field", "wrong", "problem"),
    [
        ("model", "module", ["x"], "its module is not a table"),
        ("model", "buffer_names", [{}], "its buffer_names is not a list of names"),
        ("model", "shared_params", {"tied": ["x"]}, "its shared_params is not"),
        ("model", "param_shapes", [{"a.weight": (2.5,)}], "its param_shapes is not"),
        ("model", "frozen_param_shapes", {"f": torch.ones(2)}, "its frozen_param_shapes is not"),
        ("optim", "partition_count", torch.ones(3), "its partition_count is not"),
        ("optim", "fp32_flat_groups", [torch.ones(1).expand(1 << 40)], "but its tensors would take 4,398"),
        ("optim", "fp32_flat_groups", [torch.ones(4, device="meta")], "of shape [4] has no numbers"),
        ("optim", "fp32_flat_groups", [torch.ones(99, dtype=torch.complex64)], "is of torch.complex64"),
    ],
)
def test_a_malformed_field_is_refused_by_name(
    file: str, field: str, wrong: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "ds", net(), 3)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path / "ds").rglob(f"*_{file}_states.pt"):
        made = torch.load(path, weights_only=False)
        (made if file == "model" else made["optimizer_state_dict"])[field] = wrong
        torch.save(made, path)
    assert to_megacore(tmp_path, like=tmp_path) == 2
    assert problem in capsys.readouterr().err


def test_the_layers_of_another_programs_pipeline_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "mp_rank_00_model_states.pt", {"module": None})
    put(tmp_path, "layer_00-model_00-model_states.pt", {"table.weight": torch.ones(5, 3)})
    put(tmp_path, "layer_02-model_00-model_states.pt", {"mix.weight": torch.ones(3, 3), "mix.bias": torch.ones(3)})
    said = r"PipelineModule with 2 layers \(layer 0: table.weight; layer 2: mix.weight\)"
    with pytest.raises(CheckpointError, match=said):
        open_deepspeed(tmp_path).weights()


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "mp_rank_00_model_states.pt", {"module": {}, "harm": Payload(tmp_path / "marker")})
    with pytest.raises(CheckpointError, match="holds more than tensors and flags"):
        open_deepspeed(tmp_path)
    assert not (tmp_path / "marker").exists()


# ---- Megatron-DeepSpeed


def write_pipeline(path: Path, values: dict[str, Tensor], tp: int) -> None:
    """A file for each layer: the embedding, blocks, the final norm, and the tied embedding again."""
    args = argparse.Namespace(**ARGS, tensor_model_parallel_size=tp)
    put(path, "mp_rank_00_model_states.pt", {"module": None, "args": args, "checkpoint_version": 3.0})
    for rank in range(tp):
        embedding = rows(padded(values["embedding.tokens.weight"]), tp, rank)
        layers: dict[int, dict[str, Tensor]] = {
            1: {"word_embeddings.weight": embedding, "position_embeddings.weight": values["embedding.positions"]},
            8: {"weight": values["head.norm.weight"], "bias": values["head.norm.bias"]},
            9: {"word_embeddings.weight": embedding},
        }
        for i in range(4):
            block = legacy_blocks(values, range(i, i + 1), tp, rank, 3.0)
            layers[3 + i] = {name.removeprefix("layers.0."): value for name, value in block.items()}
        for number, layer in layers.items():
            of_rank = f"-model_{rank:02d}" if tp > 1 else ""
            put(path, f"layer_{number:02d}{of_rank}-model_states.pt", layer)


def write_whole(path: Path, values: dict[str, Tensor], tp: int) -> None:
    """Without a pipeline."""
    for rank in range(tp):
        encoder = legacy_blocks(values, range(4), tp, rank, 3.0)
        encoder |= {f"final_layernorm.{kind}": values[f"head.norm.{kind}"] for kind in ("weight", "bias")}
        embedding = {
            "word_embeddings": {"weight": rows(padded(values["embedding.tokens.weight"]), tp, rank)},
            "position_embeddings": {"weight": values["embedding.positions"]},
        }
        module = {"language_model": {"embedding": embedding, "encoder": encoder}}
        args = argparse.Namespace(**ARGS)
        put(path, f"mp_rank_{rank:02d}_model_states.pt", {"module": module, "args": args})


@pytest.mark.parametrize(("writes", "tp"), [(write_pipeline, 1), (write_pipeline, 2), (write_whole, 2)])
def test_a_model_of_megatron_deepspeed_is_merged(writes: Any, tp: int, tmp_path: Path) -> None:
    values = tensors_of(GPT)
    writes(tmp_path / "ds", values, tp)
    assert to_megacore(tmp_path, vocab_size=VOCAB) == 0
    require_tensors(tmp_path / "out", values)


# ---- its configuration files, and Megatron-DeepSpeed's flags ---------------------------------------------------------

alone, refuse = refusals.alone, refusals.refuse  # fixtures
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "coming-from-deepspeed.md"


def written(path: Path, document: Any) -> list[str]:
    """The flags that name a file with this content."""
    file = path / "ds_config.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return ["--deepspeed_config", str(file)]


# ---- the table


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    # Every key that the classes and functions of DeepSpeed 0.19 read of a configuration.
    known = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text())
    assert len(known) > 300
    former = {"cuda_visible_devices", "fp32_allreduce", "aio.thread_count"}
    compiled = ("enabled", "backend", "kwargs", "disable", "fullgraph", "dynamic", "mode", "options", "dump_graphs")
    former |= {f"compile.{name}" for name in compiled}
    assert set(known) - tables()["aliases"].keys() == all_keys().keys() - former


def test_keys_and_flags_name_fields_and_flags_that_exist() -> None:
    fields = all_fields(BertConfig).keys()
    ours = flags_by_name(BertConfig).keys()
    planned = {"--search", "--world-size", "--cluster", "--max-micro-batch-size", "--max-zero-stage", "--to"}
    for path, key in all_keys().items():
        assert set(key.fields) <= fields, path
        assert set(re.findall(r"--[a-z][a-z0-9-]+", key.becomes)) <= ours | planned, path
    for name, flag in DEEPSPEED_FLAGS.items():
        assert set(flag.fields) <= fields, name
        assert set(re.findall(r"--[a-z][a-z0-9-]+", flag.becomes)) <= ours, name
    assert not DEEPSPEED_FLAGS.keys() & (ours | FOREIGN.keys())


# ---- schedules that are DeepSpeed's step by step


def test_one_cycle_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    """From its least rate at the first step, along lines, and then constant; its momentum the other way."""
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 3, "cycle_second_step_size": 4}
    document: Any = {
        "optimizer": {"type": "Adam", "params": {"lr": 7.0, "betas": [0.5, 0.6]}},
        "scheduler": {"type": "OneCycle", "params": params | {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95}},
    }
    config = parse(*GOOD, *written(tmp_path, document))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    expected = np.interp(range(10), [0, 3, 7], [1e-4, 2e-3, 1e-4]).tolist()
    assert found == pytest.approx(expected, rel=1e-12)
    momenta = [momentum(step, config.optimizer, usual=0.95, train_iters=10) for step in range(1, 11)]
    assert momenta == pytest.approx(np.interp(range(10), [0, 3, 7], [0.95, 0.7, 0.95]).tolist(), rel=1e-12)
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.95, 0.99)  # as DeepSpeed's OneCycle sets them
    document["scheduler"]["params"]["cycle_momentum"] = False
    config = parse(*GOOD, *written(tmp_path, document))
    assert {momentum(step, config.optimizer, usual=0.5, train_iters=10) for step in range(1, 11)} == {0.5}
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.5, 0.6)


def test_the_range_test_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    params = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    config = parse(*GOOD, *written(tmp_path, {"scheduler": {"type": "LRRangeTest", "params": params}}))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    assert found == pytest.approx([1e-3 * (1 + 2.0 * step / 4) for step in range(10)], rel=1e-12)
    assert {momentum(step, config.optimizer, usual=0.9, train_iters=10) for step in range(1, 11)} == {0.9}


# ---- the logarithmic warm-up


def test_the_logarithmic_warm_up_is_that_of_warmup_lr() -> None:
    config = OptimizerConfig(lr=2e-3, lr_warmup_iters=7, lr_warmup_style="log", lr_decay_style="constant")
    rates = [learning_rate(step, config, train_iters=20) for step in range(1, 10)]
    expected = [2e-3 * math.log(step) / math.log(7) if step < 7 else 2e-3 for step in range(1, 10)]
    assert rates == pytest.approx(expected, rel=1e-12)
