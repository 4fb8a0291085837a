"""What a model family of transformers is, as data: which fields of its config.json are which of ModelConfig's, and
which of its tensors are which of megacore's, in which order of rows.

Megacore keeps query, key and value in one matrix whose rows go by head group, [group][q.., k, v][d]; the families keep
them apart, or stacked, or by head. Every such difference is an order of rows: a list of runs, each a range of rows of
one source, that follow each other in megacore's tensor. Where the family stores matrices as [in, out] (Conv1D), rows
are its columns. One description therefore serves both directions and any slice.

Shape legend: h hidden size, n heads, g head groups, d head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megacore.config import ExpertsConfig, ModelConfig, ResolvedModel
from megacore.config.bert import BertSection, ResolvedBert
from megacore.config.experts import differing_experts
from megacore.config.fields import field_infos
from megacore.config.model import differing
from megacore.errors import CheckpointError
from megacore.models.hf.config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows [start, stop) of source number `source`."""

    source: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """An order of rows. A model of a million heads has millions of runs: they are made one at a time, not before the
    shapes of the stored tensors give the number of heads.

    Attributes:
        sizes: rows of each source, as far as the tensor needs it.
        runs: the order.
    """

    sizes: Callable[[ResolvedModel], tuple[int, ...]]
    runs: Callable[[ResolvedModel], Iterator[Run]]


@dataclass(frozen=True)
class Same:
    """A field that both configurations have.

    Attributes:
        ours: ResolvedModel's name.
        theirs: the names in config.json; the first is written.
        default: what transformers takes where it is missing.
    """

    ours: str
    theirs: tuple[str, ...]
    default: Any


