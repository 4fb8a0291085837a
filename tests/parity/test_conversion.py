"""Conversion against transformers, family by family: logits, loss and gradients of tiny random fp32 models, the way
back bit for bit, a config.json made anew, and every rank's slices on layouts up to tp 4 and pp 2. A dense model becomes
a mixture."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_layers import MtpModel

from megacore.audit import command as audit
from megacore.checkpoint.load import load_parameters
from megacore.checkpoint.manifest import read_manifest, trained_model
from megacore.convert import dcp_files
from megacore.convert.as_hf import export_dcp, write_hf
from megacore.convert.check import Agreement, check_tokens, compare
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.dcp_files import INDEX, open_dcp
from megacore.convert.deepspeed_files import open_deepspeed
from megacore.convert.from_hf import open_model
from megacore.convert.plan import make_plan
from megacore.convert.start import WeightsFromHF
from megacore.errors import CheckpointError
from megacore.inference.trained import model_of
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.hf import row_orders
from megacore.models.hf.families import FAMILIES
from megacore.models.hf.family import same_model
from megacore.ops import cross_entropy
from megacore.parallel.loss import vocabulary_share
from megacore.parallel.mesh import Group, Mesh, build_mesh
from megacore.parallel.random import RandomStreams
from megacore.pipeline.partition import partition
from megacore.pipeline.stage import Stage
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import alone, words
from tests.parity.bert_twins import classic_twin, modern_twin
from tests.parity.conversions import (
    change_manifest,
    forget_the_config,
    loads_as,
    require_same,
    to_hf,
    to_megacore,
    tokenizer,
    weights,
)
from tests.parity.hf_models import (
    CONFIGS,
    USUAL,
    VOCAB,
    as_stored,
    assembled,
    disturbed,
    make_model,
    require_same_gradients,
    save_model,
    tokens,
    twin_of,
)
from tests.parity.runs import Layout, RaggedData, gather, make_config, trainer_of
from tests.peers import interpreter_with
from tests.unit.hostile import Payload
from tools.convert_checkpoint import main as convert

CPU = torch.device("cpu")
ENDS = {"bos": "<begin>", "eos": "<end>"}
# Made anew, these are of an earlier family, which adds biases or the products of heads in another order.
ANOTHER_CLASS = {
    "falcon-sequential": transformers.GPTNeoXForCausalLM,
    "ernie": transformers.LlamaForCausalLM,
    "ernie-biases": transformers.LlamaForCausalLM,
    "helium": transformers.LlamaForCausalLM,
    "helium-biases": transformers.SeedOssForCausalLM,
}


@dataclass(frozen=True)
class Converted:
    """A model of transformers, its directory with a tokenizer, and the checkpoint that it became."""

    name: str
    model: nn.Module
    directory: Path
    checkpoint: Path


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in CONFIGS]
)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    model = make_model(request.param)
    directory = save_model(model, folder / "hf")
    tokenizer(ENDS).save(directory)
    to_megacore(directory, folder / "megacore")
    return Converted(request.param, model, directory, folder / "megacore")


def test_logits_loss_and_gradients_are_those_of_transformers(converted: Converted) -> None:
    model, batch = converted.model, tokens()
    model.zero_grad()
    expected = model(batch, labels=batch)
    expected.loss.backward()
    for attention in ("sdpa", "fused-softmax"):
        stage = twin_of(model, attention=attention)
        logits = stage(batch)[..., :VOCAB]
        assert (logits - expected.logits).abs().max() <= 1e-5
        assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
        loss = cross_entropy(logits[:, :-1], batch[:, 1:], share=vocabulary_share(VOCAB)).mean()
        assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-6)
        loss.backward()
        require_same_gradients(stage, model)


def test_the_way_back_gives_the_same_files(converted: Converted, tmp_path: Path) -> None:
    to_hf(converted.checkpoint, tmp_path / "back", max_shard_size="20KB")
    require_same(weights(tmp_path / "back"), weights(converted.directory))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (converted.directory / name).read_bytes()
    loaded = loads_as(tmp_path / "back", transformers.AutoModelForCausalLM)
    assert torch.equal(loaded(tokens()).logits, converted.model(tokens()).logits)


def as_mistral_rounds(phi3: nn.Module) -> None:
    """Phi-3's gate is half of one product, so its rows lie apart, and there torch's SiLU differs in the last bit from
    that of Mistral's gate, which is a product of its own."""
    for name, module in phi3.named_modules():
        if name.endswith(".activation_fn"):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))


