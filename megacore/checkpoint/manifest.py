"""The manifest: what a checkpoint directory contains, down to each file's size and SHA-256 and each tensor's pieces.
Plain JSON, read without torch. Its first line is the SHA-256 of all that follows. What it names is looked for in its
directory only, and it is parsed only if its size is in proportion."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megacore.checkpoint.directory import (
    HEAD,
    MANIFEST_NAME,
    MOST_MANIFEST_BYTES,
    is_sealed,
    published,
    step_of,
)
from megacore.checkpoint.files import TOKENIZER_DIRECTORY, FileEntry, open_regular
from megacore.config import SECTIONS, Config, ExpertsConfig, LoraConfig, ResolvedModel
from megacore.config.fields import Section
from megacore.errors import CheckpointError
from megacore.remote import L, Location, location
from megacore.safe_json import parse_json

S = TypeVar("S", bound=Section)

_BASE = "lora_base"

SCHEMA = 2  # as written where no tensor is cut in several dimensions: older versions read it
_SCHEMA_OF_BLOCKS = 3
_MOST_CUT_DIMENSIONS = 8
RANDOM = (
    "no generator has a state to keep: initial weights, dropout masks and the order of samples are functions of "
    "config.training.seed, of names and of positions in the run"
)
_MOST_VALUES = 2_000_000  # of a manifest; 100,000 pieces of tensors take about half of them
_LARGEST = 1 << 48  # of samples, bytes, rows: more would overflow what is computed with it
_LEAST = {"allowance": -_LARGEST}  # counters that earlier versions counted below 0
_RANGES_OF_FLOATS = {"scale": (1e-38, 3e38), "learning_rate": (0.0, 3e38)}  # counters that are no counts


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One contiguous slice of a global tensor, stored under the tensor's name in `file`."""

    file: str
    start: list[int]
    stop: list[int]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A global tensor and the pieces that tile it."""

    shape: list[int]
    dtype: str
    pieces: list[Piece]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a reader needs to know before it opens a shard."""

    serial: int = 1  # number of the checkpoint in its run's directory, in the order of their publication
    schema: int = SCHEMA  # version of this format: 2, or 3 where a tensor is cut in several dimensions
    step: int
    consumed_samples: int  # position in the data, all of it: every other property of the order is in `config`
    # Further numbers of the trainer: updates done, loss scale, learning rate of the last step, whether the weights are
    # in doubt, and whether a program describes the layers.
    counters: dict[str, float] = field(default_factory=dict)
    # Lists of numbers of the trainer by name: what the spike guard and adaptive clipping know, rollbacks.
    series: dict[str, list[float]] = field(default_factory=dict)
    topology: dict[str, int]  # ranks along each dimension of the mesh that wrote it, by name; a reader's may differ
    random: str = RANDOM  # what there is to say of random numbers
    # Fingerprint of the tokenizer, whose files are under `tokenizer/`; None where the run had none.
    tokenizer: str | None = None
    config: dict[str, dict[str, Any]]  # the full resolved configuration, section by section
    files: dict[str, FileEntry] = field(default_factory=dict)  # every other file of the directory
    # Kind (`model`, `exp_avg`, ...) -> global name -> entry.
    tensors: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    # The digest in the first line of the file that it was read from; "" for one that was not read.
    manifest_sha256: str = field(default="", compare=False)

    @property
    def is_in_doubt(self) -> bool:
        """Whether its weights may be of no use: it is taken only by its own name."""
        return self.counters.get("in_doubt", 0) > 0

    @property
    def has_own_layers(self) -> bool:
        """Whether a program described the layers, which the configuration does not tell."""
        return self.counters.get("own_layers", 0) > 0

    @property
    def updates(self) -> int:
        """How many steps have updated the weights; earlier versions did not count them."""
        return int(self.counters.get("updates", self.step))

    @property
    def weights(self) -> dict[str, FileEntry]:
        """The files of the weights, which tell equal weights of one layout."""
        names = self.files_of(["model"])
        return {name: entry for name, entry in self.files.items() if name in names}

    def files_of(self, kinds: Iterable[str] | None = None) -> set[str]:
        """The names of the files that hold tensors of some kinds; None: of all."""
        tables = [self.tensors.get(kind, {}) for kind in (self.tensors if kinds is None else kinds)]
        return {piece.file for table in tables for entry in table.values() for piece in entry.pieces}

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration's fields by their names, which are unique, whatever the section: that depends on the
        version that wrote the manifest."""
        sections = [section for section in self.config.values() if isinstance(section, dict)]
        return {name: value for section in sections for name, value in section.items()}

    def to_json(self) -> str:
        raw = asdict(self)
        for entry in raw["files"].values():
            if entry["xxh3_128"] is None:  # older manifests have only SHA-256
                del entry["xxh3_128"]
        return sealed(raw)


def sealed(raw: Mapping[str, Any]) -> str:
    """A manifest's text from its content: the digest of all that follows, then a line for each file and tensor."""
    inner = sorted(raw.keys() - {"serial", "manifest_sha256"})
    rest = [f' "serial": {json.dumps(raw.get("serial"))}']
    rest += [f" {json.dumps(key)}: {_lines(raw[key], 3)}" for key in inner]
    body = ",\n".join(rest) + "\n}\n"
    return f'{{\n "manifest_sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n{body}'


