"""Megatron-LM's files, written here in its layouts from known tensors: what comes out is those tensors, bit for bit;
and a pickle with anything else in it is refused without being run."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import itertools
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import time
import tomllib
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS
from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, REPLACED
from megacore.arrive.translation import Run
from megacore.checkpoint.manifest import find_checkpoint
from megacore.config import Config, DataConfig, ExpertsConfig, ModelConfig, ResolvedModel, TrainingConfig
from megacore.config.bert import BertConfig
from megacore.config.flags import flags_by_name, read_flags
from megacore.convert.check import our_logits
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_weights
from megacore.convert.dcp_files import open_dcp
from megacore.convert.megatron_config import model_of
from megacore.convert.plan import buffer_shapes, model_shapes, whole_config
from megacore.data.gpt.build import build_datasets
from megacore.errors import CheckpointError
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.patience import patience
from tests.peers import interpreter_with
from tests.unit import data_bytes, refusals
from tests.unit.hostile import Payload
from tools.convert_checkpoint import main as convert

# ---- checkpoints of known tensors, written from the descriptions of the formats, apart from what megacore reads ------

VOCAB, PADDED, HIDDEN, HEADS, LAYERS, POSITIONS = 21, 24, 16, 4, 4, 12
TABLES = tomllib.loads(Path(__file__).with_name("megatron_files.toml").read_text(encoding="utf-8"))


def fields_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table of megatron_files.toml has, after the table that it begins with."""
    before = fields_of(TABLES[table["of"]]) if "of" in table else {}
    return before | {name: value for name, value in table.items() if name != "of"}


ARGS, SIZES, OF_LLAMA, LLAMA_ARGS = (fields_of(TABLES[name]) for name in ("args", "sizes", "llama", "llama_args"))
GROUPED, GROUPED_ARGS = fields_of(TABLES["grouped"]), fields_of(TABLES["grouped_args"])
GPT = ModelConfig(**SIZES).resolve(seq_length=POSITIONS)


def llama(**fields: Any) -> ModelConfig:
    """A small Llama, with further fields or others."""
    return ModelConfig(**{**SIZES, **OF_LLAMA, **fields})


def tensors_of(config: ResolvedModel) -> dict[str, Tensor]:
    """Known tensors of a model, buffers included."""
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in (model_shapes(config) | buffer_shapes(config)).items()}


# ---- writing as Megatron-LM does -------------------------------------------------------------------------------------


def rows(value: Tensor, tp: int, rank: int) -> Tensor:
    size = value.shape[0] // tp
    return value[rank * size : (rank + 1) * size].clone()


def columns(value: Tensor, tp: int, rank: int) -> Tensor:
    size = value.shape[1] // tp
    return value[:, rank * size : (rank + 1) * size].clone()


def old_order(value: Tensor, version: float, heads: int) -> Tensor:
    """[head][q, k, v][d] as it stood in earlier versions, written out one row at a time."""
    d = value.shape[0] // heads // 3
    result = torch.empty_like(value)
    for head in range(heads):
        for kind in range(3):
            for i in range(d):
                there = (kind * heads + head) * d + i if version == 0 else (head * d + i) * 3 + kind
                result[there] = value[(head * 3 + kind) * d + i]
    return result


def padded(value: Tensor) -> Tensor:
    return torch.cat([value, torch.full((PADDED - VOCAB, HIDDEN), 7.0)])


def gated(values: dict[str, Tensor], mlp: str, tp: int, rank: int, kind: str = "weight") -> Tensor:
    """A rank's rows of both halves of a gated MLP, the gate's first."""
    return torch.cat([rows(values[f"{mlp}.{one}.{kind}"], tp, rank) for one in ("gate", "up")])


def save(
    path: Path, rank: int, stage: int | None, state: dict[str, Any] | object, *, expert_rank: int | None = None
) -> None:
    """The file of a rank; without a number of the stage or of the expert-parallel rank its name has none."""
    numbers = [f"{number:03d}" for number in (stage, expert_rank) if number is not None]
    folder = path / "_".join([f"mp_rank_{rank:02d}", *numbers])
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")


def save_common(path: Path, **args: Any) -> None:
    """What the torch_dist format has beside the tensors."""
    made = {"args": argparse.Namespace(**ARGS | args), "iteration": 7, "checkpoint_version": 3.0}
    torch.save(made, path / "common.pt")


