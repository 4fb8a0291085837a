"""examples/finetune_llama: what prepare.py writes is what the tools take, up to a model that has learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prepare
from tests.e2e.launching import ROOT, alone, records_of, run_warm, words
from tools import convert_checkpoint, preprocess_data


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finetune") / "it"
    assert prepare.main([str(folder)]) == 0
    return folder


def test_it_makes_a_model_and_conversations_that_become_a_dataset(directory: Path, tmp_path: Path) -> None:
    talks = [json.loads(line)["messages"] for line in (directory / "chat.jsonl").read_text().splitlines()]
    answers = {question["content"]: answer["content"] for question, answer in talks}
    assert len(answers) > 150
    assert "uppercase" in answers["What does str.upper do?"]
    files = {"input": directory / "chat.jsonl", "tokenizer": directory / "model", "output_prefix": tmp_path / "chat"}
    assert preprocess_data.main(words(sft=True, **files)) == 0
    assert (tmp_path / "chat_sft_document_loss_mask.bin").exists()
    assert prepare.main([str(directory)]) == 2, "nothing is overwritten"


@pytest.mark.slow
def test_the_pages_commands_lead_to_a_model_that_answers(directory: Path, tmp_path: Path) -> None:
    chat, run, out = tmp_path / "chat", tmp_path / "run", tmp_path / "tuned"
    shared = words(tokenizer=directory / "model")
    assert preprocess_data.main([*words(sft=True, input=directory / "chat.jsonl", output_prefix=chat), *shared]) == 0
    config = ROOT / "examples" / "finetune_llama" / "finetune.toml"
    data = f"{chat}_sft_document"
    flags = words(config=config, init_from_hf=directory / "model", data_path=data, output_dir=run)
    small = words(seq_length=256, micro_batch_size=4, global_batch_size=8, train_iters=120, lr="3e-3", min_lr="3e-4")
    trained = alone(*flags, *shared, *small, *words(lr_warmup_iters=10, eval_iters=1), timeout=300)
    assert trained.returncode == 0, trained.stderr
    records = records_of(run)
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses[-1] < 0.3 * losses[0]
    assert convert_checkpoint.main([*words(input=run, output=out), "--from", "megacore", "--to", "hf"]) == 0
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    prompt = "<|user|>\nWhat does list.append do?\n<|assistant|>\n"  # among the conversations that it has learned
    generate = ROOT / "tools" / "generate.py"
    said = run_warm(generate, *words(checkpoint=run, prompt=prompt, temperature=0, max_new_tokens=24), timeout=120)
    assert said.returncode == 0, said.stderr
    assert "Append object to the end of the list." in said.stdout, said.stdout
