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
    given = {name: getattr(config.parallel, name) or 1 for name in _SPLITS}
    for count in range(min(ranks, config.parallel.ranks), 0, -1):
        options = itertools.product(*(sorted(divisors(given[name], most=None), reverse=True) for name in _SPLITS))
        for tp, pp, cp, ep in options:
            if count % (tp * pp * cp):
                continue
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": count // (tp * pp * cp)}
            candidate = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **degrees))
            if not violations(candidate, count):
                return degrees
    return None
