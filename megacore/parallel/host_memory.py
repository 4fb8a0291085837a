"""How much host memory is left to the processes of a run, as Linux tells it: of the machine, and of its control groups.

A container or a batch system limits memory by control groups, nested in each other, and the narrowest decides;
both versions of them are read (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst). What the
kernel keeps of files counts as free, since it gives that up first, and so does swap: a run is refused only for what is
certain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}  # of a control group, by its version


@dataclass(frozen=True)
class AvailableMemory:
    """Memory that may be taken, and who says so."""

    available: float
    source: str


def host_memory(root: Path = Path("/")) -> AvailableMemory | None:
    """The least that the machine or a control group of this process has left; None: unknown. `root`: has /proc and
    /sys."""
    limits = [*_machine(root), *_of_groups(root)]
    return min(limits, key=lambda memory: memory.available, default=None)


def host_capacity(root: Path = Path("/")) -> float | None:
    """Bytes of memory that this machine has, or that the control groups of this process allow, where that is less; None
    where nothing tells. `root`: the directory that contains /proc and /sys."""
    sizes = [_installed(root), *(_number(group / _LIMITS[version]) for group, version in _groups(root))]
    return min((size for size in sizes if size is not None), default=None)


def _installed(root: Path) -> float | None:
    if (size := _table(root / "proc/meminfo").get("MemTotal")) is not None:
        return 1024.0 * size
    if root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _machine(root: Path) -> Iterator[AvailableMemory]:
    values = _table(root / "proc/meminfo")
    if "MemAvailable" in values:
        available = 1024.0 * (values["MemAvailable"] + values.get("SwapFree", 0))
        yield AvailableMemory(
            available, "MemAvailable of this machine" + (", with swap" if values.get("SwapFree") else "")
        )
    elif (installed := _installed(root)) is not None:
        yield AvailableMemory(installed, "installed in this machine")


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    swap = 1024.0 * _table(root / "proc/meminfo").get("SwapFree", 0)
    for group, version in _groups(root):
        if memory := _version_2(group, swap) if version == 2 else _version_1(group, swap):
            yield memory


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """The directories of this process's control groups, and of those around them, with their version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            yield from ((group, 2) for mount in mounts for group in _up(mount, path))
        elif "memory" in controllers.split(","):
            yield from ((group, 1) for group in _up(root / "sys/fs/cgroup/memory", path))


def _up(mount: Path, path: str) -> Iterator[Path]:
    """A group's directory and those around it; in a container only the last of them may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        directory = mount.joinpath(*parts[:count])
        if directory.is_dir():
            yield directory


def _version_2(group: Path, swap: float) -> AvailableMemory | None:
    limit, used = _number(group / _LIMITS[2]), _number(group / "memory.current")
    if limit is None or used is None:
        return None
    swap_limit = _number(group / "memory.swap.max")
    if swap_limit is not None:
        swap = min(swap, swap_limit - (_number(group / "memory.swap.current") or 0.0))
    statistics = _table(group / "memory.stat")
    files = statistics.get("inactive_file", 0) + statistics.get("active_file", 0)
    return AvailableMemory(
        max(limit - used + files + max(swap, 0.0), 0.0), f"limit of the control group, memory.max {limit:.0f}"
    )


def _version_1(group: Path, swap: float) -> AvailableMemory | None:
    limit, used = _number(group / _LIMITS[1]), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    both, both_used = _number(group / "memory.memsw.limit_in_bytes"), _number(group / "memory.memsw.usage_in_bytes")
    statistics = _table(group / "memory.stat")
    files = statistics.get("total_inactive_file", 0) + statistics.get("total_active_file", 0)
    left = limit - used + swap
    if both is not None and both_used is not None:
        left = min(left, both - both_used)
    return AvailableMemory(max(left + files, 0.0), f"limit of the control group, memory.limit_in_bytes {limit:.0f}")


def _table(path: Path) -> Mapping[str, int]:
    """The lines of a file that are a name and a number."""
    values_of = {}
    for line in _text(path).splitlines():
        name, *values = line.replace(":", " ").split()
        if values and values[0].isdecimal():
            values_of[name] = int(values[0])
    return values_of


def _number(path: Path) -> float | None:
    """The number in a file; None where there is no file, or no limit ("max")."""
    text = _text(path).strip()
    return float(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
