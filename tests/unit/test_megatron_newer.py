"""What newer versions of Megatron-LM write: the state of a machine that repeats steps, and vocabularies without the
token that ends a document."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megacore.convert.checkpoint_tensors import CheckpointTensors
from tests.unit.megatron_files import (
    GPT,
    PADDED,
    VOCAB,
    convert_megatron,
    require_tensors,
    save,
    tensors_of,
    write_legacy,
)

MODULE = "megatron.core.rerun_state_machine"


class RerunMode(enum.StrEnum):
    DISABLED = "disabled"


class RerunState(enum.Enum):
    INITIAL_RUN = 1

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """By name, as some versions of Python do."""
        return getattr, (type(self), self.name)


class Caller(NamedTuple):
    message: str
    rank: int


def test_enumerations_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {name: types.ModuleType(name) for name in ("megatron", "megatron.core", MODULE)}
    for made in (RerunMode, RerunState, Caller):
        monkeypatch.setattr(made, "__module__", MODULE)
        setattr(parts[MODULE], made.__name__, made)
    values = tensors_of(GPT)
    write_legacy(tmp_path / "right", values, tp=1, pp=1, version=3.0)
    stored = torch.load(tmp_path / "right" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    machine = {"mode": RerunMode.DISABLED, "state": RerunState.INITIAL_RUN, "counts": {Caller("loss", 0): 3}}
    with monkeypatch.context() as patch:
        for name, module in parts.items():
            patch.setitem(sys.modules, name, module)
        save(tmp_path / "megatron", 0, None, stored | {"rerun_state_machine": machine})
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out", vocab_size=VOCAB) == 0
    require_tensors(tmp_path / "out", values)


@pytest.mark.parametrize(
    ("tokenizer", "said", "more"),
    [
        ("NullTokenizer", VOCAB - 1, {}),
        ("NullTokenizer", VOCAB, {"null_tokenizer_eod_id": None}),
        ("GPT2BPETokenizer", VOCAB, {}),
    ],
)
def test_the_row_that_ends_a_document_stays(
    tokenizer: str, said: int, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A NullTokenizer's vocab_size is without it, but where a flag may set its id; every tokenizer's padding goes, and
    is counted."""
    values = tensors_of(GPT)
    write_legacy(tmp_path / "right", values, tp=1, pp=1, version=3.0)
    made = torch.load(tmp_path / "right" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    vars(made["args"]).update(more, tokenizer_type=tokenizer, vocab_size=said)
    save(tmp_path / "megatron", 0, None, made)
    assert convert_megatron(tmp_path / "megatron", tmp_path / "out") == 0
    assert CheckpointTensors(tmp_path / "out").config.vocab_size == VOCAB
    assert f"vocabulary {VOCAB}: {PADDED - VOCAB} of {PADDED} rows are cut off" in capsys.readouterr().out
    require_tensors(tmp_path / "out", values)
