"""Which checkpoint a run goes on with, on any layout, and into which directory all ranks write; damaged and hostile
files are refused by name. That any layout goes on with the checkpoint of any other are rows of tests/matrix."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from megacore.checkpoint.check import check_load
from megacore.checkpoint.choose import choose_checkpoint, whole
from megacore.checkpoint.load import Reader
from megacore.checkpoint.manifest import find_checkpoint, read_manifest, sealed
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.errors import CheckpointError, UserError
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.parallel.sharding import Slices
from megacore.train import output
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.parity.runs import VOCAB, Layout, gather, make_config, make_trainer
from tests.patience import patience
from tests.unit.hostile import Payload


def one_process(directory: Path, **changes: Any) -> Any:
    return make_trainer(make_config((1, 1, 1), directory, **changes), Mesh(device=torch.device("cpu")))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one step, which nobody changes."""
    directory = tmp_path_factory.mktemp("saved")
    trainer = one_process(directory)
    trainer.train_step(next(trainer.batches))
    trainer.save()
    return directory


@pytest.fixture
def checkpoint(saved_once: Path, tmp_path: Path) -> Path:
    """The checkpoint of that run in a copy of its directory."""
    shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step_00000001"


def test_another_model_is_refused_by_tensor_name(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"embedding.positions is \(16, 32\) there, but \(16, 64\) in this model"):
        one_process(checkpoint.parent, load=str(checkpoint), hidden_size=64)


