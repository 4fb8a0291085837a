"""Multi-token prediction against transformers' own layers for it, which load what conversion writes: logits and
gradients of every depth. A directory with such layers comes back as it was."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from megacore.checkpoint.manifest import read_manifest, trained_model
from megacore.convert.plan import make_plan
from megacore.inference.trained import model_of
from megacore.models.gpt import gpt_layers
from megacore.models.hf.families import FAMILIES
from tests.parity.conversions import forget_the_config, require_same, to_hf, to_megacore, weights
from tests.parity.hf_models import VOCAB, as_stored, assembled, make_model, save_model, tokens

BLOCKS = ("model.layers.3.", "model.layers.4.")
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def with_later_layers(directory: Path) -> dict[str, Tensor]:
    """The weights of a DeepSeek-V3 of three layers, saved with two more, which are like the last one."""
    stored, draw = weights(save_model(make_model("deepseek-v3"), directory)), torch.Generator().manual_seed(1)
    h, last = stored["lm_head.weight"].shape[1], "model.layers.2."
    shapes = {name.removeprefix(last): list(value.shape) for name, value in stored.items() if name.startswith(last)}
    shapes |= {f"{name}.weight": [h] for name in ("enorm", "hnorm", "shared_head.norm")} | {
        "eh_proj.weight": [h, 2 * h]
    }
    for block, (name, shape) in ((block, item) for block in BLOCKS for item in shapes.items()):
        stored[block + name] = 0.2 * torch.randn(shape, generator=draw) + name.endswith("norm.weight")
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": len(BLOCKS)}))
    return stored


def test_logits_gradients_and_files_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, ours, anew, batch = with_later_layers(tmp_path / "hf"), tmp_path / "ours", tmp_path / "anew", tokens()
    to_megacore(tmp_path / "hf", ours)
    to_hf(ours, tmp_path / "back")
    require_same(weights(tmp_path / "back"), stored)
    forget_the_config(ours)
    to_hf(ours, anew)
    require_same(weights(anew), stored | {b + end: stored[name] for b in BLOCKS for end, name in SHARED.items()})
    kind, labels = transformers.DeepseekV3ForCausalLM, [F.pad(batch[:, n:], (0, n)) for n in (1, 2, 3)]
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"{block}.*" for block in BLOCKS])
    model = kind.from_pretrained(anew, attn_implementation="eager")
    later, positions = MtpModel.from_pretrained(model), torch.arange(batch.shape[1])[None]
    hidden = [model.model(batch).last_hidden_state]
    for depth in range(len(BLOCKS)):
        hidden.append(later.forward_layer(depth, hidden[-1], positions, None, input_ids=labels[depth]))
    config = trained_model(read_manifest(ours), ours)
    stage = model_of(ours, partial(gpt_layers, config), torch.device("cpu"))
    side = torch.ones_like(batch), positions.expand_as(batch)  # one document, and its positions
    found = stage((batch, *side), lambda: (torch.stack(labels), torch.ones(3, *batch.shape), torch.ones(3)))
    logits, expected = [one[..., :VOCAB] for one in found], [model.lm_head(one) for one in hidden]
    for one, other in zip(logits, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5
    for each in (logits, expected):
        torch.stack([F.cross_entropy(one.mT, label) for one, label in zip(each, labels, strict=True)]).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in later.layers.named_parameters():
        local = name[2:].replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        theirs[BLOCKS[int(name[0])] + local] = parameter.grad
    steps = [step for step in make_plan(FAMILIES["deepseek_v3"], config) if not step.is_buffer]
    for name, gradient in assembled(steps, as_stored(theirs)).items():
        parameter = stage.by_name()[name]
        assert parameter.grad is not None
        error = (parameter.spec.unpadded(parameter.grad) - gradient).abs().max()
        assert error <= 1e-5 * gradient.abs().max() + 1e-7, f"gradient of {name}: {error}"
