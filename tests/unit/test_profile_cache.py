"""Profiles of traced ranks in the user's cache: found by what decides a step's memory, and by nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from megacore.config import ResolvedConfig
from megacore.errors import UserError
from megacore.files import cache_home
from megacore.pipeline.schedule import Op
from megacore.tracer import cache, profile
from megacore.tracer.cache import profiles_of
from megacore.tracer.step_memory import Pass, Passage, StepProfile
from tests.unit.refusals import GOOD, parse

STEP = StepProfile(
    beside_state=1,
    lasting_gradients=0.5,
    updating=2,
    passes={(Op.FORWARD, 0): [Pass("", [Passage(-1, 3, 2, 1)]), Pass("another's F0", [Passage(0, 4, 3)])]},
    messages={(Op.SEND_OUTPUT, 0): -5},
)
Traced = Callable[..., int]


def config_of(*words: str) -> ResolvedConfig:
    return parse(*GOOD, "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", *words, planned=True)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """How many ranks of a configuration are traced, in a home of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def count(*words: str, ranks: tuple[int, ...] = (0,)) -> int:
        with mock.patch.object(profile, "try_profile", return_value=STEP) as trace:
            assert profiles_of(config_of(*words), ranks, on_cpu=True, shares_work=False) == [STEP] * len(ranks)
        return trace.call_count

    return count


def profiles(home: Path) -> list[Path]:
    return sorted((home / "megacore" / "profiles").iterdir())


def test_a_profile_is_found_again(traced: Traced) -> None:
    assert [traced(ranks=(0,)), traced(ranks=(0,))] == [1, 0]
    assert traced("--pp", "2", "--global-batch-size", "4", ranks=(0, 1)) == 2
    assert traced("--pp", "2", "--global-batch-size", "4", ranks=(1, 0)) == 0


DECIDES = ["--hidden-size 64", "--seq-length 64", "--micro-batch-size 2", "--recompute full", "--optimizer lion"]
DECIDES += ["--weight-decay 0", "--precision bf16", "--global-batch-size 2"]
NOTHING = ["--lr 0.5", "--weight-decay 0.5", "--seed 5", "--log-interval 7", "--max-bad-steps 3", "--lr-warmup-iters 2"]


@pytest.mark.parametrize(("words", "again"), [*((one, 1) for one in DECIDES), *((one, 0) for one in NOTHING)])
def test_what_decides_a_step_is_in_the_key_and_nothing_else(words: str, again: int, traced: Traced) -> None:
    assert [traced(), traced(*words.split())] == [1, again]


def test_a_batch_of_more_microbatches_is_the_same_step(traced: Traced) -> None:
    assert [traced("--global-batch-size", size) for size in ("8", "16", "2")] == [1, 0, 1]


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_the_versions_are_in_the_key(package: str, traced: Traced) -> None:
    assert traced() == 1
    with mock.patch.object(cache, "version", lambda name: "99" if name == package else "1"):
        assert traced() == 1
    with mock.patch.object(cache, "version", lambda name: "98" if name == package else "1"):
        assert traced() == 1


def test_damaged_files_are_traced_anew(traced: Traced, tmp_path: Path) -> None:
    assert traced() == 1
    (path,) = profiles(tmp_path)
    good = path.read_text(encoding="utf-8")
    other = json.loads(good)
    other["profile"]["updating"] += 1
    without = json.loads(good)
    del without["profile"]["messages"]
    for damaged in ("", "[]", "null", good[:100], "[" * 100_000, json.dumps(other), json.dumps(without)):
        path.write_text(damaged, encoding="utf-8")
        assert traced() == 1, damaged[:100]
        assert path.read_text(encoding="utf-8") == good


def test_old_and_unfinished_files_go(traced: Traced, tmp_path: Path) -> None:
    assert traced() == 1
    (path,) = profiles(tmp_path)
    unfinished = path.with_name(".a.json.tmp-1")
    unfinished.touch()
    for old, age in ((path, 31 * 86400), (unfinished, 2 * 3600)):
        os.utime(old, times=(time.time() - age,) * 2)
    assert traced("--hidden-size", "64") == 1
    assert len(profiles(tmp_path)) == 1
    assert not path.exists()


def test_a_step_that_fails_names_its_rank_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, said = config_of("--pp", "2", "--global-batch-size", "4"), r"rank 1 .*RuntimeError: no operator.*--estimate"
    with (
        mock.patch.object(profile, "profile_of", side_effect=RuntimeError("no operator")),
        pytest.raises(UserError, match=said),
    ):
        profiles_of(config, [1], on_cpu=True, shares_work=False)


# ---- the home --------------------------------------------------------------------------------------------------------


def test_a_user_without_a_home_keeps_no_profile(
    traced: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and an entry of the user
    assert cache_home() is None
    assert [traced(), traced()] == [1, 1]
    assert not list(tmp_path.iterdir())
