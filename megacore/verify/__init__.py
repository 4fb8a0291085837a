"""Compare a parallel layout with one process, on a narrowed copy of the model (docs/guides/verify.md); rehearse a run.

`narrow.py` makes the copy, `run.py` trains it on a layout and records tensors, `reference.py` trains it on one process
and measures rounding, `masks.py` gives both the same dropout masks, `compare.py` judges, and `command.py` is the tool.
`defects.toml` has the defects of the self-test, which `defects.py` plants and `faults.py` makes.
`rehearse.py` cuts a run to this machine and starts it, narrowed by `narrow.py` too.
Nothing else in megacore imports this package.
"""