def state(model: dict[str, Any], version: float | None, **args: Any) -> dict[str, Any]:
    everything = {**ARGS, **args}
    made = {"args": argparse.Namespace(**everything), "iteration": 7, "optimizer": {"state": {0: torch.ones(2)}}}
    made["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
    return made | ({} if version is None else {"checkpoint_version": version}) | model


def legacy_blocks(values: dict[str, Tensor], numbers: range, tp: int, rank: int, version: float) -> dict[str, Tensor]:
    found = {}
    for local, i in enumerate(numbers):
        for (ours, (theirs, part)), kind in itertools.product(TABLES["legacy"].items(), ("weight", "bias")):
            value = values[f"blocks.{i}.{ours}.{kind}"]
            value = rows(value, tp, rank) if part == "rows" else value
            value = columns(value, tp, rank) if part == "columns" and kind == "weight" else value
            if ours == "attention.qkv" and version < 2:
                value = old_order(value, version, HEADS // tp)
            found[f"layers.{local}.{theirs}.{kind}"] = value
    return found


def write_legacy(
    path: Path, values: dict[str, Tensor], *, tp: int = 1, pp: int = 1, version: float = 3.0, chunks: int = 1
) -> Path:
    """The nested tables of Megatron-LM's own GPT, with any number of virtual stages."""
    each = LAYERS // (pp * chunks)
    for stage in range(pp):
        for rank in range(tp):
            models = []
            for chunk in range(chunks):
                first = (chunk * pp + stage) * each
                encoder = legacy_blocks(values, range(first, first + each), tp, rank, version)
                model: dict[str, Any] = {"language_model": {"encoder": encoder}}
                embedding = rows(padded(values["embedding.tokens.weight"]), tp, rank)
                if stage == 0 and chunk == 0:
                    model["language_model"]["embedding"] = {
                        "word_embeddings": {"weight": embedding},
                        "position_embeddings": {"weight": values["embedding.positions"]},
                    }
                if stage == pp - 1 and chunk == chunks - 1:
                    encoder["final_layernorm.weight"] = values["head.norm.weight"]
                    encoder["final_layernorm.bias"] = values["head.norm.bias"]
                    if pp > 1:
                        model["word_embeddings_for_head"] = {"weight": embedding}
                models.append(model)
            table = {"model": models[0]} if chunks == 1 else {f"model{i}": model for i, model in enumerate(models)}
            sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            save(path, rank, stage if pp > 1 else None, state(table, None if version == 0 else version, **sizes))
    return path


def core_attention(values: dict[str, Tensor], i: int, tp: int, rank: int) -> dict[str, Tensor]:
    """The attention of a block in Megatron core's names, with the norm that is fused into its first projection."""
    ours = f"blocks.{i}"
    made = {
        "self_attention.linear_qkv.layer_norm_weight": values[f"{ours}.attention_norm.weight"],
        "self_attention.linear_qkv.weight": rows(values[f"{ours}.attention.qkv.weight"], tp, rank),
        "self_attention.linear_proj.weight": columns(values[f"{ours}.attention.output.weight"], tp, rank),
    }
    if f"{ours}.attention.qkv.bias" in values:
        made["self_attention.linear_qkv.bias"] = rows(values[f"{ours}.attention.qkv.bias"], tp, rank)
        made["self_attention.linear_proj.bias"] = values[f"{ours}.attention.output.bias"]
    return made


def core_mlp(values: dict[str, Tensor], i: int, tp: int, rank: int) -> dict[str, Tensor]:
    """The gated MLP of a block in Megatron core's names; every rank stacks its rows of the two halves."""
    ours = f"blocks.{i}"
    made = {
        "mlp.linear_fc1.layer_norm_weight": values[f"{ours}.mlp_norm.weight"],
        "mlp.linear_fc1.weight": gated(values, f"{ours}.mlp", tp, rank),
        "mlp.linear_fc2.weight": columns(values[f"{ours}.mlp.down.weight"], tp, rank),
    }
    if f"{ours}.mlp.up.bias" in values:
        made["mlp.linear_fc1.bias"] = gated(values, f"{ours}.mlp", tp, rank, "bias")
        made["mlp.linear_fc2.bias"] = values[f"{ours}.mlp.down.bias"]
    return made


def core_embedding(values: dict[str, Tensor], tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    """What the first stage has besides blocks."""
    return {"embedding.word_embeddings.weight": rows(padded(values["embedding.tokens.weight"]), tp, rank)}


def core_head(values: dict[str, Tensor], tp: int = 1, rank: int = 0) -> dict[str, Tensor]:
    """What the last stage has besides blocks."""
    return {
        "output_layer.weight": rows(padded(values["head.weight"]), tp, rank),
        "decoder.final_layernorm.weight": values["head.norm.weight"],
    }


def core_layers(blocks: Sequence[Mapping[str, Tensor]], *, stacked: bool = False) -> dict[str, Tensor]:
    """The blocks' tensors, each under its number; `stacked` makes one tensor of those of all blocks."""
    if stacked:
        return {f"decoder.layers.{name}": torch.stack([block[name] for block in blocks]) for name in blocks[0]}
    return {f"decoder.layers.{i}.{name}": value for i, block in enumerate(blocks) for name, value in block.items()}


# ---- converting ------------------------------------------------------------------------------------------------------


def changed(source: Path, change: Callable[[dict[str, Any]], object], folder: str = "mp_rank_00") -> Path:
    """The checkpoint, of which the file of a rank has been changed."""
    path = source / folder / "model_optim_rng.pt"
    made = torch.load(path, weights_only=False)
    change(made)
    torch.save(made, path)
    return source


def convert_megatron(source: Path, target: Path, kind: str = "megatron", **flags: Any) -> int:
    return convert([*words(input=source, output=target, **flags), "--from", kind, "--to", "megacore"])


def require_tensors(path: Path, expected: dict[str, Tensor]) -> None:
    """A checkpoint of megacore has these tensors, bit for bit, and no others."""
    found = CheckpointTensors(path)
    assert found.shapes.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found.read(name), value)] == []


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> str:
    """The message with which a conversion is refused."""
    assert convert_megatron(source, target, **flags) == 2
    assert not target.exists()
    said = capsys.readouterr().err
    assert said.startswith("convert_checkpoint.py: error: ")
    assert "Traceback" not in said
    return said


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "version", "chunks"),
    [(1, 1, 3.0, 1), (2, 1, 0, 1), (2, 2, 1.0, 1), (4, 2, 2.0, 1), (1, 4, 3.0, 1), (2, 2, 3.0, 2)],
)
def test_ranks_are_merged(tp: int, pp: int, version: float, chunks: int, tmp_path: Path) -> None:
    values = tensors_of(GPT)
    source = tmp_path / "megatron"
    write_legacy(source / "iter_0000007", values, tp=tp, pp=pp, version=version, chunks=chunks)
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    assert convert_megatron(source, tmp_path / "out", vocab_size=VOCAB) == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == GPT


