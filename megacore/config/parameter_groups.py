"""Parameters with a learning rate or a weight decay of their own, and those that do not learn: rules by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from megacore.config.numbers import parse_float
from megacore.config.optimizers import AdamWConfig, OptimizerSettings

_BLOCK = re.compile(r"blocks\.(\d+)\.")
FREEZE = "freeze"
DECOUPLED = ("embedding.tokens.weight", "head.weight")
"""Global names of the parameters that --decoupled-lr is about: the token embedding and the output layer."""


@dataclass(frozen=True, kw_only=True)
class ParameterScale:
    """How the update of a parameter differs from that of the others."""

    lr: float = 1.0  # factor of the learning rate
    weight_decay: float = 1.0  # factor of the weight decay of a matrix
    vector_decay: float = 0.0  # factor of the weight decay of a vector, such as a bias
    frozen: bool = False  # the parameter keeps its value, and its gradient counts as zero
    decoupled: bool = False  # `lr` is a factor of the rate of --decoupled-lr, and not of --lr


USUAL = ParameterScale()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value of --param-group says."""

    pattern: str  # of global names; * stands for any characters, ? for one, [ab] for one of these
    scale: ParameterScale  # of the parameters whose names match

    def matches(self, name: str) -> bool:
        """Whether it is about the parameter of this global name."""
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True, kw_only=True)
class ParameterGroups:
    """The scale of every parameter, by its global name."""

    rules: tuple[Rule, ...] = ()  # the first that matches a name counts
    layer_decay: float = 1.0  # factor of the learning rate from block to block, towards the input
    num_layers: int = 0
    decoupled: bool = False  # whether the token embedding and the output layer have a learning rate of their own
    # How many times as wide as the base of muP the model is: matrices of blocks learn at the learning rate divided by
    # a power of it. Their weight decay is multiplied by that, so that they decay as fast as at the base width.
    width_ratio: float = 1.0
    settings: OptimizerSettings = field(default_factory=AdamWConfig)  # of the optimizer, which knows the power

    @property
    def is_uniform(self) -> bool:
        return not self.rules and self.layer_decay == self.width_ratio == 1.0 and not self.decoupled

    def scale_of(self, name: str) -> ParameterScale:
        scale = next((rule.scale for rule in self.rules if rule.matches(name)), USUAL)
        decay = self.layer_decay ** self._depth(name)
        ratio = self.width_ratio ** self.settings.width_power(name) if is_hidden_matrix(name) else 1.0
        return replace(
            scale,
            lr=scale.lr * decay / ratio,
            weight_decay=scale.weight_decay * ratio,
            decoupled=self.decoupled and name in DECOUPLED,
        )

    def unmatched(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        return [rule.pattern for rule in self.rules if not any(map(rule.matches, names))]

    def _depth(self, name: str) -> int:
        """Blocks between a parameter and the head, that of the parameter included: 1 for the last block."""
        if block := _BLOCK.match(name):
            return max(self.num_layers - int(block[1]), 0)  # 0: of multi-token prediction
        return self.num_layers + 1 if name.startswith("embedding.") else 0


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter maps between widths that grow together: a matrix of a block, by its global name."""
    return name.startswith("blocks.") and name.endswith(".weight") and not name.endswith("norm.weight")


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of --param-group. Raises ValueError."""
    return tuple(map(_parse_rule, texts))


def _parse_rule(text: str) -> Rule:
    pattern, colon, settings = text.rpartition(":")
    if not colon or not pattern.strip() or not settings.strip():
        raise ValueError(_problem(text, "has no PATTERN before and no settings after a colon"))
    values: dict[str, float] = {}
    frozen = False
    for setting in settings.split(","):
        name, equals, number = (part.strip() for part in setting.partition("="))
        if name == FREEZE and not equals:
            frozen = True
            continue
        if name not in ("lr", "weight-decay", "vector-decay") or not equals:
            raise ValueError(_problem(text, f"has the setting {setting.strip()!r}"))
        try:
            values[name] = parse_float(number)
        except ValueError:
            raise ValueError(_problem(text, f"has {number!r}, which is no number")) from None
        if not 0 <= values[name] < math.inf:
            raise ValueError(_problem(text, f"has the factor {number}, which must be at least 0"))
    if frozen and values:
        raise ValueError(_problem(text, "freezes parameters and also has factors, which then have no effect"))
    lr, decay, of_vectors = (values.get(*each) for each in (("lr", 1.0), ("weight-decay", 1.0), ("vector-decay", 0.0)))
    scale = ParameterScale(lr=lr, weight_decay=decay, vector_decay=of_vectors, frozen=frozen)
    return Rule(pattern=pattern.strip(), scale=scale)


def _problem(text: str, what: str) -> str:
    return (
        f"--param-group {text} {what}: use PATTERN:lr=FACTOR, PATTERN:weight-decay=FACTOR, PATTERN:vector-decay=FACTOR"
        f", several with a comma between, or PATTERN:{FREEZE}, for example 'blocks.*.attention.*:lr=0.5,weight-decay=0'"
    )