def _lines(value: Any, depth: int, indent: str = "  ") -> str:
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value, sort_keys=True)
    inner = [f"{indent}{json.dumps(key)}: {_lines(value[key], depth - 1, indent + ' ')}" for key in sorted(value)]
    return "{\n" + ",\n".join(inner) + "\n" + indent[:-1] + "}"


# What a directory of checkpoints of each, or that of one step, has in it, as the first rank of each form writes it.
# Megatron-DeepSpeed writes DeepSpeed's, and a file of Megatron-LM's beside them.
_OTHERS = {
    "deepspeed": ("a checkpoint of DeepSpeed", r"global_step\d+"),
    "megatron": ("a checkpoint of Megatron-LM", r"latest_checkpointed_iteration\.txt|mp_rank_00(_000)?|common\.pt"),
    "hf": ("a model of Hugging Face's", r"(model\.safetensors|pytorch_model\.bin)(\.index\.json)?"),
}
IN_DOUBT = "whose weights may be of no use: the steps with these weights were skipped, or the weights are too large"


def way_from_another_trainer(path: Location, then: str = "--load DIR") -> str | None:
    """What to do with a directory that is a checkpoint of another trainer's; None where it is none. `then`: the flag
    that takes what it is converted to."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError:
        return None
    for source, (what, mark) in _OTHERS.items():
        if any(re.fullmatch(mark, name) for name in names):
            return (
                f"it is {what}: use python tools/convert_checkpoint.py --from {source} --to megacore --input {path} "
                f"--output DIR, and then {then}"
            )
    return None


def way_to_a_checkpoint(path: Location) -> str:
    """What to do where a directory that is given as a checkpoint holds none: it may be another trainer's."""
    return way_from_another_trainer(path) or "give a step_NNNNNNNN directory or a run's output directory"


def find_checkpoint(path: L) -> L:
    """The checkpoint directory that `path` means: itself, or the last that was published in a run's output directory
    and is not in doubt, whether it is whole or not. Raises CheckpointError where there is none."""
    if (path / MANIFEST_NAME).is_file():
        return path
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        lost = f" (its {MANIFEST_NAME} is missing)" if step_of(path) is not None else ""
        raise CheckpointError(f"{path} holds no checkpoint{lost}: {way_to_a_checkpoint(path)}")
    for directory in checkpoints:
        if not _is_in_doubt(directory):
            return directory
    raise CheckpointError(f"{path} holds only checkpoints {IN_DOUBT}: give {checkpoints[0]} to use it nevertheless")


