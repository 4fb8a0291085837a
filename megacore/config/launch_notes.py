"""Notes of a launch: what of a configuration the command line does not say by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megacore.config.given import Given
from megacore.config.messages import number
from megacore.config.other_trainers import other_trainers
from megacore.config.schema import Config, sections_of
from megacore.config.spelling import flag_and_value


def overridden_preset(kind: type[Config], flags: Given, file: Given, path: str | None) -> list[str]:
    """A note where the file overrides parts of a preset that a flag asks for."""
    preset = kind.presets.get(flags.values.get("preset") or "", {})
    changed = [f"{k} {file.values[k]} (preset: {v})" for k, v in preset.items() if file.values.get(k, v) != v]
    changed = [text for text in changed if text.split()[0] not in flags.values]
    if not changed:
        return []
    return [f"--config {path} overrides --preset {flags.values['preset']}: {', '.join(changed)}"]


# Fields that a resolved file contains although they follow from others, and what they follow to.
_DERIVED: Mapping[str, Callable[[Config], Any]] = {
    "num_query_groups": lambda config: config.model.query_groups,
    "kv_channels": lambda config: config.model.head_size,
    "ffn_hidden_size": lambda config: config.model.inner_size,
    "max_position_embeddings": lambda config: config.model.max_position_embeddings or config.data.seq_length,
    "min_lr": lambda config: config.optimizer.end_lr,
    "lr_decay_iters": lambda config: config.lr_decay_iters,
}


def kept_although_derived(
    build: Callable[[Mapping[str, Any]], Config], flags: Given, file: Given, path: str | None
) -> list[str]:
    """A note for each field that followed from others in the run that wrote the file, and that flags would change.

    Args:
        build: makes a configuration of values by field.
        flags: the command line.
        file: the values of --config.
        path: of that file.
    """
    notes = []
    for name, derived in _DERIVED.items():
        if name not in file.values or name in flags.values:
            continue
        kept, others = file.values[name], {k: v for k, v in file.values.items() if k != name}
        with_flags = {**others, **flags.values, name: None}  # given, so that no preset sets it
        there, here = (build(values) for values in (others, with_flags))
        if not there.model.problems() and kept == derived(there) != derived(here):
            notes.append(
                f"--config {path} sets {flag_and_value(name, kept)}: {flag_and_value(name, None)} derives it from the "
                f"other flags, which gives {derived(here)}"
            )
    return notes


def naming_defaults(problem: str, defaults: Mapping[str, Any]) -> str:
    """A problem that tells which of the values in it nobody gave, because they are defaults of Megatron-LM."""
    for name, value in defaults.items():
        text = flag_and_value(name, value)
        problem = re.sub(rf"^{re.escape(text)}(?= )", f"{text} (Megatron-LM's default)", problem)
    return problem


def defaults_of_another_trainer(flags: Given, names: Iterable[str], config: Config, usual: Config) -> list[str]:
    """A note with the flags whose default is that of the trainer whose script the command line is.

    Args:
        flags: the command line.
        names: fields that have such a default.
        config: the configuration.
        usual: what it would be with the defaults of megacore.
    """
    changed = _changes(sorted(names), config, usual)
    if not changed:
        return []
    return [other_trainers().note_of_defaults(flags).format(_in_words(changed))]


def kept_from_checkpoint(former: Mapping[str, Any], config: Config, usual: Config) -> list[str]:
    """A note with the settings that a continued run keeps, where the defaults are others by now."""
    changed = _changes(former, config, usual)
    return [f"--load keeps settings of the run that it continues: {_in_words(changed)}"] if changed else []


def _changes(names: Iterable[str], config: Config, usual: Config) -> dict[str, tuple[Any, Any]]:
    """Values by field in two configurations, where they differ once both are resolved. A precision is not among them:
    it depends on the device, and the launch summary shows it."""
    values = {name: (_resolved_value(name, config), _resolved_value(name, usual)) for name in names}
    return {name: both for name, both in values.items() if both[0] != both[1] and name != "precision"}


def _resolved_value(name: str, config: Config) -> Any:
    if name == "eval_iters":
        return config.eval_iters
    if name in _DERIVED:
        return _DERIVED[name](config)
    sections = (getattr(config, section) for section in sections_of(type(config)))
    return next(getattr(section, name) for section in sections if hasattr(section, name))


def _in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        flag_and_value(name, here) + ("" if usual is None else f" instead of {_shown(usual)}")
        for name, (here, usual) in changes.items()
    )


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value)
