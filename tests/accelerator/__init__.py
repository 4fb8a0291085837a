"""A pretend accelerator, and the tests that train on it.

Other tests use `device.py` (`counting()`) and, in tests/distributed.py, `run_distributed(..., backend="pretend")`.
"""
