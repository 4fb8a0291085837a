"""The progress of commands: a line per minute without a terminal, from any thread, and the bytes that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacore import progress
from megacore.checkpoint.choose import whole
from megacore.checkpoint.directory import published
from megacore.parallel.mesh import ALONE, Mesh
from megacore.progress import Bars, Progress
from tests.parity.runs import make_config, make_trainer


def test_a_line_per_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("verifying", 10 * 10**9) as shown:
        for second in range(0, 130, 10):
            now[0] = float(second)
            shown.advance(10**8)
    assert capsys.readouterr().err.splitlines() == ["verifying: 7%, 0.7 of 10.0 GB", "verifying: 13%, 1.3 of 10.0 GB"]


def test_a_terminal_has_one_display_for_all_bars_and_only_the_first_rank_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("training", 10, unit="steps", done=2) as training:
        training.reach(5)
        display = Bars.display
        assert display is not None
        with Progress("saving", 2 * 10**9) as saving:
            saving.advance(10**9)
            assert Bars.display is display
            shown = [(task.description, task.completed, task.fields["figures"]) for task in display.tasks]
            assert shown == [("training", 5, "5 of 10 steps"), ("saving", 10**9, "1.0 of 2.0 GB")]
        assert [task.description for task in display.tasks] == ["training"]
    assert not Bars.__dict__["display"]
    monkeypatch.setenv("RANK", "1")
    with Progress("saving", 1) as saving:
        saving.advance(1)
        assert not Bars.__dict__["display"]


def test_saving_and_verifying_show_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    config = make_config((1, 1, 1), tmp_path, train_iters=1)
    make_trainer(config, Mesh(device=torch.device("cpu"))).run()
    (saved,) = published(tmp_path)
    assert whole(saved, ALONE) is None
    lines = capsys.readouterr().err.splitlines()
    for what in ("saving", f"verifying {saved.name}"):
        shares = [line for line in lines if line.startswith(f"{what}: ")]
        assert shares, lines
        assert shares[-1].startswith(f"{what}: 100%, "), shares[-1]
