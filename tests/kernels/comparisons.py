"""Every operator with the inputs it is tried on: odd sizes, one row, one column, nothing seen, longer than a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import ops
from megacore.ops import activation, norm
from megacore.ops.block_attention import block_attention
from megacore.ops.delta_rule import states_between_chunks
from megacore.ops.grouped import RowGroups
from megacore.ops.visibility import Visibility
from megacore.parallel.experts import Assignment, GroupedProducts, assign, combine, dispatch
from megacore.parallel.mesh import ALONE
from megacore.parallel.products import TORCH
from tests.kernels.loop import with_all_weights


def comparisons() -> list[Comparison]:
    """All of them."""
    kinds = [_norms, _softmaxes, _cross_entropies, _rotaries, _activations, _dropouts, _attentions, _experts, _states]
    return [comparison for kind in kinds for comparison in kind()]


def _norms() -> Iterator[Comparison]:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def forward(rms: bool) -> Function:
        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Any:
            y, summed, *_ = norm._norm_forward(x, residual, weight, bias, 1e-5, rms)
            return y if residual is None else (y, summed)

        return run

    def with_input(rms: bool) -> Function:
        return lambda x, weight, bias=None: norm._WithInput.apply(x, weight, bias, 1e-5, rms)

    def with_sum(rms: bool) -> Function:
        return lambda x, weight, bias=None: ops.norm_and_sum(x, None, weight, bias, rms=rms)

    kinds: dict[str, tuple[Function, Function, Function]] = {  # the operator, its formula and its plain form
        "layer_norm": (ops.layer_norm, layer_norm, forward(False)),
        "rms_norm": (ops.rms_norm, rms_norm, forward(True)),
        "layer_norm_with_input": (
            with_sum(False), lambda x, weight, bias: (layer_norm(x, weight, bias), x), with_input(False),
        ),
        "rms_norm_with_input": (
            with_sum(True), lambda x, weight: (rms_norm(x, weight), x), with_input(True),
        ),
        "add_layer_norm": (
            ops.add_layer_norm,
            lambda x, residual, weight, bias: (layer_norm(x + residual, weight, bias), x + residual), forward(False),
        ),
        "add_rms_norm": (
            ops.add_rms_norm, lambda x, residual, weight: (rms_norm(x + residual, weight), x + residual), forward(True),
        ),
    }  # fmt: skip
    # More rows than programs, whose shares of weight gradients are of one row or of two; one row; one column. 52
    # columns stay in registers, 9,001 neither way; backward reads 8,208 columns of 16 bits in chunks.
    for rows, width, names in (
        (17, 52, tuple(kinds)),
        (1, 77, ("layer_norm", "rms_norm")),
        (3, 1, ("layer_norm", "rms_norm")),
        (3, 8208, ("layer_norm", "rms_norm", "add_rms_norm")),
        (3, 9001, ("rms_norm", "add_layer_norm")),
    ):
        for name in names:
            operator, oracle, reference = kinds[name]
            shapes = {"x": (rows, width), "weight": (width,)}
            shapes |= {} if "rms" in name else {"bias": (width,)}
            shapes |= {"residual": (rows, width)} if name.startswith("add") else {}
            special: Any = {"reference": reference, "is_large": width > 8000}
            yield Comparison(f"{name}-{rows}x{width}", operator, oracle, shapes, **special)


def softmax_oracle(x: Tensor, **options: Any) -> Tensor:
    """Row by row, from the keys that each query sees."""
    _, _, sq, sk = x.shape
    offset = options.get("offset", sk - sq)
    key, query = torch.arange(sk, device=x.device), torch.arange(sq, device=x.device)[:, None]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=x.device)
    if options.get("causal"):
        seen = seen & (key <= query + offset)
    if (window := options.get("window")) is not None:
        seen = seen & (key > query + offset - window)
    exponentials = torch.where(seen, torch.exp(x * options["scale"]), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / torch.where(total == 0, 1.0, total)


def _softmaxes() -> Iterator[Comparison]:
    for name, (sq, sk), options in (
        ("plain", (5, 33), {}),
        ("one-key", (3, 1), {}),
        ("causal", (13, 13), {"causal": True}),
        ("causal-longer-keys", (5, 50), {"causal": True}),
        ("causal-fewer-keys", (9, 4), {"causal": True}),  # the first queries see nothing
        ("causal-offset", (5, 50), {"causal": True, "offset": -3}),
        ("window", (11, 11), {"causal": True, "window": 4}),
        ("window-alone", (5, 60), {"window": 20}),
        ("long", (2, 16500), {"causal": True}),
    ):
        special: dict[str, Any] = {"fixed": {"scale": 0.3, **options}, "scale": {"x": 4.0}}
        shapes = {"x": (1, 2, sq, sk)}
        yield Comparison(f"fused_softmax-{name}-{sq}x{sk}", ops.fused_softmax, softmax_oracle, shapes, **special)


def cross_entropy_oracle(logits: Tensor, *, targets: Tensor, columns: int, smoothing: float, z_loss: float) -> Tensor:
    """torch's own on the true columns."""
    true = logits[:, :columns]
    loss = F.cross_entropy(true, targets, reduction="none", label_smoothing=smoothing)
    return loss + (z_loss * true.logsumexp(-1).square()).masked_fill(targets == -100, 0.0)