def _is_in_doubt(directory: Location) -> bool:
    try:
        return read_manifest(directory).is_in_doubt
    except CheckpointError:  # who opens it says what is wrong
        return False


def checkpoints_of(run: L) -> list[L]:
    """What `published` finds, for a reader: CheckpointError where that cannot be known."""
    try:
        return published(run)
    except OSError as error:
        raise CheckpointError(
            f"{run} cannot be looked through for checkpoints ({error.strerror}): "
            "give a step_NNNNNNNN directory or a run's output directory"
        ) from None


def sound(checkpoints: Iterable[L]) -> Iterator[tuple[L, Manifest]]:
    """Those whose manifest can be read and is not in doubt, with it."""
    for directory in checkpoints:
        try:
            manifest = read_manifest(directory)
        except CheckpointError:
            continue
        if not manifest.is_in_doubt:
            yield directory, manifest


def read_manifest(directory: Location, text: bytes | None = None) -> Manifest:
    """Parse a checkpoint's manifest, or the `text` that is to become it. Raises CheckpointError where there is none, or
    it is damaged or of another version."""
    path = directory / MANIFEST_NAME
    try:
        raw = parse_json(_unsealed(_read(path) if text is None else text))
        schema = _take(raw, "schema", int)
        if schema not in (SCHEMA, _SCHEMA_OF_BLOCKS):
            raise CheckpointError(
                f"{path}: schema {schema}, but this version reads schemas {SCHEMA} and {_SCHEMA_OF_BLOCKS}: "
                "use the version of megacore that wrote it"
            )
        manifest = Manifest(
            schema=schema,
            serial=_take(raw, "serial", int),
            random=_take(raw, "random", str),
            tokenizer=None if raw.get("tokenizer") is None else _take(raw, "tokenizer", str),
            step=_take(raw, "step", int),
            consumed_samples=_take(raw, "consumed_samples", int),
            counters={name: _counter(raw["counters"], name) for name in _take(raw, "counters", dict)},
            series={name: _numbers(raw["series"], name) for name in _take({"series": {}} | raw, "series", dict)},
            topology={name: _take(raw["topology"], name, int, "topology.") for name in _take(raw, "topology", dict)},
            config={name: _section(raw["config"], name) for name in _take(raw, "config", dict)},
            files={_own_name(name): _file_entry(raw["files"], name) for name in _take(raw, "files", dict)},
            tensors={kind: _table(raw["tensors"], kind) for kind in _take(raw, "tensors", dict)},
            manifest_sha256=_take(raw, "manifest_sha256", str),
        )
        _require_files(manifest)
        _require_facts(manifest, directory)
        return manifest
    except FileNotFoundError:
        raise CheckpointError(f"{_missing(directory)}: the checkpoint is incomplete") from None
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{path} cannot be read as a manifest: {reason}") from None


def marked_in_doubt(directory: Location, mark: int = 1) -> str:
    """The text of a checkpoint's manifest with the mark that its weights are in doubt, or with 0 that they are not."""
    read_manifest(directory)
    # Not from the parsed manifest: what a later version has added stays.
    raw = parse_json(_read(directory / MANIFEST_NAME))
    raw["counters"]["in_doubt"] = mark
    text = sealed(raw)
    read_manifest(directory, text.encode())
    return text


def _missing(directory: Location) -> str:
    """What is not there, where a manifest is not."""
    if isinstance(directory, Path) and directory.is_symlink() and not directory.exists():
        return f"{directory} is a link to {os.readlink(directory)}, which is not there"
    return f"{directory / MANIFEST_NAME} is missing" if directory.exists() else f"{directory} does not exist"