@pytest.mark.parametrize(("biases", "plus_one"), [(False, False), (True, False), (False, True)])
def test_a_llama_of_megatron_core(biases: bool, plus_one: bool, tmp_path: Path) -> None:
    """Flat names, grouped queries, a gated MLP whose two halves every rank stacks, norms fused into projections. With
    --apply-layernorm-1p a weight of a norm is less by one there, and so it is here."""
    config = llama(num_layers=2, disable_bias_linear=not biases, layernorm_1p=plus_one, **GROUPED).resolve(
        seq_length=POSITIONS
    )
    values, tp = tensors_of(config), 2
    for rank in range(tp):
        blocks = [core_attention(values, i, tp, rank) | core_mlp(values, i, tp, rank) for i in range(2)]
        model = core_embedding(values, tp, rank) | core_layers(blocks) | core_head(values, tp, rank)
        made = {"model": {**model, "decoder.final_layernorm._extra_state": None}}
        args = {**GROUPED_ARGS, "num_layers": 2, "add_bias_linear": biases, "apply_layernorm_1p": plus_one}
        save(tmp_path / "megatron", rank, None, state(made, 3.0, **args))
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out") == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == config
    again = ["--input", str(tmp_path / "out"), "--output", str(tmp_path / "back"), "--tp", "2"]
    assert convert(["--from", "megacore", "--to", "megatron", *again]) == 0
    assert convert_megatron(tmp_path / "back", tmp_path / "again") == 0
    require_tensors(tmp_path / "again", values)
    assert CheckpointTensors(tmp_path / "again").config == config


# ---- the torch_dist format, written by two ranks in the ways that Megatron core divides tensors ----------------------

DIVIDED = llama(**GROUPED).resolve(seq_length=POSITIONS)


