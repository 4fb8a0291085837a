"""One layer with experts in one process: transformers' modules, and a loop over all experts in double precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.config import ExpertsConfig, ModelConfig, ResolvedExperts, ResolvedModel
from megacore.layers.context import BuildContext
from megacore.layers.moe import MoE, choose
from megacore.parallel.experts import ExpertRanks
from megacore.parallel.random import RandomStreams

H, FFN, WIDTH, B, S, SEQUENCES = 16, 24, 20, 3, 7, 5
CPU = torch.device("cpu")


def model_with(activation: str = "swiglu", **fields: Any) -> ResolvedModel:
    model = ModelConfig(
        hidden_size=H,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        activation=activation,  # type: ignore[arg-type]
        disable_bias_linear=True,
    )
    fields = {"num_experts": 6, "moe_ffn_hidden_size": WIDTH, **fields}
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


# ---- transformers


def their_block(family: str, model: ResolvedModel) -> nn.Module:
    """transformers' module of these sizes, with its experts in a loop."""
    experts = experts_of(model)
    sizes = {
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_experts_per_tok": experts.moe_router_topk,
        "num_experts": experts.num_experts,
        "num_local_experts": experts.num_experts,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": WIDTH,
        "experts_implementation": "eager",
    }
    if family == "mixtral":
        from transformers.models.mixtral import modeling_mixtral as theirs

        return theirs.MixtralSparseMoeBlock(theirs.MixtralConfig(**sizes))
    if family == "qwen2_moe":
        from transformers.models.qwen2_moe import modeling_qwen2_moe as theirs

        return theirs.Qwen2MoeSparseMoeBlock(
            theirs.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=12, norm_topk_prob=False)
        )
    if family == "qwen3_moe":
        from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

        return theirs.Qwen3MoeSparseMoeBlock(theirs.Qwen3MoeConfig(**sizes, norm_topk_prob=True))
    if family == "olmoe":
        from transformers.models.olmoe import modeling_olmoe as theirs

        return theirs.OlmoeSparseMoeBlock(theirs.OlmoeConfig(**sizes, norm_topk_prob=False))
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    config = theirs.DeepseekV3Config(
        **sizes, n_group=3, topk_group=2, routed_scaling_factor=2.5, n_shared_experts=1, n_routed_experts=6
    )
    return theirs.DeepseekV3MoE(config)


FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"moe_router_pre_softmax": True, "moe_shared_expert_size": 12, "moe_shared_expert_gate": True},
    "qwen3_moe": {"moe_router_topk": 3},
    "olmoe": {"moe_router_pre_softmax": True, "moe_router_topk": 4},
    "deepseek_v3": {
        "moe_router_score_function": "sigmoid",
        "moe_shared_expert_size": WIDTH,
        "moe_router_topk": 4,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
    },
}
_SHARED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def as_theirs(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by their names."""
    named = {
        "gate.weight": values["router.weight"],
        "experts.gate_up_proj": torch.cat([values["experts.gate.weight"], values["experts.up.weight"]], 1),
        "experts.down_proj": values["experts.down.weight"],
    }
    for theirs, ours in _SHARED.items():
        if (weight := values.get(f"shared.mlp.{ours}.weight")) is not None:
            named |= {f"shared_expert.{theirs}.weight": weight, f"shared_experts.{theirs}.weight": weight}
    if "shared.gate" in values:
        named["shared_expert_gate.weight"] = values["shared.gate"]
    return named


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_equals_that_of_transformers(family: str) -> None:
    model = model_with(**FAMILIES[family])
    ours, theirs = built(model), their_block(family, model)
    known = as_theirs(weights_of(ours))
    parameters = dict(theirs.named_parameters())
    assert parameters.keys() <= known.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(known[name])
        for bias in theirs.buffers():  # DeepSeek's, which moves the choice
            ours.router.bias = torch.tensor([0.3, -0.2, 0.0, 0.1, -0.3, 0.2])
            bias.copy_(ours.router.bias)
    x, grad = batch()
    other = x.detach().clone().requires_grad_()
    y, expected = ours(x), theirs(other)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)
    gradients = as_theirs({name: gradient_of(parameter) for name, parameter in ours.named_parameters()})
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


# ---- all experts for all tokens, in double precision

ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda up: F.gelu(up, approximate="tanh"),
    "relu": torch.relu,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu-exact": lambda gate, up: F.gelu(gate) * up,
}


def dense(x: Tensor, values: dict[str, Tensor], model: ResolvedModel, grad: Tensor) -> Tensor:
    """The layer's output, each expert computed for each token, and what is trained with it: <output, grad> and the
    losses of the router, token by token and sequence by sequence."""
    experts = experts_of(model)
    chosen, total, trained = experts.moe_router_topk, [], x.new_zeros(())
    for sequence, of_output in zip(x, grad, strict=True):
        counts, shares, squares = torch.zeros(experts.num_experts), x.new_zeros(experts.num_experts), x.new_zeros(())
        for token, of_token in zip(sequence, of_output, strict=True):
            logits = values["router.weight"] @ token
            is_softmax = experts.moe_router_score_function == "softmax"
            scores = logits.exp() / logits.exp().sum() if is_softmax else 1 / (1 + (-logits).exp())
            picked = sorted(range(experts.num_experts), key=lambda e: (-scores[e].item(), e))[:chosen]
            whole = sum(scores[e] for e in picked) if not experts.moe_router_pre_softmax else 1.0
            y = torch.zeros_like(token)
            for e in picked:
                up = values["experts.up.weight"][e] @ token
                inner = (values["experts.gate.weight"][e] @ token, up) if model.gated else (up,)
                y = y + scores[e] / whole * (values["experts.down.weight"][e] @ ACTIVATIONS[model.activation](*inner))
                counts[e] += 1
            total.append(y)
            trained = trained + (y * of_token).sum()
            shares = shares + scores / scores.sum()
            squares = squares + torch.log(logits.exp().sum()) ** 2
        f = counts.double() * experts.num_experts / (chosen * S)
        trained = trained + experts.moe_aux_loss_coeff * (f * shares / S).sum() / SEQUENCES
        trained = trained + experts.moe_z_loss_coeff * squares / S / SEQUENCES
    trained.backward()
    return torch.stack(total).detach().view_as(x)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 3.0, "moe_z_loss_coeff": 0.5},
        {"activation": "gelu", "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 2.0},
        {"activation": "geglu-exact", "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 2.0},
        {"activation": "relu", "moe_router_topk": 6, "moe_z_loss_coeff": 1.0},  # every expert
    ],
    ids=str,
)
def test_outputs_losses_and_gradients_equal_a_loop_over_all_experts(fields: dict[str, Any]) -> None:
    model = model_with(**fields)
    layer, (x, grad) = built(model), batch()
    values = {name: value.double().requires_grad_() for name, value in weights_of(layer).items()}
    exact = x.detach().double().requires_grad_()
    expected = dense(exact, values, model, grad.double())
    y = layer(x)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
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
