"""Conversations to tokens and a loss mask: exactly the replies are predicted, whatever the template, and every bad line
is named."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megacore.data.gpt.packing import PackedDataset
from megacore.data.indexed.reader import IndexedDataset
from megacore.data.indexed.sidecar import is_predicted, loss_mask_prefix, open_loss_mask
from megacore.data.indexed.writer import merge
from megacore.data.tokenizers import bounded, chat_template
from megacore.data.tokenizers.chat_template import Passage, PlainTemplate, TokenizerTemplate, load_template
from megacore.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megacore.data.tokenizers.training import train_tokenizer
from megacore.errors import DataError
from tests.unit.data_bytes import read
from tools import preprocess_data

# In transformers' own notation for what is predicted, which ours does not read.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITHOUT_REPLIES = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TRIMMED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
LAST_ONE_DIFFERS = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}!{% endif %}{% endfor %}"
CONVERSATIONS: list[list[dict[str, str]]] = json.loads(
    Path(__file__).with_name("conversations.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text], "bpe", 400).save(folder)
    return folder


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def with_template(directory: Path, folder: Path, template: str) -> Path:
    """A copy of the tokenizer's directory with a chat template."""
    folder.mkdir()
    for file in directory.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def run(directory: Path, source: Path, prefix: Path, *flags: str) -> int:
    workers = () if "--workers" in flags else ("--workers", "1")
    argv = ["--sft", "--tokenizer", directory, "--input", source, "--output-prefix", prefix, *workers, *flags]
    return preprocess_data.main([str(part) for part in argv])


