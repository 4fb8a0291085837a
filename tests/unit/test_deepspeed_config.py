"""DeepSpeed's configuration files and Megatron-DeepSpeed's flags: what they give here, and what each refusal names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.arrive.deepspeed import DEEPSPEED_FLAGS, all_keys, tables
from megacore.arrive.megatron import FOREIGN
from megacore.config import OptimizerConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import flag_names
from megacore.config.flags import all_fields
from megacore.optim.lr_schedules import learning_rate, momentum
from tests.unit import refusals
from tests.unit.refusals import GOOD, parse

alone, refuse = refusals.alone, refusals.refuse  # fixtures
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "coming-from-deepspeed.md"


def written(path: Path, document: Any) -> list[str]:
    """The flags that name a file with this content."""
    file = path / "ds_config.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return ["--deepspeed_config", str(file)]


# ---- the table


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    # Every key that the classes and functions of DeepSpeed 0.19 read of a configuration.
    known = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text())
    assert len(known) > 300
    former = {"cuda_visible_devices", "fp32_allreduce", "aio.thread_count"}
    compiled = ("enabled", "backend", "kwargs", "disable", "fullgraph", "dynamic", "mode", "options", "dump_graphs")
    former |= {f"compile.{name}" for name in compiled}
    assert set(known) - tables()["aliases"].keys() == all_keys().keys() - former


def test_keys_and_flags_name_fields_and_flags_that_exist() -> None:
    fields = all_fields(BertConfig).keys()
    ours = {name for main, others in flag_names(BertConfig).items() for name in (main, *others)}
    planned = {"--search", "--world-size", "--cluster", "--max-micro-batch-size", "--max-zero-stage", "--to"}
    for path, key in all_keys().items():
        assert set(key.fields) <= fields, path
        assert set(re.findall(r"--[a-z][a-z0-9-]+", key.becomes)) <= ours | planned, path
    for name, flag in DEEPSPEED_FLAGS.items():
        assert set(flag.fields) <= fields, name
        assert set(re.findall(r"--[a-z][a-z0-9-]+", flag.becomes)) <= ours, name
    assert not DEEPSPEED_FLAGS.keys() & (ours | FOREIGN.keys())


# ---- schedules that are DeepSpeed's step by step


def test_one_cycle_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    """From its least rate at the first step, along lines, and then constant; its momentum the other way."""
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 3, "cycle_second_step_size": 4}
    document: Any = {
        "optimizer": {"type": "Adam", "params": {"lr": 7.0, "betas": [0.5, 0.6]}},
        "scheduler": {"type": "OneCycle", "params": params | {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95}},
    }
    config = parse(*GOOD, *written(tmp_path, document))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    expected = np.interp(range(10), [0, 3, 7], [1e-4, 2e-3, 1e-4]).tolist()
    assert found == pytest.approx(expected, rel=1e-12)
    momenta = [momentum(step, config.optimizer, usual=0.95, train_iters=10) for step in range(1, 11)]
    assert momenta == pytest.approx(np.interp(range(10), [0, 3, 7], [0.95, 0.7, 0.95]).tolist(), rel=1e-12)
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.95, 0.99)  # as DeepSpeed's OneCycle sets them
    document["scheduler"]["params"]["cycle_momentum"] = False
    config = parse(*GOOD, *written(tmp_path, document))
    assert {momentum(step, config.optimizer, usual=0.5, train_iters=10) for step in range(1, 11)} == {0.5}
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.5, 0.6)


def test_the_range_test_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    params = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    config = parse(*GOOD, *written(tmp_path, {"scheduler": {"type": "LRRangeTest", "params": params}}))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    assert found == pytest.approx([1e-3 * (1 + 2.0 * step / 4) for step in range(10)], rel=1e-12)
    assert {momentum(step, config.optimizer, usual=0.9, train_iters=10) for step in range(1, 11)} == {0.9}


# ---- the logarithmic warm-up


def test_the_logarithmic_warm_up_is_that_of_warmup_lr() -> None:
    config = OptimizerConfig(lr=2e-3, lr_warmup_iters=7, lr_warmup_style="log", lr_decay_style="constant")
    rates = [learning_rate(step, config, train_iters=20) for step in range(1, 10)]
    expected = [2e-3 * math.log(step) / math.log(7) if step < 7 else 2e-3 for step in range(1, 10)]
    assert rates == pytest.approx(expected, rel=1e-12)
