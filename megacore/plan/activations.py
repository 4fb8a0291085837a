"""Bytes that a microbatch's forward keeps on a rank until its backward; docs/guides/memory.md derives each term.

The formula is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) for the layers as they are built here:
fused attention does not keep its weights, and tensors that two operators keep count once.

Legend: b micro-batch, s sequence, p ranks that divide it, h hidden size, n heads of d dimensions, g key and value
heads, f inner width of the MLP, V vocabulary, t tensor-parallel ranks, e bytes of an element.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from megacore.config import ResolvedConfig, ResolvedModel
from megacore.config.activations import ACTIVATIONS
from megacore.config.bert import BertConfig, ResolvedBertConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.reproducible import canonical_blocks
from megacore.models.size import (
    ELEMENT_BYTES,
    attention_matrices,
    logits_bytes,
    loss_chunks,
    short_matrices,
)
from megacore.plan.experts import combining_bytes, expert_share, routing_bytes
from megacore.plan.once import once_per_layers

LONGEST_WHOLE = 1024
"""The longest sequence for which `ops.attention` makes masks, biases and, with dropout on a CPU, weights whole."""
_BLOCK, _ALIBI_BLOCK = 512, 128  # queries of a block of longer ones; with ALiBi on a CPU
Operator = Literal[
    "norms", "products of norms", "attention", "activation", "product of the activation", "dropout", "routing", "block"
]
"""What keeps tensors in a block: `products of norms` the outputs of norms (qkv, gate, up), `attention` all between its
projections and its output, `product of the activation` the input of `down`, `routing` what sends tokens to experts;
`block` its input, if it is recomputed."""
_ALIGNMENT = 64  # bytes of which a head has a multiple where --reproducible computes the heads of a rank together


@once_per_layers
def residual_bytes(config: ResolvedConfig) -> float:
    """One tensor [b, s/p, h] of the residual stream: all that `--recompute full` keeps of a block."""
    split = _layer_ranks(config) if config.parallel.sequence_parallel else 1
    return _element(config) * _tokens(config) * config.model.hidden_size / split


@once_per_layers
def block_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool, recompute: str) -> float:
    """What one block keeps: the sum of `kept_by_operator`, whose arguments these are."""
    return sum(kept_by_operator(config, block, on_cpu=on_cpu, recompute=recompute).values())


def kept_by_operator(
    config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool, recompute: str
) -> dict[Operator, float]:
    """What each operator of one block keeps; a tensor that two operators keep counts for the first.

    Args:
        config: a resolved configuration.
        block: the configuration of the block, which may differ from `config.model` in its window.
        on_cpu: whether operators run in plain torch, which keeps more for RMSNorm and dropout.
        recompute: `none`, `selective`, `light` or `full`, whatever the configuration says.
    """
    residual = residual_bytes(config)
    if recompute == "full":
        return {"block": residual / (_layer_ranks(config) if config.training.distribute_saved_activations else 1)}
    e, t, tokens = _element(config), _layer_ranks(config), _tokens(config)
    split = t if config.parallel.sequence_parallel else 1
    # A kernel draws its dropout mask again in backward; plain torch keeps two, and compiled code may.
    draws_again = not on_cpu and config.training.kernels != "torch" and not config.training.compile
    draws_again = draws_again and canonical_blocks(config) == 1  # each block of positions has a mask of its number
    masks = 2 / e if block.hidden_dropout and not draws_again else 0.0
    light = recompute == "light" and not config.training.compile
    # The output of BERT's second norm is the residual stream, which the next block keeps.
    outputs = 2 if not light else 1 if isinstance(config, BertConfig) and not config.bert.packed else 0
    outputs = min(outputs, block.block_norms)
    share, routing = expert_share(config, block), 0.0
    inner = e * tokens * block.inner_size / t
    if share is not None:
        of_shared = share.experts.moe_shared_expert_size
        outputs -= 0 if light or (of_shared and e < 4) else 1  # the router keeps its input in fp32, maybe the same
        inner = e * (share.rows * share.inner + tokens * (of_shared or 0) / t)
        routing = routing_bytes(share, e, exchanges=config.parallel.ep > 1, keeps_input=not light or e < 4)
    if config.parallel.sequence_parallel and (config.training.reproducible or config.parallel.may_split_backward):
        outputs = (2 if share is None else outputs) * t  # gathered, where the gradients of weights are computed apart
    activated = 0 if block.activation == "relu" else 1  # ReLU keeps its output itself
    of_activation = ACTIVATIONS[block.activation].kept - activated
    if block.activation.startswith("geglu") and (on_cpu or not config.training.compile):
        of_activation += 1  # the activated gate: no kernel computes GeGLU
    attention = _attention_bytes(config, block, on_cpu=on_cpu, recompute=recompute)
    norms = block.block_norms * tokens / split * _norm_bytes(config, block, block.hidden_size, on_cpu=on_cpu)
    # What the second norm of a parallel block reads is the input of the first.
    return {
        "norms": residual * _norm_inputs(block) + norms,
        "products of norms": residual * outputs,
        "attention": attention + e * tokens * block.num_attention_heads * block.value_size / t,
        "activation": inner * of_activation,
        "product of the activation": inner * (0 if light else activated),
        "dropout": residual * masks,
        "routing": routing,
    }


@once_per_layers
def activation_gradient_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """Gradients of activations in the backward of a block, when they take most beside what the block keeps: in the MLP
    or in attention."""
    in_mlp = mlp_gradient_bytes(config, block, on_cpu=on_cpu)
    return max(in_mlp, attention_gradient_bytes(config, block, on_cpu=on_cpu))


def mlp_gradient_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """The same in the MLP: of the output and the input of `down`, when the block has freed nothing."""
    tokens, e = _tokens(config), _element(config)
    gathered = e * tokens * block.hidden_size if config.parallel.sequence_parallel else 0.0
    mlp = e * tokens * block.inner_size / _layer_ranks(config)
    if expert_share(config, block) is not None:
        mlp = _expert_gradients(config, block, on_cpu=on_cpu)
    return residual_bytes(config) + gathered + mlp


@once_per_layers
def attention_gradient_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """The same in attention: of its weights, as far as these are kept, and what a block of queries needs. Where it
    computes scores of the whole sequence, with a soft cap on blocks of queries, and where ranks divide sequences, it is
    less what backward has freed by then."""
    if _makes_scores(config, block, on_cpu=on_cpu):
        before = residual_bytes(config) - _freed_before_attention(config, block, on_cpu=on_cpu)
        return before + _score_gradient_bytes(config, block, stays=False, on_cpu=on_cpu)
    attention = attention_core_bytes(config, block, on_cpu=on_cpu)
    attention += attention_passing_bytes(config, block, on_cpu=on_cpu)
    if not attention_is_later(config, block, on_cpu=on_cpu):
        return attention
    attention -= _freed_before_attention(config, block, on_cpu=on_cpu)
    if block.attn_logit_softcapping is not None:
        return attention + _tile_sums_bytes(config, block)
    result = _tokens(config) * block.num_attention_heads * block.value_size / _layer_ranks(config)
    return attention + residual_bytes(config) + _element(config) * result


def attention_is_later(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> bool:
    """Whether `attention_gradient_bytes` is of a moment at which the MLP's backward is done, so that the gradient of
    the block's output has been replaced by another one."""
    if not attends_in_blocks(config, block, on_cpu=on_cpu):
        return False
    return block.attn_logit_softcapping is not None or _gathered_bytes(config, block, on_cpu=on_cpu) > 0


