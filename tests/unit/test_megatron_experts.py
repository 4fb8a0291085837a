"""Mixtures of experts of Megatron core, written here in its layouts from known tensors: they come out bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megacore.config import ExpertsConfig, ResolvedModel
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.megatron_config import model_of
from megacore.errors import CheckpointError
from tests.unit.megatron_files import (
    HIDDEN,
    LAYERS,
    LLAMA_ARGS,
    POSITIONS,
    changed,
    columns,
    convert_megatron,
    core_attention,
    core_embedding,
    core_head,
    core_layers,
    core_mlp,
    gated,
    llama,
    refused,
    require_tensors,
    rows,
    save,
    save_common,
    state,
    tensors_of,
)

EXPERTS = 4
DENSE = llama().resolve(seq_length=POSITIONS)
SECTION = ExpertsConfig(
    num_experts=EXPERTS,
    moe_ffn_hidden_size=8,
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_shared_expert_size=12,
    moe_shared_expert_gate=True,
    moe_first_dense_layers=1,
    moe_layer_freq=2,
)
MODEL: ResolvedModel = dataclasses.replace(DENSE, experts=SECTION.resolve(24))
ARGS: dict[str, Any] = {
    **LLAMA_ARGS,
    "num_layers": LAYERS,
    "num_experts": EXPERTS,
    "moe_ffn_hidden_size": 8,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,  # as recipes of DeepSeek-V3 have it; without effect
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_shared_expert_intermediate_size": 12,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": [0, 1, 0, 1],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_grouped_gemm": True,
}


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
        for local, matrix in enumerate(matrices):
            name = (
                f"local_experts.{local}.linear_fc{fc}.weight"
                if form == "sequential"
                else f"linear_fc{fc}.weight{local}"
            )
            found[f"mlp.experts.{name}"] = matrix
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


def write(path: Path, values: dict[str, Tensor], *, tp: int, pp: int, ep: int, form: str, **args: Any) -> None:
    """The torch format: a file for each tensor-, pipeline- and expert-parallel rank."""
    sizes = {f"{kind}_model_parallel_size": n for kind, n in (("tensor", tp), ("pipeline", pp), ("expert", ep))}
    held, layers = EXPERTS // ep, LAYERS // pp
    for stage in range(pp):
        for of_experts_rank in range(ep):
            for rank in range(tp):
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
                made = state({"model": model}, 3.0, **{**ARGS, **sizes, **args})
                expert_rank = of_experts_rank if ep > 1 else None
                save(path, rank, stage if pp > 1 else None, made, expert_rank=expert_rank)


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "form"),
    [
        (1, 1, 1, "sequential"),
        (2, 1, 2, "grouped"),
        (2, 2, 2, "joined"),
        (1, 2, 4, "sequential"),
        (2, 2, 1, "grouped"),
        (1, 1, 4, "joined"),
    ],
)
def test_experts_of_all_ranks_are_stacked(tp: int, pp: int, ep: int, form: str, tmp_path: Path) -> None:
    values = tensors_of(MODEL)
    write(tmp_path / "megatron", values, tp=tp, pp=pp, ep=ep, form=form)
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out") == 0
    require_tensors(tmp_path / "out", values)
    found = CheckpointTensors(tmp_path / "out")
    assert found.config == MODEL
    assert set(found.manifest.tensors["buffers"]) == {f"blocks.{i}.mlp.router.bias" for i in (1, 3)}


def test_a_bias_that_was_cast_is_fp32_again(tmp_path: Path) -> None:
    values = tensors_of(MODEL)
    values = {name: value.bfloat16() for name, value in values.items()}
    write(tmp_path / "megatron", values, tp=1, pp=1, ep=1, form="grouped")
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
    save_common(source, **{**ARGS, **sizes, **({"moe_layer_freq": 1} if stacked else {})})
    assert convert_megatron(source, tmp_path / "out") == 0
    require_tensors(tmp_path / "out", values)
    assert CheckpointTensors(tmp_path / "out").config == config


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        (
            "decoder.layers.0.self_attention.linear_proj.weight",
            lambda x: x + 1,
            "differs from that of the first expert-",
        ),
        ("decoder.layers.1.mlp.router.weight", lambda x: x + 1, "differs from that of the first expert-parallel rank"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight1", lambda x: x[:-1], "experts.3.up.weight is (7, 16)"),
    ],
)
def test_ranks_that_do_not_fit_each_other_are_refused(
    name: str, make: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "megatron", tensors_of(MODEL), tp=1, pp=1, ep=2, form="grouped")
    source = changed(
        tmp_path / "megatron", lambda made: made["model"].update({name: make(made["model"][name])}), "mp_rank_00_001"
    )
    assert said in refused(source, tmp_path / "out", capsys)


def test_a_missing_expert_rank_and_split_experts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tensors_of(MODEL)
    write(tmp_path / "megatron", values, tp=2, pp=2, ep=2, form="grouped")
    (tmp_path / "megatron" / "mp_rank_01_001_001" / "model_optim_rng.pt").unlink()
    (tmp_path / "megatron" / "mp_rank_01_001_001").rmdir()
    said = refused(tmp_path / "megatron", tmp_path / "out", capsys)
    assert "lacks the file of tensor rank 1, pipeline rank 1, expert rank 1" in said
    write(tmp_path / "split", values, tp=2, pp=1, ep=1, form="grouped", expert_tensor_parallel_size=1)
    assert "reads such experts in the torch_dist format only" in refused(tmp_path / "split", tmp_path / "out", capsys)


LATE_SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
SMALL = {**ARGS, "hidden_size": 12, "num_attention_heads": 2, "max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"add_bias_linear": True}, "add_bias_linear is True, but experts have no biases in megacore"),
        ({"moe_layer_freq": [1, 1, 0, 1]}, "moe_layer_freq is .* every Nth block"),
        ({"moe_layer_freq": "[0]"}, "moe_layer_freq is"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is '1.0', which megacore does not have"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "is 'sinkhorn', which megacore does not have"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"moe_router_topk": "2"}, "moe_router_topk is '2', not a int"),
        ({"moe_router_topk": 9}, "moe-router-topk 9 must be at most --num-experts 4"),
        ({**LATE_SOFTMAX, "moe_router_enable_expert_bias": 0}, "moe_router_enable_expert_bias is '0', not a bool"),
        (LATE_SOFTMAX, "compared by sums of logits, and in megacore by sums of scores"),
    ],
)
def test_experts_that_are_another_model_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        model_of({**SMALL, **flags}, 64, 60, "here")


@pytest.mark.parametrize(
    ("pattern", "first", "frequency"), [(1, 0, 1), (2, 0, 2), ([0, 1, 1, 1], 1, 1), ([0, 0, 0, 1], 3, 1)]
)
def test_blocks_with_experts_are_those_of_the_flag(pattern: Any, first: int, frequency: int) -> None:
    experts = model_of({**SMALL, "moe_layer_freq": pattern}, 64, 60, "here").experts
    assert experts is not None
    assert (experts.moe_first_dense_layers, experts.moe_layer_freq) == (first, frequency)
