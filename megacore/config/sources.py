"""Where the values of a configuration come from, and what a user is told of those that no flag sets.

Each source counts more than those before it: defaults of the entry point < those of another trainer, for its scripts <
--preset < --recipe < the run that is continued < a file that describes the model < --config < flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from megacore.config.dimensions import ranks_of_role
from megacore.config.fields import field_infos
from megacore.config.given import Given
from megacore.config.messages import number
from megacore.config.model import ModelConfig
from megacore.config.optimizer import OptimizerConfig
from megacore.config.optimizers import OPTIMIZERS, sections_read
from megacore.config.other_trainers import other_trainers
from megacore.config.presets import RECIPES
from megacore.config.schema import Config, ResolvedConfig, section_of, sections_of
from megacore.config.spelling import OWNERS, flag, flag_and_value, own_flag

C = TypeVar("C", bound=Config)

# Fields that a resolved file contains although they follow from others, and what they follow to.
_DERIVED: Mapping[str, Callable[[Config], Any]] = {
    "num_query_groups": lambda config: config.model.query_groups,
    "kv_channels": lambda config: config.model.head_size,
    "ffn_hidden_size": lambda config: config.model.inner_size,
    "max_position_embeddings": lambda config: config.model.max_position_embeddings or config.data.seq_length,
    "min_lr": lambda config: config.optimizer.end_lr,
    "lr_decay_iters": lambda config: config.lr_decay_iters,
}


def built(kind: type[C], given: Mapping[str, Any], **defaults: Mapping[str, Any]) -> C:
    """A configuration of values by field, `given` above `defaults`. A required field without a value is None, which
    `validate` reports."""
    preset: dict[str, Any] = dict(kind.presets.get(given.get("preset") or "", {}))
    if given.get("tokenizer") is not None:
        # The tokenizer knows better: a preset's size would pad or cut its vocabulary.
        preset.pop("vocab_size", None)
    preset |= RECIPES.get(given.get("recipe") or "", {})
    theirs, former = defaults.get("theirs", {}), defaults.get("former", {})
    # The order is the precedence: each source overrides those before it.
    below = {**kind.defaults({**preset, **given}), **theirs, **preset, **former}
    values = {**below, **given}
    # A value that nobody typed is left out where it has no effect: a rule would refuse it as if it were given.
    idle = set(ModelConfig(**{k: v for k, v in values.items() if k in field_infos(ModelConfig)}).idle_fields)
    chosen = values.get("optimizer", field_infos(OptimizerConfig)["optimizer"].default)
    for name in OPTIMIZERS.keys() - sections_read(chosen):
        idle |= field_infos(OPTIMIZERS[name]).keys()
    values = {**{k: v for k, v in below.items() if k not in idle}, **given}
    sections = {
        name: section(**{k: values.get(k) for k, info in field_infos(section).items() if k in values or info.required})
        for name, section in sections_of(kind).items()
    }
    return kind(**sections)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Sources(Generic[C]):
    """What each source sets, by field."""

    kind: type[C]  # the entry point's kind of configuration
    flags: Given  # the command line; settings of other trainers become values of it
    typed: Mapping[str, Any]  # values by field that flags of this program set
    file: Given = field(default_factory=Given)
    path: str | None = None  # of that file; None: it is not given
    shape: Mapping[str, Any] = field(default_factory=dict)  # of a file that describes the model
    former: Mapping[str, Any] = field(default_factory=dict)  # settings of the run that is continued
    theirs: Mapping[str, Any] = field(default_factory=dict)  # defaults of another trainer
    problems: list[str] = field(default_factory=list)  # why a file that describes the model is refused
    notes: list[str] = field(default_factory=list)  # on flags that are read otherwise than they are written

    @property
    def given(self) -> dict[str, Any]:
        """The values of --config and flags."""
        return {**self.file.values, **self.flags.values}

    def config(self, meant: Mapping[str, Any] = MappingProxyType({})) -> C:
        """The configuration that all sources give together, which may be invalid. `meant`: values that are taken for
        misspelled ones; what follows from these follows from them."""
        return built(self.kind, {**self.shape, **self.given, **meant}, theirs=self.theirs, former=self.former)

    def all_notes(self, config: C) -> Iterator[str]:
        """What to tell the user of a configuration that is valid."""
        yield from self.notes
        yield from self._overridden_preset()
        yield from self._recipe()
        if config.has_whole_backwards:
            yield (
                "--schedule zero-bubble: --recompute full would compute a block again for each of its operators, so "
                "that backward is not split; the schedule is 1F1B"
            )
        yield from self._kept_although_derived()
        yield from self.flags.notes
        yield from self.flags.translation_notes()
        usual = built(self.kind, {**self.shape, **self.given})
        if changed := ", ".join(_changes(sorted(self.theirs.keys() - self.former.keys()), config, usual)):
            yield other_trainers().note_of_defaults(self.flags, changed)
        if changed := ", ".join(_changes(self.former, config, usual)):
            yield f"--load keeps settings of the run that it continues: {changed}"

    def without_effect(self, config: ResolvedConfig, typed: Mapping[str, Any] | None) -> Iterator[str]:
        """Notes on flags that change nothing in a run with its number of ranks: a script may start runs of all sizes.
        `typed`: the values that flags set; None: as here."""
        typed, parallel = self.typed if typed is None else typed, config.parallel
        is_alone = ranks_of_role("replicas", parallel) == 1 and not (
            parallel.offload_optimizer or parallel.offload_params
        )
        has_one_stage = parallel.pp == 1
        notes = (
            ("zero_stage", typed.get("zero_stage") and is_alone, "with one data-parallel rank (--dp 1)"),
            ("etp", typed.get("etp") and config.model.experts is None, "without experts"),
            # Other schedules have another order of forwards and backwards on one rank too.
            ("schedule", typed.get("schedule") == "1f1b" and has_one_stage, "without a pipeline (--pp 1)"),
            ("pipeline_balance", "pipeline_balance" in typed and has_one_stage, "without a pipeline (--pp 1)"),
        )
        yield from (f"{flag_and_value(name, typed[name])} changes nothing {why}" for name, idle, why in notes if idle)
        if typed.get("schedule") == "zero-bubble" and has_one_stage:
            yield "--schedule zero-bubble fills waits of a pipeline, and there is none with --pp 1"

    def _overridden_preset(self) -> Iterator[str]:
        """That the file overrides parts of a preset that a flag asks for."""
        flags, file = self.flags.values, self.file.values
        preset = self.kind.presets.get(flags.get("preset") or "", {})
        changed = [
            f"{name} {file[name]} (preset: {value})"
            for name, value in preset.items()
            if name not in flags and file.get(name, value) != value
        ]
        if changed:
            yield f"--config {self.path} overrides --preset {flags['preset']}: {', '.join(changed)}"

    def _recipe(self) -> Iterator[str]:
        """What the recipe sets, and what the user gives instead."""
        name = self.given.get("recipe")
        if name is not None:
            given, row = self.given, RECIPES[name]
            kept = [flag_and_value(field, value) for field, value in row.items() if given.get(field, value) == value]
            other = [flag_and_value(field, given[field]) for field in row if given.get(field, row[field]) != row[field]]
            yield f"--recipe {name}: {', '.join(kept)}" + (f"; given instead: {', '.join(other)}" if other else "")

    def _kept_although_derived(self) -> Iterator[str]:
        """The fields that followed from others in the run that wrote the file, and that flags would change."""
        kept = [name for name in _DERIVED if name in self.file.values and name not in self.flags.values]
        if not kept:
            return
        # None is given, so that no preset and no program's own default sets it.
        others = {**self.file.values, **dict.fromkeys(kept)}
        there, here = built(self.kind, others), built(self.kind, {**others, **self.flags.values})
        for name in () if there.model.problems() else kept:
            value, derived = self.file.values[name], _DERIVED[name](here)
            if value == _DERIVED[name](there) != derived:
                yield (
                    f"--config {self.path} sets {flag_and_value(name, value)}: {flag_and_value(name, None)} derives it "
                    f"from the other flags, which gives {derived}"
                )

    def as_given(self, problem: str) -> str:
        """A problem about a parameter as it was spelled, and that tells which of the values in it nobody gave, because
        they are defaults of Megatron-LM."""
        for name in [name for name in OWNERS if name in self.given]:
            alias, given = (flag_and_value(name, self.given[name], own=own) for own in (True, False))
            owner, said = flag(OWNERS[name][0]), f"{alias} has no effect without "
            if flag(name) in self.flags.names and problem.startswith(f"{said}{owner}:"):
                problem = f"{given} has no effect without a value of {problem.removeprefix(said)}"
            needs = field_infos(sections_of(self.kind)[section_of(self.kind, name)])[name].needs
            # Its own flag stays where only its owner is left out, without which it has no effect.
            if own_flag(name) in self.flags.names and needs is not None and needs.owner == OWNERS[name][0]:
                problem = re.sub(rf"leave {owner} (?=out|and)", f"leave {owner} and {own_flag(name)} ", problem)
        for name, value in self.theirs.items():
            if name not in self.given and name not in self.former:
                text = flag_and_value(name, value)
                problem = re.sub(rf"^{re.escape(text)}(?= )", f"{text} (Megatron-LM's default)", problem)
        for name, value in RECIPES.get(self.given.get("recipe") or "", {}).items():
            if name not in self.given:
                text = flag_and_value(name, value)
                problem = re.sub(rf"^{re.escape(text)}(?= )", f"{text} (of --recipe {self.given['recipe']})", problem)
        return problem


def _changes(names: Iterable[str], config: Config, usual: Config) -> Iterator[str]:
    """Fields with their values in two configurations, where they differ once both are resolved. A precision is not
    among them: it depends on the device, and the launch summary shows it."""
    for name in names:
        here, there = _resolved_value(name, config), _resolved_value(name, usual)
        if here != there and name != "precision":
            shown = number(there) if isinstance(there, int | float) else str(there)
            yield flag_and_value(name, here) + ("" if there is None else f" instead of {shown}")


def _resolved_value(name: str, config: Config) -> Any:
    if name == "eval_iters":
        return config.eval_iters
    return _DERIVED[name](config) if name in _DERIVED else config.value(name)
