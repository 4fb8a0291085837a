"""About what a microbatch keeps on a rank, where a step cannot be traced: while a search compares thousands of layouts,
and before torch is loaded. What a plan shows is traced (profile.py); a test holds the two together.

The estimate is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) for fused attention, with grouped
queries, gated MLPs and experts.
"""

from __future__ import annotations

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.activations import ACTIVATIONS
from megacore.config.dimensions import ranks_of_role
from megacore.config.logits import head_has_loss, logits_bytes, loss_chunks
from megacore.config.precision import ELEMENT_BYTES
from megacore.models.outline import ModelLayer
from megacore.models.size import vocabulary_rows
from megacore.pipeline.layer_time import linear_bytes
from megacore.plan.shared_results import once_per
from megacore.plan.state import expert_share

# Positions up to which attention with dropout on a CPU keeps all weights (ops/attention.py).
_LONGEST_WHOLE = 1024


@once_per("layers")
def residual_bytes(config: ResolvedConfig) -> float:
    """One tensor [b, s/p, h] of the residual stream: all that `--recompute full` keeps of a block."""
    split = _layer_ranks(config) if config.parallel.sequence_parallel else 1
    return _element(config) * _tokens(config) * config.model.hidden_size / split


@once_per("layers")
def block_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool, recompute: str) -> float:
    """What one block keeps.

    Args:
        config: a resolved configuration.
        block: the configuration of the block.
        on_cpu: whether operators run in plain torch, which keeps dropout masks, and weights of attention with dropout.
        recompute: `none`, `selective`, `light` or `full`, whatever the configuration says.
    """
    e, t, tokens, residual = _element(config), _layer_ranks(config), _tokens(config), residual_bytes(config)
    if recompute == "full":
        return residual / (t if config.training.distribute_saved_activations else 1)
    light = recompute == "light"
    gathered = t if config.parallel.may_split_backward and config.parallel.sequence_parallel else 1
    norms = residual * block.block_norms * (1 + gathered * (not light))
    gated = 2 * block.attention_output_gate  # the gate, and the result that it lets through
    heads = (2 + gated) * block.num_attention_heads + 2 * block.query_groups  # queries, the result, keys and values
    short = 0.0
    if block.multi_latent_attention:
        heads = 4 * block.num_attention_heads
        short = 2 * e * tokens * (block.kv_lora_rank + (block.q_lora_rank or 0))
    attention = e * tokens * heads * block.head_size / t + short
    if block.is_linear:
        attention = tokens * linear_bytes(block, e, kept=recompute != "selective") / t
    draws_whole = on_cpu and block.attention_dropout > 0 and config.data.seq_length <= _LONGEST_WHOLE
    keeps_weights = not block.is_linear and (config.training.attention == "fused-softmax" or draws_whole)
    if keeps_weights and recompute != "selective":
        of_weight = 12 if draws_whole else 2 * e + 1
        attention += of_weight * tokens * config.data.seq_length * block.num_attention_heads / t
    inner, routed = tokens * block.inner_size / t, 0.0
    if (share := expert_share(config, block)) is not None:
        inner = share.rows * share.inner + tokens * (share.experts.moe_shared_expert_size or 0) / t
        routed = 2 * e * share.rows * share.hidden + 4 * share.scored * share.hidden
    mlp = e * inner * (ACTIVATIONS[block.activation].kept - light)
    masks = 2 * residual / e if block.hidden_dropout and on_cpu else 0.0
    return norms + attention + mlp + routed + masks


@once_per("layers")
def layer_bytes(config: ResolvedConfig, layer: ModelLayer, *, on_cpu: bool, again: bool) -> float:
    """What a layer keeps; `again`: it is a block that is computed again in backward."""
    if layer.block is None:
        return head_bytes(config) if layer.name == "head" else 0.0
    recompute = config.training.recompute
    if recompute == "full" and not again:
        recompute = "none"
    # With multi-token prediction also the embedding, the joined pair and the norms' inputs.
    joined = 6 * residual_bytes(config) if layer.with_head and recompute != "full" else 0.0
    return joined + block_bytes(config, layer.block, on_cpu=on_cpu, recompute=recompute)


@once_per("layers")
def head_bytes(config: ResolvedConfig) -> float:
    """What the head keeps: its input with its norm and the logits; where it has the loss, the gradients of that input
    and, in fp32, of the weight instead."""
    depths = 1 + config.model.mtp_num_layers
    if not head_has_loss(config):
        return depths * (2 * residual_bytes(config) + logits_bytes(config))
    rows = vocabulary_rows(config.model, _layer_ranks(config))
    return depths * (2 * residual_bytes(config) + 4.0 * rows * config.model.hidden_size)


@once_per("layers")
def passing_logits(config: ResolvedConfig) -> float:
    """The chunk of the logits that exists for a moment where the head has the loss."""
    return logits_bytes(config) / loss_chunks(config) if head_has_loss(config) else 0.0


@once_per("layers")
def passing_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What exists for a moment in the backward of a block: gradients of the MLP's inner tensors, or the block that is
    computed again."""
    gradients = 2 * residual_bytes(config) + 2 * _element(config) * _tokens(config) * block.inner_size / _layer_ranks(
        config
    )
    if (recompute := config.training.recompute) not in ("full", "selective"):
        return gradients
    anew = block_bytes(config, block, on_cpu=on_cpu, recompute="none")
    if recompute == "full":
        return gradients + anew
    return max(gradients, anew - block_bytes(config, block, on_cpu=on_cpu, recompute=recompute))


@once_per("layers")
def waiting_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """Gradients of the outputs of a block's products, from which those of weights are computed."""
    heads = block.num_attention_heads * (1 + block.attention_output_gate)
    width = 2 * sum(block.linear_widths) if block.is_linear else (heads + 2 * block.query_groups) * block.head_size
    inner = float(block.inner_size)
    if (share := expert_share(config, block)) is not None:
        inner += share.rows / _tokens(config) * share.inner * _layer_ranks(config)
    inner *= 2 if block.gated else 1
    tokens = _element(config) * _tokens(config)
    return tokens * (width + inner) / _layer_ranks(config) + 2 * tokens * block.hidden_size


@once_per("layers")
def product_input_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """What the products of a block read: outputs of norms and of the activation, the result of attention."""
    values = block.linear_widths[1] if block.is_linear else block.num_attention_heads * block.value_size
    heads = _tokens(config) * values / _layer_ranks(config)
    inner = _tokens(config) * block.inner_size / _layer_ranks(config)
    return block.block_norms * residual_bytes(config) + _element(config) * (heads + inner)


def _layer_ranks(config: ResolvedConfig) -> int:
    return ranks_of_role("layer", config.parallel)


def _tokens(config: ResolvedConfig) -> int:
    """Of a microbatch, on a rank."""
    return config.training.micro_batch_size * config.rank_positions


def _element(config: ResolvedConfig) -> int:
    return ELEMENT_BYTES[config.precision.precision]
