"""Rows whose layouts and models are drawn at random, the same ones in every run; all are slow."""

from __future__ import annotations

import random

from tests.matrix.programs import EXACT, LATENT, LLAMA, PACKED, PROGRAMS, SMOOTH, Changes
from tests.matrix.runner import BITWISE, WEIGHTS, Row

SCHEDULES = ("", "gpipe", "zb")
RECOMPUTE = ("", "recompute=selective", "recompute=light", "recompute=full")
OFFLOADED: Changes = {"clip_grad": 0.0, "weight_decay": 0.0}  # the update leaves gradients as they are
CONTEXT = [name for name, changes in PROGRAMS.items() if name != "latent" and "num_experts" not in changes]
EXPERTS = [name for name, changes in PROGRAMS.items() if "moe_aux_loss_coeff" in changes]


def of_eight_ranks(number: int, *, experts: bool) -> Row:
    """A mixture of experts, or another model with context parallelism, on 8 ranks."""
    draw = random.Random(f"eight ranks {number} {experts}")
    program = draw.choice(EXPERTS if experts else CONTEXT)
    cp = draw.choice([1, 1, 2] if experts else [2, 2, 2, 4, 4, 8])
    tp = draw.choice([t for t in (1, 2, 4) if 8 % (cp * t) == 0 and (not experts or cp * t <= 4)])
    pp = draw.choice([p for p in (1, 2, 4) if 8 % (cp * tp * p) == 0])
    dp = 8 // (cp * tp * pp)
    is_split, is_offloaded, schedule = tp > 1 and draw.random() < 0.5, draw.random() < 1 / 3, draw.choice(SCHEDULES)
    if pp > 1 and draw.random() < 0.25:
        schedule = "interleaved virtual2"
    micro = 1 if dp >= 4 else draw.choice([1, 2])
    # The other run has the same microbatches: smaller ones alone use up half of the bound after three steps of SGD.
    words = [f"mb{micro} | tp{tp} pp{pp} dp{dp} cp{cp} z{draw.randrange(4)}", schedule, draw.choice(RECOMPUTE)]
    words += ["sp"] if is_split else []
    if experts:
        etp, most = draw.choice([1, tp]) if is_split else tp, PROGRAMS[program]["num_experts"]
        words += [
            f"etp{etp}",
            f"ep{draw.choice([e for e in (1, 2, 4, 8) if e <= most and dp * cp * tp % (e * etp) == 0])}",
        ]
    else:
        comms = ["allgather"] + ["ring"] * ("bert" not in program) + ["ulysses"] * (4 // tp % cp == 0)
        words += [f"cp_comm={draw.choice(comms)}", draw.choice(["", "chunks3"])]
    changes: Changes = SMOOTH | {
        "num_layers": draw.choice([2 * pp, 2 * pp + 1]),
        "optimizer": draw.choice(["adamw", "sgd"]),
    }
    changes |= {"train_iters": 3 if experts else 5} | (OFFLOADED if is_offloaded else {})
    words += ["offload"] if is_offloaded else []
    name = f"{'experts' if experts else 'context'}-drawn-{number}"
    return Row(name, program, changes, [" ".join(words)], WEIGHTS, slow=True)


def reproducible(number: int) -> Row:
    """Any model in any precision, on 2 to 8 ranks."""
    draw = random.Random(f"reproducible {number}")
    heads, dropout = draw.choice([4, 8]), draw.choice([0.0, 0.1])
    llama = LLAMA | {"num_query_groups": draw.choice([1, 2, 4]), "qk_layernorm": draw.random() < 0.5}
    experts = draw.choice(["sigmoid", "softmax", "limited", "bias"])
    program, model = draw.choice([("gpt2", {}), ("gpt2", llama), ("gpt2", llama), (experts, {}), ("latent", LATENT)])
    changes: Changes = EXACT | model | {
        "num_attention_heads": heads,
        "hidden_size": 64,
        "num_layers": 4,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "precision": draw.choice(["fp32", "fp32", "bf16", "fp16"]),
        "initial_loss_scale": None,
        "micro_batch_size": draw.choice([1, 2]),
        "train_iters": 3,
        **draw.choice([{}, {}, PACKED]),
    }  # fmt: skip
    if changes["precision"] == "fp16":  # so that no step is skipped
        changes["initial_loss_scale"] = 1024.0
    if program == "sigmoid":
        changes["moe_shared_expert_size"] = 16
    if program == "limited":  # packs its samples itself
        changes |= dict.fromkeys(PACKED, False)
    layouts = [(2, 1, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 2, 2, 1), (4, 2, 1, 1), (4, 1, 2, 1)]
    layouts += [(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)]
    tp, pp, dp, cp = draw.choice(layouts)
    words = [f"tp{tp} pp{pp} dp{dp} cp{cp} z{draw.randrange(4)}", draw.choice(SCHEDULES), draw.choice(RECOMPUTE)]
    words += ["ep2"] if program in EXPERTS and dp == 2 and cp == 1 else []
    words += ["sp"] if tp > 1 and draw.random() < 0.5 else []
    return Row(f"exact-drawn-{number}", program, changes, [" ".join(words)], BITWISE, slow=True)


DRAWN_EXPERTS = [of_eight_ranks(number, experts=True) for number in (*range(24), 48)]
DRAWN_CONTEXT = [of_eight_ranks(number, experts=False) for number in range(24)]
DRAWN_EXACT = [reproducible(number) for number in range(32)]
