"""Latent attention with experts, beyond training in plain steps: compiled, recomputed, and generating text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.manifest import find_checkpoint, read_manifest, trained_model
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import model_of
from megacore.models.gpt import gpt_layers
from megacore.parallel.mesh import Mesh
from tests.matrix.programs import LATENT
from tests.parity.runs import Outcome, agree, make_config, make_trainer, train_on

CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_group_best": 1,
    "moe_shared_expert_size": 8,
    "moe_first_dense_layers": 1,
    "moe_aux_loss_coeff": 0.1,
}
COMPILED = {"compile": True, "compile_backend": "aot-eager"}


def outcome(directory: Path, **changes: Any) -> Outcome:
    config = make_config((1, 1, 1), directory, **LATENT | EXPERTS | {"train_iters": 2, "adam_eps": 1e-4} | changes)
    return train_on(Mesh(device=CPU), config)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "light"])
def test_compiled_code_computes_the_same(recompute: str, tmp_path: Path) -> None:
    plain = outcome(tmp_path / "plain")
    agree(outcome(tmp_path / "compiled", recompute=recompute, **COMPILED), plain)


def test_a_checkpoint_generates_what_the_trained_model_predicts(tmp_path: Path) -> None:
    changes = LATENT | EXPERTS | {"train_iters": 1, "lr_warmup_iters": 0}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=CPU))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    stage = model_of(directory, partial(gpt_layers, model), CPU)
    tokens = [5, 9, 2]
    found = list(generate(stage, model, tokens, max_new_tokens=4, sampling=Sampling(temperature=0.0)))
    trained = trainer.model.chunks[0].eval()
    with torch.no_grad():
        for _ in range(4):
            tokens = [*tokens, int(trained(torch.tensor([tokens]))[0, -1, : model.vocab_size].argmax())]
    assert found == tokens[3:]
