"""Flags of Megatron-LM about the model that mean the same in another form: activations, positions, windows, experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megacore.arrive.tables import Translate, by_name
from megacore.arrive.translation import Shape, Translation, whole_number
from megacore.config.layer_pattern import FULL, WINDOW, WITHOUT_POSITIONS, pattern_of
from megacore.config.messages import one_of
from megacore.config.numbers import parse_float, parse_int

_RUN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?")
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d{1,5}))?")
_LONGEST = 10_000
_YARN_POSITIONS = 4096  # Megatron-LM's default of --original-max-position-embeddings


def _swiglu(flag: str, text: str, shape: Shape) -> Translation:
    inner = {} if shape.hidden_size is None else {"ffn_hidden_size": int(4 * shape.hidden_size * 2 / 3 / 64) * 64}
    return Translation({"activation": "swiglu"}, {name: size for name, size in inner.items() if size})


_GATES = {"geglu": "geglu-exact", "swiglu": "swiglu"}


def _glu(flag: str, text: str, shape: Shape) -> Translation:
    if text not in _GATES:
        raise ValueError(f"{flag} {text} has no counterpart: use {one_of(list(_GATES))}, or --activation")
    return Translation({"activation": _GATES[text]})


# ---- positions -------------------------------------------------------------------------------------------------------


def _stretched(flag: str, text: str, shape: Shape) -> Translation:
    factor = whole_number(flag, text)
    return Translation({} if factor == 1 else {"rope_scaling": "linear", "rope_scaling_factor": float(factor)})


def _yarn(flag: str, text: str, shape: Shape) -> Translation:
    """Megatron-LM scales by yarn where attention is latent. A factor of 1 is no scaling, whatever its other numbers."""
    try:
        factor = parse_float(text)
    except ValueError:
        factor = 0.0
    if factor < 1:
        raise ValueError(f"{flag} '{text}' is not a number of 1 or more: use, for example, 40")
    if factor == 1:
        return Translation(dropped=("rope_mscale", "rope_mscale_all_dim"))
    mscale, all_dimensions = (shape.settings.get(name) for name in ("rope_mscale", "rope_mscale_all_dim"))
    if (mscale or 1.0) != 1.0 and not all_dimensions:
        raise ValueError(
            f"{flag} {text} beside --mscale {mscale:g} and no --mscale-all-dim multiplies by m({mscale:g}): use "
            "--rope-scaling yarn with attention-factor, the number itself"
        )
    # Without --mscale it is 1, and without --mscale-all-dim it is 0, of which both programs make m(1).
    implied = {"rope_original_max_positions": _YARN_POSITIONS} | ({"rope_mscale": 1.0} if all_dimensions else {})
    return Translation(
        {"rope_scaling": "yarn", "rope_scaling_factor": factor}, implied, () if all_dimensions else ("rope_mscale",)
    )


def _rope_type(flag: str, text: str, shape: Shape) -> Translation:
    if text not in ("rope", "yarn"):
        raise ValueError(f"{flag} {text} is not known: use rope or yarn")
    if text == "yarn" and shape.settings.get("rope_scaling") != "yarn":
        raise ValueError(
            f"{flag} yarn needs its factor: use --rotary-scaling-factor, or --rope-scaling yarn with "
            "--rope-scaling factor"
        )
    if text == "rope" and shape.settings.get("rope_scaling") == "yarn":
        raise ValueError(f"{flag} rope has no scaling, and yarn is given as well: keep one of them")
    return Translation()


# ---- patterns over blocks --------------------------------------------------------------------------------------------


def _listed(flag: str, text: str, shape: Shape) -> list[int] | None:
    """The numbers of a list such as ([0]*3+[1])*2, one for each block; None if the text is none.

    Raises:
        ValueError: they are not as many as there are blocks.
    """
    written = re.sub(r"\s", "", text)
    for _ in range(4):  # groups within groups
        long = sum(len(match[1]) * int(match[2] or 1) for match in _GROUP.finditer(written)) > 8 * _LONGEST
        if long or "(" not in written:
            break
        written = _GROUP.sub(lambda match: "+".join([match[1]] * int(match[2] or 1)), written)
    matches = [_RUN.fullmatch(run) for run in written.split("+")]
    if any(match is None or len(match[1]) * int(match[2] or 1) > 2 * _LONGEST for match in matches):
        return None
    listed = [int(kind) for match in matches if match for kind in match[1].split(",") * int(match[2] or 1)]
    if shape.num_layers and len(listed) != shape.num_layers:
        raise ValueError(
            f"{flag} {text} is for {len(listed)} blocks, and --num-layers is {shape.num_layers}: use a list of "
            f"{shape.num_layers}"
        )
    return listed


def _pattern(flag: str, text: str, shape: Shape) -> list[int] | int:
    """The N of a flag that is about every Nth block, or the numbers of its list.

    Raises:
        ValueError: it is neither.
    """
    try:
        found: list[int] | int | None = parse_int(text.strip())
    except ValueError:
        found = _listed(flag, text, shape)
    if isinstance(found, int) and not 1 <= found <= _LONGEST:
        raise ValueError(f"{flag} {text}: use a whole number of 1 or more, or a list such as [1,1,1,0]*6")
    if found is None:
        raise ValueError(
            f"{flag} {text} is neither a whole number nor a list such as [1,1,1,0]*6: use one, or --attention-pattern"
        )
    return found


def _kinds(found: list[int] | int, *, usual: str, other: str) -> Translation:
    """The pattern of attention in which every Nth block, or each with a 0 of a list, is another one."""
    kinds = usual * (found - 1) + other if isinstance(found, int) else "".join((other, usual)[n] for n in found)
    return Translation({"attention_pattern": pattern_of(kinds)})


def _windows(flag: str, text: str, shape: Shape) -> Translation:
    return _kinds(_pattern(flag, text, shape), usual=WINDOW, other=FULL)


def _without_positions(flag: str, text: str, shape: Shape) -> Translation:
    found = _pattern(flag, text, shape)
    inverted = found if isinstance(found, int) else [1 - number for number in found]
    return _kinds(inverted, usual=FULL, other=WITHOUT_POSITIONS)


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


def _expert_blocks(flag: str, text: str, shape: Shape) -> Translation:
    """A list with a 1 for each block with experts: the blocks without experts at the start, and the distance of those
    with experts after it."""
    listed = _listed(flag, text, shape)
    if listed is None:
        raise ValueError(f"{flag} {text} is neither a whole number nor a list such as [0]*3+[1]*58: use one")
    if 1 not in listed:
        raise ValueError(f"{flag} {text} has no block with experts: leave --num-experts and {flag} out")
    first = listed.index(1)
    after = listed[first:]
    distance = after.index(1, 1) if 1 in after[1:] else len(after)
    if any(number != (place % distance == 0) for place, number in enumerate(after)):
        raise ValueError(
            f"{flag} {text} is not every Nth block from a first one on: use --moe-first-dense-layers and a number"
        )
    return Translation({"moe_first_dense_layers": first, "moe_layer_freq": distance})


def _theta(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"rotary_base": float(whole_number(flag, text))})


def _llama3(flag: str, text: str, shape: Shape) -> Translation:
    return Translation({"rope_scaling": "llama3"}, {"rope_original_max_positions": 8192})


MODEL: Mapping[str, Translate] = by_name(
    *(_swiglu, _glu, _stretched, _yarn, _theta, _llama3, _rope_type),
    *(_windows, _without_positions, _expert_blocks),
)
"""The functions that rows of megatron.toml name."""

NOTATIONS: Mapping[str, Callable[[str, str], Any]] = {"window_size": _window}
"""Values with a comma that Megatron-LM writes otherwise, by field: from the flag and its text to megacore's."""
