"""Mixtures of experts: rows that reach their experts and come back, and biases that balance
them; one layer against a loop over all experts.

That every layout computes what one process computes are rows of tests/matrix."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.checkpoint.check import check_load
from megacore.checkpoint.manifest import find_checkpoint, read_manifest, trained_model
from megacore.config import ExpertsConfig, ModelConfig, ResolvedExperts, ResolvedModel
from megacore.errors import CheckpointError
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import model_of
from megacore.layers import moe
from megacore.layers.context import BuildContext
from megacore.layers.moe import MoE, Router, choose
from megacore.models.gpt import gpt_layers
from megacore.ops.grouped import RowGroups
from megacore.parallel.experts import ExpertRanks, GroupedLinear, assign, combine, dispatch
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.parallel.products import TORCH
from megacore.parallel.random import RandomStreams
from megacore.parallel.recompute import recompute
from megacore.parallel.sharding import split_evenly
from megacore.train.expert_balance import ExpertBalance
from tests.distributed import run_distributed
from tests.matrix.programs import LATENT, PARTS, PROGRAMS
from tests.parity.runs import make_config, make_trainer, trainer_of

# ---- rows

TOKENS, HIDDEN, WIDTH, EXPERTS = (5, 1, 7, 4), 6, 3, 8
ROUTINGS = ["random", "all to one expert", "all to the last rank", "one token each"]


def indices_of(routing: str, rank: int, ranks: int) -> Tensor:
    """[t, 2] ascending, of a rank's tokens."""
    tokens = 1 if routing == "one token each" else TOKENS[rank]
    if routing == "all to one expert":
        return torch.tensor([[0, 1]]).expand(tokens, 2)
    first = EXPERTS - EXPERTS // ranks if routing == "all to the last rank" else 0
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randperm(EXPERTS - first, generator=generator)[:2].sort().values + first for _ in range(tokens)]
    return torch.stack(rows)


def drawn(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, weights, and the gradient of what comes back."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, grad = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    return x.requires_grad_(), torch.rand(tokens, 2, generator=generator).requires_grad_(), grad


def matrices() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)


def mixed(rank: int, world_size: int) -> dict[str, tuple[Tensor, ...]]:
    """A linear layer of each expert, over all ranks: outputs and gradients of each routing."""
    group = build_mesh(make_config((1, 1, world_size), "", ep=world_size).parallel).dispatch
    results: dict[str, tuple[Tensor, ...]] = {}
    for routing in ROUTINGS:
        indices = indices_of(routing, rank, world_size)
        x, weights, grad = drawn(rank, len(indices))
        linear = GroupedLinear(
            EXPERTS, HIDDEN, HIDDEN, ranks=ExpertRanks(dispatch=group), split=1, products=TORCH, device=x.device
        )
        linear.weight.data.copy_(linear.weight.spec.take(matrices()))
        assignment = assign(indices, EXPERTS, group)
        rows = linear(dispatch(x, assignment, group), RowGroups(assignment.counts[0]))
        y = combine(rows, weights, assignment, group)
        y.backward(grad)
        assert x.grad is not None and weights.grad is not None and linear.weight.grad is not None
        results[routing] = (y.detach(), x.grad, weights.grad, linear.weight.grad)
    return results


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_reach_their_experts_and_come_back(ranks: int) -> None:
    """Also where a rank gets no row, or all of them: against a loop over tokens in one process."""
    results = run_distributed(mixed, ranks, stay=True)
    for routing in ROUTINGS:
        weight = matrices().requires_grad_()
        for rank in range(ranks):
            indices = indices_of(routing, rank, ranks)
            x, weights, grad = drawn(rank, len(indices))
            of_chosen = torch.einsum("tcoi,ti->tco", weight[indices], x)  # [t, 2, o]
            expected = (weights[..., None] * of_chosen).sum(1)
            expected.backward(grad)
            found = results[rank][routing]
            for one, other in zip(found, (expected.detach(), x.grad, weights.grad), strict=False):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for rank in range(ranks):
            start, stop = split_evenly(EXPERTS, rank, ranks)
            assert weight.grad is not None
            torch.testing.assert_close(results[rank][routing][3], weight.grad[start:stop], rtol=1e-5, atol=1e-6)


# ---- balance


