"""`--wandb-project`: a run of Weights & Biases, which a resumed run continues. W&B drops what comes with a lower step
than before, so that ours, which resumes and rollbacks repeat, is a separate metric, and the x axis of all others."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megacore
from megacore.config import LoggingConfig
from megacore.files import replace_bytes
from megacore.observe.trackers.tracker import RunInfo

ID_FILE = "wandb_run_id"
"""The file of the output directory that keeps the id of the run."""
_INIT_SECONDS = 90.0
_LOGIN_SECONDS = 30


class WandbRun:
    """A tracker that logs to W&B, online or to files for `wandb sync`."""

    flag = "--wandb-project"

    def __init__(self, settings: LoggingConfig) -> None:
        self._settings = settings

    def open(self, run: RunInfo) -> None:
        import wandb

        settings, self._id, self._id_file = self._settings, _run_id(run), run.output_dir / ID_FILE
        self._run = wandb.init(
            project=settings.wandb_project,
            entity=settings.wandb_entity,
            name=settings.wandb_name or run.output_dir.resolve().name,
            group=settings.wandb_group,
            mode="offline" if settings.wandb_mode == "offline" else None,  # None: WANDB_MODE, or online
            id=self._id,
            resume="allow",
            dir=str(run.output_dir),
            config={**dataclasses.asdict(run.config), "megacore_version": megacore.__version__},
            allow_val_change=True,
            settings=wandb.Settings(init_timeout=_INIT_SECONDS, login_timeout=_LOGIN_SECONDS, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a record. A directory that was made again gets the id, too."""
        if self._id_file.parent.is_dir() and not self._id_file.exists():
            replace_bytes(self._id_file, self._id.encode() + b"\n", durable=False)
        self._run.log({key: value for key, value in record.items() if value is not None})

    def rewind(self, step: int) -> None:
        """Nothing: what W&B has cannot be dropped, and what follows is drawn at its steps again."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _run_id(run: RunInfo) -> str:
    """The id that the output directory keeps, where the run resumes; else a new one, which is kept there."""
    path: Path = run.output_dir / ID_FILE
    if run.first_step and path.is_file() and os.path.getsize(path) <= 64:
        kept = path.read_text(encoding="utf-8", errors="replace").strip()
        # The file may be anybody's, and the id becomes part of paths and URLs.
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", kept):
            return kept
    new = secrets.token_hex(4)
    replace_bytes(path, new.encode() + b"\n", durable=False)
    return new
