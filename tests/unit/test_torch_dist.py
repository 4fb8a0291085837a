"""Megatron-LM's torch_dist format, written by two ranks in the ways that Megatron core divides tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.dcp_files import open_dcp
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.unit.megatron_files import (
    GROUPED,
    GROUPED_ARGS,
    POSITIONS,
    core_attention,
    core_embedding,
    core_head,
    core_layers,
    core_mlp,
    llama,
    require_tensors,
    save_common,
    tensors_of,
)
from tools.convert_checkpoint import main as convert

LLAMA = llama(**GROUPED).resolve(seq_length=POSITIONS)


def core_tensors(values: dict[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """By the names of Megatron core; layers along the first dimension, or each with its number."""
    blocks = [core_attention(values, i, 1, 0) | core_mlp(values, i, 1, 0) for i in range(LLAMA.num_layers)]
    return core_embedding(values) | core_head(values) | core_layers(blocks, stacked=stacked)


def save(rank: int, ranks: int, tensors: dict[str, Tensor], target: str) -> None:
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
    values = tensors_of(LLAMA)
    source = tmp_path / "megatron" / "iter_0000007"
    run_distributed(save, 2, core_tensors(values, stacked=stacked), str(source))
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7")
    name = "torch_dist" if stacked else "megatron"
    flags = words(input=tmp_path / "megatron", output=tmp_path / "out")
    assert convert([*flags, "--from", name, "--to", "megacore"]) == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == LLAMA


def test_without_flags_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "megatron", no_dist=True)
    flags = words(input=tmp_path / "megatron", output=tmp_path / "out")
    assert convert([*flags, "--from", "torch_dist", "--to", "megacore"]) == 2
    assert "common.pt is missing" in capsys.readouterr().err


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
