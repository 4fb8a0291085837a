"""Translates flags of Megatron-LM that mean the same in another form, exactly or not at all.

Unlike an alias, such a flag has other units or another notation: layers per virtual stage instead of the number of
stages, or the layout of a pipeline in other letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore.config.messages import did_you_mean, divisors, one_of

_LONGEST_LAYOUT = 100_000


@dataclass(frozen=True)
class Translation:
    """The fields that a flag sets.

    Attributes:
        values: what the flag says, by field.
        implied: values that follow from it, by field, where nothing else sets them.
    """

    values: Mapping[str, Any]
    implied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """What a translation may depend on. None: an invalid value, which `validate` reports."""

    num_layers: int | None
    pp: int | None


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of Megatron-LM: what it becomes, in words and as a function of its value ("" for a switch)."""

    becomes: str
    fields: tuple[str, ...]
    translate: Callable[[str, str, Shape], Translation]
    is_switch: bool = False


def translate(flag: str, words: Sequence[str], shape: Shape) -> Translation:
    """Translates a flag of `FOREIGN` with its values.

    Args:
        flag: the flag.
        words: its values on the command line.
        shape: of the run.

    Raises:
        ValueError: it has too few or too many values, or one that has no translation; the message names the way out.
    """
    foreign = FOREIGN[flag]
    if foreign.is_switch:
        if words:
            raise ValueError(f"{flag} {words[0]}: a switch takes no value: leave the value out")
        return foreign.translate(flag, "", shape)
    if len(words) != 1:
        raise ValueError(f"{flag} needs one value, and has {len(words)}: {foreign.becomes}")
    return foreign.translate(flag, words[0], shape)


def _number(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{flag} '{text}' is not a whole number of 1 or more: use, for example, 2")
    return int(text)


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
}
"""The flags that are accepted and translated."""
