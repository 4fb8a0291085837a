"""Arriving from another trainer: its flags, scripts, files of settings and entry points. The ring can be deleted, with
the part of tools/references.py that writes its pages: megacore then knows its own flags only
(megacore/config/other_trainers.py)."""
