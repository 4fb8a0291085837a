"""Flags of Megatron-LM about data, training and parallelism that mean the same in another form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction

from megacore.arrive.tables import Translate, by_name
from megacore.arrive.translation import (
    MissingField,
    Shape,
    Translation,
    fraction,
    is_number,
    nearest,
    whole_number,
)
from megacore.config import spelling
from megacore.config.messages import did_you_mean, divisors, one_of
from megacore.config.rampup import BatchSizes
from megacore.files import unreadable

_LONGEST_LAYOUT = 100_000
_LARGEST_DATA_ARGS = 1 << 24  # bytes
_BYTES_OF_GRADIENT = 4
_MIB = 1 << 20


def _stages(virtual: int) -> Translation:
    return Translation({"virtual_stages": virtual}, {"schedule": "interleaved"} if virtual > 1 else {})


def _virtual_stages(flag: str, text: str, shape: Shape) -> Translation:
    return _stages(whole_number(flag, text))


def _layers_of_virtual_stage(flag: str, text: str, shape: Shape) -> Translation:
    layers = whole_number(flag, text)
    if not shape.num_layers or not shape.pp:
        return Translation({})
    per_rank, left = divmod(shape.num_layers, shape.pp)
    if left:
        raise ValueError(
            f"{flag} {layers} counts layers of equal stages, and --pp {shape.pp} does not divide --num-layers "
            f"{shape.num_layers}: give the number of stages per rank instead, with --virtual-stages and --schedule "
            "interleaved; uneven ones are balanced"
        )
    if per_rank % layers:
        raise ValueError(
            f"{flag} {layers} must divide the {per_rank} layers per rank (--num-layers {shape.num_layers} / --pp "
            f"{shape.pp}): use {one_of(divisors(per_rank, near=layers))}, or --virtual-stages and --schedule "
            "interleaved, which balances uneven stages"
        )
    return _stages(per_rank // layers)


def _layout(flag: str, text: str, shape: Shape) -> Translation:
    written = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"([^()*])\*(\d{1,6})"):
        size = sum(len(match[1]) * int(match[2]) for match in re.finditer(pattern, written))
        if size > _LONGEST_LAYOUT:
            raise ValueError(f"{flag} {text} describes more than {_LONGEST_LAYOUT:,} layers: use smaller numbers")
        written = re.sub(pattern, lambda match: match[1] * int(match[2]), written)
    if strange := sorted(set(written) - set("EtL|")):
        known = "multi-token prediction (m) is not in megacore" if "m" in strange else "it has E, t, L and |"
        raise ValueError(f"{flag} {text} has {one_of(strange)}: {known}: write it with --pipeline-layout E,3*t|4*t,H")
    stages = written.split("|")
    if not all(stages):
        raise ValueError(
            f"{flag} {text} has an empty stage, and every stage of megacore holds a layer: use fewer stages, or let "
            "--pp and --virtual-stages balance them"
        )
    layout = "|".join(",".join(_run(run[0]) for run in re.finditer(r"(.)\1*", stage)) for stage in stages)
    if not shape.pp:
        return Translation({"pipeline_layout": layout})
    if shape.pp == 1 and len(stages) > 1:
        raise ValueError(
            f"{flag} {text} has {len(stages)} stages, and without a pipeline there is one: leave {flag} out, or use "
            f"--pp {len(stages)} with a multiple of {len(stages)} processes"
        )
    virtual, left = divmod(len(stages), shape.pp)
    if left:
        raise ValueError(f"{flag} {text} has {len(stages)} stages, which --pp {shape.pp} must divide: change one")
    return Translation({"pipeline_layout": layout, **_stages(virtual).values}, _stages(virtual).implied)


def _run(letters: str) -> str:
    letter = {"L": "H"}.get(letters[0], letters[0])
    return letter if len(letters) == 1 else f"{len(letters)}*{letter}"


_BACKENDS = {
    "auto": "auto",
    "flash": "sdpa",
    "fused": "sdpa",
    "unfused": "fused-softmax",
    "local": "fused-softmax",
}


def _backend(flag: str, text: str, shape: Shape) -> Translation:
    if text not in _BACKENDS:
        near = did_you_mean(text, _BACKENDS)
        raise ValueError(f"{flag} {text} is not known: use {one_of(list(_BACKENDS))}{near}, or --attention")
    return Translation({"attention": _BACKENDS[text]})


def _without_batch_size(flag: str, text: str, ours: str) -> MissingField:
    said = f"{flag} {text} counts samples: give --global-batch-size, or steps with {ours}"
    return MissingField("global_batch_size", said)


def _train_samples(flag: str, text: str, shape: Shape) -> Translation:
    samples, batch = whole_number(flag, text), shape.global_batch_size
    if batch is None:
        raise _without_batch_size(flag, text, "--train-iters")
    return Translation({"train_iters": BatchSizes(batch, shape.ramp).steps(samples)})


def _in_steps(flag: str, text: str, shape: Shape) -> Translation:
    """A number of samples where megacore counts steps: --lr-decay-samples is --lr-decay-iters."""
    name = flag.removeprefix("--").replace("samples", "iters").replace("-", "_")
    least = 0 if name == "lr_warmup_iters" else 1
    samples, batch = whole_number(flag, text, least=least), shape.global_batch_size
    if samples == 0:
        return Translation(implied={name: 0})
    if batch is None:
        raise _without_batch_size(flag, text, spelling.flag(name))
    return Translation({name: nearest(Fraction(samples, batch))})


def _warmup(flag: str, text: str, shape: Shape) -> Translation:
    share, steps = fraction(flag, text), shape.lr_decay_iters or shape.train_iters
    return Translation({} if steps is None else {"lr_warmup_iters": nearest(share * steps)})


def _finetune(flag: str, text: str, shape: Shape) -> Translation:
    if shape.load is None or shape.load == "auto":
        raise ValueError(f"{flag} starts from the weights of --load DIR: use --pretrained-checkpoint DIR")
    return Translation({"pretrained_checkpoint": shape.load}, dropped=("load", "load_optim"))


def _of_dropped_tokens(flag: str, text: str, shape: Shape) -> Translation:
    if shape.settings.get("num_experts") is not None:
        given = f"{flag} {text}".strip()
        raise ValueError(
            f"{given}: Megatron-DeepSpeed's gates choose and drop tokens otherwise, so that training differs: "
            "leave it out; see --moe-router-topk"
        )
    return Translation()


_MOMENTS = {"--exp-avg-dtype": "--exp-avg-sq-dtype", "--exp-avg-sq-dtype": "--exp-avg-dtype"}


def _moment(flag: str, text: str, shape: Shape) -> Translation:
    """The format of one of the two moments, which have the same here."""
    if text == "fp32":
        return Translation()
    if text != "bf16":
        raise ValueError(
            f"{flag} {text} has no counterpart: use fp32 or bf16 for both moments, or leave both out and use "
            "--optimizer moments-dtype=int8"
        )
    other = _MOMENTS[flag]
    if (format_of_other := shape.others.get(other, "fp32")) != text:
        raise ValueError(
            f"{flag} {text} beside {other} {format_of_other}: both moments have one format here: use "
            "--optimizer moments-dtype=bf16 for both, or fp32"
        )
    return Translation({"moments_dtype": text})


def _gradients(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("fp32", "bf16"):
        raise ValueError(f"{flag} {text} has no counterpart: use fp32 or bf16, or --grad-reduce-dtype")
    return Translation({} if text == "fp32" else {"grad_reduce_dtype": text})


def _content(flag: str, path: str, instead: str) -> str:
    """The text of a file.

    Raises:
        ValueError: it is no regular file of text.
    """
    try:
        if problem := unreadable(path):
            raise ValueError(f"{flag} {path} {problem}: use {instead}")
        with open(path, encoding="utf-8") as file:
            return file.read(_LARGEST_DATA_ARGS)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}: use {instead}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is no text: use {instead}") from error


def _data_args(flag: str, text: str, shape: Shape) -> Translation:
    words = _content(flag, text, "a text file of WEIGHT PREFIX WEIGHT PREFIX ...").split()
    if not words:
        raise ValueError(f"{flag} {text} is empty: use a text file of WEIGHT PREFIX WEIGHT PREFIX ...")
    return Translation({"data_path": tuple(words)})


_SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": None}


def _data_args_per_split(flag: str, text: str, shape: Shape) -> Translation:
    example = 'a JSON file such as {"train": ["0.3", "PREFIX", "0.7", "PREFIX"], "valid": ["PREFIX"]}'
    try:
        splits = json.loads(_content(flag, text, example))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{flag} {text} is not valid JSON ({error}): use {example}") from error
    if not isinstance(splits, dict) or not splits.get("train"):
        raise ValueError(f"{flag} {text} has no training data: use {example}")
    values: dict[str, tuple[str, ...]] = {}
    for split, words in splits.items():
        if split not in _SPLITS:
            raise ValueError(f"{flag} {text} has the split {split!r}: use {one_of(list(_SPLITS))}")
        if not (isinstance(words, list) and all(isinstance(w, str | int | float) for w in words)) and words is not None:
            raise ValueError(f"{flag} {text}: {split} must be a list of prefixes, or of weights and prefixes")
        if (name := _SPLITS[split]) is not None and words:
            values[name] = tuple(map(str, words))
    return Translation(values)


def _validation_sets(flag: str, text: str, shape: Shape) -> Translation:
    prefixes = tuple(shape.settings.get("valid_data_path", ()))
    if not prefixes:
        raise ValueError(
            f"{flag} evaluates each dataset of --valid-data-path by itself, and there is none: use it, or "
            "--valid-sets NAME=PREFIX beside any training data"
        )
    if weights := [word for word in prefixes if is_number(word)]:
        raise ValueError(
            f"{flag} takes no weights, and --valid-data-path has {' '.join(weights)}: leave the weights out"
        )
    sets = tuple(f"{number}={prefix}" for number, prefix in enumerate(prefixes))
    return Translation({"valid_sets": sets}, dropped=("valid_data_path",))


# ---- memory ----------------------------------------------------------------------------------------------------------


def _recomputed(flag: str, wanted: str, shape: Shape) -> Translation:
    """Selective recomputation, which a further flag may extend; so that it gives way to it, and not to a contradiction.

    Raises:
        ValueError: --recompute says something else.
    """
    if (given := shape.settings.get("recompute")) not in (None, wanted):
        raise ValueError(f"{flag} is --recompute {wanted}, and --recompute {given} is given as well: keep one of them")
    return Translation(implied={"recompute": wanted})


def _recomputed_selectively(flag: str, text: str, shape: Shape) -> Translation:
    return _recomputed(flag, "selective", shape)


def _granularity(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("selective", "full"):
        raise ValueError(f"{flag} {text} is not known: use selective or full, or --recompute")
    return Translation({"recompute": text}) if text == "full" else _recomputed(f"{flag} {text}", text, shape)


def _recompute_method(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("uniform", "block"):
        raise ValueError(f"{flag} {text} is not known: use uniform or block")
    return Translation(dropped=("recompute_num_layers",) if text == "uniform" else ())


def _recompute_method_of_version_2(flag: str, text: str, shape: Shape) -> Translation:
    dropped = _recompute_method(flag, text, shape).dropped
    is_said = "--activations-checkpoint-granularity" in shape.others
    return Translation(implied={} if is_said else {"recompute": "full"}, dropped=dropped)


def _layers_of_version_2(flag: str, text: str, shape: Shape) -> Translation:
    layers = whole_number(flag, text)
    return Translation({"recompute_num_layers": layers} if _METHOD_OF_VERSION_2 in shape.others else {})


_METHOD_OF_VERSION_2 = "--activations-checkpoint-method"
_LIGHT = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
_HEAVY = ("mlp", "moe", "shared_experts")


def _modules(flag: str, text: str, shape: Shape) -> Translation:
    words = text.strip("[]").split()
    if unknown := [word for word in words if word not in (*_LIGHT, *_HEAVY)]:
        raise ValueError(f"{flag} {unknown[0]} has no counterpart: use --recompute selective, or full")
    return Translation(implied={"recompute": "full"} if set(words) & set(_HEAVY) else {})


def _offload_share(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("0", "0.0") and (not is_number(text) or float(text) != 1):
        raise ValueError(f"{flag} {text} has no counterpart: use --offload-optimizer, which offloads all of it")
    return Translation()


def _retained(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"keep_every": whole_number(flag, text), "keep_last": 1})


# ---- parallelism -----------------------------------------------------------------------------------------------------

_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _sharding(flag: str, text: str, shape: Shape) -> Translation:
    if text not in _STAGES:
        raise ValueError(f"{flag} {text} is not known: use {one_of(list(_STAGES))}, or --zero-stage")
    return Translation({"zero_stage": _STAGES[text]})


def _distributed_optimizer(flag: str, text: str, shape: Shape) -> Translation:
    if shape.settings.get("zero_stage") == 0:
        raise ValueError(f"{flag} is --zero-stage 1, and --zero-stage 0 is given as well: keep one of them")
    return Translation(implied={"zero_stage": 1})


def _bucket(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"bucket_size_mb": float(f"{whole_number(flag, text) * _BYTES_OF_GRADIENT / _MIB:.6g}")})


_CP_COMMS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "allgather": "allgather", "a2a+p2p": None}


def _cp_comm(flag: str, text: str, shape: Shape) -> Translation:
    """How blocks exchange keys and values; where they differ, megacore chooses."""
    words = text.split()
    if not words or any(word not in _CP_COMMS for word in words):
        raise ValueError(f"{flag} {text} has no counterpart: use {one_of(list(_CP_COMMS))}, or --cp-comm")
    ours = _CP_COMMS[words[0]] if len(set(words)) == 1 else None
    is_alone = shape.settings.get("cp", 1) == 1
    return Translation(implied={} if ours is None or is_alone else {"cp_comm": ours})


def _muon_blocks(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("distributed", "duplicated") and not (text == "blockwise" and shape.settings.get("tp", 1) == 1):
        raise ValueError(
            f"{flag} {text} has no counterpart: matrices are orthogonalized as a whole, as with distributed"
        )
    return Translation()


def _evaluates_only(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"skip_train": True} if text not in ("", "0", "False", "false") else {})


def _same_schedule(flag: str, text: str, shape: Shape) -> Translation:
    for other in ("--override-lr-scheduler", "--override-opt-param-scheduler"):
        if other in shape.others:
            raise ValueError(
                f"{flag} takes the schedule of the checkpoint, and {other} that of the flags: keep one of them"
            )
    return Translation({"same_schedule": True})


TRAINING: Mapping[str, Translate] = by_name(
    *(_virtual_stages, _layers_of_virtual_stage, _layout, _backend, _train_samples, _in_steps, _warmup),
    *(_finetune, _of_dropped_tokens, _moment, _gradients, _data_args, _data_args_per_split, _validation_sets),
    *(_recomputed_selectively, _granularity, _recompute_method, _recompute_method_of_version_2),
    *(_layers_of_version_2, _modules, _offload_share, _retained, _sharding, _distributed_optimizer, _bucket),
    *(_cp_comm, _muon_blocks, _evaluates_only, _same_schedule),
)
"""The functions that rows of megatron.toml name."""
