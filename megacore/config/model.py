"""The model's section of the configuration: its shape, and what its layers are made of.

The defaults are GPT-2. Every other family is a handful of changes (docs/models.md has them as a table, presets.py as
data). A field is a flag, as in sections.py. What would be ignored is refused: a rotary base where positions are learned
is a slip, and training for weeks without it is not what was meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section, flag
from megacore.config.messages import divisors, nearest_multiples, one_of

_LLAMA3 = ("rope_low_freq_factor", "rope_high_freq_factor")
_SCALES = ("rope_scaling_factor", "rope_original_max_positions", *_LLAMA3)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The transformer's shape, layers, initialisation and dropout."""

    preset: Annotated[str | None, Flag(metavar="NAME")] = None
    """A named model: gpt2-small, gpt2-medium, gpt2-large, gpt2-xl, llama-3.2-1b, llama-3-8b, qwen3-0.6b, mistral-7b,
    pythia-160m, bloom-176b; gpt2-tiny for tests. It replaces the defaults of the shape, of --seq-length and, without
    a tokenizer, of --vocab-size; a configuration file and flags are stronger."""
    num_layers: Annotated[int, Range(1, 10_000)] = 12
    """Transformer blocks in the whole model. --pp need not divide it."""
    hidden_size: Annotated[int, Range(1, 1_000_000)] = 768
    """Width of the residual stream; a multiple of --num-attention-heads, unless --kv-channels is given."""
    num_attention_heads: Annotated[int, Range(1, 1_000_000)] = 12
    """Attention heads of each block; a multiple of --tp."""
    num_query_groups: Annotated[int | None, Range(1, 1_000_000)] = None
    """Key and value heads of each block, each shared by as many query heads (grouped-query attention); divides
    --num-attention-heads, and divides or is a multiple of --tp. None: --num-attention-heads."""
    kv_channels: Annotated[int | None, Range(1, 1_000_000)] = None
    """Size of an attention head. None: --hidden-size / --num-attention-heads."""
    ffn_hidden_size: Annotated[int | None, Range(1, 10_000_000)] = None
    """Inner width of the feed-forward layer; a multiple of --tp. None: 4 x --hidden-size."""
    max_position_embeddings: Annotated[int | None, Range(1, 100_000_000)] = None
    """Longest context in tokens, and rows of the position table where positions are learned; at least --seq-length.
    None: --seq-length."""
    vocab_size: Annotated[int | None, Range(1, 100_000_000)] = None
    """True size of the vocabulary, without padding; at least the tokenizer's. None: the tokenizer's."""
    make_vocab_size_divisible_by: Annotated[int, Range(1, 1_000_000)] = 128
    """The vocabulary is padded in memory to a multiple of this times --tp; neither the loss nor a checkpoint sees
    padding."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of the model's norms."""
    norm_epsilon: Annotated[float, Range(above=0), Flag(("--layernorm-epsilon",))] = 1e-5
    """Added to the variance in LayerNorm, and to the mean square in RMSNorm."""
    norm_bias: bool = True
    """Gives LayerNorm a bias."""
    qk_layernorm: bool = False
    """Normalises each head's query and key, with weights that all heads share."""
    embedding_layernorm: bool = False
    """A norm after the token embedding, as in BLOOM."""
    activation: Literal["gelu", "gelu-exact", "relu", "swiglu", "geglu", "geglu-exact"] = "gelu"
    """Between the feed-forward layer's products. gelu is its tanh form, as in GPT-2; swiglu and geglu gate with
    SiLU and GELU, and need a third matrix."""
    disable_bias_linear: bool = False
    """Linear layers without biases."""
    add_qkv_bias: bool = False
    """With --disable-bias-linear: the query, key and value projection keeps its bias, as in Qwen2."""
    parallel_residual: bool = False
    """Attention and feed-forward layer both read the block's input and are added together, as in GPT-NeoX."""
    position_embedding_type: Literal["learned", "rope", "alibi", "none"] = "learned"
    """How positions enter. learned: a table added to the embedding. rope: queries and keys are rotated. alibi: scores
    fall with distance. none: not at all."""
    rotary_base: Annotated[float, Range(above=1)] = 10_000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of a head's dimensions that is rotated."""
    rope_scaling: Literal["none", "linear", "dynamic", "llama3"] = "none"
    """How rotary frequencies are stretched over longer contexts. linear: all by --rope-scaling-factor. dynamic: by the
    length of the sequence beyond --rope-original-max-positions (NTK). llama3: the low ones alone."""
    rope_scaling_factor: Annotated[float, Range(1)] = 8.0
    """How many times longer the context becomes."""
    rope_original_max_positions: Annotated[int | None, Range(1, 100_000_000)] = None
    """Context in tokens before it was stretched; --rope-scaling dynamic and llama3 need it."""
    rope_low_freq_factor: Annotated[float, Range(above=0)] = 1.0
    """--rope-scaling llama3 stretches frequencies that turn fewer times than this over the original context."""
    rope_high_freq_factor: Annotated[float, Range(above=0)] = 4.0
    """--rope-scaling llama3 leaves frequencies that turn more times than this over the original context."""
    window_size: Annotated[int | None, Range(1, 100_000_000)] = None
    """A position sees its last so many positions alone, itself included. None: all before it."""
    init_method_std: Annotated[float, Range(above=0)] = 0.02
    """Standard deviation of the normal distribution that weights are drawn from; layers that write to the residual
    stream divide it by sqrt(2 x --num-layers)."""
    hidden_dropout: Annotated[float, Range(0, below=1)] = 0.1
    """Dropout probability after the embedding and after each layer that writes to the residual stream. 0: off."""
    attention_dropout: Annotated[float, Range(0, below=1)] = 0.1
    """Dropout probability of attention weights. 0: off."""
    untie_embeddings_and_output_weights: bool = False
    """Gives the output layer its own weights instead of the token embedding's."""

    @property
    def head_size(self) -> int:
        """Dimensions of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads of a block."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotary_dimensions(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.head_size * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate, a third matrix."""
        return self.activation in ("swiglu", "geglu", "geglu-exact")

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    def with_sizes(self, seq_length: int) -> ModelConfig:
        """With every size that follows from others."""
        return dataclasses.replace(
            self,
            num_query_groups=self.query_groups,
            kv_channels=self.head_size,
            ffn_hidden_size=self.inner_size,
            max_position_embeddings=self.max_position_embeddings or seq_length,
        )

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        yield from self._heads(wrong)
        yield from self._idle(wrong)
        yield from self._positions(wrong)
        if self.add_qkv_bias and not self.disable_bias_linear and not wrong & {"add_qkv_bias", "disable_bias_linear"}:
            yield (
                "--add-qkv-bias has no effect without --disable-bias-linear, as every linear layer has a bias then: "
                "leave it out, or give --disable-bias-linear"
            )

    def _heads(self, wrong: frozenset[str]) -> Iterator[str]:
        hidden, heads, groups = self.hidden_size, self.num_attention_heads, self.num_query_groups
        if (
            not wrong & {"hidden_size", "num_attention_heads", "kv_channels"}
            and not self.kv_channels
            and hidden % heads
        ):
            yield (
                f"--hidden-size {hidden} must be a multiple of --num-attention-heads {heads}: "
                f"use --hidden-size {one_of(nearest_multiples(hidden, heads))}, "
                f"or --num-attention-heads {one_of(divisors(hidden, near=heads, most=6))}"
            )
        if groups and not wrong & {"num_query_groups", "num_attention_heads"} and heads % groups:
            yield (
                f"--num-query-groups {groups} must divide --num-attention-heads {heads}: "
                f"use {one_of(divisors(heads, near=groups, most=6))}"
            )

    @property
    def idle_fields(self) -> dict[str, str]:
        """Fields that change nothing, each with the one that makes it so; asked of any values, possible or not."""
        found = {"norm_bias": "normalization"} if self.normalization == "RMSNorm" else {}
        if self.position_embedding_type != "rope":
            names = ("rotary_base", "rotary_percent", "rope_scaling", *_SCALES)
            return found | dict.fromkeys(names, "position_embedding_type")
        idle = {"none": _SCALES, "linear": _SCALES[1:], "dynamic": _LLAMA3}.get(self.rope_scaling, ())
        return found | dict.fromkeys(idle, "rope_scaling")

    def _idle(self, wrong: frozenset[str]) -> Iterator[str]:
        more = "llama3" if self.rope_scaling != "none" else "linear, dynamic or llama3"
        needed = {"normalization": "LayerNorm", "position_embedding_type": "rope", "rope_scaling": more}
        for name, cause in self.idle_fields.items():
            if cause not in wrong:
                beside, needs = f"{flag(cause)} {getattr(self, cause)}", f"{flag(cause)} {needed[cause]}"
                yield from self.without_effect((name,), wrong, beside, needs)

    def _positions(self, wrong: frozenset[str]) -> Iterator[str]:
        scaling = self.rope_scaling
        if wrong & {"position_embedding_type", "rope_scaling"} or self.position_embedding_type != "rope":
            return
        if scaling in ("dynamic", "llama3") and self.rope_original_max_positions is None:
            yield (
                f"--rope-scaling {scaling} needs --rope-original-max-positions: give the context, in tokens, that the "
                "model had before it was stretched"
            )
        if scaling == "llama3" and not wrong & {*_LLAMA3} and self.rope_low_freq_factor >= self.rope_high_freq_factor:
            yield (
                f"--rope-low-freq-factor {self.rope_low_freq_factor:g} must be below --rope-high-freq-factor "
                f"{self.rope_high_freq_factor:g}: use, for example, 1 and 4 (the defaults)"
            )
        if not wrong & {"hidden_size", "num_attention_heads", "kv_channels", "rotary_percent"}:
            yield from self._rotated()

    def _rotated(self) -> Iterator[str]:
        size, rotated = self.head_size, self.rotary_dimensions
        if rotated >= 2 and rotated % 2 == 0:
            return
        even = rotated - rotated % 2
        shares = [f"{count / size:g}" for count in (even, even + 2) if 2 <= count <= size]
        way_out = f"use --rotary-percent {one_of(shares)}" if shares else "use --kv-channels 2 or more"
        yield (
            f"--rotary-percent {self.rotary_percent:g} of a head of {size} is {rotated} dimensions, which are rotated "
            f"in pairs: {way_out}"
        )


# Fields that say how a model begins, is trained or held in memory, not what it computes.
_NOT_THE_MODEL = frozenset(
    ("preset", "init_method_std", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by")
)


def differing(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields in which two resolved configurations are different models."""
    names = [item.name for item in dataclasses.fields(ModelConfig) if item.name not in _NOT_THE_MODEL]
    if "learned" not in (one.position_embedding_type, other.position_embedding_type):
        names.remove("max_position_embeddings")  # a limit of use, not a size of a table
    return [name for name in names if getattr(one, name) != getattr(other, name)]
