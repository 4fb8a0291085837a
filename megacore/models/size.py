"""How many parameters each layer has, before any of it exists: the whole layer, or what one tensor-parallel rank holds.
Tests compare them with the parameters that are built, and the sums with the published ones. No torch.

Legend: h hidden size, n heads of d dimensions, g key and value heads, f inner width of the MLP, V vocabulary, t
tensor-parallel ranks, E experts.
"""

from __future__ import annotations

from megacore.config import ResolvedExperts, ResolvedModel
from megacore.config.bert import ResolvedBertConfig
from megacore.config.model import padded_rows


def embedding_parameters(config: ResolvedModel, tp: int | None = None) -> int:
    """Token table V h, a norm, a position table. `tp`: count what one of tp tensor-parallel ranks holds, including the
    vocabulary's padding. None: count the whole layer, without padding."""
    norm = norm_parameters(config) if config.embedding_layernorm else 0
    learned = config.position_embedding_type == "learned"
    positions = config.position_rows * config.hidden_size if learned else 0
    return vocabulary_rows(config, tp) * config.hidden_size + norm + positions


def block_parameters(config: ResolvedModel, tp: int | None = None, *, expert_ranks: int = 1) -> int:
    """Attention h d (2 n + 2 g) or with short vectors, MLP 2 h f or, gated, 3 h f, or experts; biases; one to four
    norms. Every rank holds the norms and the biases of the two layers that write to the residual stream.
    `expert_ranks`: ep x etp."""
    h, f, t = config.hidden_size, config.inner_size, tp or 1
    into = 2 if config.gated else 1  # matrices that lead into the MLP's inner width
    mixture, mlp = 0, (into + 1) * h * f
    if config.experts is not None:
        mixture = mixture_parameters(config, config.experts, tp, expert_ranks=expert_ranks)
        into = mlp = 0
    weights = sum(rows * columns for rows, columns in attention_matrices(config).values()) + mlp
    heads = config.num_attention_heads
    projected = (heads * (1 + config.attention_output_gate) + 2 * config.query_groups) * config.head_size
    split_biases = into * f if config.mlp_bias else 0
    whole_biases = config.mlp_bias * h
    if config.is_linear:  # the convolution, two numbers of each head's decay; of Mamba-2 a bias, and a third number
        (keys, values), mamba = config.linear_widths, config.is_mamba
        split_biases += (2 * keys + values) * (config.linear_conv_kernel_dim + mamba)
        split_biases += (2 + mamba) * config.linear_num_value_heads
    else:
        split_biases += (projected if config.qkv_bias else 0) + (heads if config.softmax_type == "learnable" else 0)
        whole_biases += config.attention_output_bias * h
    whole = whole_biases + whole_attention_parameters(config) + config.block_norms * norm_parameters(config)
    return (weights + split_biases) // t + whole + mixture


def prediction_parameters(config: ResolvedModel, depth: int, tp: int | None = None) -> int:
    """What a block of multi-token prediction has besides a block: the token table, which is tied, the join 2 h^2, and
    norms of both inputs and the output; the first one also the model's final norm. `tp` as for `embedding_parameters`.
    """
    h, norms = config.hidden_size, 4 if depth == 0 else 3
    return (vocabulary_rows(config, tp) + 2 * h) * h + norms * norm_parameters(config)


