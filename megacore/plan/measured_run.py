"""What the directory of a finished run says of its speed: the configuration, the times of its steps, the machine.

Everything is read as if it could be damaged: what is not what a run writes is refused by file and line, before anything
is fitted to it.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megacore.config import Config, ResolvedConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import load_toml
from megacore.config.dimensions import degrees_of
from megacore.config.messages import counted, number, shortened
from megacore.errors import Collected, ConfigError
from megacore.files import unreadable
from megacore.observe.records import json_lines
from megacore.observe.report.files import require_readable

# The first row is of a step that also compiles and allocates, and three others tell a median and a spread.
LEAST_ROWS = 4
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e6
_MOST_CORES, _MOST_MEMORY = 1e5, 1e15  # as a cluster file may have
_TIME = "perf/step_time_s"
_RUN = "give the --output-dir of a run"


class Steps(NamedTuple):
    """The steps of a run without the first, in seconds.

    Attributes:
        rows: that are used.
        left_out: first rows.
        fast, median, slow: a tenth of the rows is below `fast`, and a tenth is above `slow`.
    """

    rows: int
    left_out: int
    fast: float
    median: float
    slow: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine whose cores are ranks.

    Attributes:
        cores: that ranks may use.
        memory_bytes: that all ranks share.
        source: who says so.
    """

    cores: int
    memory_bytes: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the last start of a run recorded; None: not recorded, as in a run of an older version.

    Attributes:
        host: name of the first rank's machine.
        device: what ranks compute on; `cpu`, or an accelerator's name.
        machine: the first rank's.
        local_ranks: number of ranks on it.
    """

    host: str | None = None
    device: str | None = None
    machine: Machine | None = None
    local_ranks: int | None = None

    @property
    def was_elsewhere(self) -> bool:
        """Whether the run is known to be of another machine than this one."""
        return self.host is not None and self.host != socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that a cluster can be fitted to.

    Attributes:
        directory: its `--output-dir`.
        config: resolved.
        steps: their times.
        launch: what it recorded of its machine.
    """

    directory: Path
    config: ResolvedConfig
    steps: Steps
    launch: Launch


def read_run(directory: Path) -> MeasuredRun:
    """What a run left in its directory.

    Raises:
        ConfigError: everything that is missing or unreadable.
    """
    if not directory.is_dir():
        raise ConfigError([f"--calibrate {directory} is not a directory: {_RUN}"])
    problems, config, steps, launch = list[str](), None, None, Launch()
    with Collected(problems):
        config = _config(directory / "config.toml")
    with Collected(problems):
        steps = _steps(directory / "metrics.jsonl")
    with Collected(problems):
        launch = read_launch(directory / "events.jsonl")
    if problems or config is None or steps is None:
        raise ConfigError(problems)
    return MeasuredRun(directory=directory, config=config, steps=steps, launch=launch)


def _refused(path: Path, said: str) -> ConfigError:
    return ConfigError([f"--calibrate {path.parent}: {path.name} {said}"])


def _config(path: Path) -> ResolvedConfig:
    try:
        if why := unreadable(path):
            raise _refused(path, f"{why}: {_RUN}")
        config = load_toml(path, BertConfig if b"\n[bert]\n" in path.read_bytes() else Config)
    except FileNotFoundError:
        raise _refused(path, f"is missing: {_RUN}") from None
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    degrees = degrees_of(partial(getattr, config.parallel))
    if config.model.vocab_size is None or None in degrees.values():
        raise _refused(path, f"lacks vocab_size or a parallel degree: {_RUN}, which has them all")
    resolved: ResolvedConfig = config.resolve(math.prod(degrees.values()))
    return resolved


def _steps(path: Path) -> Steps:
    """All rows without the first quarter, in which caches, threads and memory warm up."""
    if (rows := _rows(path)) is None:
        raise _refused(path, f"is missing: {_RUN}")
    times = [(line, row[_TIME]) for line, row in rows if _TIME in row]
    wrong = [(line, value) for line, value in times if not _is_number(value, _LEAST_SECONDS, _MOST_SECONDS)]
    if wrong:
        (line, value), others = wrong[0], f" ({counted(len(wrong), 'such line')})" if len(wrong) > 1 else ""
        bounds = f"a number of seconds from {number(_LEAST_SECONDS)} to {_MOST_SECONDS:,.0f}"
        raise _refused(path, f"line {line}: {_TIME} = {shortened(json.dumps(value), 40)} must be {bounds}{others}")
    if len(times) < LEAST_ROWS:
        how = "train for 10 steps or more with --log-interval 1"
        said = f"has {counted(len(times), 'row')} with {_TIME}, which must be at least {LEAST_ROWS}"
        raise _refused(path, f"{said}, as the first one is slow: {how}")
    first = max(len(times) // 4, 1)
    used = [float(value) for _, value in times[first:]]
    fast, *_, slow = statistics.quantiles(used, n=10, method="inclusive")
    return Steps(len(used), first, fast, statistics.median(used), slow)


def _rows(path: Path) -> list[tuple[int, Mapping[str, Any]]] | None:
    """The objects of a JSON lines file of a run by the numbers of their lines; what else is in it is refused, but for
    the end of a line that a killed run did not finish. None: there is no such file."""
    try:
        require_readable(path)
        with path.open("rb") as file:
            lines = list(enumerate(json_lines(file), start=1))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _refused(path, f"{error}: {_RUN}") from None
    damaged = [line for line, (text, row) in lines if row is None and text.strip() and text.endswith(b"\n")]
    if damaged:
        said = f"line {damaged[0]} is no JSON object"
        if len(damaged) > 1:
            said = f"{len(damaged)} lines are no JSON objects, the first is line {damaged[0]}"
        raise _refused(path, f"is damaged: {said}: {_RUN}, as the run wrote it")
    return [(line, row) for line, (_, row) in lines if row is not None]


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def read_launch(path: Path) -> Launch:
    """The last start of a run, by its events.jsonl; what is missing there is not recorded."""
    rows = reversed(_rows(path) or [])
    last: Mapping[str, Any] = next((row for _, row in rows if row.get("event") == "launch"), {})
    host, device, cores, memory, local = map(last.get, ("host", "device", "cores", "memory_bytes", "local_ranks"))
    machine = None
    if isinstance(cores, int) and _is_number(cores, 1, _MOST_CORES) and _is_number(memory, 1e6, _MOST_MEMORY):
        assert isinstance(memory, (int, float))
        machine = Machine(cores=cores, memory_bytes=float(memory), source="recorded by the run in events.jsonl")
    return Launch(
        host=host if isinstance(host, str) else None,
        device=device if isinstance(device, str) else None,
        machine=machine,
        local_ranks=local if isinstance(local, int) and _is_number(local, 1, _MOST_CORES) else None,
    )
