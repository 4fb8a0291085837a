"""The layout of the ranks that are left: as many as can share the batch, as near to what was asked for as they can."""

from __future__ import annotations

import dataclasses
import itertools

from megacore.config import ResolvedConfig, violations
from megacore.config.messages import divisors

_SPLITS = ("tp", "pp", "cp", "ep")


def layout_for(config: ResolvedConfig, ranks: int) -> dict[str, int] | None:
    """The degrees by field, for at most `ranks`; None where no number of them can train this model. All of `config` but
    its degrees stays, the global batch too. Of the layouts of the most ranks it is the one that splits the model most
    like `config` does: that fits into memory if this one did."""
    splits = [sorted(divisors(getattr(config.parallel, name) or 1, most=None), reverse=True) for name in _SPLITS]
    for count in range(min(ranks, config.parallel.ranks), 0, -1):
        for tp, pp, cp, ep in itertools.product(*splits):
            dp, rest = divmod(count, tp * pp * cp)
            if rest:
                continue
            parallel = dataclasses.replace(config.parallel, tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)
            if not violations(dataclasses.replace(config, parallel=parallel), count):
                return {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp}
    return None
