"""The sections of checkpoints: what a run starts from, what it saves and keeps, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.rules import Needs

AUTO = "auto"
"""The value of `--load` that selects the newest checkpoint of the output directory, or a fresh start without one."""
OR_AUTO = f"or --load {AUTO}, which starts from the beginning if --output-dir has no checkpoint"
"""The way out for who gives --load on the first start too, as Megatron-LM's scripts do."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What a run loads, saves and keeps, and when it ends."""

    load: Annotated[str | None, Flag(metavar="DIR|URL|auto")] = None
    """Resumes from a checkpoint, or from the newest intact one of an output directory or of a URL. auto: from the
    newest intact one of this run, or a fresh start if there is none. Default: a fresh start."""
    save: Annotated[str | None, Flag(metavar="URL|DIR")] = None
    """Saves checkpoints at a URL, such as s3://bucket/run or gs://bucket/run (docs/guides/checkpoints.md). DIR: another
    name of --output-dir. Default: in --output-dir."""
    init_from_hf: Annotated[str | None, Flag(metavar="DIR")] = None
    """Starts from the weights of a Hugging Face transformers directory, whose config.json sets the model's shape. A
    flag that contradicts it is refused. Default: weights drawn from --seed."""
    ignore_config_field: Annotated[str | None, Flag(metavar="NAME[,NAME]"), Needs("init_from_hf")] = None
    """Fields of that config.json to leave out, because they do not change what the model computes. Default: none."""
    same_schedule: bool = False
    """Refuses to continue with another learning-rate schedule than the checkpoint's. Without it the flags decide, and
    the log says what changes."""
    save_interval: Annotated[int | None, Range(1), Flag(example=1000)] = None
    """Steps between checkpoints. Default: only at the end of the run."""
    keep_last: Annotated[int | None, Range(1), Flag(example=3)] = None
    """Newest checkpoints to keep. Older ones are deleted after a newer one is published. Default: keep all."""
    keep_every: Annotated[int | None, Range(1)] = None
    """Also keeps every checkpoint whose step is a multiple of this. Needs --keep-last. Default: keep only those of
    --keep-last."""
    async_save: bool = False
    """Saves in the background. Training waits only for the copy to host memory."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """When a checkpoint or a line of metrics.jsonl cannot be written. stop: all ranks stop. warn: the run continues,
    except at its last checkpoint."""
    exit_interval: Annotated[int | None, Range(1)] = None
    """Saves and ends the run at the first step that is a multiple of this. Default: end at --train-iters."""
    exit_duration_minutes: Annotated[float | None, Range(above=0), Flag(("--exit-duration-in-mins",))] = None
    """Saves and ends the run after the first step that finishes this many minutes after its start. Default: no
    limit."""


@dataclass(frozen=True, kw_only=True)
class StartConfig(Section):
    """Which parts of a checkpoint a run starts from."""

    pretrained_checkpoint: Annotated[str | None, Flag(metavar="DIR")] = None
    """Starts at step 0 from the weights of this checkpoint, or of the newest of a run, with new optimizer state. With
    --load auto, only where --output-dir has no checkpoint. Default: weights drawn from --seed."""
    load_optim: bool = True
    """Loads the optimizer's state with --load. Without it the run keeps its step and its position in the data."""