def test_the_plain_template_marks_replies_and_ends_them(tokenizer: Tokenizer) -> None:
    passages = PlainTemplate().render(CONVERSATIONS[1])
    assert [passage.text for passage in passages] == [
        "<|system|>\nYou count.\n<|user|>\none\n<|assistant|>\ntwo, three",
        "\n<|user|>\nfour\nfive\n<|assistant|>\n  six ü 7",
    ]
    assert all(passage.ends for passage in passages)
    assert [passage.text[slice(*passage.predicted[0])] for passage in passages] == ["two, three", "  six ü 7"]


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_the_tokenizers_template_predicts_what_transformers_does(directory: Path, tmp_path: Path, number: int) -> None:
    folder = with_template(directory, tmp_path / "chat", CHATML)
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        CONVERSATIONS[number], return_dict=True, return_assistant_tokens_mask=True
    )
    tokenizer = load_tokenizer(folder)
    template = load_template(folder, "auto", tokenizer)
    assert isinstance(template, TokenizerTemplate)
    (passage,) = template.render(CONVERSATIONS[number])
    ids, mask = chat_template.encode_passage(tokenizer, passage)
    assert ids == theirs["input_ids"]
    assert mask == theirs["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


def test_a_token_over_the_edge_of_a_reply_belongs_to_it(tokenizer: Tokenizer) -> None:
    """Where the prompt's last character and the reply's first ones are one token."""
    text = "self" + "self.parser"
    whole = tokenizer.encode(text)
    for at in range(len(text) + 1):
        ids, mask = chat_template.encode_passage(tokenizer, Passage(text=text, predicted=((at, len(text)),)))
        assert ids == whole and mask == sorted(mask)
        before = tokenizer.decode(ids[: mask.index(1)] if 1 in mask else ids)
        assert text.startswith(before) and len(before) <= at


def test_a_template_that_does_not_render_turn_by_turn_is_refused(directory: Path, tmp_path: Path) -> None:
    template = TokenizerTemplate(with_template(directory, tmp_path / "chat", LAST_ONE_DIFFERS))
    with pytest.raises(ValueError, match=r"message 3 when later ones follow, .* use --chat-template plain"):
        template.render(CONVERSATIONS[1])


def test_a_template_without_replies_is_refused_with_the_lines(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_template(directory, tmp_path / "chat", WITHOUT_REPLIES)
    source = lines(tmp_path / "a.jsonl", [{"messages": each} for each in CONVERSATIONS[:2]])
    assert run(folder, source, tmp_path / "out") == 2
    told = capsys.readouterr().err
    for line, message in ((1, 2), (2, 3)):
        assert f"{source}:{line}: the chat template leaves out the reply of message {message}" in told
    assert not list(tmp_path.glob("out*"))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(t='a') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
HOSTILE = {
    "loops": (LOOPS, "takes more than 0.2 s"),
    "multiplies": ("{{ 'a' * 10 ** 10 }}", "needs more than 1,024 MiB"),
    "writes": ("{% for i in range(1000) %}{{ 'a' * 10 ** 5 }}{% endfor %}", " more than "),
    "doubles": (DOUBLES, " more "),
}


@pytest.mark.parametrize(
    ("name", "workers"), [("loops", "2"), *((name, "1") for name in ("multiplies", "writes", "doubles"))]
)
def test_a_template_has_limits(
    name: str,
    workers: str,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reached when it is loaded, or by a conversation."""
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    template, said = HOSTILE[name]
    if workers == "2":
        template = "{% if messages[0]['content'] != 'a' %}" + template + "{% endif %}"
    folder = with_template(directory, tmp_path / "t", template + TRIMMED)
    source = lines(tmp_path / "c.jsonl", [{"messages": CONVERSATIONS[0]}])
    assert run(folder, source, tmp_path / "out", "--workers", workers) == 2
    error = capsys.readouterr().err
    assert f"the chat template of {folder} " in error
    assert said in error
    assert error.count("\n") == 1
    assert (f"{source}:1: " in error) == (workers == "2")


def test_a_template_may_trim_replies(directory: Path, tmp_path: Path) -> None:
    template = TokenizerTemplate(with_template(directory, tmp_path / "chat", TRIMMED))
    (passage,) = template.render(CONVERSATIONS[1])
    assert "six ü 7\n" in passage.text[slice(*passage.predicted[-1])]


def test_a_template_that_is_not_there_is_refused(directory: Path, tokenizer: Tokenizer) -> None:
    assert isinstance(load_template(directory, "auto", tokenizer), PlainTemplate)
    with pytest.raises(DataError, match=r"--chat-template tokenizer: .* has none .* use --chat-template plain"):
        load_template(directory, "tokenizer", tokenizer)


def test_the_outputs_are_an_ordinary_dataset_and_its_mask(directory: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1 + 1 =", "completion": " 2"}
    source = lines(tmp_path / "a.jsonl", [*({"messages": each} for each in CONVERSATIONS), pair])
    assert run(directory, source, tmp_path / "one") == 0
    prefix, tokenizer = f"{tmp_path}/one_sft_document", load_tokenizer(directory)
    documents, masks = read(prefix), read(loss_mask_prefix(prefix))
    predicted = [
        tokenizer.decode([token for token, m in zip(ids, mask, strict=True) if m and token != tokenizer.eod])
        for (ids,), (mask,) in zip(documents, masks, strict=True)
    ]
    replies = [[m["content"] for m in each if m["role"] == "assistant"] for each in CONVERSATIONS]
    assert predicted == ["".join(each) for each in replies] + [" 2"]
    ends = [sum(m for token, m in zip(ids, mask, strict=True) if token == tokenizer.eod) for (ids,), (mask,) in
            zip(documents, masks, strict=True)]  # fmt: skip
    assert ends == [len(each) for each in replies] + [1]
    # What the model sees: labels that count are the replies, packed or not.
    indexed = IndexedDataset(prefix)
    data = PackedDataset(indexed, range(4), "best-fit", num_samples=8, seq_length=120, seed=1)
    counted = [sample["labels"][sample["loss_mask"] > 0].tolist() for sample in map(data.__getitem__, range(8))]
    total = sum(sum(mask[1:]) for (mask,) in masks)
    assert sum(map(len, counted[: data.packing.samples])) == total


def test_every_bad_line_is_named_and_nothing_is_written(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"role": "assistant", "content": "a"}
    bad: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ({"text": "a"}, "no key 'prompt' and no key 'completion'"),
        ({"prompt": "a"}, "no key 'completion'"),
        ({"prompt": "a", "completion": ""}, "key 'completion' is empty"),
        ({"messages": [reply, {"role": "user"}]}, "message 2 has no 'content'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the role 'assistant' has content"),
        (
            {"messages": [{"role": "tool", "content": "a"}, reply]},
            "the role 'tool' is unknown to --chat-template plain",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "'content' of message 1 holds NoneType, not text"),
    ]
    good = {"messages": [reply]}
    source = lines(tmp_path / "a.jsonl", [part for each, _ in bad for part in (good, each)])
    assert run(directory, source, tmp_path / "out") == 2
    told = capsys.readouterr().err.splitlines()
    assert "8 bad lines; nothing is written" in told[0]
    for number, (line, (_, words)) in enumerate(zip(told[1:], bad, strict=True), 1):
        assert line.strip().startswith(f"{source}:{2 * number}: ") and words in line
    assert not list(tmp_path.glob("out*"))


def test_masks_are_merged_with_their_datasets(directory: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        source = lines(tmp_path / f"{name}.jsonl", [{"prompt": name, "completion": f"{name} and so on"}] * 3)
        assert run(directory, source, tmp_path / name) == 0
    parts, merged = [f"{tmp_path}/{name}_sft_document" for name in ("a", "b")], f"{tmp_path}/all"
    merge(parts, merged)
    mask = open_loss_mask(IndexedDataset(merged))
    assert mask is not None
    expected = [read(loss_mask_prefix(part)) for part in parts]
    assert read(loss_mask_prefix(merged)) == expected[0] + expected[1]
    for path in (Path(f"{loss_mask_prefix(parts[1])}.{end}") for end in ("bin", "idx")):
        path.unlink()
    with pytest.raises(DataError, match="only 1 of the 2 inputs have one"):
        merge(parts, f"{tmp_path}/more")
    assert np.all(IndexedDataset(merged).sequence_lengths > 0)


def test_a_mask_of_other_values_is_refused_where_they_are_read(directory: Path, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b and so on"}] * 3)
    assert run(directory, source, tmp_path / "a") == 0
    dataset = IndexedDataset(f"{tmp_path}/a_sft_document")
    path = Path(f"{loss_mask_prefix(dataset.prefix)}.bin")
    values = np.frombuffer(path.read_bytes(), np.uint8)
    path.write_bytes((values * 255).tobytes())
    mask = open_loss_mask(dataset)
    assert mask is not None
    with pytest.raises(DataError, match=rf"has the value 255 for token {values.argmax()}, and a loss mask has 0 and 1"):
        is_predicted(mask, 0, len(values))
    assert is_predicted(mask, 0, 1).tolist() == [0]
