"""The model section, the shape of the transformer and what its layers are made of, and that of muP. The defaults are
GPT-2; other families are a few changes (presets.toml). A flag without effect is refused: a rotary base with learned
positions would be a mistake that costs weeks of training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.activations import ACTIVATIONS
from megacore.config.experts import ResolvedExperts
from megacore.config.fields import Choices, Flag, Range, Section
from megacore.config.layer_pattern import FULL, LINEAR, MAMBA, WINDOW, WITHOUT_POSITIONS, parse_pattern, repeated
from megacore.config.messages import counted, nearest_multiples, one_of
from megacore.config.problem import Problem
from megacore.config.rope_factors import parse_factors
from megacore.config.rules import AtLeast, AtMost, Divides, Needs, Rule, Settings, rows, use
from megacore.config.spelling import flag

_ROTARY = Needs(position_embedding_type="rope")


def _scaling(*kinds: str) -> Needs:
    return Needs(position_embedding_type="rope", rope_scaling=kinds)


_LLAMA3, _YARN, _LONGROPE = map(_scaling, ("llama3", "yarn", "longrope"))
_OF_LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


# Of softmax attention, without those that all models of a family of transformers have, also where no layer uses them.
_OF_SOFTMAX = ("clip_qkv", "softmax_type", "attn_logit_softcapping")


def _pattern(c: Settings) -> Iterator[str]:
    """What is wrong with the kinds of the blocks."""
    text = c.layer_pattern
    try:
        kinds = "" if text is None else parse_pattern(text)
    except ValueError as error:
        yield str(error)
        return
    given = f"--layer-pattern {text}"
    if WINDOW in kinds and c.window_size is None:
        yield Problem(f"{given} has blocks with a window", c.enabled("window_size"))
    if WITHOUT_POSITIONS in kinds and c.position_embedding_type != "rope":
        positions = c.given("position_embedding_type")
        said = f"{given} has blocks without rotary positions, and {positions} has none"
        yield Problem(said, use("layer_pattern", str(text).replace(WITHOUT_POSITIONS, "f")))
    for name in ("window_size", "window_rotary_base") if WINDOW not in kinds else ():
        # A window alone is that of every block; its base needs a pattern.
        if c.is_set(name) and (text is not None or name == "window_rotary_base"):
            cause = f"with {given}" if text is not None else "without --layer-pattern"
            yield f"{c.given(name)} has no effect {cause}: leave it out, or use a pattern with w"
    for name in _OF_LINEAR if text is not None and not c.has_linear else ():
        if c.is_set(name):
            yield f"{c.given(name)} has no effect with {given}: leave it out, or use a pattern with l or m"
    for name in _OF_SOFTMAX if kinds and set(kinds) <= {LINEAR, MAMBA} else ():
        if c.is_set(name):
            yield f"{c.given(name)} has no effect with {given}: leave it out, or use a pattern with f"


def _latent(c: Settings) -> Iterator[str]:
    """Sizes that --multi-latent-attention has of its own."""
    if not c.multi_latent_attention:
        return
    for name, value in (("kv_channels", c.head_size), ("num_query_groups", c.num_attention_heads)):
        if getattr(c, name) not in (None, value):
            yield f"{c.given(name)} has no effect with --multi-latent-attention: leave it out"
    if c.qk_rope_head_dim % 2:
        near = one_of(nearest_multiples(c.qk_rope_head_dim, 2))
        yield f"--multi-latent-attention qk-rope-head-dim={c.qk_rope_head_dim} is rotated in pairs: use {near}"


def _rotated(c: Settings) -> Iterator[str]:
    """That a part of a head is rotated in pairs of dimensions."""
    if c.position_embedding_type != "rope" or c.multi_latent_attention:
        return
    size, rotated = c.head_size, c.rotary_dimensions
    if (c.kv_channels is None and c.hidden_size % c.num_attention_heads) or (rotated >= 2 and rotated % 2 == 0):
        return
    even = rotated - rotated % 2
    shares = [f"{count / size:g}" for count in (even, even + 2) if 2 <= count <= size]
    way_out = f"use --rotary-percent {one_of(shares)}" if shares else "use --kv-channels 2 or more"
    yield (
        f"--rotary-percent {c.rotary_percent:g} of a head of {size} is {rotated} dimensions, which are rotated "
        f"in pairs: {way_out}"
    )


def _original_context(c: Settings) -> Iterator[str]:
    """What scaled rotary frequencies need to know of the context before scaling."""
    if c.position_embedding_type != "rope" or c.rope_scaling in ("none", "linear"):
        return
    if c.rope_original_max_positions is None:
        said = f"{c.given('rope_scaling')} needs original-max-positions, the context in tokens before scaling"
        positions = max(int((c.max_position_embeddings or 1024) / c.rope_scaling_factor), 2)
        yield Problem(said, use("rope_original_max_positions", positions))
    if c.rope_scaling != "longrope" or (c.kv_channels is None and c.hidden_size % c.num_attention_heads):
        return
    if c.rope_original_max_positions == 1:
        yield "--rope-scaling original-max-positions=1 is too short for --rope-scaling longrope: use 2 or more"
    pairs = c.rotary_dimensions // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        text, numbers = getattr(c, name), f"give {pairs} numbers, separated by commas"
        try:
            count = pairs if text is None else len(parse_factors(text))
        except ValueError as error:
            yield f"{flag(name)}: {error}: {numbers}"
            continue
        if text is None:
            yield f"--rope-scaling longrope needs {flag(name)}: {numbers}"
        elif count != pairs:
            yield f"{flag(name)} has {counted(count, 'number')} for {pairs} rotated pairs of dimensions: give {pairs}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The shape of the transformer, its layers, initialisation and dropout."""

    former_names = MappingProxyType({"attention_pattern": "layer_pattern"})
    rules: ClassVar[Sequence[Rule]] = (
        Divides(
            "num_attention_heads",
            "hidden_size",
            about_number=True,
            when=("kv_channels=None", "multi_latent_attention=False"),
        ),
        Divides("num_query_groups", "num_attention_heads", multiple=False),
        AtMost("rope_low_freq_factor", "rope_high_freq_factor", strict=True, when=("rope_scaling=llama3",)),
        AtLeast("rope_beta_fast", "rope_beta_slow", strict=True, when=("rope_scaling=yarn",)),
        _original_context,
        _rotated,
        _latent,
        *rows("model"),
        _pattern,
        Divides("linear_num_key_heads", "linear_num_value_heads", when=("has_linear=True",)),
    )

    preset: Annotated[str | None, Flag(metavar="NAME")] = None
    """Uses the shape of a named model. Presets: gpt2-small, gpt2-medium, gpt2-large, gpt2-xl, llama-3.2-1b,
    llama-3-8b, llama-3-8b-128k, llama-3-70b, llama-3.1-405b, qwen3-0.6b, mistral-7b, mixtral-8x7b, mixtral-8x22b,
    qwen3-30b-a3b, qwen3-235b-a22b, olmoe-1b-7b, gpt-oss-20b, gpt-oss-120b, deepseek-v2-lite, deepseek-v3,
    granite-3.1-2b, smollm3-3b, olmo-2-7b, phi-3-mini, phi-4, starcoder2-3b, gemma-2b, gemma-2-2b, gemma-2-9b,
    gemma-3-1b, opt-1.3b, opt-6.7b, falcon-7b, falcon-40b, gpt-j-6b, phi-2, gpt-neo-1.3b, olmo-3-7b, command-r,
    command-r7b, exaone-4-1.2b, glm-4-9b, minitron-4b, seed-oss-36b, ernie-4.5-0.3b, pythia-160m, bloom-176b;
    gpt2-tiny for tests. It replaces the defaults of the model, of --seq-length and, without a tokenizer, of
    --vocab-size; those of GPT-2 also set dropout, --optimizer beta2, --weight-decay and --min-lr. Default: no
    preset."""
    num_layers: Annotated[int, Range(1, 10_000)] = 12
    """Number of transformer blocks."""
    mtp_num_layers: Annotated[int, Range(0, 16), Flag(example=1)] = 0
    """Blocks of multi-token prediction, as in DeepSeek-V3: block k predicts the token k after the next."""
    mtp_loss_scaling_factor: Annotated[float, Range(0)] = 0.1
    """Weight of the mean loss of these blocks."""
    hidden_size: Annotated[int, Range(1, 1_000_000)] = 768
    """Width of the residual stream. A multiple of --num-attention-heads, unless --kv-channels is given."""
    num_attention_heads: Annotated[int, Range(1, 1_000_000)] = 12
    """Attention heads per block. A multiple of --tp."""
    num_query_groups: Annotated[int | None, Range(1, 1_000_000)] = None
    """Grouped-query attention: key and value heads per block. Divides --num-attention-heads; a multiple of --tp or a
    divisor of it. Below --tp, --tp / this must divide 2 x --kv-channels. Default: --num-attention-heads."""
    kv_channels: Annotated[int | None, Range(1, 1_000_000)] = None
    """Dimensions of an attention head. Default: --hidden-size / --num-attention-heads."""
    ffn_hidden_size: Annotated[int | None, Range(1, 10_000_000)] = None
    """Inner width of the feed-forward layer. A multiple of --tp. Default: 4 x --hidden-size."""
    max_position_embeddings: Annotated[int | None, Range(1, 100_000_000)] = None
    """Longest context in tokens: at least --seq-length. With learned positions, rows of their table. Default:
    --seq-length."""
    vocab_size: Annotated[int | None, Range(1, 100_000_000)] = None
    """Tokens in the vocabulary, without padding. At least the tokenizer's. Default: the tokenizer's."""
    make_vocab_size_divisible_by: Annotated[int, Range(1, 1_000_000)] = 128
    """Pads the vocabulary in memory to a multiple of this times --tp. Losses and checkpoints have no padding."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Type of the norms in every block."""
    norm_epsilon: Annotated[float, Range(above=0), Flag(("--layernorm-epsilon",))] = 1e-5
    """Term added to the variance in LayerNorm, and to the mean square in RMSNorm."""
    norm_bias: Annotated[bool, Needs(norm_affine=True, normalization="LayerNorm")] = True
    """Gives LayerNorm a bias."""
    norm_affine: bool = True
    """Gives norms weights, and LayerNorm a bias. Without them all norms only normalise, as in the first OLMo."""
    multi_latent_attention: bool = False
    """Multi-head latent attention, as in DeepSeek-V2 and V3. Needs --position-embedding-type rope and
    --disable-bias-linear."""
    q_lora_rank: Annotated[int | None, Range(1, 1_000_000)] = None
    """--multi-latent-attention: size of the latent vector of queries. Default: none; queries are projected from the
    hidden state."""
    kv_lora_rank: Annotated[int, Range(1, 1_000_000)] = 512
    """--multi-latent-attention: size of the latent vector of keys and values."""
    qk_nope_head_dim: Annotated[int, Range(1, 1_000_000), Flag(("--qk-head-dim",))] = 128
    """--multi-latent-attention: dimensions of a head's query and key without rotation."""
    qk_rope_head_dim: Annotated[int, Range(2, 1_000_000), Flag(("--qk-pos-emb-head-dim",))] = 64
    """--multi-latent-attention: rotated dimensions of a head's query and of the shared key. An even number."""
    v_head_dim: Annotated[int, Range(1, 1_000_000)] = 128
    """--multi-latent-attention: dimensions of a head's value."""
    qk_layernorm: bool = False
    """Normalises the query and the key of each head, or the latent vectors of --multi-latent-attention."""
    qk_layernorm_all_heads: bool = False
    """Lets --qk-layernorm normalise all heads together, with a weight per dimension, as in OLMo 2."""
    qk_layernorm_per_head: Annotated[bool, Needs("qk_layernorm", norm_affine=True)] = False
    """Gives each head its own weights in --qk-layernorm, and no biases, as in StableLM 2 12B."""
    clip_qkv: Annotated[float | None, Range(above=0)] = None
    """Clips queries, keys and values to -N to N before the rotation, as in some OLMo 7B. Default: no limit."""
    embedding_layernorm: bool = False
    """Adds a norm after the token embedding, as in BLOOM."""
    activation: Annotated[str, Choices(ACTIVATIONS)] = "gelu"
    """Activation of the feed-forward layer. gelu: the tanh approximation. gelu-exact: the erf form. relu2: squared
    ReLU. swiglu, geglu and geglu-exact: gated with SiLU, gelu or gelu-exact, by a third matrix. clamped-swiglu: that of
    GPT-OSS."""
    disable_bias_linear: bool = False
    """Removes the biases of linear layers."""
    add_qkv_bias: bool = False
    """Keeps the bias of the query, key and value projection with --disable-bias-linear."""
    add_attention_output_bias: bool = False
    """Keeps the bias of attention's output projection with --disable-bias-linear."""
    add_mlp_bias: bool = False
    """Keeps the biases of the feed-forward layer with --disable-bias-linear."""
    add_output_layer_bias: bool = False
    """Gives the output layer a bias, as in GPT-J."""
    parallel_residual: bool = False
    """Computes attention and feed-forward layer from the same input, as in GPT-NeoX."""
    shared_parallel_norm: bool = False
    """Lets both layers of --parallel-residual read one norm, as in GPT-J and Falcon 7B."""
    position_embedding_type: Literal["learned", "rope", "alibi", "none"] = "learned"
    """How the model encodes positions. learned: a table. rope: rotated queries and keys. alibi: attention scores
    decrease with distance. none: not at all."""
    position_offset: Annotated[int, Range(0, 1000), Needs(position_embedding_type="learned")] = 0
    """Unused rows at the start of the position table, as in OPT. --max-position-embeddings does not count them."""
    rotary_base: Annotated[float, Range(above=1), _ROTARY] = 10_000.0
    """Base of the rotary frequencies."""
    rotary_percent: Annotated[float, Range(above=0, high=1), _ROTARY] = 1.0
    """Share of a head's dimensions that is rotated."""
    rope_scaling: Annotated[Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"], _ROTARY] = "none"
    """Scaling of rotary frequencies for contexts longer than the model was trained on. linear: all frequencies.
    dynamic: by the sequence's length (NTK). llama3: low frequencies. yarn: low frequencies, with scaled attention.
    longrope: each by its own factor, with scaled attention."""
    rope_scaling_factor: Annotated[
        float,
        Range(1),
        _scaling("linear", "dynamic", "llama3", "yarn", "longrope"),
    ] = 8.0
    """Scaled context / original context."""
    rope_original_max_positions: Annotated[
        int | None,
        Range(1, 100_000_000),
        _scaling("dynamic", "llama3", "yarn", "longrope"),
    ] = None
    """Context in tokens before scaling. Default: none; dynamic, llama3, yarn and longrope require it."""
    rope_low_freq_factor: Annotated[float, Range(above=0), _LLAMA3] = 1.0
    """llama3 fully scales frequencies with fewer turns over the original context."""
    rope_high_freq_factor: Annotated[float, Range(above=0), _LLAMA3] = 4.0
    """llama3 does not scale frequencies with more turns over the original context."""
    rope_beta_fast: Annotated[float, Range(above=0), Flag(("--beta-fast",)), _YARN] = 32.0
    """yarn does not scale frequencies with more turns over the original context."""
    rope_beta_slow: Annotated[float, Range(above=0), Flag(("--beta-slow",)), _YARN] = 1.0
    """yarn fully scales frequencies with fewer turns over the original context."""
    rope_mscale: Annotated[float | None, Range(above=0), Flag(("--mscale",)), _YARN] = None
    """yarn multiplies rotated queries and keys by m(this) / m(mscale-all-dim), where m(x) = 0.1 x log(factor) + 1.
    Default: none; without both, that is m(1)."""
    rope_mscale_all_dim: Annotated[float | None, Range(above=0), Flag(("--mscale-all-dim",)), _YARN] = None
    """The divisor in mscale. --multi-latent-attention also multiplies attention scores by m(this)^2. Default: none."""
    rope_attention_factor: Annotated[float | None, Range(above=0), _scaling("yarn", "longrope")] = None
    """yarn and longrope multiply rotated queries and keys by this. Default: that of mscale for yarn; sqrt(1 +
    log(factor) / log(original-max-positions)) for longrope."""
    rope_truncate: Annotated[bool, _YARN] = True
    """yarn rounds the bounds of beta-fast and beta-slow to whole pairs of dimensions."""
    rope_short_factors: Annotated[str | None, Flag(metavar="F,F,..."), _LONGROPE] = None
    """longrope's divisors of the frequencies in sequences of at most original-max-positions tokens: one per rotated
    pair of dimensions. Default: none; longrope requires it."""
    rope_long_factors: Annotated[str | None, Flag(metavar="F,F,..."), _LONGROPE] = None
    """longrope's divisors in longer sequences. Default: none; longrope requires it."""
    window_size: Annotated[int | None, Range(1, 100_000_000), Flag(example=512)] = None
    """Sliding window: each token attends only to the last N tokens, itself included. Default: no window."""
    layer_pattern: Annotated[str | None, Flag(("--attention-pattern",), metavar="5*w,f", example="3*l,f")] = None
    """Attention of each block: w within --window-size, f to all earlier tokens, n as f without rotary positions, l
    linear (Gated DeltaNet), m Mamba-2. The pattern repeats: 5*w,f is five w, one f. Default: all blocks are alike."""
    linear_num_key_heads: Annotated[int, Range(1, 1_000_000)] = 16
    """l and m of --layer-pattern: query and key heads (groups). A multiple of --tp."""
    linear_num_value_heads: Annotated[int, Range(1, 1_000_000)] = 32
    """l and m of --layer-pattern: value heads. A multiple of the key heads."""
    linear_key_head_dim: Annotated[int, Range(1, 1_000_000)] = 128
    """l and m of --layer-pattern: dimensions of a head's query and key (state)."""
    linear_value_head_dim: Annotated[int, Range(1, 1_000_000)] = 128
    """l and m of --layer-pattern: dimensions of a head's value."""
    linear_conv_kernel_dim: Annotated[int, Range(1, 1000)] = 4
    """l and m of --layer-pattern: positions that the convolution of queries, keys and values reads."""
    window_rotary_base: Annotated[float | None, Range(above=1), _ROTARY] = None
    """Rotary base, without scaling, in the w blocks of --layer-pattern, as in Gemma 3. Default: --rotary-base and
    its scaling."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Where each block normalises. before: the inputs of attention and feed-forward layer. after: their outputs, as in
    OLMo 2. both: as in Gemma 2 and 3."""
    layernorm_1p: Annotated[bool, Needs(norm_affine=True)] = False
    """Norms multiply by 1 + weight, and weights begin at 0, as in Gemma."""
    embedding_multiplier: Annotated[float, Range(above=0)] = 1.0
    """Multiplies the token embeddings, as in Gemma and Granite."""
    residual_multiplier: Annotated[float, Range(above=0)] = 1.0
    """Multiplies the outputs of attention and feed-forward layer."""
    attention_multiplier: Annotated[float | None, Range(above=0)] = None
    """Multiplies the attention scores. Default: 1 / sqrt(--kv-channels)."""
    logits_divisor: Annotated[float, Range(above=0)] = 1.0
    """Divides the logits, as in Granite."""
    attention_output_gate: bool = False
    """Multiplies what each head finds by the sigmoid of a projection of the token, as in Qwen3-Next."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Joins the sum of attention's softmax. vanilla: nothing. off-by-one: 1. learnable: exp of a number per head
    (attention sinks)."""
    attn_logit_softcapping: Annotated[float | None, Range(above=0)] = None
    """Soft cap c of attention scores, as in Gemma 2: c x tanh(score / c). Default: no cap."""
    final_logit_softcapping: Annotated[float | None, Range(above=0)] = None
    """Soft cap c of logits, as in Gemma 2: c x tanh(logit / c). Default: no cap."""
    init_method_std: Annotated[float, Range(above=0)] = 0.02
    """Standard deviation of initial weights. Layers that write to the residual stream divide it by sqrt(2 x
    --num-layers)."""
    hidden_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout after the embedding and after each layer that writes to the residual stream."""
    attention_dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout of the attention weights."""
    untie_embeddings_and_output_weights: bool = False
    """Gives the output layer its own weights, not those of the token embedding."""

    @property
    def head_size(self) -> int:
        """Dimensions of an attention head's query and key."""
        if self.multi_latent_attention:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Dimensions of an attention head's value."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def query_groups(self) -> int:
        """Key and value heads of a block."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def position_rows(self) -> int:
        """Rows of the position table of a resolved model."""
        assert self.max_position_embeddings is not None
        return self.max_position_embeddings + self.position_offset

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def rotary_dimensions(self) -> int:
        """Dimensions of a head that are rotated."""
        if self.multi_latent_attention:
            return self.qk_rope_head_dim
        return int(self.head_size * self.rotary_percent)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate, a third matrix."""
        return self.activation in ACTIVATIONS and ACTIVATIONS[self.activation].gated

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def attention_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.add_attention_output_bias or not self.disable_bias_linear

    @property
    def mlp_bias(self) -> bool:
        """Whether the projections of the feed-forward layer have biases."""
        return self.add_mlp_bias or not self.disable_bias_linear

    @property
    def score_multiplier(self) -> float:
        """What attention scores are multiplied by, but for factors of the rotation's scaling."""
        return 1 / math.sqrt(self.head_size) if self.attention_multiplier is None else self.attention_multiplier

    @property
    def has_linear(self) -> bool:
        """Whether blocks have linear attention, Gated DeltaNet or Mamba-2."""
        return not {LINEAR, MAMBA}.isdisjoint(self.layer_pattern or "")

    @property
    def is_linear(self) -> bool:
        """Whether all have, as the configuration of such a block says (models/flops.py)."""
        return self.layer_pattern in (LINEAR, MAMBA)

    @property
    def is_mamba(self) -> bool:
        """As `is_linear`, of Mamba-2."""
        return self.layer_pattern == MAMBA

    @property
    def linear_rates(self) -> int:
        """Numbers that linear attention projects for its heads: a step each, and a rate but for Mamba-2."""
        return self.linear_num_value_heads * (1 if self.is_mamba else 2)

    @property
    def linear_widths(self) -> tuple[int, int]:
        """Features of all keys, and of all values, of linear attention."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return keys, self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def attention_kinds(self) -> str:
        """The letter of --layer-pattern for each block."""
        if self.layer_pattern is None:
            return (FULL if self.window_size is None else WINDOW) * self.num_layers
        return repeated(parse_pattern(self.layer_pattern), self.num_layers)

    @property
    def block_norms(self) -> int:
        """Norms of a block's inputs and outputs."""
        return 4 if self.norm_placement == "both" else 1 if self.shared_parallel_norm else 2

    def resolve(
        self, *, seq_length: int, vocab_size: int | None = None, experts: ResolvedExperts | None = None
    ) -> ResolvedModel:
        """This model with every size filled in; `seq_length` and `vocab_size` count where the fields are not given.
        Raises ValueError where neither has the size of the vocabulary."""
        vocab_size = vocab_size if self.vocab_size is None else self.vocab_size
        if vocab_size is None:
            raise ValueError("a model without a vocabulary size cannot be resolved")
        return self.resolved_as(
            ResolvedModel,
            num_query_groups=self.query_groups,
            kv_channels=self.head_size,
            ffn_hidden_size=self.inner_size,
            max_position_embeddings=self.max_position_embeddings or seq_length,
            vocab_size=vocab_size,
            experts=experts,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedModel(ModelConfig):
    """A model whose sizes are all known: what `ModelConfig.resolve` returns."""

    num_query_groups: int = field()
    kv_channels: int = field()
    ffn_hidden_size: int = field()
    max_position_embeddings: int = field()
    vocab_size: int = field()
    # Of its blocks, from their section; None: every block has a feed-forward layer.
    experts: ResolvedExperts | None = None

    @property
    def mixtures(self) -> list[int]:
        """Numbers of the blocks with experts; those of multi-token prediction come last, and are like the last one."""
        every, last = range(self.num_layers + self.mtp_num_layers), self.num_layers - 1
        return [block for block in every if self.experts is not None and self.experts.holds(min(block, last))]


# Fields that say how a model is initialised, trained or held in memory, not what it computes.
_NOT_ARCHITECTURE = frozenset(
    (
        *("preset", "init_method_std", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by"),
        "mtp_loss_scaling_factor",
    )
)


def differing(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields in which two models with all sizes filled in compute different functions."""
    names = [item.name for item in dataclasses.fields(ModelConfig) if item.name not in _NOT_ARCHITECTURE]
    if one.score_multiplier == other.score_multiplier:
        names.remove("attention_multiplier")
    names.remove("layer_pattern")
    if one.attention_kinds != other.attention_kinds:
        names.insert(0, "layer_pattern")
    else:  # the same kinds may be written in several ways
        names = [name for name in names if name != "window_size" or WINDOW in one.attention_kinds]
    if "learned" not in (one.position_embedding_type, other.position_embedding_type):
        names.remove("max_position_embeddings")  # a limit of use, not the size of a table
    experts = getattr(one, "experts", None), getattr(other, "experts", None)
    if all(section is not None and all(map(section.holds, range(one.num_layers))) for section in experts):
        names.remove("ffn_hidden_size")  # of blocks without experts, of which there are none
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def padded_rows(vocab_size: int, parts: int, multiple: int) -> int:
    """Rows of a rank's local vocabulary table: enough for its share, rounded up to `multiple`."""
    share = -(-vocab_size // parts)
    return -(-share // multiple) * multiple


# ---- muP -------------------------------------------------------------------------------------------------------------

# The maximal update parametrization (Yang et al. 2022, arXiv 2203.03466, table 8). Hyperparameters that were tuned at
# one width apply at any other: with the width, the initial values and learning rates of hidden matrices shrink, and so
# do logits and attention scores. At the base width the model is the usual one.


@dataclass(frozen=True, kw_only=True)
class MupConfig(Section):
    """muP: hyperparameters that fit models of any width."""

    mup_base_width: Annotated[int | None, Range(1), Flag(example=256)] = None
    """Applies muP (docs/reference/optimizers.md): --lr, --init-method-std and --weight-decay are those of a model with
    this --hidden-size. Default: no muP."""
    mup_base_head_size: Annotated[int | None, Range(1)] = None
    """Head size of the model of --mup-base-width, if it differs. Default: that of this model."""

    def ratio(self, hidden_size: int) -> float:
        """How many times as wide as the base a model is; 1 without muP."""
        return 1.0 if self.mup_base_width is None else hidden_size / self.mup_base_width

    def multipliers(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of a model that follow its width."""
        if self.mup_base_width is None:
            return {}
        base, size = self.mup_base_head_size, model.head_size
        scores = {} if base in (None, size) else {"attention_multiplier": math.sqrt(base or size) / size}
        return {"logits_divisor": self.ratio(model.hidden_size), **scores}
