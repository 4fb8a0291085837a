"""What must hold between experts and the other sections: the ranks that divide them, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megacore.config.dimensions import fill_degrees
from megacore.config.problem import WORLD_SIZE, Change, Problem, Values, divisors_of, multiples_of, up_to
from megacore.config.rules import Rules
from megacore.config.schema import DECIDE_SEQUENCES, Config

EXPERT_RULES = Rules()


@EXPERT_RULES.about("num_experts", "ep", "etp", "tp", "dp", "cp", "pp")
def _ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, experts, tp = config.parallel, config.experts.num_experts, config.parallel.tp
    ep, etp = parallel.ep, parallel.expert_split
    if experts is None:
        if ep != 1:
            yield f"--ep {ep} has no effect without experts: leave it out, or use --num-experts"
        return
    if experts % ep:
        yield Problem(
            f"--ep {ep} must divide --num-experts {experts}",
            divisors_of("ep", ep, experts),
            multiples_of("num_experts", experts, ep),
        )
    if etp not in (1, tp):
        yield Problem(
            f"--etp {etp} must be 1 or --tp {tp}",
            Values(name="etp", among=sorted({1, tp}), near=etp),
            Change("leave it out", {"etp": None}),
        )
        return
    degrees = fill_degrees(parallel, world_size)
    block = degrees["dp"] * degrees["cp"] * tp
    if block and block % (ep * etp):
        product = " x ".join(f"--{name} {degrees[name]}" for name in ("dp", "cp", "tp") if degrees[name] > 1)
        given = f"--ep {ep} x --etp {etp} = {ep * etp}" if etp > 1 else f"--ep {ep}"
        ranks = f"{block} ranks of a stage ({product})" if block > 1 else "only rank of a stage"
        replicas, others = degrees["dp"], block // degrees["dp"]
        larger = ep * etp // math.gcd(ep * etp, others)
        yield Problem(
            f"{given} must divide the {ranks}",
            divisors_of("ep", ep, block // etp) if block % etp == 0 else None,
            multiples_of("dp", replicas, larger),
            multiples_of(WORLD_SIZE, world_size, larger * others * parallel.pp),
            about=("dp", *(("etp",) if parallel.etp is None else ())),
        )


@EXPERT_RULES.about("num_experts", "etp", *DECIDE_SEQUENCES)
def _tokens_of_ranks(config: Config, world_size: int) -> Iterator[str]:
    parallel, tp = config.parallel, config.parallel.tp
    if config.experts.num_experts is not None and parallel.expert_split == 1 < tp and not parallel.sequence_parallel:
        yield Problem(
            f"--etp 1 with --tp {tp} needs --sequence-parallel, because otherwise every tp rank has the same tokens",
            Change("add it", {"sequence_parallel": True}),
            Values(name="etp", among=[tp], near=1),
        )


@EXPERT_RULES.about(
    "num_experts", "etp", "tp", "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_size",
    "moe_first_dense_layers", "num_layers",
)  # fmt: skip
def _widths(config: Config, world_size: int) -> Iterator[str]:
    experts, split, tp = config.experts, config.parallel.expert_split, config.parallel.tp
    if experts.num_experts is None:
        return
    width = experts.moe_ffn_hidden_size or config.model.inner_size
    if width % split:
        name = "--moe-ffn-hidden-size" if experts.moe_ffn_hidden_size else "--ffn-hidden-size"
        yield Problem(
            f"--etp {split} must divide {name} {width}",
            multiples_of("moe_ffn_hidden_size", width, split),
            divisors_of("tp", tp, width) if split == tp else None,
            Values(name="etp", among=[1], near=split),
        )
    shared = experts.moe_shared_expert_size
    if shared is not None and shared % tp:
        yield Problem(
            f"--tp {tp} must divide --moe-shared-expert-size {shared}",
            multiples_of("moe_shared_expert_size", shared, tp),
            divisors_of("tp", tp, shared),
        )
    dense, layers = experts.moe_first_dense_layers, config.model.num_layers
    if dense >= layers:
        yield Problem(
            f"--moe-first-dense-layers {dense} must be below --num-layers {layers}",
            up_to("moe_first_dense_layers", dense, layers - 1, low=0),
            Change("leave --num-experts and --moe-first-dense-layers out"),
        )


@EXPERT_RULES.about("num_experts", "disable_bias_linear")
def _biases(config: Config, world_size: int) -> Iterator[str]:
    if config.experts.num_experts is not None and not config.model.disable_bias_linear:
        yield (
            "--num-experts needs --disable-bias-linear, because experts have no biases: add it "
            "(--disable-bias-linear keep-qkv keeps those of queries, keys and values)"
        )


@EXPERT_RULES.about("moe_router_enable_expert_bias", "compile", "recompute")
def _compiled(config: Config, world_size: int) -> Iterator[str]:
    training, given = config.training, "--moe-router-enable-expert-bias"
    if config.experts.moe_router_enable_expert_bias and training.compile and training.recompute == "full":
        yield (
            f"--compile with --recompute full is not available with {given}, because compiled code keeps other tensors "
            f"in its second pass: use --recompute light, leave --compile out, or use --moe-aux-loss-coeff for {given}"
        )
