"""tools/convert_checkpoint.py from its command line: what is carried along, what each flag does, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from megacore.data.tokenizers.tokenizer import JsonTokenizer
from megacore.parallel.mesh import Mesh
from tests.e2e.launching import alone, words
from tests.parity.hf_models import make_model, save_model
from tests.parity.runs import make_config, make_trainer
from tools.convert_checkpoint import main as convert
from tools.generate import main as generate
from tools.inspect_checkpoint import main

THERE, BACK = ("--from", "hf", "--to", "megacore"), ("--from", "megacore", "--to", "hf")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Llama of transformers with a tokenizer."""
    path = save_model(make_model("llama3"), tmp_path / "hf")
    words_of = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{k}": k for k in range(60)}, "word0"))
    words_of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    JsonTokenizer(words_of).save(path)
    (path / "special_tokens_map.json").write_text("{}")
    (path / "modeling.py").write_text("raise SystemExit")
    (path / "README.md").write_text("of the model")
    return path


def test_the_tokenizer_is_carried_and_used(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word1 word2 word3 " * 20)
    assert convert([*words(input=directory, output=tmp_path / "megacore", check_tokens=text), *THERE]) == 0
    assert "40 tokens: logits differ by at most" in capsys.readouterr().out
    assert convert([*words(input=tmp_path / "megacore", output=tmp_path / "back"), *BACK]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (directory / name).read_bytes(), name
    assert not {"modeling.py", "README.md"} & {path.name for path in (tmp_path / "back").iterdir()}
    assert generate(words(checkpoint=tmp_path / "megacore", prompt="word3", max_new_tokens=4)) == 0


def test_a_run_goes_on_from_a_converted_checkpoint_and_back_like_its_source(directory: Path, tmp_path: Path) -> None:
    """The shape is the checkpoint's; what is trained is handed back with the source's config.json and tokenizer."""
    assert convert([*words(input=directory, output=tmp_path / "megacore"), *THERE]) == 0
    flags = words(init_from_hf=directory, mock_data=True, seq_length=16, eval_interval=0, output_dir=tmp_path / "run")
    done = alone(*flags, *words(train_iters=2, lr=1e-3), timeout=120)
    assert done.returncode == 0, done.stderr
    like = words(input=tmp_path / "run", output=tmp_path / "trained", like=directory, dtype="bf16")
    assert convert([*like, *BACK]) == 0
    trained, config = load_file(tmp_path / "trained" / "model.safetensors"), tmp_path / "trained" / "config.json"
    before = load_file(directory / "model.safetensors")
    assert trained.keys() == before.keys()
    assert {value.dtype for value in trained.values()} == {torch.bfloat16}
    assert not torch.equal(trained["model.norm.weight"].float(), before["model.norm.weight"])
    expected = json.loads((directory / "config.json").read_text())
    assert json.loads(config.read_text()) == expected | {"dtype": "bfloat16"}
    assert (tmp_path / "trained" / "tokenizer.json").exists()


def test_like_another_model_is_refused(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert([*words(input=directory, output=tmp_path / "megacore"), *THERE]) == 0
    other = save_model(make_model("llama2"), tmp_path / "other")
    flags = words(input=tmp_path / "megacore", output=tmp_path / "out", like=other)
    assert convert([*flags, *BACK]) == 2
    said = capsys.readouterr().err
    assert said.startswith("convert_checkpoint.py: error: ") and said.count("\n") == 1
    assert "is of another model than the checkpoint: num_query_groups 4 there, 2 here" in said


# ---- tools/inspect_checkpoint.py -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, and one beside the second that is the same."""
    directory = tmp_path_factory.mktemp("run")
    trainer = make_trainer(make_config((1, 1, 1), directory), Mesh(device=torch.device("cpu")))
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        trainer.save()
    loaded = make_config((1, 1, 1), directory, load=str(directory / "step_00000002"))
    make_trainer(loaded, Mesh(device=torch.device("cpu"))).save()
    return directory


def test_a_run_is_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["checkpoint", "step", "serial", "MB", "mesh", "state"]
    assert [line[:3] for line in lines[1:]] == [
        ["step_00000002.2", "2", "3"],
        ["step_00000002", "2", "2"],
        ["step_00000001", "1", "1"],
    ]
    layout = ["pp", "1", "x", "dp", "1", "x", "tp", "1"]
    assert [line[4:] for line in lines[1:]] == [
        [*layout, "not", "verified,", "latest"],
        [*layout, "not", "verified"],
        [*layout, "not", "verified"],
    ]


def test_a_checkpoint_is_shown_and_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run / "step_00000001"), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "step 1, 8 samples, schema 2" in text
    assert "written on  pp 1 x dp 1 x tp 1" in text
    assert "every file has the size, the SHA-256 and the XXH3 of the manifest" in text
    assert ["embedding.tokens.weight", "131x32", "float32", "1", "model", "exp_avg", "exp_avg_sq"] in [
        line.split() for line in text.splitlines()
    ]


def test_two_are_compared_bit_for_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--diff", str(run / "step_00000002"), str(run / "step_00000002.2")]) == 0
    assert "tensors are equal bit for bit, 0 differ" in capsys.readouterr().out
    assert main(["--diff", str(run / "step_00000001"), str(run)]) == 1
    text = capsys.readouterr().out
    assert "  model blocks.0.attention.output.bias: 32 of 32 elements differ, by up to 0.0005" in text  # the rate
    assert "  step: 1 and 2" in text


def test_damage_is_named_and_ends_with_status_1(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "step_00000001"
    copy.mkdir()
    for file in (run / "step_00000001").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert main([str(tmp_path), "--verify"]) == 0
    capsys.readouterr()
    file = copy / "exp_avg-pp0-tp0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main([str(tmp_path)]) == 0  # which does not read it
    for name in (tmp_path, copy):
        capsys.readouterr()
        assert main([str(name), "--verify"]) == 1
        assert f"damaged: {file} has" in capsys.readouterr().out
    assert main(["--diff", str(copy), str(run / "step_00000001")]) == 2
    assert f"{file} has" in capsys.readouterr().err
