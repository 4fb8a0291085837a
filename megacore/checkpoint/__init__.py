"""Checkpoints: directories of safetensors shards and a manifest, published whole or not at all, readable on any layout.
The names below are what the trainer uses; each is loaded when it is first used, so that nothing loads torch early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megacore.lazy import listed_names, loader_of

if TYPE_CHECKING:
    from megacore.checkpoint.check import changed_settings
    from megacore.checkpoint.choose import choose_checkpoint
    from megacore.checkpoint.directory import MANIFEST_NAME, published, sweep
    from megacore.checkpoint.load import load_checkpoint, read_together
    from megacore.checkpoint.lock import WriterLock, lock_again, sees_lock
    from megacore.checkpoint.manifest import IN_DOUBT, Manifest, base_mark, read_manifest
    from megacore.checkpoint.save import CheckpointSaver, Saved
    from megacore.checkpoint.state import TrainingState

_NAMES = listed_names(__name__)
__all__ = sorted(_NAMES)
__getattr__ = loader_of(__name__, _NAMES)
