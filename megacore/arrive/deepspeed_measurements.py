"""The parts of a DeepSpeed configuration about files, trackers, profiles and compilation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath

from megacore.arrive.deepspeed_values import Translate, Value, a_text, shown, switch, whole
from megacore.arrive.tables import by_name
from megacore.arrive.translation import Translation


def _events(value: Value) -> Translation:
    if not switch(value):
        return Translation()
    path, job = value.other("tensorboard.output_path", ""), value.other("tensorboard.job_name", "DeepSpeedJobName")
    if not isinstance(path, str) or not isinstance(job, str):
        return Translation()  # their keys are refused
    return Translation({"tensorboard_dir": str(PurePath(path) / job)})


def _project(value: Value) -> Translation:
    return Translation({"wandb_project": value.other("wandb.project", "deepspeed")} if switch(value) else {})


def _profile(value: Value) -> Translation:
    step = value.other("flops_profiler.profile_step", 1)
    if not switch(value):
        return Translation()
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"flops_profiler.profile_step {shown(step)} is not a step from 1: use, for example, 10")
    return Translation({"profile_steps": f"{step}:{step}"})


def _print_interval(value: Value) -> Translation:
    given = value.value
    if given is None or given == math.inf:
        return Translation()
    return Translation(implied={"log_interval": whole(value, low=1)})  # of DeepSpeed's lines, beside those of a script


def _decoupled(value: Value) -> Translation:
    on = value.value if isinstance(value.value, bool) else value.value is not None
    return Translation({"async_save": True} if on else {})


def _output_path(value: Value) -> Translation:
    """The directory of tensorboard.enabled, which reads it."""
    if value.value != "":
        a_text(value)
    return Translation()


MEASUREMENTS: Mapping[str, Translate] = by_name(_events, _project, _profile, _print_interval, _decoupled, _output_path)
"""The functions that rows of deepspeed_keys.toml name."""
