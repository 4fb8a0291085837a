"""Translates flags of Megatron-LM that mean the same in another form, exactly or not at all.

Unlike an alias, such a flag has other units or another notation: a switch for a value, samples instead of steps, layers
per virtual stage instead of the number of stages, or the layout of a pipeline in other letters. Flags that change
nothing here are accepted too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from megacore.config.megatron_idle import IDLE_SWITCHES, IDLE_VALUES
from megacore.config.messages import did_you_mean, divisors, one_of
from megacore.config.numbers import parse_float, parse_int
from megacore.config.rampup import BatchSizes, Ramp
from megacore.files import unreadable

_LONGEST_LAYOUT = 100_000
_LARGEST_DATA_ARGS = 1 << 24  # bytes


@dataclass(frozen=True)
class Translation:
    """The fields that a flag sets.

    Attributes:
        values: what the flag says, by field.
        implied: values that follow from it, by field, where nothing else sets them.
        dropped: fields whose values on the command line mean nothing beside the flag.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What a translation may depend on. None: not given, or an invalid value, which `validate` reports.

    Attributes:
        replicas: data-parallel ranks.
        settings: what is given so far, by field.
    """

    num_layers: int | None
    pp: int | None
    hidden_size: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    ramp: Ramp | None = None
    load: str | None = None
    train_iters: int | None = None
    lr_decay_iters: int | None = None
    replicas: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of Megatron-LM: what it becomes, in words and as a function of its value ("" for a switch).

    Attributes:
        becomes: in words.
        fields: that it sets.
        translate: from the flag, its value and the shape of the run.
        is_switch: it takes no value.
        is_idle: it changes nothing here.
        is_last: it depends on what others become.
    """

    becomes: str
    fields: tuple[str, ...]
    translate: Callable[[str, str, Shape], Translation]
    is_switch: bool = False
    is_idle: bool = False
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class ForeignSetting:
    """A setting of another trainer, as a command line or a file gives it.

    Attributes:
        origin: the trainer, or its file.
        source: the setting and its value, for messages.
        fields: that it sets.
        translate: from the shape of the run. Raises ValueError for a value without a translation.
        where: precedes the source in messages.
        is_idle: it changes nothing here.
        is_last: it depends on what others become.
    """

    origin: str
    source: str
    fields: tuple[str, ...]
    translate: Callable[[Shape], Translation]
    where: str = ""
    is_idle: bool = False
    is_last: bool = False


def translate(foreign: ForeignFlag, flag: str, words: Sequence[str], shape: Shape) -> Translation:
    """Translates a flag with its values.

    Args:
        foreign: what the flag becomes.
        flag: the flag.
        words: its values on the command line.
        shape: of the run.

    Raises:
        ValueError: it has too few or too many values, or one that has no translation; the message names the way out.
    """
    if foreign.is_switch:
        if words:
            raise ValueError(f"{flag} {words[0]}: a switch takes no value: leave the value out")
        return foreign.translate(flag, "", shape)
    if len(words) != 1:
        way_out = "leave it out, as it changes nothing here" if foreign.is_idle else f"it is {foreign.becomes}"
        raise ValueError(f"{flag} needs one value, and has {len(words)}: {way_out}")
    return foreign.translate(flag, words[0], shape)


def _number(flag: str, text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := parse_int(text)) >= 1:
            return number
    raise ValueError(f"{flag} '{text}' is not a whole number of 1 or more: use, for example, 2")


def _stages(virtual: int) -> Translation:
    return Translation({"virtual_stages": virtual}, {"schedule": "interleaved"} if virtual > 1 else {})


def _virtual_stages(flag: str, text: str, shape: Shape) -> Translation:
    return _stages(_number(flag, text))


def _layers_of_virtual_stage(flag: str, text: str, shape: Shape) -> Translation:
    layers = _number(flag, text)
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
            f"{flag} {text} has {len(stages)} stages, and without a pipeline there is one: use --pp {len(stages)}, or "
            f"leave {flag} out"
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


def _train_samples(flag: str, text: str, shape: Shape) -> Translation:
    samples, batch = _number(flag, text), shape.global_batch_size
    if batch is None:
        raise ValueError(f"{flag} {text} counts samples: give --global-batch-size, or steps with --train-iters")
    return Translation({"train_iters": BatchSizes(batch, shape.ramp).steps(samples)})


def _in_steps(name: str, ours: str) -> ForeignFlag:
    """A flag that counts samples where megacore counts steps."""

    def steps(flag: str, text: str, shape: Shape) -> Translation:
        samples, batch = _number(flag, text), shape.global_batch_size
        if batch is None:
            raise ValueError(f"{flag} {text} counts samples: give --global-batch-size, or steps with {ours}")
        return Translation({name: round(samples / batch)})

    return ForeignFlag(f"{ours}: its value divided by --global-batch-size, rounded to the nearest step", (name,), steps)


