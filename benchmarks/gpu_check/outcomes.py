"""A pytest plugin that records how every test ended, at once: `pytest -p benchmarks.gpu_check.outcomes --records F`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_check.records import Records

_FILES: list[Records] = []  # none in a worker: where tests are spread over several, another process reports


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --records."""
    parser.addoption("--records", type=Path, default=None, help="file for each test's outcome, a JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that reports."""
    _FILES[:] = [] if hasattr(config, "workerinput") else [Records(config.getoption("--records"))]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has one report for each of set-up, call and tear-down: the call counts, and whatever went wrong."""
    if report.when == "call" or not report.passed:
        message = report.longreprtext[-2000:] if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2]
        test = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        for file in _FILES:
            file.add("test", **test, message=message)
