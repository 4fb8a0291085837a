"""What a configuration names on the disk and the disk does not have: asked on each machine, before torch is loaded."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeGuard

from megacore.config import Config
from megacore.config.checkpoint_section import AUTO
from megacore.config.messages import one_of
from megacore.config.toml import unsuitable

# What a run writes into its output directory beside the checkpoints' own directories.
_OUTPUT_FILES = ("config.toml", "metrics.jsonl", "trace.json", "latest", "writer.lock")
_ROOM_FOR_FILES = (
    100  # bytes of a path below it: step_00000100.2.tmp-0123abcd/momentum_buffer-pp100-tp100-dp100.safetensors
)


def missing_files(config: Config) -> list[str]:
    """Names the input files that do not exist on this machine, and an output directory that cannot be one."""
    # os.path, because pathlib raises for a name that is too long.
    data = config.data
    found = []
    if _given(data.tokenizer) and not (os.path.isfile(data.tokenizer) or os.path.isdir(data.tokenizer)):
        wrong = "is no file or directory" if os.path.exists(data.tokenizer) else "does not exist"
        found.append(
            f"--tokenizer {data.tokenizer} {wrong}: give a tokenizer.json, a directory that holds one, "
            "or a SentencePiece .model"
        )
    load, init = config.checkpoint.load, config.checkpoint.init_from_hf
    if _given(load) and load != AUTO and not os.path.isdir(load):
        found.append(f"--load {load} is not a directory: give a checkpoint directory, or leave --load out")
    if _given(init) and "init_from_hf" not in config.foreign and not os.path.isdir(init):
        found.append(f"--init-from-hf {init} is not a directory: give one with config.json and safetensors")
    own = config.parallel.schedule_csv
    if _given(own) and not os.path.isfile(own):
        found.append(
            f"--schedule-csv {own} is not a file: give a CSV with a row of computations for each pipeline rank"
        )
    elif _given(own) and (problem := unsuitable(own)):
        found.append(f"--schedule-csv {own} {problem}: give a schedule with fewer microbatches")
    try:
        prefixes = data.blend()[0]
    except ValueError:  # validate reports it
        prefixes = ()
    found += [problem for prefix in prefixes if _given(prefix) and (problem := _missing_dataset(prefix))]
    return found + _output_problem(Path(config.training.output_dir))


def _given(path: str | None) -> TypeGuard[str]:
    """Whether there is a path; that it is empty, `validate` reports."""
    return path is not None and bool(path.strip())


def _missing_dataset(prefix: str) -> str | None:
    missing = [ext for ext in (".bin", ".idx") if not os.path.isfile(prefix + ext)]
    if not missing:
        return None
    stem, ext = os.path.splitext(prefix)
    if ext in (".bin", ".idx"):
        return f"--data-path {prefix} must be a prefix, without the ending: use {stem}"
    written = [f"{prefix}_text_{kind}" for kind in ("document", "sentence")]  # the names that preprocess_data gives
    there = [name for name in written if os.path.isfile(name + ".idx")]
    if there:
        return f"--data-path {prefix} has no .bin and .idx: use {one_of(there)}"
    names = " and ".join(prefix + ext for ext in missing)
    return f"--data-path {prefix}: {names} not found: give the PREFIX of files that tools/preprocess_data.py wrote"


def _name_problem(directory: Path, existing: Path) -> str | None:
    """Why no directory of this name can be made there, nor the files of a checkpoint in it."""
    absolute = directory.absolute()
    most = os.pathconf(existing, "PC_NAME_MAX")
    for name in absolute.relative_to(existing).parts:
        if len(os.fsencode(name)) > most:
            return f"{name[:20]}... has {len(os.fsencode(name))} bytes, and a name has at most {most} there"
    longest = os.pathconf(existing, "PC_PATH_MAX") - _ROOM_FOR_FILES
    if len(os.fsencode(absolute)) > longest:
        return f"its path has {len(os.fsencode(absolute))} bytes, which leaves no room for the files in it"
    return None


def _output_problem(directory: Path) -> list[str]:
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if os.path.exists(p))
    if not existing.is_dir():
        return [f"--output-dir {directory} cannot be made: {existing} is not a directory: choose another name"]
    if problem := _name_problem(directory, existing):
        return [f"--output-dir {directory} cannot be made: {problem}: choose a shorter name"]
    try:
        # Asked by doing: permission bits say nothing of root, of a read-only mount or of /proc.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [
            f"--output-dir {directory} cannot be written: {existing}: {error.strerror}: choose another place, "
            "or make this one writable"
        ]
    return [
        f"--output-dir {directory}: its {name} is a directory, but the run writes a file of this name: "
        "choose another --output-dir, or move it away"
        for name in _OUTPUT_FILES
        if os.path.isdir(directory / name)
    ]
