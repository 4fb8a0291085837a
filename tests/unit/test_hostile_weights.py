"""Directories made to do harm: each is refused within a second (of a quiet machine), without memory, with nothing run,
read outside or left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megacore.convert.hf_directory import open_directory
from tests.e2e.launching import words
from tests.patience import patience
from tests.unit.hostile import Payload
from tools.convert_checkpoint import main as convert

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 11}
MOST_SECONDS, MOST_BYTES = 1.0, 50 << 20


def directory(folder: Path) -> Path:
    """A directory with a config.json and a file of weights that is well formed; another such file is outside it."""
    path = folder / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for file in (path / "model.safetensors", folder / "outside.safetensors"):
        save_file({"transformer.wte.weight": torch.zeros(11, 8)}, file)
    return path


# ---- what harms a directory ------------------------------------------------------------------------------------------

Harm = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
DEEP = b'{"x": ' + b"[" * 1_000_000
MANY_HEADS: dict[str, Any] = {"n_embd": 1_000_000, "n_head": 1_000_000}
A_MILLION: dict[str, Any] = {"hidden_size": 1_000_000, "num_attention_heads": 1_000_000}


def holds(name: str, content: bytes | str) -> Harm:
    """A file has another content."""
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def config(model: Mapping[str, Any] = CONFIG, **changes: Any) -> Harm:
    """The config.json describes another model."""
    return holds("config.json", json.dumps({**model, **changes}))


def names(*files: str) -> Harm:
    """The index names these files of weights."""
    return holds(INDEX, json.dumps({"weight_map": {f"a{number}": file for number, file in enumerate(files)}}))


def header(entries: dict[str, Any] | bytes, length: int | None = None, data: int = 64) -> Harm:
    """The weight file has this header, and so many bytes of data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(text) if length is None else length
    return holds("model.safetensors", size.to_bytes(8, "little") + text + bytes(data))


