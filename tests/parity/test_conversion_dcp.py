"""Checkpoints of torch.distributed.checkpoint: what two ranks write as DTensors is read, and what is written is loaded
by two ranks. A Llama of transformers is the proof, in its own names and in torchtitan's."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megacore.convert import dcp_files
from megacore.convert.as_hf import export_dcp, read_dcp, write_hf
from megacore.convert.dcp_files import INDEX, open_dcp
from megacore.errors import CheckpointError
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.parity.hf_models import make_model, save_model
from tests.unit.hostile import Payload
from tools.convert_checkpoint import main as convert

HEADS, GROUPS, HIDDEN, HEAD = 4, 2, 32, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of transformers with a Llama of random weights."""
    path = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": 2}
    rest = {"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**shape, **rest)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def paired(value: Tensor, heads: int) -> Tensor:
    """Rows of a projection as torchtitan has them, written out one row at a time."""
    result, half = torch.empty_like(value), HEAD // 2
    for head in range(heads):
        for i in range(half):
            result[head * HEAD + 2 * i] = value[head * HEAD + i]
            result[head * HEAD + 2 * i + 1] = value[head * HEAD + half + i]
    return result


TITAN = """
self_attn.q_proj: attention.wq  self_attn.k_proj: attention.wk  self_attn.v_proj: attention.wv
self_attn.o_proj: attention.wo  input_layernorm: attention_norm  post_attention_layernorm: ffn_norm
mlp.gate_proj: feed_forward.w1  mlp.down_proj: feed_forward.w2  mlp.up_proj: feed_forward.w3
embed_tokens: tok_embeddings  lm_head: output
"""


def titan(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's weights by the names and in the order of torchtitan."""
    named = {}
    for name, value in weights.items():
        turned = paired(value, HEADS) if "q_proj" in name else paired(value, GROUPS) if "k_proj" in name else value
        theirs = name.removeprefix("model.")
        for hf, short in re.findall(r"(\S+): (\S+)", TITAN):
            theirs = theirs.replace(hf, short)
        named[theirs] = turned
    return named


def save_sharded(rank: int, ranks: int, weights: dict[str, Tensor], target: str) -> None:
    """As FSDP2 does: every tensor along its first dimension; a few are split otherwise, or not at all."""
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(weights.items()):
        place = Replicate() if number % 5 == 4 else Shard(1 if number % 5 == 3 and value.dim() > 1 else 0)
        state[name] = distribute_tensor(value, mesh, [place])
    more = {"optimizer": {"state.a.exp_avg": state[name]}, "train_state": {"step": torch.tensor(3)}, "note": "text"}
    dcp.save({**state, **more}, checkpoint_id=target)


def load_sharded(rank: int, ranks: int, shapes: dict[str, Any], source: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(0)])
        for name, (shape, dtype) in shapes.items()
    }
    dcp.load(state, checkpoint_id=source)
    return {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}


