"""The parts of a DeepSpeed configuration about pipelines, tensor, sequence and expert parallelism and recomputation."""

from __future__ import annotations

from collections.abc import Callable

from megacore.config.deepspeed_values import (
    CHOSEN,
    Key,
    Value,
    checked,
    custom,
    idle,
    of_saved_inputs,
    real,
    sets,
    some,
    switch,
    whole,
)
from megacore.config.megatron_values import Translation


def _beside_recompute(becomes: str, name: str) -> Key:
    """A switch about the inputs that full recomputation keeps."""

    def translate(value: Value) -> Translation:
        return Translation(of_saved_inputs(name, value.shape) if switch(value) else {})

    return custom(f"{becomes}; else nothing", (name,), translate, is_last=True)


def _interval(value: Value) -> Translation:
    return Translation({"recompute": "full"} if whole(value) else {})


def _partition(value: Value) -> Translation:
    balances = {"best": {}, "uniform": "uniform", "parameters": "parameters"}
    if value.value not in balances:
        raise ValueError(f"{value}: stages are not balanced by types of layers: use best, uniform or parameters")
    chosen = balances[value.value]
    return Translation({"pipeline_balance": chosen} if chosen else {})


def _ranks(name: str, *, none: int | None = None) -> Callable[[Value], Translation]:
    def translate(value: Value) -> Translation:
        given = whole(value)
        return Translation({} if given == none else {name: given})

    return translate


def _inner_ranks(value: Value) -> Translation:
    given = whole(value, low=1)
    return Translation({"tp": given} if given > 1 else {})


def _sequence_ranks(value: Value) -> Translation:
    given = whole(value, low=1)
    return Translation({"cp": given}, {"cp_comm": "ulysses"} if given > 1 else {})


def _expert_scores(value: Value) -> Translation:
    if value.value not in ("softmax", "sigmoid"):
        raise ValueError(f"{value} is not known: use softmax or sigmoid")
    return Translation({"moe_router_score_function": value.value})


_SPLIT_BY_KIND = "megacore's layers know how they are split"
_ITS_EXPERTS = "the layers of megacore's models know their experts"


def layout_keys() -> dict[str, Key]:
    """What the keys about the layout and about recomputation become."""
    keys = {
        "pipeline.stages": custom("--pp", ("pp",), _ranks("pp")),
        "pipeline.partition": custom(
            "--pipeline-balance: uniform, parameters, or its default for best", ("pipeline_balance",), _partition
        ),
        "pipeline.seed_layers": idle("initial weights and dropout are functions of the seed and the layer"),
        "pipeline.activation_checkpoint_interval": custom(
            "--recompute full for 1 or more, which recomputes block by block", ("recompute",), _interval
        ),
        "pipeline.pipe_partitioned": idle("the same numbers either way"),
        "pipeline.grad_partitioned": idle("the same numbers either way"),
        "pipeline.use_reentrant": idle("the same numbers either way"),
        "tensor_parallel.autotp_size": custom("--tp; nothing with 0", ("tp",), _ranks("tp", none=0)),
        "tensor_parallel.tp.tp_size": custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.tensor_parallel.tp_size": custom("--tp; nothing with 1", ("tp",), _inner_ranks),
        "tensor_parallel.dtype": idle("--precision decides"),
        "tensor_parallel.tp_overlap_comm": idle(CHOSEN),
        "tensor_parallel.vocab_parallel_lm_head": idle("the head is always divided over --tp ranks"),
        "tensor_parallel.vocab_parallel_ce_backend": idle(CHOSEN),
        "sequence_parallel_size": custom("--cp, with --cp-comm ulysses", ("cp", "cp_comm"), _sequence_ranks),
        "expert_parallel.enabled": checked("turns on the keys below; --num-experts says how many there are", switch),
        "expert_parallel.autoep_size": custom("--ep", ("ep",), _ranks("ep")),
        "expert_parallel.expert_tensor_parallel_size": custom("--etp", ("etp",), _ranks("etp")),
        "expert_parallel.top_k": custom("--moe-router-topk", ("moe_router_topk",), _ranks("moe_router_topk")),
        "expert_parallel.score_func": custom(
            "--moe-router-score-function", ("moe_router_score_function",), _expert_scores
        ),
        "expert_parallel.num_expert_groups": sets("moe_router_num_groups", lambda value: whole(value, low=2)),
        "expert_parallel.num_limited_groups": sets("moe_router_group_topk", lambda value: whole(value, low=1)),
        "expert_parallel.routed_scaling_factor": sets("moe_router_topk_scaling_factor", real),
        "expert_parallel.route_scale": sets("moe_router_topk_scaling_factor", real),
        "expert_parallel.route_norm": custom(
            "--moe-router-pre-softmax for false", ("moe_router_pre_softmax",), _route_norm
        ),
        "expert_parallel.score_apply": some(
            ("post",), "experts' outputs are weighted, not their inputs", "leave it out"
        ),
        "expert_parallel.load_balance_coeff": some((None,), "DeepSpeed refuses it too", "use --moe-aux-loss-coeff"),
        "use_data_before_expert_parallelism": idle("the results do not depend on the order of ranks"),
        "activation_checkpointing.partition_activations": _beside_recompute(
            "--distribute-saved-activations, beside --recompute full and --tp above 1", "distribute_saved_activations"
        ),
        "activation_checkpointing.cpu_checkpointing": _beside_recompute(
            "--offload-activations, beside --recompute full", "offload_activations"
        ),
        "activation_checkpointing.contiguous_memory_optimization": idle("the allocator keeps its memory"),
        "activation_checkpointing.number_checkpoints": idle("the allocator keeps its memory"),
        "activation_checkpointing.synchronize_checkpoint_boundary": idle("--trace and --profile-steps measure"),
        "activation_checkpointing.profile": idle("use --trace or --profile-steps to measure times"),
    }
    for name in ("tp_grain_size", "mpu", "tp_group"):
        keys[f"tensor_parallel.tp.{name}"] = idle(_SPLIT_BY_KIND)
        keys[f"tensor_parallel.tensor_parallel.{name}"] = idle(_SPLIT_BY_KIND)
    for name in (
        *("injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host"),
        *("replace_with_kernel_inject", "kernel_inject"),
    ):
        keys[f"tensor_parallel.{name}"] = idle(_SPLIT_BY_KIND)
    for name in (
        *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2"),
        *("expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
        *("shared_experts_gate_pattern", "expert_activation"),
    ):
        keys[f"expert_parallel.{name}"] = idle(_ITS_EXPERTS)
    for name in (
        *("validate_folding_routing", "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm"),
        *("combine_impl", "row_weighting_impl", "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin"),
        "comm_max_tokens_per_rank",
    ):
        keys[f"expert_parallel.{name}"] = idle(CHOSEN)
    return keys


def _route_norm(value: Value) -> Translation:
    if value.value is None:
        return Translation()
    return Translation({"moe_router_pre_softmax": not switch(value)})
