"""`--profile-steps A:B`: torch.profiler over some steps: OUTPUT_DIR/profile/rank_N.json.gz, which Perfetto opens, and
rank_N_memory.pickle, for torch's viewer of memory. They are written once, when step B is done. A run that resumes or
rolls back between A and B profiles the rest of the range."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megacore.observe.trackers.background import warn
from megacore.train.callbacks import Callback, Run
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult

DIRECTORY = "profile"


class Profiling(Callback):
    """Profiles the steps of a range on this rank. `steps`: their numbers; there is one at least."""

    def __init__(self, steps: range, *, path: Path, device: torch.device) -> None:
        self._steps, self._path, self._device = steps, path, device
        self._profile: profile | None = None
        self._is_written = False

    def on_step_begin(self, run: Run, step: int) -> None:
        if step not in self._steps or self._profile is not None or self._is_written:
            return
        with run.unclocked(), warnings.catch_warnings():
            activities = [ProfilerActivity.CPU]
            if self._device.type != "cpu":
                activities += sorted(torch.profiler.supported_activities() - set(activities), key=str)
                self._of_memory("_record_memory_history", enabled="all")
            self._profile = profile(activities=activities, profile_memory=self._device.type == "cpu")
            # torch 2.11 warns at every start of what a further start loses
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profile.start()

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Drop a profile under way: it begins anew with the steps that the run takes again."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._profile is None or result.step != self._steps[-1]:
            return
        directory = self._path.parent
        with run.unclocked():
            self._profile.stop()
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(self._path))
                if self._device.type != "cpu":
                    memory = self._path.name.replace(".json.gz", "_memory.pickle")
                    self._of_memory("_dump_snapshot", str(self._path.with_name(memory)))
                    self._of_memory("_record_memory_history", enabled=None)
            except OSError as error:
                warn(f"{directory}: {error.strerror}; training continues without the profile of this rank")
            self._profile, self._is_written = None, True
            run.say(f"step {result.step}/{run.config.training.train_iters} | profiled {directory}")

    def _of_memory(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a function of the device's memory module, where torch has it."""
        function = getattr(getattr(torch.get_device_module(self._device), "memory", None), name, None)
        if function is not None:
            function(*arguments, **options)