def _unsealed(text: bytes) -> bytes:
    """The text of a manifest, if it is as it was written, and not too large to parse."""
    head = HEAD.match(text)
    if head is None:
        try:
            schema = parse_json(text)["schema"] if len(text) < 1 << 20 else None
        except (ValueError, TypeError, KeyError):
            schema = None
        older = "it is of schema 1, which this version does not read" if schema == 1 else "its first line is damaged"
        raise ValueError(older)
    if not is_sealed(text):
        raise ValueError("its text does not have the SHA-256 of its first line: the file is damaged")
    # Counted before parsing: a value takes dozens of bytes of memory, where two are enough to write it.
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    return text


def _read(path: Location) -> bytes:
    size = path.stat().st_size
    if size > MOST_MANIFEST_BYTES:
        raise ValueError(f"it has {size:,} bytes, and a manifest has at most {MOST_MANIFEST_BYTES:,}")
    with open_regular(path) as file:
        return file.read(MOST_MANIFEST_BYTES + 1)


_KINDS = {dict: "an object", list: "a list", int: "a whole number", str: "a text"}


def _take(raw: Any, key: str, kind: type, where: str = "") -> Any:
    """`raw[key]`, which must be of a kind, and if it is a number a count, or ValueError; `where` is the path to `raw`,
    for the message."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where.rstrip('.') or 'the whole'} is not an object")
    if key not in raw:
        raise ValueError(f"{where}{key} is missing")
    if not isinstance(raw[key], kind) or isinstance(raw[key], bool):
        raise ValueError(f"{where}{key} is not {_KINDS[kind]}")
    if kind is int and not 0 <= raw[key] <= _LARGEST:
        raise ValueError(f"{where}{key} is {'negative' if raw[key] < 0 else 'beyond any count'}")
    return raw[key]


def _counts(raw: Any, key: str, where: str) -> list[int]:
    values: list[int] = _take(raw, key, list, where)
    if not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
        raise ValueError(f"{where}{key} is not a list of whole numbers from 0 to {_LARGEST}")
    return values


def _counter(raw: Mapping[str, Any], name: str) -> float:
    """A counter of the trainer: a whole number from 0, except for the two that are none."""
    value: Any = raw[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"counters.{name} is not a number")
    low, high = _RANGES_OF_FLOATS.get(name, (_LEAST.get(name, 0), _LARGEST))
    if not low <= value <= high or (name not in _RANGES_OF_FLOATS and value != int(value)):
        kind = "a number" if name in _RANGES_OF_FLOATS else "a whole number"
        raise ValueError(f"counters.{name} is {value:g}, not {kind} from {low:g} to {high:g}")
    return float(value)


def _numbers(series: Any, name: str) -> list[float]:
    values: list[Any] = _take(series, name, list, "series.")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise ValueError(f"series.{name} is not a list of numbers")
    return [float(value) for value in values]


def _section(config: Any, name: str) -> dict[str, Any]:
    """A section of the configuration, each field by the name that it has now."""
    names = SECTIONS[name].former_names if name in SECTIONS else {}
    return {names.get(key, key): value for key, value in _take(config, name, dict, "config.").items()}


def _file_entry(files: Any, name: str) -> FileEntry:
    entry, where = _take(files, name, dict, "files."), f"files.{name}."
    return FileEntry(
        bytes=_take(entry, "bytes", int, where),
        sha256=_digest(entry, "sha256", 64, where),
        xxh3_128=_digest(entry, "xxh3_128", 32, where) if "xxh3_128" in entry else None,  # older ones have only SHA-256
    )


def _digest(entry: Any, key: str, digits: int, where: str) -> str:
    value: str = _take(entry, key, str, where)
    if len(value) != digits or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{where}{key} is not a digest of {digits} hexadecimal digits")
    return value


def _table(tensors: Any, kind: str) -> dict[str, TensorEntry]:
    table = _take(tensors, kind, dict, "tensors.")
    return {name: _tensor_entry(table, name, f"tensors.{kind}.") for name in table}


def _tensor_entry(table: Any, name: str, where: str) -> TensorEntry:
    entry, where = _take(table, name, dict, where), f"{where}{name}."
    shape = _counts(entry, "shape", where)
    pieces = [
        _piece(piece, len(shape), f"{where}pieces.{number}.")
        for number, piece in enumerate(_take(entry, "pieces", list, where))
    ]
    return TensorEntry(shape=shape, dtype=_take(entry, "dtype", str, where), pieces=pieces)


def _piece(raw: Any, dimensions: int, where: str) -> Piece:
    piece = Piece(
        file=_take(raw, "file", str, where), start=_counts(raw, "start", where), stop=_counts(raw, "stop", where)
    )
    if not len(piece.start) == len(piece.stop) == dimensions:
        raise ValueError(f"{where}start and stop do not have a number for each dimension of the tensor")
    return piece


def _own_name(name: str) -> str:
    """A file name that stays inside the directory, or inside its tokenizer's."""
    # The files that a manifest names are read, so that none may lie elsewhere.
    last = name.removeprefix(f"{TOKENIZER_DIRECTORY}/")
    if "/" in last or "\\" in last or "\0" in last or last in ("", ".", "..", MANIFEST_NAME):
        raise ValueError(f"it names a file outside its directory: {name!r}")
    return name


