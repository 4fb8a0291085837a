"""--reproducible blocks: in how many blocks the sums are computed that tensor and context parallelism would cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megacore.config.messages import divisors
from megacore.config.problem import Change, Problem, Values, divisors_of
from megacore.config.rules import Rule, Settings, rows
from megacore.config.schema import Config

_SIZES = (
    "reproducible_blocks", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size", "seq_length",
    "kv_channels", "layer_pattern", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim", "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_size",
)  # fmt: skip

_MOST = 8  # blocks by default: one for each device of a usual node
_ELEMENTS = 64  # of the vector registers that one iteration of an operator fills at most


def canonical_blocks(config: Config) -> int:
    """The number of blocks; 1: sums are cut where the layout cuts them."""
    if not config.training.reproducible:
        return 1
    given = config.training.reproducible_blocks
    return given if given is not None else max(_possible(config))


def _possible(config: Config) -> list[int]:
    """The numbers of blocks up to `_MOST` into which the model can be divided."""
    return [count for count in (1, 2, 4, 8) if count <= _MOST and not list(_indivisible(config, count))]


def _indivisible(config: Config, count: int) -> Iterator[str]:
    """What cannot be divided into so many blocks, by its flag."""
    model, length, experts = config.model, config.data.seq_length, getattr(config, "experts", None)
    if count == 1:
        return
    heads, groups, inner = model.num_attention_heads, model.query_groups, model.inner_size
    if heads % count:
        yield f"--num-attention-heads {heads}"
    if model.has_linear and model.linear_num_key_heads % count:
        yield f"--layer-pattern linear-key-heads={model.linear_num_key_heads}"
    if model.has_linear:
        yield from _indivisible_width("all values of linear attention,", model.linear_widths[1], length, count)
    shares = count % groups == 0 and not model.qk_layernorm_all_heads  # blocks share a key
    if groups % count and not shares:
        yield f"--num-query-groups {groups}{' with --qk-layernorm all-heads' if model.qk_layernorm_all_heads else ''}"
    yield from _indivisible_width("--ffn-hidden-size", inner, length, count)
    if (rows := (heads + 2 * groups) * model.head_size) % count:
        yield f"the {rows} rows of the projection of all heads"
    if length < count:
        yield f"--seq-length {length}"
    if experts is not None and experts.num_experts is not None:
        if experts.moe_linear_bias:  # one rank of those that split an expert adds each
            yield "--num-experts bias"
        if (width := experts.moe_ffn_hidden_size or 0) % count:
            yield f"--moe-ffn-hidden-size {width}"
        yield from _indivisible_width("--moe-shared-expert-size", experts.moe_shared_expert_size or 0, length, count)


def _indivisible_width(name: str, width: int, length: int, count: int) -> Iterator[str]:
    if width % count:
        yield f"{name} {width}"
    elif length * width // count % _ELEMENTS:
        yield f"--seq-length x {name} / {_ELEMENTS}, which is {length * width / _ELEMENTS:g}"


def _experts(c: Settings) -> Iterator[str]:
    if c.num_experts is None or _blocks_of(c) == 1:
        return
    if c.expert_split != c.tp:
        yield Problem(
            f"--reproducible computes each expert in blocks, which the --tp {c.tp} ranks divide",
            Values(name="etp", among=[c.tp], near=c.expert_split),
            _ONE_BLOCK,
        )
    if c.ep > 1 and c.cp > 1:
        yield Problem(
            f"--reproducible with --cp {c.cp} gathers the positions of experts, between which --ep {c.ep} would "
            "divide them",
            Values(name="ep", among=[1], near=c.ep),
            Values(name="cp", among=[1], near=c.cp),
        )


def _blocks(c: Settings) -> Iterator[str]:
    given = c.reproducible_blocks
    if given is None or not c.reproducible:
        return
    if given & (given - 1):
        powers = [1 << exponent for exponent in range(given.bit_length() + 1)]
        yield Problem(
            f"--reproducible blocks={given} must be a power of two",
            Values(name="reproducible_blocks", among=powers, near=given, bare=True, most=2),
        )
    elif undivided := list(_indivisible(_config(c), given)):
        yield Problem(
            f"--reproducible blocks={given} must divide {' and '.join(undivided)}",
            Values(name="reproducible_blocks", among=_possible(_config(c)), near=given, bare=True),
            c.without("reproducible_blocks"),
        )


def _tensor_parallel(c: Settings) -> Iterator[str]:
    tp, count = c.tp, _blocks_of(c)
    if not c.reproducible or count & (count - 1):
        return
    if count == 1 and tp > 1 and c.reproducible_blocks is None:
        undivided = " and ".join(_indivisible(_config(c), 2))
        said = f"--reproducible with --tp {tp} needs sums in blocks, which the ranks divide, but {undivided} cannot be "
        said += "divided by 2"
        yield Problem(said, Values(name="tp", among=[1], near=tp), _ONE_BLOCK)
    elif count > 1 and count % tp:
        said = f"--reproducible computes sums in {count} blocks, which --tp {tp} must divide"
        yield Problem(said, divisors_of("tp", tp, count), _ONE_BLOCK)


def _context_parallel(c: Settings) -> Iterator[str]:
    tp, cp, count = c.tp, c.cp, _blocks_of(c)
    if cp == 1 or not c.reproducible:
        return
    if count & (count - 1):
        return
    if count == 1:
        undivided = list(_indivisible(_config(c), 2))
        reason = f"{' and '.join(undivided)} cannot be divided by 2" if undivided else "--reproducible blocks is 1"
        yield Problem(
            f"--reproducible with --cp {cp} needs sums in blocks, which the ranks divide, but {reason}",
            Values(name="cp", among=[1], near=cp),
            Change(
                "leave --reproducible out (on CPUs two runs with one seed and layout are bitwise equal anyway)",
                {"reproducible": False},
            ),
        )
    elif count % tp == 0 and not _fits(count, tp, cp):
        accepted = [ranks for ranks in divisors(count) if _fits(count, tp, ranks)]
        yield Problem(
            f"--reproducible computes sums in {count} blocks, and their number must be a multiple of both "
            f"2 x --cp = {2 * cp} and --tp x --cp = {tp * cp}",
            Values(name="cp", among=accepted, near=cp),
            c.out("reproducible"),
        )


def _fits(count: int, tp: int, cp: int) -> bool:
    """Whether each of cp ranks holds whole blocks: of positions in two ranges, and of heads."""
    # Each cp rank has one range from the front and one from the back, as causal attention costs more towards the end.
    return cp == 1 or (count % (2 * cp) == 0 and count % (tp * cp) == 0)


def _compiled(c: Settings) -> Iterator[str]:
    if c.compile and _blocks_of(c) > 1:
        said = "--reproducible computes sums in blocks, which --compile would fuse differently in each layout"
        yield Problem(said, _ONE_BLOCK, c.out("compile"))


def _config(c: Settings) -> Config:
    """The configuration, once all sizes that are divided into blocks can be read."""
    c.read(*_SIZES)
    config: Config = c.config
    return config


def _blocks_of(c: Settings) -> int:
    return canonical_blocks(_config(c)) if c.reproducible else 1


_ONE_BLOCK = Change("--reproducible blocks=1, with which another --tp rounds differently", {"reproducible_blocks": 1})
REPRODUCIBLE_RULES: Sequence[Rule] = (
    _experts,
    _blocks,
    _tensor_parallel,
    *rows("reproducible"),
    _context_parallel,
    _compiled,
)
