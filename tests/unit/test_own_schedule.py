"""A user's schedule from a CSV file: read, proven, compared with the run, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacore.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megacore.pipeline.schedule import ScheduleError, build_schedule
from megacore.pipeline.schedule_file import check_schedule, load_schedule
from tools.plan import main

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def written(directory: Path, text: str) -> Path:
    path = directory / "mine.csv"
    path.write_text(text)
    return path


def test_cells_become_the_schedule_and_transfers_are_added(tmp_path: Path) -> None:
    schedule = load_schedule(written(tmp_path, GOOD))
    assert [list(map(str, schedule.computations(rank))) for rank in range(2)] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert (schedule.ranks, schedule.virtual_stages, schedule.microbatches) == (2, 1, 2)
    assert sum(action.op.is_transfer for actions in schedule.actions for action in actions) == 8


@pytest.mark.parametrize("name, virtual", [("gpipe", 1), ("zero-bubble", 1), ("interleaved", 3)])
def test_a_built_in_one_survives_the_way_through_a_file(name: str, virtual: int, tmp_path: Path) -> None:
    built = build_schedule(name, 3, 5, virtual)
    rows = [",".join(map(str, built.computations(rank))) for rank in range(3)]
    assert load_schedule(written(tmp_path, "\n".join(rows))).actions == built.actions


def test_an_unreadable_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_schedule(tmp_path / "mine.csv")


def test_a_byte_order_mark_is_no_part_of_a_cell(tmp_path: Path) -> None:
    assert load_schedule(written(tmp_path, "\ufeff" + GOOD)) == load_schedule(written(tmp_path, GOOD))


@pytest.mark.parametrize("pp, batch, fits", [(2, 2, True), (2, 4, False), (4, 2, False)])
def test_it_must_fit_the_run(pp: int, batch: int, fits: bool, tmp_path: Path) -> None:
    config = Config(
        parallel=ParallelConfig(pp=pp, schedule_csv=str(written(tmp_path, GOOD))),
        model=ModelConfig(vocab_size=8),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=1, global_batch_size=batch),
    ).resolve(pp)
    if fits:
        check_schedule(config)
        return
    expected = rf"is for --pp 2, .* 2 microbatches per replica, but the run has --pp {pp}"
    with pytest.raises(ScheduleError, match=expected):
        check_schedule(config)


def test_a_plan_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, GOOD)
    flags = f"--preset gpt2-small --pp 2 --global-batch-size 2 --micro-batch-size 1 --schedule-csv {file}"
    assert main(["pretrain_gpt.py", *flags.split(), "--cluster", "h100"]) == 0
    report = capsys.readouterr().out
    assert f"--schedule-csv {file}" in report
    assert "schedule auto" not in report
