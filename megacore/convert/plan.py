"""Which tensors of a family make which of megacore's: the family's rules, spelled out for one model. The names and
shapes of megacore's tensors come from the model itself, built without memory: a rule that is missing, or that gives
another shape, cannot go unnoticed. Shape legend: r rows and c columns of megacore's tensor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.tensor_file import Slices, read_rows, read_slice
from megacore.checkpoint.tensor_header import StoredTensor
from megacore.config import Config, ExpertsConfig, ResolvedModel, TrainingConfig
from megacore.config.bert import BertConfig, ResolvedBert, ResolvedBertConfig
from megacore.errors import CheckpointError
from megacore.layers.context import BuildContext
from megacore.models.bert import bert_layers
from megacore.models.gpt import gpt_layers
from megacore.models.hf.family import Family, TensorRule
from megacore.models.hf.row_orders import Layout, Run
from megacore.models.spec import DescribesLayers, LayerSpec
from megacore.parallel.random import RandomStreams
from megacore.parallel.sharding import ShardedParameter, ShardSpec
from megacore.pipeline.stage import Stage

_BLOCK = re.compile(r"^blocks\.(\d+)\.")
_META = torch.device("meta")
_SPARE = 64  # tensors
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One tensor of megacore's."""

    ours: str  # its global name
    shape: tuple[int, ...]  # its global shape, [r] or [r, c]
    theirs: tuple[str, ...]  # the tensors of the family that it is made of
    sizes: tuple[int, ...]  # rows of each of theirs, as far as this tensor needs it
    runs: Callable[[], Iterator[Run]]  # the order of its rows
    transposed: bool  # theirs are stored as [c, r]
    is_copy: bool  # theirs is one tensor, and the same
    # Ours is no weight, such as the biases by which experts are balanced, and stays in its dtype.
    is_buffer: bool = False

    def shape_of(self, source: int) -> tuple[int, ...]:
        """The shape of one of theirs, as far as this tensor needs it."""
        rows = self.sizes[source]
        return (*self.shape[1:], rows) if self.transposed else (rows, *self.shape[1:])

    def assemble(self, read: Callable[[int], Tensor]) -> Tensor:
        """Megacore's tensor; `read` gives theirs by number, one at a time."""
        if self.is_copy:
            return read(0)
        result: Tensor | None = None
        for source in range(len(self.theirs)):
            tensor = read(source)
            result = torch.empty(self.shape, dtype=tensor.dtype) if result is None else result
            rows = tensor.t() if self.transposed else tensor
            for first_row, run in self._rows(source):
                result[first_row : first_row + run.rows] = rows[run.start : run.stop]
        assert result is not None
        return result

    def take_apart(self, whole: Tensor, source: int, theirs: Tensor) -> None:
        """Write what megacore's tensor has of one of theirs into it."""
        rows = theirs.t() if self.transposed else theirs
        for first_row, run in self._rows(source):
            rows[run.start : run.stop] = whole[first_row : first_row + run.rows]

    def slice(self, spec: ShardSpec, stored: Mapping[str, StoredTensor]) -> Tensor:
        """The slice of megacore's tensor that a rank holds, reading (nearly) nothing else. `stored`: where theirs lie,
        by name. Returns fp32."""
        (first, last), *rest = spec.slices
        result = torch.empty([stop - start for start, stop in spec.slices], dtype=torch.float32)
        for source, name in enumerate(self.theirs):
            for first_row, run in self._rows(source):
                start, stop = max(first_row, first), min(first_row + run.rows, last)
                if start < stop:
                    rows = (run.start + start - first_row, run.start + stop - first_row)
                    result[start - first : stop - first] = _block(stored[name], rows, rest, self.transposed)
        return result

    def _rows(self, source: int) -> Iterator[tuple[int, Run]]:
        """The runs of one source, each with the row of megacore's tensor where it begins."""
        first_row = 0
        for run in self.runs():
            if run.source == source:
                yield first_row, run
            first_row += run.rows