def test_without_a_config_it_loads_as_the_model_that_it_was(converted: Converted, tmp_path: Path) -> None:
    """As if trained here: config.json is made anew, with the special tokens of the tokenizer."""
    shutil.copytree(converted.checkpoint, tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    loaded = loads_as(tmp_path / "anew", transformers.AutoModelForCausalLM)
    if converted.name == "phi3":
        assert type(loaded) is transformers.MistralForCausalLM
        as_mistral_rounds(converted.model)
    found, expected = loaded(tokens()).logits, converted.model(tokens()).logits
    if converted.name in ANOTHER_CLASS:
        assert type(loaded) is ANOTHER_CLASS[converted.name]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    beside = transformers.AutoTokenizer.from_pretrained(tmp_path / "anew")
    for use in ENDS:
        wanted = getattr(beside, f"{use}_token_id")
        assert wanted is not None
        assert (
            getattr(loaded.config, f"{use}_token_id") == wanted == getattr(loaded.generation_config, f"{use}_token_id")
        )


def test_every_layout_loads_its_slices(converted: Converted) -> None:
    """Ranks are built one after the other in this process: what they hold needs no communication."""
    hf = open_model(converted.directory)
    whole = {step.ours: hf.read(step) for step in hf.plan if not step.is_buffer}
    for tp, pp in ((2, 1), (4, 2)):
        seen: set[str] = set()
        for rank in range(tp):
            group = Group(ranks=tuple(range(tp)), rank=rank)
            layers = gpt_layers(hf.config, BuildContext(layer_group=group, device=CPU, streams=RandomStreams(0, CPU)))
            for numbers in partition(layers, pp, [layer.parameters for layer in layers]):
                parameters = Stage([layers[number] for number in numbers]).by_name()
                load_parameters(converted.checkpoint, parameters.values())
                for name, parameter in parameters.items():
                    assert torch.equal(parameter.spec.unpadded(parameter), parameter.spec.take(whole[name])), name
                seen |= parameters.keys()
        assert seen == whole.keys()


def test_experts_in_mxfp4_become_what_transformers_makes_of_them(tmp_path: Path) -> None:
    model = make_model("gpt-oss", torch.bfloat16)
    model.config.intermediate_size = 64  # type: ignore[union-attr]
    wider = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    directory = save_model(disturbed(wider), tmp_path / "hf")
    packed, plain, generator = weights(directory), weights(directory), torch.Generator().manual_seed(3)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        shape = experts, rows, columns // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(packed, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    to_megacore(directory, tmp_path / "megacore")  # compares logits
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), plain)
    assert loads_as(tmp_path / "back", transformers.AutoModelForCausalLM).dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.bfloat16), ("qwen2", torch.float16)], ids=str)
def test_sixteen_bits_stay_sixteen_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_model(make_model(name, dtype), tmp_path / "hf", max_shard_size="20KB")
    to_megacore(directory, tmp_path / "megacore", max_shard_size="30KB")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), weights(directory))
    assert {value.dtype for value in weights(tmp_path / "back").values()} == {dtype}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A directory of transformers."""
    return save_model(make_model("gpt2"), tmp_path / "hf")


def change_config(directory: Path, **changes: Any) -> None:
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize("field", ["torch_dtype", pytest.param("dtype", marks=pytest.mark.slow)])
def test_like_names_the_dtype_that_is_stored(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run began with bf16 weights and saved fp32 ones, which transformers must not round to the former."""
    like = save_model(make_model("llama3", torch.bfloat16), tmp_path / "like")
    values = json.loads((like / "config.json").read_text())
    values[field] = values.pop("dtype")
    (like / "config.json").write_text(json.dumps(values))
    model = make_model("llama3")
    to_megacore(save_model(model, tmp_path / "hf"), tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "out", like=like)
    assert f"config.json said {field} bfloat16" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == values | {field: "float32"}
    loaded = loads_as(tmp_path / "out", transformers.AutoModelForCausalLM)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    to_hf(tmp_path / "megacore", tmp_path / "rounded", like=like, dtype="bf16")
    rounded = {name: value.bfloat16() for name, value in weights(tmp_path / "hf").items()}
    require_same(weights(tmp_path / "rounded"), rounded)
    assert loads_as(tmp_path / "rounded", transformers.AutoModelForCausalLM).dtype == torch.bfloat16


