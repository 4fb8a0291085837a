"""Every family against transformers' model of it with the same weights, and against itself on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.ops import cross_entropy
from megacore.parallel.cross_entropy import vocabulary_share
from megacore.parallel.mesh import Mesh, build_mesh, compute_reproducibly
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.distributed import run_distributed
from tests.parity.families import FAMILIES, POSITIONS, VOCAB, model_config, reference, translated
from tests.parity.runs import Layout, Outcome, agree, bitwise, make_config, train_on

CPU = torch.device("cpu")


@pytest.mark.parametrize("implementation", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_is_transformers(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    model, config = reference(family), model_config(family)
    assert config.problems() == []
    context = BuildContext(device=CPU, streams=RandomStreams(0, CPU), attention=implementation)  # type: ignore[arg-type]
    stage = Stage(gpt_layers(config, context)).eval()
    parameters, values = stage.by_name(), translated(family, dict(model.named_parameters()))
    assert parameters.keys() == values.keys()
    assert len(values) + 2 * sum("qkv" in n for n in values) * (name not in ("neox", "bloom")) == len(
        list(model.parameters())
    ), "a tensor of theirs has no counterpart"
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.zero_()
            parameter.spec.unpadded(parameter).copy_(values[key])

    tokens = torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, labels=tokens)
    logits = stage(tokens)[..., :VOCAB]
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    loss = cross_entropy(logits[:, :-1], tokens[:, 1:], share=vocabulary_share(VOCAB)).mean()
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-6)

    loss.backward()
    expected.loss.backward()
    wanted = translated(family, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for key, parameter in parameters.items():
        assert parameter.grad is not None
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        error = (parameter.spec.unpadded(parameter.grad) - wanted[key]).abs().max()
        assert error <= 1e-5 * wanted[key].abs().max() + 1e-7, f"gradient of {key}: {error}"


# Family, layout, and what else is on. Four ranks each, so that one launch trains them all.
Case = tuple[str, Layout, dict[str, Any]]
FEW: list[Case] = [
    ("llama3", (4, 1, 1), {"sequence_parallel": True, "recompute": "selective"}),  # tp above key and value heads
    ("llama-dynamic", (1, 2, 2), {"zero_stage": 2}),
    ("mistral", (2, 2, 1), {"recompute": "selective"}),
    ("qwen2", (1, 2, 2), {"schedule": "interleaved", "virtual_stages": 2}),
    ("qwen2", (2, 1, 2), {"schedule": "zero-bubble", "zero_stage": 3}),  # weight gradients in an order of their own
    ("qwen3", (4, 1, 1), {}),
    ("qwen3", (2, 1, 2), {"zero_stage": 3, "recompute": "full", "sequence_parallel": True}),
    ("one key and value head", (2, 2, 1), {"schedule": "zero-bubble"}),
    ("norm of all heads", (4, 1, 1), {"sequence_parallel": True}),
    ("norm of all heads", (2, 2, 1), {"schedule": "zero-bubble"}),
    ("norm of each head", (4, 1, 1), {}),
    ("norm of each head", (2, 2, 1), {"sequence_parallel": True, "schedule": "zero-bubble"}),
    ("neox", (2, 2, 1), {"sequence_parallel": True}),
    ("bloom", (4, 1, 1), {"sequence_parallel": True}),
    ("bloom", (2, 2, 1), {"recompute": "full"}),
]
MORE: list[Case] = [
    ("llama2", (2, 1, 2), {"zero_stage": 3, "sequence_parallel": True}),
    ("llama2", (2, 2, 1), {}),
    ("llama2", (1, 4, 1), {}),
    ("llama3", (4, 1, 1), {}),
    ("llama3", (2, 2, 1), {"schedule": "zero-bubble"}),
    ("llama3", (2, 1, 2), {"reproducible": True}),
    ("mistral", (1, 4, 1), {}),
    ("mistral", (4, 1, 1), {"attention": "fused-softmax"}),
    ("qwen2", (4, 1, 1), {"reproducible": True}),
    ("qwen2", (2, 1, 2), {"zero_stage": 1}),
    ("qwen3", (2, 2, 1), {"sequence_parallel": True}),
    ("one key and value head", (4, 1, 1), {"sequence_parallel": True}),
    ("norm of all heads", (4, 1, 1), {}),
    ("norm of all heads", (2, 1, 2), {"zero_stage": 3, "recompute": "full"}),
    ("LayerNorm of all heads", (2, 1, 2), {"sequence_parallel": True, "recompute": "light"}),
    ("LayerNorm of all heads", (4, 1, 1), {}),
    ("norm of each head", (4, 1, 1), {"sequence_parallel": True, "recompute": "selective"}),
    ("norm of each head", (2, 1, 2), {"zero_stage": 3, "recompute": "full"}),
    ("norm of each head", (4, 1, 1), {"reproducible": True}),
    ("RMSNorm of each head", (2, 1, 2), {"sequence_parallel": True, "recompute": "light"}),
    ("neox", (4, 1, 1), {"sequence_parallel": True}),
    ("neox", (2, 2, 1), {"schedule": "zero-bubble"}),
    ("neox", (1, 2, 2), {"zero_stage": 1, "recompute": "full"}),
    ("bloom", (1, 1, 4), {"zero_stage": 3}),
    ("bloom", (2, 2, 1), {"schedule": "zero-bubble"}),
]


def shape_of(name: str, blocks: int = 4) -> dict[str, Any]:
    """A small model of the family, whose inner sizes no tensor-parallel layout divides by accident."""
    if name == "one key and value head":
        return {**shape_of("qwen3", blocks), "num_query_groups": 1, "add_qkv_bias": True}
    if name == "norm of all heads":
        return {**shape_of("qwen3", blocks), "qk_layernorm_all_heads": True}
    if name == "RMSNorm of each head":
        return {**shape_of("qwen3", blocks), "qk_layernorm_per_head": True, "layernorm_1p": True}
    if name == "norm of each head":
        return {**shape_of("qwen3", blocks), "qk_layernorm_per_head": True, "normalization": "LayerNorm"}
    if name == "LayerNorm of all heads":
        return {**shape_of("norm of all heads", blocks), "normalization": "LayerNorm"}
    family = FAMILIES[name]
    return {"num_query_groups": family.groups, **family.changes, "num_layers": blocks, "train_iters": 3}


def model_of(case: Case) -> tuple[str, int]:
    """What a case trains: the family, and two blocks or as many as it has stages."""
    name, (_, pp, _), changes = case
    return name, max(2, pp * changes.get("virtual_stages", 1))


def train_alone(directory: str, **changes: Any) -> Outcome:
    """One process; all ranks do this at once, each in a directory of its own: a run sets an earlier one's files
    aside."""
    return train_on(Mesh(device=CPU), make_config((1, 1, 1), directory, **changes))


def train_all(
    rank: int, world_size: int, cases: list[Case], directory: str
) -> tuple[dict[tuple[str, int], Outcome], list[Outcome]]:
    """One process of each model, dealt out to the ranks, and every layout, all ranks together."""
    models = list(dict.fromkeys(map(model_of, cases)))[rank::world_size]
    mine = {model: train_alone(f"{directory}/{rank}", **shape_of(*model)) for model in models}
    found = []
    for case in cases:
        _, layout, changes = case
        config = make_config(layout, directory, **shape_of(*model_of(case)), **changes)
        found.append(train_on(build_mesh(config.parallel), config))
    return mine, found if rank == 0 else []


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(MORE, id="more", marks=pytest.mark.slow)])
def test_every_family_is_the_same_on_every_layout(cases: list[Case], tmp_path: Path) -> None:
    replies = run_distributed(train_all, 4, cases, str(tmp_path), timeout=200)
    alone = {model: outcome for mine, _ in replies for model, outcome in mine.items()}
    for case, found in zip(cases, replies[0][1], strict=True):
        print(*case)  # shown where it fails
        agree(found, alone[model_of(case)])


def train_reproducibly(rank: int, world_size: int, directory: str) -> list[Outcome]:
    """Each family in one process and on two layouts of the same tp."""
    compute_reproducibly()
    found = []
    for name in ("llama3", "qwen3", "neox", "bloom"):
        changes = {**shape_of(name), "reproducible": True}
        found.append(train_alone(f"{directory}/{rank}", **changes))
        for layout, zero_stage in (((1, 2, 2), 3), ((1, 4, 1), 0)):
            config = make_config(layout, directory, **changes, zero_stage=zero_stage)
            found.append(train_on(build_mesh(config.parallel), config))
    return found


@pytest.mark.slow
def test_reproducible_families_are_bitwise_the_same(tmp_path: Path) -> None:
    found = run_distributed(train_reproducibly, 4, str(tmp_path), timeout=200)[0]
    for one, *others in (found[i : i + 3] for i in range(0, len(found), 3)):
        for other in others:
            bitwise(other, one)