def attention_matrices(config: ResolvedModel) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of attention that tensor-parallel ranks split, by name; the output is last."""
    h, n, d = config.hidden_size, config.num_attention_heads, config.head_size
    if config.is_linear:
        keys, values = config.linear_widths
        return {"qkvz": (2 * (keys + values), h), "out": (h, values)}
    if not config.multi_latent_attention:
        gate = {"gate": (n * d, h)} if config.attention_output_gate else {}
        return {"qkv": ((n + 2 * config.query_groups) * d, h), **gate, "output": (h, n * d)}
    latent, values = config.kv_lora_rank, n * config.v_head_dim
    query = ("query", h) if config.q_lora_rank is None else ("query_up", config.q_lora_rank)
    into = {query[0]: (n * d, query[1]), "key_value": (n * config.qk_nope_head_dim + values, latent)}
    return {**into, "output": (h, values)}


def short_matrices(config: ResolvedModel) -> list[tuple[int, int]]:
    """Those that every rank holds: h -> the short vectors of latent attention, the rates of linear attention."""
    if config.is_linear:
        return [(config.linear_rates, config.hidden_size)]
    if not config.multi_latent_attention:
        return []
    widths = [*filter(None, [config.q_lora_rank]), config.kv_lora_rank + config.qk_rope_head_dim]
    return [(width, config.hidden_size) for width in widths]


def whole_attention_parameters(config: ResolvedModel) -> int:
    """Those of attention that every tensor-parallel rank holds: norms, and the matrices to short vectors."""
    return head_norm_parameters(config) + sum(rows * columns for rows, columns in short_matrices(config))


def active_parameters(config: ResolvedModel) -> int:
    """Those of a block that one token uses."""
    experts, idle = config.experts, 0
    if experts is not None:
        idle = (experts.num_experts - experts.moe_router_topk) * expert_parameters(config, experts)
    return block_parameters(config) - idle


def mixture_parameters(
    config: ResolvedModel, experts: ResolvedExperts, tp: int | None = None, *, expert_ranks: int = 1
) -> int:
    """E experts of 2 h f or, gated, 3 h f, and biases; the router E h; a shared expert, and its gate. Arguments as for
    `block_parameters`."""
    h, matrices = config.hidden_size, 3 if config.gated else 2
    routed = experts.num_experts * expert_parameters(config, experts) // (1 if tp is None else expert_ranks)
    shared = matrices * h * (experts.moe_shared_expert_size or 0) // (tp or 1)
    router = experts.num_experts * (h + experts.moe_linear_bias)
    return routed + router + shared + (h if experts.moe_shared_expert_gate else 0)


def expert_parameters(config: ResolvedModel, experts: ResolvedExperts) -> int:
    """One expert's."""
    h, f, into = config.hidden_size, experts.moe_ffn_hidden_size, 2 if config.gated else 1
    return (into + 1) * h * f + (into * f + h if experts.moe_linear_bias else 0)


def projection(config: ResolvedModel, tp: int) -> int:
    """Weights of the projections to queries, keys and values, on one of `tp` ranks."""
    *into, _ = attention_matrices(config).values()
    return sum(rows * columns for rows, columns in into) // tp


def head_parameters(config: ResolvedModel, tp: int | None = None) -> int:
    """Final norm, unless a block of multi-token prediction has it, and output layer, whose weight a tied model shares
    with the embedding. `tp` as for `embedding_parameters`."""
    columns = config.hidden_size + config.add_output_layer_bias
    return vocabulary_rows(config, tp) * columns + (0 if config.mtp_num_layers else norm_parameters(config))


def bert_embedding_parameters(config: ResolvedBertConfig, tp: int | None = None) -> int:
    """Token table, norm, and in the classic style position and segment tables. `tp` as for `embedding_parameters`."""
    model = config.model
    tables = 0 if config.bert.packed else model.position_rows + config.bert.num_token_types
    return (vocabulary_rows(model, tp) + tables) * model.hidden_size + norm_parameters(model)


def bert_head_parameters(config: ResolvedBertConfig, tp: int | None = None) -> int:
    """Transform h^2, norms, output layer with a bias, and the sentence task's pooler and classifier. `tp` as for
    `embedding_parameters`."""
    model, h = config.model, config.model.hidden_size
    norms = (2 if config.bert.packed else 1) * norm_parameters(model)
    transform = h * h + (0 if model.disable_bias_linear else h)
    sentence = h * h + h + 2 * h + 2 if config.bert.has_sentence_head else 0
    return norms + transform + vocabulary_rows(model, tp) * (h + 1) + sentence


def vocabulary_rows(config: ResolvedModel, tp: int | None = None) -> int:
    """Rows of the token table: V, or with padding those that one of `tp` ranks holds."""
    if tp is None:
        return config.vocab_size
    return padded_rows(config.vocab_size, tp, config.make_vocab_size_divisible_by)


def head_norm_parameters(config: ResolvedModel) -> int:
    """The norms of queries and of keys: one for all heads, one for each, or of all together; or of short vectors; or
    that of the values of linear attention."""
    if config.is_linear:
        return config.linear_widths[1] if config.is_mamba else config.linear_value_head_dim
    if not config.qk_layernorm:
        return 0
    if config.multi_latent_attention:
        return norm_parameters(config, config.kv_lora_rank + (config.q_lora_rank or 0))
    heads = config.num_attention_heads + config.query_groups
    if config.qk_layernorm_per_head:
        return heads * config.head_size
    heads = heads if config.qk_layernorm_all_heads else 2
    return heads * norm_parameters(config, config.head_size)


def norm_parameters(config: ResolvedModel, size: int | None = None) -> int:
    """A weight for each dimension, and a bias where LayerNorm has one; or neither."""
    if not config.norm_affine:
        return 0
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return (size or config.hidden_size) * (2 if has_bias else 1)
