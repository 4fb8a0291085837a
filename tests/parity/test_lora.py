"""--lora-rank: training against plain torch in double precision, and adapters as PEFT has them, written out by hand.
Layouts, resumes and bits are rows of tests/matrix/rows.toml; memory is in test_memory.py."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megacore.checkpoint.manifest import base_of, read_manifest, trained_model
from megacore.config import LoraConfig, ResolvedModel, StartConfig
from megacore.convert.checkpoint_tensors import CheckpointTensors, write_weights
from megacore.convert.plan import whole_config
from megacore.errors import CheckpointError
from megacore.inference.trained import model_of
from megacore.layers.context import BuildContext
from megacore.layers.lora import StackedColumns, is_adapter
from megacore.models.gpt import gpt_layers
from megacore.models.spec import with_adapters
from megacore.parallel.mesh import Mesh
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.conversions import convert, require_same, to_hf, to_megacore, weights
from tests.parity.hf_models import make_model
from tests.parity.reference import gpt2_names, loss_of, rate, to_gpt2, twin_of
from tests.parity.runs import RaggedData, make_config, make_trainer, near, outcome_of

CPU = torch.device("cpu")
RANK, SCALE = 4, 2.0


def product(values: dict[str, Tensor], name: str, heads: int) -> Tensor:
    """B A of a layer. Query, key and value have an A each, one below the other; the rows of B go by head."""
    a, b = values[f"{name}.lora_a.weight"], values[f"{name}.lora_b.weight"]
    if not name.endswith("qkv"):
        return b @ a
    return torch.einsum("nkdr,kri->nkdi", b.unflatten(0, (heads, 3, -1)), a.unflatten(0, (3, -1))).flatten(0, 2)


def of_tokens(twin: nn.Module, state: dict[str, Tensor], tokens: Tensor) -> Any:
    return functional_call(twin, state, (tokens,))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_learn_as_in_plain_torch(dora: bool, tmp_path: Path) -> None:
    more = {"num_layers": 2, "train_iters": 6, "lr_warmup_iters": 1, "adam_eps": 1e-4, "lr": 1e-2, "weight_decay": 0.1}
    config = make_config((1, 1, 1), tmp_path, lora_rank=RANK, lora_alpha=RANK * SCALE, lora_dora=dora, **more)
    trainer = make_trainer(config, Mesh(device=CPU))
    (chunk,) = trainer.model.chunks
    held = {name: p.spec.unpadded(p).detach().double() for name, p in chunk.by_name().items()}
    with FlopCounterMode(display=False) as counter:
        found = outcome_of(trainer)
    assert counter.get_total_flops() == pytest.approx(6 * 8 * trainer.task.flops_per_sequence(), rel=0.1)  # full: 1.5
    learn = {name: value.clone().requires_grad_() for name, value in held.items() if is_adapter(name)}
    assert learn.keys() == found.final.keys()
    names, heads = gpt2_names(2), config.model.num_attention_heads
    twin, data = twin_of(config).double(), RaggedData(8 * 6)
    apart = [{"params": [value for value in learn.values() if value.dim() == n], "weight_decay": 0.1 * (n == 2)}
             for n in (2, 1)]  # fmt: skip
    adamw = torch.optim.AdamW(apart[: 1 + dora], betas=(0.9, 0.999), eps=1e-4)
    losses, norms = [], []
    for step in range(6):
        state = {}
        for ours, theirs in names.items():
            layer = ours.removesuffix(".weight")
            adapted = f"{layer}.lora_a.weight" in learn
            value = held[ours] + SCALE * product(learn, layer, heads) if adapted else held[ours]
            if (lengths := learn.get(f"{layer}.lora_magnitude")) is not None:
                value = value * (lengths / value.detach().norm(dim=1))[:, None]
            state[f"transformer.{theirs}"] = to_gpt2(ours, value, heads)
        adamw.zero_grad()
        loss = loss_of(partial(of_tokens, twin, state), data, step, 8)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learn.values(), config.optimizer.clip_grad)))
        for group in adamw.param_groups:
            group["lr"] = rate(config, step + 1)
        adamw.step()
        losses.append(float(loss.detach()))
    near("losses", found.losses, losses, 1e-6)
    near("norms", found.norms, norms, 1e-5)
    for name, value in learn.items():
        torch.testing.assert_close(found.final[name].double(), value.detach(), rtol=1e-4, atol=1e-6, msg=name)
    assert all(torch.equal(p.spec.unpadded(p).double(), held[n]) for n, p in chunk.by_name().items() if n not in learn)


def write_adapters(target: Path, base: Path, model: ResolvedModel, targets: str | None, *, dora: float = 0) -> None:
    """A checkpoint of random adapters."""
    lora = LoraConfig(lora_rank=RANK, lora_alpha=RANK * SCALE, lora_targets=targets, lora_dora=bool(dora))
    context = BuildContext(device=CPU, streams=RandomStreams(0, CPU))
    stage = Stage(with_adapters(gpt_layers(model, context), lora, model, context))
    generator = torch.Generator().manual_seed(1)
    specs = {name: one.spec for name, one in stage.by_name().items() if is_adapter(name)}
    made = {name: torch.randn(spec.shape, generator=generator) * 0.2 for name, spec in specs.items()}
    for module in stage.modules():
        if isinstance(module, StackedColumns):  # rows of projections without an adapter stay as they began
            made[module.weight.spec.name] *= module.reads.any(1, keepdim=True)
    if (name := "blocks.0.mlp.up.lora_b.weight") in made:
        made[name][3] = 0.0  # beside a row of zeros, in one family
    for name in [name for name in made if name.endswith("magnitude")]:
        lengths = weights(base)[name.replace("lora_magnitude", "weight")].norm(dim=1)
        changes = made[name.replace("magnitude", "b.weight")].any(1)  # of rows without an adapter it has no effect
        made[name] = torch.where(changes, lengths * (1 + made[name]), lengths * dora)
    start = StartConfig(pretrained_checkpoint=str(base))
    config = dataclasses.replace(whole_config(model, None), lora=lora, start=start)
    target.mkdir()
    types = {name: (value.dtype, tuple(value.shape)) for name, value in made.items()}
    write_weights(target, config, types, iter(made.items()), most_bytes=1 << 30)


def by_hand(model: Any, directory: Path) -> None:
    """Add adapters in PEFT's format to a model of transformers."""
    config = json.loads((directory / "adapter_config.json").read_text())
    stored = load_file(directory / "adapter_model.safetensors")
    for key in [key for key in stored if ".lora_A." in key]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = stored[key], stored[key.replace(".lora_A.", ".lora_B.")]
        ends = [end for end in config["target_modules"] if name.endswith(f".{end}")]
        assert len(ends) == 1 and len(a) == config["rank_pattern"].get(ends[0], config["r"])
        added = b @ a * (config["alpha_pattern"].get(ends[0], config["lora_alpha"]) / len(a))
        weight = model.get_submodule(name).weight.data
        weight += added.t() if config["fan_in_fan_out"] else added
        if config["use_dora"]:
            rows = weight.t() if config["fan_in_fan_out"] else weight
            lengths = stored[key.replace("lora_A.weight", "lora_magnitude_vector")] / rows.norm(dim=1).clamp(min=1e-19)
            rows *= lengths[:, None]


