"""The configuration of pretrain_bert.py: one more section, and the constraints of BERT's two styles. The classic style
is BERT (Devlin et al., arXiv 1810.04805), the modern one ModernBERT (Warner et al., arXiv 2412.13663). Fields whose
default depends on the style are filled in by `BertSection.resolve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from megacore.config.data import FILL_IN_FIELDS
from megacore.config.experts import ExpertsConfig
from megacore.config.fields import Flag, Range, Section, field_infos
from megacore.config.presets import BERT_PRESETS, Shape
from megacore.config.rules import Needs, Rule, Settings, rows
from megacore.config.schema import Config, ResolvedConfig, with_registered

_WITHOUT_EXPERTS = "is for pretrain_gpt.py, because BERT's blocks have no experts: leave it out"
_MASK_PROB = {"classic": 0.15, "modern": 0.30}
_SENTENCE_TASK: dict[str, Literal["nsp", "none"]] = {"classic": "nsp", "modern": "none"}
# Defaults by style, instead of those of decoder models. The optimizer's are BERT's (arXiv 1810.04805, section A.2).
_OPTIMIZER = {"adam_beta2": 0.999, "weight_decay": 0.01, "min_lr": 0.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "classic": {
        **_OPTIMIZER,
        "activation": "gelu-exact",
        "norm_epsilon": 1e-12,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "modern": {
        **_OPTIMIZER,
        "activation": "geglu-exact",
        "norm_bias": False,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "rotary_base": 160_000.0,
        "window_size": 128,
    },
}


# Several values are not tried: another style has other defaults.
_CLASSIC, _MODERN = Needs(bert_style=("classic",)), Needs(bert_style=("modern",))


@dataclass(frozen=True, kw_only=True)
class BertSection(Section):
    """BERT's style, its prediction tasks and its masking."""

    rules: ClassVar[Sequence[Rule]] = (*rows("bert"),)

    bert_style: Literal["classic", "modern"] = "classic"
    """Architecture. classic: the original BERT, with sentence pairs. modern: ModernBERT, with rotary positions, GeGLU,
    local attention and packed documents."""
    sentence_task: Literal["auto", "nsp", "sop", "none"] = "auto"
    """Task on a pair of segments. nsp: does the second follow the first? sop: are the two in order? none: no pairs.
    auto: nsp with --bert-style classic, none with modern."""
    num_token_types: Annotated[int, Range(1, 2), _CLASSIC] = 2
    """Token types of --bert-style classic. 2: one per segment. 1: one for all tokens, as in RoBERTa; needs
    --sentence-task none."""
    mask_prob: Annotated[float | None, Range(above=0, below=1), Flag(example=0.15)] = None
    """Share of the tokens to predict: 80% of them are masked, 10% replaced by a random token, 10% kept. Default: 0.15
    with --bert-style classic, 0.3 with modern."""
    short_seq_prob: Annotated[float, Range(0, 1), Flag(), _CLASSIC] = 0.1
    """Share of the samples that are cut to a random length. Packed samples are not cut."""
    whole_word_masking: bool = False
    """Masks all tokens of a word or none."""
    max_ngram: Annotated[int, Range(1, 64)] = 1
    """Largest number of consecutive tokens (words with --whole-word-masking) to mask together; n of them have weight
    1/n."""
    global_attention_interval: Annotated[int, Range(1, 10_000), Flag(("--global-attn-every-n-layers",)), _MODERN] = 3
    """Every Nth block, from the first, attends to the whole document, with --bert-style modern. Others attend within
    half of --window-size."""
    local_rotary_base: Annotated[float, Range(above=1), _MODERN] = 10_000.0
    """Rotary base of the blocks with local attention."""

    def resolve(self) -> ResolvedBert:
        """This section with the defaults of its style."""
        return self.resolved_as(
            ResolvedBert,
            sentence_task=_SENTENCE_TASK[self.bert_style] if self.sentence_task == "auto" else self.sentence_task,
            mask_prob=_MASK_PROB[self.bert_style] if self.mask_prob is None else self.mask_prob,
        )

    @property
    def packed(self) -> bool:
        """Whether a sample is several documents one after the other."""
        return self.bert_style == "modern"

    @property
    def has_sentence_head(self) -> bool:
        """Whether the model has a pooler and a sentence head; the task of a resolved configuration decides."""
        return self.sentence_task != "none"


@dataclass(frozen=True, kw_only=True)
class ResolvedBert(BertSection):
    """The BERT section with the defaults of its style filled in."""

    sentence_task: Literal["nsp", "sop", "none"] = field()
    mask_prob: float = field()