def _require_files(manifest: Manifest) -> None:
    """Every piece lies in a file that there is, and the pieces of a tensor tile it."""
    for kind, table in manifest.tensors.items():
        for name, entry in table.items():
            for piece in entry.pieces:
                if piece.file not in manifest.files or "/" in piece.file:
                    raise ValueError(f"tensors.{kind}.{name} is in {piece.file!r}, which is not among its files")
            if not is_tiled(entry):
                raise ValueError(f"the pieces of tensors.{kind}.{name} do not tile it")


def _require_facts(manifest: Manifest, directory: Location) -> None:
    """What the manifest says agrees with itself and with its directory's name."""
    step, named = manifest.step, step_of(directory)
    is_converted = step == 0 and manifest.counters.get("updates", 0) == 0  # under any name
    if named not in (None, step) and not is_converted:
        raise ValueError(f"step is {step}, but its directory's name says {named}")
    if manifest.consumed_samples < step:
        raise ValueError(f"consumed_samples is {manifest.consumed_samples} after step {step}: fewer than one a step")
    if not manifest.topology or min(manifest.topology.values()) < 1:
        raise ValueError(f"topology is {manifest.topology}: it does not name dimensions of one rank or more")
    if manifest.schema != (needed := schema_of(manifest.tensors)):
        raise ValueError(f"schema is {manifest.schema}, but its tensors are those of schema {needed}")
    has_tokenizer = any(name.startswith(f"{TOKENIZER_DIRECTORY}/") for name in manifest.files)
    if manifest.tokenizer is not None and not has_tokenizer:
        raise ValueError(f"tokenizer is {manifest.tokenizer[:16]!r}, but no file of it is listed")


def is_tiled(entry: TensorEntry) -> bool:
    """Whether the pieces cover the tensor exactly, without a gap and without an overlap, in any number of
    dimensions."""
    if not all(0 <= a < b <= n for p in entry.pieces for a, b, n in zip(p.start, p.stop, entry.shape, strict=True)):
        return len(entry.pieces) == 1 and _cut_dimensions(entry) == []  # a tensor without elements
    cut = _cut_dimensions(entry)
    if not cut:
        return len(entry.pieces) == 1
    if len(cut) > _MOST_CUT_DIMENSIONS:
        return False
    # A box is known by its corners, each with the sign (-1)^(number of upper ends). Pieces cover every element exactly
    # once if and only if their corners add up to the tensor's: no piece need be compared with another.
    corners: Counter[tuple[int, ...]] = Counter()
    for upper in itertools.product((False, True), repeat=len(cut)):
        sign = -1 if sum(upper) % 2 else 1
        for piece in entry.pieces:
            corner = tuple(piece.stop[d] if up else piece.start[d] for d, up in zip(cut, upper, strict=True))
            corners[corner] += sign
        corners[tuple(entry.shape[d] if up else 0 for d, up in zip(cut, upper, strict=True))] -= sign
    return not any(corners.values())