def save_divided(rank: int, ranks: int, tensors: dict[str, Tensor], target: str) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(tensors.items()):
        dimension = number % value.dim()
        place = Shard(dimension) if value.shape[dimension] % ranks == 0 else Replicate()
        state[name] = distribute_tensor(value.clone(), mesh, [place])
    state |= {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3), "rng_state/shard_0": torch.zeros(2)}
    dcp.save(state, checkpoint_id=target)
    if rank == 0:
        save_common(Path(target), **GROUPED_ARGS, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_llama_of_torch_dist_is_read_whatever_divided_it(stacked: bool, tmp_path: Path) -> None:
    values = tensors_of(DIVIDED)
    source = tmp_path / "megatron" / "iter_0000007"
    # By the names of Megatron core; layers along the first dimension, or each with its number.
    blocks = [core_attention(values, i, 1, 0) | core_mlp(values, i, 1, 0) for i in range(DIVIDED.num_layers)]
    tensors = core_embedding(values) | core_head(values) | core_layers(blocks, stacked=stacked)
    run_distributed(save_divided, 2, tensors, str(source))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7")
    name = "torch_dist" if stacked else "megatron"
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out", kind=name) == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == DIVIDED


@pytest.mark.parametrize("form", ["by value", "by name"])
def test_an_index_that_any_version_of_python_wrote_is_read(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2 pickles a member of an enumeration as `getattr(kind, name)`, others as `kind(value)`."""

    def reduced(member: Any, _: Any) -> tuple[Any, ...]:
        return (type(member), (member.value,)) if form == "by value" else (getattr, (type(member), member.name))

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    value = torch.arange(6.0).view(2, 3)
    dcp.save({"weight": value}, checkpoint_id=tmp_path, no_dist=True)
    assert (b"getattr" in (tmp_path / ".metadata").read_bytes()) == (form == "by name")
    assert torch.equal(open_dcp(tmp_path)["weight"].read(), value)


# ---- what newer versions write ---------------------------------------------------------------------------------------

MODULE = "megatron.core.rerun_state_machine"


class RerunMode(enum.StrEnum):
    DISABLED = "disabled"


class RerunState(enum.Enum):
    INITIAL_RUN = 1

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """By name, as some versions of Python do."""
        return getattr, (type(self), self.name)


class Caller(NamedTuple):
    message: str
    rank: int


def test_enumerations_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: types.ModuleType(name) for name in ("megatron", "megatron.core", MODULE)}
    for made in (RerunMode, RerunState, Caller):
        monkeypatch.setattr(made, "__module__", MODULE)
        setattr(parts[MODULE], made.__name__, made)
    values = tensors_of(GPT)
    machine = {"mode": RerunMode.DISABLED, "state": RerunState.INITIAL_RUN, "counts": {Caller("loss", 0): 3}}
    with monkeypatch.context() as patch:
        for name, module in parts.items():
            patch.setitem(sys.modules, name, module)
        source = changed(write_legacy(tmp_path / "in", values), lambda made: made.update(rerun_state_machine=machine))
    assert convert_megatron(source, tmp_path / "out", vocab_size=VOCAB) == 0
    require_tensors(tmp_path / "out", values)


@pytest.mark.parametrize(
    ("tokenizer", "said", "more"),
    [("NullTokenizer", VOCAB - 1, {}), ("NullTokenizer", VOCAB, {"null_tokenizer_eod_id": None}),
     ("GPT2BPETokenizer", VOCAB, {})],
)  # fmt: skip
def test_the_row_that_ends_a_document_stays(
    tokenizer: str, said: int, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NullTokenizer's vocab_size is without it, but where a flag may set its id; every tokenizer's padding goes, and
    is counted."""
    values = tensors_of(GPT)
    args = {**more, "tokenizer_type": tokenizer, "vocab_size": said}
    source = changed(write_legacy(tmp_path / "in", values), lambda made: vars(made["args"]).update(args))
    assert convert_megatron(source, tmp_path / "out") == 0
    assert CheckpointTensors(tmp_path / "out").config.vocab_size == VOCAB
    assert f"vocabulary {VOCAB}: {PADDED - VOCAB} of {PADDED} rows are cut off" in capsys.readouterr().out
    require_tensors(tmp_path / "out", values)


# ---- to Megatron-LM --------------------------------------------------------------------------------------------------

LLAMA, NEMOTRON = (llama(**fields_of(TABLES[name])).resolve(seq_length=POSITIONS) for name in ("llama_3", "nemotron"))


def checkpoint_of(config: ResolvedModel, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a checkpoint of known tensors."""
    values = {name: value.to(dtype) for name, value in tensors_of(config).items()}
    types_of = {name: (dtype, tuple(value.shape)) for name, value in values.items()}
    path.mkdir()
    write_weights(path, whole_config(config, None), types_of, iter(values.items()), most_bytes=1 << 20)
    return values


def to_megatron(source: Path, target: Path, kind: str = "megatron", **flags: Any) -> int:
    return convert([*words(input=source, output=target, **flags), "--from", "megacore", "--to", kind])


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (GPT, {}),
        (GPT, {"tp": 2, "pp": 2}),
        (dataclasses.replace(GPT, activation="relu2"), {"pp": 4, "megatron_norms": "apart"}),
        (NEMOTRON, {"tp": 2}),
        (LLAMA, {"tp": 2, "pp": 2}),
        (dataclasses.replace(LLAMA, activation="gelu", untie_embeddings_and_output_weights=False), {"tp": 2, "pp": 4}),
    ],
)
def test_what_is_written_for_megatron_comes_back(config: ResolvedModel, flags: dict[str, Any], tmp_path: Path) -> None:
    values = checkpoint_of(config, tmp_path / "ours")
    assert to_megatron(tmp_path / "ours", tmp_path / "theirs", **flags) == 0
    assert convert_megatron(tmp_path / "theirs", tmp_path / "back") == 0
    require_tensors(tmp_path / "back", values)
    assert CheckpointTensors(tmp_path / "back").config == dataclasses.replace(config, make_vocab_size_divisible_by=128)
    if "megatron_norms" not in flags:  # of Transformer Engine, whose files are one for any ranks too
        assert to_megatron(tmp_path / "ours", tmp_path / "dist", "torch_dist", dtype="bf16") == 0
        assert convert_megatron(tmp_path / "dist", tmp_path / "again") == 0
        require_tensors(tmp_path / "again", {name: value.bfloat16() for name, value in values.items()})


def test_ranks_have_the_names_and_shapes_of_megatron_core(tmp_path: Path) -> None:
    """Written out by hand for the second stage's first rank; the padding is zeros."""
    values = checkpoint_of(LLAMA, tmp_path / "ours")
    assert to_megatron(tmp_path / "ours", tmp_path / "theirs", tp=2, pp=2) == 0
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "release"
    files = {path.parent.name: path for path in tmp_path.glob("theirs/release/*/model_optim_rng.pt")}
    with torch.serialization.safe_globals([argparse.Namespace]):
        state, last = (torch.load(files[f"mp_rank_{rank}_001"], weights_only=True) for rank in ("00", "01"))
    assert sorted(files) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    shapes = {name: tuple(value.shape) for name, value in state["model"].items()}
    layer = {name: tuple(shape) for name, shape in TABLES["shapes_of_core"].items()}
    of_layers = {f"decoder.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert shapes == of_layers | {"decoder.final_layernorm.weight": (16,), "output_layer.weight": (16, 16)}
    gate_up = state["model"]["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(gate_up, torch.cat([values[f"blocks.2.mlp.{one}.weight"][:12] for one in ("gate", "up")]))
    head = last["model"]["output_layer.weight"]
    assert torch.equal(head, torch.cat([values["head.weight"][16:], torch.zeros(32 - VOCAB, HIDDEN)]))
    assert all(type(value) in (int, float, bool, str) for value in vars(state["args"]).values())


@pytest.mark.parametrize(
    ("fields", "kind", "flags", "said"),
    [
        # Megatron core has windows too: the message must not deny that.
        ({"activation": "geglu", "window_size": 9}, "megatron", {},
         "--to megatron and torch_dist cannot write --activation geglu or --window-size 9: use --to hf"),
        ({"norm_affine": False, "clip_qkv": 8.0, "logits_divisor": 2.0}, "megatron", {},
         "cannot write --no-norm-affine, --clip-qkv 8 or --logits-divisor 2: use --to hf"),
        ({}, "megatron", {"tp": 4, "pp": 3}, "--tp 4 must divide the 2 query groups: use 1 or 2"),
        ({}, "megatron", {"tp": 4, "pp": 3}, "--pp 3 must divide the 4 layers: use "),
        ({}, "torch_dist", {"tp": 2}, "--tp has no effect with --from megacore --to torch_dist"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_for_megatron_is_refused(
    fields: Any, kind: str, flags: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint_of(dataclasses.replace(LLAMA, **fields), tmp_path / "ours")
    assert to_megatron(tmp_path / "ours", tmp_path / "out", kind, **flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- mixtures of experts of Megatron core ----------------------------------------------------------------------------

EXPERTS = 4
DENSE = llama().resolve(seq_length=POSITIONS)
SECTION = ExpertsConfig(**TABLES["experts"])
MIXTURE: ResolvedModel = dataclasses.replace(DENSE, experts=SECTION.resolve(24))
MOE_ARGS = fields_of(TABLES["experts_args"])


def of_experts(values: dict[str, Tensor], mlp: str, tp: int, rank: int, numbers: range, form: str) -> dict[str, Tensor]:
    """The experts of a rank, as SequentialMLP, TEGroupedMLP or GroupedMLP has them."""
    found, first, second = dict[str, Tensor](), list[Tensor](), list[Tensor]()
    for number in numbers:
        gate, up, down = (values[f"{mlp}.experts.{one}.weight"][number] for one in ("gate", "up", "down"))
        first.append(torch.cat([rows(gate, tp, rank), rows(up, tp, rank)]))
        second.append(columns(down, tp, rank))
    for fc, matrices in enumerate((first, second), start=1):
        if form == "joined":
            whole = torch.stack([matrix.t() for matrix in matrices]).contiguous()  # [E, in, out]
            found[f"mlp.experts.weight{fc}"] = whole.view(HIDDEN, -1) if fc == 1 else whole.view(-1, HIDDEN)
            continue
        names = {"sequential": "local_experts.{0}.linear_fc{1}.weight", "grouped": "linear_fc{1}.weight{0}"}
        found |= {f"mlp.experts.{names[form].format(local, fc)}": matrix for local, matrix in enumerate(matrices)}
    return found


def block(values: dict[str, Tensor], i: int, tp: int, rank: int) -> dict[str, Tensor]:
    """All of a block but its experts."""
    mlp, found = f"blocks.{i}.mlp", core_attention(values, i, tp, rank)
    if f"{mlp}.router.weight" not in values:
        return found | core_mlp(values, i, tp, rank)
    return found | {
        "pre_mlp_layernorm.weight": values[f"blocks.{i}.mlp_norm.weight"],
        "mlp.router.weight": values[f"{mlp}.router.weight"],
        "mlp.router.expert_bias": values[f"{mlp}.router.bias"],
        "mlp.shared_experts.linear_fc1.weight": gated(values, f"{mlp}.shared.mlp", tp, rank),
        "mlp.shared_experts.linear_fc2.weight": columns(values[f"{mlp}.shared.mlp.down.weight"], tp, rank),
        "mlp.shared_experts.gate_weight": values[f"{mlp}.shared.gate"],
    }


def write_mixture(path: Path, values: dict[str, Tensor], *, tp: int, pp: int, ep: int, form: str, **args: Any) -> None:
    """The torch format: a file for each tensor-, pipeline- and expert-parallel rank."""
    sizes = {f"{kind}_model_parallel_size": n for kind, n in (("tensor", tp), ("pipeline", pp), ("expert", ep))}
    held, layers = EXPERTS // ep, LAYERS // pp
    for stage, of_experts_rank, rank in itertools.product(range(pp), range(ep), range(tp)):
        blocks = []
        for i in range(stage * layers, (stage + 1) * layers):
            tensors = block(values, i, tp, rank)
            if "mlp.router.weight" in tensors:
                numbers = range(of_experts_rank * held, (of_experts_rank + 1) * held)
                tensors |= of_experts(values, f"blocks.{i}.mlp", tp, rank, numbers, form)
                tensors["mlp.experts.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
            blocks.append(tensors)
        model = core_layers(blocks)
        model |= core_embedding(values, tp, rank) if stage == 0 else {}
        model |= core_head(values, tp, rank) if stage == pp - 1 else {}
        made = state({"model": model}, 3.0, **{**MOE_ARGS, **sizes, **args})
        expert_rank = of_experts_rank if ep > 1 else None
        save(path, rank, stage if pp > 1 else None, made, expert_rank=expert_rank)


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "form"),
    [(1, 1, 1, "sequential"), (2, 1, 2, "grouped"), (2, 2, 2, "joined"), (1, 2, 4, "sequential"), (2, 2, 1, "grouped"),
     (1, 1, 4, "joined")],
)  # fmt: skip
def test_experts_of_all_ranks_are_stacked(tp: int, pp: int, ep: int, form: str, tmp_path: Path) -> None:
    values = tensors_of(MIXTURE)
    write_mixture(tmp_path / "megatron", values, tp=tp, pp=pp, ep=ep, form=form)
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out") == 0
    require_tensors(tmp_path / "out", values)
    found = CheckpointTensors(tmp_path / "out")
    assert found.config == MIXTURE
    assert set(found.manifest.tensors["buffers"]) == {f"blocks.{i}.mlp.router.bias" for i in (1, 3)}


def test_a_bias_that_was_cast_is_fp32_again(tmp_path: Path) -> None:
    values = {name: value.bfloat16() for name, value in tensors_of(MIXTURE).items()}
    write_mixture(tmp_path / "megatron", values, tp=1, pp=1, ep=1, form="grouped")
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out") == 0
    require_tensors(tmp_path / "out", {n: v.float() if n.endswith("router.bias") else v for n, v in values.items()})


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_of_the_torch_dist_format(stacked: bool, tmp_path: Path) -> None:
    """One tensor of all experts; with all layers alike also of all layers. The flags tell of ranks that wrote it."""
    freq: dict[str, Any] = {"moe_first_dense_layers": 0, "moe_layer_freq": 1} if stacked else {}
    config = dataclasses.replace(DENSE, experts=dataclasses.replace(SECTION, **freq).resolve(24))
    values, layers = tensors_of(config), list[dict[str, Tensor]]()
    for i in range(LAYERS):
        tensors = block(values, i, 1, 0)
        if "mlp.router.weight" in tensors:
            each = of_experts(values, f"blocks.{i}.mlp", 1, 0, range(EXPERTS), "grouped")
            for fc in (1, 2):
                matrices = [each[f"mlp.experts.linear_fc{fc}.weight{number}"] for number in range(EXPERTS)]
                tensors[f"mlp.experts.experts.linear_fc{fc}.weight"] = torch.stack(matrices)
        layers.append(tensors)
    model = core_embedding(values) | core_layers(layers, stacked=stacked) | core_head(values)
    source = tmp_path / "megatron"
    dcp.save(model, checkpoint_id=source, no_dist=True)
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    save_common(source, **{**MOE_ARGS, **sizes, **({"moe_layer_freq": 1} if stacked else {})})
    assert convert_megatron(source, tmp_path / "out") == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == config


@pytest.mark.parametrize("row", TABLES["refused"], ids=lambda row: row["says"])
def test_flags_of_another_model_are_refused_and_never_guessed(row: dict[str, Any]) -> None:
    flags = fields_of(row)
    with pytest.raises(CheckpointError, match=flags.pop("says")):
        model_of(flags, 64, 60, "here")


@pytest.mark.parametrize("row", TABLES["chosen"], ids=lambda row: str(row["flags"]))
def test_the_flags_choose_activations_and_blocks_with_experts(row: dict[str, Any]) -> None:
    model, fields = model_of(fields_of(row["flags"]), 64, 60, "here"), row["fields"]
    found = model if "activation" in fields else model.experts
    assert {name: getattr(found, name) for name in fields} == fields


# ---- refusals --------------------------------------------------------------------------------------------------------

FILE = "mp_rank_00/model_optim_rng.pt"
Harm = Callable[[Path], object]  # makes a checkpoint that is refused


def holds(model: dict[str, Any]) -> Harm:
    return lambda path: save(path, 0, None, state({"model": model}, 3.0))


def runs_something(place: str) -> Harm:
    def write(path: Path) -> None:
        harm: Any = Payload(path.parent / "marker")
        made: Any = state({"model": {"language_model": {}}}, 3.0, **({"harm": harm} if place == "args" else {}))
        made |= {} if place == "args" else {place: {"harm": harm}}
        save(path, 0, None, harm if place == "whole" else made)

    return write


def is_file(content: bytes) -> Harm:
    def write(path: Path) -> None:
        (path / FILE).parent.mkdir(parents=True)
        (path / FILE).write_bytes(content)

    return write


def table(depth: int, *names: str) -> dict[str, Any]:
    """A tensor in a table in a table ..., which each has by all of these names: in a small file."""
    made: dict[str, Any] = {"weight": torch.ones(2)}
    for _ in range(depth):
        made = dict.fromkeys(names, made)
    return made


def compressed(path: Path) -> None:
    """torch would unpack it into memory, a thousand bytes for each one of the file."""
    holds({"w": torch.zeros(1 << 18)})(path)
    with zipfile.ZipFile(path / FILE) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)


def in_file(change: Callable[[dict[str, Any]], object], folder: str = "mp_rank_00", **layout: int) -> Harm:
    return lambda path: changed(write_legacy(path, tensors_of(GPT), **layout), change, folder)


def says(**changes: Any) -> Harm:
    """Flags that do not fit."""
    return in_file(lambda made: vars(made["args"]).update(changes))


def of_rank_1(name: str, make: Callable[[Tensor], Tensor]) -> Harm:
    def change(made: dict[str, Any]) -> None:
        encoder = made["model"]["language_model"]["encoder"]
        encoder[name] = make(encoder[name])

    return in_file(change, "mp_rank_01", tp=2)


def without(path: Path) -> Path:
    """Of four ranks the last one's folder, to be emptied."""
    return write_legacy(path, tensors_of(GPT), tp=2, pp=2) / "mp_rank_01_001"


def pickled(data: bytes, form: str, size: int = 0) -> Harm:
    """A file of torch with this pickle in it, which may be sparse: of many zeros."""

    def write(path: Path) -> None:
        (path / FILE).parent.mkdir(parents=True)
        if form == "zip":
            writer = torch._C.PyTorchFileWriter(str(path / FILE))
            writer.write_record("data.pkl", data, len(data))
            writer.write_end_of_file()
        elif form == "old":
            torch.save({}, path / FILE, _use_new_zipfile_serialization=False)
            before, _, after = (path / FILE).read_bytes().partition(pickle.dumps({}, 2))
            (path / FILE).write_bytes(before + data + (b"" if size else after))
            os.truncate(path / FILE, max(size, (path / FILE).stat().st_size))
        else:
            (path / ".metadata").write_bytes(data)

    return write


def get(number: int) -> bytes:
    """The command that takes a value from a pickle's memo."""
    return b"h" + bytes([number])


def put(number: int) -> bytes:
    """The command that keeps a value in a pickle's memo."""
    return b"q" + bytes([number])


def of_expert_rank_1(name: str, make: Callable[[Tensor], Tensor]) -> Harm:
    def write(path: Path) -> None:
        write_mixture(path, tensors_of(MIXTURE), tp=1, pp=1, ep=2, form="grouped")
        changed(path, lambda made: made["model"].update({name: make(made["model"][name])}), "mp_rank_00_001")

    return write


def mixture(tp: int, pp: int, ep: int, lacks: str = "", **args: Any) -> Harm:
    def write(path: Path) -> None:
        write_mixture(path, tensors_of(MIXTURE), tp=tp, pp=pp, ep=ep, form="grouped", **args)
        if lacks:
            shutil.rmtree(path / lacks)

    return write


# Pickles that take much more than their size; each is refused before it is built.
BOMBS = {
    # Each tuple has the one before twice, and the last is a key: 2**60 steps to its hash.
    b"}(K\x01" + put(0) + b"".join(get(i) + b"\x86" + put(i + 1) for i in range(60)) + b"K\x01u.": "repeat or copy",
    b"})" + b"\x85" * 1_000_000 + b"K\x01s.": "nested too deep",
    b"]" * 1_000_000 + b"a" * 999_999 + b".": "wait for a container",
    b"]r\xff\xff\xff\x7f.": "numbers a value 2,147,483,647",
    b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.": "builtins bytearray",
    # A text of a million characters, copied a thousand times.
    b"](c_codecs\nencode\nq\0X@B\x0f\0" + b"a" * 10**6 + put(1) + b"X\5\0\0\0ascii" + put(2)
    + (get(0) + get(1) + get(2) + b"\x86R") * 1000 + b"e.": "repeat or copy",
    b"]q\0h\0a.": "changes a value that is complete",
    b"\x8b\0\0\x10\0" + b"\1" * (1 << 20) + b".": "LONG4",
}  # fmt: skip
FULL = {b"X\xff\xff\xff\xff": "more than 1,073,741,824", b"c": "a line of more than 1,048,576"}
PLACES = ("args", "model", "optimizer", "whole")
REFUSED: list[tuple[Harm, str]] = [
    *((runs_something(place), "holds more than tensors and flags") for place in PLACES),
    *((runs_something(place), "mkdir") for place in PLACES),
    *((is_file(content), FILE) for content in (b"", b"PK\x03\x04", b"\x80\x02}", b"garbage" * 100)),
    *((pickled(b"\x80\2" + beginning, "old", 5 << 30), said) for beginning, said in FULL.items()),
    (holds(table(300, "a")), "nested too deep"),
    (holds(table(4, "a", "b")), "one is there twice"),
    (holds(table(20, "a", "b")), "repeat or copy"),
    (holds({"wide": torch.ones(1).expand(1 << 20)}), "but its tensors would take 4,194,320"),
    (compressed, "its archive is compressed"),
    *((says(**{name: value for name, value in row.items() if name != "says"}), row["says"]) for row in TABLES["unfit"]),
    (says(hidden_size=10**400), "is not a finite number"),
    (lambda path: (without(path) / "model_optim_rng.pt").unlink(), "model_optim_rng.pt is missing"),
    (lambda path: shutil.rmtree(without(path)), "lacks the file of tensor rank 1, pipeline rank 1"),
    (lambda path: (write_legacy(path, tensors_of(GPT)) / "latest_checkpointed_iteration.txt").write_text("../etc"),
     "says '../etc', not a number"),
    (of_rank_1("layers.2.input_layernorm.bias", lambda x: x + 1e-6), "copies of blocks.2.attention_norm.bias"),
    (
        of_rank_1("layers.1.mlp.dense_h_to_4h.weight", lambda x: x[:, :-1]),
        "the tensor-parallel parts of blocks.1.mlp.up.weight do not fit together: (",
    ),
    *((of_expert_rank_1(f"decoder.layers.{name}.weight", lambda x: x + 1), "differs from that of the first expert-par")
      for name in ("0.self_attention.linear_proj", "1.mlp.router")),
    (of_expert_rank_1("decoder.layers.1.mlp.experts.linear_fc1.weight1", lambda x: x[:-1]),
     "experts.3.up.weight is (7, 16)"),
    (mixture(2, 2, 2, "mp_rank_01_001_001"), "lacks the file of tensor rank 1, pipeline rank 1, expert rank 1"),
    (mixture(2, 1, 1, expert_tensor_parallel_size=1), "reads such experts in the torch_dist format only"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("harm", "said", "kind"),
    [
        *(pytest.param(harm, said, "megatron", id=f"{number} {said}") for number, (harm, said) in enumerate(REFUSED)),
        # By default every kind of file and every pickle; all of them together are slow.
        *(
            pytest.param(
                pickled(b"\x80\2" + bomb, form), said, "dcp" if form == "index" else "megatron",
                id=f"{form} {number}", marks=[pytest.mark.slow] * (number % 3 != kind),
            )
            for kind, form in enumerate(("zip", "old", "index"))
            for number, (bomb, said) in enumerate(BOMBS.items())
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_soon_and_nothing_of_it_runs(
    harm: Harm, said: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(tmp_path / "megatron")
    started = time.monotonic()
    assert said in refused(tmp_path / "megatron", tmp_path / "out", capsys, kind=kind)
    assert time.monotonic() - started < patience(2)
    assert not (tmp_path / "marker").exists()


def test_an_old_file_whose_storages_claim_more_than_it_holds_takes_no_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_legacy(tmp_path / "megatron", tensors_of(GPT))
    path = tmp_path / "megatron" / "mp_rank_00" / "model_optim_rng.pt"
    made = torch.load(path, weights_only=False)
    made["model"]["bomb"] = torch.zeros(12_345)
    torch.save(made, path, _use_new_zipfile_serialization=False)
    content, size = path.read_bytes(), b"M" + struct.pack("<H", 12_345)
    assert content.count(size) >= 2  # the storage's and the tensor's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for claimed in (10**9, 10**14):
        path.write_bytes(content.replace(size, b"\x8a\x08" + struct.pack("<q", claimed)))
        assert "was not loaded" in refused(tmp_path / "megatron", tmp_path / "out", capsys)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


# ---- megatron-core ---------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
CORE = """
import argparse, dataclasses, os, sys
from functools import partial
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from benchmarks.comparison.sides.megatron_core import OnCPU, without_cuda

source, kind, tokens, target = sys.argv[1:]
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
without_cuda()
parallel_state.initialize_model_parallel(1, 1)
torch.serialization.add_safe_globals([argparse.Namespace])
file = "mp_rank_00/model_optim_rng.pt" if kind == "megatron" else "common.pt"
state = torch.load(os.path.join(source, "release", file), weights_only=True)
args = state["args"]
rope = args.position_embedding_type == "rope"
config = TransformerConfig(
    num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
    num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
    kv_channels=args.kv_channels, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
    gated_linear_unit=args.swiglu, activation_func=F.silu if args.swiglu else partial(F.gelu, approximate="tanh"),
    normalization=args.normalization, layernorm_epsilon=args.norm_epsilon, qk_layernorm=args.qk_layernorm,
    hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False,
    masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
    use_cpu_initialization=True, perform_initialization=False, persist_layer_norm=False,
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
    vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
    position_embedding_type=args.position_embedding_type, rotary_percent=args.rotary_percent,
    rotary_base=args.rotary_base, rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
)
if kind == "megatron":
    model.load_state_dict(state["model"], strict=True)
else:
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load(wanted, os.path.join(source, "release"), strict="log_all")
    loaded = {name: value for name, value in loaded.items() if name not in state}  # the flags come along
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
ids = torch.load(tokens)
mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
with torch.no_grad(), OnCPU():
    logits = model.eval()(ids, torch.arange(ids.shape[1]).expand_as(ids), mask)
torch.save(logits, target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "torch_dist"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["GPT-2", "Llama"])
def test_megatron_core_computes_the_same(config: object, kind: str, tmp_path: Path) -> None:
    if not (python := interpreter_with("megatron")):
        pytest.skip("needs megatron-core: run `make peers`")
    checkpoint_of(config, tmp_path / "ours")  # type: ignore[arg-type]
    flags = {"megatron_norms": "apart"} if kind == "megatron" else {}
    assert to_megatron(tmp_path / "ours", tmp_path / "theirs", kind, **flags) == 0
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, tmp_path / "tokens.pt")
    words = [str(tmp_path / "theirs"), kind, str(tmp_path / "tokens.pt"), str(tmp_path / "logits.pt")]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", CORE, *words], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (ours,) = our_logits(CheckpointTensors(tmp_path / "ours"), tokens, None)
    theirs = torch.load(tmp_path / "logits.pt")[..., :VOCAB]
    torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=1e-4, atol=1e-4)


# ---- every flag of Megatron-LM is known ------------------------------------------------------------------------------

NAMES = tomllib.loads(Path(__file__).with_name("megatron_names.toml").read_text())
THEIRS = {f"--{name}": words for words, names in NAMES.items() for name in names.split()}
VALUES: dict[str, list[str]] = {"none": [], "one": ["1"], "any": ["1", "2"]}
OURS = flags_by_name(BertConfig)
ACCEPTED = {**FOREIGN, **DEEPSPEED_FLAGS}
# Lists there, of which megacore has one: several balancing losses.
ONE_HERE = {"--moe-router-load-balancing-type", "--moe-aux-loss-coeff"}


def test_each_of_their_names_is_known_once() -> None:
    tables = [set(table) for table in (OURS, ACCEPTED, REPLACED, NOT_YET)]
    unknown = [name for name in THEIRS if not any(name in table for table in tables)]
    assert not unknown
    assert not [name for name in THEIRS if sum(name in table for table in tables) > 1]


def test_no_table_has_a_name_that_is_not_theirs() -> None:
    assert not (ACCEPTED.keys() | REPLACED.keys() | NOT_YET.keys()) - THEIRS.keys()
    assert LISTS.keys() <= OURS.keys() & THEIRS.keys()


def test_a_flag_takes_as_many_values_as_there() -> None:
    for name, theirs in THEIRS.items():
        if name in ACCEPTED:
            foreign = ACCEPTED[name]
            found = "none" if foreign.is_switch else "any" if foreign.is_list else "one"
        elif name in OURS:
            found = "none" if OURS[name].kind is bool else "any" if OURS[name].kind is tuple else "one"
        else:
            continue
        assert found == theirs or name in ONE_HERE, name


def test_each_refusal_names_its_flag_and_another_way() -> None:
    for name in (*REPLACED, *NOT_YET):
        (problem,) = read_flags([name, *VALUES[THEIRS[name]]]).problems
        assert problem.startswith(f"{name} is a Megatron-LM flag")
        assert "did you mean" not in problem


# Flags that have no effect with some of their values only.
READ = {"--dataloader-type", "--error-injection-rate", "--exit-signal", "--moe-router-dtype", "--muon-tp-mode"}
READ |= {"--rerun-mode", "--rope-type", "--spec"}
READ |= {name for name, flag in FOREIGN.items() if "any other value is refused" in flag.becomes}


@pytest.mark.parametrize("words", VALUES)
def test_flags_without_effect_set_nothing(words: str) -> None:
    idle = [name for name, flag in FOREIGN.items() if flag.is_idle and THEIRS[name] == words and name not in READ]
    given = read_flags([word for name in idle for word in (name, *VALUES[words])])
    assert idle
    assert not given.problems
    assert not given.values
    assert [setting for setting in given.foreign if not setting.is_idle] == []
    for setting in given.foreign:
        translation = setting.translate(Run(Config(training=TrainingConfig(train_iters=1))))
        assert not (translation.values or translation.implied or translation.dropped)


# ---- values ----------------------------------------------------------------------------------------------------------

alone, refuse = refusals.alone, refusals.refuse  # fixtures


def test_a_checkpoint_of_megatron_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "iter_0000010"):
        with pytest.raises(CheckpointError, match=f"--from megatron --to megacore --input {given} --output DIR"):
            find_checkpoint(given)


# ---- --sample-order megatron -----------------------------------------------------------------------------------------

LENGTHS = (7, 3, 12, 1, 9, 5, 20, 2, 6, 8)
Case = tuple[int, int, int]  # samples, sequence length, seed
# The first token of each sample, and a sum over all labels. One epoch; two, of which the last is shuffled by itself;
# two shuffled together; several of both kinds; and a blend.
MADE = json.loads(Path(__file__).with_name("megatron_order.json").read_text())
GOLDEN: dict[Case, tuple[list[int], int]] = {tuple(case): tuple(made) for case, made in MADE["cases"]}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    """Two datasets: documents of several lengths full of different tokens, and documents of ten."""
    documents, first = [], 1
    for length in LENGTHS:
        documents.append([list(range(first, first + length))])
        first += length
    data_bytes.write(tmp_path / "a", documents)
    data_bytes.write(tmp_path / "b", [[[1000 + 10 * i + j for j in range(10)]] for i in range(30)])
    return str(tmp_path / "a"), str(tmp_path / "b")


def samples(case: Case, *data_path: str, **data: Any) -> Any:
    """The training samples of a run of `case[0]` steps of one sample."""
    count, seq_length, seed = case
    config = Config(
        model=ModelConfig(vocab_size=2000),
        data=DataConfig(data_path=data_path, seq_length=seq_length, split="1", **{"sample_order": "megatron", **data}),
        training=TrainingConfig(train_iters=count, global_batch_size=1, seed=seed, eval_interval=0),
    ).resolve(1)
    return build_datasets(config).train


def summary(dataset: Any) -> tuple[list[int], int]:
    numbers = range(len(dataset))
    firsts = [int(dataset[k]["tokens"][0]) for k in numbers]
    return firsts, sum(int(dataset[k]["labels"].sum()) * (k + 1) for k in numbers)


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_samples_come_in_megatrons_order(case: Case, paths: tuple[str, str]) -> None:
    assert summary(samples(case, paths[0])) == GOLDEN[case]
    assert summary(samples(case, paths[0], sample_order="megacore")) != GOLDEN[case]


def test_a_blend_is_megatrons(paths: tuple[str, str]) -> None:
    assert summary(samples((40, 7, 5), "0.3", paths[0], "0.7", paths[1])) == tuple(MADE["blend"])