def _warmup(flag: str, text: str, shape: Shape) -> Translation:
    share, steps = _fraction(flag, text), shape.lr_decay_iters or shape.train_iters
    return Translation({} if steps is None else {"lr_warmup_iters": int(share * steps)})


def _fraction(flag: str, text: str) -> float:
    try:
        value = parse_float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ValueError(f"{flag} '{text}' is not a number of at least 0 and below 1: use, for example, 0.01")
    return value


def _switch(becomes: str, **values: Any) -> ForeignFlag:
    """A switch that stands for values."""
    return ForeignFlag(becomes, tuple(values), lambda flag, text, shape: Translation(values), is_switch=True)


def _granularity(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("selective", "full"):
        raise ValueError(f"{flag} {text} is not known: use selective or full, or --recompute")
    return Translation({"recompute": text})


def _recompute_method(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("uniform", "block"):
        raise ValueError(f"{flag} {text} is not known: use uniform or block")
    return Translation(dropped=("recompute_num_layers",) if text == "uniform" else ())


def _stretched(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"rope_scaling": "linear", "rope_scaling_factor": float(_number(flag, text))})


def _swiglu(flag: str, text: str, shape: Shape) -> Translation:
    inner = {} if shape.hidden_size is None else {"ffn_hidden_size": int(4 * shape.hidden_size * 2 / 3 / 64) * 64}
    return Translation({"activation": "swiglu"}, {name: size for name, size in inner.items() if size})


def _finetune(flag: str, text: str, shape: Shape) -> Translation:
    if shape.load is None or shape.load == "auto":
        raise ValueError(f"{flag} starts from the weights of --load DIR: use --pretrained-checkpoint DIR")
    return Translation({"pretrained_checkpoint": shape.load}, dropped=("load",))


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


def _is_number(text: str) -> bool:
    try:
        parse_float(text)
    except ValueError:
        return False
    return True


def _validation_sets(flag: str, text: str, shape: Shape) -> Translation:
    prefixes = tuple(shape.settings.get("valid_data_path", ()))
    if not prefixes:
        raise ValueError(
            f"{flag} evaluates each dataset of --valid-data-path by itself, and there is none: use it, or "
            "--valid-sets NAME=PREFIX beside any training data"
        )
    if weights := [word for word in prefixes if _is_number(word)]:
        raise ValueError(
            f"{flag} takes no weights, and --valid-data-path has {' '.join(weights)}: leave the weights out"
        )
    sets = tuple(f"{number}={prefix}" for number, prefix in enumerate(prefixes))
    return Translation({"valid_sets": sets}, dropped=("valid_data_path",))


def _only(accepted: Mapping[str, str], way_out: str) -> ForeignFlag:
    """A flag that changes nothing at some of its values.

    Args:
        accepted: those values, each with the reason.
        way_out: what to do with another one.
    """

    def check(flag: str, text: str, shape: Shape) -> Translation:
        if text not in accepted:
            raise ValueError(f"{flag} {text} has no counterpart: {way_out}")
        return Translation()

    becomes = "; ".join(f"{value}: {why}" for value, why in accepted.items())
    return ForeignFlag(f"nothing: {becomes}", (), check, is_idle=True)


def _window(flag: str, text: str) -> int:
    """--window-size LEFT,RIGHT: a token sees LEFT tokens before it, itself, and RIGHT tokens after it."""
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    try:
        left, right = (parse_int(word.strip()) for word in words)
    except ValueError:
        raise ValueError(
            f"{flag} '{text}' is neither a whole number nor Megatron-LM's LEFT,RIGHT: use, for example, 4096, or 4095,0"
        ) from None
    if left < 0:
        raise ValueError(f"{flag} {text} has no limit to the left: leave it out, for the same without a window")
    if right != 0:
        raise ValueError(
            f"{flag} {text}: a token of these models sees none after it, so that RIGHT must be 0: use {flag} {left},0, "
            f"or {flag} {left + 1}, which counts the token itself too"
        )
    return left + 1


_RUN_OF_WINDOWS = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?")


def _window_pattern(flag: str, text: str, shape: Shape) -> Translation:
    """Every Nth block attends to all tokens, or a list says which do (0)."""
    written = re.sub(r"\s", "", text)
    with contextlib.suppress(ValueError):
        every = parse_int(written)
        if every < 1:
            raise ValueError(f"{flag} {text}: use a whole number of 1 or more, or a list such as [1,1,1,0]*6")
        windows = {1: "", 2: "w,"}.get(every, f"{every - 1}*w,")
        return Translation({"attention_pattern": f"{windows}f"})
    runs = written.split("+")
    matches = [match for run in runs if (match := _RUN_OF_WINDOWS.fullmatch(run)) is not None]
    if len(matches) < len(runs):
        raise ValueError(
            f"{flag} {text} is neither a whole number nor a list such as [1,1,1,0]*6: use one, or --attention-pattern"
        )
    kinds = [kind for match in matches for kind in match[1].split(",") * int(match[2] or 1)]
    if shape.num_layers and len(kinds) != shape.num_layers:
        raise ValueError(
            f"{flag} {text} is for {len(kinds)} blocks, and --num-layers is {shape.num_layers}: use a list of "
            f"{shape.num_layers}"
        )
    blocks = [{"1": "w", "0": "f"}[kind] for kind in kinds]
    lengths = [(kind, len(list(group))) for kind, group in groupby(blocks)]
    return Translation({"attention_pattern": ",".join(k if n == 1 else f"{n}*{k}" for k, n in lengths)})


_CP_COMMS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather"}


def _cp_comm(flag: str, text: str, shape: Shape) -> Translation:
    if text not in _CP_COMMS:
        raise ValueError(f"{flag} {text} has no counterpart: use {one_of(list(_CP_COMMS))}, or --cp-comm")
    return Translation(implied={"cp_comm": _CP_COMMS[text]})


FOREIGN: Mapping[str, ForeignFlag] = {
    "--attention-backend": ForeignFlag(
        "--attention: flash and fused are sdpa, unfused and local are fused-softmax", ("attention",), _backend
    ),
    "--num-layers-per-virtual-pipeline-stage": ForeignFlag(
        "--schedule interleaved and --virtual-stages: --num-layers / --pp / its value",
        ("virtual_stages", "schedule"),
        _layers_of_virtual_stage,
    ),
    "--num-virtual-stages-per-pipeline-rank": ForeignFlag(
        "--schedule interleaved and --virtual-stages of its value", ("virtual_stages", "schedule"), _virtual_stages
    ),
    "--pipeline-model-parallel-layout": ForeignFlag(
        "--pipeline-layout, with H for L; more stages than --pp are --virtual-stages",
        ("pipeline_layout", "virtual_stages", "schedule"),
        _layout,
    ),
    "--use-flash-attn": ForeignFlag(
        "--attention sdpa, torch's fused operator, which runs a flash kernel where there is one",
        ("attention",),
        lambda flag, text, shape: Translation({"attention": "sdpa"}),
        is_switch=True,
    ),
    "--train-samples": ForeignFlag(
        "--train-iters: the number of steps that its value suffices for", ("train_iters",), _train_samples
    ),
    "--lr-decay-samples": _in_steps("lr_decay_iters", "--lr-decay-iters"),
    "--lr-wsd-decay-samples": _in_steps("lr_wsd_decay_iters", "--lr-wsd-decay-iters"),
    "--lr-warmup-samples": _in_steps("lr_warmup_iters", "--lr-warmup-iters"),
    "--lr-warmup-fraction": ForeignFlag(
        "--lr-warmup-iters: its value times --lr-decay-iters", ("lr_warmup_iters",), _warmup, is_last=True
    ),
    "--bf16": _switch("--precision bf16", precision="bf16"),
    "--window-attn-skip-freq": ForeignFlag(
        "--attention-pattern: of N, all but each Nth block have the window; of a list, those with 1",
        ("attention_pattern",),
        _window_pattern,
    ),
    "--cp-comm-type": ForeignFlag(
        "--cp-comm: p2p is ring, a2a is ulysses, all_gather is allgather", ("cp_comm",), _cp_comm
    ),
    "--data-args-path": ForeignFlag("--data-path with the words of the file", ("data_path",), _data_args),
    "--per-split-data-args-path": ForeignFlag(
        "--train-data-path and --valid-data-path with the lists of the JSON file; no evaluation reads its test data",
        ("train_data_path", "valid_data_path"),
        _data_args_per_split,
    ),
    "--multiple-validation-sets": ForeignFlag(
        "--valid-sets 0=PREFIX 1=PREFIX ..., with the datasets of --valid-data-path",
        ("valid_sets",),
        _validation_sets,
        is_switch=True,
        is_last=True,
    ),
    "--finetune": ForeignFlag(
        "--pretrained-checkpoint with the directory of --load", ("pretrained_checkpoint",), _finetune, is_switch=True
    ),
    "--moe-router-dtype": _only({"fp32": "the router computes in fp32"}, "the router computes in fp32: leave it out"),
    "--exit-signal": _only(
        {name: f"{name} always saves and ends the run" for name in ("SIGTERM", "SIGINT")},
        "use SIGTERM or SIGINT, which always save and end the run",
    ),
    "--muon-tp-mode": _only(
        dict.fromkeys(("distributed", "duplicated"), "matrices are orthogonalized as a whole"),
        "matrices are orthogonalized as a whole, as with distributed",
    ),
    "--rerun-mode": _only(
        {"disabled": "no step is repeated"}, "use --replay-interval N, which repeats every Nth step and compares"
    ),
    "--softmax-type": _only(
        {"vanilla": "attention's softmax has no offset"},
        "attention's softmax has no offset here, so that the model would be another one",
    ),
    "--recompute-modules": _only(
        {"core_attn": "--recompute selective is that"},
        "use --recompute selective, which is core_attn, or full",
    ),
    "--checkpoint-activations": _switch("--recompute full", recompute="full"),
    "--deterministic-mode": _switch("--reproducible", reproducible=True),
    "--embed-layernorm": _switch("--embedding-layernorm", embedding_layernorm=True),
    "--fim-data": ForeignFlag(
        "--fim-rate, 0.5 where it is not given",
        ("fim_rate",),
        lambda flag, text, shape: Translation(implied={"fim_rate": 0.5}),
        is_switch=True,
    ),
    "--fp16": _switch("--precision fp16", precision="fp16"),
    "--grad-reduce-in-bf16": _switch("--grad-reduce-dtype bf16", grad_reduce_dtype="bf16"),
    "--group-query-attention": ForeignFlag(
        "--num-query-groups, 1 where it is not given",
        ("num_query_groups",),
        lambda flag, text, shape: Translation(implied={"num_query_groups": 1}),
        is_switch=True,
    ),
    "--no-bias-gelu-fusion": ForeignFlag(
        "--activation gelu-exact, where nothing else is given: Megatron-LM's unfused GELU is the exact one",
        ("activation",),
        lambda flag, text, shape: Translation(implied={"activation": "gelu-exact"}),
        is_switch=True,
    ),
    "--openai-gelu": _switch("--activation gelu", activation="gelu"),
    "--muon-no-split-qkv": _switch("--muon-split-qkv none", muon_split_qkv="none"),
    "--optimizer-cpu-offload": _switch("--offload-optimizer", offload_optimizer=True),
    "--recompute-activations": _switch("--recompute selective", recompute="selective"),
    "--recompute-granularity": ForeignFlag("--recompute selective or --recompute full", ("recompute",), _granularity),
    "--recompute-method": ForeignFlag(
        "--recompute-num-layers for block, whose blocks are the first of each stage; nothing for uniform, whose number "
        "of layers changes memory only: all layers are recomputed",
        ("recompute_num_layers",),
        _recompute_method,
    ),
    "--rotary-seq-len-interpolation-factor": ForeignFlag(
        "--rope-scaling linear and --rope-scaling-factor of its value",
        ("rope_scaling", "rope_scaling_factor"),
        _stretched,
    ),
    "--squared-relu": _switch("--activation relu2", activation="relu2"),
    "--swiglu": ForeignFlag(
        "--activation swiglu, and --ffn-hidden-size 8/3 of --hidden-size in multiples of 64 where it is not given",
        ("activation", "ffn_hidden_size"),
        _swiglu,
        is_switch=True,
    ),
    "--use-distributed-optimizer": _switch("--zero-stage 1", zero_stage=1),
    "--use-rope-scaling": ForeignFlag(
        "--rope-scaling llama3, with --rope-original-max-positions 8192 where it is not given",
        ("rope_scaling", "rope_original_max_positions"),
        lambda flag, text, shape: Translation({"rope_scaling": "llama3"}, {"rope_original_max_positions": 8192}),
        is_switch=True,
    ),
    "--use-rotary-position-embeddings": _switch("--position-embedding-type rope", position_embedding_type="rope"),
    **{
        flag: ForeignFlag(f"nothing: {why}", (), lambda flag, text, shape: Translation(), is_switch, is_idle=True)
        for is_switch, flags in ((True, IDLE_SWITCHES), (False, IDLE_VALUES))
        for flag, why in flags.items()
    },
}
"""The flags that are accepted and translated."""

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "position_embedding_type": {"learned_absolute": "learned"},
}
"""Megatron-LM's names of values, by field."""

NOTATIONS: Mapping[str, Callable[[str, str], Any]] = {"window_size": _window}
"""Values with a comma that Megatron-LM writes otherwise, by field: from the flag and its text to megacore's."""
