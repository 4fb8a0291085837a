"""Compare a parallel layout with one process, on a narrowed copy of the model (docs/guides/verify.md); rehearse a run.

`narrow.py` makes the copy, `run.py` trains it on a layout, `reference.py` on one process, `masks.py` gives both the
same dropout masks, `compare.py` judges. `defects.toml` has the defects of the self-test, which `defects.py` plants and
`faults.py` makes. Of megacore only audit/ imports this package.
"""