@dataclass(frozen=True, kw_only=True)
class StackedStep(Step):
    """One tensor of megacore's, [E, r, c], that stacks those of the experts."""

    def shape_of(self, source: int) -> tuple[int, ...]:
        return self.shape[1:]

    def assemble(self, read: Callable[[int], Tensor]) -> Tensor:
        result: Tensor | None = None
        for source in range(len(self.theirs)):
            tensor = read(source)
            result = torch.empty(self.shape, dtype=tensor.dtype) if result is None else result
            result[source] = tensor
        assert result is not None
        return result

    def take_apart(self, whole: Tensor, source: int, theirs: Tensor) -> None:
        theirs.copy_(whole[source])

    def slice(self, spec: ShardSpec, stored: Mapping[str, StoredTensor]) -> Tensor:
        (first, last), *inner = spec.slices
        result = torch.empty([stop - start for start, stop in spec.slices], dtype=torch.float32)
        for number, name in enumerate(self.theirs[first:last]):
            result[number] = read_slice(stored[name], tuple(inner))
        return result


@dataclass(frozen=True, kw_only=True)
class ExpertsStep(Step):
    """One tensor of megacore's, [E, r, c] or [E, r], that theirs has for all experts too, as [E, c, r] where it is
    transposed."""

    of_pair: int | None  # theirs has 2 r: each first or second of them is this tensor's; None: all are

    def shape_of(self, source: int) -> tuple[int, ...]:
        experts, rows, *columns = self.shape
        return experts, *columns, rows if self.of_pair is None else 2 * rows

    def _ours(self, theirs: Tensor) -> Tensor:
        part = theirs if self.of_pair is None else theirs[..., self.of_pair :: 2]
        return part.transpose(1, 2) if self.transposed else part

    def assemble(self, read: Callable[[int], Tensor]) -> Tensor:
        return self._ours(read(0)).contiguous()

    def take_apart(self, whole: Tensor, source: int, theirs: Tensor) -> None:
        self._ours(theirs).copy_(whole)

    def slice(self, spec: ShardSpec, stored: Mapping[str, StoredTensor]) -> Tensor:
        (first, last), *inner = spec.slices
        result = torch.empty([stop - start for start, stop in spec.slices], dtype=torch.float32)
        for expert in range(first, last):  # one at a time is there whole
            ours = self._ours(read_rows(stored[self.theirs[0]], expert, expert + 1))[0]
            result[expert - first] = ours[tuple(slice(*one) for one in inner)]
        return result


def _block(tensor: StoredTensor, rows: tuple[int, int], rest: Slices, transposed: bool) -> Tensor:
    """Rows of a tensor, and slices of its other dimensions, as megacore counts them."""
    return read_slice(tensor, [*rest, rows]).t() if transposed else read_slice(tensor, [rows, *rest])


def make_plan(family: Family, config: ResolvedModel, bert: ResolvedBert | None = None) -> list[Step]:
    """Every tensor of a model, in the order in which the model uses them. Raises CheckpointError where the family has
    no rule for a tensor of the model."""
    steps, buffers = [], buffer_shapes(config, bert)
    for name, shape in (model_shapes(config, bert) | buffers).items():
        match = _BLOCK.match(name)
        rule = family.rules.get(_BLOCK.sub("blocks.{i}.", name))
        if rule is None:
            raise CheckpointError(f"a {family.model_type} model has no tensor for {name}")
        step = _step(rule, name, shape, config, number=match[1] if match else "")
        steps.append(dataclasses.replace(step, is_buffer=name in buffers))
    return steps


