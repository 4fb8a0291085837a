"""Every family against transformers' model of it with the same weights, and against itself on other layouts."""

from __future__ import annotations

import pytest
import torch

from megacore.layers.context import BuildContext
from megacore.models.gpt import gpt_layers
from megacore.parallel.cross_entropy import vocab_parallel_cross_entropy
from megacore.parallel.random import RandomStreams
from megacore.pipeline.stage import Stage
from tests.parity.families import FAMILIES, POSITIONS, VOCAB, model_config, reference, translated

CPU = torch.device("cpu")


@pytest.mark.parametrize("implementation", ["sdpa", "fused-softmax"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_is_transformers(name: str, implementation: str) -> None:
    family = FAMILIES[name]
    model, config = reference(family), model_config(family)
    assert config.problems() == []
    context = BuildContext(device=CPU, streams=RandomStreams(0, CPU), attention=implementation)  # type: ignore[arg-type]
    stage = Stage(gpt_layers(config, context)).eval()
    parameters, values = stage.by_name(), translated(family, dict(model.named_parameters()))
    assert parameters.keys() == values.keys()
    assert len(values) + 2 * sum("qkv" in n for n in values) * (name not in ("neox", "bloom")) == len(
        list(model.parameters())
    ), "a tensor of theirs has no counterpart"
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.zero_()
            parameter.spec.own(parameter).copy_(values[key])

    tokens = torch.randint(0, VOCAB, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, labels=tokens)
    logits = stage(tokens)[..., :VOCAB]
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    loss = vocab_parallel_cross_entropy(logits[:, :-1], tokens[:, 1:], vocab_size=VOCAB).mean()
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-6)

    loss.backward()
    expected.loss.backward()
    wanted = translated(family, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for key, parameter in parameters.items():
        assert parameter.grad is not None
        # Relative to the tensor's own size: an entry of it may be zero but for rounding (the key's bias is).
        error = (parameter.spec.own(parameter.grad) - wanted[key]).abs().max()
        assert error <= 1e-5 * wanted[key].abs().max() + 1e-7, f"gradient of {key}: {error}"
