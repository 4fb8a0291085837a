"""Conversion against transformers, family by family: logits, loss and gradients of tiny random fp32 models, the way
back bit for bit, and every rank's slices on layouts up to tp 4 and pp 2."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from megacore.checkpoint.load import load_parameters
from megacore.checkpoint.tensor_file import read_tensor
from megacore.convert.check import Agreement, check_tokens, compare
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.from_hf import open_model
from megacore.convert.plan import make_plan
from megacore.inference.trained import model_of
from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.models.hf import family
from megacore.models.hf.family import same_model
from megacore.ops import cross_entropy
from megacore.parallel.cross_entropy import vocabulary_share
from megacore.parallel.mesh import Group, build_mesh
from megacore.parallel.random import RandomStreams
from megacore.pipeline.partition import partition
from megacore.pipeline.stage import Stage
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.parity.conversions import loads_as, require_same, to_hf, to_megacore, weights
from tests.parity.hf_models import CONFIGS, PLAIN, SLOW, VOCAB, as_stored, make_model, save_model, tokens
from tests.parity.runs import Layout, make_config, make_trainer
from tools.convert_checkpoint import main as convert

CPU = torch.device("cpu")
Converted = tuple[nn.Module, Path, Path]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONFIGS]
)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A model, its directory, and the checkpoint that it became."""
    folder = tmp_path_factory.mktemp("converted")
    model = make_model(request.param)
    directory = save_model(model, folder / "hf")
    to_megacore(directory, folder / "megacore")
    return model, directory, folder / "megacore"


def test_logits_loss_and_gradients_are_those_of_transformers(converted: Converted) -> None:
    model, directory, checkpoint = converted
    hf = open_model(directory)
    stage = model_of(checkpoint, partial(gpt_layers, hf.config), CPU)  # with a padded vocabulary
    parameters = stage.by_name()

    batch = tokens()
    expected = model(batch, labels=batch)
    logits = stage(batch)
    assert (logits[..., :VOCAB] - expected.logits).abs().max() <= 1e-5
    assert torch.equal(logits[..., :VOCAB].argmax(-1), expected.logits.argmax(-1))
    loss = cross_entropy(logits[:, :-1], batch[:, 1:], share=vocabulary_share(VOCAB)).mean()
    assert float(loss.detach()) == pytest.approx(float(expected.loss.detach()), rel=1e-6)

    loss.backward()
    model.zero_grad()
    expected.loss.backward()
    theirs = as_stored({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for step in make_plan(hf.family, hf.config):
        if step.is_buffer:
            continue
        found = parameters[step.ours].grad
        wanted = step.assemble(lambda number, step=step: theirs[step.theirs[number]])  # type: ignore[misc]
        assert found is not None
        error = (parameters[step.ours].spec.unpadded(found) - wanted).abs().max()
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        assert error <= 1e-5 * wanted.abs().max() + 1e-8, f"gradient of {step.ours}: {error}"


def test_the_way_back_gives_the_same_files(converted: Converted, tmp_path: Path) -> None:
    model, directory, checkpoint = converted
    to_hf(checkpoint, tmp_path / "back", max_shard_size="20KB")
    require_same(weights(tmp_path / "back"), weights(directory))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (directory / name).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)


def test_a_config_made_anew_describes_the_same_model(converted: Converted, tmp_path: Path) -> None:
    model, directory, _ = converted
    hf = open_model(directory)
    values = hf.family.from_model(hf.config)
    assert values is not None
    assert hf.family.to_model(values, "config.json") == hf.config
    made = transformers.AutoConfig.for_model(**values)
    twin = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_every_layout_loads_its_slices(converted: Converted, tp: int, pp: int) -> None:
    """Ranks are built one after the other in this process: what they hold needs no communication."""
    _, directory, checkpoint = converted
    hf = open_model(directory)
    whole = {step.ours: whole_tensor(hf, step) for step in hf.plan if not step.is_buffer}
    seen: set[str] = set()
    for rank in range(tp):
        group = Group(ranks=tuple(range(tp)), rank=rank)
        context = BuildContext(layer_group=group, device=CPU, streams=RandomStreams(0, CPU))
        layers = gpt_layers(hf.config, context)
        for numbers in partition(layers, pp, [layer.parameters for layer in layers]):
            parameters = Stage([layers[number] for number in numbers]).by_name()
            load_parameters(checkpoint, parameters.values())
            for name, parameter in parameters.items():
                assert torch.equal(parameter.spec.unpadded(parameter), parameter.spec.take(whole[name])), name
            seen |= parameters.keys()
    assert seen == whole.keys()


def whole_tensor(hf: Any, step: Any) -> Tensor:
    tensor: Tensor = step.assemble(lambda number: read_tensor(hf.stored.tensors[step.theirs[number]]))
    return tensor


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_stay_sixteen_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_model(make_model(name, dtype), tmp_path / "hf", max_shard_size="20KB")
    to_megacore(directory, tmp_path / "megacore", max_shard_size="30KB")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), weights(directory))
    assert {value.dtype for value in weights(tmp_path / "back").values()} == {dtype}


