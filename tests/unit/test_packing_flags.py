"""The flags of packed documents: their defaults, and what is refused with them."""

from __future__ import annotations

import pytest

from megacore.config import DataConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit.refusals import GOOD, Refuse, parse, problems, refuse

__all__ = ["refuse"]


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        ("", ()),
        ("--packing best-fit", ("documents", "positions")),
        ("--packing best-fit --no-reset-position-ids", ("documents",)),
        ("--packing best-fit --no-reset-position-ids --no-reset-attention-mask", ()),
        ("--reset-attention-mask", ("documents",)),
        ("--reset-position-ids", ("positions",)),
    ],
)
def test_layers_get_what_the_flags_need(flags: str, beside: tuple[str, ...]) -> None:
    config = parse(*GOOD, *flags.split())
    assert config.beside_hidden_states == beside


def test_a_sample_of_one_document_needs_nothing_beside_it() -> None:
    assert DataConfig(packing="none").beside_tokens == ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--packing none", "--packing none has no effect with --mock-data"),
        ("--packing none --reset-attention-mask", "--reset-attention-mask has no effect with --packing none"),
        ("--packing none --reset-position-ids", "--reset-position-ids has no effect with --packing none"),
        ("--packing first-fit", "--packing first-fit"),
        (
            "--reset-position-ids --position-embedding-type alibi",
            "--reset-position-ids has no meaning with --position-embedding-type alibi",
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, expected: str, refuse: Refuse) -> None:
    found = problems(refuse(*GOOD, *flags.split()))
    assert any(expected in problem for problem in found), found


def test_bert_packs_by_its_style(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GOOD, "--packing", "best-fit", "--reset-attention-mask"]
    with pytest.raises(SystemExit):
        parse_config(argv, prog="pretrain_bert.py", description="", kind=BertConfig)
    told = capsys.readouterr().err
    assert "--packing best-fit is for pretrain_gpt.py" in told
    assert "because BERT always attends within a document" in told