def rewrite(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Write a changed manifest as if a run had."""
    manifest.pop("manifest_sha256", None)
    (checkpoint / "manifest.json").write_text(sealed(manifest))


@pytest.mark.parametrize("kinds", [["exp_avg"], ["exp_avg", "exp_avg_sq"]])
def test_missing_optimizer_state_is_refused_by_name(checkpoint: Path, kinds: list[str]) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for kind in kinds:
        del manifest["tensors"][kind]
    rewrite(checkpoint, manifest)
    with pytest.raises(CheckpointError, match=f"has no {' and no '.join(kinds)} of the optimizer, after 1 updates"):
        one_process(checkpoint.parent, load=str(checkpoint))
    manifest["counters"]["updates"] = 0  # every step was skipped: there is no state yet
    rewrite(checkpoint, manifest)
    one_process(checkpoint.parent, load=str(checkpoint))


def test_the_newest_complete_step_of_a_run_is_found(checkpoint: Path) -> None:
    run = checkpoint.parent
    (run / "step_00000009.tmp").mkdir()
    assert find_checkpoint(run) == checkpoint
    (run / "step_00000000").mkdir()  # no manifest: nobody knows when it was published
    assert find_checkpoint(run) == run / "step_00000000"
    with pytest.raises(CheckpointError, match=r"step_00000000/manifest.json is missing"):
        one_process(run / "other", load=str(run))
    with pytest.raises(CheckpointError, match=r"step_00000000 holds no checkpoint \(its manifest.json is missing\)"):
        find_checkpoint(run / "step_00000000")


@pytest.mark.parametrize(
    "kind", ["rope", "learned", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("alibi", "none"))]
)
def test_the_context_may_change_unless_positions_are_a_table(tmp_path: Path, kind: str) -> None:
    one_process(tmp_path, position_embedding_type=kind).save()
    for length in (8, 64):
        longer = make_config((1, 1, 1), tmp_path, position_embedding_type=kind, seq_length=length, load="auto")
        if kind == "learned":
            with pytest.raises(CheckpointError, match=f"--max-position-embeddings 16 there, {length} here"):
                check_load(longer)
        else:
            check_load(longer)
            one_process(tmp_path, position_embedding_type=kind, seq_length=length, load=str(tmp_path))
    other = make_config((1, 1, 1), tmp_path, position_embedding_type=kind, num_layers=3, norm_epsilon=1e-6, load="auto")
    with pytest.raises(CheckpointError, match="--num-layers 5 there, 3 here, --norm-epsilon 1e-05 there, 1e-06 here"):
        check_load(other)


@pytest.mark.parametrize("others", [False, True])
def test_a_checkpoint_that_is_gone_is_missed(checkpoint: Path, others: bool) -> None:
    run, aside = checkpoint.parent, checkpoint.parent.parent / "aside"
    if others:
        shutil.copytree(checkpoint, run / "step_00000001.2")
    checkpoint.rename(aside)
    choice = choose_checkpoint(make_config((1, 1, 1), run, load="auto"), ALONE)
    assert choice.directory == (run / "step_00000001.2" if others else None)
    assert choice.refused == (f"{run}/latest names step_00000001, which is not there any more",)
    aside.rename(checkpoint)
    assert choose_checkpoint(make_config((1, 1, 1), run, load="auto"), ALONE).refused == ()


def held(rank: int, world_size: int, directories: list[str]) -> str:
    """What this rank says where --output-dir names its own of these directories."""
    output.PATIENCE_SECONDS = 0.3
    config = make_config((1, 1, world_size), directories[rank])
    try:
        with output.output_directory(config, build_mesh(config.parallel)):
            return "held"
    except UserError as error:
        return str(error)


def test_all_ranks_write_into_one_directory_whatever_its_path(tmp_path: Path) -> None:
    """Found out at launch, and not at the first save, when there is something to lose."""
    run, link, other = tmp_path / "run", tmp_path / "link", tmp_path / "other"
    link.symlink_to(run)
    assert run_distributed(held, 3, [str(run), str(link), str(run)]) == ["held"] * 3
    other.mkdir()
    shutil.copy(run / "writer.lock", other)  # of an earlier run
    refused = (
        f"--output-dir {other} of ranks 1, 2 is not the directory that rank 0 writes to: give every rank the same "
        "one, on a file system that all nodes share"
    )
    assert run_distributed(held, 3, [str(run), str(other), str(other)]) == [refused] * 3
    assert run_distributed(held, 2, [str(run), str(run)]) == ["held"] * 2  # nobody has kept the lock


def test_the_tokenizer_is_the_one_that_the_run_began_with(tmp_path: Path) -> None:
    """Its file may change while the run goes on."""
    file = tmp_path / "tokenizer.json"

    def write(words: list[str]) -> None:
        Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")).save(str(file))

    words = [f"w{number}" for number in range(VOCAB)]
    write(words)
    fingerprint = load_tokenizer(file).fingerprint
    trainer = one_process(tmp_path / "run", tokenizer=str(file))
    write(words[::-1])
    trainer.save()
    saved = find_checkpoint(tmp_path / "run")
    assert load_tokenizer(saved / "tokenizer").fingerprint == read_manifest(saved).tokenizer == fingerprint


# ---- damaged files ---------------------------------------------------------------------------------------------------

FLIPS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with two checkpoints, each with a tokenizer."""
    directory = tmp_path_factory.mktemp("run")
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    config = make_config((1, 1, 1), directory / "out", tokenizer=str(directory / "tokenizer.json"))
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        trainer.save()
    return directory / "out"


@pytest.fixture
def newest(run: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of the run."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy" / "step_00000002"


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def refused(directory: Path, file: Path) -> None:
    """The damaged file is named, in seconds of computing, and the checkpoint before is taken."""
    start = time.process_time()
    problem = whole(directory, ALONE)
    assert problem is not None
    assert str(file) in problem
    choice = choose_checkpoint(make_config((1, 1, 1), directory.parent, load="auto"), ALONE)
    assert choice.directory == directory.with_name("step_00000001")
    assert choice.refused == (problem,)
    assert time.process_time() - start < patience(2)


def test_every_flipped_bit_is_refused_by_file_name(newest: Path) -> None:
    generator = random.Random(7)
    files = files_of(newest)
    for number in range(FLIPS):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        bit = generator.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        good = file.read_bytes()
        file.write_bytes(content)
        refused(newest, file)
        file.write_bytes(good)
    assert whole(newest, ALONE) is None


def test_a_file_beside_the_tokenizer_is_refused_by_name(newest: Path) -> None:
    (newest / "tokenizer" / "tokenizer.model").touch()
    refused(newest, newest / "tokenizer" / "tokenizer.model")
    for check in (check_load, lambda config: choose_checkpoint(config, ALONE)):
        with pytest.raises(CheckpointError, match=r"tokenizer.model is not among the files of the manifest"):
            check(make_config((1, 1, 1), newest.parent, load=str(newest)))


def test_every_truncated_or_missing_file_and_every_shard_of_another_step_is_refused_by_name(newest: Path) -> None:
    for file in files_of(newest):
        good, size = file.read_bytes(), file.stat().st_size
        other = newest.with_name("step_00000001") / file.relative_to(newest)
        shards = [other.read_bytes()] if file.suffix == ".safetensors" else []
        for content in (b"", good[:1], good[: size // 2], good[:-1], *shards):
            file.write_bytes(content)
            refused(newest, file)
        file.unlink()
        refused(newest, file)
        file.write_bytes(good)


@pytest.mark.parametrize("lost", ["model-pp0-tp0.safetensors", "manifest.json"])
def test_a_run_with_nothing_whole_is_refused_and_never_started_afresh(newest: Path, lost: str) -> None:
    for directory in newest.parent.glob("step_*"):
        (directory / lost).unlink()
    for load in ("auto", str(newest.parent)):
        with pytest.raises(CheckpointError, match=rf"none of the 2 .* can be continued: .*step_00000002/{lost}.*"):
            choose_checkpoint(make_config((1, 1, 1), newest.parent, load=load), ALONE)


def test_checkpoints_that_were_moved_away_and_linked_are_taken(newest: Path) -> None:
    """With one of them gone, it is named, and the other one taken."""
    big, older = newest.parent.parent / "big", newest.with_name("step_00000001")
    big.mkdir()
    for directory in (newest, older):
        directory.rename(big / directory.name)
        directory.symlink_to(big / directory.name)
    config = make_config((1, 1, 1), newest.parent, load="auto")
    assert choose_checkpoint(config, ALONE).directory == newest
    loaded = make_config((1, 1, 1), newest.parent, load=str(newest), keep_last=1)
    trainer = make_trainer(loaded, Mesh(device=torch.device("cpu")))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    assert [whole(big / name, ALONE) for name in (newest.name, older.name)] == [None, None]
    shutil.rmtree(newest.with_name("step_00000003"))
    shutil.rmtree(big / newest.name)
    choice = choose_checkpoint(config, ALONE)
    problem = f"{newest} is a link to {big / newest.name}, which is not there: the checkpoint is incomplete"
    gone = f"{newest.parent / 'latest'} names step_00000003, which is not there any more"
    assert (choice.directory, choice.refused) == (older, (gone, problem))


# ---- hostile checkpoints: whoever made them has made their digests too


def rewritten(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and seal it as its writer would."""
    raw = json.loads((directory / "manifest.json").read_text())
    del raw["manifest_sha256"]
    change(raw)
    (directory / "manifest.json").write_text(sealed(raw))


def replaced(directory: Path, file: str, content: bytes) -> None:
    """Replace a file, with its size and digest in the manifest."""
    (directory / file).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewritten(directory, lambda raw: raw["files"].update({file: entry}))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The test fails where the process grows by more than 50 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


NAMES = ["../outside", "/etc/passwd", "a/../../outside", "tokenizer/../../outside", "tokenizer/", "..", ".", "", "a\\b"]
NAMES += ["tokenizer/a/b", "a\0b", "manifest.json"]


@pytest.mark.usefixtures("little_memory")
def test_a_name_outside_the_directory_is_refused(newest: Path) -> None:
    (newest.parent / "outside").write_text("secret")
    entry, good = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}, (newest / "manifest.json").read_text()
    for name in NAMES:
        rewritten(newest, lambda raw, name=name: raw["files"].update({name: entry}))  # type: ignore[misc]
        assert "names a file outside its directory" in str(whole(newest, ALONE)), name
        (newest / "manifest.json").write_text(good)


@pytest.mark.parametrize("what", ["file", "directory", "pipe"])
def test_links_and_pipes_are_refused_and_not_opened(newest: Path, what: str) -> None:
    file = newest / ("tokenizer" if what == "directory" else "model-pp0-tp0.safetensors")
    aside = newest.parent / "aside"
    file.rename(aside)
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(aside)
    assert str(file) in str(whole(newest, ALONE))


BOMBS = {
    "deep": lambda: b"[" * 1_000_000,
    "wide": lambda: b"[" + b"0," * 10_000_000 + b"0]",
    "long": lambda: b" " * (1 << 26) + b"{}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_json_bomb_is_refused(newest: Path, bomb: str) -> None:
    body = b' "serial": 9,\n "x": ' + BOMBS[bomb]() + b"}\n"
    seal = b'{\n "manifest_sha256": "%s",\n' % hashlib.sha256(body).hexdigest().encode()
    (newest / "manifest.json").write_bytes(seal + body)
    del body
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    refused(newest, newest / "manifest.json")
    assert time.monotonic() - start < patience(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def tables() -> dict[str, bytes]:
    """Files with wrong tables."""

    def shard(header: dict[str, Any] | bytes, data: bytes = b"\0" * 64) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return {
        "giant": struct.pack("<Q", 10**18) + b"{}",
        "beyond the file": struct.pack("<Q", 1000) + b"{}",
        "large": shard(b" " * 10_000_000),
        "deep": shard(b"[" * 20_000),
        "no object": shard(b"[]"),
        "text": shard(b"\xff\xfe"),
        "overlapping": shard({"a": entry, "b": entry}),
        "empty": b"",
        "pickle": pickle.dumps(Payload("/tmp/megacore-executed")),
        "zip": b"PK\3\4" + b"\0" * 100,
    }


@pytest.mark.usefixtures("little_memory")
def test_a_shard_whose_table_lies_is_refused(newest: Path) -> None:
    for content in tables().values():
        replaced(newest, "model-pp0-tp0.safetensors", content)
        refused(newest, newest / "model-pp0-tp0.safetensors")
    assert not Path("/tmp/megacore-executed").exists()


@pytest.mark.usefixtures("little_memory")
def test_a_table_with_overlapping_tensors_is_refused_when_it_is_read(newest: Path) -> None:
    """The names and shapes are those of the manifest; where the bytes lie is not."""
    file = newest / "model-pp0-tp0.safetensors"
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    header["blocks.1.mlp.up.weight"] = header["blocks.0.mlp.up.weight"]
    text = json.dumps(header).encode().ljust(length)
    replaced(newest, file.name, struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=file.name):
        make_trainer(make_config((1, 1, 1), newest.parent, load=str(newest)), Mesh(device=torch.device("cpu")))


# ---- any layout goes on ----------------------------------------------------------------------------------------------

KINDS = ("exp_avg", "exp_avg_sq")


def whole_state(trainer: Trainer, mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    """Masters of all ranks, whole, and on the first rank their moments."""
    optimizer = trainer.update.optimizer
    state = {"model": gather(trainer, mesh, lambda owned: owned.master, everywhere=True)}
    for kind in KINDS:
        state[kind] = gather(trainer, mesh, lambda owned: owned.state(optimizer, kind))  # noqa: B023
    return state


def stored(directory: Path) -> dict[str, dict[str, Tensor]]:
    """What a checkpoint's files hold, put together by hand."""
    manifest = json.loads((directory / "manifest.json").read_text())
    files = {name: load_file(directory / name) for name in manifest["files"]}
    state: dict[str, dict[str, Tensor]] = {}
    for kind, table in manifest["tensors"].items():
        for name, entry in table.items():
            tensor = torch.full(entry["shape"], torch.nan)
            for piece in entry["pieces"]:
                where = tuple(slice(a, b) for a, b in zip(piece["start"], piece["stop"], strict=True))
                assert torch.isnan(tensor[where]).all(), "stored twice"
                tensor[where] = files[piece["file"]][name]
            assert not torch.isnan(tensor).any()
            state.setdefault(kind, {})[name] = tensor
    return state


def assert_equal(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys() == {"model", *KINDS}
    for kind, table in expected.items():
        assert found[kind].keys() == table.keys()
        for name, value in table.items():
            assert torch.equal(found[kind][name], value), (kind, name)
            assert value.any(), "a moment that is zero throughout"


def save(rank: int, world_size: int, layout: Layout, directory: str, changes: dict[str, Any]) -> None:
    """Take two steps, save, and compare the files with the state of all ranks."""
    config = make_config(layout, directory, micro_batch_size=1, global_batch_size=4, **changes)
    mesh = build_mesh(config.parallel)
    trainer = make_trainer(config, mesh)
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    state = whole_state(trainer, mesh)
    if rank == 0:
        assert_equal(stored(Path(directory) / "step_00000002"), state)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 2), {"zero_stage": 3}),
        pytest.param((1, 2, 2), {"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param((4, 1, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 2, 1), {"schedule": "interleaved", "virtual_stages": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_files_hold_the_state_of_all_ranks(layout: Layout, changes: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(save, layout[0] * layout[1] * layout[2], layout, str(tmp_path), changes)


def count_reads(rank: int, world_size: int, source: str) -> tuple[int, int, int, int]:
    """Elements that a rank of ZeRO-3 reads, owns, touches as whole rows beyond that, and reads at once."""
    read, sizes = Reader.read, []

    def counting(self: Reader, kind: str, name: str, wanted: Slices, out: Tensor | None = None) -> Tensor:
        sizes.append(math.prod(stop - start for start, stop in wanted))
        return read(self, kind, name, wanted, out)

    setattr(Reader, "read", counting)  # noqa: B010
    config = make_config((1, 1, 4), source, load=source, zero_stage=3)
    data_parallel = make_trainer(config, build_mesh(config.parallel)).model.data_parallel
    owned = sum(owned.segment.stop - owned.segment.start for owned in data_parallel.segments)
    widths = {p.spec.name: math.prod(p.shape[1:]) for p in data_parallel.parameters}
    return sum(sizes), owned, sum(2 * widths[owned.spec.name] for owned in data_parallel.segments), max(sizes)


def test_a_rank_reads_the_rows_that_it_owns_and_no_more(tmp_path: Path) -> None:
    run_distributed(save, 1, (1, 1, 1), str(tmp_path), {})
    total, largest = 0, 131 * 32
    for read_by_rank, owned, slack, at_once in run_distributed(count_reads, 4, str(tmp_path)):
        assert read_by_rank <= 3 * (owned + slack)
        assert at_once <= largest
        total += owned
    assert total < 75_000  # the whole model: each rank has a quarter of it