def test_an_export_can_be_rounded(tmp_path: Path) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    to_megacore(directory, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back", dtype="bf16")
    rounded = {name: value.bfloat16() for name, value in weights(directory).items()}
    require_same(weights(tmp_path / "back"), rounded)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
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


def test_names_without_the_prefix_and_a_stored_copy_come_back(tmp_path: Path) -> None:
    """Files of the bare model have no prefix, older ones hold constants, and some store the tied head too."""
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    plain = {name.removeprefix("transformer."): value for name, value in weights(directory).items()}
    stored = {**plain, "lm_head.weight": plain["wte.weight"].clone(), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    to_megacore(directory, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), {n: value for n, value in stored.items() if n != "h.0.attn.bias"})


def test_a_wrong_weight_is_found_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that is wrong in one place gives a checkpoint that loads, and computes something else."""
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    right = family.q_k_v_runs
    monkeypatch.setattr(family, "q_k_v_runs", lambda config: reversed(list(right(config))))
    flags = [*words(input=directory, output=tmp_path / "out"), "--from", "hf", "--to", "megacore"]
    assert convert(flags) == 2
    assert "do not compute the same" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    (tmp_path / "out").mkdir()
    flags = [*words(input=directory, output=tmp_path / "out"), "--from", "hf", "--to", "megacore"]
    assert convert(flags) == 2
    assert "out exists" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def trained(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    """Two steps of a run on a layout, saved."""
    config = make_config(layout, directory, **changes)
    trainer = make_trainer(config, build_mesh(config.parallel))
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()


@pytest.mark.parametrize(
    ("layout", "changes", "architecture"),
    [
        ((2, 2, 1), {"zero_stage": 1}, "GPT2LMHeadModel"),
        pytest.param(
            (4, 1, 1),
            {
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "activation": "swiglu",
                "disable_bias_linear": True,
                "num_query_groups": 2,
            },
            "LlamaForCausalLM",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_of_any_layout_is_exported(
    layout: Layout, changes: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """Its config.json is made anew, and transformers computes the loss that the run's weights have."""
    tp, pp, dp = layout
    run_distributed(trained, tp * pp * dp, layout, str(tmp_path / "run"), changes, timeout=120)
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
    require_same(
        {name: again.read(name) for name in again.shapes}, {name: tensors.read(name) for name in tensors.shapes}
    )


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
    values = json.loads((directory / "config.json").read_text()) | shape
    (directory / "config.json").write_text(json.dumps(values))
    to_megacore(directory, tmp_path / "megacore")
    batch = check_tokens(CheckpointTensors(tmp_path / "megacore").config, None, None)
    assert batch.shape[1] == shape[limit] + 8
    (directory / "config.json").write_text(json.dumps(values | {limit: values[limit] + 1}))
    assert compare(directory, tmp_path / "megacore", batch).difference > 1e-4


def test_a_released_long_context_agrees_beyond_the_original_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Phi-3-mini for 128k tokens, as its config.json is, with one head of its size: beyond 4,096 tokens the long
    factors count."""
    released = json.loads((Path(__file__).parents[1] / "unit" / "hub_configs.json").read_text())
    shape = {"hidden_size": 96, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 32, "vocab_size": VOCAB}
    own_code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    values = released["microsoft/Phi-3-mini-128k-instruct"] | shape
    torch.manual_seed(0)
    made = transformers.Phi3Config(**json.loads(json.dumps(values)), pad_token_id=None)
    directory = save_model(transformers.AutoModelForCausalLM.from_config(made), tmp_path / "hf")
    (directory / "config.json").write_text(json.dumps(values | {"pad_token_id": None, "auto_map": own_code}))
    to_megacore(directory, tmp_path / "megacore", ignore_config_field="auto_map")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    assert capsys.readouterr().out.count("4104 tokens: logits differ by at most") == 2
    assert (tmp_path / "back" / "config.json").read_bytes() == (directory / "config.json").read_bytes()
    require_same(weights(tmp_path / "back"), weights(directory))
    for length in (4096, 4097):
        batch = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(2))
        assert compare(directory, tmp_path / "megacore", batch, ignored=("auto_map",)).difference <= 1e-4


def test_the_check_sees_a_small_difference(tmp_path: Path) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    to_megacore(directory, tmp_path / "megacore")
    changed = make_model("gpt2")
    with torch.no_grad():
        changed.get_parameter("transformer.h.1.mlp.c_fc.bias")[3] += 0.01
    save_model(changed, tmp_path / "changed")
    batch = check_tokens(open_model(directory).config, tmp_path / "none", None)
    assert compare(directory, tmp_path / "megacore", batch).difference <= 1e-5
    found = compare(tmp_path / "changed", tmp_path / "megacore", batch)
    assert isinstance(found, Agreement)
    assert found.difference > 1e-3
    assert batch.shape[1] == open_model(directory).config.max_position_embeddings


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama3", {"novel": 1}, "not known to megacore in config.json, so the logits decide: novel (1 in all)"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 1}, "tokens: logits differ"),
    ],
)
def test_what_changes_no_logit_is_converted(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_model(make_model(name), tmp_path / "hf")
    values = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    to_megacore(directory, tmp_path / "megacore")
    assert said in capsys.readouterr().out
    to_hf(tmp_path / "megacore", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (directory / "config.json").read_bytes()


def test_a_config_that_transformers_refuses_is_an_error_of_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"summary_type": 5}))  # which megacore does not read
    ways = [*words(input=directory, output=tmp_path / "megacore"), "--from", "hf", "--to", "megacore"]
    assert convert(ways) == 2
    assert f"transformers cannot load {directory}: " in (said := capsys.readouterr().err)
    assert "summary_type" in said
    assert not (tmp_path / "megacore").exists()


def test_an_ignored_field_is_left_out_and_the_logits_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    values = json.loads((directory / "config.json").read_text())
    ways = [*words(input=directory, output=tmp_path / "megacore"), "--from", "hf", "--to", "megacore"]

    (directory / "config.json").write_text(json.dumps(values | {"scale_attn_by_inverse_layer_idx": True}))
    assert convert([*ways, "--ignore-config-field", "scale_attn_by_inverse_layer_idx"]) == 2
    assert "do not compute the same" in capsys.readouterr().err  # transformers still reads it
    assert not (tmp_path / "megacore").exists()
    assert convert([*ways, "--ignore-config-field", "scale_attn_by_inverse_layer_id"]) == 2
    assert "has no such field (did you mean scale_attn_by_inverse_layer_idx?)" in capsys.readouterr().err

    (directory / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoModel": "code.Model"}}))
    assert convert(ways) == 2
    assert convert([*ways, "--ignore-config-field", "auto_map"]) == 0
    to_hf(tmp_path / "megacore", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (directory / "config.json").read_bytes()