def test_names_without_the_prefix_and_a_stored_copy_come_back(gpt2: Path, tmp_path: Path) -> None:
    """Files of the bare model have no prefix, older ones hold constants, and some store the tied head too."""
    stored = {name.removeprefix("transformer."): value for name, value in weights(gpt2).items()}
    stored["lm_head.weight"] = stored["wte.weight"].clone()
    constant = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(stored | constant, gpt2 / "model.safetensors", metadata={"format": "pt"})
    to_megacore(gpt2, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), stored)


def refused(directory: Path, target: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said; nothing is published."""
    there = sorted(target.parent.iterdir())
    assert convert([*words(input=directory, output=target), "--from", "hf", "--to", "megacore", *flags]) == 2
    assert sorted(target.parent.iterdir()) == there
    return capsys.readouterr().err


def test_a_wrong_weight_is_found_and_nothing_is_published(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that is wrong in one place gives a checkpoint that loads, and computes something else."""
    right = row_orders.q_k_v_runs
    monkeypatch.setattr(row_orders, "q_k_v_runs", lambda config: reversed(list(right(config))))
    assert "do not compute the same" in refused(gpt2, tmp_path / "out", capsys)


def trained(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    """Two steps of a run on a layout, saved."""
    trainer = trainer_of(layout, directory, **changes)
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()


LLAMA: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swiglu"}
LLAMA |= {"disable_bias_linear": True, "num_query_groups": 2}


@pytest.mark.parametrize(
    ("layout", "changes", "architecture"),
    [
        ((2, 1, 1), {"num_layers": 2}, "GPT2LMHeadModel"),
        pytest.param((4, 1, 1), LLAMA, "LlamaForCausalLM", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_of_any_layout_is_exported(
    layout: Layout, changes: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """Its config.json is made anew, and transformers computes the loss that the run's weights have."""
    run_distributed(trained, math.prod(layout), layout, str(tmp_path / "run"), changes, timeout=120, stay=True)
    to_hf(tmp_path / "run", tmp_path / "hf")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    assert type(twin).__name__ == architecture
    tensors = CheckpointTensors(tmp_path / "run")
    stage = Stage(gpt_layers(tensors.config, BuildContext(device=CPU, streams=RandomStreams(0, CPU)))).eval()
    load_parameters(tmp_path / "run", stage.by_name().values())
    batch = tokens()[:, : tensors.config.max_position_embeddings]
    logits = stage(batch)[..., : tensors.config.vocab_size]
    assert (logits - twin(batch).logits).abs().max() <= 1e-5
    to_megacore(tmp_path / "hf", tmp_path / "again")
    again = CheckpointTensors(tmp_path / "again")
    assert same_model(again.config, tensors.config)
    require_same(*({name: one.read(name) for name in one.shapes} for one in (again, tensors)))


@pytest.mark.parametrize(
    ("name", "shape", "limit"),
    [
        ("mistral", {"max_position_embeddings": 400, "sliding_window": 150}, "sliding_window"),
        ("llama-dynamic", {"max_position_embeddings": 24}, "max_position_embeddings"),
    ],
)
def test_the_check_goes_beyond_windows_and_contexts(
    name: str, shape: dict[str, int], limit: str, tmp_path: Path
) -> None:
    """A window of 150 positions, and a context of 24 that is stretched: one more would show."""
    directory = save_model(make_model(name), tmp_path / "hf")
    change_config(directory, **shape)
    to_megacore(directory, tmp_path / "megacore")
    batch = check_tokens(CheckpointTensors(tmp_path / "megacore").config, None, None)
    assert batch.shape[1] == shape[limit] + 8
    change_config(directory, **{limit: shape[limit] + 1})
    assert compare(directory, tmp_path / "megacore", batch).difference > 1e-4


def test_what_changes_no_logit_is_converted(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(gpt2, novel=1)
    to_megacore(gpt2, tmp_path / "megacore")
    said = "not known to megacore in config.json, so the logits decide: novel (1 in all)"
    assert said in capsys.readouterr().out
    to_hf(tmp_path / "megacore", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (gpt2 / "config.json").read_bytes()


def test_a_config_that_transformers_refuses_is_an_error_of_the_input(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(gpt2, summary_type=5)  # which megacore does not read
    assert f"transformers cannot load {gpt2}: " in (said := refused(gpt2, tmp_path / "megacore", capsys))
    assert "summary_type" in said


def test_an_ignored_field_is_left_out_and_the_logits_decide(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, flag, plain = tmp_path / "megacore", "--ignore-config-field", (gpt2 / "config.json").read_text()
    change_config(gpt2, scale_attn_by_inverse_layer_idx=True)
    said = refused(gpt2, target, capsys, flag, "scale_attn_by_inverse_layer_idx")
    assert "do not compute the same" in said  # transformers still reads it
    said = refused(gpt2, target, capsys, flag, "scale_attn_by_inverse_layer_id")
    assert "has no such field (did you mean scale_attn_by_inverse_layer_idx?)" in said

    (gpt2 / "config.json").write_text(plain)
    change_config(gpt2, auto_map={"AutoModel": "code.Model"})
    refused(gpt2, target, capsys)
    to_megacore(gpt2, target, ignore_config_field="auto_map")
    to_hf(target, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (gpt2 / "config.json").read_bytes()


# ---- the tokenizer that an export carries

BACK = ("--from", "megacore", "--to", "hf")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer, and without a config.json of its own; the directory it came from is beside it."""
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    tokenizer(ENDS).save(directory)
    to_megacore(directory, tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    return tmp_path / "megacore"


def export_refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str], **flags: object) -> str:
    assert convert([*words(input=source, output=target, **flags), *BACK]) == 2
    assert not target.exists()
    return capsys.readouterr().err


def test_a_flipped_bit_is_not_published(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint / "tokenizer" / "tokenizer.json"
    text = bytearray(path.read_bytes())
    text[text.index(b'"w7"') + 2] ^= 1  # w6 is there twice, and means w7
    path.write_bytes(text)
    said = export_refused(checkpoint, tmp_path / "out", capsys)
    assert "tokenizer/tokenizer.json does not have the XXH3 of its manifest" in said


def test_a_file_that_the_manifest_does_not_list_is_left_out(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer" / "chat_template.jinja").write_text("{{ 1 }}")
    to_hf(checkpoint, tmp_path / "out")
    assert "does not list them: tokenizer/chat_template.jinja" in capsys.readouterr().out
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_checkpoint_whose_manifest_lists_no_tokenizer_exports_none(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor special tokens: the family's own ids would be other ones here, or none."""
    change_manifest(checkpoint, "tokenizer/")
    to_hf(checkpoint, tmp_path / "out")
    assert "--like DIR takes a tokenizer from elsewhere" in capsys.readouterr().out
    assert not [*(tmp_path / "out").glob("tokenizer*"), *(tmp_path / "out").glob("generation_config.json")]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


def test_like_with_another_tokenizer_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tmp_path / "hf", tmp_path / "like")
    (tmp_path / "like" / "chat_template.jinja").write_text("{{ 1 }}")
    to_hf(checkpoint, tmp_path / "out", like=tmp_path / "like")
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    tokenizer(ENDS, size=61).save(tmp_path / "like")
    said = export_refused(checkpoint, tmp_path / "other", capsys, like=tmp_path / "like")
    assert "has another tokenizer than" in said
    assert "ids mean other texts" in said


# ---- a dense checkpoint becomes a mixture that computes the same, and that trains from there


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


# ---- BERT ------------------------------------------------------------------------------------------------------------

MARKS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


def masked_twin() -> nn.Module:
    """The classic twin without its sentence task."""
    twin = classic_twin()
    masked = transformers.BertForMaskedLM(twin.config).eval()
    missing, _ = masked.load_state_dict(twin.state_dict(), strict=False)
    assert not missing
    return masked


def there_and_back(folder: Path) -> tuple[CheckpointTensors, Agreement]:
    """Convert the directory and convert the checkpoint back: the same files, and the same logits of as many tokens."""
    there, here, back = folder / "hf", folder / "megacore", folder / "back"
    to_megacore(there, here)
    to_hf(here, back)
    require_same(weights(back), weights(there))
    assert (back / "config.json").read_bytes() == (there / "config.json").read_bytes()
    found = CheckpointTensors(here)
    agreement = compare(there, here, check_tokens(found.config, folder / "none", None))
    assert agreement.difference <= 1e-5
    return found, agreement


@pytest.mark.parametrize(
    "family, types",
    [
        ("Roberta", 2),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("Roberta", "XLMRoberta", "Camembert")),
    ],
)
def test_roberta_there_and_back(family: str, types: int, tmp_path: Path) -> None:
    """Its positions begin after the number of the padding token, which no check has among its tokens."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=42, type_vocab_size=types, pad_token_id=3, initializer_range=0.2, layer_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    disturbed(getattr(transformers, f"{family}ForMaskedLM")(config).eval()).save_pretrained(tmp_path / "hf")
    found, agreement = there_and_back(tmp_path)
    assert (found.config.position_offset, found.config.max_position_embeddings) == (4, 38)
    assert found.shapes["embedding.positions"] == (42, 32)
    assert found.shapes["embedding.segments"] == (types, 32)
    assert agreement.tokens == 38
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    require_same(weights(tmp_path / "anew"), weights(tmp_path / "hf"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "anew").pad_token_id == 3


def test_old_names_and_stored_copies_come_back(tmp_path: Path) -> None:
    """The first BERT's files call a norm's parameters gamma and beta, and store tied tensors and positions too."""
    classic_twin().save_pretrained(directory := tmp_path / "hf")
    stored = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights(directory).items()
    }
    stored["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"].clone()
    stored["cls.predictions.decoder.bias"] = stored["cls.predictions.bias"].clone()
    constant = {"bert.embeddings.position_ids": torch.arange(24).unsqueeze(0)}
    save_file(stored | constant, directory / "model.safetensors", metadata={"format": "pt"})
    to_megacore(directory, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), stored)


def untied(folder: Path, *, sentences: bool) -> Path:
    """A twin whose output layer is not its embedding, with biases of its own: only the decoder's is added."""
    config = classic_twin().config
    config.tie_word_embeddings = False
    twin = disturbed((transformers.BertForPreTraining if sentences else transformers.BertForMaskedLM)(config).eval())
    assert not torch.equal(twin.cls.predictions.bias, twin.cls.predictions.decoder.bias)
    twin.save_pretrained(folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize(
    ("sentences", "anew"),
    [(True, True), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((True, False), (False, True)))],
)
def test_an_untied_bert_has_the_bias_that_transformers_adds(sentences: bool, anew: bool, tmp_path: Path) -> None:
    directory = untied(tmp_path, sentences=sentences)
    to_megacore(directory, tmp_path / "megacore")
    stored = weights(directory)
    found = CheckpointTensors(tmp_path / "megacore")
    assert torch.equal(found.read("head.bias"), stored["cls.predictions.decoder.bias"])
    if anew:
        forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    kind = transformers.BertForPreTraining if sentences else transformers.BertForMaskedLM
    one, other = loads_as(directory, kind), loads_as(tmp_path / "back", kind)
    batch = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    for logits, expected in zip(other(batch)[:2], one(batch)[:2], strict=True):
        assert torch.equal(logits, expected)
    stored["cls.predictions.bias"] = stored["cls.predictions.decoder.bias"]  # the other changes nothing
    require_same(weights(tmp_path / "back"), stored)


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tokenizer", "none"])
@pytest.mark.parametrize(
    ("make", "kind", "task"),
    [
        (classic_twin, "BertForPreTraining", "nsp"),
        (masked_twin, "BertForMaskedLM", "none"),
        (modern_twin, "ModernBertForMaskedLM", "none"),
    ],
    ids=["classic", "without sentences", "modern"],
)
def test_every_bert_loads_as_the_model_that_it_was(
    make: Any, kind: str, task: str, marked: bool, tmp_path: Path
) -> None:
    """Also as if trained here, with a config.json that is made anew. ModernBERT's gated MLP has one matrix for both."""
    twin = make()
    twin.save_pretrained(tmp_path / "hf")
    if marked:
        tokenizer(MARKS).save(tmp_path / "hf")
    found, agreement = there_and_back(tmp_path)
    assert found.bert is not None and found.bert.sentence_task == task
    assert agreement.same_choice == 1.0
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    batch = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    for place in ("back", "anew"):
        loaded = loads_as(tmp_path / place, getattr(transformers, kind))
        assert torch.equal(loaded(batch)[0], twin(batch)[0])
    for name in ("layer_types", "rope_parameters"):  # of ModernBERT
        assert getattr(loaded.config, name, None) == getattr(twin.config, name, None)
    beside = transformers.AutoTokenizer.from_pretrained(tmp_path / "anew") if marked else None
    for use in MARKS:
        wanted = getattr(beside, f"{use}_token_id", None)
        assert (wanted is not None) == marked
        assert getattr(loaded.config, f"{use}_token_id") == wanted


def test_a_gpt_cannot_start_from_a_bert(tmp_path: Path) -> None:
    classic_twin().save_pretrained(directory := tmp_path / "hf")
    done = alone(
        *words(init_from_hf=directory, mock_data=True, seq_length=16, train_iters=2, output_dir=tmp_path / "run")
    )
    assert done.returncode == 2
    assert "hf is a bert: convert it with tools/convert_checkpoint.py" in done.stderr


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("names", [pytest.param("hf", marks=pytest.mark.slow), "torchtitan"])
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
    config = json.loads((llama / "config.json").read_text())
    for other, said in (
        ({"model_type": "gemma"}, "model_type gemma"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type yarn"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(CheckpointError, match=f"another model than this one, of {said}: use --dcp-names hf"):
            export_dcp(tmp_path / "hf", tmp_path / "other", "torchtitan")


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


# ---- DeepSpeed's own files -------------------------------------------------------------------------------------------

PYTHON = interpreter_with("deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_checkpoints.py")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs DeepSpeed: run `make peers`")
@pytest.mark.parametrize(("stage", "form"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "fp32"), (3, "fp32")])
def test_the_weights_are_those_of_deepspeed(stage: int, form: str, tmp_path: Path) -> None:
    run = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*run, str(stage), form, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    found = open_deepspeed(tmp_path).weights()
    assert found.keys() == full.keys() | {"scale"}
    assert all(torch.equal(found[name], value) for name, value in full.items())


# ---- --init-from-hf


SEQUENCE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of transformers."""
    return save_model(make_model("gpt2"), tmp_path_factory.mktemp("init") / "hf")


def begin(mesh: Mesh, layout: Layout, source: Path, output: str, changes: dict[str, Any]) -> Trainer:
    """Build a run from the directory, without dropout."""
    config = make_config(layout, output, **changes)
    model = dataclasses.replace(open_model(source).config, hidden_dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(config, model=model)
    task = GPTTask(config, mesh, weights=WeightsFromHF(source))
    return Trainer(config, mesh, task, Words(config.training.global_batch_size), None)


class Words(RaggedData):
    """Samples of the tiny models' vocabulary."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {k: v % VOCAB if k != "loss_mask" else v for k, v in super().__getitem__(index).items()}


def loss_of(model: nn.Module, batch: int) -> Tensor:
    """Of transformers' model, over the tokens that count."""
    samples = [Words(batch)[number] for number in range(batch)]
    tokens, labels, mask = (
        torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in ("tokens", "labels", "loss_mask")
    )
    losses = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


First = tuple[float, float, dict[str, Tensor]]  # loss, norm of the gradient, and the gradient by tensor


def first_step(trainer: Trainer) -> First:
    result = trainer.train_step(next(trainer.batches))
    return float(result.loss), float(result.grad_norm), gather(trainer, trainer.mesh, lambda owned: owned.gradient)


def require_that_of_transformers(found: First, model: nn.Module, directory: Path) -> None:
    """Loss, global norm and every gradient are those of transformers' own model."""
    loss, norm, gradients = found
    expected = loss_of(model, 8)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert norm == pytest.approx(float(torch.stack([one.double().norm() for one in theirs.values()]).norm()), rel=1e-6)
    stored = as_stored(theirs)
    steps = {step.ours: step for step in open_model(directory).plan if not step.is_buffer}
    assert gradients.keys() == steps.keys()
    for name, step in steps.items():
        wanted = step.assemble(lambda number, step=step: stored[step.theirs[number]])  # type: ignore[misc]
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        error = (gradients[name] - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max() + 1e-7, f"gradient of {name}: {error}"


def first_steps(rank: int, world_size: int, sources: dict[str, str], output: str) -> dict[str, First]:
    """Of every model, on two tensor-parallel ranks of two stages."""
    found = {}
    for name, source in sources.items():
        layout, changes = (2, 2, 1), {"clip_grad": 0.0, "sequence_parallel": True}
        mesh = build_mesh(make_config(layout, output, **changes).parallel)
        found[name] = first_step(begin(mesh, layout, Path(source), output, changes))
    return found if rank == 0 else {}


@pytest.mark.parametrize(
    "names",
    [["gpt2", "stablelm-12b", "qwen3-moe", "gemma3"], pytest.param([*CONFIGS], marks=pytest.mark.slow)],
    ids=["four", "all"],
)
def test_the_first_step_on_two_by_two_ranks_is_that_of_transformers(names: list[str], tmp_path: Path) -> None:
    """Each rank normalises its heads with their own weights, and reads the slices of its experts."""
    models = {name: make_model(name) for name in names}
    sources = {name: str(save_model(model, tmp_path / name)) for name, model in models.items()}
    found = run_distributed(first_steps, 4, sources, str(tmp_path / "run"), timeout=300)[0]
    for name, model in models.items():
        print(name)  # shown where it fails
        require_that_of_transformers(found[name], model, Path(sources[name]))


def test_the_program_takes_the_shape_from_the_directory_and_is_replayed(directory: Path, tmp_path: Path) -> None:
    flags = words(init_from_hf=directory, mock_data=True, seq_length=SEQUENCE, train_iters=2, eval_interval=0)
    done = alone(*flags, *words(output_dir=tmp_path / "run", ledger=True), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "num_layers = 3" in (tmp_path / "run" / "config.toml").read_text()
    assert audit.main([str(tmp_path / "run"), "--replay", "1", "--device", "cpu"]) == 0


def test_flags_that_contradict_the_directory_or_lead_to_none_are_refused(directory: Path, tmp_path: Path) -> None:
    flags = words(
        init_from_hf=directory, mock_data=True, seq_length=SEQUENCE, train_iters=2, output_dir=tmp_path / "run"
    )
    done = alone(*flags, "--num-layers", 4, "--norm-epsilon", 1e-6)
    assert done.returncode == 2
    assert f"--num-layers 4 contradicts {directory}/config.json, which makes it 3" in done.stderr
    assert "--norm-epsilon 1e-06 contradicts" in done.stderr
    done = alone(*flags, "--preset", "gpt2-tiny")
    assert done.returncode == 2
    assert "--preset gpt2-tiny has no effect with --init-from-hf" in done.stderr
    assert not (tmp_path / "run").exists()
    done = alone(*words(init_from_hf=tmp_path / "none", mock_data=True, train_iters=2))
    assert done.returncode == 2
    assert "none is not a directory" in done.stderr


# ---- multi-token prediction


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