def _step(rule: TensorRule, name: str, shape: tuple[int, ...], config: ResolvedModel, *, number: str) -> Step:
    layout = rule.layout or Layout(lambda _: shape[:1], lambda _: iter([Run(source=0, start=0, stop=shape[0])]))
    theirs = [one.replace("{i}", number) for one in rule.names(config)]
    is_stacked = "{e}" in theirs[0] and rule.layout is None
    if "{e}" in theirs[0] and rule.layout is not None:
        theirs = [theirs[0].replace("{e}", str(source)) for source in range(len(layout.sizes(config)))]
    elif is_stacked:
        experts, rows = shape[:2]
        theirs = [theirs[0].replace("{e}", str(expert)) for expert in range(experts)]
        layout = Layout(
            lambda _: (rows,) * experts,
            lambda _: (Run(source=expert, start=0, stop=rows) for expert in range(experts)),
        )
    kind: Callable[..., Step] = StackedStep if is_stacked else Step
    if layout.of_pair is not None or (rule.transposed and len(shape) == 3):
        kind = partial(ExpertsStep, of_pair=layout.of_pair)
    return kind(
        ours=name,
        shape=shape,
        theirs=tuple(theirs),
        sizes=layout.sizes(config),
        runs=partial(layout.runs, config),
        transposed=rule.transposed,
        is_copy=rule.layout is None and not rule.transposed and not is_stacked,
    )


def their_shapes(plan: list[Step]) -> dict[str, tuple[int, ...]]:
    """The tensors of the family and their shapes, in the order in which the model uses them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for step in plan:
        for source, name in enumerate(step.theirs):
            shapes[name] = max(shapes.get(name, ()), step.shape_of(source))  # of several that share it, all rows
    return shapes


def whole_config(config: ResolvedModel, bert: ResolvedBert | None) -> Config:
    """The configuration of a run that has the model, GPT or BERT, and is otherwise the default one."""
    training = TrainingConfig(train_iters=1)
    if bert is None:
        return Config(model=config, experts=config.experts or ExpertsConfig(), training=training)
    return BertConfig(model=config, bert=bert, training=training)


def model_layers(
    config: ResolvedModel,
    device: torch.device,
    bert: ResolvedBert | None = None,
    *,
    layers: DescribesLayers = gpt_layers,
) -> list[LayerSpec]:
    """The layers of a BERT, or of the GPT that `layers` describes, on one rank, its vocabulary without padding."""
    whole = whole_config(dataclasses.replace(config, make_vocab_size_divisible_by=1), bert).resolve(1)
    context = BuildContext(device=device, streams=RandomStreams(0, torch.device("cpu")))
    return bert_layers(whole, context) if isinstance(whole, ResolvedBertConfig) else layers(whole.model, context)


def model_shapes(config: ResolvedModel, bert: ResolvedBert | None = None) -> dict[str, tuple[int, ...]]:
    """Global name -> global shape of every parameter. Nothing is allocated, and of blocks that are alike one is
    built."""
    shapes, built = dict[str, tuple[int, ...]](), dict[Any, dict[str, ShardSpec]]()
    for layer in model_layers(config, _META, bert):
        kind = layer.name if layer.block is None else (layer.block, layer.parameters)
        if kind not in built:
            parameters = layer.build().named_parameters()
            built[kind] = {name: one.spec for name, one in parameters if isinstance(one, ShardedParameter)}
        for name, spec in built[kind].items():
            if name not in layer.tied:  # a name may be given, as that of a norm that the first depth has for the head
                shapes[spec.name or f"{layer.name}.{name}"] = spec.shape
    return shapes


def buffer_shapes(config: ResolvedModel, bert: ResolvedBert | None = None) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of what belongs to a layer, is saved, and is no parameter: the biases of routers."""
    if config.experts is None:
        return {}
    everywhere = dataclasses.replace(config.experts, moe_first_dense_layers=0, moe_layer_freq=1)
    one = dataclasses.replace(config, experts=everywhere, num_layers=1, mtp_num_layers=0)
    _, block, _ = Stage(model_layers(one, _META, bert)).layers
    ends = block.state_dict().keys() - {name for name, _ in block.named_parameters()}
    return {
        f"blocks.{number}.{end}": tuple(block.get_buffer(end).shape)
        for number in config.mixtures
        for end in sorted(ends)
    }


