"""The rows of the table by its parts: those of rows.toml, and cross products that would be many rows there."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.matrix import runner
from tests.matrix.programs import PROGRAMS, Changes, changes_with_parts
from tests.matrix.runner import BITWISE, FP32, LEARNED, RESHARD_NEAR, RESUME, UPDATED, WEIGHTS, Relation, Row

STAGES = range(4)
COMMS = ("allgather", "ring", "ulysses")
NEWER = ("gemma 3", "gemma 2", "granite", "olmo", "olmo 2", "gpt-j", "opt", "phi longrope", "norms")
SHARED = [name for name in PROGRAMS if name.startswith("shared")]
PACKED = ["gpt2 packed", "llama packed", "windows packed", "bloom packed"]
DECODERS = ["gpt2", "llama", "windows", "bloom", "qwen", "stretched", *PACKED, *SHARED]
OF_TWO_RANKS = ["tp2 mb1", "pp2 mb1", "cp2 mb1", "dp2 mb1", "dp2 mb1 z1", "dp2 mb1 z2", "dp2 mb1 z3"]
OF_FOUR_RANKS = ["tp2 dp2 mb1 sp z1", "tp2 pp2 mb1", "tp2 dp2 mb1", "tp2 dp2 mb1 z3", "dp4 z2", "dp4 z3 shards2"]
OPTIMIZERS = {name: name for name in ("adam", "lamb", "muon", "muon-heads", "lion")} | {"sgd": "nesterov"}
COMPRESSED: list[tuple[str, str, list[str], Changes]] = [
    ("tp-sp", "tp2 dp2 mb1 sp", [], {}),
    ("pp-lamb", "pp2 dp2 mb1", ["lamb"], {}),
    ("cp-sgd", "dp2 cp2 mb1", [], {"optimizer": "sgd", "lr": 1e-2}),
    # To all experts: where a token chooses, a rounding may change its choice, and the loss by 3e-4.
    ("experts", "dp4 ep2", ["experts"], {"moe_router_topk": 4}),
    ("muon-offload", "dp4 offload", [], {"optimizer": "muon", "lr": 1e-3}),
    ("int8-moments", "tp2 dp2 mb1 overlap_grad_reduce=False", [], {"moments_dtype": "int8"}),
]
RESHARDED = {
    "one": "", "dp2": "dp2 z0", "pp2": "pp2 interleaved virtual2", "pp2-dp2": "pp2 dp2 z1", "tp2": "tp2",
    "tp2-dp2": "tp2 dp2 z2", "tp2-pp2": "tp2 pp2 gpipe", "cube": "tp2 pp2 dp2 z3", "tp4": "tp4", "pp4": "pp4 zb",
    "dp4": "dp4 z0", "pp3": "pp3",
}  # fmt: skip
EVERYWHERE = [
    f"{words.partition(' z')[0]} z{stage}" if "dp" in words else words
    for words in RESHARDED.values()
    for stage in (STAGES if "dp" in words else [0])
]
EXPERT_PLACES = [
    "dp4 ep4 z2", "tp2 dp2 ep2 z1", "tp2 dp2 ep2 etp1 sp z3", "pp2 dp2 ep2", "tp4", "dp2 cp2 ep4 z1",
    "tp2 cp2 ep2 etp1 sp z2",
]  # fmt: skip


def _read(name: str, fields: Changes) -> Row:
    """A row of rows.toml."""
    made = {"changes": changes_with_parts(fields.get("changes", {}))}
    return Row(name, **fields | made | {"relation": getattr(runner, fields.get("relation", "FP32"))})


def row(
    name: str, program: str, of: Sequence[str], layouts: Sequence[str], relation: Relation = FP32, **own: Any
) -> Row:
    """A slow row, whose changes are those of parts and its own."""
    changes = changes_with_parts({"of": of, **own})
    return Row(name.replace(" ", "-"), program, changes, layouts, relation, slow=True)


def of_optimizer(name: str, part: str) -> list[Row]:
    relation = FP32 if name == "lion" else LEARNED
    near = UPDATED if name == "sgd" else relation
    experts = ["dp2 mb1 ep2 z1", "dp4 ep2 z2", "tp2 dp2 mb1 ep2"]
    return [
        row(f"{name}-two-ranks", "gpt2", ["two", part], OF_TWO_RANKS, relation),
        row(f"{name}-four-ranks", "gpt2", ["two", part], OF_FOUR_RANKS, relation),
        row(f"{name}-offload", "gpt2", ["two", part], ["dp2 mb1 z1 offload"], near, clip_grad=0.0),
        row(f"{name}-experts", "gpt2 experts", ["two", part], experts, relation),
    ]


def compressed(compression: str, rel: float) -> list[Row]:
    follows = runner.follows(1, rel)
    made = []
    for name, words, of, own in COMPRESSED:
        layouts = [f"{words} z{stage} | grad_reduce_compression={compression}" for stage in STAGES]
        made.append(row(f"compressed-{compression}-{name}", "gpt2", ["six-steps", *of], layouts, follows, **own))
    return made


def of_context(name: str) -> Row:
    layouts = [f"cp{cp} cp_comm={comm}" for cp in (2, 4) for comm in COMMS if comm != "ring" or "bert" not in name]
    return row(f"context-{name}-eight-steps", name, ["eight-steps"], layouts, WEIGHTS)


RECOMPUTE = [f"| recompute={way}" for way in ("selective", "light", "full")]
AROUND = ["tp2 cp2 cp_comm=allgather", "tp2 cp2 sp cp_comm=ring", "tp2 cp2 cp_comm=ulysses"]
LONGER = {"num_layers": 5, "train_iters": 8, "lr_warmup_iters": 2}
OF_OPTIMIZERS = ["tp2 dp2 mb1 sp z1", "dp2 mb1 z3", "pp2 mb1"]
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WRITTEN = {part: [_read(*item) for item in rows.items()] for part, rows in _TABLES.items()}
PRODUCTS: dict[str, list[Row]] = {
    "families": [
        *(row(f"family-{name}-recompute", name, [], RECOMPUTE, BITWISE) for name in NEWER),
        *(row(f"family-{name}-compiled", name, [], ["compiled"]) for name in NEWER),
    ],
    "optimizers": list(itertools.chain.from_iterable(map(of_optimizer, OPTIMIZERS, OPTIMIZERS.values()))),
    "compressed": [*compressed("bf16", 2e-4), *compressed("int8", 2e-3)],
    "resumes": [
        *(
            row(f"reshard-{name}-everywhere", "gpt2", ["saved"], [words, *EVERYWHERE], RESUME, **LONGER)
            for name, words in RESHARDED.items()
        ),
        *(
            row(f"experts-reshard-{number}", "bias", ["balanced"], [words, *EXPERT_PLACES, ""], RESHARD_NEAR)
            for number, words in enumerate(EXPERT_PLACES)
        ),
        *(
            row(f"{name}-reshard", "gpt2", ["two", part], OF_OPTIMIZERS, RESHARD_NEAR)
            for name, part in OPTIMIZERS.items()
        ),
    ],
    "context": [
        *(row(f"context-{name}-tp", name, ["short"], AROUND, WEIGHTS) for name in SHARED),
        *map(of_context, (*DECODERS, "bert", "modern bert")),
    ],
}


def rows_of(*parts: str) -> list[Row]:
    """All rows of parts of the table."""
    return [row for part in parts for row in (*WRITTEN[part], *PRODUCTS.get(part, ()))]
