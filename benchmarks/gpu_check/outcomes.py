"""A pytest plugin that records how every test ended, at once: `pytest -p benchmarks.gpu_check.outcomes --records F`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_check.records import Records


class _Recorder:
    def __init__(self, records: Records) -> None:
        self._records = records

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has one report for each of set-up, call and tear-down: the call counts, and whatever went wrong."""
        if report.when != "call" and report.passed:
            return
        message = report.longreprtext[-2000:] if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2]
        seconds = round(report.duration, 3)
        self._records.add("test", name=report.nodeid, outcome=report.outcome, seconds=seconds, message=message)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --records."""
    parser.addoption("--records", type=Path, default=None, help="file for each test's outcome, a JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that reports: where tests are spread over workers, that is not the workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Records(config.getoption("--records"))), "gpu-check-outcomes")
