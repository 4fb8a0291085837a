"""The proof that a conversion is right: transformers' model and megacore's compute the same logits, in fp32, read back
from the disk. Neither is ever in memory whole: a parameter is read when an operator uses it and dropped when that is
done, so that the largest model is checked in the memory of its largest tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megacore.checkpoint.manifest import adapters_of
from megacore.checkpoint.tensor_file import read_rows
from megacore.checkpoint.tensor_header import StoredTensor
from megacore.config import ResolvedModel
from megacore.config.bert import ResolvedBert
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.from_hf import HFModel, open_model
from megacore.convert.hf_directory import carried_tokenizer
from megacore.convert.plan import model_layers
from megacore.errors import CheckpointError, DataError, UserError
from megacore.layers.context import BuildContext
from megacore.layers.lora import is_adapter
from megacore.models.gpt import gpt_layers
from megacore.models.spec import DescribesLayers, LayerSpec, with_adapters
from megacore.parallel.sharding import ShardedParameter
from megacore.pipeline.stage import Stage

TEXT = (
    "The first thing that a traveller sees is the river, and the second is the bridge. In 1874 it had 12 arches; the "
    "flood of that spring left seven. They built it again, a little higher, and wrote on a stone: count them yourself."
)
_MOST_TOKENS = 128
_FEWEST_TOKENS = 8
_MOST_BYTES = 1 << 28  # of what more tokens take
_ROWS_BYTES = 1 << 26  # of the rows of a matrix that a linear layer reads at a time


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far two models agree."""

    tokens: int  # positions that were compared
    difference: float  # the largest difference of two logits
    largest: float  # the largest logit
    same_choice: float  # share of the positions at which both find the same token the likeliest

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: logits differ by at most {self.difference:.3g}, the largest is {self.largest:.3g}; "
            f"the likeliest token is the same at {self.same_choice:.1%} of the positions"
        )

    def require(self, tolerance: float, *, unknown: Sequence[str] = ()) -> None:
        """Refuse (CheckpointError) models that differ by more than the tolerance, relative to the largest logit or to
        1. `unknown`: fields of config.json that megacore does not know, which may be the reason."""
        allowed = tolerance * max(1.0, self.largest)
        if not self.difference <= allowed:  # NaN is not
            raise CheckpointError(
                f"the two models do not compute the same: {self}, and at most {allowed:.3g} is allowed "
                f"(--tolerance {tolerance:g}); nothing was published"
                + (f". config.json has {', '.join(unknown)[:200]}, which megacore does not know" if unknown else "")
            )


def compare(
    hf: Path,
    checkpoint: Path,
    tokens: Tensor,
    *,
    rounded: torch.dtype | None = None,
    ignored: Sequence[str] = (),
    averaged: bool = False,
    layers: DescribesLayers = gpt_layers,
) -> Agreement:
    """Read both sides and run both models on `tokens`, [1, s]. `rounded`: the directory's dtype where the checkpoint
    was rounded to it. `ignored`: fields of config.json that the conversion left out, and transformers reads.
    `averaged`: the directory has the average of the checkpoint's weights. Raises CheckpointError where a side cannot be
    read."""
    theirs = _their_logits(open_model(hf, ignored), tokens)
    ours = our_logits(CheckpointTensors(checkpoint, averaged=averaged), tokens, rounded, layers)
    return _agreement(theirs, ours, tokens)


def compare_checkpoints(one: Path, other: Path, tokens: Tensor) -> Agreement:
    """The same of two checkpoints of megacore, of which the second is the new one."""
    first, second = (our_logits(CheckpointTensors(path), tokens, None) for path in (one, other))
    return _agreement(first, second, tokens)


def compare_adapted(adapters: CheckpointTensors, base: CheckpointTensors, merged: Path, tokens: Tensor) -> Agreement:
    """The same of a checkpoint with adapters beside it, and of one into which they were merged."""
    lora = adapters_of(adapters.manifest, adapters.directory)

    def layers(model: ResolvedModel, context: BuildContext) -> list[LayerSpec]:
        return with_adapters(gpt_layers(model, context), lora, model, context)

    apart = our_logits(base, tokens, None, layers, adapters=adapters)
    return _agreement(apart, our_logits(CheckpointTensors(merged), tokens, None), tokens)


def _agreement(theirs: list[Tensor], ours: list[Tensor], tokens: Tensor) -> Agreement:
    pairs = list(zip(theirs, ours, strict=True))
    return Agreement(
        tokens=tokens.shape[1],
        difference=max(float((one - other).abs().max()) for one, other in pairs),
        largest=max(float(one.abs().max()) for one in theirs),
        same_choice=float((theirs[0].argmax(-1) == ours[0].argmax(-1)).double().mean()),
    )