@dataclass(frozen=True)
class TensorRule:
    """One tensor of megacore's and the tensors of the family that it is made of.

    Attributes:
        ours: global name; {i} is the number of the block.
        theirs: names in the family, with the prefix; one with {e} stands for those of all experts, which are stacked,
            or, with a layout, for those of all its sources.
        layout: the order of rows; None where there is one source and it is the same tensor.
        transposed: the family stores the matrix as [in, out].
        instead: the names in place of `theirs` of models that `when` accepts.
        when: by default those whose output layer is not the embedding.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout | None = None
    transposed: bool = False
    instead: tuple[str, ...] | None = None
    when: Callable[[ResolvedModel], bool] = lambda config: config.untie_embeddings_and_output_weights

    def names(self, config: ResolvedModel) -> tuple[str, ...]:
        """Of the family's tensors, for a model."""
        return self.theirs if self.instead is None or not self.when(config) else self.instead


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a config.json says.

    Attributes:
        model: the model.
        unknown: fields that megacore does not know.
    """

    model: ResolvedModel
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers.

    Attributes:
        model_type: as in config.json.
        architecture: transformers' class for pretraining, which the exported files are of.
        prefix: what the tensors of the bare model (without a head) begin with; files may leave it out.
        same: fields that are copied.
        fixed: fields with the values that megacore computes, and the default where they are missing.
        optional: fields that may be missing, with their only values.
        constants: ResolvedModel's fields that are the same for the whole family.
        ignored: fields of this family that do not change what the model computes.
        read: ResolvedModel's remaining fields from the file; notes problems in the reader.
        write: the remaining fields of the file.
        rules: the tensors.
        aliases: other ends of names under which files store a tensor -> the end of the name in `rules`.
        buffers: ends of names of constants that older files hold, which are no weights.
        ties: a tensor of theirs that a tied model does not store -> the one that it is tied to.
        unused: a tensor of theirs that an untied model has and does not compute with -> the one that it repeats.
        bert_style: for a BERT, its style; None: it predicts the next token.
        read_bert: ResolvedBert's fields from the file; notes problems in the reader.
        write_bert: those fields for the file.
        without_sentences: the class of a BERT without the sentence task.
        other_names: what files of other programs call the class.
    """

    model_type: str
    architecture: str
    prefix: str
    same: tuple[Same, ...]
    fixed: Mapping[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    optional: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    read: Callable[[ConfigReader], dict[str, Any]] = lambda reader: {}
    write: Callable[[ResolvedModel], dict[str, Any]] = lambda config: {}
    rules: tuple[TensorRule, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    ties: Mapping[str, str]
    unused: Mapping[str, str] = field(default_factory=dict)
    bert_style: Literal["classic", "modern"] | None = None
    read_bert: Callable[[ConfigReader], dict[str, Any]] = lambda reader: {}
    write_bert: Callable[[ResolvedModel, ResolvedBert], dict[str, Any]] = lambda config, bert: {}
    without_sentences: str | None = None
    other_names: tuple[str, ...] = ()

    def to_model(self, values: Mapping[str, Any], where: str) -> ResolvedModel:
        """The model that a config.json describes.

        Args:
            values: the parsed file.
            where: its path, for messages.

        Raises:
            CheckpointError: everything in it that megacore cannot represent exactly, or does not know, by field.
        """
        return self.describe(values, where, refuse_unknown=True).model

    def describe(self, values: Mapping[str, Any], where: str, *, refuse_unknown: bool = False) -> Description:
        """The model that a config.json describes, and the fields of it that megacore does not know.

        Args:
            values: the parsed file.
            where: its path, for messages.
            refuse_unknown: an unknown field is refused, because nothing will show whether it changes the model.

        Raises:
            CheckpointError: everything in it that megacore cannot represent exactly, by field.
        """
        reader = ConfigReader(values, where)
        ours = {same.ours: reader.copied(same.ours, same.theirs, same.default) for same in self.same}
        for name, (allowed, default) in self.fixed.items():
            reader.only(name, allowed, default)
        for name, allowed in self.optional.items():
            reader.only(name, allowed)
        ours |= dict(self.constants) | self.read(reader)
        self.read_bert(reader)
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
        problems = reader.problems or [f"{where}: {self._in_its_words(one, values)}" for one in found]
        positions = config.max_position_embeddings
        if not problems and positions is not None and config.vocab_size is not None:
            model = config.resolve(seq_length=positions, experts=experts.resolve(config.inner_size))
            return Description(model=model, unknown=unknown)
        raise CheckpointError(
            refusal(where, problems or [f"{where}: the size of the vocabulary or of the context is null"])
        )

    def _in_its_words(self, problem: str, values: Mapping[str, Any]) -> str:
        """What a flag's message says, of the field that the flag's value came from; its way out is one of flags."""
        theirs = {same.ours: next((one for one in same.theirs if one in values), same.theirs[0]) for same in self.same}

        def name(match: re.Match[str]) -> str:
            ours = match[1].replace("-", "_")
            return theirs.get(ours, ours)

        return re.sub(r"--([a-z][a-z-]*)", name, problem.rsplit(": ", 1)[0])

    def to_bert(self, values: Mapping[str, Any], where: str, *, paired: bool) -> ResolvedBert | None:
        """The BERT section of a config.json that `to_model` accepts; None where the model is no BERT.

        Args:
            values: the parsed file.
            where: its path, for messages.
            paired: whether the model has the sentence task, which its tensors tell.
        """
        if self.bert_style is None:
            return None
        fields = self.read_bert(ConfigReader(values, where))
        task: Literal["nsp", "none"] = "nsp" if paired else "none"
        return BertSection(bert_style=self.bert_style, sentence_task=task, **fields).resolve()

    @property
    def has_experts(self) -> bool:
        """Whether the blocks have experts."""
        return any(same.ours == "num_experts" for same in self.same)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes of transformers that megacore reads."""
        return (self.architecture, *filter(None, [self.without_sentences]), *self.other_names)

    def class_of(self, bert: ResolvedBert | None) -> str:
        """The class that a model becomes."""
        if self.without_sentences is not None and bert is not None and bert.sentence_task == "none":
            return self.without_sentences
        return self.architecture

    def from_model(self, config: ResolvedModel, bert: ResolvedBert | None = None) -> dict[str, Any] | None:
        """The config.json of a model, or None where this family cannot represent it exactly.

        Args:
            config: the model.
            bert: its BERT section; None: it predicts the next token.
        """
        if self.bert_style != (None if bert is None else bert.bert_style):
            return None
        if self.has_experts != (config.experts is not None):
            return None
        values: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.class_of(bert)]}
        experts = field_infos(ExpertsConfig)
        for one in self.same:
            source = config.experts if one.ours in experts else config
            values[one.theirs[0]] = getattr(source, one.ours)
        values |= {name: allowed[0] for name, (allowed, _) in self.fixed.items()}
        values |= self.write(config) | ({} if bert is None else self.write_bert(config, bert))
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


# Transformers' names of activations -> megacore's; the first of each is written.
ACTIVATIONS = {
    "gelu": "gelu-exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}


def write_activation(config: ResolvedModel) -> str | None:
    """Transformers' name of a model's activation; None where it has another one than these."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation), None)


def read_tied(reader: ConfigReader, *, default: bool) -> dict[str, Any]:
    """Whether the output layer is the embedding, as the file has it."""
    tied = reader.get("tie_word_embeddings", default)
    if type(tied) is not bool:
        reader.problem("tie_word_embeddings", f"is {tied!r}, not true or false")
    return {"untie_embeddings_and_output_weights": not tied}


def write_tied(config: ResolvedModel) -> dict[str, Any]:
    """The same for the file."""
    return {"tie_word_embeddings": not config.untie_embeddings_and_output_weights}


# ---- orders of rows --------------------------------------------------------------------------------------------------


def _q_k_v_sizes(config: ResolvedModel) -> tuple[int, ...]:
    query, key = config.num_attention_heads * config.head_size, config.query_groups * config.head_size
    return query, key, key


def q_k_v_runs(config: ResolvedModel) -> Iterator[Run]:
    """By head group, [q.., k, v], each the next rows of its source."""
    d, groups = config.head_size, config.query_groups
    each = config.num_attention_heads // groups * d  # query rows of a group
    for g in range(groups):
        yield Run(source=0, start=g * each, stop=(g + 1) * each)
        yield Run(source=1, start=g * d, stop=(g + 1) * d)
        yield Run(source=2, start=g * d, stop=(g + 1) * d)


def _stacked_runs(config: ResolvedModel) -> Iterator[Run]:
    query, key, _ = _q_k_v_sizes(config)
    offsets = (0, query, query + key)
    for run in q_k_v_runs(config):
        yield Run(source=0, start=run.start + offsets[run.source], stop=run.stop + offsets[run.source])


def neighbouring_pairs(start: int, rotated: int, source: int = 0) -> Iterator[Run]:
    """Rows that are rotated in pairs of neighbours, as megacore has them: the first of all pairs, then the second.

    Args:
        start: the first of the rows.
        rotated: how many they are.
        source: number of the tensor that has them.
    """
    for offset in (0, 1):
        for pair in range(rotated // 2):
            row = start + 2 * pair + offset
            yield Run(source=source, start=row, stop=row + 1)


def _neighbouring_q_k_v_runs(config: ResolvedModel) -> Iterator[Run]:
    size, rotated = config.head_size, config.rotary_dimensions
    for run in q_k_v_runs(config):
        for head in range(run.start, run.stop, size) if run.source < 2 else ():
            yield from neighbouring_pairs(head, rotated, run.source)
            if rotated < size:
                yield Run(source=run.source, start=head + rotated, stop=head + size)
        if run.source == 2:
            yield run


# Three sources, q [n][d], k [g][d] and v [g][d].
q_k_v = Layout(_q_k_v_sizes, lambda config: q_k_v_runs(config))
# The same of a family that rotates pairs of neighbouring dimensions.
neighbouring_q_k_v = Layout(_q_k_v_sizes, _neighbouring_q_k_v_runs)
# One source, [q of all heads, k of all groups, v of all groups][d].
stacked_q_k_v = Layout(lambda config: (sum(_q_k_v_sizes(config)),), _stacked_runs)
