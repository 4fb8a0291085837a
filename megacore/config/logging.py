"""The section of what is logged, profiled and traced, how often, and where metrics go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section, field_infos, flag_and_value
from megacore.config.problem import Change, Problem

_TRACED_STEPS = 3


LEAST_TFLOPS, MOST_TFLOPS = 1e-6, 1_000_000  # of a device


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What is logged, how often, and where metrics go."""

    log_interval: Annotated[int, Range(1)] = 10
    """Number of steps between log lines, and between lines of metrics.jsonl."""
    gradient_noise_interval: Annotated[int, Range(0)] = 0
    """Measures the gradient noise scale at this interval of steps, with one more forward and backward of one
    microbatch per replica (docs/reference/metrics.md). 0: off."""
    csv: bool = False
    """Also writes the metrics to OUTPUT_DIR/metrics.csv, one column per metric."""
    tensorboard_dir: Annotated[str | None, Flag(metavar="DIR")] = None
    """Also writes the metrics to this directory, as event files that TensorBoard reads. Default: no event files."""
    wandb_project: Annotated[str | None, Flag(metavar="NAME")] = None
    """Also sends the metrics to this project of Weights & Biases. Needs pip install wandb. A resumed run continues the
    W&B run whose id is in OUTPUT_DIR/wandb_run_id. Default: no W&B."""
    wandb_entity: Annotated[str | None, Flag(metavar="NAME")] = None
    """User or team of W&B that the run belongs to. Default: that of the API key."""
    wandb_name: Annotated[str | None, Flag(("--wandb-exp-name",), metavar="NAME")] = None
    """Display name of the W&B run. Default: the name of --output-dir."""
    wandb_group: Annotated[str | None, Flag(metavar="NAME")] = None
    """Group of the W&B run. Default: no group."""
    wandb_mode: Literal["online", "offline"] = "online"
    """How W&B runs. online: sends the metrics while the run trains. offline: writes them to OUTPUT_DIR/wandb, for wandb
    sync, without network and API key."""
    profile_steps: Annotated[str | None, Flag(metavar="A:B")] = None
    """Profiles the steps A to B, both included, with torch.profiler. Every rank writes a Chrome trace to
    OUTPUT_DIR/profile, and on an accelerator a snapshot of its memory. Default: no profile."""
    trace: bool = False
    """Writes OUTPUT_DIR/trace.json, a timeline of what every rank does in the steps after the first. Perfetto and
    tools/draw_schedule.py read it."""
    trace_steps: Annotated[int | None, Range(1)] = None
    """Number of steps that --trace records. Default: 3."""
    peak_tflops: Annotated[float | None, Range(LEAST_TFLOPS, MOST_TFLOPS)] = None
    """Peak speed of one device in TFLOP/s, dense and in the format of --precision. The reported MFU is a share of it.
    Default: that of the data sheet, for a known device."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if not wrong & {"trace", "trace_steps"} and self.trace_steps is not None and not self.trace:
            yield Problem(
                f"--trace-steps {self.trace_steps} has no effect without --trace",
                Change("leave it out", {"trace_steps": None}),
                Change("use --trace", {"trace": True}),
            )
        if self.wandb_project is None and "wandb_project" not in wrong:
            infos = field_infos(type(self))
            for name in ("wandb_entity", "wandb_name", "wandb_group", "wandb_mode"):
                value = getattr(self, name)
                if name not in wrong and value != infos[name].default:
                    yield (
                        f"{flag_and_value(name, value)} has no effect without --wandb-project: leave it out, or use "
                        "--wandb-project NAME"
                    )
        if "profile_steps" not in wrong:
            try:
                self.profiled_steps()
            except ValueError as error:
                yield str(error)

    @property
    def traced_steps(self) -> int:
        """The number of steps that --trace records; 0 without it."""
        if not self.trace:
            return 0
        return _TRACED_STEPS if self.trace_steps is None else self.trace_steps

    def profiled_steps(self) -> range:
        """The numbers of the steps of --profile-steps; empty without it.

        Raises:
            ValueError: it is not A:B with 1 <= A <= B.
        """
        if self.profile_steps is None:
            return range(0)
        ends = re.fullmatch(r"([0-9]{1,99}):([0-9]{1,99})", self.profile_steps)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2]):
            raise ValueError(
                f"--profile-steps {self.profile_steps} must be A:B, two step numbers with 1 <= A <= B: use, for "
                "example, 10:12"
            )
        return range(int(ends[1]), int(ends[2]) + 1)
