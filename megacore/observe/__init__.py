"""The observers: what records a run, guards it, and says why it failed; the trainer knows none of them by name.
for_training.py lists them. They take part as callbacks (megacore/train/callbacks.py) and hooks of a step
(megacore/train/step_hooks.py). A tree without this folder trains all the same (megacore/train/observers.py)."""