def _cross_entropies() -> Iterator[Comparison]:
    def operator(logits: Tensor, *, targets: Tensor, columns: int, smoothing: float, z_loss: float) -> Tensor:
        options = ops.CrossEntropyOptions(label_smoothing=smoothing, z_loss=z_loss, in_place=True)
        share = ops.VocabularyShare(((0, columns),))
        return ops.cross_entropy(logits * 1.0, targets, options=options, share=share)

    for tokens, width, columns in ((9, 50, 50), (1, 128, 101), (4, 1, 1), (3, 20000, 19999)):
        targets = torch.arange(tokens) * 7919 % columns
        targets[-1:] = -100 if tokens > 1 else targets[-1:]
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-2)):
            fixed = {"targets": targets, "columns": columns, "smoothing": smoothing, "z_loss": z_loss}
            name, shapes = f"cross_entropy-{tokens}x{width}-{smoothing}", {"logits": (tokens, width)}
            yield Comparison(name, operator, cross_entropy_oracle, shapes, fixed=fixed, scale={"logits": 3.0})


def _angles(positions: int, half: int) -> dict[str, Tensor]:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return {"cos": angle.cos(), "sin": angle.sin()}


def _rotaries() -> Iterator[Comparison]:
    def oracle(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        half, turn = cos.shape[1], torch.complex(cos.double(), sin.double()).to(x.device)[:, None, :]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)

    plain = ((2, 3, 5, 16, 8), (1, 4, 1, 2, 1), (2, 2, 3, 50, 12), (1, 2, 70, 128, 64))
    for batch, positions, heads, size, half in plain:
        shapes, fixed = {"x": (batch, positions, heads, size)}, _angles(positions, half)
        yield Comparison(f"rotary-{heads}x{size}-{half}", ops.rotary, oracle, shapes, fixed=fixed)

    def split_oracle(packed: Tensor, *, cos: Tensor, sin: Tensor, groups: int) -> tuple[Tensor, ...]:
        by_group = packed.unflatten(2, (groups, -1))
        parts = by_group.split([by_group.shape[3] - 2, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3) for part in parts)
        return oracle(query, cos=cos, sin=sin), oracle(key, cos=cos, sin=sin), value

    packed = ((2, 3, 2, 3, 16, 8), (1, 2, 1, 1, 50, 12), (1, 2, 20, 2, 32, 16))
    for batch, positions, groups, shared, size, half in packed:
        name, operator = f"split_rotary-{groups}x{shared}x{size}-{half}", partial(ops.split_rotary, groups=groups)
        shapes = {"packed": (batch, positions, groups * (shared + 2), size)}
        fixed = _angles(positions, half)
        yield Comparison(name, operator, partial(split_oracle, groups=groups), shapes, fixed=fixed)


