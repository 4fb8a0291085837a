"""Orders of rows: how the rows of a family's tensors follow each other in one of megacore's.

Megacore keeps query, key and value in one matrix whose rows go by head group, [group][q.., k, v][d]; the families keep
them apart, stacked, or by head. Every difference is a list of runs, each a range of rows of one source (of columns,
where matrices are [in, out], Conv1D), so that one description serves both directions and any slice.

Shape legend: n heads, g head groups, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megacore.config import ResolvedModel


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rows [start, stop) of source number `source`."""

    source: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """An order of rows. A model of a million heads has millions of runs: they are made one at a time, not before the
    shapes of the stored tensors give the number of heads."""

    sizes: Callable[[ResolvedModel], tuple[int, ...]]  # rows of each source, as far as the tensor needs it
    runs: Callable[[ResolvedModel], Iterator[Run]]
    # Of experts that are stored as one tensor, whose gates and ups alternate: which of each pair. None: no such tensor.
    of_pair: int | None = None


def _q_k_v_sizes(config: ResolvedModel) -> tuple[int, ...]:
    query, key = config.num_attention_heads * config.head_size, config.query_groups * config.head_size
    return query, key, key


def q_k_v_runs(config: ResolvedModel) -> Iterator[Run]:
    """By head group, [q.., k, v], each the next rows of its source."""
    d, groups = config.head_size, config.query_groups
    each = config.num_attention_heads // groups * d  # query rows of a group
    for g in range(groups):
        yield Run(source=0, start=g * each, stop=(g + 1) * each)
        yield Run(source=1, start=g * d, stop=(g + 1) * d)
        yield Run(source=2, start=g * d, stop=(g + 1) * d)


def _stacked_sizes(config: ResolvedModel) -> tuple[int, ...]:
    return (sum(_q_k_v_sizes(config)),)


def _stacked_runs(config: ResolvedModel) -> Iterator[Run]:
    query, key, _ = _q_k_v_sizes(config)
    offsets = (0, query, query + key)
    for run in q_k_v_runs(config):
        yield Run(source=0, start=run.start + offsets[run.source], stop=run.stop + offsets[run.source])


def _multi_query_runs(config: ResolvedModel) -> Iterator[Run]:
    """One key and one value: after all queries. One for each head: as megacore has them."""
    if config.query_groups == 1:
        yield from _stacked_runs(config)
    else:
        yield Run(source=0, start=0, stop=sum(_q_k_v_sizes(config)))


