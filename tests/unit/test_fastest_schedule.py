"""--schedule auto: which schedule it is, where memory decides, and what is recorded."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config, save_toml
from megacore.config.parallel import ChosenSchedule, StagesThatFit
from megacore.models.outline import outline
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import Mesh
from megacore.pipeline.schedule_choice import choose_schedule, is_open, with_stages_that_fit
from megacore.plan.cluster import CLUSTERS
from megacore.plan.fastest_schedule import VIRTUAL_STAGES, schedules_by_time
from megacore.plan.memory import plan_memory
from megacore.plan.planner import make_plan, scheduled
from megacore.plan.ways_out import Limits
from megacore.train import launch
from tests.patience import patience

W1 = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192"
W1 += " --micro-batch-size 2 --global-batch-size 8 --untie-embeddings-and-output-weights"
LAPTOP = CLUSTERS["laptop"]


def planned(flags: str) -> ResolvedConfig:
    words = [*flags.split(), "--mock-data", "--train-iters", "1"]
    return parse_config(words, prog="pretrain_gpt.py", description="", kind=Config, planned=True)


def shape(config: ResolvedConfig) -> tuple[str, int]:
    return config.parallel.schedule, config.parallel.virtual_stages


@pytest.mark.parametrize(
    ("flags", "cluster"),
    [
        (f"{W1} --pp 2 --global-batch-size 2", "laptop"),
        ("--preset mixtral-8x7b --tp 2 --pp 4 --dp 4 --ep 4 --precision bf16 --global-batch-size 64", "h100"),
        # With sequence parallelism, which is the default on accelerators and changes the order here.
        ("--preset llama-3-8b --tp 2 --pp 4 --precision bf16 --global-batch-size 4 --seq-length 1024", "h100"),
        # Four stages per rank have the shorter pipeline, zero bubble the shorter step: its busiest rank computes less,
        # and so waits less for the slowest node.
        ("--preset llama-3-8b --tp 2 --pp 4 --dp 8 --zero-stage 1 --precision bf16 --global-batch-size 64", "h100"),
    ],
)
def test_the_order_is_that_of_whole_steps(flags: str, cluster: str) -> None:
    """Each schedule by its name, in the prediction of a step that tools/plan.py prints."""
    flags = flags.replace("--global-batch-size 8", "") if flags.count("global-batch") == 2 else flags
    config = planned(flags)
    layers = outline(config)
    found = schedules_by_time(config, layers, CLUSTERS[cluster])
    seconds = {}
    for name, stages in (("1f1b", 1), ("zero-bubble", 1), *(("interleaved", v) for v in VIRTUAL_STAGES)):
        if config.parallel.pp * stages <= config.model.num_layers:
            named = planned(f"{flags} --schedule {name}" + (f" --virtual-stages {stages}" if stages > 1 else ""))
            seconds[name, stages] = make_plan(named, CLUSTERS[cluster]).time.seconds
    assert found[-1] == ("1f1b", 1)
    assert found[0] == min(seconds, key=seconds.__getitem__)
    assert [seconds[one] for one in found] == sorted(seconds[one] for one in found)


def test_backward_of_blocks_that_are_computed_again_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """In two halves each of their operators would compute the block again."""
    recomputed = planned(f"{W1} --pp 2 --recompute full --schedule zero-bubble")
    assert shape(recomputed) == ("1f1b", 1) and not recomputed.parallel.may_split_backward
    assert "the schedule is 1F1B" in capsys.readouterr().err
    assert shape(planned(f"{W1} --pp 2 --recompute light --schedule zero-bubble")) == ("zero-bubble", 1)
    open_config = planned(f"{W1} --pp 2 --recompute full")
    choices = schedules_by_time(open_config, outline(open_config), LAPTOP)
    assert "zero-bubble" not in {name for name, _ in choices}


def test_the_choice_is_quick() -> None:
    """A launch waits for it."""
    flags = "--preset bloom-176b --tp 4 --pp 12 --dp 8 --precision bf16 --global-batch-size 2048 --micro-batch-size 2"
    config = planned(flags)
    began = time.process_time()
    scheduled(config, CLUSTERS["a100-80g"])
    assert time.process_time() - began < patience(1)  # about 0.3 s


def test_memory_decides() -> None:
    config = planned("--preset llama-3-8b --pp 4 --tp 2 --precision bf16 --global-batch-size 32")
    choices = schedules_by_time(config, outline(config), CLUSTERS["h100"])
    assert len(choices) > 1
    asked: list[ResolvedConfig] = []

    def refuses(candidate: ResolvedConfig) -> bool:
        asked.append(candidate)
        return False

    last = choose_schedule(config, choices, refuses)
    assert shape(last) == choices[-1]
    assert list(map(shape, asked)) == choices[:-1]
    assert dataclasses.replace(last, parallel=config.parallel) == config  # paths, which may differ between nodes
    assert shape(choose_schedule(config, choices, lambda one: True)) == choices[0]
    assert shape(scheduled(planned(f"{W1} --pp 2"), LAPTOP)) == ("zero-bubble", 1)
    small = dataclasses.replace(LAPTOP, device=dataclasses.replace(LAPTOP.device, memory_bytes=1e6))
    assert shape(scheduled(planned(f"{W1} --pp 2"), small)) == ("1f1b", 1)


def test_a_file_lets_the_next_run_choose(tmp_path: Path) -> None:
    """It may have another layout: interleaved, for one, needs more blocks the more ranks there are."""
    flags = "--preset llama-3-8b --pp 4 --tp 2 --precision bf16 --global-batch-size 32"
    config = scheduled(planned(flags), CLUSTERS["h100"])
    assert isinstance(config.parallel, ChosenSchedule)
    file = tmp_path / "config.toml"
    save_toml(config, file)
    again = parse_config(["--config", str(file)], prog="", description="", kind=Config, planned=True)
    assert is_open(again)
    assert shape(scheduled(again, CLUSTERS["h100"])) == shape(config)
    argv = ["--config", str(file), "--pp", "32", "--dp", "1"]
    assert parse_config(argv, prog="", description="", kind=Config, planned=True).parallel.pp == 32


# ---- stages


def test_stages_by_time_give_way_where_only_those_by_parameters_fit() -> None:
    """GPT-2 small on four stages, as above. A file keeps what the flag says."""
    flags = "--preset gpt2-small --pp 4 --recompute full --micro-batch-size 1"
    for schedule in ("--schedule 1f1b", ""):
        by_time = planned(f"{flags} {schedule}")
        by_parameters = planned(f"{flags} {schedule} --pipeline-balance parameters")
        most, least = (
            max(rank.expected for rank in plan_memory(config, outline(config), on_cpu=False))
            for config in (by_time, by_parameters)
        )
        for available, balance in ((most + 1, "time"), ((most + least) / 2, "parameters"), (least - 1, "time")):
            limits = Limits(memory=AvailableMemory(available, ""), on_cpu=False, local_ranks=1)
            parallel = with_stages_that_fit(by_time, limits.fits).parallel
            assert parallel.pipeline_balance == balance
            assert parallel.as_written() == by_time.parallel.as_written()


@pytest.mark.parametrize("balance", ["time", "parameters"])
@pytest.mark.parametrize("schedule", ["", "--schedule 1f1b"])
def test_a_launch_takes_the_stages_that_fit(schedule: str, balance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(candidate: ResolvedConfig, mesh: Mesh, layers: object) -> bool:
        return balance in ("time", candidate.parallel.pipeline_balance)

    monkeypatch.setattr(launch, "fits_everywhere", fits)
    config = planned(f"--preset gpt2-small --pp 4 --micro-batch-size 1 {schedule}")
    parallel = launch.with_pipeline(config, Mesh(device=torch.device("cpu"))).parallel
    assert parallel.pipeline_balance == balance
    assert isinstance(parallel, StagesThatFit) == (balance == "parameters")
    assert isinstance(parallel, ChosenSchedule) == (not schedule)