def _activations() -> Iterator[Comparison]:
    def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if bias is None else x + bias
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))

    def silu_product(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def swiglu_of_chunks(both: Tensor) -> Tensor:
        return ops.swiglu(*both.chunk(2, dim=-1))

    # Whose bias gradient several programs add up.
    yield Comparison("bias_gelu-70x300", ops.bias_gelu, gelu, {"x": (70, 300), "bias": (300,)}, is_large=True)
    for rows, width in ((5, 100), (1, 1), (3, 2500)):
        row, wide = (rows, width), dict[str, tuple[int, ...]](both=(rows, 2 * width))
        kinds: list[tuple[str, Function, Function, dict[str, tuple[int, ...]]]] = [
            ("bias_gelu", ops.bias_gelu, gelu, {"x": row, "bias": (width,)}),
            ("swiglu", ops.swiglu, silu_product, {"gate": row, "up": row}),
            ("swiglu-halves", swiglu_of_chunks, lambda both: silu_product(*both.chunk(2, dim=-1)), wide),
            ("swiglu_of_halves", ops.swiglu_of_halves, lambda both: silu_product(*both.chunk(2, -1)[::-1]), wide),
        ]
        special: Any = {"reference": lambda x: activation._gelu_forward(x, None), "scale": {"x": 3.0}}
        yield Comparison(f"gelu-{rows}x{width}", ops.gelu, gelu, {"x": row}, **special)
        for name, operator, oracle, shapes in kinds:
            yield Comparison(f"{name}-{rows}x{width}", operator, oracle, shapes)


def _dropouts() -> Iterator[Comparison]:
    def oracle(x: Tensor, residual: Tensor, *, probability: float, seed: int) -> Tensor:
        mask = ops.dropout_mask(x.shape, probability=probability, seed=seed, device=x.device)
        return residual + mask * x / (1.0 - probability)

    for rows, width, seed in ((5, 100, 1), (3, 1, 2**63 - 1), (2, 2501, 12345678901)):
        shapes, fixed = dict.fromkeys(("x", "residual"), (rows, width)), {"probability": 0.3, "seed": seed}
        yield Comparison(f"dropout_add-{rows}x{width}", ops.dropout_add, oracle, shapes, fixed=fixed)


def attention_oracle(query: Tensor, key: Tensor, value: Tensor, *, slopes: Tensor | None, **seen_by: Any) -> Tensor:
    """With all weights; `seen_by` are the arguments of Visibility."""
    seen = Visibility(**seen_by).mask(range(query.shape[2]), range(query.shape[2]), query.device)
    return with_all_weights(query, key, value, seen=seen, slopes=slopes)[0]


def _attentions() -> Iterator[Comparison]:
    def operator(query: Tensor, key: Tensor, value: Tensor, *, slopes: Tensor | None, **seen_by: Any) -> Tensor:
        return block_attention(query, key, value, view=Visibility(**seen_by), slopes=slopes)[0]

    # No multiple of a block of queries or of keys; 142 positions are more than one of queries of 16 bits.
    documents = torch.tensor([[1] * 40 + [2] * 90 + [3] * 7 + [0] * 5])
    slopes = torch.tensor(ops.alibi_slopes(2))
    for name, (length, groups, size), options in (
        ("alibi", (70, 2, 16), {"causal": True, "slopes": slopes}),
        ("window-both-ways-alibi", (41, 1, 24), {"causal": False, "window": 30, "slopes": slopes}),
        ("window", (70, 1, 8), {"causal": True, "window": 37}),
        ("documents", (142, 1, 16), {"causal": True, "documents": documents}),
        ("documents-both-ways-window", (70, 2, 16), {"causal": False, "documents": documents[:, 72:], "window": 20}),
        ("one-position", (1, 2, 8), {"causal": True, "window": 1}),
    ):
        shapes = {"query": (1, 2, length, size)} | dict.fromkeys(("key", "value"), (1, groups, length, size))
        special: Any = {"fixed": {"slopes": None, **options}, "is_large": "documents" in name}
        yield Comparison(f"attention-{name}-{length}", operator, attention_oracle, shapes, **special)
    shapes = {"query": (2, 1, 36, 8), "key": (2, 1, 34, 8), "value": (2, 1, 34, 8)}
    fixed = {"documents": torch.cat([documents[:, 20:90], documents.flip(1)[:, :70]])}
    name = "attention-documents-keys-of-another-rank"
    yield Comparison(name, _over_earlier_keys, _over_earlier_keys_oracle, shapes, fixed=fixed)


def _over_earlier_keys(query: Tensor, key: Tensor, value: Tensor, *, documents: Tensor) -> Tensor:
    """Queries after all keys, of which some see none."""
    view = Visibility(causal=True, documents=documents)
    return block_attention(query, key, value, view=view, offset=key.shape[2])[0]


def _over_earlier_keys_oracle(query: Tensor, key: Tensor, value: Tensor, *, documents: Tensor) -> Tensor:
    keys = key.shape[2]
    seen = (documents[:, keys:, None] == documents[:, None, :keys])[:, None]
    weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).exp() * seen
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30) @ value


