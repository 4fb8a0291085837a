"""The launch summary: what is about to run, in a dozen lines that can be compared between runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from megacore import ops
from megacore.config import ResolvedConfig, ResolvedExperts, ResolvedModel
from megacore.config.bert import BertConfig
from megacore.config.dimensions import describe_degrees, ranks_of_role
from megacore.config.logits import head_has_loss, loss_chunks
from megacore.config.messages import counted
from megacore.config.parallel import ChosenSchedule, StagesThatFit
from megacore.config.reproducible import canonical_blocks
from megacore.data import KnowsPacking, Packing, SampleDataset
from megacore.models.flops import CONVENTION, blocks_of
from megacore.models.size import active_parameters, block_parameters
from megacore.models.spec import LayerSpec
from megacore.observe.lines import mebibytes, summary_line
from megacore.observe.provenance import provenance_of
from megacore.parallel.graphs import has_graphs
from megacore.parallel.mesh import may_share_memory
from megacore.pipeline.partition import stage_ranges
from megacore.train.task import DTYPES

if TYPE_CHECKING:
    from megacore.train.trainer import Trainer

_SPLIT = "split over the tp ranks between their layers (--no-sequence-parallel: whole on every rank)"


def announcement(trainer: Trainer, train_data: SampleDataset, valid_data: SampleDataset | None) -> str:
    """Version, topology, model, batch, bubble, data, which implementation every operator runs, and predicted memory.
    `trainer`: has its configuration, mesh, task and metrics, and no model yet."""
    config, mesh, layers, metrics = trainer.config, trainer.mesh, trainer.task.layers, trainer.metrics
    run, stages = provenance_of(mesh), stage_ranges(layers, config)
    samples = (len(train_data), 0 if valid_data is None else len(valid_data))
    packing = train_data.packing if isinstance(train_data, KnowsPacking) else None
    training, parallel, model = config.training, config.parallel, config.model
    batch, vocabulary = training.global_batch_size, model.vocab_size
    total, held = _parameters(model, layers, stages)
    names = [
        f"{layers[stage[0]].name} .. {layers[stage[-1]].name}: {count / 1e6:,.2f}M"
        for stage, count in zip(stages, held, strict=True)
    ]
    virtual = f", of {parallel.virtual_stages} stages per rank" if parallel.virtual_stages > 1 else ""
    chosen = " (fastest by simulation that fits)" if isinstance(parallel, ChosenSchedule) else ""
    bubble = (
        f"{parallel.schedule_name}{chosen}{virtual}; predicted bubble {metrics.predicted_bubble:.1%} of the ranks' time"
    )
    one_by_one = "" if parallel.is_one_by_one else f"{parallel.schedule_csv or parallel.schedule_name}; "
    balanced = ["balanced by parameters: by time they do not fit"] if isinstance(parallel, StagesThatFit) else []
    fp8 = "" if config.precision.fp8 == "none" else f", linear layers of blocks in fp8 {config.precision.fp8}"
    code = "not in a git checkout" if run["git"] is None else f"git {run['git']}"
    memory = f"MiB of state on the fullest rank, by formula: {mebibytes(metrics.predicted_memory)}"
    is_transformer = any(layer.block is not None for layer in layers)
    slower = attention_warning(config, mesh.device) if is_transformer else None
    lines = [
        ("command", run["command"]),
        ("topology", f"{describe_degrees(mesh.degrees)} = {counted(mesh.world.size, 'rank')}{config.watch.beside}"),
        (
            "device",
            f"{mesh.device.type}, {mesh.backend}, {counted(torch.get_num_threads(), 'thread')} per rank, "
            f"torch {torch.__version__}",
        ),
        (
            "precision",
            f"{config.precision.precision}{fp8}; gradients accumulated and reduced in "
            f"{config.precision.grad_reduce_dtype}",
        ),
        (
            "model",
            f"{total / 1e6:,.2f}M parameters, {model.num_layers} blocks of {model.hidden_size}"
            f"{f' and {model.mtp_num_layers} of multi-token prediction' if model.mtp_num_layers else ''}, "
            f"vocabulary {vocabulary}",
        ),
        *(("stages" if i == 0 else "", f"{i}: {name}") for i, name in enumerate(names)),
        *(("", text) for text in balanced),
        (
            "batch",
            f"{counted(batch, 'sequence')} of {config.data.seq_length:,} = "
            f"{batch * config.data.seq_length:,} tokens per step; "
            f"{counted(config.microbatches, 'microbatch', 'microbatches')} of {training.micro_batch_size} per replica",
        ),
        ("schedule", bubble if parallel.pp > 1 else f"{one_by_one}one stage, no bubble"),
        *([("context", _divided(config))] if parallel.cp > 1 else []),
        *([("offload", _offloaded(mesh.device))] if training.offload_activations else []),
        *([("weights", _on_host(mesh.device))] if parallel.offload_params else []),
        *([("experts", _experts(config, experts))] if (experts := model.experts) is not None else []),
        *([("sequence", _SPLIT)] if parallel.sequence_parallel else []),
        *([("async tp", _async_tp(mesh.device))] if parallel.async_tp else []),
        (
            "data",
            f"{samples[0]:,} training and {samples[1]:,} validation samples"
            + (" (mock)" if config.data.mock_data else ""),
        ),
        *([("packing", text)] if (text := _packed(config, packing)) else []),
        ("operators", _operators(config, mesh.device)),
        *(
            [("bits", f"equal if {blocks} is a multiple of --tp x --cp, and of 2 x --cp above --cp 1: sums in blocks")]
            if (blocks := canonical_blocks(config)) > 1
            else []
        ),
        *([("loss", f"logits in {chunks} chunks of the tokens")] if (chunks := loss_chunks(config)) > 1 else []),
        *([("cuda graphs", _graphs(mesh.device))] if training.cuda_graphs else []),
        *([("compiled", _compiled(config))] if training.compile else []),
        ("output", training.output_dir),
        ("figures", f"TFLOP/s and MFU count {CONVENTION}{metrics.about_mfu()}"),
        *([("memory", memory)] if metrics.predicted_memory else []),
        *([("warning", slower)] if slower is not None else []),
    ]
    first = f"megacore {run['version']}, {code}, on {run['host']}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
    return "\n".join([first, *(summary_line(label, text) for label, text in lines)])


def _async_tp(device: torch.device) -> str:
    """How the ranks exchange what they multiply meanwhile."""
    way = "symmetric memory" if may_share_memory(device) else f"messages: {device.type} has no symmetric memory"
    return f"linear layers multiply while pieces travel, by {way}"


def _graphs(device: torch.device) -> str:
    """How captured blocks run."""
    without = f"operators one by one, as they were recorded: {device.type} has none"
    return "forward and backward of a block are a launch each" if has_graphs(device) else without


def _packed(config: ResolvedConfig, packing: Packing | None) -> str:
    """How documents become samples, where that is not the plain stream of documents."""
    data, parts = config.data, []
    if packing is not None:
        parts.append(
            f"{data.packing}: {counted(packing.samples, 'sample')} per epoch of "
            f"{counted(packing.documents, 'document')}, {packing.padding:.1%} padding"
        )
        if packing.longer:
            how = f"cut, and {packing.cut:.2%} of the tokens left out" if data.packing == "none" else "split"
            parts.append(f"{counted(packing.longer, 'longer document')} {how}")
    if isinstance(config, BertConfig):
        return "; ".join(parts)
    said = {"documents": "attention stays within documents", "positions": "positions restart at each document"}
    said["padding"] = "experts leave padding out"
    return "; ".join([*parts, *(said[name] for name in config.beside_hidden_states)])


def _divided(config: ResolvedConfig) -> str:
    """How the ranks divide sequences."""
    parallel, length = config.parallel, config.data.seq_length
    if canonical_blocks(config) > 1:
        return (
            f"{length // parallel.cp} of {length} positions per rank between the layers, in 2 of {2 * parallel.cp} "
            f"chunks; a layer computes 1 in {parallel.cp} of its features for all positions (--reproducible)"
        )
    how = {
        "allgather": "are gathered for each layer",
        "ring": "travel in a ring",
        "ulysses": "of 1 in {cp} heads are exchanged for positions",
    }[config.context_comm].format(cp=parallel.cp)
    return (
        f"{length // parallel.cp} of {length} positions per rank, in 2 of {2 * parallel.cp} chunks; keys and values "
        f"{how} (--cp-comm {config.context_comm})"
    )


def _offloaded(device: torch.device) -> str:
    """What --offload-activations does."""
    if device.type == "cpu":
        return "none: on a CPU activations are in host memory (--offload-activations)"
    return "activations of blocks wait in host memory for backward (--offload-activations)"


def _on_host(device: torch.device) -> str:
    """What --offload-params does."""
    if device.type == "cpu":
        return "divided by --zero-stage 3: on a CPU they are in host memory anyway (--offload-params)"
    return "and gradients are kept in host memory; a layer's are on the device while it computes (--offload-params)"


def _experts(config: ResolvedConfig, experts: ResolvedExperts) -> str:
    """How many experts there are, who uses them, and where they are."""
    parallel, held = config.parallel, len(config.model.mixtures)
    active = sum(number * active_parameters(block) for block, number in blocks_of(config.model))
    every = sum(number * block_parameters(block) for block, number in blocks_of(config.model))
    return (
        f"{experts.num_experts} in {counted(held, 'block')}, of which a token uses {experts.moe_router_topk}: "
        f"{active / 1e6:,.2f}M of the blocks' {every / 1e6:,.2f}M parameters; --ep {parallel.ep}: "
        f"{experts.num_experts // parallel.ep} of them per rank, each split over {parallel.expert_split}"
    )


def _compiled(config: ResolvedConfig) -> str:
    inside = "around the Triton kernels" if config.training.kernels == "triton" else "with their operators"
    loss = "" if head_has_loss(config) else " and the loss"
    return f"transformer blocks{loss}, {inside}, by {config.training.compile_backend}"


def _operators(config: ResolvedConfig, device: torch.device) -> str:
    model = config.model
    implementations = ops.implementations(
        device,
        config.training.attention,
        norm="rms_norm" if model.normalization == "RMSNorm" else "layer_norm",
        affine=model.norm_affine,
        activation=model.activation,
        positions=model.position_embedding_type,
        capped=model.attn_logit_softcapping is not None or model.softmax_type != "vanilla",
    )
    return ", ".join(f"{name}: {how}" for name, how in implementations.items())


def attention_warning(config: ResolvedConfig, device: torch.device) -> str | None:
    """A sentence where torch would compute attention with a slower kernel than the device has."""
    if device.type == "cpu" or config.training.attention == "fused-softmax" or config.parallel.cp > 1:
        return None
    model, ranks = config.model, ranks_of_role("layer", config.parallel)
    is_bert, alibi = isinstance(config, BertConfig), model.position_embedding_type == "alibi"
    windowed = model.window_size is not None and model.window_size < config.data.seq_length
    shape = ops.AttentionShape(
        heads=max(model.num_attention_heads // ranks, 1),
        groups=max(model.query_groups // ranks, 1),
        head_size=model.head_size,
        seq_length=config.data.seq_length,
        dtype=DTYPES[config.precision.precision],
        causal=not is_bert,
        masked=is_bert or alibi or windowed or "documents" in config.beside_hidden_states,
        alibi=alibi,
        dropout=model.attention_dropout,
        capped=model.attn_logit_softcapping is not None or model.softmax_type != "vanilla",
    )
    return ops.slower_attention(device, shape)


def _parameters(model: ResolvedModel, layers: list[LayerSpec], stages: list[range]) -> tuple[int, list[int]]:
    """Of the whole model, a tied table counted once; and of each stage, which holds a table for each rank's use."""
    tied = sum(model.vocab_size * model.hidden_size for layer in layers if layer.tied)
    total = sum(layer.parameters for layer in layers) - tied
    held = [sum(layers[i].parameters for i in stage) for stage in stages]
    return total, held if len(stages) > 1 else [total]
