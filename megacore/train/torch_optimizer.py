"""What an optimizer of torch's does, in megacore's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_ADAM_KINDS = (torch.optim.Adam, torch.optim.AdamW)


def of_torch(optimizer: torch.optim.Optimizer, problems: list[str]) -> dict[str, Any]:
    """The fields that say what an optimizer of torch's does; `problems` receives what has no counterpart."""
    kind = type(optimizer).__name__
    groups: list[dict[str, Any]] = optimizer.param_groups
    decay = decays(groups, kind, problems)
    shared = {name: [group[name] for group in groups] for name in groups[0] if name not in ("params", "weight_decay")}
    for name, each in shared.items():
        if any(value != each[0] for value in each):
            problems.append(f"optimizer {kind}: its parameter groups differ in {name}: use one value for all")
    first = {name: each[0] for name, each in shared.items()}
    for name in ("amsgrad", "maximize", "dampening"):
        if first.get(name):
            problems.append(f"optimizer {kind}: {name} {first[name]} is not in megacore: leave it out")
    if isinstance(optimizer, _ADAM_KINDS):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or first.get("decoupled_weight_decay", False)
        ours = "adamw" if decoupled or not decay["weight_decay"] else "adam"  # which are one without weight decay
        names = {"adam_beta1": first["betas"][0], "adam_beta2": first["betas"][1], "adam_eps": first["eps"]}
        return {"optimizer": ours, "lr": float(first["lr"]), **decay, **names}
    if isinstance(optimizer, torch.optim.SGD):
        names = {"sgd_momentum": first["momentum"], "sgd_nesterov": first["nesterov"]}
        return {"optimizer": "sgd", "lr": float(first["lr"]), **decay, **names}
    problems.append(f"optimizer {kind} is not in megacore: use AdamW or SGD, or write one (docs/extend/optimizer.md)")
    return {}


def decays(groups: Iterable[Mapping[str, Any]], what: str, problems: list[str]) -> dict[str, Any]:
    """The fields that decay matrices and vectors as groups of torch's do.

    Args:
        groups: with the tensors `params`, and their `weight_decay`.
        what: has these groups, for messages.
        problems: receives what cannot be decayed alike.
    """
    of_matrices, of_vectors = set[float](), set[float]()
    for group in groups:
        for parameter in group["params"]:
            (of_matrices if parameter.dim() >= 2 else of_vectors).add(float(group.get("weight_decay", 0.0)))
    decay, of_vector = max(of_matrices, default=0.0), max(of_vectors, default=0.0)
    if len(of_matrices) > 1 or len(of_vectors) > 1 or (of_vector and not decay):
        problems.append(
            f"{what}: weight decay is {sorted(of_matrices)} for matrices and {sorted(of_vectors)} for vectors, but "
            "megacore decays all matrices alike, and all vectors alike if matrices decay too: give the matrices one "
            "value, and the vectors one value or 0"
        )
        return {"weight_decay": decay}
    rule = {"param_group": (f"*:vector-decay={of_vector / decay!r}",)} if of_vector else {}
    return {"weight_decay": decay, **rule}
