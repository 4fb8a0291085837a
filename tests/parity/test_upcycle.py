"""A dense checkpoint becomes a mixture that computes the same, and that trains from there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.inference.trained import model_of
from megacore.models.gpt import gpt_layers
from tests.e2e.launching import words
from tests.parity.conversions import to_megacore
from tests.parity.hf_models import make_model, save_model, tokens
from tools.convert_checkpoint import main as convert


def upcycle(source: Path, target: Path, experts: int, **flags: int) -> int:
    return convert(
        [*words(input=source, output=target, upcycle=experts, **flags), "--from", "megacore", "--to", "megacore"]
    )


def test_the_mixture_computes_what_the_dense_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("mistral")
    to_megacore(save_model(model, tmp_path / "hf"), tmp_path / "dense")
    assert upcycle(tmp_path / "dense", tmp_path / "mixture", 4, moe_router_topk=3) == 0
    assert "tokens: logits differ by at most" in capsys.readouterr().out
    tensors = CheckpointTensors(tmp_path / "mixture")
    assert tensors.config.experts is not None
    assert (tensors.config.experts.num_experts, tensors.config.experts.moe_router_topk) == (4, 3)
    stage = model_of(tmp_path / "mixture", partial(gpt_layers, tensors.config), torch.device("cpu"))
    batch = tokens()
    with torch.no_grad():
        assert (stage(batch)[..., : tensors.config.vocab_size] - model(batch).logits).abs().max() <= 1e-5
    routers = tensors.read("blocks.0.mlp.router.weight"), tensors.read("blocks.1.mlp.router.weight")
    assert not torch.equal(*routers)
    assert all(0.5 < float(router.std() / tensors.config.init_method_std) < 1.5 for router in routers)


@pytest.mark.parametrize(
    ("name", "experts", "flags", "said"),
    [
        ("gpt2", 4, {}, "has biases in its linear layers"),
        ("mistral", 2, {"moe_router_topk": 3}, "--moe-router-topk 3 must be at most --num-experts 2"),
        ("mistral", 4, {"moe_router_topk": 1}, "--moe-router-topk 1 gives every expert the weight 1"),
    ],
)
def test_what_cannot_be_is_refused(
    name: str, experts: int, flags: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_megacore(save_model(make_model(name), tmp_path / "hf"), tmp_path / "dense")
    assert upcycle(tmp_path / "dense", tmp_path / "mixture", experts, **flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "mixture").exists()
