"""Answers what a command line asks about the settings of Megatron-LM, Megatron-DeepSpeed and DeepSpeed."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megacore.arrive import megatron_script
from megacore.arrive.deepspeed import ACCUMULATION, DEEPSPEED_FLAGS, TOTAL
from megacore.arrive.deepspeed_file import read_deepspeed
from megacore.arrive.megatron import FOREIGN, LISTS, NOT_YET, NOTATIONS, REPLACED, TABLES
from megacore.arrive.rows import Foreign, Value
from megacore.arrive.translation import Run, Translation, translate_settings
from megacore.config.fields import FieldInfo
from megacore.config.given import ForeignSetting, Given
from megacore.config.other_trainers import ForeignValue, OtherTrainers
from megacore.config.schema import Config

_MEGATRON, _MEGATRON_PAGE = "Megatron-LM", "docs/guides/coming-from-megatron.md"
_DEEPSPEED, _DEEPSPEED_PAGE = "Megatron-DeepSpeed", "docs/guides/coming-from-deepspeed.md"
_FILE = FieldInfo(
    name="deepspeed_config",
    kind=str,
    optional=True,
    aliases=("--deepscale-config",),
    metavar="FILE.json",
    doc=f"Reads settings from a DeepSpeed configuration and translates them ({_DEEPSPEED_PAGE}). A key that has no "
    'counterpart and would change the result is refused by name. A value "auto" leaves the setting to the flags. '
    "Default: no file.",
)
_OF_SEVERAL = {"a Megatron-LM flag": "Megatron-LM flags", "without it,": "without them,", "leave it": "leave them"}


@functools.cache
def _names() -> Mapping[str, str]:
    return tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def _with_way(why: str) -> str:
    """A reason with what to do, where it says none."""
    return why if "use " in why or "leave " in why else f"{why}: leave it out"


class _Known(OtherTrainers):
    files: Mapping[str, FieldInfo] = {_FILE.name: _FILE}

    def setting_of(self, flag: str, words: Sequence[str]) -> ForeignSetting | None:
        is_list = flag in LISTS and any("[" in word for word in words)
        foreign = LISTS[flag] if is_list else FOREIGN.get(flag) or DEEPSPEED_FLAGS.get(flag)
        if foreign is None:
            return None
        return ForeignSetting(
            origin=_DEEPSPEED if flag in DEEPSPEED_FLAGS else _MEGATRON,
            source=" ".join([flag, *words]),
            fields=foreign.fields,
            translate=partial(_translate, foreign, flag, tuple(words)),
            is_idle=foreign.is_idle,
            is_last=foreign.is_last,
        )

    def value_of(self, name: str, flag: str, words: Sequence[str]) -> ForeignValue | None:
        if len(words) != 1:
            return None
        (word,) = words
        if why := TABLES["elsewhere"].get(name, {}).get(word):
            raise ValueError(f"{flag} {word} is a {_MEGATRON} value that megacore does not support: {_with_way(why)}")
        ours: Any = TABLES["synonyms"].get(name, {}).get(word, word)
        if name in NOTATIONS and "," in word:
            ours = NOTATIONS[name](flag, word)
        return None if ours == word else ForeignValue(_MEGATRON, ours)

    def advice(self, flag: str) -> str | None:
        if flag in REPLACED:
            return f"a {_MEGATRON} flag: {REPLACED[flag]}"
        if flag in NOT_YET:
            return f"a {_MEGATRON} flag that megacore does not support: {_with_way(NOT_YET[flag])}"
        return None

    def name_of(self, flag: str, words: Sequence[str]) -> str | None:
        value = " ".join(words)
        ours = _names().get(f"{flag} {value}", _names().get(flag))
        return re.sub(r"\bX\b", lambda _: value or "X", ours) if ours else None

    def refusal(self, flags: Sequence[str], advice: str) -> str:
        if len(flags) == 1:
            return f"{flags[0]} is {advice} ({_MEGATRON_PAGE})"
        for one, several in _OF_SEVERAL.items():
            advice = advice.replace(one, several)
        return f"{', '.join(flags[:-1])} and {flags[-1]} are {advice} ({_MEGATRON_PAGE})"

    def help_of(self, flag: str) -> str | None:
        if flag in FOREIGN:
            return f"{flag} is a {_MEGATRON} flag, and becomes {FOREIGN[flag].becomes} ({_MEGATRON_PAGE})"
        if flag in DEEPSPEED_FLAGS:
            becomes = DEEPSPEED_FLAGS[flag].becomes
            return f"{flag} is a {_DEEPSPEED} flag, and becomes {becomes} ({_DEEPSPEED_PAGE})"
        advice = self.advice(flag)
        return None if advice is None else self.refusal([flag], advice)

    def adjust(self, flags: Given, *, is_planned: bool) -> list[str]:
        notes = megatron_script.adjust(flags)
        path = flags.values.pop(_FILE.name, None)
        if path is None:
            return notes
        keys, _ = read_deepspeed(path, is_planned=is_planned)
        flags.problems += keys.problems
        flags.foreign += keys.foreign
        flags.unread |= keys.unread
        return notes + keys.notes

    def defaults(self, flags: Given, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return megatron_script.defaults(flags, given)

    def note_of_defaults(self, flags: Given, defaults: str) -> str:
        name = megatron_script.names_of(flags)[0]
        of_script = f"these are the flags of a {_MEGATRON} script ({name}); what it leaves out is as there"
        return f"{of_script}: {defaults} ({_MEGATRON_PAGE})"

    def translate(self, flags: Given, of_file: Mapping[str, Any], build: Callable[[], Config], world_size: int) -> None:
        config = build()
        if megatron_script.names_of(flags) and flags.values.get("sequence_parallel") and config.parallel.tp == 1:
            del flags.values["sequence_parallel"]  # Megatron-LM turns it off without a word
            flags.idle.setdefault(_MEGATRON, []).append("--sequence-parallel (with --tp 1)")
        if flags.foreign:
            translate_settings(flags, {**of_file, **flags.values}, config, world_size)
            config = build()
        megatron_script.leave_out_unread(flags, config)
        megatron_script.note_order(flags, config)

    def translate_settings(self, given: Given, values: Mapping[str, Any], config: Config, world_size: int) -> None:
        translate_settings(given, values, config, world_size)

    def settings_of_search(self, path: str) -> tuple[Sequence[ForeignSetting], Sequence[str]]:
        settings = read_deepspeed(path, is_planned=True)[0].foreign
        of_one_layout = (one for one in settings if one.source.startswith(ACCUMULATION))
        return settings, [
            f"{one.where}{one.source} is for one layout, as --search divides the same batch in all ways: leave it out, "
            f'or set it to "auto", and give {TOTAL} or --global-batch-size'
            for one in of_one_layout
        ]


def _translate(foreign: Foreign, flag: str, words: Sequence[str], run: Run) -> Translation:
    """What a flag with its values becomes. Raises ValueError where it has too few or too many values, or one that has
    no translation; the message names the way out."""
    if foreign.is_switch and words:
        raise ValueError(f"{flag} {words[0]}: a switch takes no value: leave the value out")
    if not (foreign.is_switch or foreign.is_list or len(words) == 1):
        way_out = "give it one, or leave the flag out" if foreign.is_idle else f"it is {foreign.becomes}"
        raise ValueError(f"{flag} needs one value, and has {len(words) or 'none'}: {way_out}")
    return foreign.translate(Value(flag, " ".join(words), run))


OTHER_TRAINERS = _Known()
