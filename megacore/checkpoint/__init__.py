"""Checkpoints: directories of safetensors shards and a manifest, published whole or not at all, readable on any layout.

The names below are what the trainer uses; each is loaded when it is first used, so that nothing loads torch early.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacore.checkpoint.check import changed_settings
    from megacore.checkpoint.choose import choose_checkpoint
    from megacore.checkpoint.directory import MANIFEST_NAME, published, sweep
    from megacore.checkpoint.load import load_checkpoint, read_together
    from megacore.checkpoint.lock import WriterLock, lock_again, sees_lock
    from megacore.checkpoint.manifest import IN_DOUBT, Manifest, read_manifest
    from megacore.checkpoint.save import CheckpointSaver, Saved
    from megacore.checkpoint.state import TrainingState

__all__ = [
    "IN_DOUBT", "MANIFEST_NAME", "CheckpointSaver", "Manifest", "Saved", "TrainingState", "WriterLock",
    "changed_settings", "choose_checkpoint", "load_checkpoint", "lock_again", "published", "read_manifest",
    "read_together", "sees_lock", "sweep",
]  # fmt: skip
_NAMES = {
    "check": "changed_settings",
    "choose": "choose_checkpoint",
    "directory": "MANIFEST_NAME published sweep",
    "load": "load_checkpoint read_together",
    "lock": "WriterLock lock_again sees_lock",
    "manifest": "IN_DOUBT Manifest read_manifest",
    "save": "CheckpointSaver Saved",
    "state": "TrainingState",
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
