"""What pretrain_bert.py's configuration has beyond every run's: the model's style, and what is predicted.

As in sections.py: a field's name is its flag, its annotation what is allowed, its docstring the help. The classic style
is BERT's (Devlin et al., arXiv 1810.04805), the modern one ModernBERT's (Warner et al., arXiv 2412.13663); fields whose
default depends on the style are filled by `filled`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from megacore.config import Config
from megacore.config.bert_presets import BERT_PRESETS, Shape
from megacore.config.fields import Flag, Range, Section

_MASK_PROB = {"classic": 0.15, "modern": 0.30}
_SENTENCE_TASK: dict[str, Literal["nsp", "none"]] = {"classic": "nsp", "modern": "none"}
# What the layers are made of, by style: defaults of [model] in the place of GPT-2's.
_LAYERS: dict[str, dict[str, Any]] = {
    "classic": {"activation": "gelu-exact", "norm_epsilon": 1e-12},
    "modern": {
        "activation": "geglu-exact",
        "norm_bias": False,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "rotary_base": 160_000.0,
        "window_size": 128,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class BertSection(Section):
    """BERT's style, and what it learns to predict."""

    bert_style: Literal["classic", "modern"] = "classic"
    """classic: BERT as it was, with learned positions, token types, norms after each sum, and samples of sentence
    pairs. modern: ModernBERT's choices, with rotary positions, GeGLU, local and global attention, and packed
    documents."""
    sentence_task: Literal["auto", "nsp", "sop", "none"] = "auto"
    """What is predicted of a pair of segments. nsp: whether the second follows the first, or is another document's.
    sop: whether the two are in order, or swapped. none: there is no pair, and nothing is predicted of one. auto: nsp,
    or none with --bert-style modern."""
    mask_prob: Annotated[float | None, Range(above=0, below=1)] = None
    """Share of the tokens that are predicted: 80% of them are masked, 10% replaced and 10% kept. None: 0.15, or 0.3
    with --bert-style modern."""
    short_seq_prob: Annotated[float, Range(0, 1), Flag()] = 0.1
    """Share of the samples that are cut to a random length. Packed samples are never cut."""
    whole_word_masking: bool = False
    """Masks all tokens of a word or none, as the tokenizer marks its words."""
    max_ngram: Annotated[int, Range(1, 64)] = 1
    """Most tokens in a row, or words with --whole-word-masking, that are chosen together; n of them with a weight of
    1/n. 1: each by itself."""
    global_attention_interval: Annotated[int, Range(1, 10_000), Flag(("--global-attn-every-n-layers",))] = 3
    """With --bert-style modern: one block in so many, the first of them, attends to the whole document, and the others
    to positions up to half of --window-size away."""
    local_rotary_base: Annotated[float, Range(above=1)] = 10_000.0
    """Base of the rotary frequencies in those other blocks; --rotary-base is that of the first."""

    def filled(self) -> Self:
        """This section with the style's defaults."""
        return dataclasses.replace(
            self,
            sentence_task=_SENTENCE_TASK[self.bert_style] if self.sentence_task == "auto" else self.sentence_task,
            mask_prob=_MASK_PROB[self.bert_style] if self.mask_prob is None else self.mask_prob,
        )

    @property
    def packed(self) -> bool:
        """Whether a sample is filled with documents one after the other."""
        return self.bert_style == "modern"

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if "bert_style" in wrong:
            return
        if not self.packed:
            names = ("global_attention_interval", "local_rotary_base")
            yield from self.without_effect(names, wrong, "--bert-style classic", "--bert-style modern")
            return
        if "sentence_task" not in wrong and self.sentence_task in ("nsp", "sop"):
            yield (
                f"--sentence-task {self.sentence_task} needs pairs of segments, which --bert-style modern does not "
                "have: leave it out, or use --bert-style classic"
            )
        yield from self.without_effect(("short_seq_prob",), wrong, "--bert-style modern", "--bert-style classic")


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """Everything that defines a run of pretrain_bert.py."""

    bert: BertSection = field(default_factory=BertSection)
    presets: ClassVar[Mapping[str, Shape]] = BERT_PRESETS
    foreign: ClassVar[Mapping[str, str]] = {
        "embedding_layernorm": "is BLOOM's, and BERT always has a norm after the embedding: leave it out",
        "parallel_residual": "is of GPT-NeoX's blocks, not of BERT's: leave it out",
        "eod_mask_loss": (
            "is for a model that predicts the next token, which BERT does not: leave it out "
            "(BERT never predicts a special token)"
        ),
        "init_from_hf": (
            "is for pretrain_gpt.py: convert the directory with tools/convert_checkpoint.py, and give --load"
        ),
    }

    meanings: ClassVar[Mapping[str, str]] = {
        "preset": (
            f"A named model: {', '.join(name for name in BERT_PRESETS if name != 'bert-tiny')}; bert-tiny for tests. "
            "It replaces the defaults of the shape, of --seq-length and, without a tokenizer, of --vocab-size; a "
            "configuration file and flags are stronger."
        ),
        "position_embedding_type": (
            "How positions enter. learned: a table added to the embedding, with --bert-style classic. rope: queries "
            "and keys are rotated, with --bert-style modern. The styles have no other."
        ),
        "rotary_base": (
            "With --bert-style modern: base of the rotary frequencies in the blocks that attend to the whole document; "
            "--local-rotary-base is that of the others."
        ),
        "window_size": (
            "With --bert-style modern: where a block does not attend to the whole document (see "
            "--global-attention-interval), a position sees those up to half as many away, on either side. None: every "
            "block attends to the whole document."
        ),
        "tokenizer": (
            "A tokenizer.json, a directory that holds one (also a transformers directory), or a SentencePiece .model, "
            "with [MASK], [CLS], [SEP] and [PAD] or their like; --data-path needs it."
        ),
    }

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The layers of the style that is given, or of the classic one."""
        return dict(_LAYERS.get(given.get("bert_style", "classic"), {}))

    @classmethod
    def all_defaults(cls) -> dict[str, dict[str, Any]]:
        return {f"--bert-style {style}": dict(layers) for style, layers in _LAYERS.items()}

    def wrong_fields(self, wrong: frozenset[str]) -> dict[str, str]:
        found = super().wrong_fields(wrong)
        if not wrong & {"data_path", "mock_data", "tokenizer"} and self.data.data_path and self.data.tokenizer is None:
            found["tokenizer"] = (
                "--data-path needs the tokenizer that made it, whose [MASK] and other special tokens pretrain_bert.py "
                "puts in: give --tokenizer PATH"
            )
        return found

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.bert.whole_word_masking and self.data.mock_data and not wrong & {"whole_word_masking", "mock_data"}:
            yield "--whole-word-masking has no effect with --mock-data, which has no words: leave it out"
        if not wrong & {"seq_length", "sentence_task", "bert_style"}:
            yield from self._room()
        if "bert_style" not in wrong:
            yield from self._layers(wrong)

    def _layers(self, wrong: frozenset[str]) -> Iterator[str]:
        """What the style's blocks do not have."""
        model, style = self.model, f"--bert-style {self.bert.bert_style}"
        positions = "rope" if self.bert.packed else "learned"
        if model.position_embedding_type != positions and "position_embedding_type" not in wrong:
            yield (
                f"--position-embedding-type {model.position_embedding_type} is not that of {style}: use {positions}, "
                "or leave it out"
            )
        if not self.bert.packed:
            yield from model.without_effect(("window_size",), wrong, style, "--bert-style modern")

    def _room(self) -> Iterator[str]:
        task, length = self.bert.filled().sentence_task, self.data.seq_length
        smallest = 3 if task == "none" else 5
        if length < smallest:
            layout = "[CLS] A [SEP]" if task == "none" else "[CLS] A [SEP] B [SEP]"
            yield (
                f"--seq-length {length} leaves no room for text in {layout} (--sentence-task {task}): "
                f"use {smallest} or more"
            )