def _experts() -> Iterator[Comparison]:
    """Experts with none, one, and more rows than a tile has; widths that no block divides."""
    for counts, outputs, inputs in (((0, 1, 20, 0, 2), 33, 40), ((5,), 1, 1), ((0, 0), 8, 16)):
        groups = RowGroups(counts)

        def linear(x: Tensor, weight: Tensor, groups: RowGroups = groups) -> Tensor:
            return GroupedProducts(TORCH, groups).linear(x, weight)

        def loop(x: Tensor, weight: Tensor, groups: RowGroups = groups) -> Tensor:
            return torch.cat([x[rows] @ matrix.t() for rows, matrix in zip(groups.ranges(), weight, strict=True)])

        shapes = {"x": (sum(counts), inputs), "weight": (len(counts), outputs, inputs)}
        yield Comparison(f"grouped_linear-{sum(counts)}x{inputs}-to-{outputs}-of-{len(counts)}", linear, loop, shapes)
    for tokens, chosen, width in ((7, 3, 77), (1, 1, 5), (2, 2, 2100)):
        indices = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(tokens)).topk(chosen).indices
        indices[-1, -1] = 8 if chosen > 1 else indices[-1, -1]  # the last choice is not sent
        assignment = assign(indices, 8, ALONE, sends_all=chosen == 1)
        sent = (indices < 8).double()

        def there_and_back(tokens: Tensor, weights: Tensor, assignment: Assignment = assignment) -> Tensor:
            there = {name: getattr(assignment, name).to(tokens.device) for name in ("order", "positions")}
            here = replace(assignment, **there)
            rows = dispatch(tokens, here, ALONE)
            return combine(rows * rows, weights.float(), here, ALONE)

        def weighted(tokens: Tensor, weights: Tensor, sent: Tensor = sent) -> Tensor:
            return tokens * tokens * (weights * sent.to(weights.device)).sum(-1, keepdim=True)

        shapes = {"tokens": (tokens, width), "weights": (tokens, chosen)}
        yield Comparison(f"experts_rows-{tokens}x{chosen}x{width}", there_and_back, weighted, shapes)


def _states() -> Iterator[Comparison]:
    """States of odd sizes, passed on by a matrix or by its diagonal; more columns than a program has; one chunk."""

    def operator(passes: Tensor, makes: Tensor, state: Tensor) -> Tensor:
        return states_between_chunks(passes.float(), makes.float(), state.float()).to(state.dtype)

    def oracle(passes: Tensor, makes: Tensor, state: Tensor) -> Tensor:
        matrices, states = passes if passes.shape[-1] > 1 else passes * torch.eye(passes.shape[2]).to(passes), [state]
        for n in range(makes.shape[1]):
            states.append(torch.einsum("hij,hjv->hiv", matrices[:, n], states[n]) + makes[:, n])
        return torch.stack(states, 1)

    for chunks, rows, columns, passed in ((3, 6, 37, 6), (4, 20, 5, 1), (1, 2, 3, 2)):
        shapes = {"passes": (2, chunks, rows, passed), "makes": (2, chunks, rows, columns), "state": (2, rows, columns)}
        name = f"states-{chunks}x{rows}x{columns}-by-{passed}"
        yield Comparison(name, operator, oracle, shapes, scale={"passes": 0.3})


# ---- one comparison


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Comparison:
    """An operator, what it should compute, and inputs.

    Attributes:
        name: of the operator and what is special about the inputs.
        operator: takes the inputs by name.
        oracle: the same function in plain torch, for double precision.
        shapes: of the inputs, which are normally distributed.
        reference: the plain-torch form of the custom operator, where `operator` does not reach it.
        fixed: inputs that stay as they are (masks, targets).
        scale: of inputs that are not to have a standard deviation of 1.
        is_large: Triton's interpreter takes long: `make test` has it in bf16 alone.
    """

    name: str
    operator: Function
    oracle: Function
    shapes: Mapping[str, tuple[int, ...]]
    reference: Function | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    scale: Mapping[str, float] = field(default_factory=dict)
    is_large: bool = False

    def __str__(self) -> str:
        return self.name


def compare(comparison: Comparison, function: Function, dtype: torch.dtype, device: torch.device) -> None:
    """Run the function and the oracle on the same numbers; results and gradients must agree."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    scale = comparison.scale
    inputs = {name: random(shape, scale.get(name, 1.0)).requires_grad_() for name, shape in comparison.shapes.items()}
    fixed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in comparison.fixed.items()}
    results = _as_tuple(function(**inputs, **fixed))
    cotangents = [random(tuple(result.shape)) for result in results]
    gradients = torch.autograd.grad(
        results, list(inputs.values()), [g.to(r.dtype) for g, r in zip(cotangents, results, strict=True)]
    )

    doubles = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    expected = _as_tuple(comparison.oracle(**doubles, **fixed))
    expected_gradients = torch.autograd.grad(expected, list(doubles.values()), [g.double() for g in cotangents])
    for index, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        _close(found, wanted, dtype, f"result {index}")
    for name, found, wanted in zip(inputs, gradients, expected_gradients, strict=True):
        assert found.dtype == dtype
        _close(found, wanted, dtype, f"gradient of {name}")


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == wanted.shape, what
    assert torch.isfinite(found).all(), f"{what} is not finite"
    if wanted.numel():
        error, largest = (found.double() - wanted).abs().max().item(), wanted.abs().max().item()
        bound = TOLERANCE[dtype] * max(largest, 0.1)
        assert error <= bound, f"{what}: error {error:.3e}, allowed {bound:.3e} (largest {largest:.3e})"
