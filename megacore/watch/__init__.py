"""The watchdog: what every rank does now, who holds the others up, and how a hung run ends. It never imports torch.

Each rank writes its phase into a memory-mapped ledger (ledger.py, marks.py). One process per node reads the ledgers of
its ranks (watcher.py). Once nothing has moved for longer than the phase may take (budget.py) it finds the cause
(blame.py), reports it (report.py) and ends the run.
"""
