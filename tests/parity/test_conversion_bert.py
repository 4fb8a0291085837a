"""Conversion of BERT: there and back, with and without the sentence task, and a config.json made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from megacore.convert.check import Agreement, check_tokens, compare
from megacore.convert.checkpoint_tensors import CheckpointTensors
from megacore.convert.from_hf import open_model
from tests.e2e.launching import alone, words
from tests.parity.bert_twins import classic_twin, modern_twin
from tests.parity.conversions import forget_the_config, loads_as, require_same, to_hf, to_megacore, tokenizer, weights
from tests.parity.hf_models import disturbed

MARKS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


def save(folder: Path, *, sentences: bool) -> Path:
    """The twin as transformers saves it."""
    twin = classic_twin()
    if not sentences:
        masked = transformers.BertForMaskedLM(twin.config)
        missing, _ = masked.load_state_dict(twin.state_dict(), strict=False)
        assert not missing
        twin = masked
    twin.save_pretrained(folder / "hf")
    return folder / "hf"


def there_and_back(folder: Path) -> tuple[CheckpointTensors, Agreement]:
    """Convert the directory and convert the checkpoint back: the same files, and the same logits of as many tokens."""
    there, here, back = folder / "hf", folder / "megacore", folder / "back"
    to_megacore(there, here)
    to_hf(here, back)
    require_same(weights(back), weights(there))
    assert (back / "config.json").read_bytes() == (there / "config.json").read_bytes()
    found = CheckpointTensors(here)
    agreement = compare(there, here, check_tokens(found.config, folder / "none", None))
    assert agreement.difference <= 1e-5
    return found, agreement


@pytest.mark.parametrize("sentences", [True, False])
def test_there_and_back(sentences: bool, tmp_path: Path) -> None:
    save(tmp_path, sentences=sentences)
    found, agreement = there_and_back(tmp_path)
    assert found.bert is not None
    assert found.bert.sentence_task == ("nsp" if sentences else "none")
    assert agreement.same_choice == 1.0
    kind = transformers.AutoModelForPreTraining if sentences else transformers.AutoModelForMaskedLM
    loaded = kind.from_pretrained(tmp_path / "back")
    assert type(loaded).__name__ == ("BertForPreTraining" if sentences else "BertForMaskedLM")


def test_modernbert_there_and_back(tmp_path: Path) -> None:
    """Its gated MLP has one matrix for both of megacore's."""
    modern_twin().save_pretrained(tmp_path / "hf")
    there_and_back(tmp_path)
    hf = open_model(tmp_path / "hf")
    values = hf.family.from_model(hf.config, hf.bert)
    assert values is not None
    made = transformers.AutoConfig.for_model(**values)
    assert made.layer_types == modern_twin().config.layer_types
    assert made.rope_parameters == modern_twin().config.rope_parameters


@pytest.mark.parametrize(
    "family, types",
    [
        ("Roberta", 2),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("Roberta", "XLMRoberta", "Camembert")),
    ],
)
def test_roberta_there_and_back(family: str, types: int, tmp_path: Path) -> None:
    """Its positions begin after the number of the padding token, which no check has among its tokens."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=42, type_vocab_size=types, pad_token_id=3, initializer_range=0.2, layer_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    disturbed(getattr(transformers, f"{family}ForMaskedLM")(config).eval()).save_pretrained(tmp_path / "hf")
    found, agreement = there_and_back(tmp_path)
    assert (found.config.position_offset, found.config.max_position_embeddings) == (4, 38)
    assert found.shapes["embedding.positions"] == (42, 32)
    assert found.shapes["embedding.segments"] == (types, 32)
    assert agreement.tokens == 38
    forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "anew")
    require_same(weights(tmp_path / "anew"), weights(tmp_path / "hf"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "anew").pad_token_id == 3


def test_old_names_and_stored_copies_come_back(tmp_path: Path) -> None:
    """The first BERT's files call a norm's parameters gamma and beta, and store tied tensors and positions too."""
    directory = save(tmp_path, sentences=True)
    stored = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights(directory).items()
    }
    stored["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"].clone()
    stored["cls.predictions.decoder.bias"] = stored["cls.predictions.bias"].clone()
    constant = {"bert.embeddings.position_ids": torch.arange(24).unsqueeze(0)}
    save_file(stored | constant, directory / "model.safetensors", metadata={"format": "pt"})
    to_megacore(directory, tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    require_same(weights(tmp_path / "back"), stored)


def untied(folder: Path, *, sentences: bool) -> Path:
    """A twin whose output layer is not its embedding, with biases of its own: only the decoder's is added."""
    config = classic_twin().config
    config.tie_word_embeddings = False
    twin = disturbed((transformers.BertForPreTraining if sentences else transformers.BertForMaskedLM)(config).eval())
    assert not torch.equal(twin.cls.predictions.bias, twin.cls.predictions.decoder.bias)
    twin.save_pretrained(folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize(
    ("sentences", "anew"),
    [(True, True), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((True, False), (False, True)))],
)
def test_an_untied_bert_has_the_bias_that_transformers_adds(sentences: bool, anew: bool, tmp_path: Path) -> None:
    directory = untied(tmp_path, sentences=sentences)
    to_megacore(directory, tmp_path / "megacore")
    stored = weights(directory)
    found = CheckpointTensors(tmp_path / "megacore")
    assert torch.equal(found.read("head.bias"), stored["cls.predictions.decoder.bias"])
    if anew:
        forget_the_config(tmp_path / "megacore")
    to_hf(tmp_path / "megacore", tmp_path / "back")
    kind = transformers.BertForPreTraining if sentences else transformers.BertForMaskedLM
    one, other = loads_as(directory, kind), loads_as(tmp_path / "back", kind)
    batch = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(0))
    for logits, expected in zip(other(batch)[:2], one(batch)[:2], strict=True):
        assert torch.equal(logits, expected)
    stored["cls.predictions.bias"] = stored["cls.predictions.decoder.bias"]  # the other changes nothing
    require_same(weights(tmp_path / "back"), stored)


@pytest.mark.parametrize("marked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tokenizer", "none"])
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


def test_a_gpt_cannot_start_from_a_bert(tmp_path: Path) -> None:
    directory = save(tmp_path, sentences=False)
    done = alone(
        *words(init_from_hf=directory, mock_data=True, seq_length=16, train_iters=2, output_dir=tmp_path / "run")
    )
    assert done.returncode == 2
    assert "hf is a bert: convert it with tools/convert_checkpoint.py" in done.stderr
