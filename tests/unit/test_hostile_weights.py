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
from tests.cases import cases
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
HOSTILE = cases("hostile-directories", globals())


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
