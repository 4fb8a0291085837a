"""What flags of Megatron-LM become whose value needs computing, by the names that rows of megatron.toml give. The rows
have every flag that is not megacore's: translated, without effect, or refused with what to use instead. Flags with the
same meaning are names and aliases of fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megacore.arrive.rows import Foreign, Value, read_rows, read_tables, refused_flags, whole
from megacore.arrive.translation import MissingField, Translation
from megacore.config import spelling
from megacore.config.layer_pattern import FULL, WINDOW, WITHOUT_POSITIONS, pattern_of
from megacore.config.messages import divisors, one_of
from megacore.config.numbers import is_number, parse_float, parse_int
from megacore.config.rampup import BatchSizes
from megacore.files import unreadable

_LONGEST_LIST = 10_000
_LONGEST_LAYOUT = 100_000
_LARGEST_DATA_ARGS = 1 << 24  # bytes
_YARN_POSITIONS = 4096  # Megatron-LM's default of --original-max-position-embeddings


def nearest(count: Fraction) -> int:
    """The nearest whole number, and the larger one of two that are as near."""
    return math.floor(count + Fraction(1, 2))


# ---- the model -------------------------------------------------------------------------------------------------------


def _swiglu(value: Value) -> Translation:
    hidden = value.run.number("hidden_size") or 0
    inner = int(4 * hidden * 2 / 3 / 64) * 64
    return Translation({"activation": "swiglu"}, {"ffn_hidden_size": inner} if inner else {})


def _yarn(value: Value) -> Translation:
    """Megatron-LM scales by yarn where attention is latent. A factor of 1 is no scaling, whatever its other numbers."""
    factor = parse_float(value.value) if is_number(value.value) else 0.0
    if not factor >= 1:
        raise ValueError(f"{value.quoted} is not a number of 1 or more: use, for example, 40")
    if factor == 1:
        return Translation(dropped=("rope_mscale", "rope_mscale_all_dim"))
    mscale, all_dimensions = (value.run.settings.get(name) for name in ("rope_mscale", "rope_mscale_all_dim"))
    if (mscale or 1.0) != 1.0 and not all_dimensions:
        raise ValueError(
            f"{value} beside --mscale {mscale:g} and no --mscale-all-dim multiplies by m({mscale:g}): use "
            "--rope-scaling yarn with attention-factor, the number itself"
        )
    # Without --mscale it is 1, and without --mscale-all-dim it is 0, of which both programs make m(1).
    implied = {"rope_original_max_positions": _YARN_POSITIONS} | ({"rope_mscale": 1.0} if all_dimensions else {})
    return Translation(
        {"rope_scaling": "yarn", "rope_scaling_factor": factor}, implied, () if all_dimensions else ("rope_mscale",)
    )


def _rope_type(value: Value) -> Translation:
    if value.value not in ("rope", "yarn"):
        raise ValueError(f"{value} is not known: use rope or yarn")
    is_yarn = value.run.settings.get("rope_scaling") == "yarn"
    if value.value == "yarn" and not is_yarn:
        raise ValueError(
            f"{value} needs its factor: use --rotary-scaling-factor, or for example "
            "--rope-scaling yarn factor=8 original-max-positions=4096"
        )
    if value.value == "rope" and is_yarn:
        raise ValueError(f"{value} has no scaling, and yarn is given as well: keep one of them")
    return Translation()


_RUN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?")
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d{1,5}))?")


def _listed(value: Value) -> list[int] | None:
    """The numbers of a list such as ([0]*3+[1])*2, one for each block; None if the text is none. Raises ValueError
    where they are not as many as there are blocks."""
    written = re.sub(r"\s", "", value.value)
    for _ in range(4):  # groups within groups
        long = sum(len(match[1]) * int(match[2] or 1) for match in _GROUP.finditer(written)) > 8 * _LONGEST_LIST
        if long or "(" not in written:
            break
        written = _GROUP.sub(lambda match: "+".join([match[1]] * int(match[2] or 1)), written)
    matches = [_RUN.fullmatch(run) for run in written.split("+")]
    if any(match is None or len(match[1]) * int(match[2] or 1) > 2 * _LONGEST_LIST for match in matches):
        return None
    listed = [int(kind) for match in matches if match for kind in match[1].split(",") * int(match[2] or 1)]
    if (layers := value.run.number("num_layers")) and len(listed) != layers:
        fitting = ",".join(str(listed[block % len(listed)]) for block in range(layers))
        raise ValueError(
            f"{value} is for {len(listed)} blocks, and --num-layers is {layers}: use, for example, [{fitting}]"
        )
    return listed


def _pattern(value: Value) -> Translation:
    """The pattern of attention in which every Nth block is of another kind than the rest, or in which each block has
    the kind with its number in a list."""
    kinds, nth = (
        (FULL + WITHOUT_POSITIONS, WITHOUT_POSITIONS) if value.name == "--no-rope-freq" else (FULL + WINDOW, FULL)
    )
    try:
        found: list[int] | int | None = parse_int(value.value.strip())
    except ValueError:
        found = _listed(value)
    if found is None:
        raise ValueError(
            f"{value} is neither a whole number nor a list such as [1,1,1,0]*6: use one, or --layer-pattern"
        )
    if isinstance(found, list):
        return Translation({"layer_pattern": pattern_of("".join(kinds[number] for number in found))})
    if not 1 <= found <= _LONGEST_LIST:
        raise ValueError(f"{value}: use a whole number of 1 or more, or a list such as [1,1,1,0]*6")
    return Translation({"layer_pattern": pattern_of(kinds.replace(nth, "") * (found - 1) + nth)})


def _expert_blocks(value: Value) -> Translation:
    """A list with a 1 for each block with experts: the blocks without experts at the start, and the distance of those
    with experts after it."""
    listed = _listed(value)
    if listed is None:
        raise ValueError(f"{value} is neither a whole number nor a list such as [0]*3+[1]*58: use one")
    if 1 not in listed:
        raise ValueError(f"{value} has no block with experts: leave --num-experts and {value.name} out")
    first = listed.index(1)
    after = listed[first:]
    distance = after.index(1, 1) if 1 in after[1:] else len(after)
    if any(number != (place % distance == 0) for place, number in enumerate(after)):
        raise ValueError(
            f"{value} is not every Nth block from a first one on: use --moe-layer-freq N first-dense-layers=K"
        )
    return Translation({"moe_first_dense_layers": first, "moe_layer_freq": distance})


def _of_dropped_tokens(value: Value) -> Translation:
    if value.run.settings.get("num_experts") is not None:
        raise ValueError(
            f"{value}: Megatron-DeepSpeed's gates choose and drop tokens otherwise, so that training differs: leave it "
            "out; see --moe-router-topk"
        )
    return Translation()


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


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def _stages(virtual: int) -> Translation:
    return Translation({"virtual_stages": virtual}, {"schedule": "interleaved"} if virtual > 1 else {})


def _virtual_stages(value: Value) -> Translation:
    return _stages(whole(value, 1))


def _layers_of_virtual_stage(value: Value) -> Translation:
    each, layers, pp = whole(value, 1), value.run.number("num_layers"), value.run.number("pp")
    if not layers or not pp:
        return Translation()
    per_rank, left = divmod(layers, pp)
    if left:
        raise ValueError(
            f"{value.name} {each} counts layers of equal stages, and --pp {pp} does not divide --num-layers {layers}: "
            "give the number of stages per rank instead, with --virtual-stages and --schedule interleaved; uneven ones "
            "are balanced"
        )
    if per_rank % each:
        raise ValueError(
            f"{value.name} {each} must divide the {per_rank} layers per rank (--num-layers {layers} / --pp {pp}): use "
            f"{one_of(divisors(per_rank, near=each))}, or --virtual-stages and --schedule interleaved, which balances "
            "uneven stages"
        )
    return _stages(per_rank // each)


def _layout(value: Value) -> Translation:
    written, pp = value.value.replace(",", "").replace(" ", ""), value.run.number("pp")
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"([^()*])\*(\d{1,6})"):
        size = sum(len(match[1]) * int(match[2]) for match in re.finditer(pattern, written))
        if size > _LONGEST_LAYOUT:
            raise ValueError(f"{value} describes more than {_LONGEST_LAYOUT:,} layers: leave it out")
        written = re.sub(pattern, lambda match: match[1] * int(match[2]), written)
    if strange := sorted(set(written) - set("EtmL|")):
        raise ValueError(
            f"{value} has {one_of(strange)}: it has E, t, m, L and |: write it with --pipeline-layout E,3*t|4*t,H"
        )
    depths, given = value.run.number("mtp_num_layers") or 0, [stage.count("m") for stage in written.split("|")]
    stages = written.replace("m", "").replace("L", "H").split("|")
    if not all(stages):
        raise ValueError(
            f"{value} has an empty stage, and every stage of megacore holds a layer: use fewer stages, or let --pp and "
            "--virtual-stages balance them"
        )
    runs = ([run[0] for run in re.finditer(r"(.)\1*", stage)] for stage in stages)
    ours = "|".join(",".join(run if len(run) == 1 else f"{len(run)}*{run[0]}" for run in stage) for stage in runs)
    if any(given) and given != [*[0] * (len(given) - 1), depths]:
        raise ValueError(
            f"{value}: blocks of multi-token prediction (m) lie on the last stage, {depths} by --mtp-num-layers: use "
            f"--pipeline-layout {ours}"
        )
    if not pp:
        return Translation({"pipeline_layout": ours})
    if pp == 1 and len(stages) > 1:
        raise ValueError(
            f"{value} has {len(stages)} stages, and without a pipeline there is one: leave {value.name} out, or use "
            f"--pp {len(stages)} with a multiple of {len(stages)} processes"
        )
    virtual, left = divmod(len(stages), pp)
    if left:
        way = f"use --pp {len(stages)}, or other stages"
        raise ValueError(f"{value} has {len(stages)} stages, which --pp {pp} must divide: {way}")
    return Translation({"pipeline_layout": ours, **_stages(virtual).values}, _stages(virtual).implied)


# ---- steps -----------------------------------------------------------------------------------------------------------


def _train_samples(value: Value) -> Translation:
    samples, batch = whole(value, 1), _batch_size(value, "--train-iters")
    return Translation({"train_iters": BatchSizes(batch, value.run.ramp).steps(samples)})


def _in_steps(value: Value) -> Translation:
    """A number of samples where megacore counts steps: --lr-decay-samples is --lr-decay-iters."""
    name = value.name.removeprefix("--").replace("samples", "iters").replace("-", "_")
    samples = whole(value, 0 if name == "lr_warmup_iters" else 1)
    if samples == 0:
        return Translation(implied={name: 0})
    return Translation({name: nearest(Fraction(samples, _batch_size(value, spelling.flag(name))))})


def _batch_size(value: Value, ours: str) -> int:
    if (batch := value.run.number("global_batch_size")) is None:
        said = f"{value} counts samples: add --global-batch-size 8, or another, or give steps with {ours}"
        if (steps := value.run.number(spelling.field_and_text(ours)[0])) is not None:
            said = f"{value} counts samples, and {ours} {steps} is given as well: keep one of them"
        raise MissingField("global_batch_size", said)
    return batch


def _warmup(value: Value) -> Translation:
    try:
        share = Fraction(repr(parse_float(value.value)))  # as it is written, and not the binary number next to it
    except ValueError:  # nan and inf too
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise ValueError(f"{value.quoted} is not a number of at least 0 and below 1: use, for example, 0.01")
    steps = value.run.number("lr_decay_iters") or value.run.number("train_iters")
    return Translation({} if steps is None else {"lr_warmup_iters": nearest(share * steps)})


def _same_schedule(value: Value) -> Translation:
    for other in ("--override-lr-scheduler", "--override-opt-param-scheduler"):
        if other in value.run.others:
            raise ValueError(
                f"{value.name} takes the schedule of the checkpoint, and {other} that of the flags: keep one of them"
            )
    return Translation({"same_schedule": True})


# ---- data ------------------------------------------------------------------------------------------------------------


def _finetune(value: Value) -> Translation:
    load = value.run.config.checkpoint.load
    if load is None or load == "auto":
        raise ValueError(f"{value} starts from the weights of --load DIR: use --pretrained-checkpoint DIR")
    return Translation({"pretrained_checkpoint": load}, dropped=("load", "load_optim"))


def _content(value: Value, instead: str) -> str:
    """The text of a regular file, or ValueError."""
    try:
        if problem := unreadable(value.value):
            raise ValueError(f"{value} {problem}: use {instead}")
        with open(value.value, encoding="utf-8") as file:
            return file.read(_LARGEST_DATA_ARGS)
    except OSError as error:
        raise ValueError(f"{value} cannot be read: {error.strerror}: use {instead}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{value} is no text: use {instead}") from error


def _data_args(value: Value) -> Translation:
    example = "a text file of WEIGHT PREFIX WEIGHT PREFIX ..."
    words = _content(value, example).split()
    if not words:
        raise ValueError(f"{value} is empty: use {example}")
    return Translation({"data_path": tuple(words)})


_SPLITS = {"train": "train_data_path", "valid": "valid_data_path", "test": None}


def _data_args_per_split(value: Value) -> Translation:
    example = 'a JSON file such as {"train": ["0.3", "PREFIX", "0.7", "PREFIX"], "valid": ["PREFIX"]}'
    try:
        splits = json.loads(_content(value, example))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{value} is not valid JSON ({error}): use {example}") from error
    if not isinstance(splits, dict) or not splits.get("train"):
        raise ValueError(f"{value} has no training data: use {example}")
    values: dict[str, tuple[str, ...]] = {}
    for split, words in splits.items():
        if split not in _SPLITS:
            raise ValueError(f"{value} has the split {split!r}: use {one_of(list(_SPLITS))}")
        if not (isinstance(words, list) and all(isinstance(w, str | int | float) for w in words)) and words is not None:
            raise ValueError(f"{value}: {split} must be a list of prefixes, or of weights and prefixes")
        if (name := _SPLITS[split]) is not None and words:
            values[name] = tuple(map(str, words))
    return Translation(values)


def _validation_sets(value: Value) -> Translation:
    prefixes = tuple(value.run.settings.get("valid_data_path", ()))
    if not prefixes:
        raise ValueError(
            f"{value} evaluates each dataset of --valid-data-path by itself, and there is none: use it, or "
            "--valid-sets NAME=PREFIX beside any training data"
        )
    if weights := [word for word in prefixes if is_number(word)]:
        raise ValueError(
            f"{value} takes no weights, and --valid-data-path has {' '.join(weights)}: leave the weights out"
        )
    sets = tuple(f"{number}={prefix}" for number, prefix in enumerate(prefixes))
    return Translation({"valid_sets": sets}, dropped=("valid_data_path",))


def _evaluates_only(value: Value) -> Translation:
    return Translation({"skip_train": True} if value.value not in ("", "0", "False", "false") else {})


# ---- memory and parallelism ------------------------------------------------------------------------------------------


def _granularity(value: Value) -> Translation:
    """Selective recomputation may be extended by a further flag, to which it gives way, but not to a contradiction."""
    if value.value == "full":
        return Translation({"recompute": "full"})
    if value.value != "selective" and value.name != "--recompute-activations":  # a switch
        raise ValueError(f"{value} is not known: use selective or full, or --recompute")
    if (given := value.run.settings.get("recompute")) not in (None, "selective"):
        raise ValueError(
            f"{value} is --recompute selective, and --recompute {given} is given as well: keep one of them"
        )
    return Translation(implied={"recompute": "selective"})


def _recompute_method(value: Value) -> Translation:
    if value.value not in ("uniform", "block"):
        raise ValueError(f"{value} is not known: use uniform or block")
    return Translation(dropped=("recompute_num_layers",) if value.value == "uniform" else ())


def _recompute_method_of_version_2(value: Value) -> Translation:
    is_said = "--activations-checkpoint-granularity" in value.run.others
    return Translation(implied={} if is_said else {"recompute": "full"}, dropped=_recompute_method(value).dropped)


def _layers_of_version_2(value: Value) -> Translation:
    layers, has_method = whole(value, 1), "--activations-checkpoint-method" in value.run.others
    return Translation({"recompute_num_layers": layers} if has_method else {})


_LIGHT = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
_HEAVY = ("mlp", "moe", "shared_experts")


def _modules(value: Value) -> Translation:
    words = value.value.strip("[]").split()
    if unknown := [word for word in words if word not in (*_LIGHT, *_HEAVY)]:
        raise ValueError(f"{value.name} {unknown[0]} has no counterpart: use --recompute selective, or full")
    return Translation(implied={"recompute": "full"} if set(words) & set(_HEAVY) else {})


_CP_COMMS = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "allgather": "allgather", "a2a+p2p": None}


def _cp_comm(value: Value) -> Translation:
    """How blocks exchange keys and values; where they differ, megacore chooses."""
    words = value.value.split()
    if not words or any(word not in _CP_COMMS for word in words):
        raise ValueError(f"{value} has no counterpart: use {one_of(list(_CP_COMMS))}, or --cp-comm")
    ours = _CP_COMMS[words[0]] if len(set(words)) == 1 else None
    is_alone = value.run.settings.get("cp", 1) == 1
    return Translation(implied={} if ours is None or is_alone else {"cp_comm": ours})


# ---- fp8 -------------------------------------------------------------------------------------------------------------

_FP8_RECIPES = {"delayed": "tensorwise", "tensorwise": "tensorwise", "blockwise": "blockwise"}
_FP8_ON = ("--fp8-format", "--fp8-e4m3", "--fp8-hybrid")
_WITHOUT_FP8 = Translation(note="has no effect without --fp8-format")


def _fp8(value: Value) -> Translation:
    """--fp8 of the recipe; the switches of earlier versions are formats, and their recipe the delayed one."""
    form, recipe = value.value or value.name.removeprefix("--fp8-"), value.run.others.get("--fp8-recipe", "delayed")
    if form not in ("e4m3", "hybrid"):
        raise ValueError(f"{value} is not known: use e4m3 or hybrid, or --fp8")
    if recipe not in _FP8_RECIPES:
        raise ValueError(
            f"--fp8-recipe {recipe} has no counterpart: use --fp8-recipe blockwise, or --fp8 blockwise, rowwise or "
            "tensorwise"
        )
    ours = _FP8_RECIPES[recipe]
    gradients = "e4m3" if ours == "blockwise" else "e5m2"
    differences = [
        "scales are those of the numbers at hand, not of earlier steps" if recipe == "delayed" else "",
        f"gradients are {gradients}" if (form == "e4m3") != (gradients == "e4m3") else "",
        "gradients of weights are computed in 16 bits",
    ]
    return Translation({"fp8": ours}, note=f"--fp8 {ours}: {', '.join(filter(None, differences))}")


def _fp8_recipe(value: Value) -> Translation:
    """--fp8-format reads it."""
    return Translation() if any(name in value.run.others for name in _FP8_ON) else _WITHOUT_FP8


def _blocks_in_bf16(value: Value) -> Translation:
    if not any(name in value.run.others for name in _FP8_ON):
        return _WITHOUT_FP8
    first, last = (
        whole(Value(name, value.run.others.get(name, "1"), value.run))
        for name in ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
    )
    kept = [*range(first), *range(-last, 0)]
    return Translation({"fp8_skip": ",".join(map(str, kept))} if kept else {})


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _moment(value: Value) -> Translation:
    """The format of one of the two moments, which have the same here."""
    if value.value == "fp32":
        return Translation()
    if value.value != "bf16":
        raise ValueError(
            f"{value} has no counterpart: use fp32 or bf16 for both moments, or leave both out and use --optimizer "
            "moments-dtype=int8"
        )
    other = "--exp-avg-dtype" if value.name == "--exp-avg-sq-dtype" else "--exp-avg-sq-dtype"
    if (format_of_other := value.run.others.get(other, "fp32")) != value.value:
        raise ValueError(
            f"{value} beside {other} {format_of_other}: both moments have one format here: use --optimizer "
            "moments-dtype=bf16 for both, or fp32"
        )
    return Translation({"moments_dtype": value.value})


def _muon_blocks(value: Value) -> Translation:
    is_whole = value.value == "blockwise" and value.run.settings.get("tp", 1) == 1
    if value.value not in ("distributed", "duplicated") and not is_whole:
        raise ValueError(f"{value} has no counterpart: matrices are orthogonalized as a whole: use distributed")
    return Translation()


# ---- the tables ------------------------------------------------------------------------------------------------------

TABLES = read_tables("megatron.toml")
"""The file itself."""
FOREIGN: Mapping[str, Foreign] = read_rows(TABLES, globals())
"""The flags that are accepted and translated."""
LISTS: Mapping[str, Foreign] = read_rows(TABLES["lists"], globals())
"""Flags of megacore that Megatron-LM also gives a list in brackets, which is translated."""
REPLACED: Mapping[str, str] = refused_flags(TABLES["replaced"])
"""Flags that have another name here, or that megacore does not need."""
NOT_YET: Mapping[str, str] = refused_flags(TABLES["not_yet"])
"""Flags of features that megacore does not have, and what leaving them out changes or what comes nearest."""
NOTATIONS: Mapping[str, Callable[[str, str], Any]] = {"window_size": _window}
"""Values with a comma that Megatron-LM writes otherwise, by field: from the flag and its text to megacore's."""