def attention_gradients_are_exact(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> bool:
    """Whether `attention_gradient_bytes` is what exists in attention's backward, with what the MLP has freed taken off,
    and not only an upper bound."""
    return _makes_scores(config, block, on_cpu=on_cpu) or attention_is_later(config, block, on_cpu=on_cpu)


@once_per_layers
def input_half_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """Of a split backward, what exists in the half for inputs at the gradient of a block's scores, less the gradients
    that wait for those of weights and come after it. It frees nothing but what it has computed again and, of what was
    fetched from host memory, what it has read. 0 where attention makes no scores of the whole sequence."""
    if not _makes_scores(config, block, on_cpu=on_cpu):
        return 0.0
    offloads = config.training.offload_activations and not on_cpu
    stays = config.training.recompute not in ("selective", "full") and not offloads
    here = _layer_ranks(config) if config.parallel.sequence_parallel else 1
    projected = sum(rows for rows, _ in attention_matrices(block)[:-1]) / _layer_ranks(config)
    projected += sum(rows for rows, _ in short_matrices(block)) / here
    later = _element(config) * _tokens(config) * projected + residual_bytes(config)  # of the norm too
    if offloads and not block.parallel_residual:
        later += kept_by_operator(config, block, on_cpu=on_cpu, recompute="none")["activation"] + residual_bytes(config)
    return _score_gradient_bytes(config, block, stays=stays, on_cpu=on_cpu) - later


def _makes_scores(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> bool:
    """Whether attention makes the scores of the whole sequence, [b, n/t, s, s], as a tensor."""
    return config.training.attention == "fused-softmax" and not attends_in_blocks(config, block, on_cpu=on_cpu)


def _score_gradient_bytes(config: ResolvedConfig, block: ResolvedModel, *, stays: bool, on_cpu: bool) -> float:
    """The gradients from that of attention's result to that of its scores, where they take most, less what they have
    freed of attention by then; `stays`: they free nothing. The steps of this backward:

    - the mix gives the gradients of the values and of what it mixes. The result and, after it, what was mixed is freed;
    - dropout gives that of the weights, and frees its mask;
    - weights in another dtype than that of the softmax have their gradient in this one too;
    - the softmax gives that of the scores, and frees its output;
    - a soft cap gives that of scores in fp32 from another one.
    """
    e, kept = _element(config), _kept_of_weight(config, block, on_cpu=on_cpu)
    weights = _tokens(config) * config.data.seq_length * block.num_attention_heads / _layer_ranks(config)
    mixed = e * _tokens(config) * block.num_attention_heads * block.value_size / _layer_ranks(config)
    freed = kept._replace(**dict.fromkeys(kept._fields, 0)) if stays else kept
    steps = [2 * kept.softmax - freed.mixed - freed.mask]
    if kept.mask:
        steps.append(2 * e - freed.mixed)
    if kept.softmax != e:
        steps.append(e + kept.softmax - freed.mixed - freed.mask)
    if kept.tangent:
        steps.append(2 * kept.tangent - freed.mixed - freed.mask - freed.softmax)
        if not stays:  # when they are computed, the scores, and three tensors in fp32
            steps.append(e + 3 * kept.tangent - sum(kept))
    # Of the result's gradient a copy in the order of heads; the gradient of the values replaces these, and is summed
    # over the heads that share values.
    queries, keys = _attention_widths(config, block)
    summed = (1 - keys / queries) * mixed
    later = max(steps) * weights + (1 if stays else -1) * mixed - summed
    return max(e * weights + (2 if stays else 1) * mixed, later)


class _OfWeight(NamedTuple):
    """Bytes that each number of whole weights takes until its backward.

    Attributes:
        softmax: its output.
        mixed: what is multiplied with values, where that is another tensor.
        mask: of dropout.
        tangent: the hyperbolic one of a soft cap.
    """

    softmax: int
    mixed: int
    mask: int
    tangent: int


def _kept_of_weight(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> _OfWeight:
    e, dropout = _element(config), block.attention_dropout > 0
    # Beyond causality and windows it is torch's softmax, in fp32.
    softmax = 4 if block.position_embedding_type == "alibi" or _has_documents(config) else e
    # torch has no fused dropout on a CPU; `ops.attention` masks 16 bits itself.
    mask = 4 if on_cpu and e == 4 else 1
    mixed = e if dropout or softmax != e else 0
    return _OfWeight(softmax, mixed, mask if dropout else 0, 4 if block.attn_logit_softcapping is not None else 0)


def _expert_gradients(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What the backward of experts adds to what the block keeps, when that is most: the gradients of the rows that came
    back; or as in `_beside_experts`."""
    share, e = expert_share(config, block), _element(config)
    assert share is not None
    gradients = max(e * share.rows * share.hidden, *_beside_experts(config, block, on_cpu=on_cpu))
    if on_cpu or config.training.kernels == "torch":  # a kernel keeps no terms of the weights' gradients
        gradients = max(gradients, combining_bytes(share, e))
    return gradients


def _beside_experts(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> list[float]:
    """What exists more than the block keeps, without the gradient of its output, from the gradient of each matrix of
    the experts to that of the next, in the order of backward.

    - `down`: the gradient of its input, and those of its output in place of the rows that came back. In the activation
      the gradients of rows are freed, those of gate and up exist, and that of the activated tensor in its place.
    - `up` of a gate: both gradients, or that of the gate, those of the rows by gate and up, and their sum.
    - the last: its output's gradient, and those of rows in place of the rows that came back.
    """
    share, e = expert_share(config, block), _element(config)
    assert share is not None
    rows, inner = e * share.rows * share.hidden, e * share.rows * share.inner
    kept = _kept_inside(config, block, on_cpu=on_cpu)
    first = max(inner, (share.matrices - 1) * inner - rows)
    second = [max(2 * inner, inner + 2 * rows) - kept] if block.gated else []
    return [first, *second, inner - kept]


def _kept_inside(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool, recompute: str = "none") -> float:
    """Tensors of the inner width that a block keeps; `none`: where nothing, or all, has been computed again."""
    kept = kept_by_operator(config, block, on_cpu=on_cpu, recompute=recompute)
    return kept.get("activation", 0.0) + kept.get("product of the activation", 0.0)


@once_per_layers
def freed_by_experts(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> list[float]:
    """Of what a block with experts keeps and of `activation_gradient_bytes`, that which does not exist when the
    gradient of each of their matrices is added, in the order of backward, and after them."""
    most = activation_gradient_bytes(config, block, on_cpu=on_cpu) - residual_bytes(config)
    if config.parallel.sequence_parallel:
        most -= _element(config) * _tokens(config) * block.hidden_size
    kept = kept_by_operator(config, block, on_cpu=on_cpu, recompute="none")
    core = attention_core_bytes(config, block, on_cpu=on_cpu) + attention_passing_bytes(config, block, on_cpu=on_cpu)
    if _makes_scores(config, block, on_cpu=on_cpu):
        core = attention_gradient_bytes(config, block, on_cpu=on_cpu)
        core += _freed_before_attention(config, block, on_cpu=on_cpu)
    after = _kept_inside(config, block, on_cpu=on_cpu) + kept["routing"] + max(most - core, 0.0)
    return [*(max(most - beside, 0.0) for beside in _beside_experts(config, block, on_cpu=on_cpu)), after]


@once_per_layers
def freed_in_weight_half(config: ResolvedConfig, block: ResolvedModel, products: int, *, on_cpu: bool) -> list[float]:
    """Of what a split backward keeps of a block, that which the half for weights has freed when it comes to each of the
    MLP's `products`, and after them. With `down` go the tensors of the inner width, with `up` and `gate` the gradients
    of their outputs, and with the last also the output of the norm. Of a block without experts."""
    first = _kept_inside(config, block, on_cpu=on_cpu, recompute=config.training.recompute)
    gradients = inner_bytes(config, block) * (2 if block.gated else 1)
    freed = [0.0, *(first + gradients * number / (products - 1) for number in range(products))]
    return [*freed[:-1], freed[-1] + residual_bytes(config)]


def forward_passing_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """What exists beside what a block keeps when its experts' rows come back to their ranks: these rows as the experts
    gave them and in the order in which they came, and the norm's output. 0 where nothing travels."""
    share = expert_share(config, block)
    if share is None or config.parallel.ep == 1:
        return 0.0
    return 2 * _element(config) * share.rows * share.hidden + residual_bytes(config)


@once_per_layers
def halves_gradient_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """Gradients of activations in the backward of SwiGLU, less its output, which is freed: of the block's output, of
    the input of `down`, and of both halves. 0 with another activation and with experts."""
    if on_cpu or block.activation != "swiglu" or expert_share(config, block) is not None:
        return 0.0
    return residual_bytes(config) + 2 * inner_bytes(config, block)


def _tile_sums_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """Beside the tiles of scores in the backward of attention with a soft cap: the gradients of the residual stream, of
    attention's result and of the queries; those of keys and values in fp32; and of a block of queries five tensors in
    fp32, with 16 bits one more."""
    e, t, d = _element(config), _layer_ranks(config), block.head_size
    width = block.num_attention_heads * d / t
    keys = 2 * d * max(block.query_groups / t, 1)
    of_block = 4 * config.training.micro_batch_size * min(_BLOCK, config.data.seq_length) * width
    return residual_bytes(config) + _tokens(config) * (2 * e * width + 4 * keys) + (5 if e == 4 else 6) * of_block


def _freed_before_attention(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What backward has freed of a block where it comes to attention: the MLP's activations with what sent tokens to
    its experts, and the input of its norm, with the output unless that is computed again."""
    if block.parallel_residual:
        return 0.0
    kept, residual = kept_by_operator(config, block, on_cpu=on_cpu, recompute="none"), residual_bytes(config)
    is_light = config.training.recompute == "light" and not config.training.compile
    output = 0.0 if is_light else min(max(kept["products of norms"] - residual, 0.0), residual)
    return kept["activation"] + kept["product of the activation"] + kept["routing"] + residual + output


def _norm_inputs(block: ResolvedModel) -> int:
    """Different inputs of the norms of a block's inputs and outputs: two norms of a parallel block read the same."""
    return 1 if block.parallel_residual else block.block_norms


def inner_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """One tensor of the MLP's inner width, of all experts where the block has them."""
    share = expert_share(config, block)
    inner = _tokens(config) * block.inner_size / _layer_ranks(config) if share is None else share.rows * share.inner
    return _element(config) * inner


def shared_inner_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """One tensor of the inner width of the expert that every token uses; 0 where there is none."""
    width = 0 if block.experts is None else block.experts.moe_shared_expert_size or 0
    return _element(config) * _tokens(config) * width / _layer_ranks(config)


@once_per_layers
def kept_gradient_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """What a split backward keeps of a block for the gradients of its weights: the gradients of the outputs of all
    operators with weights, the two norms included. A norm also has the residual stream, whose gradient is that of the
    product before it, unless sequence parallelism gathers that one, or dropout masks it."""
    split = sum(rows for rows, _ in attention_matrices(block)[:-1])  # of qkv, or those from short vectors
    share, of_experts = expert_share(config, block), 0.0
    gated, mlps = 2 if block.gated else 1, 1
    inner = block.inner_size
    if share is not None:
        of_experts = _element(config) * share.rows * (gated * share.inner + share.hidden)
        inner = share.experts.moe_shared_expert_size or 0
        mlps = min(inner, 1)
    split += inner * gated  # of gate and up
    norms = _norm_inputs(block)
    whole = _element(config) * _tokens(config)
    here = _layer_ranks(config) if config.parallel.sequence_parallel else 1
    short = sum(rows for rows, _ in short_matrices(block)) / here
    is_apart = config.parallel.sequence_parallel or block.hidden_dropout > 0
    residuals = norms * residual_bytes(config) * (2 if is_apart else 1) + of_experts
    return whole * (split / _layer_ranks(config) + short + (1 + mlps) * block.hidden_size) + residuals


def product_input_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """What the products of a block read: outputs of norms and of the activation, the result of attention."""
    kept = kept_by_operator(config, block, on_cpu=False, recompute="none")
    result = _element(config) * _tokens(config) * block.num_attention_heads * block.value_size / _layer_ranks(config)
    return kept["products of norms"] + kept["product of the activation"] + result


@once_per_layers
def attention_core_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What `--recompute selective` drops of a block."""
    whole = _attention_bytes(config, block, on_cpu=on_cpu, recompute="none")
    return max(whole - _attention_bytes(config, block, on_cpu=on_cpu, recompute="selective"), 0.0)


@once_per_layers
def attention_again_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What exists once more when `--recompute selective` computes attention again: what it drops, and where that is
    whole weights also queries, keys and values in the order of heads."""
    core = attention_core_bytes(config, block, on_cpu=on_cpu)
    if _makes_scores(config, block, on_cpu=on_cpu):
        widths = block.num_attention_heads * (2 * block.head_size + block.value_size)
        core += _element(config) * _tokens(config) * widths / _layer_ranks(config)
        core -= _repeated_heads_bytes(config, block)
    return core


def _attention_widths(config: ResolvedConfig, block: ResolvedModel) -> tuple[float, float]:
    """Of a token's queries, and of its keys or values."""
    n, d, t = block.num_attention_heads, block.head_size, _layer_ranks(config)
    if block.multi_latent_attention:
        width = n * max(d, block.v_head_dim) / t
        return width, width
    # Where blocks of positions are canonical each block of queries has a copy of its key and value.
    return n * d / t, d * max(block.query_groups / t, canonical_blocks(config) / t, 1)


def _attention_input_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """Queries, keys and values as attention takes them."""
    n, g, d, t = block.num_attention_heads, block.query_groups, block.head_size, _layer_ranks(config)
    whole, (queries, keys) = _element(config) * _tokens(config), _attention_widths(config, block)
    if block.qk_layernorm or block.position_embedding_type == "rope":
        return whole * (queries + 2 * keys)
    # Views of the projection, but grouped queries are copied; ranks that share a group exchange theirs.
    projected = (n + 2 * g) * d / (t if t <= g else 1)
    return whole * (projected + (queries if g < n else 0.0))


def _repeated_heads_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    """By how much the keys and values of grouped queries grow where attention makes scores: it repeats them for each
    head, and scales the queries."""
    queries, keys = _attention_widths(config, block)
    if queries <= keys:
        return 0.0
    return 3 * _element(config) * _tokens(config) * queries - _attention_input_bytes(config, block)


def _attention_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool, recompute: str) -> float:
    """Queries, keys and values, and what mixing them keeps; with norms of queries and keys, and limits, also what these
    keep."""
    e, t, s, tokens = _element(config), _layer_ranks(config), config.data.seq_length, _tokens(config)
    n, g, d = block.num_attention_heads, block.query_groups, block.head_size
    queries, keys = _attention_widths(config, block)
    normed, copies = 0.0, canonical_blocks(config)
    if block.multi_latent_attention:
        normed, width = _short_bytes(config, block, on_cpu=on_cpu), queries
        if block.v_head_dim >= d:  # values are views of the projection that gives keys too
            normed += e * tokens * n * block.qk_nope_head_dim / t
        elif recompute != "selective":  # the result, of which the output layer keeps the part that counts
            normed += e * tokens * width
    elif block.qk_layernorm:
        # The rows that norms take: each head, or the queries and the keys.
        rows = [(n / t, d), (max(g / t, 1), d)]
        if block.qk_layernorm_all_heads:
            rows = [(1, n * d // t), (1, max(g * d // t, d))]
        kept = sum(number * _norm_bytes(config, block, size, on_cpu=on_cpu) for number, size in rows)
        normed = tokens * (e * (queries + keys) * (2 if block.qk_layernorm_per_head else 1) + kept)
    if block.clip_qkv is not None:  # what is clipped
        normed += e * tokens * (queries + 2 * keys if block.qk_layernorm else (n + 2 * g) * d / t)
    taken = _attention_input_bytes(config, block)
    if recompute == "selective":
        return normed + taken
    weights, dropout = tokens * s * n / t, block.attention_dropout > 0
    logarithms = 4 * tokens * n / t  # of the softmax's sums
    if _has_documents(config) and config.padded_documents:
        logarithms += e * tokens * queries  # the result, which the product reads with zeros for padding
    if exchanges_heads(config):
        logarithms += e * tokens * queries  # the result before and after it is exchanged
    if copies > 1 and (dropout or d * e % _ALIGNMENT):
        logarithms += e * tokens * queries  # the results of blocks of heads, which the product reads joined
    if attends_in_blocks(config, block, on_cpu=on_cpu):
        return normed + taken + logarithms
    if config.training.attention == "fused-softmax":
        taken += _repeated_heads_bytes(config, block)
        return normed + taken + sum(_kept_of_weight(config, block, on_cpu=on_cpu)) * weights
    if dropout and on_cpu:  # no fused operator: in fp32, a key and a value for each query, and all weights as above
        return normed + 4 * 3 * tokens * queries + 12 * weights
    return normed + taken + logarithms + (e * tokens * s if _has_documents(config) else 0.0)


def _short_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What latent attention keeps of its short vectors: as they are, normalised, and what the norms keep."""
    e = _element(config)
    tokens = _tokens(config) / (_layer_ranks(config) if config.parallel.sequence_parallel else 1)
    sizes = [block.kv_lora_rank, *filter(None, [block.q_lora_rank])]
    normed = sum(e * size + _norm_bytes(config, block, size, on_cpu=on_cpu) for size in sizes)
    # Without norms the short vector of keys is a view of what the rotated part comes from.
    return tokens * (e * sum(sizes) + (normed if block.qk_layernorm else e * block.qk_rope_head_dim))


def attends_in_blocks(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> bool:
    """Whether attention takes a block of queries at a time: where torch's operator would need masks or weights, and the
    sequence is long; where scores have a soft cap, which it does not know; and where ranks divide sequences."""
    s = config.data.seq_length
    if config.rank_positions < s and (config.context_comm != "ulysses" or copies_keys(config, block)):
        return True
    if config.training.attention == "fused-softmax":
        return False
    if block.attn_logit_softcapping is not None or s <= LONGEST_WHOLE:
        return block.attn_logit_softcapping is not None
    return _is_masked(config, block) or (on_cpu and block.attention_dropout > 0)


def _is_masked(config: ResolvedConfig, block: ResolvedModel) -> bool:
    """Whether anything but causality decides the weights."""
    windowed = _has_window(block, config.data.seq_length)
    return block.position_embedding_type == "alibi" or _has_documents(config) or windowed


def attention_passing_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What exists while attention is computed, and again in its backward: on a CPU the mask or bias of a block of
    queries, in fp32 and as it is made, with dropout or a soft cap tiles of weights; and what ranks that divide
    sequences gather."""
    if not attends_in_blocks(config, block, on_cpu=on_cpu):
        return 0.0
    takes_tiles = block.attn_logit_softcapping is not None  # on every device
    masked = takes_tiles or (on_cpu and (_is_masked(config, block) or block.attention_dropout > 0))
    masks = _block_mask_bytes(config, block) if masked else 0.0
    return masks + _gathered_bytes(config, block, on_cpu=on_cpu)


def _block_mask_bytes(config: ResolvedConfig, block: ResolvedModel) -> float:
    s, b, heads = config.data.seq_length, config.training.micro_batch_size, block.num_attention_heads
    heads_here = heads / _layer_ranks(config)
    if block.attention_dropout > 0 or block.attn_logit_softcapping is not None:
        # Weights and their gradients; the cap's slope; with dropout its mask, and what it leaves.
        tiles = 5 if block.attention_dropout > 0 else 3
        return tiles * 4 * b * heads_here * min(_BLOCK, s) ** 2
    keys = s if not _has_window(block, s) else min(s, (block.window_size or s) + _BLOCK)
    queries = config.rank_positions if config.rank_positions < s else _BLOCK
    if block.position_embedding_type == "alibi":
        return 2 * 4 * (b if _has_documents(config) else 1) * heads_here * min(_ALIBI_BLOCK, queries) * keys
    return (4 + 2) * (b if _has_documents(config) else 1) * min(_BLOCK, queries) * keys


def _gathered_bytes(config: ResolvedConfig, block: ResolvedModel, *, on_cpu: bool) -> float:
    """What the backward of attention makes where ranks divide sequences: gradients are in fp32.

    - Gathered: keys and values of the whole sequence, and their gradients, of one range of queries and of both, with
      those of both ranges of queries, which are rounded; then the gradients of keys and values of both ranges, as they
      are sent and as they are summed, and those of the queries, rounded.
    - In a ring: a share of keys and values, with three ranks or more also the next one; the gradients of the queries
      and of the own share; and of another share the gradients, and zeros to which they are added. With three ranks or
      more these are there when a third share is computed with, and others arrive in their place.

    On a CPU also what torch's operator returns for a block.
    """
    ranks = config.data.seq_length // config.rank_positions
    queries = _tokens(config) * block.num_attention_heads * block.head_size / _layer_ranks(config)
    if config.context_comm == "ulysses":  # gradients of copied keys in fp32: of whole sequences, and as they are sent
        copied = 2.0 * config.training.micro_batch_size * config.data.seq_length * block.head_size
        return 4 * (2 * copied + queries) if copies_keys(config, block) else 0.0
    if ranks == 1:
        return 0.0
    e, keys, returned = _element(config), gathered_keys(config, block), 4 if on_cpu else 0
    if config.context_comm == "ring":
        if ranks == 2:
            return keys / ranks * (e + 3 * 4 + returned) + 4 * queries
        share, on_way = keys / ranks, 2 * e * keys / ranks
        of_pair = max(share + queries / 2, share / 2 + queries)  # the later half of the queries, or the earlier keys
        return on_way + share * (3 * 4 + returned) + 4 * queries + 4 * of_pair
    of_range = (4 + (2 * e if e < 4 else e)) * queries / 2
    return max(keys * (e + 2 * 4 + returned) + of_range, keys * (2 * 4 + 4 / ranks) + e * queries)


def exchanges_heads(config: ResolvedConfig) -> bool:
    """Whether ranks exchange positions for heads, and attend over whole sequences."""
    return config.parallel.cp > 1 and config.context_comm == "ulysses"


def copies_keys(config: ResolvedConfig, block: ResolvedModel) -> bool:
    """Whether ranks that exchange positions for heads get copies of a key head, because there are fewer than ranks."""
    held = max(block.query_groups // _layer_ranks(config), 1)
    return config.context_comm == "ulysses" and held < config.parallel.cp


def gathered_keys(config: ResolvedConfig, block: ResolvedModel) -> float:
    """Numbers in the keys and values of a microbatch's sequences, which ranks that divide them gather in a block."""
    width = block.head_size * max(block.query_groups / _layer_ranks(config), 1)
    return 2.0 * config.training.micro_batch_size * config.data.seq_length * width


def _has_window(block: ResolvedModel, length: int) -> bool:
    return block.window_size is not None and block.window_size < length


def _norm_bytes(config: ResolvedConfig, block: ResolvedModel, size: int, *, on_cpu: bool) -> float:
    """What a norm keeps for each row besides its input and output."""
    e = _element(config)
    if block.normalization == "LayerNorm":
        return 2 * (e if on_cpu else 4)  # mean and deviation
    if config.training.compile or (block.norm_affine and not on_cpu):
        return 4
    # Plain torch: in fp32 the input, in place of the one of the run's dtype, and what a weight multiplies.
    return 4 + size * ((8 if block.norm_affine else 4) - e)


@once_per_layers
def shared_bytes(config: ResolvedConfig) -> float:
    """What all blocks of a rank share: the cosines and sines of rotary positions, [s, r/2] fp32 each; and where the
    sequence is short, ALiBi's bias [n/t, s, s], or the mask of a window [s, s] and its bias."""
    e, s, model = _element(config), config.data.seq_length, config.model
    tables = 4.0 * s * model.rotary_dimensions if model.position_embedding_type == "rope" else 0.0
    if config.rank_positions < s:
        tables *= 1 + config.rank_positions / s  # those of this rank's positions too
    if config.rank_positions < s or _has_documents(config):
        return tables
    scores = config.training.attention == "fused-softmax"
    if not scores and (s > LONGEST_WHOLE or model.attn_logit_softcapping is not None):
        return tables
    if model.position_embedding_type == "alibi":
        return e * s * s * model.num_attention_heads / _layer_ranks(config)
    return tables + ((1 + e) * s * s if _has_window(model, s) and not scores else 0.0)


@once_per_layers
def head_bytes(config: ResolvedConfig) -> float:
    """What exists in the head while its gradients are computed: `_head_tensors` and a chunk of logits, with a soft cap
    also its derivative; with several chunks also the sum of the input's gradient in fp32."""
    chunks = loss_chunks(config)
    summed = 4.0 * _tokens(config) * config.model.hidden_size if chunks > 1 else 0.0
    capped = config.model.final_logit_softcapping is not None
    copies = (2 if chunks > 1 else 3) if capped else 1  # whole, autograd makes two gradients beside the tangent
    return copies * logits_bytes(config) / chunks + _head_tensors(config) * residual_bytes(config) + summed


def head_freed_bytes(config: ResolvedConfig) -> float:
    """Of `head_bytes` what is freed when the gradients of the output layer's input and weight are computed."""
    return head_bytes(config) - _head_tensors(config) * residual_bytes(config)


def head_kept_bytes(config: ResolvedConfig) -> float:
    """What the head keeps of a microbatch until its backward: `_head_tensors` and the logits, with a soft cap also a
    hyperbolic tangent of each, unless they are computed in chunks."""
    logits = logits_bytes(config) if loss_chunks(config) == 1 else 0.0
    logits *= 1 if config.model.final_logit_softcapping is None else 2
    return logits + _head_tensors(config) * residual_bytes(config)


def _head_tensors(config: ResolvedConfig) -> int:
    """Tensors [b, s/p, h] that the head keeps: its input and the norm's output. BERT's transform adds its output and
    that of GELU, and where the blocks end without a norm the output of another one."""
    if not isinstance(config, ResolvedBertConfig):
        return 2
    return 5 if config.bert.packed else 4


def embedding_kept_bytes(config: ResolvedConfig) -> float:
    """The input of a norm after the embedding, and the mask of dropout. No input is counted for ModernBERT's, whose
    first block has one norm fewer than the others, and keeps as much less."""
    mask = residual_bytes(config) / _element(config) if config.model.hidden_dropout else 0.0
    if isinstance(config, ResolvedBertConfig):
        return mask + (0.0 if config.bert.packed else residual_bytes(config))
    return mask + (residual_bytes(config) if config.model.embedding_layernorm else 0.0)


def _has_documents(config: ResolvedConfig) -> bool:
    """Whether every position carries the number of its document, as BERT's do, and those of packed documents."""
    return "documents" in config.beside_hidden_states


def _layer_ranks(config: ResolvedConfig) -> int:
    return ranks_of_role("layer", config.parallel)


def _tokens(config: ResolvedConfig) -> int:
    """Of a microbatch, on a rank."""
    return config.training.micro_batch_size * config.rank_positions


def _element(config: ResolvedConfig) -> int:
    return ELEMENT_BYTES[config.precision.precision]
