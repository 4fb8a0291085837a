"""The tokenizer that an export carries: the checkpoint's own, every file as its manifest says, or one that means the
same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.launching import words
from tests.parity.conversions import change_manifest, forget_the_config, to_hf, to_megacore, tokenizer
from tests.parity.hf_models import make_model, save_model
from tools.convert_checkpoint import main as convert

ENDS = {"bos": "<begin>", "eos": "<end>"}
BACK = ("--from", "megacore", "--to", "hf")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer, and without a config.json of its own; the directory it came from is beside it."""
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    tokenizer(ENDS).save(directory)
    to_megacore(directory, tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    return tmp_path / "megacore"


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str], **flags: object) -> str:
    assert convert([*words(input=source, output=target, **flags), *BACK]) == 2
    assert not target.exists()
    return capsys.readouterr().err


def test_a_flipped_bit_is_not_published(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint / "tokenizer" / "tokenizer.json"
    text = bytearray(path.read_bytes())
    text[text.index(b'"w7"') + 2] ^= 1  # w6 is there twice, and means w7
    path.write_bytes(text)
    said = refused(checkpoint, tmp_path / "out", capsys)
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


def test_like_without_a_tokenizer_leaves_the_own_one(checkpoint: Path, tmp_path: Path) -> None:
    save_model(make_model("gpt2"), tmp_path / "like")
    to_hf(checkpoint, tmp_path / "out", like=tmp_path / "like")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / "tokenizer" / name).read_bytes()


def test_like_with_another_tokenizer_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tmp_path / "hf", tmp_path / "like")
    (tmp_path / "like" / "chat_template.jinja").write_text("{{ 1 }}")
    to_hf(checkpoint, tmp_path / "out", like=tmp_path / "like")
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    tokenizer(ENDS, size=61).save(tmp_path / "like")
    said = refused(checkpoint, tmp_path / "other", capsys, like=tmp_path / "like")
    assert "has another tokenizer than" in said
    assert "ids mean other texts" in said


def test_a_damaged_tokenizer_is_named_where_it_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_model(make_model("gpt2"), tmp_path / "hf")
    (directory / "tokenizer.json").write_text("[1")
    flags = words(input=directory, output=tmp_path / "out")
    assert convert([*flags, "--from", "hf", "--to", "megacore"]) == 2
    assert f"{directory}/tokenizer.json: not a `tokenizers` JSON file" in capsys.readouterr().err
