"""What tests of conversion share: the tool, weights of a directory, and a load as a user does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from megacore.checkpoint.manifest import sealed
from megacore.data.tokenizers.tokenizer import JsonTokenizer
from tests.e2e.launching import words
from tools.convert_checkpoint import main as convert


def to_megacore(source: Path, target: Path, **flags: Any) -> None:
    assert convert([*words(input=source, output=target, **flags), "--from", "hf", "--to", "megacore"]) == 0


def to_hf(source: Path, target: Path, **flags: Any) -> None:
    assert convert([*words(input=source, output=target, **flags), "--from", "megacore", "--to", "hf"]) == 0


def weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, by stored name."""
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def require_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [n for n, value in one.items() if value.dtype != other[n].dtype or not torch.equal(value, other[n])] == []


def loads_as(directory: Path, kind: Any) -> Any:
    """The model as a user loads it, where nothing is missing or left over."""
    model, info = kind.from_pretrained(directory, output_loading_info=True, attn_implementation="eager")
    assert {name: found for name, found in info.items() if found} == {}
    return model


def change_manifest(checkpoint: Path, drop: str) -> None:
    """Take the files whose names begin so out of a checkpoint's manifest."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith(drop)}
    if drop == "tokenizer/":
        manifest["tokenizer"] = None
    (checkpoint / "manifest.json").write_text(sealed(manifest))


def forget_the_config(checkpoint: Path) -> None:
    """Take away what a checkpoint keeps of its origin: as if it had been trained here."""
    change_manifest(checkpoint, "hf_")
    for path in checkpoint.glob("hf_*"):
        path.unlink()


def tokenizer(special: dict[str, str], size: int = 60) -> JsonTokenizer:
    """A tokenizer of words, whose special tokens stand in the middle of its vocabulary.

    Args:
        special: what it has, by use: bos, eos, cls, ...
        size: of the vocabulary.
    """
    texts = [*(f"w{i}" for i in range(size // 2)), "[UNK]", *special.values()]
    texts += [f"w{i}" for i in range(len(texts), size)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special.values()))
    return JsonTokenizer(backend, special.get("eos"), named=special)
