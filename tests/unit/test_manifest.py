"""The manifest of a checkpoint: what was written is read back, and whatever is wrong in it is named."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.checkpoint.check import changed_settings, check_settings
from megacore.checkpoint.files import FileEntry
from megacore.checkpoint.load import never_kept
from megacore.checkpoint.manifest import Manifest, Piece, TensorEntry, is_tiled, marked_in_doubt, read_manifest, sealed
from megacore.config import (
    AdamWConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megacore.errors import CheckpointError

WHOLE = Piece(file="model.safetensors", start=[0, 0], stop=[4, 5])
WRITTEN = Manifest(
    step=3,
    consumed_samples=24,
    counters={"updates": 3, "scale": 65536.0},
    topology={"tp": 1, "pp": 2, "dp": 1},
    config={"model": {"num_layers": 2}},
    files={"model.safetensors": FileEntry(bytes=80, sha256="0" * 64, xxh3_128="0" * 32)},
    tensors={"model": {"weight": TensorEntry(shape=[4, 5], dtype="float32", pieces=[WHOLE])}},
)
Place = tuple[str | int, ...]
OLD_SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0, "adam_beta2": 0.95}}  # before each had a section
NEW_SGD = {"optimizer": {"optimizer": "sgd"}, "sgd": {"sgd_momentum": 0.0}, "adamw": {"adam_beta2": 0.95}}


@pytest.mark.parametrize("settings", [OLD_SGD, NEW_SGD], ids=["old", "new"])
def test_settings_of_optimizers_are_read_wherever_they_stand(settings: dict[str, dict[str, Any]]) -> None:
    manifest = dataclasses.replace(WRITTEN, config=settings)
    assert never_kept(manifest) == {"momentum_buffer", "ema"}
    kept: dict[str, dict[str, Any]] = {"optimizer": {"optimizer": "sgd"}, "sgd": {"sgd_momentum": 0.9}}
    assert never_kept(dataclasses.replace(WRITTEN, config=kept)) == {"ema"}
    assert never_kept(WRITTEN) == {"ema"}
    assert never_kept(dataclasses.replace(WRITTEN, config={"average": {"ema_decay": 0.9}})) == set()
    config = Config(
        model=ModelConfig(vocab_size=8), adamw=AdamWConfig(adam_beta2=0.999), training=TrainingConfig(train_iters=1)
    ).resolve(1)
    assert "--optimizer beta2=0.95 -> 0.999" in changed_settings(config, manifest)


@pytest.mark.parametrize(("min_lr", "given"), [(0.1, True), (0.2, False), (0.2, True)])
def test_another_schedule_is_refused_where_it_must_be_the_same(min_lr: float, given: bool) -> None:
    model, optimizer = ModelConfig(vocab_size=8), OptimizerConfig(lr=1.0, min_lr=min_lr)
    checkpoint = CheckpointConfig(load="run", same_schedule=given)
    training = TrainingConfig(train_iters=9)
    config = Config(model=model, optimizer=optimizer, training=training, checkpoint=checkpoint).resolve(1)
    settings = dataclasses.asdict(config)
    settings["optimizer"]["min_lr"] = 0.1
    differs = pytest.raises(CheckpointError, match=r"differ \(there -> here\): --min-lr 0.1 -> 0.2: use the values")
    with differs if given and min_lr != 0.1 else contextlib.nullcontext():
        check_settings(config, Path("step_3"), dataclasses.replace(WRITTEN, config=settings))


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """The way to every value in a JSON document."""
    if here:
        yield here
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*here, key))


PLACES = list(places(json.loads(WRITTEN.to_json())))


def read_with(directory: Path, place: Place, change: Any) -> Manifest:
    """Read the manifest with one value replaced, or removed where the change is `del`."""
    raw = json.loads(WRITTEN.to_json())
    inner = raw
    for key in place[:-1]:
        inner = inner[key]
    if change == "del":
        del inner[place[-1]]
    else:
        inner[place[-1]] = copy.deepcopy(change)
    raw.pop("manifest_sha256", None)
    (directory / "manifest.json").write_text(sealed(raw))
    return read_manifest(directory)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(WRITTEN.to_json())
    assert read_manifest(tmp_path) == WRITTEN


def test_a_manifest_of_an_older_version_is_written_as_it_was_read(tmp_path: Path) -> None:
    """It has no XXH3. A mark changes nothing else, even what this version does not know."""
    path, raw = tmp_path / "manifest.json", json.loads(WRITTEN.to_json())
    del raw["files"]["model.safetensors"]["xxh3_128"]
    path.write_text(sealed(raw))
    old = read_manifest(tmp_path)
    path.write_text(old.to_json())
    assert read_manifest(tmp_path) == old
    raw |= {"of a later version": {"a": None}, "counters": {"updates": 3, "scale": 65536.0}}
    path.write_text(sealed(raw))
    path.write_text(marked_in_doubt(tmp_path))
    assert read_manifest(tmp_path) == dataclasses.replace(old, counters=old.counters | {"in_doubt": 1})
    assert path.read_text() == sealed(raw | {"counters": raw["counters"] | {"in_doubt": 1}})


@pytest.mark.parametrize(
    ("place", "change", "problem"),
    [
        (("step",), 0, "step is 0, but its directory's name says 3"),
        (("step",), 4, "step is 4, but its directory's name says 3"),
        (("consumed_samples",), 0, "consumed_samples is 0 after step 3"),
        (("topology",), {}, "topology is {}: it does not name"),
        (("topology", "pp"), 0, "topology is .*: it does not name"),
        (("schema",), 3, "schema is 3, but its tensors are those of schema 2"),
        (("schema",), 4, "schema 4, but this version reads schemas 2 and 3"),
        (("files", "model.safetensors", "sha256"), None, "sha256 is not a text"),
        (("files", "model.safetensors", "sha256"), "", "sha256 is not a digest of 64 hexadecimal digits"),
        (("files", "model.safetensors", "xxh3_128"), None, "xxh3_128 is not a text"),
        (("tokenizer",), "0" * 64, "but no file of it is listed"),
    ],
)
def test_a_value_that_contradicts_the_rest_is_refused_by_name(
    place: Place, change: Any, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "step_00000003").mkdir()
    with pytest.raises(CheckpointError, match=problem):
        read_with(tmp_path / "step_00000003", place, change)


@pytest.mark.parametrize(
    ("name", "number"),
    [("updates", -1), ("updates", 1.5), ("updates", 2**49), ("scale", 0), ("scale", 1e300), ("learning_rate", -1.0)],
)
def test_a_counter_out_of_range_is_refused_by_name(name: str, number: float, tmp_path: Path) -> None:
    counters = {"updates": 3, "scale": 65536.0, "learning_rate": 0.0, "allowance": -2}  # as an early version counted
    assert read_with(tmp_path, ("counters",), counters).counters == counters
    with pytest.raises(CheckpointError, match=rf"counters\.{name} is .* from "):
        read_with(tmp_path, ("counters",), counters | {name: number})


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    body = WRITTEN.to_json().split("\n", 2)[2].replace(' "step": 3', ' "step": 3,\n "step": 4')
    digest = hashlib.sha256(body.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(f'{{\n "manifest_sha256": "{digest}",\n{body}')
    with pytest.raises(CheckpointError, match="'step' is there twice"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "wrong", [None, True, 1.5, -1, "x", [], ["x"], [None], {}, {"x": 1}, float("nan"), "del"], ids=str
)
def test_a_value_of_another_kind_is_named_and_never_an_accident(tmp_path: Path, wrong: Any) -> None:
    said = []
    for place in PLACES:
        with contextlib.suppress(CheckpointError):  # some values may be what is wrong here
            read_with(tmp_path, place, wrong)
            continue
        with pytest.raises(CheckpointError) as caught:
            read_with(tmp_path, place, wrong)
        said.append((str(place[0]), str(caught.value)))
    assert len(said) >= 10
    assert all(name in message for name, message in said)


# ---- pieces cover a tensor exactly, in any number of dimensions ------------------------------------------------------

Box = tuple[list[int], list[int]]  # start, stop


def entry(shape: list[int], boxes: list[Box]) -> TensorEntry:
    return TensorEntry(
        shape=shape, dtype="float32", pieces=[Piece(file="f", start=start, stop=stop) for start, stop in boxes]
    )


PINWHEEL: list[Box] = [([0, 0], [2, 1]), ([2, 0], [3, 2]), ([1, 2], [3, 3]), ([0, 1], [1, 3]), ([1, 1], [2, 2])]


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ([], [([], [])], True),
        ([], [([], []), ([], [])], False),
        ([0, 3], [([0, 0], [0, 3])], True),
        ([4], [([0], [4]), ([4], [4])], False),
        ([4], [([0], [5])], False),
        ([3, 3], PINWHEEL, True),
        ([2, 2], [([0, 0], [2, 1]), ([0, 0], [2, 1])], False),  # as many elements as the tensor
        ([2] * 20, [([0] * 20, [1] * 20)] * 4, False),
        ([4, 4], [], False),
    ],
)
def test_pieces_by_hand(shape: list[int], boxes: list[Box], expected: bool) -> None:
    assert is_tiled(entry(shape, boxes)) == expected


def test_pieces_cover_as_a_count_of_every_element_says() -> None:
    random, seen = np.random.default_rng(1), set()
    for _ in range(3000):
        shape = [int(n) for n in random.integers(1, 4, random.integers(1, 4))]
        boxes = halves(random, [0] * len(shape), shape, int(random.integers(0, 3)))
        if random.random() < 0.5:  # a piece is lost, doubled or moved
            change, number = random.integers(3), int(random.integers(len(boxes)))
            if change == 0:
                del boxes[number]
            elif change == 1:
                boxes.append(boxes[number])
            else:
                start, stop = boxes[number]
                boxes[number] = ([max(0, a - 1) for a in start], stop)
        counts = np.zeros(shape, dtype=int)
        for start, stop in boxes:
            counts[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] += 1
        expected = bool((counts == 1).all())
        assert is_tiled(entry(shape, boxes)) == expected, (shape, boxes)
        seen.add((len(shape), expected))
    assert seen == {(d, tiled) for d in (1, 2, 3) for tiled in (True, False)}


def halves(random: np.random.Generator, start: list[int], stop: list[int], depth: int) -> list[Box]:
    """A box, or what random cuts make of it."""
    wide = [d for d, (a, b) in enumerate(zip(start, stop, strict=True)) if b - a > 1]
    if depth == 0 or not wide:
        return [(start, stop)]
    dimension = int(random.choice(wide))
    cut = int(random.integers(start[dimension] + 1, stop[dimension]))
    left = [*stop[:dimension], cut, *stop[dimension + 1 :]]
    right = [*start[:dimension], cut, *start[dimension + 1 :]]
    return halves(random, start, left, depth - 1) + halves(random, right, stop, depth - 1)
