"""Flags of DeepSpeed's launcher and of Megatron-DeepSpeed that mean the same in another form, or change nothing here.

The mechanism is that of Megatron-LM's flags (megatron_values.py). The keys of a DeepSpeed configuration file are in
deepspeed_keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megacore.config.data import DataConfig
from megacore.config.deepspeed_values import of_saved_inputs
from megacore.config.megatron_values import ForeignFlag, MissingField, Shape, Translation, nearest, whole_number
from megacore.config.rampup import BatchSizes

MIB = 1 << 20
BYTES_OF_GRADIENT = 4


def bucket_mib(elements: float) -> float:
    """The value of --bucket-size-mb for a bucket of so many gradients, which are 4 bytes each."""
    return float(f"{elements * BYTES_OF_GRADIENT / MIB:.6g}")


def _switch(becomes: str, **values: Any) -> ForeignFlag:
    return ForeignFlag(becomes, tuple(values), lambda flag, text, shape: Translation(values), is_switch=True)


def _idle(why: str, *, takes_value: bool = False) -> ForeignFlag:
    return ForeignFlag(
        f"nothing: {why}", (), lambda flag, text, shape: Translation(), is_switch=not takes_value, is_idle=True
    )


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


def _saved(becomes: str, field: str) -> ForeignFlag:
    """A switch about the inputs that full recomputation keeps, and without effect where there is none."""

    def translate(flag: str, text: str, shape: Shape) -> Translation:
        return Translation(of_saved_inputs(field, shape))

    return ForeignFlag(becomes, (field,), translate, is_switch=True, is_last=True)


def _in_steps(name: str, ours: str) -> ForeignFlag:
    """A flag that counts tokens where megacore counts steps."""

    def steps(flag: str, text: str, shape: Shape) -> Translation:
        batch, samples = _batch_and_samples(flag, text, shape)
        return Translation({name: max(1, nearest(samples / batch))})

    becomes = f"{ours}: its value / (--global-batch-size x --seq-length), rounded to the nearest step"
    return ForeignFlag(becomes, (name,), steps, is_last=True)


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


def _without_pipeline(flag: str, shape: Shape) -> Translation:
    if (shape.pp or 1) > 1:
        raise ValueError(f"{flag} contradicts --pp {shape.pp}: leave one of them out")
    return Translation()


_FILE = "--deepspeed-config FILE.json is what counts"
_ORDER = "megacore chooses the implementation of each operation, and reports it"

DEEPSPEED_FLAGS: Mapping[str, ForeignFlag] = {
    "--deepspeed": _idle(_FILE),
    "--deepscale": _idle(_FILE),
    "--local-rank": _idle("the launcher's LOCAL_RANK says it", takes_value=True),
    "--deepspeed-mpi": _idle("start the ranks through torchrun"),
    "--ds-sequence-parallel-size": ForeignFlag(
        "--cp of its value, with --cp-comm ulysses", ("cp", "cp_comm"), _ulysses
    ),
    "--deepspeed-activation-checkpointing": _switch("--recompute full", recompute="full"),
    "--partition-activations": _saved(
        "--distribute-saved-activations, beside --recompute full and --tp above 1", "distribute_saved_activations"
    ),
    "--checkpoint-in-cpu": _saved("--offload-activations, beside --recompute full", "offload_activations"),
    "--contigious-checkpointing": _idle("the allocator keeps its memory"),
    "--synchronize-each-layer": _idle("use --trace or --profile-steps to measure times"),
    "--profile-backward": _idle("use --trace or --profile-steps to measure times"),
    "--no-pipeline-parallel": ForeignFlag(
        "nothing with --pp 1, and is refused with a pipeline",
        (),
        lambda flag, text, shape: _without_pipeline(flag, shape),
        is_switch=True,
        is_idle=True,
        is_last=True,
    ),
    "--train-tokens": ForeignFlag(
        "--train-iters: its value / (--global-batch-size x --seq-length), rounded up; of it and given steps the "
        "smaller number, and the given one stays --lr-decay-iters",
        ("train_iters", "lr_decay_iters"),
        _end,
        is_last=True,
    ),
    "--lr-decay-tokens": _in_steps("lr_decay_iters", "--lr-decay-iters"),
    "--lr-warmup-tokens": _in_steps("lr_warmup_iters", "--lr-warmup-iters"),
    "--cpu-optimizer": _switch("--offload-optimizer", offload_optimizer=True),
    "--cpu-torch-adam": _idle(_ORDER),
    "--zero-contigious-gradients": _idle("gradients are always gathered in buckets"),
    "--zero-reduce-scatter": _idle("gradients are always reduced to the rank that updates with them"),
    "--zero-reduce-bucket-size": ForeignFlag(
        "--bucket-size-mb: its value x 4 bytes, in MiB", ("bucket_size_mb",), _buckets
    ),
    "--zero-allgather-bucket-size": _idle("--bucket-size-mb holds for both directions", takes_value=True),
    "--remote-device": ForeignFlag(
        "--offload-params with cpu, and --offload-optimizer; nvme is refused",
        ("offload_params", "offload_optimizer"),
        _remote_device,
    ),
    "--use-pin-memory": _idle("what is copied to or from a device is always pinned"),
    "--scattered-embeddings": _idle("the embedding is always divided over --tp ranks"),
    "--split-transformers": _idle("the layers of a stage always exchange gradients one by one"),
    "--memory-centric-tiled-linear": _idle("--zero-stage 3 gathers a layer at a time"),
    "--tile-factor": _idle("--zero-stage 3 gathers a layer at a time", takes_value=True),
    "--universal-checkpoint": _idle("every checkpoint is loaded on any layout"),
    "--create-moe-param-group": _idle("experts always have groups of ranks of their own"),
    "--force-ds-sequence-parallel": _idle("--cp decides"),
    "--use-flash-attn-v1": _switch("--attention sdpa", attention="sdpa"),
    "--use-flash-attn-v2": _switch("--attention sdpa", attention="sdpa"),
    "--use-flash-attn-triton": _switch("--attention sdpa", attention="sdpa"),
    "--log-optimizer-states-to-tensorboard": _idle("metrics.jsonl has the metrics of each --log-interval"),
    "--repeated-dataloader": _idle("the data are read for as many epochs as --train-iters needs"),
    "--checkpoint-writer-decoupled": _switch("--async-save", async_save=True),
    "--checkpoint-io-buffer-size": _idle("files are written as the disk takes them", takes_value=True),
    "--checkpoint-data-parallel": _idle("every rank writes what it holds", takes_value=True),
    "--aio-intra-op-parallelism": _idle("there is no offload to NVMe", takes_value=True),
}
"""The flags that are accepted and translated. `--zero-stage` is megacore's own name."""

LAUNCHER = frozenset({"--deepspeed", "--deepscale", "--local-rank", "--deepspeed-mpi"})
"""Those that say nothing about the script that is run."""
