"""The defects of the self-test: a comparison that finds none proves nothing. Each row of defects.toml is a mistake that
has been made in some trainer. It is made in the layout's run only, on every rank, by replacing public functions
(faults.py)."""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from megacore.config import ResolvedConfig
from megacore.config.dimensions import ranks_of_role
from megacore.config.model import padded_rows
from megacore.config.reproducible import canonical_blocks
from megacore.pipeline.schedule_file import placement

if TYPE_CHECKING:
    from megacore.train.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One mistake; defects.toml says what each attribute is."""

    name: str
    what: str
    fault: str
    kinds: list[str]
    needs: str = ""
    where: list[str] | None = None
    calls: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def possible(self, config: ResolvedConfig) -> bool:
        return traits(config).issuperset(self.where or ())

    @contextmanager
    def planted(self, steps: TrainStep | None) -> Iterator[None]:
        """The mistake is made inside, in a model that is built and loaded; with None also where models are built, by a
        fault that asks nothing of one."""
        from megacore.verify import faults

        fault = partial(getattr(faults, self.fault), **self.options)
        with ExitStack() as stack:
            for call in self.calls or ():
                name = f"megacore.{call}"
                stack.enter_context(patch(name, fault(steps, pkgutil.resolve_name(name))))
            if not self.calls:
                fault(steps)
            yield


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DEFECTS = tuple(Defect(name=name, **row) for name, row in _ROWS.items())
BY_NAME = {defect.name: defect for defect in DEFECTS}


def traits(config: ResolvedConfig) -> set[str]:
    """What a configuration has, of what some mistakes need."""
    model, parallel, training, experts = config.model, config.parallel, config.training, config.model.experts
    tp, cp, pp, ep, zero = parallel.tp > 1, parallel.cp > 1, parallel.pp > 1, parallel.ep > 1, parallel.zero_stage > 0
    replicas, loss_ranks = ranks_of_role("replicas", parallel) > 1, ranks_of_role("loss", parallel)
    ring = cp and config.context_comm == "ring"
    hides_more = model.window_size is not None or "documents" in config.beside_hidden_states
    drops = max(model.hidden_dropout, model.attention_dropout) > 0 and not training.compile
    dropped_by_shard = model.attention_dropout or (parallel.sequence_parallel and model.hidden_dropout)
    one_block = canonical_blocks(config) == 1  # otherwise no mask and no gradient of tokens depends on the layout
    has_mlp = experts is None or experts.moe_shared_expert_size is not None
    if experts is not None and not has_mlp:
        has_mlp = not all(map(experts.holds, range(model.num_layers)))
    rows = parallel.tp * padded_rows(model.vocab_size, parallel.tp, model.make_vocab_size_divisible_by)
    split_experts = parallel.expert_split > 1 and not parallel.sequence_parallel
    router_losses = experts is not None and (experts.moe_aux_loss_coeff or experts.moe_z_loss_coeff)
    found = {
        "replicas": replicas,
        "tp": tp,
        "ends apart": placement(parallel).rank_of(parallel.pp * parallel.virtual_stages - 1) > 0,
        "cp": cp,
        "zero": zero,
        "ranks": parallel.ranks > 1,
        "ring": ring,
        "cp without ring": cp and not ring,
        # Causality, and nothing else, hides keys of other ranks.
        "hidden keys of other ranks": cp and config.context_comm != "ulysses" and config.is_causal and not hides_more,
        "tied": getattr(config, "bert", None) is not None or not model.untie_embeddings_and_output_weights,
        "gated": model.gated and has_mlp,
        "padded": rows > model.vocab_size and (training.loss_chunks or 1) == 1,
        "masks": drops,
        "masks of shards": drops and dropped_by_shard and one_block,
        "clipped parts": config.optimizer.clip_grad > 0 and (tp or pp or (replicas and zero)),
        "state": any(kind.per == "element" for kind in config.optimizer_settings.state),
        "experts": experts is not None,
        "ep": experts is not None and ep,
        "router losses": router_losses and loss_ranks * parallel.tp > 1,
        "loads of ranks": experts is not None and loss_ranks > 1,
        "parts of experts": experts is not None and split_experts and one_block,
        "rows by expert": not training.reproducible,  # which keeps them as they arrive
    }
    return {name for name, holds in found.items() if holds}