def schema_of(tensors: Mapping[str, Mapping[str, TensorEntry]]) -> int:
    """The oldest version of the format in which these tables can be read."""
    several = any(len(_cut_dimensions(entry)) > 1 for table in tensors.values() for entry in table.values())
    return _SCHEMA_OF_BLOCKS if several else SCHEMA


def _cut_dimensions(entry: TensorEntry) -> list[int]:
    """The dimensions in which a piece is not the complete tensor."""
    sizes = enumerate(entry.shape)
    return [d for d, size in sizes if any((piece.start[d], piece.stop[d]) != (0, size) for piece in entry.pieces)]


def sections_as_dicts(config: Config) -> dict[str, dict[str, Any]]:
    """The sections of a configuration, for a manifest. The experts of a model are those of their section."""
    sections = asdict(config)
    sections["model"].pop("experts", None)
    return sections


def trained_model(manifest: Manifest, directory: Location) -> ResolvedModel:
    """The model that was trained, with its experts; arguments and errors as for `section_of`."""
    model = section_of(manifest, directory, "model", ResolvedModel)
    if "experts" not in manifest.config:
        return model
    experts = section_of(manifest, directory, "experts", ExpertsConfig)
    return replace(model, experts=experts.resolve(model.ffn_hidden_size))


def adapters_of(manifest: Manifest, directory: Location) -> LoraConfig:
    """The section of a checkpoint's adapters, without a rank where it has none; arguments and errors as for
    `section_of`."""
    return section_of(manifest, directory, "lora", LoraConfig) if "lora" in manifest.config else LoraConfig()


def base_of(manifest: Manifest, directory: Location, given: Path | str | None = None) -> Location:
    """The checkpoint of the weights that adapters were trained beside.

    Args:
        manifest: of the adapters.
        directory: their checkpoint, for the message.
        given: where it is; None: where the run found it.

    Raises:
        CheckpointError: it is not there, or the run had the weights from a directory of transformers.
    """
    source = str(given) if given is not None else manifest.settings.get("pretrained_checkpoint")
    if not isinstance(source, str):
        theirs = manifest.settings.get("init_from_hf") or "DIR"
        raise CheckpointError(
            f"{directory} has adapters, trained beside weights that are no checkpoint of megacore: first merge both "
            f"with {merging(directory, directory.parent)} --base {theirs}"
        )
    base = find_checkpoint(location(source))
    if _BASE in manifest.series and manifest.series[_BASE] != base_mark(str(base))[_BASE]:
        raise CheckpointError(
            f"the adapters of {directory} were trained beside another checkpoint than {base}, which {source} is now: "
            "give the step_NNNNNNNN directory of the right one, with --pretrained-checkpoint or --base"
        )
    return base


def merging(directory: Location, run: Location) -> str:
    """The command that adds the adapters of a checkpoint to their base. `run`: beside which the output is put."""
    tool = "python tools/convert_checkpoint.py --from megacore --to megacore --merge"
    return f"{tool} {directory} --output {run}-merged"


def base_mark(source: str | None) -> dict[str, list[float]]:
    """The series that tells which checkpoint adapters are trained beside: of its manifest's digest, as many bits as a
    float holds. `source`: it, or a run's directory, for its newest; None: there is none."""
    if source is None:
        return {}
    return {_BASE: [float(int(read_manifest(find_checkpoint(location(source))).manifest_sha256[:12], 16))]}


def section_of(manifest: Manifest, directory: Location, name: str, kind: type[S]) -> S:
    """A section of the configuration that the model was trained with. Raises CheckpointError."""
    try:
        section = kind(**manifest.config[name])
        problems = section.problems()
    except (KeyError, TypeError) as error:
        problems = [str(error)]
    if problems:
        raise CheckpointError(f"{directory}: its manifest does not describe a model ({'; '.join(problems)})")
    return section