def test_what_two_ranks_write_is_read_whole_and_by_the_names_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = {"q_proj": HIDDEN, "k_proj": GROUPS * HEAD, "v_proj": GROUPS * HEAD, "o_proj": HIDDEN}
    weights = {f"model.layers.0.self_attn.{name}.weight": torch.randn(size, HIDDEN) for name, size in rows.items()}
    weights |= {"model.embed_tokens.weight": torch.randn(61, HIDDEN), "model.norm.weight": torch.randn(HIDDEN)}
    weights |= {"lm_head.weight": torch.randn(61, HIDDEN).bfloat16()}
    stored = titan(weights)
    run_distributed(save_sharded, 2, stored, str(tmp_path / "dcp"))
    read = read_dcp(tmp_path / "dcp")
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name][2](), value) for name, value in stored.items())
    (tmp_path / "like").mkdir()
    config: dict[str, Any] = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    write_hf(tmp_path / "hf", read, tmp_path / "like", "here")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    export_dcp(tmp_path / "hf", tmp_path / "back", "torchtitan")
    back = open_dcp(tmp_path / "back")
    assert all(torch.equal(back[name].read(), value) for name, value in stored.items())
    for other, said in (
        ({"model_type": "gemma"}, "model_type gemma"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type yarn"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(CheckpointError, match=f"another model than this one, of {said}: use --dcp-names hf"):
            export_dcp(tmp_path / "hf", tmp_path / "other", "torchtitan")


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", pytest.param("qwen2-moe", marks=pytest.mark.slow)])
def test_experts_that_are_stacked_in_memory_are_apart_in_a_directory(name: str, tmp_path: Path) -> None:
    """Parameters of transformers' model, as FSDP2 and DeepSpeed save them, against what `save_pretrained` writes."""
    model = make_model(name)
    saved = save_model(model, tmp_path / "saved")
    held = {name: value.detach() for name, value in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in held)
    source = {name: (value.dtype, tuple(value.shape), value.clone) for name, value in held.items()}
    write_hf(tmp_path / "hf", source, saved, "here")
    written, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", saved))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    export_dcp(saved, tmp_path / "back", "hf")
    back = open_dcp(tmp_path / "back")
    assert back.keys() == held.keys()
    assert all(torch.equal(back[name].read(), value) for name, value in held.items())


@pytest.mark.parametrize("names", [pytest.param("torchtitan", marks=pytest.mark.slow), "hf"])
def test_two_ranks_write_and_two_ranks_load(names: str, llama: Path, tmp_path: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    stored = weights if names == "hf" else titan(weights)
    run_distributed(save_sharded, 2, stored, str(tmp_path / "dcp"))
    into = words(input=tmp_path / "dcp", output=tmp_path / "out", like=llama)
    assert convert([*into, "--from", "dcp", "--to", "megacore"]) == 0
    back = words(input=tmp_path / "out", output=tmp_path / "hf")
    assert convert([*back, "--from", "megacore", "--to", "hf"]) == 0
    assert all(
        torch.equal(value, weights[name]) for name, value in load_file(tmp_path / "hf/model.safetensors").items()
    )
    there = words(input=tmp_path / "out", output=tmp_path / "again", dcp_names=names)
    assert convert([*there, "--from", "megacore", "--to", "dcp"]) == 0
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in stored.items()}
    for loaded in run_distributed(load_sharded, 2, shapes, str(tmp_path / "again")):
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[name], value) for name, value in stored.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "dcp", "hf", "out"]


# ---- refusals


@pytest.fixture
def small(tmp_path: Path) -> Path:
    dcp.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_an_index_that_runs_something_is_refused(small: Path, tmp_path: Path) -> None:
    (small / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "marker")))
    with pytest.raises(CheckpointError, match=r"it mentions posix\.mkdir, which megacore does not load"):
        open_dcp(small)
    assert not (tmp_path / "marker").exists()


def test_an_index_that_leads_elsewhere_or_beyond_a_file_is_refused(small: Path) -> None:
    index = (small / ".metadata").read_bytes()
    stored = open_dcp(small)
    assert torch.equal(stored["a"].read(), torch.arange(6.0).view(2, 3))
    (small / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match="names a file outside itself"):
        open_dcp(small)
    (small / ".metadata").write_bytes(index)
    file = small / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"fewer than the index says|is damaged"):
        open_dcp(small)["b"].read()
    (small / ".metadata").write_bytes(index[:-50])
    with pytest.raises(CheckpointError, match="was not loaded"):
        open_dcp(small)
    (small / ".metadata").write_bytes(index)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"^\S*__0_0.distcp is missing"):
        open_dcp(small)


def test_a_conversion_without_a_description_of_the_model_is_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert([*words(input=small, output=tmp_path / "out"), "--from", "dcp", "--to", "megacore"]) == 2
    assert "--from dcp needs --like DIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(dcp_files.KNOWN))
def test_an_index_cannot_change_what_its_names_stand_for(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    made = dcp_files.KNOWN[name]
    defaults = getattr(made, "__defaults__", None)
    # A name, and the state (None, {"__defaults__": (7,)}) for the object itself: attributes to be set.
    given = f"c{module}\n{attribute}\n".encode() + b"N}X\x0c\x00\x00\x00__defaults__K\x07\x85s\x86b"
    (tmp_path / INDEX).write_bytes(b"\x80\x02" + given + b".")
    with pytest.raises(CheckpointError, match="was not loaded"):
        open_dcp(tmp_path)
    assert getattr(made, "__defaults__", None) == defaults