def entry(start: int, stop: int, shape: Any = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


FEW_TENSORS = header({f"t{i}": entry(0, 0, shape=(0,)) for i in range(300)}, data=0)


def pickled(name: str) -> Harm:
    """A file is a pickle that runs something."""
    return lambda path: (path / name).write_bytes(pickle.dumps(Payload(path.parent / "marker")))


def gone(name: str) -> Harm:
    return lambda path: (path / name).unlink(missing_ok=True)


def links(name: str, target: str) -> Harm:
    """A file is a link."""
    return all_of(gone(name), lambda path: (path / name).symlink_to(target))


def sparse(name: str, size: int) -> Harm:
    return lambda path: os.truncate(path / name, size)


def all_of(*harms: Harm) -> Harm:
    return lambda path: [harm(path) for harm in harms]


LEADS_OUT, HAS_FEW = " is a link that leads out of the directory", "has 300 tensors, too few for the "
OTHER_SHAPES = "does not hold what its config.json describes"
TWICE = f'{{"a": {json.dumps(entry(0, 16))}, "a": {json.dumps(entry(0, 16))}}}'.encode()
HOSTILE: dict[str, tuple[Harm, str]] = {
    "pickled weights": (
        all_of(gone("model.safetensors"), pickled("pytorch_model.bin")),
        "pytorch_model.bin, a pickle.* save_pretrained, which writes safetensors",
    ),
    "pickle as safetensors": (pickled("model.safetensors"), "model.safetensors is not safetensors"),
    "pickle in the index": (
        all_of(pickled("weights.bin"), names("weights.bin")), "names 'weights.bin', which is not a .safetensors file",
    ),
    "remote code": (
        all_of(
            lambda path: holds("evil.py", f"import os; os.mkdir({str(path.parent / 'marker')!r})")(path),
            config(auto_map={"AutoModelForCausalLM": "evil.Model"}),
        ), "auto_map is {.*, but megacore has only None or {}",
    ),
    "name upwards": (names("../outside.safetensors"), r"names a file outside itself, '\.\./outside"),
    "name absolute": (
        lambda path: names(str(path.parent / "outside.safetensors"))(path), "names a file outside itself, '/",
    ),
    "name below": (
        all_of(lambda path: (path / "below").mkdir(), names("below/model.safetensors")),
        "names a file outside itself, 'below/",
    ),
    "name with a null": (names("model\0.safetensors"), "names a file outside itself"),
    "link to weights": (links("model.safetensors", "../outside.safetensors"), "model.safetensors" + LEADS_OUT),
    "link to a tokenizer": (links("tokenizer.json", "/etc/passwd"), "tokenizer.json" + LEADS_OUT),
    "link to a config": (
        all_of(lambda path: (path / "config.json").rename(path.parent / "c"), links("config.json", "../c")),
        "config.json" + LEADS_OUT,
    ),
    "link in a ring": (links("model.safetensors", "model.safetensors"), "is missing|has no model.safetensors"),
    "pipe as config": (
        all_of(gone("config.json"), lambda path: os.mkfifo(path / "config.json")), "config.json is not a regular file",
    ),
    "huge header": (header(b"{}", 10**18), "not safetensors: its header would have 1,000,000,000,000,000,000 bytes"),
    "huge header in a huge file": (
        all_of(header(b"{}", 1 << 30), sparse("model.safetensors", 1 << 33)),
        "is not safetensors: its header would have 1,073,741,824 bytes",
    ),
    "overlapping": (header({"a": entry(0, 16), "b": entry(8, 24)}, data=24), "b overlaps another tensor"),
    "gap": (header({"a": entry(0, 16), "b": entry(32, 48)}, data=48), "b leaves a gap before it"),
    "beyond the end": (header({"a": entry(0, 1 << 40, shape=(1 << 38,))}), "its tensors end at"),
    "overflowing": (header({"a": entry(0, 16, shape=(1 << 40, 1 << 40))}), "which do not fit its shape"),
    "negative": (header({"a": entry(0, 16, shape=(-4,))}), "no lists of counts"),
    "fractional": (header({"a": entry(0, 16, shape=(4.0,))}), "no lists of counts"),
    "unknown dtype": (header({"a": entry(0, 16, dtype="F4_E2M1X")}), "has the dtype 'F4_E2M1X'"),
    "twice": (header(TWICE, data=16), "'a' is there twice"),
    "deep header": (header(DEEP), "nested too deep"),
    "deep config": (holds("config.json", DEEP), "nested too deep"),
    "deep index": (holds(INDEX, DEEP), "nested too deep"),
    "large config": (sparse("config.json", 1 << 33), "config.json has 8,589,934,592 bytes, more than"),
    # As many names as fit into what is read.
    "full index": (names(*(f"{number}.safetensors" for number in range(120_000))), "names 120000 files"),
    "full header": (header({f"{n}": entry(0, 16) for n in range(14_000)}, data=16), "overlaps another tensor"),
    "many digits": (
        holds("config.json", json.dumps(CONFIG).replace('"n_layer": 1', '"n_layer": ' + "9" * 100_000)),
        "is not valid JSON: a number has 100,000 digits",
    ),
    "beyond any float": (config(vocab_size=10**400), "is not a finite number"),
    "many layers": (config(n_layer=10_000), "too few for the 10000 layers"),
    # A million heads: as many runs of rows in each layer, if anybody made them.
    "many heads": (all_of(config(**MANY_HEADS, n_layer=100), FEW_TENSORS), HAS_FEW + "100 layers"),
    "many heads of few layers": (all_of(config(**MANY_HEADS, n_layer=20), FEW_TENSORS), OTHER_SHAPES),
    "many heads of a BERT": (
        all_of(config({"model_type": "bert", **A_MILLION, "num_hidden_layers": 12, "vocab_size": 11}), FEW_TENSORS),
        OTHER_SHAPES,
    ),
    # Each head with norms of its own: as many names.
    "many heads with norms": (
        all_of(config({"model_type": "stablelm", **A_MILLION, "head_dim": 8, "qk_layernorm": True}), FEW_TENSORS),
        HAS_FEW + "1000000 heads",
    ),
    "wide": (config(n_embd=1_000_000, vocab_size=100_000_000), OTHER_SHAPES),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what a first call loads."""
    path = directory(tmp_path_factory.mktemp("warm"))
    convert([*words(input=path, output=path.parent / "out"), "--from", "hf", "--to", "megacore"])


@pytest.mark.parametrize("name", HOSTILE)
def test_harm_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, (harm, expected) = directory(tmp_path), HOSTILE[name]
    harm(path)
    (tmp_path / "work").mkdir()
    before = sorted(file.name for file in tmp_path.iterdir())
    reset_peak()
    held, started = memory("VmRSS"), time.monotonic()
    status = convert([*words(input=path, output=tmp_path / "work" / "out"), "--from", "hf", "--to", "megacore"])
    seconds, grown = time.monotonic() - started, memory("VmHWM") - held
    said = capsys.readouterr().err
    assert status == 2
    assert re.search(expected, said), said
    assert len(said) < 2000
    assert "Traceback" not in said
    assert seconds < patience(MOST_SECONDS)
    assert grown < MOST_BYTES, f"{grown / 2**20:.0f} MiB"
    assert sorted(file.name for file in tmp_path.iterdir()) == before, "something was made"
    assert not list((tmp_path / "work").iterdir()), "something was left"


def test_links_within_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    """A snapshot there consists of links to the blobs of the same model."""
    (tmp_path / "snapshots").mkdir()
    path = directory(tmp_path / "snapshots")
    (tmp_path / "blobs").mkdir()
    for file in list(path.iterdir()):
        file.rename(tmp_path / "blobs" / f"blob-{file.name}")
        file.symlink_to(f"../../blobs/blob-{file.name}")
    assert list(open_directory(path).tensors) == ["transformer.wte.weight"]


def memory(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `reset_peak`."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
