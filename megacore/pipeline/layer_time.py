"""How long a layer takes beside the other layers of its model, by which pipeline stages are balanced.

The stages must be the same for every rank, for the planner and for a checkpoint's readers, before any device is known.
So the speeds are those of a typical device: a CPU core for fp32, an A100 for 16 bits. Only the ratios of layers count,
and these depend little on the device: products and attention take most of the time everywhere. Memory-bound work is
counted as in plan/stage_time.py, which predicts seconds on a given device; transfers are left out.
"""

from __future__ import annotations

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.bert import BertConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.flops import Attention, block_flops, join_flops, linear_flops
from megacore.models.outline import ModelLayer

# FLOP/s of products and bytes/s of memory, each the peak times the share of it that is usual; and FLOP/s in fp32.
_CORE, _A100 = (80e9 * 0.6, 8e9 * 0.7, 80e9 * 0.6), (312e12 * 0.83, 2039e9 * 0.82, 19.5e12 * 0.83)
# Elements that the memory-bound operators of a block read and write, in the order of the code: two norms (read, write),
# two residual sums with bias and dropout (read two, write one), of tensors [b, s, h]; of the inner width the activation
# (read one, or gate and up, write one); queries, keys and values moved to heads and back (read, write).
RESIDUAL_PASSES, HEAD_PASSES = 10.0, 4.0
LOGIT_PASSES = 4.0


def layer_seconds(config: ResolvedConfig, layer: ModelLayer) -> float:
    """Forward and backward of a microbatch on a typical device. `layer`: of a GPT or BERT: embedding, block or head."""
    flops_per_second, bandwidth, in_fp32 = _CORE if config.precision.precision == "fp32" else _A100
    t, e, tokens = ranks_of_role("layer", config.parallel), ELEMENT_BYTES[config.precision.precision], _tokens(config)
    sums = layer.parameters / t * (8.0 + e) / bandwidth  # of weights' gradients, in fp32
    if layer.block is not None:
        if layer.with_head:
            sums += 3.0 * tokens / t * join_flops(config.model) / flops_per_second
        return _block_seconds(config, layer.block, flops_per_second, bandwidth, in_fp32) + sums
    if layer.name == "embedding":
        return 3.0 * tokens * e * config.model.hidden_size / bandwidth + sums
    logits = LOGIT_PASSES * e * config.model.vocab_size / bandwidth
    return tokens / t * (3.0 * layer.flops / flops_per_second + logits) + sums


def _block_seconds(
    config: ResolvedConfig, block: ResolvedModel, flops_per_second: float, bandwidth: float, in_fp32: float
) -> float:
    t, e, tokens = ranks_of_role("layer", config.parallel), ELEMENT_BYTES[config.precision.precision], _tokens(config)
    sees: Attention = "full" if isinstance(config, BertConfig) else "causal"
    # A sequence of no keys leaves the products.
    products = block_flops(block, 0)
    attention = block_flops(block, config.data.seq_length, attention=sees) - products
    again = attention / 2  # backward of fused attention computes its scores once more
    if block.is_linear:  # as plan/stage_time.py has it, in FLOPs of that time
        products, again = products - linear_flops(block), 0.0
        seconds = chunk_flops(block) / in_fp32 + 2 * linear_bytes(block, e, kept=True) / bandwidth
        attention = seconds * flops_per_second
    heads = block.linear_widths[1] if block.is_linear else block.num_attention_heads * block.head_size
    width = block.inner_size if block.experts is None else block.experts.active_inner_size
    inner = (3 if block.gated else 2) * width
    residual = RESIDUAL_PASSES * block.hidden_size / (t if config.parallel.sequence_parallel else 1)
    memory = e * (residual + (inner + HEAD_PASSES * heads) / t) / bandwidth
    forward = (products + attention) / t / flops_per_second + memory
    # Whether backward computes the forward of a stage's last block again. Where only the first blocks of each stage are
    # computed again, like blocks add as much to every stage: that changes no balance.
    first, parallel = config.training.recompute_num_layers, config.parallel
    every = first is None or first * parallel.pp * parallel.virtual_stages >= config.model.num_layers
    passes = 4.0 if config.training.recompute == "full" and every else 3.0
    return tokens * (passes * forward + again / t / flops_per_second)


def chunk_flops(block: ResolvedModel) -> float:
    """Of linear attention's forward for a token, in fp32: products of chunks of 64 positions (ops/delta_rule.py)."""
    k, v, c = block.linear_key_head_dim, block.linear_value_head_dim, 64
    of_head = c * (5 * k + 3 * v) + 2 * k * (k + 3 * v) + 2 * k * k * v / c
    if block.is_mamba:  # which solves nothing
        of_head = 2 * c * (k + v) + 4 * k * v
    return block.linear_num_value_heads * of_head


def linear_bytes(block: ResolvedModel, e: int, *, kept: bool) -> float:
    """Of linear attention for a token. It keeps what the norm and the gate of its result read and give; selective
    recomputation keeps what is projected and the result. In fp32 (ops/delta_rule.py) what the convolution reads and
    gives, queries and keys of a group, keys and values of every head in some forms, and of a chunk of 64 positions
    matrices of its own size, one that passes states on, and states."""
    keys, values = block.linear_widths
    if not kept:
        return e * (2.0 * keys + 3.0 * values)
    k, v = block.linear_key_head_dim, block.linear_value_head_dim
    of_keys, of_head = 9 * keys, 2.5 * k + 4 * v + 7 * 64 + k * (k + 2.2 * v) / 64
    if block.is_mamba:
        of_keys, of_head = 6 * keys, 7 * v + 3.25 * 64 + 1.6 * k * v / 64
    return 5.0 * e * values + 4.0 * (3 * (2 * keys + values) + of_keys + block.linear_num_value_heads * of_head)


def _tokens(config: ResolvedConfig) -> int:
    """Tokens of a microbatch, on a rank."""
    return config.training.micro_batch_size * config.rank_positions
