"""A small copy of a configuration that a layout trains in seconds: same structure, same layout, in fp32. Width, depth,
vocabulary, sequence and batch shrink only as far as the constraints of the layout allow. No size ever grows, except the
number of microbatches to 2 per replica."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megacore.config import (
    AverageConfig,
    ExpertsConfig,
    MupConfig,
    RampupConfig,
    ResolvedConfig,
    ResolvedExperts,
    ResolvedPrecision,
)
from megacore.config.dimensions import ranks_of_role
from megacore.config.fields import field_infos
from megacore.config.layer_pattern import parse_pattern, pattern_of
from megacore.config.model import ResolvedModel
from megacore.config.parallel import V_SCHEDULES
from megacore.config.pipeline_layout import parse_layout
from megacore.config.rope_factors import parse_factors, written_factors
from megacore.config.schema import sections_of
from megacore.config.spelling import flag_and_value

WARMUP_STEPS = 4
STEPS = 3
WARMUP_LR = 1e-2
LR = 1e-3

_SHORT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}  # of latent attention
_HEAD_SIZES = (8, 16, 32, 64)
_VOCABULARIES = (131, 137, 139)  # prime: no tp divides one
_SEQUENCE = 16
_MOST_CHOSEN = 4  # experts that a token uses
_CLIP = 0.1  # below the gradient norm of the narrowed model, so that clipping has an effect
_BUCKET_MB = 0.02
_SAID = ("model", "precision", "data", "training", "parallel", "optimizer", "spikes", "bert", "experts")
_SILENT = ("init_method_std", "preset", "output_dir", "memory_check", "device", "train_iters", "sequence_parallel")
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """A narrowed configuration."""

    config: ResolvedConfig  # resolved, for the same layout
    changes: tuple[str, ...]  # every changed setting, as `--hidden-size 768 -> 32`


def narrow(config: ResolvedConfig) -> Narrowed:
    """Make the small copy."""
    parallel, training, optimizer = config.parallel, config.training, config.optimizer
    device = "cpu" if parallel.device == "auto" else parallel.device
    blocks, layout = _stages(config)
    unit = parallel.sequence_unit(sequence_parallel=True)
    seq_length = min(config.data.seq_length, unit * math.ceil(_SEQUENCE / unit))
    split = parallel.sequence_parallel
    if split is None:  # its default depends on the device
        split = device != "cpu" and parallel.tp > 1 and seq_length % unit == 0
    micro, recomputed = min(training.micro_batch_size, 2), training.recompute_num_layers
    clip_warmup = optimizer.clip_grad_warmup_iters
    if optimizer.clip_grad_adaptive:  # begins with the first compared step at the latest
        clip_warmup = min(clip_warmup, WARMUP_STEPS)
    sections: dict[str, Any] = {
        "model": _model(config, sum(blocks), seq_length),
        "experts": config.experts,
        "parallel": replace(
            parallel,
            device=device,
            sequence_parallel=split,
            bucket_size_mb=min(parallel.bucket_size_mb, _BUCKET_MB),
            pipeline_layout=layout,
            cp_comm=config.context_comm if parallel.cp > 1 else parallel.cp_comm,
        ),
        "precision": ResolvedPrecision(precision="fp32"),
        "data": replace(config.data.without_fill_in(), **fixed(_TABLES["data"]), seq_length=seq_length),
        "optimizer": replace(
            optimizer,
            **fixed(_TABLES["optimizer"]),
            lr=LR,
            lr_decay_iters=WARMUP_STEPS + STEPS,
            clip_grad=min(optimizer.clip_grad, _CLIP),
            clip_grad_warmup_iters=clip_warmup,
        ),
        "training": replace(
            training,
            **fixed(_TABLES["training"]),
            micro_batch_size=micro,
            global_batch_size=micro * ranks_of_role("batch", parallel) * _microbatches(config),
            train_iters=WARMUP_STEPS + STEPS,
            recompute_num_layers=None if recomputed is None else min(recomputed, max(blocks)),
        ),
        "checkpoint": replace(config.checkpoint, **fixed(_TABLES["checkpoint"])),
        "watch": replace(config.watch, **fixed(_TABLES["watch"])),
        "rampup": RampupConfig(),
        "average": AverageConfig(),  # changes no step
        "mup": MupConfig(),  # its factors of scores and logits are the model's
    }
    if config.model.experts is not None:
        experts = _experts(config, sections["model"])
        sections["model"] = replace(sections["model"], experts=experts)
        sections["experts"] = ExpertsConfig(**{name: getattr(experts, name) for name in field_infos(ExpertsConfig)})
    if (uncompressed := config.optimizer_settings.uncompressed) is not None:  # one process has nothing to compress
        sections["optimizer"] = replace(sections["optimizer"], optimizer=uncompressed)
    if config.spikes.on_spike in ("skip", "rollback"):  # a skipped step has nothing to compare
        sections["spikes"] = replace(config.spikes, on_spike="none")
    if (bert := getattr(config, "bert", None)) is not None:
        interval = bert.global_attention_interval
        if bert.packed:
            interval = min(interval, max(1, sum(blocks) - 1))
        sections["bert"] = replace(bert, global_attention_interval=interval, whole_word_masking=False)
    narrowed = replace(config, **sections)
    return Narrowed(config=narrowed, changes=tuple(_changes(config, narrowed)))


def one_process(config: ResolvedConfig) -> ResolvedConfig:
    """The same training without a layout: one rank, one stage, no ZeRO, whole sequences."""
    return replace(config, parallel=replace(config.parallel, **fixed(_TABLES["one_process"])))


def fixed(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of narrow.toml or rehearse.toml as values of fields."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return {**dict.fromkeys(values.pop("none", ())), **values}


def _model(config: ResolvedConfig, layers: int, seq_length: int) -> ResolvedModel:
    model, tp = config.model, config.parallel.tp
    shared_by, groups = model.num_attention_heads // model.num_query_groups, model.num_query_groups
    divided = config.parallel.cp if config.context_comm == "ulysses" else 1  # parts that a tp rank's heads are cut into
    if groups % tp == 0:
        held = groups // tp
        if held % divided == 0:
            held = divided * min(held // divided, 2)
        least = max(divided // held, 1)
        groups, shared_by = tp * held, least * min(shared_by // least, max(4 // least, 1))
        heads = groups * shared_by
    else:  # several ranks share a group
        heads = tp * divided * min(model.num_attention_heads // (tp * divided), 2)
    short = {name: min(getattr(model, name), most) for name, most in _SHORT.items() if model.multi_latent_attention}
    if model.q_lora_rank is not None:
        short["q_lora_rank"] = min(model.q_lora_rank, 16)
    size = short["qk_nope_head_dim"] + short["qk_rope_head_dim"] if short else 0
    size = size or _head_size(model, ranks_per_group=max(1, tp // groups))
    ratio = model.hidden_size / (model.num_attention_heads * model.kv_channels)
    hidden = min(model.hidden_size, 8 * math.ceil(ratio * heads * size / 8))
    inner = tp * math.ceil(model.ffn_hidden_size / model.hidden_size * hidden / tp)
    vocabulary = next((v for v in _VOCABULARIES if v <= model.vocab_size and (tp == 1 or v % tp)), model.vocab_size)
    positions = model.max_position_embeddings
    original, pairs = model.rope_original_max_positions, int(size * model.rotary_percent) // 2
    return replace(
        model,
        **short,
        **_linear(model, tp, divided, seq_length // (2 * config.parallel.cp)),
        preset=None,
        num_layers=layers,
        # Few blocks, but of every kind.
        layer_pattern=model.layer_pattern and pattern_of("".join(dict.fromkeys(parse_pattern(model.layer_pattern)))),
        mtp_num_layers=min(model.mtp_num_layers, 2),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=size,
        hidden_size=hidden,
        ffn_hidden_size=min(model.ffn_hidden_size, inner),
        vocab_size=min(vocabulary, model.vocab_size),
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 8),
        max_position_embeddings=min(positions, seq_length + 8 * (positions > config.data.seq_length)),
        rope_original_max_positions=None
        if original is None
        else max(2, min(original, original * seq_length // config.data.seq_length)),
        rope_short_factors=_fewer_factors(model.rope_short_factors, pairs),
        rope_long_factors=_fewer_factors(model.rope_long_factors, pairs),
        window_size=None if model.window_size is None else min(model.window_size, seq_length // 2),
        # Activations and gradients keep about the size that they have in the whole model.
        init_method_std=min(0.5, model.init_method_std * math.sqrt(model.hidden_size / hidden)),
    )


def _linear(model: ResolvedModel, tp: int, divided: int, chunk: int) -> dict[str, Any]:
    """Sizes of narrow heads of linear attention, and of a convolution that `chunk` positions feed; none where no block
    has it."""
    if not model.has_linear:
        return {}
    parts = tp * divided if model.linear_num_key_heads % (tp * divided) == 0 else tp
    groups = parts * min(model.linear_num_key_heads // parts, 2)
    return {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * min(model.linear_num_value_heads // model.linear_num_key_heads, 2),
        "linear_key_head_dim": min(model.linear_key_head_dim, 8),
        "linear_value_head_dim": min(model.linear_value_head_dim, 8),
        "linear_conv_kernel_dim": min(model.linear_conv_kernel_dim, chunk + 1),
    }


def _fewer_factors(text: str | None, pairs: int) -> str | None:
    """One number of --rope-scaling longrope for each pair of dimensions of a narrowed head, spread over all numbers."""
    if text is None:
        return None
    factors = parse_factors(text)
    return written_factors([factors[pair * len(factors) // pairs] for pair in range(pairs)])


def _experts(config: ResolvedConfig, model: ResolvedModel) -> ResolvedExperts:
    """As many experts as the layout and the choice of a token need, in the same ratio to the narrowed model."""
    experts, parallel = config.model.experts, config.parallel
    assert experts is not None
    count, chosen = experts.num_experts, experts.moe_router_topk
    if experts.moe_router_num_groups is None:  # whose numbers depend on each other
        chosen = min(chosen, _MOST_CHOSEN)
        count = min(count, parallel.ep * max(2, math.ceil(2 * chosen / parallel.ep)))  # several on a rank

    def width(size: int, ranks: int) -> int:
        return min(size, ranks * math.ceil(size / config.model.hidden_size * model.hidden_size / ranks))

    shared = experts.moe_shared_expert_size
    return replace(
        experts,
        num_experts=count,
        moe_router_topk=chosen,
        moe_ffn_hidden_size=width(experts.moe_ffn_hidden_size, parallel.expert_split),
        moe_shared_expert_size=None if shared is None else width(shared, parallel.tp),
        moe_first_dense_layers=min(experts.moe_first_dense_layers, model.num_layers - 1),
    )


def _head_size(model: ResolvedModel, *, ranks_per_group: int) -> int:
    """The smallest head whose rotated dimensions are pairs, and whose rows the ranks of a group divide."""

    def fits(size: int) -> bool:
        rotated = int(size * model.rotary_percent)
        pairs = model.position_embedding_type != "rope" or (rotated >= 2 and rotated % 2 == 0)
        return size <= model.kv_channels and pairs and 2 * size % ranks_per_group == 0

    return next(filter(fits, _HEAD_SIZES), model.kv_channels)


def _stages(config: ResolvedConfig) -> tuple[list[int], str | None]:
    """How many blocks each stage has, at most two, unequal where they were; and --pipeline-layout of them, if any."""
    stages, layers = config.parallel.pp * config.parallel.virtual_stages, config.model.num_layers
    if config.parallel.pipeline_layout is None:
        each = min(layers // stages, 2 if stages <= 2 else 1)
        return [each + (stage == 0 and layers % stages > 0) for stage in range(stages)], None
    blocks, texts = [], []
    for held in parse_layout(config.parallel.pipeline_layout, stages=stages, blocks=layers):
        blocks.append(min(2, sum(0 < layer <= layers for layer in held)))
        texts.append(",".join([*["E"] * (0 in held), *["t"] * blocks[-1], *["H"] * (layers + 1 in held)]))
    return blocks, "|".join(texts)


def _microbatches(config: ResolvedConfig) -> int:
    """Per replica: two or more, more than stages if they were, and as the schedule takes them."""
    parallel, count = config.parallel, config.microbatches
    if parallel.schedule_csv is not None:
        return count
    full = 2 * parallel.pp if parallel.schedule in V_SCHEDULES else parallel.pp
    wanted = max(2, min(count, full + 1))
    return parallel.pp * math.ceil(wanted / parallel.pp) if parallel.schedule == "interleaved" else wanted


def _changes(before: ResolvedConfig, after: ResolvedConfig) -> Iterator[str]:
    """Settings of the model, the precision and the batch that differ."""
    for name in sections_of(type(before)):
        old, new = getattr(before, name), getattr(after, name)
        for field in field_infos(type(old)) if name in _SAID else ():
            a, b = getattr(old, field), getattr(new, field)
            if a != b and field not in _SILENT:
                yield f"{flag_and_value(field, a)} -> {b if b is not None else 'none'}"
