"""Directories made to do harm: each is refused within a second (of a quiet machine), without memory, with nothing run,
read outside or left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megacore.convert.hf_directory import open_directory
from tests.e2e.launching import words
from tests.patience import patience
from tools.convert_checkpoint import main as convert

CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 11}
MOST_SECONDS, MOST_BYTES = 1.0, 50 << 20


class Payload:
    """What a pickle may do: here it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def directory(folder: Path, **config: Any) -> Path:
    """A directory with a config.json and a file of weights that is well formed."""
    path = folder / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({"transformer.wte.weight": torch.zeros(11, 8)}, path / "model.safetensors")
    return path


def index(path: Path, file: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"transformer.wte.weight": file}}))


def header(path: Path, entries: dict[str, Any] | bytes, length: int | None = None, data: int = 64) -> None:
    """A weight file with a header as given, and so many bytes of data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(text) if length is None else length
    (path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + bytes(data))


def entry(start: int, stop: int, shape: Any = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape if isinstance(shape, str) else list(shape), "data_offsets": [start, stop]}


# ---- what a hostile directory contains -------------------------------------------------------------------------------


def pickled_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(path.parent / "marker")))


def pickle_as_safetensors(path: Path) -> None:
    (path / "model.safetensors").write_bytes(pickle.dumps(Payload(path.parent / "marker")))


def pickle_in_the_index(path: Path) -> None:
    (path / "weights.bin").write_bytes(pickle.dumps(Payload(path.parent / "marker")))
    index(path, "weights.bin")


def remote_code(path: Path) -> None:
    (path / "evil.py").write_text(f"import os; os.mkdir({str(path.parent / 'marker')!r})")
    (path / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))


def outside(path: Path) -> Path:
    target = path.parent / "outside.safetensors"
    save_file({"transformer.wte.weight": torch.zeros(11, 8)}, target)
    return target


def name_upwards(path: Path) -> None:
    outside(path)
    index(path, "../outside.safetensors")


def name_absolute(path: Path) -> None:
    index(path, str(outside(path)))


def name_below(path: Path) -> None:
    (path / "below").mkdir()
    index(path, "below/model.safetensors")


def name_with_a_null(path: Path) -> None:
    index(path, "model\0.safetensors")


def link_to_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(outside(path))


def link_to_a_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").symlink_to("/etc/passwd")


def link_to_config(path: Path) -> None:
    (path / "config.json").rename(path.parent / "config.json")
    (path / "config.json").symlink_to(path.parent / "config.json")


def link_in_a_ring(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("model.safetensors")


def pipe_as_config(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


def huge_header(path: Path) -> None:
    header(path, b"{}", length=10**18)


def huge_header_in_a_huge_file(path: Path) -> None:
    header(path, b"{}", length=1 << 30)
    os.truncate(path / "model.safetensors", 1 << 33)  # sparse


def overlapping(path: Path) -> None:
    header(path, {"a": entry(0, 16), "b": entry(8, 24)}, data=24)


def gap(path: Path) -> None:
    header(path, {"a": entry(0, 16), "b": entry(32, 48)}, data=48)


def beyond_the_end(path: Path) -> None:
    header(path, {"a": entry(0, 1 << 40, shape=(1 << 38,))})


def overflowing(path: Path) -> None:
    header(path, {"a": entry(0, 16, shape=(1 << 40, 1 << 40))})


def negative(path: Path) -> None:
    header(path, {"a": entry(0, 16, shape=(-4,))})


def fractional(path: Path) -> None:
    header(path, {"a": entry(0, 16, shape=(4.0,))})


def unknown_dtype(path: Path) -> None:
    header(path, {"a": entry(0, 16, dtype="F4_E2M1X")})


def twice(path: Path) -> None:
    one = json.dumps(entry(0, 16))
    header(path, f'{{"a": {one}, "a": {one}}}'.encode(), data=16)


def deep(count: int = 1_000_000) -> bytes:
    return b'{"x": ' + b"[" * count


def deep_header(path: Path) -> None:
    header(path, deep())


def deep_config(path: Path) -> None:
    (path / "config.json").write_bytes(deep())


def deep_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_bytes(deep())


def large_config(path: Path) -> None:
    os.truncate(path / "config.json", 1 << 33)  # sparse


def full_index(path: Path) -> None:
    """As many names as fit into what is read."""
    names = {f"a{number}": f"{number}.safetensors" for number in range(120_000)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def full_header(path: Path) -> None:
    entries = {f"{number}": entry(0, 16) for number in range(14_000)}
    header(path, entries, data=16)


def many_digits(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG).replace('"n_layer": 1', '"n_layer": ' + "9" * 100_000))


def beyond_any_float(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 10**400}))


def many_layers(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "n_layer": 10_000}))


def wide(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, "n_embd": 1_000_000, "vocab_size": 100_000_000}))


def many_heads(path: Path) -> None:
    """A million heads: as many runs of rows in each layer, if anybody made them."""
    shape = {"n_embd": 1_000_000, "n_head": 1_000_000, "n_layer": 100}
    (path / "config.json").write_text(json.dumps({**CONFIG, **shape}))
    header(path, {f"t{i}": entry(0, 0, shape=(0,)) for i in range(300)}, data=0)


def many_heads_of_few_layers(path: Path) -> None:
    many_heads(path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"n_layer": 100', '"n_layer": 20'))


def many_heads_of_a_bert(path: Path) -> None:
    shape = {"hidden_size": 1_000_000, "num_attention_heads": 1_000_000, "num_hidden_layers": 12}
    (path / "config.json").write_text(json.dumps({"model_type": "bert", **shape, "vocab_size": 11}))
    header(path, {f"t{i}": entry(0, 0, shape=(0,)) for i in range(300)}, data=0)


def many_heads_with_norms(path: Path) -> None:
    """A million heads, each with norms of its own: as many names, if anybody made them."""
    shape = {"hidden_size": 1_000_000, "num_attention_heads": 1_000_000, "head_dim": 8}
    (path / "config.json").write_text(json.dumps({"model_type": "stablelm", **shape, "qk_layernorm": True}))
    header(path, {f"t{i}": entry(0, 0, shape=(0,)) for i in range(300)}, data=0)


HOSTILE: dict[Callable[[Path], None], str] = {
    pickled_weights: "pytorch_model.bin, a pickle.* save_pretrained, which writes safetensors",
    pickle_as_safetensors: "model.safetensors is not safetensors",
    pickle_in_the_index: "names 'weights.bin', which is not a .safetensors file",
    remote_code: "auto_map is {.*, but megacore has only None or {}",
    name_upwards: r"names a file outside itself, '\.\./outside",
    name_absolute: "names a file outside itself, '/",
    name_below: "names a file outside itself, 'below/",
    name_with_a_null: "names a file outside itself",
    link_to_weights: "model.safetensors is a link that leads out of the directory",
    link_to_a_tokenizer: "tokenizer.json is a link that leads out of the directory",
    link_to_config: "config.json is a link that leads out of the directory",
    link_in_a_ring: "is missing|has no model.safetensors",
    pipe_as_config: "config.json is not a regular file",
    huge_header: "is not safetensors: its header would have 1,000,000,000,000,000,000 bytes",
    huge_header_in_a_huge_file: "is not safetensors: its header would have 1,073,741,824 bytes",
    overlapping: "b overlaps another tensor",
    gap: "b leaves a gap before it",
    beyond_the_end: "its tensors end at",
    overflowing: "which do not fit its shape",
    negative: "no lists of counts",
    fractional: "no lists of counts",
    unknown_dtype: "has the dtype 'F4_E2M1X'",
    twice: "'a' is there twice",
    deep_header: "nested too deep",
    deep_config: "nested too deep",
    deep_index: "nested too deep",
    large_config: "config.json has 8,589,934,592 bytes, more than",
    full_index: "names 120000 files",
    full_header: "overlaps another tensor",
    many_digits: "is not valid JSON",
    beyond_any_float: "is not a finite number",
    many_layers: "too few for the 10000 layers",
    many_heads: "has 300 tensors, too few for the 100 layers",
    many_heads_of_few_layers: "does not hold what its config.json describes",
    many_heads_of_a_bert: "does not hold what its config.json describes",
    many_heads_with_norms: "has 300 tensors, too few for the 1000000 heads",
    wide: "does not hold what its config.json describes",
}


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what a first call loads."""
    path = directory(tmp_path_factory.mktemp("warm"))
    convert([*words(input=path, output=path.parent / "out"), "--from", "hf", "--to", "megacore"])


@pytest.mark.parametrize("harm", list(HOSTILE), ids=lambda harm: harm.__name__)
def test_harm_is_refused(harm: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory(tmp_path)
    harm(path)
    (tmp_path / "work").mkdir()
    before = sorted(file.name for file in tmp_path.iterdir())
    reset_peak()
    held, started = memory("VmRSS"), time.monotonic()
    status = convert([*words(input=path, output=tmp_path / "work" / "out"), "--from", "hf", "--to", "megacore"])
    seconds, grown = time.monotonic() - started, memory("VmHWM") - held
    said = capsys.readouterr().err
    assert status == 2
    assert re.search(HOSTILE[harm], said), said
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
