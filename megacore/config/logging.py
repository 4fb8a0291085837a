"""The section of what is logged, profiled and traced, how often, and where metrics go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.rules import Readable, Rule

_TRACED_STEPS = 3

LEAST_TFLOPS, MOST_TFLOPS = 1e-6, 1_000_000  # of a device


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What is logged, how often, and where metrics go."""

    rules: ClassVar[Sequence[Rule]] = (Readable("profiled_steps"),)

    log_interval: Annotated[int, Range(1)] = 10
    """Steps between log lines, and between lines of metrics.jsonl."""
    gradient_noise_interval: Annotated[int, Range(0)] = 0
    """Steps between measurements of the gradient noise scale (docs/reference/metrics.md). Each takes a further forward
    and backward of one microbatch. 0: off."""
    csv: bool = False
    """Also writes metrics to OUTPUT_DIR/metrics.csv."""
    tensorboard_dir: Annotated[str | None, Flag(metavar="DIR")] = None
    """Also writes metrics to this directory, for TensorBoard. Default: no event files."""
    wandb_project: Annotated[str | None, Flag(metavar="NAME")] = None
    """Also sends metrics to this project of Weights & Biases. Needs pip install wandb. A resumed run continues its W&B
    run. Default: no W&B."""
    wandb_entity: Annotated[str | None, Flag(metavar="NAME")] = None
    """User or team of W&B. Default: that of the API key."""
    wandb_name: Annotated[str | None, Flag(("--wandb-exp-name",), metavar="NAME")] = None
    """Display name of the W&B run. Default: the name of --output-dir."""
    wandb_group: Annotated[str | None, Flag(metavar="NAME")] = None
    """Group of the W&B run. Default: no group."""
    wandb_mode: Literal["online", "offline"] = "online"
    """online: sends metrics while the run trains. offline: writes them to OUTPUT_DIR/wandb, for wandb sync."""
    profile_steps: Annotated[str | None, Flag(metavar="A:B")] = None
    """Profiles steps A to B, both included, with torch.profiler. Every rank writes a Chrome trace to OUTPUT_DIR/profile
    and, on an accelerator, a memory snapshot. Default: no profile."""
    trace: bool = False
    """Writes OUTPUT_DIR/trace.json, a timeline of every rank, for Perfetto and tools/draw_schedule.py."""
    trace_steps: Annotated[int | None, Range(1)] = None
    """Steps that --trace records, after the first step. Default: 3."""
    peak_tflops: Annotated[float | None, Range(LEAST_TFLOPS, MOST_TFLOPS)] = None
    """Peak TFLOP/s of one device, dense, in the format of --precision. MFU is a share of it. Default: that of the data
    sheet, for a known device."""

    @property
    def traced_steps(self) -> int:
        """The number of steps that --trace records; 0 without it."""
        if not self.trace:
            return 0
        return _TRACED_STEPS if self.trace_steps is None else self.trace_steps

    def profiled_steps(self) -> range:
        """The steps of --profile-steps; empty without it. Raises ValueError where it is not A:B with 1 <= A <= B."""
        if self.profile_steps is None:
            return range(0)
        ends = re.fullmatch(r"([0-9]{1,99}):([0-9]{1,99})", self.profile_steps)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2]):
            raise ValueError(
                f"--profile-steps {self.profile_steps} must be A:B, two step numbers with 1 <= A <= B: use, for "
                "example, 10:12"
            )
        return range(int(ends[1]), int(ends[2]) + 1)
