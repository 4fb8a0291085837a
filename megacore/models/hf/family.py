"""What a model family of transformers is, as data: which fields of its config.json are which of ModelConfig's, and
which of its tensors are which of megacore's, in which order of rows. families.toml has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megacore.config import ExpertsConfig, ModelConfig, ResolvedModel
from megacore.config.bert import BertSection, ResolvedBert
from megacore.config.experts import differing_experts
from megacore.config.fields import field_infos
from megacore.config.model import differing
from megacore.config.spelling import with_names
from megacore.errors import CheckpointError
from megacore.models.hf.bert import BertPart
from megacore.models.hf.config_reader import ConfigReader
from megacore.models.hf.rope import settle_rotation
from megacore.models.hf.row_orders import Layout
from megacore.models.hf.rows import Part, Row


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One tensor of megacore's and the tensors of the family that it is made of."""

    ours: str  # global name; {i} is the number of the block
    # Names in the family, with the prefix; one with {e} stands for those of all experts, which are stacked, or, with a
    # layout, for those of all its sources.
    theirs: tuple[str, ...]
    layout: Layout | None  # the order of rows; None where there is one source and it is the same tensor
    transposed: bool  # the family stores the matrix as [in, out]
    instead: tuple[str, ...] | None  # the names in place of `theirs` of models that `when` accepts
    when: Callable[[ResolvedModel], bool] | None

    def names(self, config: ResolvedModel) -> tuple[str, ...]:
        """Of the family's tensors, for a model."""
        return self.instead if self.instead is not None and self.when is not None and self.when(config) else self.theirs


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says."""

    model: ResolvedModel
    unknown: tuple[str, ...]  # fields that megacore does not know


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers."""

    model_type: str  # as in config.json
    architecture: str  # transformers' class for pretraining, which the exported files are of
    prefix: str  # what the tensors of the bare model (without a head) begin with; files may leave it out
    same: tuple[Row, ...]  # fields that are copied
    only: Mapping[str, list[Any]]  # fields with the values that megacore computes, of which a missing one has the first
    if_given: Mapping[str, list[Any]]  # fields that may be missing, with their only values
    constants: Mapping[str, Any]  # ResolvedModel's fields that are the same for the whole family
    ignored: frozenset[str]  # fields of this family that do not change what the model computes
    computed: tuple[Part, ...]  # the remaining fields, in the order in which they are written
    rules: Mapping[str, TensorRule]  # the tensors, by megacore's names
    aliases: Mapping[str, str]  # other ends of names under which files store a tensor -> the end of the name in `rules`
    buffers: tuple[str, ...]  # ends of names of constants that older files hold, which are no weights
    unread: tuple[str, ...]  # beginnings of names of weights that transformers leaves out too, as is said
    ties: Mapping[str, str]  # a tensor of theirs that a tied model does not store -> the one that it is tied to
    # A tensor of theirs that an untied model has and does not compute with -> the one that it repeats.
    unused: Mapping[str, str]
    block: str  # what the names of a block's tensors begin with
    # The end of a tensor's name in a block of multi-token prediction -> the tensor that it repeats.
    shared_by_prediction: Mapping[str, str]
    bert_style: Literal["classic", "modern"] | None  # for a BERT, its style; None: it predicts the next token
    bert_section: BertPart | None
    without_sentences: str | None  # the class of a BERT without the sentence task
    other_names: tuple[str, ...]  # what files of other programs call the class

    def to_model(self, values: Mapping[str, Any], where: str) -> ResolvedModel:
        """The model that a config.json describes. Raises CheckpointError with everything in it that megacore cannot
        represent exactly, or does not know, by field."""
        return self.describe(values, where, refuse_unknown=True).model

    def describe(self, values: Mapping[str, Any], where: str, *, refuse_unknown: bool = False) -> Description:
        """The model that a config.json describes, and the fields of it that megacore does not know; with
        `refuse_unknown` these are refused, as nothing will show whether they change the model. Raises CheckpointError
        with everything that megacore cannot represent exactly, by field."""
        reader = ConfigReader(values, where)
        ours: dict[str, Any] = {}
        for row in self.same:
            ours |= row.read(reader, ours)
        for name, allowed in self.only.items():
            reader.only(name, allowed, allowed[0])
        for name, allowed in self.if_given.items():
            reader.only(name, allowed)
        ours |= self.constants
        for part in self.computed:
            ours |= part.read(reader, ours)
        settle_rotation(ours)
        if self.bert_section is not None:
            self.bert_section.read(reader)
        unknown = reader.finish(self.ignored)
        for name in unknown if refuse_unknown else ():
            reader.problem(
                name[:80],
                "is a field that megacore does not know, and may change the model: convert the directory with "
                f"tools/convert_checkpoint.py, which compares logits, or use --ignore-config-field {name[:80]}",
            )
        of_experts = {name: ours.pop(name) for name in field_infos(ExpertsConfig) if name in ours}
        config, experts = ModelConfig(**ours), ExpertsConfig(**of_experts)
        found = [*config.problems(), *experts.problems()]
        problems = reader.problems or list(
            dict.fromkeys(
                f"{where}: {self._in_its_words(one, values)}" for one in found
            )  # two fields may be one of theirs
        )
        positions = config.max_position_embeddings
        if not problems and positions is not None and config.vocab_size is not None:
            model = config.resolve(seq_length=positions, experts=experts.resolve(config.inner_size))
            return Description(model=model, unknown=unknown)
        raise CheckpointError(
            refusal(where, problems or [f"{where}: the size of the vocabulary or of the context is null"])
        )

    def _in_its_words(self, problem: str, values: Mapping[str, Any]) -> str:
        """What a flag's message says, of the field that the flag's value came from; its way out is one of flags."""
        copied = [one for one in (*self.same, *self.computed) if isinstance(one, Row) and not one.conversion]
        theirs = {row.ours: next((one for one in row.theirs if one in values), row.theirs[0]) for row in copied}

        return with_names(problem.rsplit(": ", 1)[0], lambda ours: theirs.get(ours, ours))

    def stored_model(self, model: ResolvedModel, names: Iterable[str]) -> ResolvedModel:
        """A model without blocks of multi-token prediction where no tensor is of one: transformers saves models without
        them, and config.json does not say so."""
        rule = self.rules.get("blocks.{i}.join.weight")
        if model.mtp_num_layers and not (rule and any(name.endswith(rule.theirs[0].split("{i}")[1]) for name in names)):
            return dataclasses.replace(model, mtp_num_layers=0)
        return model

    def prediction_copies(self, model: ResolvedModel) -> dict[str, str]:
        """Names in blocks of multi-token prediction under which tensors are stored again -> the ones they repeat."""
        ties, shared = {} if model.untie_embeddings_and_output_weights else self.ties, self.shared_by_prediction
        blocks = self.prediction_blocks(model)
        return {block + end: ties.get(name, name) for block in blocks for end, name in shared.items()}

    def prediction_blocks(self, model: ResolvedModel) -> tuple[str, ...]:
        """What the names of tensors begin with in each block of multi-token prediction."""
        return tuple(self.block.replace("{i}", str(model.num_layers + n)) for n in range(model.mtp_num_layers))

    def to_bert(self, values: Mapping[str, Any], where: str, *, paired: bool) -> ResolvedBert | None:
        """The BERT section of a config.json that `to_model` accepts; None where the model is no BERT. `paired`: whether
        the model has the sentence task, which its tensors tell."""
        if self.bert_style is None:
            return None
        fields = {} if self.bert_section is None else self.bert_section.read(ConfigReader(values, where))
        task: Literal["nsp", "none"] = "nsp" if paired else "none"
        return BertSection(bert_style=self.bert_style, sentence_task=task, **fields).resolve()

    @property
    def has_experts(self) -> bool:
        return any(row.ours == "num_experts" for row in self.same)

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.architecture, *filter(None, [self.without_sentences]), *self.other_names)

    def class_of(self, bert: ResolvedBert | None) -> str:
        if self.without_sentences is not None and bert is not None and bert.sentence_task == "none":
            return self.without_sentences
        return self.architecture

    def from_model(self, config: ResolvedModel, bert: ResolvedBert | None = None) -> dict[str, Any] | None:
        """The config.json of a model, or None where this family cannot represent it exactly. `bert`: its BERT section;
        None: it predicts the next token."""
        if self.bert_style != (None if bert is None else bert.bert_style):
            return None
        if self.has_experts != (config.experts is not None):
            return None
        values: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.class_of(bert)]}
        for row in self.same:
            values |= row.write(config)
        values |= {name: allowed[0] for name, allowed in self.only.items()}
        for part in self.computed:
            values |= part.write(config)
        if bert is not None and self.bert_section is not None:
            values |= self.bert_section.write(config, bert)
        try:
            back = self.to_model(values, "config.json")
        except CheckpointError:
            return None
        paired = bert is not None and bert.sentence_task != "none"
        same = same_model(back, config) and same_bert(self.to_bert(values, "config.json", paired=paired), bert, config)
        return values if same else None


def refusal(where: str, problems: list[str]) -> str:
    """One message for all problems of a file."""
    if len(problems) == 1:
        return problems[0]
    shown = "".join(f"\n  - {problem.removeprefix(f'{where}: ')}" for problem in problems[:20])
    more = f"\n  - and {len(problems) - 20} more" if len(problems) > 20 else ""
    return f"{where} describes a model that megacore cannot represent exactly:{shown}{more}"


def same_model(one: ResolvedModel, other: ResolvedModel) -> bool:
    """Whether two resolved configurations compute the same."""
    return not differing(one, other) and not differing_experts(one.experts, other.experts)


def same_bert(one: ResolvedBert | None, other: ResolvedBert | None, config: ResolvedModel) -> bool:
    """Whether two sections are of BERTs that compute the same."""
    if one is None or other is None:
        return one is other
    layers = config.num_layers
    return (
        one.bert_style == other.bert_style
        and one.num_token_types == other.num_token_types
        and (one.sentence_task == "none") == (other.sentence_task == "none")
        and min(one.global_attention_interval, layers) == min(other.global_attention_interval, layers)
        and one.local_rotary_base == other.local_rotary_base
    )
