"""Arriving from another trainer: its flags, scripts, files of settings and entry points.

The ring can be deleted: megacore then knows its own flags only (megacore/config/other_trainers.py).
"""