def _shortest_sample(c: Settings) -> Iterator[str]:
    """That a sample has room for text between its special tokens."""
    task = _SENTENCE_TASK[c.bert_style] if c.sentence_task == "auto" else c.sentence_task
    smallest, layout = (3, "[CLS] A [SEP]") if task == "none" else (5, "[CLS] A [SEP] B [SEP]")
    if c.seq_length < smallest:
        yield (
            f"--seq-length {c.seq_length} leaves no room for text in {layout} (--sentence-task {task}): "
            f"use {smallest} or more"
        )


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """Everything that defines a run of pretrain_bert.py."""

    bert: BertSection = field(default_factory=BertSection)
    rules: ClassVar[Sequence[Rule]] = (
        *rows("pretrain_bert"),
        _shortest_sample,
    )
    presets: ClassVar[Mapping[str, Shape]] = BERT_PRESETS
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((*field_infos(ExpertsConfig), "ep", "etp"), _WITHOUT_EXPERTS),
        "embedding_layernorm": "is for BLOOM, and BERT always has a norm after the embedding: leave it out",
        **dict.fromkeys(
            (
                *("multi_latent_attention", "layer_pattern", "window_rotary_base", "norm_placement"),
                *("layernorm_1p", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
                *("logits_divisor", "softmax_type", "attn_logit_softcapping", "final_logit_softcapping"),
                "attention_output_gate",
                *("add_attention_output_bias", "add_mlp_bias", "add_output_layer_bias"),
                *("shared_parallel_norm", "norm_affine", "clip_qkv"),
                *("mup_base_width", "mup_base_head_size", "lora_rank", "mtp_num_layers", "mtp_loss_scaling_factor"),
            ),
            "is for pretrain_gpt.py: leave it out",
        ),
        "parallel_residual": "is for the blocks of GPT-NeoX, not of BERT: leave it out",
        "packing": "is for pretrain_gpt.py: leave it out, because --bert-style decides how documents become samples",
        "reset_position_ids": "is for pretrain_gpt.py: leave it out, because packed BERT has relative positions",
        "reset_attention_mask": "is for pretrain_gpt.py: leave it out, because BERT always attends within a document",
        **dict.fromkeys(
            FILL_IN_FIELDS, "is for pretrain_gpt.py: leave it out, because BERT predicts tokens where they are"
        ),
        "eod_mask_loss": (
            "is for a model that predicts the next token, which BERT does not: leave it out "
            "(BERT never predicts a special token)"
        ),
        "init_from_hf": (
            "is for pretrain_gpt.py: convert the directory with tools/convert_checkpoint.py, and use --load"
        ),
        "ignore_config_field": "is for --init-from-hf, and so for pretrain_gpt.py: leave it out",
    }

    help_texts: ClassVar[Mapping[str, str]] = {
        "preset": (
            "Uses the shape of a named model. Presets: "
            f"{', '.join(name for name in BERT_PRESETS if name != 'bert-tiny')}; bert-tiny for tests. It replaces the "
            "defaults of the model, of --seq-length and, without a tokenizer, of --vocab-size. Default: no preset."
        ),
        "min_lr": "Learning rate at the end of the decay. At most --lr. Default: 0.",
        "position_embedding_type": (
            "How the model encodes positions. learned: a table, with --bert-style classic. rope: rotated queries "
            "and keys, with --bert-style modern."
        ),
        "rotary_base": "Rotary base of the blocks that attend to the whole document, with --bert-style modern.",
        "window_size": (
            "Local attention of --bert-style modern: each token attends to tokens at most N / 2 away, in the "
            "blocks that --global-attention-interval does not select. Default: no window with --bert-style "
            "classic, 128 with modern."
        ),
        "tokenizer": (
            "The tokenizer: a tokenizer.json, a directory that contains one, or a SentencePiece .model file. It "
            "must have the tokens [MASK], [CLS], [SEP] and [PAD] or equivalents. Default: no tokenizer; "
            "--vocab-size must be given."
        ),
    }

    examples: ClassVar[Mapping[str, str]] = {
        "a tiny model on generated tokens, in one process": (
            "python pretrain_bert.py --preset bert-tiny --mock-data --train-iters 20"
        ),
        "BERT base on 8 processes: 2 x 2 x 2": (
            "torchrun --nproc-per-node 8 pretrain_bert.py --tp 2 --pp 2 --dp 2 \\\n"
            "    --preset bert-base --tokenizer data/tokenizer \\\n"
            "    --data-path data/corpus_text_sentence --global-batch-size 256 \\\n"
            "    --train-iters 1000 --save-interval 100 --output-dir runs/b"
        ),
        "the same run again, from its newest checkpoint": (
            "torchrun --nproc-per-node 8 pretrain_bert.py \\\n    --config runs/b/config.toml --load auto"
        ),
    }

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of the given style, or of the classic one."""
        return super().defaults(given) | _DEFAULTS.get(given.get("bert_style", "classic"), {})

    @classmethod
    def all_defaults(cls) -> dict[str, dict[str, Any]]:
        return {f"--bert-style {style}": dict(values) for style, values in _DEFAULTS.items()}

    def resolve(self, world_size: int, *, vocab_size: int | None = None) -> ResolvedBertConfig:
        return with_registered(ResolvedBertConfig)(**self.resolved_sections(world_size, vocab_size))

    def resolved_sections(self, world_size: int, vocab_size: int | None) -> dict[str, Any]:
        return super().resolved_sections(world_size, vocab_size) | {"bert": self.bert.resolve()}

    def wrong_fields(self, wrong: frozenset[str]) -> dict[str, str]:
        messages = super().wrong_fields(wrong)
        if not wrong & {"mock_data", "tokenizer"} and not self.data.mock_data and self.data.tokenizer is None:
            messages["tokenizer"] = (
                "--data-path needs the tokenizer that made it, because pretrain_bert.py inserts [MASK] and other "
                "special tokens: use --tokenizer PATH"
            )
        return messages


@dataclass(frozen=True, kw_only=True)
class ResolvedBertConfig(ResolvedConfig, BertConfig):
    """The configuration of a run of pretrain_bert.py whose number of processes and vocabulary are known."""

    is_causal: ClassVar[bool] = False
    padded_documents: ClassVar[bool] = True

    bert: ResolvedBert = field()

    @property
    def beside_hidden_states(self) -> tuple[str, ...]:
        return ("documents",)