def require_enough(family: Family, config: ResolvedModel, bert: ResolvedBert | None, count: int, where: str) -> None:
    """Refuse a model of far more tensors than there are, before lists of that length are made. `bert`: its BERT
    section, if it is a BERT."""
    if config.qk_layernorm_per_head and config.num_attention_heads > count:
        raise CheckpointError(f"{where} has {count} tensors, too few for the {config.num_attention_heads} heads")
    names = their_shapes(make_plan(family, dataclasses.replace(config, num_layers=min(config.num_layers, 2)), bert))
    of_a_block = sum(1 for step in names if re.search(r"\.1\.", step))
    if len(names) + (config.num_layers - 2) * of_a_block > 2 * count + _SPARE:
        raise CheckpointError(f"{where} has {count} tensors, too few for the {config.num_layers} layers of config.json")


# ---- the family's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """The tensors of a directory, as a plan asks for them."""

    tensors: dict[str, StoredTensor]  # name in the family -> where it lies
    names: dict[str, str]  # name in the family -> stored name, where they differ
    left_out: list[str]  # stored names of tensors that the model does not compute with
    # Stored name of a tensor that repeats another -> the name in the family of the one that it repeats.
    copies: dict[str, str]


def find_tensors(
    plan: list[Step], family: Family, stored: Mapping[str, StoredTensor], where: str, *, model: ResolvedModel
) -> StoredTensors:
    """Find every tensor of a plan among the stored ones, and nothing besides. Raises CheckpointError where tensors are
    missing, unknown, of another shape, or of several dtypes where they become one."""
    wanted, untied = their_shapes(plan), model.untie_embeddings_and_output_weights
    result = StoredTensors(tensors={}, names={}, left_out=[], copies={})
    shared = family.prediction_copies(model)
    repeated = {**(family.unused if untied else family.ties), **shared}
    problems = []
    for name, tensor in stored.items():
        canonical = _canonical(name, wanted, family)
        if canonical in wanted:
            if canonical in result.tensors:
                problems.append(
                    f"{canonical} is there twice, as {result.names.get(canonical, canonical)} and as {name}"
                )
            result.tensors[canonical] = tensor
            if name != canonical:
                result.names[canonical] = name
        elif canonical in repeated:
            result.copies[name] = repeated[canonical]
        elif name.endswith(family.buffers) or name.startswith(family.unread):
            result.left_out.append(name)
        else:
            problems.append(f"{name[:80]} is unknown")
    problems += [f"{name} is missing" for name in wanted if name not in result.tensors]
    problems += [
        f"{name} is {list(result.tensors[name].shape)}, but config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in result.tensors and result.tensors[name].shape != shape
    ]
    problems += list(_mixed(plan, result))
    if problems:
        more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(f"{where} does not hold what its config.json describes: {'; '.join(problems[:6])}{more}")
    for name, original in result.copies.items():
        if _equal(stored[name], result.tensors[original]):
            continue
        if not untied or name in shared:
            raise CheckpointError(
                f"{where}: config.json ties {name} to {original}, but they differ: one of both is wrong"
            )
        result.left_out.append(name)
    return result


def _canonical(name: str, wanted: Mapping[str, tuple[int, ...]], family: Family) -> str:
    for end, canonical in family.aliases.items():
        if name.endswith(end):
            name = name.removesuffix(end) + canonical
    if name not in wanted and family.prefix + name in wanted:
        return family.prefix + name
    return name


def _mixed(plan: list[Step], stored: StoredTensors) -> Iterator[str]:
    for step in plan:
        tensors = [stored.tensors[name] for name in step.theirs if name in stored.tensors]
        if wrong := next((one for one in tensors if one.dtype not in _FLOATS), None):
            yield f"{wrong.name} is {wrong.dtype}, which no weight is"
        elif len({tensor.dtype for tensor in tensors}) > 1:
            yield f"{' and '.join(tensor.name for tensor in tensors)} have different dtypes, and are one tensor here"


def _equal(copy: StoredTensor, original: StoredTensor) -> bool:
    same = copy.shape == original.shape and copy.dtype == original.dtype
    step = 4096  # rows at a time
    for start in range(0, original.shape[0] if same else 0, step):
        rows = (start, min(start + step, original.shape[0]))
        one, other = read_rows(copy, *rows), read_rows(original, *rows)
        same = same and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return same
