"""From a checkpoint of megacore to one of Megatron core's GPTModel: torch, a file for each tensor- and
pipeline-parallel rank, or torch_dist, which loads on any ranks. A model is refused unless its flags describe it again.
What is written is read back and compared bit for bit."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.config.messages import divisors, one_of
from megacore.config.model import differing, padded_rows
from megacore.config.spelling import flag_and_value
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.dcp_files import write_dcp
from megacore.convert.megatron import open_megatron
from megacore.convert.megatron_config import model_of
from megacore.convert.megatron_files import FILE
from megacore.convert.megatron_rows import Norms, split_of, written_flags, written_name
from megacore.convert.pickled import save
from megacore.errors import CheckpointError, ConfigError
from megacore.progress import Progress

_DIRECTORY = "release"
_POINTER = "latest_checkpointed_iteration.txt"
_VOCABULARY = ("embedding.tokens.weight", "head.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class MegatronExport:
    """A checkpoint that Megatron core can represent, and how it is divided."""

    tensors: CheckpointTensors
    tp: int = 1
    pp: int = 1
    # Fused with the projection after them, as Transformer Engine has them, or apart; in torch_dist they are fused for
    # both.
    norms: Norms = "fused"
    dtype: torch.dtype | None = None  # of the output; None: as stored

    @property
    def config(self) -> ResolvedModel:
        return self.tensors.config

    @property
    def rows(self) -> int:
        """Rows of the embedding, with Megatron-LM's padding."""
        return self.tp * padded_rows(self.config.vocab_size, self.tp, self.config.make_vocab_size_divisible_by)

    def read(self, name: str) -> Tensor:
        """A tensor as it is written, of all ranks; those with a row for each token have `rows` rows, the last of them
        zeros."""
        value = self.tensors.read(name, self.dtype)
        if name not in _VOCABULARY:
            return value
        return torch.cat([value, value.new_zeros(self.rows - len(value), value.shape[1])])

    def args(self) -> dict[str, Any]:
        """Megatron-LM's flags of the model, as plain values."""
        dtype = self.dtype or self.tensors.dtype(_VOCABULARY[0])
        return {
            **args_of(self.config),
            "padded_vocab_size": self.rows,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "transformer_impl": "transformer_engine" if self.norms == "fused" else "local",
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
        }


def plan_megatron(export: MegatronExport) -> MegatronExport:
    """The export, if it is possible. Raises ConfigError where --tp or --pp does not divide what it has to;
    CheckpointError for settings that are no flags of Megatron core's, a BERT, or experts."""
    config, where = export.config, export.tensors.directory
    if export.tensors.bert is not None or config.experts is not None:
        what = "a BERT" if export.tensors.bert is not None else "a mixture of experts"
        raise CheckpointError(f"{where} is {what}: --to megatron and torch_dist write dense GPTs; use --to hf")
    back = model_of(export.args(), export.rows, None, str(where))
    if lost := [flag_and_value(name, getattr(config, name)) for name in differing(config, back)]:
        raise CheckpointError(f"{where}: --to megatron and torch_dist cannot write {one_of(lost)}: use --to hf")
    sizes = {
        "attention heads": ("--tp", export.tp, config.num_attention_heads),
        "query groups": ("--tp", export.tp, config.query_groups),
        "rows of the feed-forward layer": ("--tp", export.tp, config.inner_size),
        "layers": ("--pp", export.pp, config.num_layers),
    }
    problems = [
        f"{flag} {ranks} must divide the {size} {what}: use {one_of(divisors(size, near=ranks))}"
        for what, (flag, ranks, size) in sizes.items()
        if size % ranks
    ]
    if problems:
        raise ConfigError(problems)
    return export


def args_of(config: ResolvedModel) -> dict[str, Any]:
    """Megatron-LM's flags of a model; `model_of` reads them back, as far as Megatron core has such a model."""
    base = config.rotary_base
    return {
        **written_flags(config),
        "ffn_hidden_size": config.inner_size,
        "kv_channels": config.head_size,
        "group_query_attention": config.query_groups != config.num_attention_heads,
        "num_query_groups": config.query_groups,
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": config.make_vocab_size_divisible_by,
        "layernorm_epsilon": config.norm_epsilon,
        "add_bias_linear": not config.disable_bias_linear,
        "add_qkv_bias": config.qkv_bias,
        "position_embedding_type": {"learned": "learned_absolute"}.get(
            config.position_embedding_type, config.position_embedding_type
        ),
        "use_rotary_position_embeddings": config.position_embedding_type == "rope",
        "rotary_base": int(base) if base.is_integer() else base,
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": False,
        "use_rope_scaling": config.rope_scaling == "llama3",
        "rope_scaling_factor": config.rope_scaling_factor,
        "swiglu": config.activation == "swiglu",
        "squared_relu": config.activation == "relu2",
        "openai_gelu": config.activation == "gelu" and config.disable_bias_linear,
        "bias_gelu_fusion": config.activation == "gelu",
        "apply_residual_connection_post_layernorm": False,
        "apply_layernorm_1p": config.layernorm_1p,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }


