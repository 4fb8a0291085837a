"""The files and directories that a configuration names: asked on each machine, before torch is loaded."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import TypeGuard

from megacore.config.checkpoint import AUTO, OR_AUTO
from megacore.config.messages import one_of
from megacore.config.schema import Config
from megacore.config.spelling import flag, flag_and_value
from megacore.files import unreadable
from megacore.remote import RemotePath, is_url, url_problem

# What a run writes into its output directory beside the checkpoints' directories.
_OUTPUT_FILES = (
    "config.toml",
    "events.jsonl",
    "metrics.csv",
    "metrics.jsonl",
    "trace.json",
    "latest",
    "wandb_run_id",
    "writer.lock",
)
# Bytes of a path below the output directory, such as
# step_00000100.2.tmp-0123abcd/momentum_buffer-pp100-tp100-dp100.safetensors.
_ROOM_FOR_FILES = 100

NEEDED_BY_PLANS = ("--init-from-hf", "--schedule-csv")
"""Flags of files that say what the model or the schedule is: a plan, and a cut run, need them too."""


def missing_files(config: Config, world_size: int = 1) -> list[str]:
    """Names the input files that do not exist on this machine, and an output directory that cannot be written."""
    # os.path, because pathlib raises for a name that is too long.
    data = config.data
    problems = []
    tokenizer = data.tokenizer if _is_set(data.tokenizer) and not is_url(data.tokenizer) else None
    if tokenizer is not None and not (os.path.isfile(tokenizer) or os.path.isdir(tokenizer)):
        state = "is no file or directory" if os.path.exists(tokenizer) else "does not exist"
        if state == "does not exist" and re.fullmatch(r"\w[\w.-]*/[\w-]+", tokenizer):  # a name on a hub?
            state += " (megacore does not look names up on a hub)"
        problems.append(
            f"--tokenizer {tokenizer} {state}: use a tokenizer.json, a directory that contains one, "
            "or a SentencePiece .model"
        )
    if _is_set(data.merge_file) and not os.path.isfile(data.merge_file):
        problems.append(f"--merge-file {data.merge_file} is not a file: use the merges.txt that --tokenizer belongs to")
    problems += _url_problems(config, world_size)
    load, init = config.checkpoint.load, config.checkpoint.init_from_hf
    of_run, schedule = "use the directory of a checkpoint or of a run", config.parallel.schedule_csv
    for name, path, exists, instead in (
        ("load", None if load == AUTO else load, os.path.isdir, f"directory: {of_run}, {OR_AUTO}, or leave --load out"),
        ("pretrained_checkpoint", config.start.pretrained_checkpoint, os.path.isdir, f"directory: {of_run}"),
        ("init_from_hf", init, os.path.isdir, "directory: use one with config.json and safetensors files"),
        ("schedule_csv", schedule, os.path.isfile, "file: use a CSV file with one row per pipeline rank"),
    ):
        # `_url_problems` refuses a URL where none can be.
        if _is_set(path) and not is_url(path) and not exists(path) and name not in config.unsupported:
            problems.append(f"{flag_and_value(name, path)} is not a {instead}")
    if _is_set(schedule) and os.path.isfile(schedule) and (reason := unreadable(schedule)):
        problems.append(f"--schedule-csv {schedule} {reason}: use a schedule with fewer microbatches")
    try:
        prefixes = data.prefixes(named=False)
    except ValueError:  # validate reports it
        prefixes = ()
    typed = {word: name for name in ("valid_data_path", "train_data_path") for word in getattr(data, name)}
    datasets = [(f"{flag(typed.get(prefix, 'data_path'))} ", prefix) for prefix in prefixes]
    datasets += [(f"--valid-sets {name}=", prefix) for name, prefix in data.named_valid_sets().items()]
    problems += [
        problem for given, prefix in datasets if _is_set(prefix) and (problem := _missing_dataset(given, prefix))
    ]
    output = config.training.output_dir
    problems += [] if is_url(output) else _output_problem(Path(output))
    logging = config.logging
    if _is_set(logging.wandb_project) and importlib.util.find_spec("wandb") is None:
        problems.append(
            f"--wandb-project {logging.wandb_project} needs the package wandb, which is not installed: "
            "pip install wandb, or leave the flag out"
        )
    if _is_set(logging.tensorboard_dir) and not is_url(logging.tensorboard_dir):
        problems += unwritable("--tensorboard-dir", Path(logging.tensorboard_dir))
    return problems


def _url_problems(config: Config, world_size: int) -> list[str]:
    """What is wrong with the URLs of object stores: those that cannot be used, and those where only a path can be."""
    checkpoint, data, problems = config.checkpoint, config.data, []
    for name, url in (("--load", checkpoint.load), ("--pretrained-checkpoint", config.start.pretrained_checkpoint)):
        if _is_set(url) and is_url(url) and (problem := url_problem(url)):
            problems.append(f"{name} {problem}")
    if _is_set(checkpoint.save) and checkpoint.save.startswith("memory://") and world_size > 1:
        problems.append(
            f"--save {checkpoint.save} is in the memory of one process, but the run has {world_size}, and none "
            "would have a whole checkpoint: use a directory that all processes share, or the URL of a store"
        )
    elif _is_set(checkpoint.save) and (problem := url_problem(checkpoint.save, writes=True)):
        problems.append(f"--save {problem}")
    instead = {
        "--output-dir": (config.training.output_dir, "use a directory, and --save URL for the checkpoints"),
        "--data-cache-path": (data.data_cache_path, "use a directory of this node"),
        "--tensorboard-dir": (config.logging.tensorboard_dir, "use a directory"),
        "--tokenizer": (data.tokenizer, "download it, and give its path"),
        "--init-from-hf": (checkpoint.init_from_hf, "download it, and give its path"),
        "--schedule-csv": (config.parallel.schedule_csv, "download it, and give its path"),
    }
    for name, (url, way_out) in instead.items():
        if _is_set(url) and is_url(url):
            problems.append(
                f"{name} {url} is a URL, which only --save, --load, --pretrained-checkpoint and "
                f"--data-path may be: {way_out}"
            )
    return problems


def _is_set(path: str | None) -> TypeGuard[str]:
    """Whether there is a path. `validate` reports an empty one."""
    return path is not None and bool(path.strip())


def _missing_dataset(given: str, prefix: str) -> str | None:
    """Why there is no dataset of this prefix, which follows `given` on the command line."""
    if is_url(prefix):
        return _missing_remote(given, prefix)
    missing = [ext for ext in (".bin", ".idx") if not os.path.isfile(prefix + ext)]
    if not missing:
        return None
    stem, ext = os.path.splitext(prefix)
    if ext in (".bin", ".idx"):
        return f"{given}{prefix} must be a prefix without the suffix {ext}: use {stem}"
    written = [f"{prefix}_text_{kind}" for kind in ("document", "sentence")]  # what preprocess_data.py names them
    existing = [name for name in written if os.path.isfile(name + ".idx")]
    if existing:
        return f"{given}{prefix} has no .bin and .idx: use {one_of(existing)}"
    if os.path.isdir(prefix) and (datasets := sorted(glob.glob(f"{glob.escape(prefix)}/*.idx"))):
        return f"{given}{prefix} is a directory: use {one_of([os.path.splitext(name)[0] for name in datasets[:4]])}"
    if os.path.isfile(prefix):
        name = shlex.quote(prefix)
        return (
            f"{given}{prefix} is no dataset: make one with python tools/preprocess_data.py --input {name} --tokenizer "
            f"DIR --output-prefix {shlex.quote(stem)}, and use {stem}_text_document"
        )
    names = " and ".join(prefix + ext for ext in missing)
    return f"{given}{prefix}: {names} not found: use the PREFIX that tools/preprocess_data.py wrote"


def _missing_remote(given: str, prefix: str) -> str | None:
    """Why the dataset of a URL cannot be downloaded."""
    if problem := url_problem(prefix.rpartition("/")[0]):
        return f"{given}{prefix}: {problem}"
    try:
        missing = [prefix + ext for ext in (".bin", ".idx") if not RemotePath(prefix + ext).is_file()]
    except OSError as error:
        return f"{given}{prefix} cannot be read: {error.strerror}: check the name, the credentials and the network"
    if not missing:
        return None
    return f"{given}{prefix}: {' and '.join(missing)} not found: use the URL of a PREFIX, without .bin and .idx"


def _name_problem(directory: Path, existing: Path) -> str | None:
    """Why the directory, or a checkpoint's files in it, would have too long a name; `existing` is its nearest parent
    that exists."""
    absolute = directory.absolute()
    longest_name = os.pathconf(existing, "PC_NAME_MAX")
    for name in absolute.relative_to(existing).parts:
        if len(os.fsencode(name)) > longest_name:
            return f"{name[:20]}... has {len(os.fsencode(name))} bytes, and a name may have at most {longest_name}"
    # Better now than at the first save, after hours of training.
    if len(os.fsencode(absolute)) > os.pathconf(existing, "PC_PATH_MAX") - _ROOM_FOR_FILES:
        return f"its path has {len(os.fsencode(absolute))} bytes, which leaves no room for the files in it"
    return None


def _output_problem(directory: Path) -> list[str]:
    return unwritable("--output-dir", directory) or [
        f"--output-dir {directory}: its {name} is a directory, but the run writes a file of this name: "
        "choose another --output-dir, or move it away"
        for name in _OUTPUT_FILES
        if os.path.isdir(directory / name)
    ]


def unwritable(flag: str, directory: Path) -> list[str]:
    """Why the directory of a flag cannot be made or written."""
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if os.path.exists(p))
    if not existing.is_dir():
        return [f"{flag} {directory} cannot be created: {existing} is not a directory: choose another name"]
    if problem := _name_problem(directory, existing):
        return [f"{flag} {directory} cannot be created: {problem}: choose a shorter name"]
    try:
        # Only writing tells: permission bits say nothing about root, a read-only mount or /proc.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [
            f"{flag} {directory} cannot be written: {existing}: no file can be created there ({error.strerror}): use a "
            "directory in which you can create files, such as one in your home directory"
        ]
    return []
