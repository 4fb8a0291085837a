"""Flags of DeepSpeed's launcher and of Megatron-DeepSpeed that mean the same in another form, or change nothing here.

deepspeed_flags.toml lists them, as megatron.toml those of Megatron-LM. deepspeed_keys.py has the keys of a DeepSpeed
configuration file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from megacore.arrive.deepspeed_values import of_saved_inputs
from megacore.arrive.tables import accepted_flags, by_name, read_tables
from megacore.arrive.translation import ForeignFlag, MissingField, Shape, Translation, nearest, whole_number
from megacore.config.data import DataConfig
from megacore.config.rampup import BatchSizes

MIB = 1 << 20
BYTES_OF_GRADIENT = 4


def bucket_mib(elements: float) -> float:
    """The value of --bucket-size-mb for a bucket of so many gradients, which are 4 bytes each."""
    return float(f"{elements * BYTES_OF_GRADIENT / MIB:.6g}")


def _remote_device(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("none", "cpu"):
        raise ValueError(f"{flag} '{text}': parameters are kept on the devices or in host memory: use none or cpu")
    return Translation({"offload_params": True}, {"offload_optimizer": True}) if text == "cpu" else Translation()


def _ulysses(flag: str, text: str, shape: Shape) -> Translation:
    ranks = whole_number(flag, text)
    return Translation({"cp": ranks}, {"cp_comm": "ulysses"} if ranks > 1 else {})


def _buckets(flag: str, text: str, shape: Shape) -> Translation:
    try:
        elements = float(text)
    except ValueError:
        elements = 0.0
    if not 1 <= elements < 1e15:
        raise ValueError(f"{flag} '{text}' is not a number of elements: use, for example, 500000000")
    return Translation({"bucket_size_mb": bucket_mib(elements)})


def _partition_activations(flag: str, text: str, shape: Shape) -> Translation:
    return Translation(of_saved_inputs("distribute_saved_activations", shape))


def _checkpoint_in_cpu(flag: str, text: str, shape: Shape) -> Translation:
    return Translation(of_saved_inputs("offload_activations", shape))


def _in_steps(flag: str, text: str, shape: Shape) -> Translation:
    """A number of tokens where megacore counts steps: --lr-decay-tokens is --lr-decay-iters."""
    batch, samples = _batch_and_samples(flag, text, shape)
    return Translation(
        {flag.removeprefix("--").replace("-", "_").replace("tokens", "iters"): max(1, nearest(samples / batch))}
    )


def _batch_and_samples(flag: str, text: str, shape: Shape) -> tuple[int, Fraction]:
    """The global batch size, and the samples that have so many tokens."""
    tokens = whole_number(flag, text)
    if shape.global_batch_size is None:
        said = f"{flag} {text} counts tokens: give --global-batch-size too, or count steps"
        raise MissingField("global_batch_size", said)
    length = shape.settings.get("seq_length", DataConfig.seq_length)
    return shape.global_batch_size, Fraction(tokens, max(length, 1))


def _end(flag: str, text: str, shape: Shape) -> Translation:
    """The number of steps after which so many tokens are used; a run ends there or at --train-iters, whichever is
    first, and the latter remains the length of the learning rate's schedule."""
    batch, samples = _batch_and_samples(flag, text, shape)
    steps = BatchSizes(batch, shape.ramp).steps(math.ceil(samples) - 1) + 1
    given = shape.settings.get("train_iters")
    if given is None:
        return Translation({"train_iters": steps})
    if given <= steps:
        return Translation(note=f"--train-iters {given} ends the run first")
    is_decided = "lr_decay_iters" in shape.settings or "--lr-decay-tokens" in shape.others
    keeps = not is_decided and shape.settings.get("lr_decay_style") != "constant"
    return Translation(
        {"train_iters": steps} | ({"lr_decay_iters": given} if keeps else {}),
        dropped=("train_iters",),
        note=f"it ends the run before --train-iters {given}",
    )


def _without_pipeline(flag: str, text: str, shape: Shape) -> Translation:
    if (shape.pp or 1) > 1:
        raise ValueError(f"{flag} contradicts --pp {shape.pp}: leave one of them out")
    return Translation()


DEEPSPEED_FLAGS: Mapping[str, ForeignFlag] = accepted_flags(
    read_tables("deepspeed_flags.toml"),
    by_name(
        *(_remote_device, _ulysses, _buckets, _partition_activations, _checkpoint_in_cpu, _in_steps, _end),
        _without_pipeline,
    ),
)
"""The flags that are accepted and translated."""

LAUNCHER = frozenset({"--deepspeed", "--deepscale", "--local-rank", "--deepspeed-mpi"})
"""Those that say nothing about the script that is run."""