def _neighbouring_pairs(start: int, rotated: int, source: int = 0) -> Iterator[Run]:
    """Rows that are rotated in pairs of neighbours, where megacore rotates dimension i with i + r/2: the first of all
    pairs, then the second. `start`: the first of the rows. `source`: number of the tensor that has them."""
    for offset in (0, 1):
        for pair in range(rotated // 2):
            row = start + 2 * pair + offset
            yield Run(source=source, start=row, stop=row + 1)


def _neighbouring_q_k_v_runs(config: ResolvedModel) -> Iterator[Run]:
    size, rotated = config.head_size, config.rotary_dimensions
    for run in q_k_v_runs(config):
        for head in range(run.start, run.stop, size) if run.source < 2 else ():
            yield from _neighbouring_pairs(head, rotated, run.source)
            if rotated < size:
                yield Run(source=run.source, start=head + rotated, stop=head + size)
        if run.source == 2:
            yield run


def _gated_q_k_v_runs(config: ResolvedModel) -> Iterator[Run]:
    size = config.head_size
    for run in q_k_v_runs(config):
        for head in range(run.start, run.stop, size) if run.source == 0 else ():
            yield Run(source=0, start=2 * head, stop=2 * head + size)
        if run.source:
            yield run


def _gate_runs(config: ResolvedModel) -> Iterator[Run]:
    size = config.head_size
    for head in range(config.num_attention_heads):
        yield Run(source=0, start=(2 * head + 1) * size, stop=(2 * head + 2) * size)


def _gated_sizes(config: ResolvedModel) -> tuple[int, ...]:
    query, key, value = _q_k_v_sizes(config)
    return 2 * query, key, value


def _groups_of(stacked: str, *order: int) -> Layout:
    """By group of linear attention. `stacked`: what one source has, k for the features of all keys, v for those of all
    values, a for a number of each value head. `order`: the numbers of those of which a group has its share."""

    def widths(config: ResolvedModel) -> list[int]:
        of = dict(zip("kva", (*config.linear_widths, config.linear_num_value_heads), strict=True))
        return [of[part] for part in stacked]

    def runs(config: ResolvedModel) -> Iterator[Run]:
        rows, groups = widths(config), config.linear_num_key_heads
        for g in range(groups):
            for part in order:
                start, size = sum(rows[:part]), rows[part] // groups
                yield Run(source=0, start=start + g * size, stop=start + (g + 1) * size)

    return Layout(lambda config: (sum(widths(config)),), runs)


def _latent_query_runs(config: ResolvedModel) -> Iterator[Run]:
    for head in range(config.num_attention_heads):
        start = head * config.head_size
        yield Run(source=0, start=start, stop=start + config.qk_nope_head_dim)
        yield from _neighbouring_pairs(start + config.qk_nope_head_dim, config.qk_rope_head_dim)


def _latent_key_value_runs(config: ResolvedModel) -> Iterator[Run]:
    yield Run(source=0, start=0, stop=config.kv_lora_rank)
    yield from _neighbouring_pairs(config.kv_lora_rank, config.qk_rope_head_dim)


def _half(number: int) -> Layout:
    """One of the two projections of a gated feed-forward layer, which are stacked in one tensor."""

    def runs(config: ResolvedModel) -> Iterator[Run]:
        yield Run(source=0, start=number * config.inner_size, stop=(number + 1) * config.inner_size)

    return Layout(lambda config: (2 * config.inner_size,), runs)


def _of_pair(number: int) -> Layout:
    return Layout(lambda config: (), lambda config: iter(()), number)


def _one_tensor_a_head(heads: Callable[[ResolvedModel], int]) -> Layout:
    return Layout(
        lambda config: (config.head_size,) * heads(config),
        lambda config: (Run(source=head, start=0, stop=config.head_size) for head in range(heads(config))),
    )


# By the names of families.toml, which has them as patterns too. `q_k_v_runs` is looked up at each call.
LAYOUTS: Mapping[str, Layout] = {
    "q_k_v": Layout(_q_k_v_sizes, lambda config: q_k_v_runs(config)),
    "neighbouring_q_k_v": Layout(_q_k_v_sizes, _neighbouring_q_k_v_runs),
    "stacked_q_k_v": Layout(_stacked_sizes, _stacked_runs),
    "multi_query": Layout(_stacked_sizes, _multi_query_runs),
    "first_half": _half(0),
    "second_half": _half(1),
    "first_of_pairs": _of_pair(0),
    "second_of_pairs": _of_pair(1),
    "gated_q_k_v": Layout(_gated_sizes, _gated_q_k_v_runs),
    "gates_of_queries": Layout(lambda config: _gated_sizes(config)[:1], _gate_runs),
    "stacked_groups": _groups_of("kkv", 0, 1, 2),
    "mamba_conv": _groups_of("vkk", 2, 1, 0),
    "mamba_groups": _groups_of("vvkka", 3, 2, 1, 0),
    "mamba_steps": _groups_of("vvkka", 4),
    "latent_queries": Layout(lambda config: (config.num_attention_heads * config.head_size,), _latent_query_runs),
    "latent_keys_and_values": Layout(
        lambda config: (config.kv_lora_rank + config.qk_rope_head_dim,), _latent_key_value_runs
    ),
    "norms_of_queries": _one_tensor_a_head(lambda config: config.num_attention_heads),
    "norms_of_keys": _one_tensor_a_head(lambda config: config.query_groups),
}
