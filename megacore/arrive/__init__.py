"""Arriving from another trainer: its flags, scripts, files of settings and entry points.

The ring can be deleted, with tools/megatron_reference.py and tools/deepspeed_reference.py, which write its pages:
megacore then knows its own flags only (megacore/config/other_trainers.py).
"""
