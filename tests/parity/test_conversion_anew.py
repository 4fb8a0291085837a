"""A checkpoint that was trained here has no config.json: the one that is made describes the model to transformers,
which loads every tensor of it and nothing else, and knows the special tokens of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.parity.bert_twins import classic_twin, modern_twin
from tests.parity.conversions import forget_the_config, loads_as, to_hf, to_megacore, tokenizer
from tests.parity.hf_models import CONFIGS, SLOW, make_model, save_model, tokens

ENDS = {"bos": "<begin>", "eos": "<end>"}
MARKS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


# Computed by an earlier family, which adds biases or the products of heads in another order.
ANOTHER_CLASS = {
    "falcon-sequential": transformers.GPTNeoXForCausalLM,
    "ernie": transformers.LlamaForCausalLM,
    "ernie-biases": transformers.LlamaForCausalLM,
    "helium": transformers.LlamaForCausalLM,
    "helium-biases": transformers.SeedOssForCausalLM,
}


def as_mistral_rounds(phi3: nn.Module) -> None:
    """Phi-3's gate is half of one product, so its rows lie apart, and there torch's SiLU differs in the last bit from
    that of Mistral's gate, which is a product of its own."""
    for name, module in phi3.named_modules():
        if name.endswith(".activation_fn"):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONFIGS]
)
def test_every_family_loads_as_the_model_that_it_was(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    directory = save_model(model, tmp_path / "hf")
    (directory / "generation_config.json").unlink()
    tokenizer(ENDS).save(directory)
    to_megacore(directory, tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    loaded = loads_as(tmp_path / "anew", transformers.AutoModelForCausalLM)
    if name == "phi3":
        assert type(loaded) is transformers.MistralForCausalLM
        as_mistral_rounds(model)
    found_logits, logits = loaded(tokens()).logits, model(tokens()).logits
    if name in ANOTHER_CLASS:
        assert type(loaded) is ANOTHER_CLASS[name]
        torch.testing.assert_close(found_logits, logits, rtol=0, atol=1e-5)
    else:
        assert torch.equal(found_logits, logits)
    beside = transformers.AutoTokenizer.from_pretrained(tmp_path / "anew")
    for use in ENDS:
        wanted = getattr(beside, f"{use}_token_id")
        assert wanted is not None
        assert getattr(loaded.config, f"{use}_token_id") == wanted
        assert getattr(loaded.generation_config, f"{use}_token_id") == wanted
    found = json.loads((tmp_path / "anew" / "generation_config.json").read_text())
    assert found["eos_token_id"] == beside.eos_token_id


@pytest.mark.parametrize("name", ["gpt2", "llama2", "bloom"])
def test_without_a_tokenizer_no_token_is_special(name: str, tmp_path: Path) -> None:
    """The families' own ids would be other tokens here, or none: GPT-2's 50256 is beyond this vocabulary."""
    to_megacore(save_model(make_model(name), tmp_path / "hf"), tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "anew")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert not (tmp_path / "anew" / "generation_config.json").exists()


@pytest.mark.parametrize("marked", [True, False], ids=["tokenizer", "none"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [(classic_twin, "BertForPreTraining"), (modern_twin, "ModernBertForMaskedLM")],
    ids=["classic", "modern"],
)
def test_every_bert_loads_as_the_model_that_it_was(make: Any, kind: str, marked: bool, tmp_path: Path) -> None:
    twin = make()
    twin.save_pretrained(tmp_path / "hf")
    if marked:
        tokenizer(MARKS).save(tmp_path / "hf")
    to_megacore(tmp_path / "hf", tmp_path / "megacore")
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    loaded = loads_as(tmp_path / "anew", getattr(transformers, kind))
    batch = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(batch)[0], twin(batch)[0])
    beside = transformers.AutoTokenizer.from_pretrained(tmp_path / "anew") if marked else None
    for use in MARKS:
        wanted = getattr(beside, f"{use}_token_id", None)
        assert (wanted is not None) == marked
        assert getattr(loaded.config, f"{use}_token_id") == wanted
