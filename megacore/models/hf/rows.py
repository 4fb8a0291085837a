"""Rows of families.toml: one line that a config.json is read by and written by. A row copies a field or converts its
value. What needs several fields is a part of its own (`Part`), in the module that is named for what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megacore.config import ExpertsConfig, ResolvedModel
from megacore.config.fields import field_infos
from megacore.models.hf.config_reader import ACTIVATIONS, ConfigReader

# Fields that say a difference from another field -> the property that says what the model has.
_AS_RESOLVED = {
    "add_qkv_bias": "qkv_bias",
    "add_attention_output_bias": "attention_output_bias",
    "add_mlp_bias": "mlp_bias",
    "attention_multiplier": "score_multiplier",
}
_OF_EXPERTS = field_infos(ExpertsConfig).keys()


class Part(Protocol):
    """Some fields of both configurations, which belong together."""

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ModelConfig and ExpertsConfig from a file, given those of the rows before; notes problems in the
        reader."""
        ...

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        """The fields of the file."""
        ...


@dataclass(frozen=True)
class Row:
    """One field of megacore's and one of theirs."""

    ours: str  # ModelConfig's or ExpertsConfig's name
    theirs: tuple[str, ...]  # the names in config.json; the first is written
    default: Any = None  # what transformers takes where it is missing
    conversion: str = ""  # of the value; "" copies it

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        name = self.theirs[0]
        value: Any
        match self.conversion:
            case "":
                value = reader.copied(self.ours, self.theirs, self.default)
            case "not":
                value = not reader.flag(name, self.default)
            case "number":  # of training alone: what is none counts as 0
                given = reader.get(name, self.default)
                value = float(given) if type(given) in (int, float) else 0.0
            case "reciprocal":
                value = 1 / reader.positive(name, self.default)
            case "inverse_square_root":
                value = reader.positive(name, self.default) ** -0.5
            case "activation" | "tanh_activation":
                value = reader.activation(name, self.default)
            case "window":
                value = read_window(reader, self.default, name)
            case _:
                raise AssertionError(f"families.toml: {self.conversion} is no conversion")
        return {self.ours: value}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        section = config.experts if self.ours in _OF_EXPERTS else config
        value = getattr(section, _AS_RESOLVED.get(self.ours, self.ours))
        match self.conversion:
            case "not":
                value = not value
            case "reciprocal":
                value = 1 / value
            case "inverse_square_root":
                exact = value**-2
                value = round(exact) if abs(exact - round(exact)) < 1e-9 * exact else exact
            case "activation" | "tanh_activation":
                usual = "gelu_pytorch_tanh" if self.conversion == "tanh_activation" else "gelu_new"
                names = [name for name, ours in ACTIVATIONS.items() if ours == value]
                value = usual if usual in names else next(iter(names), None)
        return {self.theirs[0]: value}


def read_window(reader: ConfigReader, default: int | None, name: str = "sliding_window") -> int | None:
    """The window of all layers, as the file has it."""
    if reader.get(name, default) == 0 and reader.get("use_sliding_window", True) is False:
        return None  # as transformers writes it of Qwen2-MoE
    return reader.count(name, default, "positions")


# ---- small parts -----------------------------------------------------------------------------------------------------


class Written:
    """Fields that reading does without -> the field of megacore's that they have, or None for null."""

    def __init__(self, **fields: str | None) -> None:
        self.fields = fields

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {theirs: None if ours is None else getattr(config, ours) for theirs, ours in self.fields.items()}


class Equal:
    """Fields that must be null, or the same as a field of megacore's."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        for theirs, name in self.fields.items():
            reader.only(theirs, (ours[name], None), None)
        return {}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {theirs: getattr(config, name) for theirs, name in self.fields.items()}


class ReadOnly:
    """A part whose fields the file need not say: they follow from others."""

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Which linear layers have biases: all, or those of some projections."""

    qkv: str = "attention_bias"  # the field of queries, keys and values
    output: str = "attention_bias"  # that of attention's output projection
    mlp: str = "mlp_bias"  # that of the feed-forward layer
    qkv_default: bool = False  # what transformers takes where the file lacks `qkv`

    def read(self, reader: ConfigReader, ours: Mapping[str, Any]) -> dict[str, Any]:
        qkv = reader.flag(self.qkv, self.qkv_default)
        output = qkv if self.output == self.qkv else reader.flag(self.output, False)
        mlp = reader.flag(self.mlp, False)
        if qkv and output and mlp:
            return {"disable_bias_linear": False}
        parts = {"add_qkv_bias": qkv, "add_attention_output_bias": output, "add_mlp_bias": mlp}
        return {"disable_bias_linear": True, **parts}

    def write(self, config: ResolvedModel) -> dict[str, Any]:
        return {self.qkv: config.qkv_bias, self.output: config.attention_output_bias, self.mlp: config.mlp_bias}
