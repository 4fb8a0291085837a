"""Rules by name, layer-wise decay and frozen parameters, against torch.optim with one parameter group per parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.config import validate
from megacore.errors import ConfigError
from megacore.train.trainer import Trainer
from tests.parity.runs import gather, make_config, outcome_of, trainer_of
from tools import mup_check

RULES = ("blocks.0.*:freeze", "*.mlp.*.weight:lr=0.5,weight-decay=3", "embedding.*:weight-decay=0")
CHANGES: dict[str, Any] = {"param_group": RULES, "lr_layer_decay": 0.5, "num_layers": 3, "train_iters": 4}


def factors(name: str) -> tuple[float, float]:
    """Of the learning rate and of the weight decay, by hand."""
    depth = {"blocks.0.": 3, "blocks.1.": 2, "blocks.2.": 1, "embedding": 4}.get(name[:9], 0)
    if name.startswith("blocks.0."):
        return 0.0, 0.0
    if ".mlp." in name and name.endswith(".weight"):
        return 0.5 * 0.5**depth, 3.0
    return 0.5**depth, 0.0 if name.startswith("embedding.") else 1.0


def require_torchs_updates(
    trainer: Trainer, decays: dict[str, float], rates: Callable[[str, int, float], float]
) -> None:
    """Train, and compare with torch's AdamW, which has a group for each parameter.

    Args:
        trainer: without clipping.
        decays: weight decay by name.
        rates: learning rate of a name and a step, given the step's.
    """
    parameters = trainer.model.parameters
    copies = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    groups = [{"params": [copy], "weight_decay": decays[name]} for name, copy in copies.items()]
    twin = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    for step in range(trainer.config.training.train_iters):
        result = trainer.train_step(next(trainer.batches))
        for group, (name, copy) in zip(twin.param_groups, copies.items(), strict=True):
            group["lr"] = rates(name, step, result.lr)
            gradient = parameters[name].grad
            assert gradient is not None
            copy.grad = gradient.clone()
        twin.step()
    for name, copy in copies.items():
        torch.testing.assert_close(parameters[name].detach(), copy, rtol=1e-6, atol=1e-7, msg=name)


def test_updates_are_torchs_with_a_group_per_parameter(tmp_path: Path) -> None:
    trainer = trainer_of((1, 1, 1), tmp_path, clip_grad=0.0, **CHANGES)
    decays = {n: 0.1 * factors(n)[1] if p.dim() > 1 else 0.0 for n, p in trainer.model.parameters.items()}
    require_torchs_updates(trainer, decays, lambda name, step, lr: factors(name)[0] * lr)


DECOUPLED: dict[str, Any] = {
    "lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 4e-3, "decoupled_min_lr": 2e-3, "lr_warmup_iters": 2, "train_iters": 5,
    "untie_embeddings_and_output_weights": True, "lr_decay_style": "linear", "adam_beta2": 0.999,
}  # fmt: skip
USUAL = [0.5e-3, 1e-3, 0.7e-3, 0.4e-3, 0.1e-3]
OUTER = [2e-3, 4e-3, 4e-3 - 2e-3 / 3, 4e-3 - 4e-3 / 3, 2e-3]


def test_embedding_and_head_have_the_rate_of_decoupled_lr(tmp_path: Path) -> None:
    """As Megatron-LM's two parameter groups; the rates are computed by hand."""
    trainer = trainer_of((1, 1, 1), tmp_path, clip_grad=0.0, weight_decay=0.0, **DECOUPLED)

    def rate(name: str, step: int, lr: float) -> float:
        assert lr == pytest.approx(USUAL[step], rel=1e-12)
        return OUTER[step] if name in ("embedding.tokens.weight", "head.weight") else USUAL[step]

    require_torchs_updates(trainer, dict.fromkeys(trainer.model.parameters, 0.0), rate)


def test_the_norm_is_that_of_what_learns(tmp_path: Path) -> None:
    trainer = trainer_of((1, 1, 1), tmp_path, **CHANGES)
    result = trainer.train_step(next(trainer.batches))
    gradients = [p.grad for name, p in trainer.model.parameters.items() if not name.startswith("blocks.0.")]
    scale = min(1.0, trainer.config.optimizer.clip_grad / float(result.grad_norm))  # they have been clipped
    total = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm() / scale
    assert float(result.grad_norm) == pytest.approx(float(total), rel=1e-5)


def test_a_rule_about_nothing_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "disable_bias_linear": True}
    with pytest.raises(ConfigError, match=r"--param-group \*\.bias: no parameter has such a name") as refused:
        trainer_of((1, 1, 1), tmp_path, param_group=("*.bias:freeze",), **changes)
    # Both patterns that it names match something.
    for pattern in re.findall(r"'(.+?)'", str(refused.value)):
        trainer_of((1, 1, 1), tmp_path, param_group=(f"{pattern}:freeze",), **changes)


# ---- muP -------------------------------------------------------------------------------------------------------------

HIDDEN = ("qkv.weight", "output.weight", "up.weight", "down.weight")


def mup_trainer(directory: Path, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": 3, "micro_batch_size": 1, "lr_warmup_iters": 1}
    return trainer_of((1, 1, 1), directory, **{**fixed, **changes})


def test_table_8(tmp_path: Path) -> None:
    """Four times the base width, and heads of twice the size."""
    mup = {"mup_base_width": 16, "mup_base_head_size": 8}
    wide, usual = (
        mup_trainer(tmp_path, hidden_size=64, untie_embeddings_and_output_weights=True, **changes)
        for changes in (mup, {})
    )
    model = wide.config.model
    assert model.logits_divisor == 4
    assert model.score_multiplier == pytest.approx(math.sqrt(8) / 16)
    drawn, plain = (gather(trainer, trainer.mesh, lambda owned: owned.master) for trainer in (wide, usual))
    for local in wide.model.data_parallel.segments:
        name, hidden = local.spec.name, local.spec.name.endswith(HIDDEN)
        torch.testing.assert_close(drawn[name], plain[name] / (2 if hidden else 1))
        assert local.run.scale.lr == (0.25 if hidden else 1), name
        assert local.run.scale.weight_decay == (4 if hidden else 1), name
        assert not local.run.scale.frozen


def test_the_base_width_is_the_usual_model(tmp_path: Path) -> None:
    base, usual = (outcome_of(mup_trainer(tmp_path, **changes)) for changes in ({"mup_base_width": 32}, {}))
    assert base.losses == usual.losses


def test_the_resolved_configuration_is_resolved_to_itself(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, mup_base_width=16, mup_base_head_size=4)
    assert validate(config, 1) == []
    assert config.resolve(1) == config


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_changes_do_not_depend_on_the_width(optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinate check: Yang et al. 2022, appendix D.1."""
    picture = tmp_path / "mup.svg"
    words = ["--widths", "32", "64", "128", "--steps", "4", "--optimizer", optimizer, "-o", str(picture)]
    assert mup_check.main(words) == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:5]]
    hidden, logits, usual_hidden, usual_logits = (float(slope) for _, slope in rows)
    assert abs(hidden) < 0.2 and abs(logits) < 0.25
    assert usual_hidden > 0.4 and usual_logits > 0.6
    assert all(f">change of {quantity}, muP<" in picture.read_text() for quantity in mup_check.QUANTITIES)
