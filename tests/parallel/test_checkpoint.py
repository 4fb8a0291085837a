"""Which checkpoint a run goes on with, and into which directory all ranks write. Damaged files are in
test_corruption.py; that any layout goes on with the checkpoint of any other are rows of tests/matrix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megacore.checkpoint.check import check_load
from megacore.checkpoint.choose import choose_checkpoint
from megacore.checkpoint.manifest import find_checkpoint, read_manifest, sealed
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.errors import CheckpointError, UserError
from megacore.parallel.mesh import ALONE, Mesh, build_mesh
from megacore.train import output
from tests.distributed import run_distributed
from tests.parity.runs import VOCAB, make_config, make_trainer


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
