"""`--profile-steps A:B`: torch.profiler over some steps, with a Chrome trace per rank and a snapshot of device memory.

The files are OUTPUT_DIR/profile/rank_N.json.gz, which Perfetto opens, and rank_N_memory.pickle, which torch's viewer of
memory opens. They are written when step B is done, and once. A run that resumes or rolls back between A and B profiles
the rest of the range.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megacore.observe.trackers.background import warn
from megacore.train.callbacks import Callback, Run
from megacore.train.rollback import Rollback
from megacore.train.step import StepResult

DIRECTORY = "profile"


class StepProfiler:
    """Profiles the steps of a range on this rank.

    Args:
        steps: their numbers.
        output_dir: of the run.
        rank: this rank's number.
        device: that computes.
    """

    def __init__(self, steps: range, *, output_dir: Path, rank: int, device: torch.device) -> None:
        self.steps, self._device = steps, device
        self.path = output_dir / DIRECTORY / f"rank_{rank}.json.gz"
        self._profile: profile | None = None
        self._is_written = False

    def begin(self, step: int) -> None:
        """Step number `step` is about to begin."""
        if step not in self.steps or self._profile is not None or self._is_written:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities += sorted(torch.profiler.supported_activities() - set(activities), key=str)
            self._record_memory(True)
        self._profile = profile(activities=activities, profile_memory=self._device.type == "cpu")
        with warnings.catch_warnings():  # torch 2.11 warns at every start of what a further start loses
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profile.start()

    def end(self, step: int) -> bool:
        """Step number `step` is done; whether the files were written now."""
        if self._profile is None or step != self.steps[-1]:
            return False
        self._profile.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))
            if self._device.type != "cpu":
                self._write_memory(self.path.with_name(self.path.name.replace(".json.gz", "_memory.pickle")))
        except OSError as error:
            warn(f"{self.path.parent}: {error.strerror}; training continues without the profile of this rank")
        self._profile, self._is_written = None, True
        return True

    def rewind(self) -> None:
        """The run is back at an earlier step: drop a profile under way."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _record_memory(self, on: bool) -> None:
        record: Callable[..., None] | None = self._of_memory("_record_memory_history")
        if record is not None:
            record(enabled="all" if on else None)

    def _write_memory(self, path: Path) -> None:
        write: Callable[[str], None] | None = self._of_memory("_dump_snapshot")
        if write is not None:
            write(str(path))
            self._record_memory(False)

    def _of_memory(self, name: str) -> Callable[..., None] | None:
        """A function of the device's memory module, where torch has it."""
        memory = getattr(torch.get_device_module(self._device), "memory", None)
        return getattr(memory, name, None)


class Profiling(Callback):
    """Profiles the steps that --profile-steps asks for.

    Args:
        profiler: of this rank.
    """

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler

    def on_step_begin(self, run: Run, step: int) -> None:
        """Start before the first of the steps."""
        if step in self._profiler.steps:
            with run.unclocked():
                self._profiler.begin(step)

    def on_rollback(self, run: Run, rollback: Rollback, reason: str) -> None:
        """Begin the profile anew with the steps that the run takes again."""
        self._profiler.rewind()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        """Write the files after the last of the steps."""
        if result.step == self._profiler.steps[-1]:
            with run.unclocked():
                if self._profiler.end(result.step):
                    where = f"step {result.step}/{run.config.training.train_iters}"
                    run.say(f"{where} | profiled {self._profiler.path.parent}")
