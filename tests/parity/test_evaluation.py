"""What an evaluation reports, against torch's own cross-entropy."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megacore.parallel.mesh import Mesh
from tests.parity.runs import VOCAB, make_config, make_trainer


def test_an_evaluation_is_the_negative_log_likelihood_of_the_same_batches_every_time(tmp_path: Path) -> None:
    config = make_config((1, 1, 1), tmp_path, label_smoothing=0.2, z_loss=0.1, eval_iters=3, hidden_dropout=0.5)
    trainer = make_trainer(config, Mesh(device=torch.device("cpu")))
    first = trainer.evaluate()
    total, tokens = 0.0, 0.0
    assert trainer.valid_batches is not None
    trainer.valid_batches.rewind()
    for microbatch in itertools.chain.from_iterable(itertools.islice(trainer.valid_batches, 3)):
        with torch.no_grad():
            logits = trainer.model.chunks[0].eval()(microbatch.tokens)[..., :VOCAB]
        losses = F.cross_entropy(logits.double().flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        total += float((losses * microbatch.loss_mask.flatten()).sum())
        tokens += float(microbatch.loss_mask.sum())
    assert first == pytest.approx(total / tokens, rel=1e-6)
    assert trainer.evaluate() == first
