"""Flags of Megatron-LM about data, training and parallelism that mean the same in another form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction

from megacore.config.megatron_values import (
    ForeignFlag,
    MissingField,
    Shape,
    Translation,
    fraction,
    is_number,
    nearest,
    only,
    switch,
    whole_number,
)
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


def _in_steps(name: str, ours: str, *, least: int = 1) -> ForeignFlag:
    """A flag that counts samples where megacore counts steps."""

    def steps(flag: str, text: str, shape: Shape) -> Translation:
        samples, batch = whole_number(flag, text, least=least), shape.global_batch_size
        if samples == 0:
            return Translation(implied={name: 0})
        if batch is None:
            raise _without_batch_size(flag, text, ours)
        return Translation({name: nearest(Fraction(samples, batch))})

    return ForeignFlag(f"{ours}: its value divided by --global-batch-size, rounded to the nearest step", (name,), steps)


def _warmup(flag: str, text: str, shape: Shape) -> Translation:
    share, steps = fraction(flag, text), shape.lr_decay_iters or shape.train_iters
    return Translation({} if steps is None else {"lr_warmup_iters": nearest(share * steps)})


def _finetune(flag: str, text: str, shape: Shape) -> Translation:
    if shape.load is None or shape.load == "auto":
        raise ValueError(f"{flag} starts from the weights of --load DIR: use --pretrained-checkpoint DIR")
    return Translation({"pretrained_checkpoint": shape.load}, dropped=("load", "load_optim"))


WITHOUT_FEATURE = {
    "--cpu-offloading-num-layers": ("0", "use --offload-activations"),
    "--encoder-pipeline-model-parallel-size": ("0", "megacore has no encoder-decoder models: leave it out"),
    "--encoder-tensor-model-parallel-size": ("0", "megacore has no encoder-decoder models: leave it out"),
    "--glu-linear-offset": ("0", "it changes the model: use one of --activation"),
    "--head-lr-mult": ("1", "all parameters have one learning rate: leave it out, or use --param-group"),
    "--hybrid-attention-ratio": ("0", "there are no Mamba layers: leave it out"),
    "--hybrid-mlp-ratio": ("0", "there are no Mamba layers: leave it out"),
    "--moe-n-hash-layers": ("0", "a router chooses the experts of every block: leave it out"),
    "--mtp-num-layers": (
        "0",
        "megacore has no multi-token prediction: leave it out; the loss then has no term for later tokens",
    ),
    "--muon-coefficient-type": ("quintic", "--muon-num-ns-steps is the number of quintic iterations: leave it out"),
    "--muon-scalar-optimizer": ("adam", "--optimizer muon updates other parameters with AdamW: leave it out"),
    "--mup-embedding-mult": ("1", "use --embedding-multiplier"),
    "--mup-output-mult": ("1", "use --logits-divisor, which divides"),
    "--num-distributed-optimizer-instances": (
        "1",
        "use --zero-shard-size, the ranks that one instance is divided over",
    ),
    "--outer-dp-sharding-strategy": ("no_shard", "use --zero-shard-size, the ranks that one copy is divided over"),
    "--vocab-extra-ids": ("0", "use a --tokenizer that has the further tokens"),
    "--main-params-dtype": ("fp32", "master weights are fp32: leave it out"),
    "--megatron-fsdp-main-params-dtype": ("fp32", "master weights are fp32: leave it out"),
}
"""Flags of features that megacore does not have: the value at which each changes nothing, and the way out of others."""


def _harmless(value: str, way_out: str) -> ForeignFlag:
    def check(flag: str, text: str, shape: Shape) -> Translation:
        is_equal = is_number(text) and is_number(value) and float(text) == float(value)
        if text != value and not is_equal:
            raise ValueError(f"{flag} {text} has no counterpart: {way_out}")
        return Translation()

    return ForeignFlag(f"nothing: with {value} as without it; any other value is refused", (), check, is_idle=True)


GATES_OF_DEEPSPEED: Mapping[str, bool] = {
    **dict.fromkeys(
        (
            *("--expert-interval", "--mlp-type", "--moe-eval-capacity-factor", "--moe-loss-coeff"),
            *("--moe-min-capacity", "--moe-train-capacity-factor", "--topk"),
        ),
        False,
    ),
    **dict.fromkeys(
        (
            *("--disable-moe-token-dropping", "--disable-moe-top2-2nd-expert-sampling"),
            "--enable-expert-tensor-parallelism",
        ),
        True,
    ),
}
"""Flags of Megatron-DeepSpeed's experts, without which they mean nothing, and whether each is a switch."""


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
            "--moments-dtype int8"
        )
    other = _MOMENTS[flag]
    if (format_of_other := shape.others.get(other, "fp32")) != text:
        raise ValueError(
            f"{flag} {text} beside {other} {format_of_other}: both moments have one format here: use --moments-dtype "
            "bf16 for both, or fp32"
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


TRAINING: Mapping[str, ForeignFlag] = {
    "--attention-backend": ForeignFlag(
        "--attention: flash and fused are sdpa, unfused and local are fused-softmax", ("attention",), _backend
    ),
    "--bf16": switch("--precision bf16", precision="bf16"),
    **{flag: _harmless(*accepted) for flag, accepted in WITHOUT_FEATURE.items()},
    **{
        flag: ForeignFlag(
            "nothing without experts, and is refused with them", (), _of_dropped_tokens, is_switch, is_idle=True
        )
        for flag, is_switch in GATES_OF_DEEPSPEED.items()
    },
    **dict.fromkeys(
        _MOMENTS,
        ForeignFlag(
            "--moments-dtype bf16, which rounds stochastically, where both moments are bf16; nothing where both are "
            "fp32",
            ("moments_dtype",),
            _moment,
        ),
    ),
    **dict.fromkeys(
        ("--main-grads-dtype", "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype"),
        ForeignFlag("--grad-reduce-dtype bf16 of bf16; nothing of fp32", ("grad_reduce_dtype",), _gradients),
    ),
    _METHOD_OF_VERSION_2: ForeignFlag(
        "--recompute full, where nothing else is given; block is for those of --recompute-num-layers, the first of "
        "each stage",
        ("recompute", "recompute_num_layers"),
        _recompute_method_of_version_2,
        is_last=True,
    ),
    "--activations-checkpoint-num-layers": ForeignFlag(
        "--recompute-num-layers of the method block; nothing of uniform, or without a method",
        ("recompute_num_layers",),
        _layers_of_version_2,
    ),
    "--activations-checkpoint-granularity": ForeignFlag(
        "--recompute selective or --recompute full", ("recompute",), _granularity
    ),
    "--checkpoint-activations": switch("--recompute full", recompute="full"),
    "--checkpoint-granularity": ForeignFlag("--recompute selective or --recompute full", ("recompute",), _granularity),
    "--cp-comm-type": ForeignFlag(
        "--cp-comm: p2p is ring, a2a is ulysses, all_gather is allgather; others, and several, are auto",
        ("cp_comm",),
        _cp_comm,
        is_list=True,
    ),
    "--data-args-path": ForeignFlag("--data-path with the words of the file", ("data_path",), _data_args),
    "--data-parallel-sharding-strategy": ForeignFlag(
        "--zero-stage: no_shard is 0, optim 1, optim_grads 2, optim_grads_params 3", ("zero_stage",), _sharding
    ),
    "--ddp-bucket-size": ForeignFlag("--bucket-size-mb: its value x 4 bytes, in MiB", ("bucket_size_mb",), _bucket),
    "--deterministic-mode": switch("--deterministic", deterministic=True),
    "--distribute-checkpointed-activations": switch(
        "--distribute-saved-activations", distribute_saved_activations=True
    ),
    "--enable-zbh1-pipeline": switch("--schedule zero-bubble", schedule="zero-bubble"),
    "--dataloader-type": only(
        {"single": "samples come in one order that every layout shares"},
        "samples would come in another order than --sample-order has: leave it out",
    ),
    "--error-injection-rate": only(
        {"0": "no error is injected"},
        "errors are not injected: leave it out; --replay-interval finds those that happen",
    ),
    "--eval-only": ForeignFlag("--skip-train", ("skip_train",), _evaluates_only),
    "--exit-signal": only(
        {name: f"{name} always saves and ends the run" for name in ("SIGTERM", "SIGINT")},
        "use SIGTERM or SIGINT, which always save and end the run",
    ),
    "--fim-data": ForeignFlag(
        "--fim-rate, 0.5 where it is not given",
        ("fim_rate",),
        lambda flag, text, shape: Translation(implied={"fim_rate": 0.5}),
        is_switch=True,
    ),
    "--finetune": ForeignFlag(
        "--pretrained-checkpoint with the directory of --load", ("pretrained_checkpoint",), _finetune, is_switch=True
    ),
    "--fp16": switch("--precision fp16", precision="fp16"),
    "--grad-reduce-in-bf16": switch("--grad-reduce-dtype bf16", grad_reduce_dtype="bf16"),
    "--lr-decay-samples": _in_steps("lr_decay_iters", "--lr-decay-iters"),
    **dict.fromkeys(
        ("--lr-warmup-fraction", "--warmup"),  # its name in version 1
        ForeignFlag(
            "--lr-warmup-iters: its value times --lr-decay-iters, rounded to the nearest step",
            ("lr_warmup_iters",),
            _warmup,
            is_last=True,
        ),
    ),
    "--lr-warmup-samples": _in_steps("lr_warmup_iters", "--lr-warmup-iters", least=0),
    "--lr-wsd-decay-samples": _in_steps("lr_wsd_decay_iters", "--lr-wsd-decay-iters"),
    "--moe-expert-parallel-size": ForeignFlag(
        "--ep", ("ep",), lambda flag, text, shape: Translation({"ep": whole_number(flag, text)})
    ),
    "--moe-layer-recompute": ForeignFlag(
        "--recompute full, where nothing else is given",
        ("recompute",),
        lambda flag, text, shape: Translation(implied={"recompute": "full"}),
        is_switch=True,
        is_last=True,
    ),
    "--moe-router-dtype": only({"fp32": "the router computes in fp32"}, "the router computes in fp32: leave it out"),
    "--multiple-validation-sets": ForeignFlag(
        "--valid-sets 0=PREFIX 1=PREFIX ..., with the datasets of --valid-data-path",
        ("valid_sets",),
        _validation_sets,
        is_switch=True,
        is_last=True,
    ),
    "--muon-no-split-qkv": switch("--muon-split-qkv none", muon_split_qkv="none"),
    "--muon-tp-mode": ForeignFlag(
        "nothing: distributed, duplicated: matrices are orthogonalized as a whole; blockwise: so with --tp 1",
        (),
        _muon_blocks,
        is_idle=True,
    ),
    "--num-layers-per-virtual-pipeline-stage": ForeignFlag(
        "--schedule interleaved and --virtual-stages: --num-layers / --pp / its value",
        ("virtual_stages", "schedule"),
        _layers_of_virtual_stage,
    ),
    "--num-virtual-stages-per-pipeline-rank": ForeignFlag(
        "--schedule interleaved and --virtual-stages of its value", ("virtual_stages", "schedule"), _virtual_stages
    ),
    "--optimizer-cpu-offload": switch("--offload-optimizer", offload_optimizer=True),
    "--optimizer-offload-fraction": ForeignFlag(
        "nothing: 1: --offload-optimizer offloads all of it", (), _offload_share, is_idle=True
    ),
    "--per-split-data-args-path": ForeignFlag(
        "--train-data-path and --valid-data-path with the lists of the JSON file; no evaluation reads its test data",
        ("train_data_path", "valid_data_path"),
        _data_args_per_split,
    ),
    "--persistent-save-interval": ForeignFlag(
        "--save-interval",
        ("save_interval",),
        lambda flag, text, shape: Translation({"save_interval": whole_number(flag, text)}),
    ),
    "--pipeline-model-parallel-layout": ForeignFlag(
        "--pipeline-layout, with H for L; more stages than --pp are --virtual-stages",
        ("pipeline_layout", "virtual_stages", "schedule"),
        _layout,
    ),
    "--recompute-activations": ForeignFlag(
        "--recompute selective",
        ("recompute",),
        lambda flag, text, shape: _recomputed(flag, "selective", shape),
        is_switch=True,
    ),
    "--recompute-granularity": ForeignFlag("--recompute selective or --recompute full", ("recompute",), _granularity),
    "--recompute-method": ForeignFlag(
        "--recompute-num-layers for block, whose blocks are the first of each stage; nothing for uniform, whose number "
        "of layers changes memory only: all layers are recomputed",
        ("recompute_num_layers",),
        _recompute_method,
    ),
    "--recompute-modules": ForeignFlag(
        "--recompute full where mlp, moe or shared_experts are among them; else nothing beside --recompute selective, "
        "which changes memory only",
        ("recompute",),
        _modules,
        is_list=True,
        is_last=True,
    ),
    "--rerun-mode": only(
        {
            "disabled": "no step is repeated",
            "validate_results": "a step that is not finite is always diagnosed; --replay-interval N compares more",
        },
        "use --replay-interval N, which repeats every Nth step and compares",
    ),
    "--sample-rate": only(dict.fromkeys(("1", "1.0"), "all samples are used"), "every sample is used: leave it out"),
    "--save-retain-interval": ForeignFlag(
        "--keep-every of its value, and --keep-last 1", ("keep_every", "keep_last"), _retained
    ),
    "--torch-fsdp2-no-reshard-after-forward": switch("--zero-stage 2", zero_stage=2),
    "--train-samples": ForeignFlag(
        "--train-iters: the number of steps that its value suffices for", ("train_iters",), _train_samples
    ),
    **dict.fromkeys(
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
        ForeignFlag("--same-schedule", ("same_schedule",), _same_schedule, is_switch=True),
    ),
    "--use-distributed-optimizer": ForeignFlag(
        "--zero-stage 1, where nothing else is given", ("zero_stage",), _distributed_optimizer, is_switch=True
    ),
    "--use-flash-attn": ForeignFlag(
        "--attention sdpa, torch's fused operator, which runs a flash kernel where there is one",
        ("attention",),
        lambda flag, text, shape: Translation({"attention": "sdpa"}),
        is_switch=True,
    ),
    "--use-flash-attn-builder": switch("--attention sdpa", attention="sdpa"),
    "--use-torch-fsdp2": ForeignFlag(
        "--zero-stage 3, where nothing else is given",
        ("zero_stage",),
        lambda flag, text, shape: Translation(implied={"zero_stage": 3}),
        is_switch=True,
    ),
}
"""The flags that are accepted and translated."""