def test_biases_follow_the_counts_of_training_forwards(tmp_path: Path) -> None:
    """Against counts of what was chosen in training, each microbatch once, also where it is computed again."""
    bias = PROGRAMS["bias"] | {"recompute": "full", "train_iters": 2, "num_layers": 2, "eval_iters": 1}
    trainer = trainer_of((1, 1, 1), tmp_path, **bias)
    balance, choices, choose = trainer.train_steps.hook(ExpertBalance), list[Tensor](), moe.choose
    assert balance is not None

    def watched(logits: Tensor, experts: Any, bias: Tensor, chosen: Tensor | None, *others: Any) -> moe.Choice:
        choices.append(choose(logits, experts, bias, chosen, *others).indices)
        preferred = (logits.detach().softmax(-1) + bias).sort(-1, descending=True).values
        gaps[0] = min(gaps[0], float((preferred[..., 1] - preferred[..., 2]).min()))
        return choose(logits, experts, bias, chosen, *others)

    expected, gaps = torch.zeros(4), [1.0]
    for _ in range(2):
        choices.clear()
        gaps[0] = 1.0
        with mock.patch.object(moe, "choose", watched):
            trainer.train_step(next(trainer.batches))
        assert len(choices) == 8  # of 4 microbatches, each computed again
        counts = torch.zeros(4, dtype=torch.int64)
        for indices in choices[::2]:
            counts += torch.tensor([int((indices == expert).sum()) for expert in range(4)])
        assert counts.sum() == 8 * 16 * 2
        (load,) = balance.loads().values()
        assert torch.equal(load, counts)
        expected += 0.01 * (counts.double().mean() - counts).sign().float()
        (found,) = balance.buffers().values()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
        violation = float(counts.max() / counts.double().mean() - 1)
        assert balance.figures() == {
            "moe/max_violation": pytest.approx(violation),
            "moe/mean_violation": pytest.approx(violation),
            "moe/idle_experts": int((counts == 0).sum()),
            "moe/smallest_gap": pytest.approx(gaps[0]),
            "moe/block_1/max_violation": pytest.approx(violation),
            "moe/block_1/min_load": pytest.approx(float(counts.min() / counts.double().mean())),
            "moe/block_1/smallest_gap": pytest.approx(gaps[0]),
        }
    trainer.evaluate()
    balance.after_update(trainer.train_steps, mock.Mock(skipped="not finite"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_a_bias_is_fp32_in_sixteen_bits(tmp_path: Path) -> None:
    """1e-3 and sums of it are no numbers of bf16. A checkpoint holds it, and generation reads it."""
    bias = PROGRAMS["bias"] | {"moe_router_bias_update_rate": 1e-3, "train_iters": 2, "num_layers": 2}
    trainer = trainer_of((1, 1, 1), tmp_path, **bias, precision="bf16")
    balance, expected, rate = trainer.train_steps.hook(ExpertBalance), torch.zeros(4), torch.tensor(1e-3)
    assert balance is not None
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
        (load,) = balance.loads().values()
        expected += rate * (load.double().mean() - load).sign().float()
    (found,) = balance.buffers().values()
    assert found.dtype == torch.float32 and found.any() and torch.equal(found, expected)
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    whole = model_of(directory, partial(gpt_layers, model), torch.device("cpu"))
    (read,) = (buffer for name, buffer in whole.named_buffers() if name.endswith("router.bias"))
    assert torch.equal(read, found)
    with pytest.raises(CheckpointError, match="--num-experts 4 there, 8 here"):
        check_load(make_config((1, 1, 1), tmp_path / "one", load=str(tmp_path), **bias | {"num_experts": 8}))


# ---- latent attention, with experts

CPU = torch.device("cpu")


def test_a_checkpoint_generates_what_the_trained_model_predicts(tmp_path: Path) -> None:
    changes = LATENT | PARTS["latent-experts"] | {"train_iters": 1, "lr_warmup_iters": 0}
    trainer = make_trainer(make_config((1, 1, 1), tmp_path, **changes), Mesh(device=CPU))
    trainer.train_step(next(trainer.batches))
    trainer.save()
    directory = find_checkpoint(tmp_path)
    model = trained_model(read_manifest(directory), directory)
    stage = model_of(directory, partial(gpt_layers, model), CPU)
    tokens = [5, 9, 2]
    found = list(generate(stage, model, tokens, max_new_tokens=4, sampling=Sampling(temperature=0.0)))
    trained = trainer.model.chunks[0].eval()
    with torch.no_grad():
        for _ in range(4):
            tokens = [*tokens, int(trained(torch.tensor([tokens]))[0, -1, : model.vocab_size].argmax())]
    assert found == tokens[3:]


# ---- one layer against a loop over all experts in double precision


H, FFN, WIDE, B, S, SEQUENCES = 16, 24, 20, 3, 7, 5


def model_with(activation: str = "swiglu", **fields: Any) -> ResolvedModel:
    model = ModelConfig(
        hidden_size=H, num_attention_heads=4, ffn_hidden_size=FFN, activation=activation, disable_bias_linear=True
    )
    fields = {"num_experts": 6, "moe_ffn_hidden_size": WIDE, **fields}
    return model.resolve(seq_length=S, vocab_size=32, experts=ExpertsConfig(**fields).resolve(FFN))


def built(model: ResolvedModel, seed: int = 3) -> MoE:
    ranks = ExpertRanks(sequences=SEQUENCES)
    layer = MoE(model, BuildContext(device=CPU, streams=RandomStreams(0, CPU), experts=ranks))
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return layer


def batch(seed: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(B, S, H, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad


def experts_of(model: ResolvedModel) -> ResolvedExperts:
    assert model.experts is not None
    return model.experts


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def weights_of(layer: MoE) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda up: F.gelu(up, approximate="tanh"),
    "relu": torch.relu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu-exact": lambda gate, up: F.gelu(gate) * up,
}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a layer reads besides its input.

    Attributes:
        noise: [b, s, h], by which the router's input is multiplied.
        loads: how often each expert was chosen in the last step.
        padding: [b, s], 1 for padding.
    """

    noise: Tensor | None = None
    loads: Tensor | None = None
    padding: Tensor | None = None


def dense(x: Tensor, values: dict[str, Tensor], model: ResolvedModel, grad: Tensor, given: Given) -> tuple[Tensor, int]:
    """The layer's output, each expert computed for each token, and how many choices are dropped. What is trained with
    it: <output, grad> and the losses of the router, token by token and sequence by sequence."""
    experts, dropped = experts_of(model), 0
    chosen, total, trained = experts.moe_router_topk, [], x.new_zeros(())
    for number, (sequence, of_output) in enumerate(zip(x, grad, strict=True)):
        real = range(S) if given.padding is None else [s for s in range(S) if not given.padding[number, s]]
        counts, shares, squares = torch.zeros(experts.num_experts), x.new_zeros(experts.num_experts), x.new_zeros(())
        weights: dict[tuple[int, int], Tensor] = {}  # by token and expert
        for place in real:
            token = sequence[place] if given.noise is None else sequence[place] * given.noise[number, place]
            logits = values["router.weight"] @ token
            is_softmax = experts.moe_router_score_function == "softmax"
            scores = logits.exp() / logits.exp().sum() if is_softmax else 1 / (1 + (-logits).exp())
            picked = sorted(range(experts.num_experts), key=lambda e: (-scores[e].item(), e))[:chosen]
            whole = sum(scores[e] for e in picked) if not experts.moe_router_pre_softmax else 1.0
            for e in picked:
                weights[place, e] = scores[e] / whole
                counts[e] += 1
            shares = shares + scores / scores.sum()
            squares = squares + torch.log(logits.exp().sum()) ** 2
        kept = within_capacity(weights, experts)
        dropped += len(weights) - len(kept)
        for place, token in enumerate(sequence):
            y = torch.zeros_like(token)
            for e in [e for e in range(experts.num_experts) if (place, e) in kept]:
                up = values["experts.up.weight"][e] @ token
                inner = (values["experts.gate.weight"][e] @ token, up) if model.gated else (up,)
                y = y + weights[place, e] * (values["experts.down.weight"][e] @ ACTIVATIONS[model.activation](*inner))
            total.append(y)
            trained = trained + (y * of_output[place]).sum()
        f = counts.double() * experts.num_experts / (chosen * len(real))
        if given.loads is not None:
            f = given.loads.double() * experts.num_experts / given.loads.sum()
        trained = trained + experts.moe_aux_loss_coeff * (f * shares / len(real)).sum() / SEQUENCES
        trained = trained + experts.moe_z_loss_coeff * squares / len(real) / SEQUENCES
    trained.backward()
    return torch.stack(total).detach().view_as(x), dropped


def within_capacity(weights: dict[tuple[int, int], Tensor], experts: ResolvedExperts) -> set[tuple[int, int]]:
    """The pairs of token and expert of a sequence that are kept: of each expert the first ones in the order of its
    policy."""
    if experts.moe_expert_capacity_factor is None:
        return set(weights)
    capacity = -int(-experts.moe_expert_capacity_factor * experts.moe_router_topk * S // experts.num_experts)
    kept: set[tuple[int, int]] = set()
    for e in range(experts.num_experts):
        pairs = sorted(pair for pair in weights if pair[1] == e)
        if experts.moe_token_drop_policy == "probs":
            pairs.sort(key=lambda pair: -weights[pair].item())
        kept.update(pairs[:capacity])
    return kept


GLOBAL: dict[str, Any] = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 2.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 3.0, "moe_z_loss_coeff": 0.5},
        {"activation": "gelu", "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 2.0},
        {"activation": "geglu-exact", "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 2.0},
        {"activation": "relu", "moe_router_topk": 6, "moe_z_loss_coeff": 1.0},  # every expert
        {"moe_expert_capacity_factor": 0.6, "moe_aux_loss_coeff": 2.0},
        {"moe_expert_capacity_factor": 0.3, "moe_token_drop_policy": "position", "moe_router_topk": 3},
        {"moe_expert_capacity_factor": 5.0},  # nobody drops
        {"moe_input_jitter_eps": 0.2, "moe_z_loss_coeff": 0.5},
        GLOBAL,
        {"moe_aux_loss_coeff": 2.0, "moe_z_loss_coeff": 0.5, "moe_expert_capacity_factor": 0.6, "pads": True},
        GLOBAL | {"moe_input_jitter_eps": 0.2, "pads": True},
    ],
    ids=str,
)
def test_outputs_losses_and_gradients_equal_a_loop_over_all_experts(fields: dict[str, Any]) -> None:
    fields = dict(fields)
    padding = torch.arange(S) >= torch.tensor([[4], [7], [1]]) if fields.pop("pads", False) else None
    model = model_with(**fields)
    layer, (x, grad) = built(model), batch()
    given = Given(padding=padding)
    if layer.router.loads is not None:
        layer.router.loads.copy_(torch.tensor([5, 0, 9, 2, 7, 1]))
        given = dataclasses.replace(given, loads=layer.router.loads)
    if experts_of(model).moe_input_jitter_eps:
        uniform = layer.streams.uniform("", torch.arange(S), samples=B, width=H).double()
        given = dataclasses.replace(given, noise=1.0 + experts_of(model).moe_input_jitter_eps * (2.0 * uniform - 1.0))
    values = {name: value.double().requires_grad_() for name, value in weights_of(layer).items()}
    exact = x.detach().double().requires_grad_()
    expected, dropped = dense(exact, values, model, grad.double(), given)
    y = layer(x, None if padding is None else padding.long())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    assert layer.router.counts[-1] == dropped
    y.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), values[name].grad, rtol=1e-5, atol=2e-5, msg=name)


def test_losses_are_scaled_by_that_of_the_step_alone_and_absent_in_evaluation() -> None:
    model = model_with(moe_aux_loss_coeff=1.0)
    without = dataclasses.replace(model, experts=dataclasses.replace(experts_of(model), moe_aux_loss_coeff=0.0))
    x, grad = batch()
    gradients = []
    for each, scale in ((model, 1.0), (model, 8.0), (without, 8.0)):
        layer = built(each)
        layer.ranks.loss_scale.value = scale
        layer(x).backward(grad * scale)
        gradients.append(gradient_of(layer.router.weight) / scale)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)
    assert (gradients[1] - gradients[2]).abs().max() > 1e-3
    layer = built(model).eval()
    layer(x).backward(grad)
    torch.testing.assert_close(layer.router.weight.grad, gradients[2], rtol=1e-6, atol=1e-7)


def test_equal_scores_take_the_first_experts_and_idle_ones_get_gradients_of_zero() -> None:
    model = model_with()
    layer, (x, grad) = built(model), batch()
    layer.router.weight.data.zero_()
    choice = choose(layer.router(x), experts_of(model))
    assert choice.indices.eq(torch.tensor([0, 1])).all()
    layer(x).backward(grad)
    of_up = layer.experts.up.weight.grad
    assert of_up is not None and of_up[:2].abs().amax((1, 2)).min() > 0 and not of_up[2:].any()


def test_neither_noise_nor_capacity_are_there_in_evaluation() -> None:
    model, x = model_with(moe_input_jitter_eps=0.5, moe_expert_capacity_factor=0.2), batch()[0]
    plain = dataclasses.replace(
        model, experts=dataclasses.replace(experts_of(model), moe_input_jitter_eps=0.0, moe_expert_capacity_factor=None)
    )
    assert torch.equal(built(model).eval()(x), built(plain)(x))
    assert not torch.equal(built(model)(x), built(plain)(x))


def test_a_second_pass_does_not_choose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it may round otherwise. Here its scores are the first pass's, reversed."""
    layer, (x, grad) = built(model_with()), batch()
    expected = built(model_with())
    expected(x.detach().requires_grad_()).backward(grad)
    forward, passes = Router.forward, list[Tensor]()

    def reversed_later(self: Router, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if passes:
            self.weight.data.neg_()
        passes.append(forward(self, x, noise))
        return passes[-1]

    monkeypatch.setattr(Router, "forward", reversed_later)
    recompute(layer, x, streams=layer.streams).backward(grad)
    assert len(passes) == 2 and layer.streams.decided is None
    used = gradient_of(layer.experts.up.weight).abs().amax((1, 2)) > 0
    assert torch.equal(used, gradient_of(expected.experts.up.weight).abs().amax((1, 2)) > 0)
    assert torch.equal(layer.router.counts[:-2] // 2, expected.router.counts[:-2])  # nothing here takes the second out