def check_tokens(config: ResolvedModel, tokenizer: Path | None, file: Path | None) -> Tensor:
    """Token ids to compare on, [1, s], of a text or a built-in one. Without a tokenizer the text's bytes are the
    tokens. Raises DataError where the text cannot be read, or has too few tokens."""
    text = TEXT
    if file is not None:
        try:
            text = file.read_bytes()[: 64 * _MOST_TOKENS].decode("utf-8", "ignore")
        except OSError as error:
            raise DataError(f"--check-tokens {file} cannot be read: {error.strerror}") from None
    vocabulary, most = config.vocab_size, _most_tokens(config)
    carried = carried_tokenizer(tokenizer)
    ids = list(text.encode()) if carried is None else carried.encode(text)
    if file is None and len(ids) < _FEWEST_TOKENS:  # to this tokenizer the text is hardly more than one unknown word
        ids = list(text.encode())
    if ids and most > _MOST_TOKENS:  # the text again and again, to reach a limit
        ids *= -(-most // len(ids))
    ids = [token % vocabulary for token in ids][:most]
    # RoBERTa's padding, which gets no position of its own, is the token before the first row of positions.
    ids = [token + (token == config.position_offset - 1) for token in ids]
    if len(ids) < min(_FEWEST_TOKENS, most):
        raise DataError(f"--check-tokens {file} has {len(ids)} tokens: give a text of {_FEWEST_TOKENS} or more")
    return torch.tensor([ids])


def _limit(config: ResolvedModel) -> int:
    """The distance at which the model computes something else: a window's, or where positions are stretched."""
    stretched = config.rope_original_max_positions if config.rope_scaling in ("dynamic", "longrope") else None
    window = config.window_size or 0
    return max(0 if window > config.max_position_embeddings else window, stretched or 0)


def _most_tokens(config: ResolvedModel) -> int:
    """Tokens to compare on: enough to cross the model's limit, where their attention and logits are small enough."""
    context, limit = config.max_position_embeddings, _limit(config)
    most, beyond = min(_MOST_TOKENS, context), limit + _FEWEST_TOKENS
    if limit and config.position_embedding_type != "learned" and beyond > most:
        held = 3 * beyond * (config.num_attention_heads * beyond + config.vocab_size)  # scores, and logits
        if held * torch.float32.itemsize <= _MOST_BYTES:
            return beyond
    return most


def not_crossed(config: ResolvedModel, tokens: Tensor) -> str | None:
    """What a comparison on these tokens says nothing about."""
    if _limit(config) < tokens.shape[1]:
        return None
    return f"not compared: what the model computes beyond {_limit(config)} positions, for lack of memory"


# ---- the two models --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _their_logits(model: HFModel, tokens: Tensor) -> list[Tensor]:
    """Those of the tokens, and of the sentence task where there is one."""
    twin = _their_model(model)
    if model.bert is None:
        return [twin(input_ids=tokens, use_cache=False).logits[0]]
    segments = {"token_type_ids": _segments(tokens, model.bert)} if model.bert.bert_style == "classic" else {}
    output = twin(input_ids=tokens, **segments)
    if model.bert.sentence_task == "none":
        return [output.logits[0]]
    return [output.prediction_logits[0], output.seq_relationship_logits[0]]


@torch.no_grad()
def our_logits(
    tensors: CheckpointTensors,
    tokens: Tensor,
    rounded: torch.dtype | None,
    layers: DescribesLayers = gpt_layers,
    *,
    adapters: CheckpointTensors | None = None,
) -> list[Tensor]:
    """Logits [s, vocabulary] of a checkpoint's model in fp32 on tokens [1, s], and [classes] of a sentence task.
    `rounded`: the type that weights are rounded to before; None: as they are."""
    config = replace(tensors.config, mtp_num_layers=0)  # which change no logits
    with _parameters_on_meta():
        stage = Stage(model_layers(config, torch.device("cpu"), tensors.bert, layers=layers)).eval()

    def read(_: str, parameter: nn.Parameter, start: int, stop: int) -> Tensor:
        assert isinstance(parameter, ShardedParameter)
        source = adapters if adapters is not None and is_adapter(parameter.spec.name) else tensors
        return source.read_rows(parameter.spec.name, start, stop, rounded or torch.float32).float()

    _stream(stage, read)
    for name, layer in zip(stage.names, stage.layers, strict=True):
        for local in layer.state_dict().keys() - dict(layer.named_parameters()):
            layer.get_buffer(local).copy_(tensors.read(f"{name}.{local}"))
    bert = tensors.bert
    output = stage(tokens if bert is None else (tokens, _segments(tokens, bert), torch.ones_like(tokens)))
    logits, *sentence = output if isinstance(output, tuple) else (output,)
    return [logits[0, :, : config.vocab_size], *(one[0] for one in sentence)]


def _segments(tokens: Tensor, bert: ResolvedBert) -> Tensor:
    """The first half of one sentence, the other of the next, if the model tells them apart."""
    if bert.num_token_types == 1:
        return torch.zeros_like(tokens)
    return (torch.arange(tokens.shape[1]) >= tokens.shape[1] // 2).long().expand_as(tokens)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _their_model(model: HFModel) -> Any:
    """The model that transformers' from_pretrained builds from a directory, its parameters left on the disk. Raises
    CheckpointError where transformers would load another model than the one that is stored."""
    transformers = _transformers()
    stored = list(model.directory.tensors.values())
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(model.directory.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its checks of config.json raise errors of many kinds
        raise CheckpointError(f"transformers cannot load {model.directory.path}: {_first_line(error)}") from None
    config.__dict__.pop("quantization_config", None)  # what it packs is unpacked here
    try:
        # A hollow tensor for each stored one: of the same name and shape, but one number in memory, which identifies
        # it. So transformers itself decides what becomes of a stored tensor, what is tied, and what is missing, as when
        # a user loads the directory.
        twin, info = getattr(transformers, model.family.class_of(model.bert)).from_pretrained(
            None,
            config=config,
            state_dict={one.name: torch.tensor(-1.0 - i).expand(one.shape) for i, one in enumerate(stored)},
            output_loading_info=True,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        raise CheckpointError(f"transformers cannot load {model.directory.path}: {_first_line(error)}") from None
    missing = sorted(info["missing_keys"])
    predicting = model.family.prediction_blocks(model.config)
    unexpected = sorted(
        name
        for name in info["unexpected_keys"]
        if not name.endswith(model.family.buffers) and not name.startswith(predicting)
    )
    for names, problem in ((missing, "misses, and would make anew,"), (unexpected, "does not expect, and would drop,")):
        if names:
            shown = ", ".join(name[:80] for name in names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
            raise CheckpointError(
                f"transformers loads another model from {model.directory.path} than is stored there: it {problem} "
                f"{shown}; nothing was published"
            )
    sources = {-1.0 - i: one for i, one in enumerate(stored)}  # no weight that is made anew begins with such a number

    def source_of(name: str, mark: Tensor) -> StoredTensor:
        source = sources.get(float(mark))
        if source is None:
            raise CheckpointError(
                f"transformers' model has a weight {name}, which {model.directory.path} does not hold"
            )
        return source

    def read(name: str, parameter: nn.Parameter, start: int, stop: int) -> Tensor:
        first = source_of(name, parameter.flatten()[0])
        if parameter.shape == first.shape:
            return read_rows(first, start, stop, torch.float32)
        experts = []  # transformers has stacked the matrices of experts, some of them one below the other
        for marks in parameter[start:stop, :, 0]:
            parts = zip(*torch.unique_consecutive(marks, return_counts=True), strict=True)
            rows = [read_rows(source_of(name, mark), 0, int(count), torch.float32) for mark, count in parts]
            experts.append(torch.cat(rows))
        return torch.stack(experts)

    buffers = {name: one for name, one in twin.named_buffers() if name in twin.state_dict() and one.numel()}
    for name, buffer in buffers.items():
        module, _, local = name.rpartition(".")
        values = read_rows(source_of(name, buffer.flatten()[0]), 0, len(buffer), torch.float32)
        setattr(twin.get_submodule(module), local, values)
    _stream(twin, read)
    return twin


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError(
            "the check compares with transformers' model: install the package transformers, then convert again"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class _OnDisk(Tensor):
    """A parameter that is read when an operator uses it, and is gone when the operator is done. Linear layers and
    embeddings read some rows at a time: in fp32 the largest matrix may take twice what it takes where it is stored."""

    read: Callable[[int, int], Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, read: Callable[[int, int], Tensor]) -> _OnDisk:
        made: _OnDisk = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.read = read
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and isinstance(args[1], _OnDisk) and not kwargs:
            return _linear(*args)
        if function is F.embedding and isinstance(args[1], _OnDisk):
            return _embedding(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(_OnDisk, lambda one: one.read(0, len(one)), (args, kwargs or {}))
        return operator(*args, **kwargs)


def _linear(x: Tensor, weight: _OnDisk, bias: Tensor | None = None) -> Tensor:
    offset = bias.read(0, len(bias)) if isinstance(bias, _OnDisk) else bias
    y = x.new_empty(*x.shape[:-1], len(weight))
    for start, stop in _blocks(weight):
        y[..., start:stop] = F.linear(x, weight.read(start, stop), None if offset is None else offset[start:stop])
    return y


def _embedding(ids: Tensor, weight: _OnDisk) -> Tensor:
    rows = torch.empty(*ids.shape, weight.shape[1])
    for start, stop in _blocks(weight):
        here = (start <= ids) & (ids < stop)
        if here.any():
            rows[here] = weight.read(start, stop)[ids[here] - start]
    return rows


def _blocks(weight: Tensor) -> Iterator[tuple[int, int]]:
    """[start, stop) of rows that are read together."""
    step = max(1, _ROWS_BYTES // (weight.shape[1] * torch.float32.itemsize))
    for start in range(0, len(weight), step):
        yield start, min(start + step, len(weight))


def _stream(model: nn.Module, read: Callable[[str, nn.Parameter, int, int], Tensor]) -> None:
    """Leave every parameter on the disk; `read` gives rows of it by its name."""
    for name, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{name}.{local}" if name else local
                module._parameters[local] = _OnDisk(parameter.shape, partial(read, full, parameter))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are made in the block have no memory; buffers are as they should be."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if isinstance(parameter, ShardedParameter):
            return ShardedParameter(parameter.detach().to("meta"), parameter.spec)
        return None if parameter is None else nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = nn.modules.module.register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
