"""The section of the configuration that says what a run continues from, when it saves, what it keeps, and when it ends
early.

As in sections.py, which has the others: a field's name is its flag, its annotation what is allowed, its docstring the
help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section

AUTO = "auto"
"""The value of `--load` that means the newest checkpoint of the output directory, or a fresh start without one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a run continues from, when it saves, what it keeps, and when it ends early (docs/checkpoints.md)."""

    load: Annotated[str | None, Flag(metavar="DIR|auto")] = None
    """Where to continue: a checkpoint's directory, a run's output directory (its newest checkpoint that is whole), or
    auto: the newest whole one in --output-dir, and a fresh start where there is none."""
    init_from_hf: Annotated[str | None, Flag(metavar="DIR")] = None
    """A directory of Hugging Face transformers whose weights the run starts from. The model's shape is read from its
    config.json; a flag that contradicts it is refused."""
    save_interval: Annotated[int | None, Range(1)] = None
    """Steps between checkpoints. None: at the end only."""
    keep_last: Annotated[int | None, Range(1)] = None
    """Newest checkpoints that are kept; older ones are deleted once a newer one is published. None: all."""
    keep_every: Annotated[int | None, Range(1)] = None
    """Checkpoints whose step is a multiple of this are kept whatever --keep-last says, which it needs."""
    async_save: bool = False
    """Saves in the background: training waits only while the state is copied to host memory."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """When a checkpoint, or a line of metrics.jsonl, cannot be written. stop: all ranks stop. warn: they say so and
    train on, unless it is the run's last checkpoint."""
    exit_interval: Annotated[int | None, Range(1)] = None
    """The run saves and ends at the first step that is a multiple of this. None: at --train-iters."""
    exit_duration_minutes: Annotated[float | None, Range(above=0), Flag(("--exit-duration-in-mins",))] = None
    """The run saves and ends after the first step that is done this many minutes after its start. None: no limit."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        if self.keep_every is not None and self.keep_last is None and not wrong & {"keep_every", "keep_last"}:
            yield (
                f"--keep-every {self.keep_every} has no effect without --keep-last, as every checkpoint is kept: "
                "leave it out, or give --keep-last"
            )