def tool(source: str, target: str, *words: object) -> None:
    assert convert(["--from", source, "--to", target, *map(str, words)]) == 0


@pytest.mark.parametrize(
    ("family", "targets", "dora"),
    [
        ("llama3", "q_proj,v_proj,o_proj", False),
        ("llama3", "q_proj,v_proj,o_proj,up_proj", True),
        ("gpt2", None, False),  # three of ours are one layer there
        ("gpt2", "c_attn,fc2", False),
        ("phi3", None, False),
        ("deepseek-v3", None, False),
        ("gpt2", "q_proj,v_proj,down_proj", 0.88),
        ("phi3", "q_proj,up_proj", 0.88),
        pytest.param("bloom", "query_key_value,down_proj", True, marks=pytest.mark.slow),
        pytest.param("gptj", None, False, marks=pytest.mark.slow),
    ],
)
def test_adapters_written_and_merged(family: str, targets: str | None, dora: Any, tmp_path: Path, capsys: Any) -> None:
    hf, base, ours, theirs, merged = (tmp_path / name for name in ("hf", "base", "ours", "theirs", "merged"))
    source: Any = make_model(family)
    if family == "llama3":
        source.model.layers[0].mlp.up_proj.weight.data[3] = 0.0
    source.save_pretrained(hf)
    to_megacore(hf, base)
    model = trained_model(read_manifest(base), base)
    write_adapters(ours, base, model, targets, dora=dora)
    tool("megacore", "peft", ours, "--output", theirs)
    tool("megacore", "megacore", ours, "--merge", "--output", merged)
    if family == "llama3":  # whose base may as well be of transformers
        tool("megacore", "megacore", ours, "--merge", "--base", hf, "--output", tmp_path / "direct")
        require_same(weights(tmp_path / "direct"), weights(merged))
    to_hf(merged, tmp_path / "merged-hf")
    twin: Any = AutoModelForCausalLM.from_pretrained(hf, attn_implementation="eager")
    by_hand(twin, theirs)
    assert any(not torch.equal(value, source.state_dict()[name]) for name, value in twin.state_dict().items())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged-hf", attn_implementation="eager").state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)

    other_base = dataclasses.replace(read_manifest(ours), series={"lora_base": [1.0]})
    with pytest.raises(CheckpointError, match="beside another checkpoint"):
        base_of(other_base, ours)
    tool("peft", "megacore", theirs, "--base", base, "--output", tmp_path / "back")
    one, other = CheckpointTensors(ours), CheckpointTensors(tmp_path / "back")
    if one.shapes == other.shapes:
        require_same(weights(ours), weights(tmp_path / "back"))
    tool("megacore", "megacore", tmp_path / "back", "--merge", "--output", tmp_path / "again")
    again = weights(tmp_path / "again")
    for name, value in weights(merged).items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6, msg=name)

    tokens, layers = torch.arange(20)[None] % model.vocab_size, partial(gpt_layers, model)
    with torch.no_grad():
        apart, together = (model_of(path, layers, CPU)(tokens) for path in (ours, merged))
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4 * float(together.abs().max()))

    stored, words = load_file(theirs / "adapter_model.safetensors"), ["--base", str(base), "--output", f"{ours}-cut"]
    for key in [next(key for key in stored if end in key) for end in ("lora_A", "lora_B", "lora_m")[: 2 + bool(dora)]]:
        save_file({**stored, key: stored[key][..., 1:].contiguous()}, theirs / "adapter_model.safetensors")
        assert convert(["--from", "peft", "--to", "megacore", str(theirs), *words]) == 2
        assert f"{key} is [" in capsys.readouterr().err