# ---- names and parts -------------------------------------------------------------------------------------------------


def _name(ours: str, norms: Norms) -> str:
    """Megatron core's name of a tensor, of a block without the number of the layer."""
    return written_name(_in_block(ours), norms)


def _in_block(ours: str) -> str:
    block = _BLOCK.fullmatch(ours)
    return ours if block is None else block[2]


def _read(export: MegatronExport, name: str, rank: int) -> Tensor:
    """A rank's part of a tensor; of a gated MLP's first projection that of the gate, and below it that of the other."""
    if export.config.gated and ".mlp.up." in name:
        gate = name.replace(".mlp.up.", ".mlp.gate.")
        return torch.cat([_part(export, gate, "mlp.up.weight", rank), _part(export, name, "mlp.up.weight", rank)])
    return _part(export, name, _in_block(name), rank)


def _part(export: MegatronExport, name: str, kind: str, rank: int) -> Tensor:
    value, split = export.read(name), split_of(kind)
    if split != "whole":
        value = value.chunk(export.tp, dim=1 if split == "columns" else 0)[rank]
    return value.clone()  # torch.save writes all that a view is of


def _written(export: MegatronExport) -> Iterator[str]:
    """Our names of the tensors that have a name of Megatron core's; a gate is part of another one."""
    return (name for name in export.tensors.shapes if ".mlp.gate." not in name)


def _of_stage(export: MegatronExport, stage: int) -> Iterator[tuple[str, str]]:
    """The tensors of a pipeline rank: our name and theirs, with the layer's number on the rank."""
    each, last = export.config.num_layers // export.pp, export.pp - 1
    for name in _written(export):
        theirs = _name(name, export.norms)
        if block := _BLOCK.fullmatch(name):
            if int(block[1]) // each == stage:
                yield name, f"decoder.layers.{int(block[1]) % each}.{theirs}"
        elif stage == (last if name.startswith("head.") else 0):
            yield name, theirs
    if stage == last > 0 and not export.config.untie_embeddings_and_output_weights:
        yield _VOCABULARY[0], "output_layer.weight"  # its copy of the tied embedding


# ---- files -----------------------------------------------------------------------------------------------------------


def write_ranks(export: MegatronExport, target: Path) -> None:
    """Write the torch format into an empty directory: mp_rank_TT[_PPP]/model_optim_rng.pt for each rank."""
    stages = [list(_of_stage(export, stage)) for stage in range(export.pp)]
    with Progress("converting", export.tp * sum(map(len, stages)), unit="tensors") as progress:
        for stage, names in enumerate(stages):
            for rank in range(export.tp):
                model = {theirs: _read(export, name, rank) for name, theirs in names}
                folder = target / _DIRECTORY / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if export.pp > 1 else ""))
                folder.mkdir(parents=True)
                save(folder / FILE, {**_state(export), "model": model})
                progress.advance(len(names))
    (target / _POINTER).write_text(_DIRECTORY, encoding="utf-8")


def write_torch_dist(export: MegatronExport, target: Path) -> None:
    """Write the torch_dist format: a tensor of all layers is one, [layers, ...]; all of the model is in memory at
    once."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, list[Tensor]] = {}
    for name in _written(export):
        theirs, value = _name(name, "fused"), _read(export, name, 0)
        if _BLOCK.fullmatch(name):
            layers.setdefault(f"decoder.layers.{theirs}", []).append(value)
        else:
            tensors[theirs] = value
    folder = target / _DIRECTORY
    folder.mkdir()
    write_dcp(folder, tensors | {name: torch.stack(each) for name, each in layers.items()})
    save(folder / "common.pt", _state(export))
    kinds = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    kinds |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(kinds), encoding="utf-8")
    (target / _POINTER).write_text(_DIRECTORY, encoding="utf-8")


def _state(export: MegatronExport) -> dict[str, Any]:
    return {"args": Namespace(**export.args()), "checkpoint_version": 3.0, "iteration": 0}


def require_equal(export: MegatronExport, target: Path) -> int:
    """Read what was written, as `--from megatron` does. Returns the number of tensors, all bitwise those of the
    checkpoint. Raises CheckpointError where one differs, or the model does."""
    written = open_megatron(target)
    if names := differing(written.config, export.config):
        raise CheckpointError(f"{target}: {one_of(names)} was not written as it was read; nothing was published")
    for name, value in written.tensors():
        expected = export.tensors.read(name, export.dtype)
        if value.dtype != expected.dtype or not torch.equal(value.view(torch.uint8), expected.view(torch.uint8)):
            raise CheckpointError(f"{target}: {name} was not written as it was read; nothing was published")
    return len(written.shapes)
