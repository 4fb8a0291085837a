"""Refuses a job whose ranks have different flags, data or code.

Such a job hangs or, worse, trains something that nobody asked for. Every rank collects facts of its run by name. The
ranks compare one digest of them, and exchange the facts only if the digests differ. The message then names the ranks
that differ from most others. Paths may differ between nodes: of a file or directory only its content is compared, and
whether it was given. The checkpoint of --load is compared where it is read (checkpoint/load.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import operator
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import megacore
from megacore.checkpoint import MANIFEST_NAME
from megacore.config import ResolvedConfig, sections_of
from megacore.config.checkpoint import AUTO
from megacore.config.dimensions import degrees_of, describe_rank
from megacore.config.fields import field_infos
from megacore.config.messages import ranks_in_words
from megacore.config.spelling import flag, with_value
from megacore.data import bin_path, idx_path, local_prefix, tokenizer_of
from megacore.errors import ConfigError, DataError
from megacore.models.outline import ModelLayer
from megacore.parallel.collectives import all_gather_objects
from megacore.parallel.mesh import Group
from megacore.remote import location

Facts = dict[str, str]  # name -> value, both as messages show them

_PATHS = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "valid_sets",
    "tokenizer",
    "merge_file",
    "data_cache_path",
    "output_dir",
    "load",
    "init_from_hf",
    "pretrained_checkpoint",
    "schedule_csv",
    "tensorboard_dir",
)
_PACKAGES = (
    *("numpy", "triton"),
    *(f"nvidia-{library}-cu{release}" for library in ("cublas", "cudnn", "nccl") for release in (12, 13)),
)
_VARIABLES = (
    # of the processor's operators
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    # of CUDA's
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"),
    *("TRITON_INTERPRET", "TRITON_F32_DEFAULT"),
    # of sums over ranks
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"),
)
"""Environment variables that change what an operator rounds."""
_SWITCHES = (
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
    *("mkldnn.enabled", "mkldnn.deterministic", "cudnn.enabled", "cudnn.deterministic", "cudnn.benchmark"),
    *("cuda.matmul.allow_fp16_accumulation", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    *(f"cuda.{kernel}_sdp_enabled" for kernel in ("flash", "mem_efficient", "math", "cudnn")),
)
"""Settings in torch.backends that choose an operator or what it rounds. Those of fp32 hold what
`torch.set_float32_matmul_precision` sets too, whose getter fails once one of them has been set."""
READ_WHOLE = 1 << 26  # bytes; of a larger file only samples are read
_SAMPLE = 1 << 16  # bytes
_SAMPLES = 64  # evenly spaced, the first and the last at the ends of the file
_MOST = 12  # differences that one message names
_WAY_OUT = "start every rank, on every node, with the same flags, data, environment and installation"


def refuse_different_ranks(
    config: ResolvedConfig, world: Group, layers: Sequence[ModelLayer] = (), further: Facts | None = None
) -> None:
    """Compare configuration, data, code and libraries of all ranks, which call this together before training. `layers`:
    the whole model, where it does not follow from the configuration. `further`: facts of the run that are not in the
    configuration either. Raises ConfigError where a rank differs from the others; on every rank, with the same text."""
    if world.size == 1:
        return
    of_layers = {f"layer {layer.name!r}": f"of {layer.parameters} parameters" for layer in layers}
    local = facts(config) | of_layers | (further or {})
    digests = all_gather_objects(hashlib.sha256(json.dumps(local, sort_keys=True).encode()).hexdigest(), world)
    if len(set(digests)) > 1:
        raise ConfigError(differences(all_gather_objects(local, world)))


def facts(config: ResolvedConfig) -> Facts:
    """The facts that must be equal on all ranks."""
    data = config.data
    result = dict(_settings(config))
    for stream in (0, 1) if data.is_split else (0,):
        weights = data.blend(stream)[1]
        of = ("--train-data-path", "--valid-data-path")[stream] if data.is_split else "--data-path"
        result[f"weights of {of}"] = "none" if weights is None else " ".join(map(str, weights))
    result["names of --valid-sets"] = " ".join(data.named_valid_sets()) or "none"
    for number, prefix in enumerate(data.prefixes(), 1):
        local = local_prefix(prefix, data.data_cache_path)
        for path in (idx_path(local), bin_path(local)):
            result[f"--data-path, {path.suffix} of dataset {number}"] = _file(path)
    try:
        tokenizer = tokenizer_of(config)
        result["content of --tokenizer"] = "none" if tokenizer is None else tokenizer.fingerprint
    except DataError as error:
        result["content of --tokenizer"] = str(error)
    if config.parallel.schedule_csv is not None:
        result["content of --schedule-csv"] = _file(Path(config.parallel.schedule_csv))
    if config.checkpoint.init_from_hf is not None:
        for path in sorted(Path(config.checkpoint.init_from_hf).glob("*.*")):
            result[f"{path.name} of --init-from-hf"] = _file(path)
    program = getattr(sys.modules["__main__"], "__file__", None)  # none in an interactive session
    result["the program's source"] = "none" if program is None else f"{Path(program).name} {_digest(Path(program))}"
    result |= _versions() | _numerics()
    package = Path(megacore.__file__).parent
    kernels = package / "kernels"  # in a checkout a link, which rglob does not follow
    for path in sorted({*package.rglob("*.py"), *kernels.rglob("*.py")}):
        result[f"megacore's {path.relative_to(package)}"] = _digest(path)
    return result


def differences(everyone: list[Facts]) -> list[str]:
    """The differences from the value that most ranks have, or from that of rank 0 where no value has a majority; one
    line per fact and value. `everyone`: the facts of every rank."""
    names = list(dict.fromkeys(name for of_rank in everyone for name in of_rank))
    usual: dict[str, str] = {}
    different: dict[str, dict[str, list[int]]] = {}  # the ranks of each value, of facts with several
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(everyone):
            ranks_of.setdefault(of_rank.get(name, "missing"), []).append(rank)
        usual[name] = max(ranks_of, key=lambda value: len(ranks_of[value]))  # of equally many ranks, rank 0's
        if len(ranks_of) > 1:
            different[name] = ranks_of
    lines = [
        f"{_who(ranks, usual)}: {with_value(name, value)}, {ranks_in_words(ranks_of[usual[name]])}: {usual[name]}"
        for name, ranks_of in different.items()
        for value, ranks in ranks_of.items()
        if value != usual[name]
    ]
    more = [f"and {len(lines) - _MOST} more differences"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more, _WAY_OUT]


def _settings(config: ResolvedConfig) -> Iterator[tuple[str, str]]:
    for section in sections_of(type(config)):
        values = getattr(config, section)
        for name in field_infos(type(values)):
            value = getattr(values, name)
            yield flag(name), _given(name, value) if name in _PATHS else str(value)


def _versions() -> Facts:
    versions = {"megacore": megacore.__version__, "torch": str(torch.__version__)}
    versions["torch's source"] = (torch.version.git_version or "unknown")[:12]
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    versions["megacore/watch"] = "installed" if megacore.has_ring("watch") else "none"  # its ranks meet at the start
    return {f"version of {name}": version for name, version in versions.items()}


def _numerics() -> Facts:
    """What changes the numbers of a run and is no flag: variables of the environment, and switches of torch."""
    result = {f"environment variable {name}": os.environ.get(name, "not set") for name in _VARIABLES}
    for name in _SWITCHES:
        value = operator.attrgetter(name)(torch.backends)
        text = str(value() if callable(value) else value)
        result[f"torch.backends.{name}"] = "ieee" if text == "none" else text  # not set, which is the same
    result["torch's default dtype"] = str(torch.get_default_dtype())
    result["torch's deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    if not torch.accelerator.is_available():  # the order of sums depends on it
        result["torch's threads (OMP_NUM_THREADS)"] = str(torch.get_num_threads())
    return result


def _given(name: str, path: Any) -> str:
    if path is None or path == ():
        return "not given"
    if name not in ("load", "pretrained_checkpoint"):
        return "given"
    if path == AUTO:
        return AUTO
    return "a checkpoint" if (location(path) / MANIFEST_NAME).is_file() else "a directory of checkpoints"


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"{path}: {error.strerror}"


def _file(path: Path) -> str:
    """A file's size and a checksum: of all of it, or of samples where it is large."""
    try:
        with path.open("rb") as file:
            size, checksum = path.stat().st_size, 0
            spaced = ((size - _SAMPLE) * n // (_SAMPLES - 1) for n in range(_SAMPLES))
            for start in range(0, size, _SAMPLE) if size <= READ_WHOLE else spaced:
                file.seek(start)
                checksum = zlib.crc32(file.read(_SAMPLE), checksum)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{size} bytes ({checksum:08x})"


def _who(ranks: list[int], usual: Mapping[str, str]) -> str:
    """Ranks in words, the first of them with its coordinates in the usual layout."""
    coordinates = describe_rank(ranks[0], degrees_of(lambda field: int(usual[flag(field)])))
    return f"{ranks_in_words(ranks)} ({coordinates if len(ranks) == 1 else f'the first: {coordinates}'})"
