"""--fp8: which blocks it is about, and the sizes that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacore.config.messages import divisors
from megacore.config.problem import Change, Problem, Values
from megacore.config.reproducible import canonical_blocks
from megacore.config.rules import Rule, Settings, rows
from megacore.config.schema import Config

_READ = (
    "fp8", "tp", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "reproducible_blocks",
    "layer_pattern", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
FP8_UNITS = {"blockwise": 128, "tensorwise": 16, "rowwise": 16}
"""What the features of a linear layer on a rank must be a multiple of: the tile, or what tensor cores read at once."""


def is_fp8(name: str, config: Config) -> bool:
    """Whether linear layers of a block, `blocks.3`, multiply in fp8."""
    precision, layers = config.precision, config.model.num_layers
    skipped = {f"blocks.{_block(number, layers)}" for number in _numbers(precision.fp8_skip or "")}
    return precision.fp8 != "none" and name not in skipped


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")] if text else []


def _block(number: int, layers: int) -> int:
    """A negative number counts from the last block of the model, after which those of multi-token prediction come."""
    return number if number >= 0 else number + layers


def _skipped(c: Settings) -> Iterator[str]:
    c.read("fp8_skip", "num_layers", "mtp_num_layers")
    text, layers = c.fp8_skip or "", c.num_layers
    every = layers + c.mtp_num_layers
    given = f"--fp8 skip={text}"
    try:
        skipped = _numbers(text)
    except ValueError:
        first = Change("use --fp8 skip=0 for the first block", {"fp8_skip": "0"})
        yield Problem(f"{given} must be numbers of blocks with commas between them", first, c.without("fp8_skip"))
        return
    outside = [number for number in skipped if not -layers <= number < every]
    if outside:
        kept = ",".join(str(number) for number in skipped if number not in outside)
        yield Problem(
            f"{given}: of --num-layers {layers} the blocks are 0 to {layers - 1}, or -{layers} to -1 from the end, "
            f"{f'of --mtp-num-layers {layers} to {every - 1}, ' if every > layers else ''}"
            f"and {', '.join(map(str, outside))} is none",
            Change(f"use --fp8 skip={kept}", {"fp8_skip": kept}) if kept else None,
            c.without("fp8_skip"),
        )
    elif len({_block(number, layers) for number in skipped}) == every:
        yield Problem(f"{given} leaves none of {every} blocks in fp8", c.without("fp8_skip"))


def _widths(c: Settings) -> Iterator[str]:
    config: Config = c.config
    c.read(*_READ)
    recipe, tp = config.precision.fp8, config.parallel.tp
    if recipe == "none" or not (unfit := list(_unfit(config, recipe))):
        return
    others = [name for name in FP8_UNITS if name != recipe and not list(_unfit(config, name))]
    if (blocks := canonical_blocks(config)) > 1:
        where = f"in each of the {blocks} blocks of --reproducible"
        fitting = [count for count in (1, 2, 4) if count < blocks and not list(_unfit(config, recipe, blocks=count))]
        way = Values(name="reproducible_blocks", among=fitting, near=blocks)
    else:
        where = f"on each rank of --tp {tp}"
        degrees = divisors(config.model.num_attention_heads, most=None)
        way = Values(
            name="tp", among=[ranks for ranks in degrees if not list(_unfit(config, recipe, tp=ranks))], near=tp
        )
    yield Problem(
        f"--fp8 {recipe} needs multiples of {FP8_UNITS[recipe]} features {where}, and there are {', '.join(unfit)}",
        *(Change(f"use --fp8 {name}", {"fp8": name}) for name in others),
        way,
        c.out("fp8"),
    )


def _unfit(config: Config, recipe: str, *, tp: int | None = None, blocks: int | None = None) -> Iterator[str]:
    """Features of a rank, or of a canonical block, that are no multiple of the recipe's unit; with another --tp, or
    another number of blocks."""
    model, experts, unit = config.model, getattr(config, "experts", None), FP8_UNITS[recipe]
    blocks = canonical_blocks(config) if blocks is None else blocks
    parts = max(blocks, tp or config.parallel.tp)
    heads, has_dense = model.num_attention_heads, True
    whole, divided = {"of --hidden-size": model.hidden_size}, {"of all values": heads * model.value_size}
    if model.multi_latent_attention:
        whole |= {"of --kv-lora-rank": model.kv_lora_rank, "of --q-lora-rank": model.q_lora_rank or unit}
        divided["of all queries"] = heads * model.head_size
        divided["of all keys and values"] = heads * (model.qk_nope_head_dim + model.value_size)
    else:
        divided["of all queries, keys and values"] = (heads + 2 * model.query_groups) * model.head_size
    if model.has_linear:
        divided["of all values of linear attention"] = model.linear_widths[1]
        divided["that linear attention projects"] = 2 * sum(model.linear_widths)
    if experts is not None and experts.num_experts is not None:
        has_dense = experts.moe_first_dense_layers > 0 or experts.moe_layer_freq != 1
        if experts.moe_shared_expert_size:
            divided["of --moe-shared-expert-size"] = experts.moe_shared_expert_size
    if has_dense:
        divided["of --ffn-hidden-size"] = model.inner_size
    for what, size in whole.items():
        if size % unit:
            yield f"{size} {what}"
    for what, size in divided.items():
        if size % (parts * unit):
            yield f"{size / parts:g} {what}"


FP8_RULES: Sequence[Rule] = (
    _skipped,
    *rows("fp8"),
    _widths,
)
