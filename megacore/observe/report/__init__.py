"""The report of a run: one HTML page, made from the files of its output directory (tools/report.py)."""
