"""A change of a run: other values of some fields, and the flags that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config import ExpertsConfig, ModelConfig, ResolvedConfig
from megacore.config.fields import field_infos, flag_and_value
from megacore.config.schema import section_of


@dataclass(frozen=True)
class ChangedRun:
    """Another configuration, and what makes it of the given one.

    Attributes:
        config: with the change.
        values: by field, which the flags of the run do not have or must keep.
    """

    config: ResolvedConfig
    values: Mapping[str, Any] = field(default_factory=dict)

    def and_(self, **values: Any) -> ChangedRun:
        """With other values of fields as well; the same change, where the configuration has all of them."""
        sections = {name: getattr(self.config, section_of(type(self.config), name)) for name in values}
        new = {name: value for name, value in values.items() if value != getattr(sections[name], name)}
        return ChangedRun(self.config.with_values(new), {**self.values, **new}) if new else self

    def and_preset(self, name: str, *, seq_length: int | None = None) -> ChangedRun | None:
        """With another preset as well; None where that is of another kind of model.

        Args:
            name: of the preset.
            seq_length: of the run, which a preset with fewer positions cuts to as many. None: that of the preset.
        """
        config = self.config
        shape = dict(config.presets[name])
        bert = getattr(config, "bert", None)
        if bert is not None and shape.get("bert_style", "classic") != bert.bert_style:
            return None
        if "num_experts" in shape:  # whose ranks may have to be divided otherwise
            return None
        values = {**config.defaults(shape), **shape}
        if config.data.tokenizer is not None:
            values["vocab_size"] = config.model.vocab_size
        model = ModelConfig(preset=name, **{k: v for k, v in values.items() if k in field_infos(ModelConfig)})
        usual = values.get("seq_length", config.data.seq_length)
        length = usual if seq_length is None else min(seq_length, values.get("max_position_embeddings", seq_length))
        resolved = model.resolve(seq_length=length, vocab_size=config.model.vocab_size)
        dense: dict[str, Any] = {} if bert is not None else {"experts": ExpertsConfig()}  # those of a preset go with it
        data = dataclasses.replace(config.data, seq_length=length)
        named = {} if length == usual == config.data.seq_length else {"seq_length": length}
        changed = dataclasses.replace(config, model=resolved, data=data, **dense)
        return ChangedRun(changed, {**self.values, "preset": name, **named})

    def with_its_batch(self) -> ChangedRun:
        """With a flag for the global batch, where it would have another default: one microbatch for each replica."""
        if self.config.microbatches == 1 or not self.values.keys() & {"micro_batch_size", "dp"}:
            return self
        return ChangedRun(self.config, {**self.values, "global_batch_size": self.config.training.global_batch_size})

    @property
    def flags(self) -> str:
        """The change as the end of a command line, where it replaces the flags of the same names."""
        return " ".join(flag_and_value(name, value) for name, value in self.values.items())
