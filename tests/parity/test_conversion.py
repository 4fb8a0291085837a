"""Conversion against transformers, family by family: logits, loss and gradients of tiny random fp32 models, the way
back bit for bit, a config.json made anew, and every rank's slices on layouts up to tp 4 and pp 2. A dense model becomes
a mixture."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from megacore.checkpoint.load import load_parameters
from megacore.convert.check import check_tokens, compare
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.from_hf import open_model
from megacore.inference.trained import model_of
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.hf import row_orders
from megacore.models.hf.family import same_model
from megacore.ops import cross_entropy
from megacore.parallel.loss import vocabulary_share
from megacore.parallel.mesh import Group
from megacore.parallel.random import RandomStreams
from megacore.pipeline.partition import partition
from megacore.pipeline.stage import Stage
from tests.distributed import run_distributed
from tests.e2e.launching import words
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
    make_model,
    require_same_gradients,
    save_model,
    tokens,
    twin_of,
)
from tests.parity.runs import Layout, trainer_of
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


def test_without_a_tokenizer_no_token_is_special(tmp_path: Path) -> None:
    """The families' own ids would be other tokens here, or none: GPT-2's 50256 is beyond this vocabulary."""
    to_megacore(save_model(make_model("gpt2"), tmp_path / "hf"), tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "anew")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert not (tmp_path / "anew" / "generation_config.json").exists()


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


def test_an_export_can_be_rounded(gpt2: Path, tmp_path: Path) -> None:
    to_megacore(gpt2, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back", dtype="bf16")
    require_same(weights(tmp_path / "back"), {name: value.bfloat16() for name, value in weights(gpt2).items()})
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


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
    change_manifest(checkpoint, "tokenizer/")
    to_hf(checkpoint, tmp_path / "out")
    assert "--like DIR takes a tokenizer from elsewhere" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("tokenizer*"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None


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
