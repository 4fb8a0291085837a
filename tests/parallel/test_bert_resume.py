"""BERT goes on exactly: stopped in the middle of an epoch and killed between saves, it is bitwise the run that was not.

Masks, pairs and dropout are drawn anew in every epoch: all of it must be what the uninterrupted run would have drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.checkpoint.check import samples_of_run
from megacore.checkpoint.directory import published, step_of
from megacore.data.bert.build import build_bert_datasets
from megacore.data.tokenizers.tokenizer import load_tokenizer
from megacore.parallel.mesh import Mesh
from megacore.train.trainer import Trainer
from tests.parallel.test_stopping import losses_of, stored
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.unit.test_bert_build import LINES, write

STEPS, DOCUMENTS = 14, 10  # 56 samples; a document of four sentences gives at most three an epoch


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and a dataset of so few documents that the run reads it several times."""
    folder = tmp_path_factory.mktemp("corpus")
    write(folder, "wordpiece", "d", LINES[:DOCUMENTS])
    return folder


def run(corpus: Path, output: Path, **changes: Any) -> None:
    """Start a run of BERT on the dataset, or go on with it."""
    newest = published(output)
    vocab_size = load_tokenizer(corpus / "wordpiece").vocab_size
    sizes = {"train_iters": STEPS, "global_batch_size": 4, "seq_length": 32, "num_layers": 2, "vocab_size": vocab_size}
    data = {"data_path": (str(corpus / "d_text_sentence"),), "tokenizer": str(corpus / "wordpiece"), "split": "1,0"}
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    options = {"mock_data": False, "save_interval": 4, "log_interval": 1, "load": str(newest[0]) if newest else None}
    config = make_bert_config((1, 1, 1), output, **sizes, **data, **dropout, **options, **changes)
    train_data = build_bert_datasets(config, train_samples=samples_of_run(config)).train
    make_bert_trainer(config, Mesh(device=torch.device("cpu")), train_data).run()


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the run that nothing happens to."""
    output = tmp_path_factory.mktemp("straight")
    run(corpus, output)
    return output


def weights(output: Path) -> dict[tuple[str, str], Tensor]:
    """All tensors of the last checkpoint, of the weights and of the optimizer."""
    newest = published(output)[0]
    assert step_of(newest) == STEPS
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {(kind, name): tensor for kind in kinds for name, tensor in stored(newest, kind).items()}


def test_bert_that_is_stopped_and_killed_is_bitwise_the_uninterrupted_run(
    corpus: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def dying(trainer: Trainer, *given: Any) -> Any:
        if trainer.step == 10:
            raise RuntimeError("killed")
        return train_step(trainer, *given)

    run(corpus, tmp_path, num_workers=2, exit_interval=3)
    assert [step_of(path) for path in published(tmp_path)] == [3]
    monkeypatch.setattr(Trainer, "train_step", dying)
    with pytest.raises(RuntimeError, match="killed"):
        run(corpus, tmp_path, num_workers=2)
    monkeypatch.undo()
    assert [step_of(path) for path in published(tmp_path)] == [8, 4, 3]  # steps 9 and 10 are done again
    run(corpus, tmp_path, num_workers=2)
    assert len(losses_of(straight)) == STEPS
    assert losses_of(tmp_path) == losses_of(straight)
    found, expected = weights(tmp_path), weights(straight)
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
