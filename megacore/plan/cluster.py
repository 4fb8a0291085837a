"""Clusters by short names or from a TOML file: devices, their peaks, network cards of a node, and a price.

A file that rows were fitted to (row_fit.py) also has the trainer that ran them, and what layouts like theirs take.

What a device is stands in devices.py, what a program does in software.py. A cluster adds what only planning asks for.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megacore.config.logging import LEAST_TFLOPS, MOST_TFLOPS
from megacore.config.messages import did_you_mean, nearest_name, number, one_of
from megacore.errors import ConfigError
from megacore.files import read_bounded
from megacore.plan.devices import Device, Link, Range, tables_of
from megacore.plan.measured_layouts import LENGTHS, MeasuredLayouts
from megacore.plan.software import MEGACORE, SOFTWARE, Software, software_named
from megacore.train.peaks import Format

_FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in nodes.

    Attributes:
        device: one of them, with its links and how much of each a step reaches.
        peaks: FLOP/s of dense matrix products by number format.
        price_per_hour: USD per device.
        on_cpu: whether ranks compute on a CPU; all ranks of a node then share `memory_bytes`.
        software: whose program runs on it.
        layouts: what measured layouts take beyond the other figures; None: none was measured.
        source: where the figures are from.
        notes: what its file says that no machine is known to have.
        chip: whose published steps tell its error (checked.py); empty: nobody's.
        kinds: of nodes that differ, each with their number, in the order of their ranks; empty: all are alike.
    """

    device: Device
    peaks: Mapping[Format, float]
    price_per_hour: float = 0.0
    on_cpu: bool = False
    software: Software = MEGACORE
    layouts: MeasuredLayouts | None = None
    source: str = "data sheet; efficiencies assumed"
    notes: tuple[str, ...] = ()
    chip: str = ""
    kinds: tuple[tuple[Cluster, int], ...] = ()

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def is_fitted(self) -> bool:
        """Whether its speeds are those of a measured run, which a cluster file says in its `source`."""
        return self.source.startswith("fitted")

    @property
    def devices(self) -> float:
        """Number of all devices; infinite where nodes are alike, of which there are as many as are asked for."""
        return sum(nodes * kind.device.node_ranks for kind, nodes in self.kinds) if self.kinds else math.inf

    def used_by(self, ranks: int) -> Cluster:
        """The cluster for so many ranks: of the first nodes that hold them the slowest devices and the least memory.

        Raises:
            ConfigError: there are fewer devices.
        """
        if ranks > self.devices:
            has = f"--cluster {self.name} has {self.devices:g} devices"
            raise ConfigError([f"{has}, fewer than the {ranks:,} ranks of the run: use --world-size {self.devices:g}"])
        used, left = list[tuple[Cluster, int]](), ranks
        for kind, nodes in self.kinds:
            if left > 0:
                used.append((kind, min(nodes, math.ceil(left / kind.device.node_ranks))))
                left -= nodes * kind.device.node_ranks
        if not used:
            return self
        slowest = dataclasses.replace(_slowest(self.name, used), software=self.software)
        is_of_kinds = self.price_per_hour == _slowest(self.name, self.kinds).price_per_hour
        return slowest if is_of_kinds else dataclasses.replace(slowest, price_per_hour=self.price_per_hour)

    def cost(self, tokens: float, *, tokens_per_second: float, goodput: float, ranks: int) -> tuple[float, float]:
        """Days and USD of training on this number of tokens.

        Args:
            tokens: of the whole training.
            tokens_per_second: of all ranks together.
            goodput: share of the time that makes progress.
            ranks: number of devices.
        """
        seconds = tokens / tokens_per_second / goodput
        return seconds / 86400, seconds / 3600 * ranks * self.price_per_hour

    def peak(self, form: str) -> float | None:
        """FLOP/s of products in a format, or None."""
        return next((value for key, value in self.peaks.items() if key == form), None)


def _built_in() -> dict[str, Cluster]:
    """Those of clusters.toml."""
    found: dict[str, Cluster] = {}
    for name, table in tables_of("clusters.toml").items():
        given = ("price_per_hour", "on_cpu", "source", "peaks")
        fields: dict[str, Any] = {key: table[key] for key in given if key in table}
        device = Device(name=name, **{key: _figure(value) for key, value in table.items() if key not in given})
        if not fields.get("on_cpu"):
            fields["peaks"] = {form: peak for form in _FORMATS if (peak := device.peak(form)) is not None}
            fields["chip"] = name.partition("-")[0]  # of all sizes of memory
        found[name] = Cluster(device=device, **fields)
    return found


def _figure(value: Any) -> Any:
    """A value of clusters.toml as `Device` has it."""
    if isinstance(value, list):
        return Range(*value)
    return Link(**value) if isinstance(value, dict) else value


CLUSTERS: Mapping[str, Cluster] = _built_in()


def cluster_named(name: str) -> Cluster:
    """The cluster of a name, or of a TOML file.

    Raises:
        ConfigError: there is none, or everything that is wrong with the file.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name.endswith(".toml"):
        return load_cluster(Path(name))
    ways = f"use {one_of(list(CLUSTERS))}, or a file that ends in .toml"
    if Path(name).is_dir():
        raise ConfigError([f"--cluster {name} is a directory: {ways}"])
    begins = [known for known in CLUSTERS if len(name) > 1 and known.startswith(name.lower())]
    raise ConfigError([f"--cluster {name} is not known: {ways}{did_you_mean(name, begins or CLUSTERS)}"])


# ---- files -----------------------------------------------------------------------------------------------------------


_NUMBERS = tomllib.loads(Path(__file__).with_name("cluster_file.toml").read_text(encoding="utf-8"))
_RANGES = {
    "products": "product_efficiency",
    "attention": "attention_efficiency",
    "memory": "memory_efficiency",
    "links": "link_efficiency",
    "network": "network_efficiency",
    "launch_us": "launch_seconds",
    "host_us": "host_seconds",
}
_WHOLE = {"gpus_per_node", "nics_per_node"}
# Of a file that leaves them out; None: not known.
_USUAL = {
    "name": "", "source": "cluster file", "on_cpu": False, "node_mesh": False, "host_link_gb_s": 32.0,
    "host_memory_gb_s": 400.0, "host_memory_gb": None, "peak_tflops": {}, "efficiency": {}, "software": {},
}  # fmt: skip
_MOST_BYTES = 1 << 20  # of a cluster file
_LEAST_SHARE = 1e-3
_MOST_MICROSECONDS = 1_000_000
_MOST_WEIGHT = 1e6  # of a measured layout


def load_cluster(path: Path) -> Cluster:
    """A cluster from a TOML file.

    Raises:
        ConfigError: the file cannot be read; or every field that is missing, unknown or out of range.
    """
    try:
        table = tomllib.loads(read_bounded(path, _MOST_BYTES).decode("utf-8-sig").replace("\r\n", "\n"))
    except FileNotFoundError:
        raise ConfigError([f"--cluster {path}: there is no such file: use {one_of(list(CLUSTERS))}"]) from None
    except OSError as error:
        raise ConfigError([f"--cluster {path} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"--cluster {path} is not valid TOML: it is not text in UTF-8"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"--cluster {path} is not valid TOML: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"--cluster {path} is not valid TOML: its values are nested too deeply"]) from None
    if not table:
        raise ConfigError([f'--cluster {path} is empty: give its fields, or based_on = "h100" and what differs'])
    problems: list[str] = []
    cluster = _of_kinds(table, path, problems) if "kinds" in table else _of_table(table, path, problems)
    if problems or cluster is None:
        raise ConfigError(problems)
    return cluster


def _of_kinds(table: Mapping[str, Any], path: Path, problems: list[str]) -> Cluster | None:
    """A cluster of nodes that differ: each table of [[kinds]] has the fields of a cluster file, and `nodes`."""
    given = table["kinds"]
    if not isinstance(given, list) or not given or not all(isinstance(kind, dict) for kind in given):
        problems.append(
            f'{path}: kinds = {_shown(given)} must be tables, as in [[kinds]], based_on = "h100", nodes = 4'
        )
        return None
    name = _Reader({"name": path.stem, **table}, path, problems).text("name")
    if others := ", ".join(sorted(table.keys() - {"kinds", "name"})):
        problems.append(f"{path}: {others} must be in each table of [[kinds]]")
    kinds = list[tuple[Cluster, int]]()
    for place, kind in enumerate(given, start=1):
        where, nodes = Path(f"{path}, kind {place}"), kind.get("nodes")
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= 1e5:
            said = f"nodes = {_shown(nodes)}" if "nodes" in kind else "nodes is missing: it"
            problems.append(f"{where}: {said} must be a whole number from 1 to 100,000")
        if of_all := " and ".join(f"[kinds.{table}]" for table in ("software", "layouts") if table in kind):
            problems.append(f"{where}: {of_all} cannot differ between kinds: leave it out, and use --software")
        base = kind.get("based_on")
        fields = {"name": base if isinstance(base, str) else f"kind {place}", **kind}
        fields.pop("nodes", None)
        if (cluster := _of_table(fields, where, problems)) is not None:
            kinds.append((cluster, nodes))
    sizes = [cluster.device.node_ranks for cluster, _ in kinds]
    if len(set(sizes)) > 1:
        ways = f"give all kinds one gpus_per_node, as in gpus_per_node = {math.gcd(*sizes)}, and more nodes"
        problems.append(f"{path}: nodes have {', '.join(map(str, sizes))} devices: {ways}")
    if any(cluster.on_cpu for cluster, _ in kinds):
        problems.append(f"{path}: kinds must be of accelerators: leave those with on_cpu out")
    if kinds and not set.intersection(*(set(cluster.peaks) for cluster, _ in kinds)):
        problems.append(f"{path}: the kinds have no format of [peak_tflops] in common: give bf16 to all")
    return None if problems else dataclasses.replace(_slowest(name, kinds), kinds=tuple(kinds))


def _slowest(name: str, kinds: Sequence[tuple[Cluster, int]]) -> Cluster:
    """The cluster that nodes of some kinds are together: of each part of a step the slowest kind, and the least memory
    of a device. The price is that of the mean device."""
    clusters = [kind for kind, _ in kinds]
    forms = [form for form in clusters[0].peaks if all(form in kind.peaks for kind in clusters)]

    def products(kind: Cluster, form: Format) -> float:
        return kind.peaks[form] * kind.device.product_efficiency.expected

    def slowest_in(form: Format) -> Cluster:
        return min(clusters, key=lambda kind: products(kind, form))

    # Chips differ in what they are slow in: each format has the slowest one's products, at the share of one of them.
    computing = slowest_in("bf16" if "bf16" in forms else forms[0])
    share = computing.device.product_efficiency.expected
    fields: dict[str, Any] = {"name": name}
    for together, speed in _SLOWEST.items():
        slowest = min((kind.device for kind in clusters), key=speed)
        fields |= {field: getattr(slowest, field) for field in together.split()}
    counts = ", ".join(f"{nodes * kind.device.node_ranks} x {kind.name}" for kind, nodes in kinds)
    return Cluster(
        device=dataclasses.replace(computing.device, **fields),
        peaks={
            form: (kind := slowest_in(form)).peaks[form] * (kind.device.product_efficiency.expected / share)
            for form in forms
        },
        price_per_hour=sum(kind.price_per_hour * nodes for kind, nodes in kinds) / sum(nodes for _, nodes in kinds),
        source=f"of each part of a step the slowest of {counts}, and the least memory",
        notes=tuple(note for kind in clusters for note in kind.notes),
        chip=clusters[0].chip if len({kind.chip for kind in clusters}) == 1 else "",
    )


# Fields of a device that belong together, and by what the slowest device is found. Unknown host memory counts as none.
_SLOWEST: Mapping[str, Callable[[Device], float]] = {
    "memory_bytes": lambda one: one.memory_bytes,
    "memory_bandwidth memory_efficiency": lambda one: one.memory_bandwidth * one.memory_efficiency.expected,
    "node_link node_mesh link_efficiency": lambda one: one.node_link.bandwidth * one.link_efficiency.expected,
    "network node_nics network_efficiency": lambda one: one.network.bandwidth * one.network_efficiency.expected,
    "host_link": lambda one: one.host_link,
    "host_bandwidth": lambda one: one.host_bandwidth,
    "host_memory": lambda one: one.host_memory or 0.0,
    "launch_seconds": lambda one: -one.launch_seconds.expected,
    "host_seconds": lambda one: -one.host_seconds.expected,
}


def _of_table(table: Mapping[str, Any], path: Path, problems: list[str]) -> Cluster | None:
    """A cluster of nodes that are alike; None: what is wrong with the table is in `problems`."""
    before, base = len(problems), table.get("based_on")
    usual: Mapping[str, Any] = _USUAL
    if base is not None:
        if not isinstance(base, str) or base not in CLUSTERS:
            meant = did_you_mean(base, CLUSTERS) if isinstance(base, str) else ""
            problems.append(f"{path}: based_on = {_shown(base)} is not known: use {one_of(list(CLUSTERS))}{meant}")
            base = next(iter(CLUSTERS))  # the fields that the file leaves to its base are not missing
        usual = {**_USUAL, **_table_of(CLUSTERS[base]), **{text: _USUAL[text] for text in ("name", "source")}}
    file = _Reader({**usual, **table}, path, problems)
    texts = {name: file.text(name) for name in ("name", "source")}
    numbers = {name: file.number(name) for name in _NUMBERS}
    peaks, ranges = file.peaks(usual["peak_tflops"]), file.ranges(usual["efficiency"])
    switches = {name: file.switch(name) for name in ("on_cpu", "node_mesh")}
    software, layouts = file.software(), file.layouts()
    known = {*_NUMBERS, *_USUAL, "based_on", "layouts"}
    for name in sorted(table.keys() - known):
        near = nearest_name(name, known)
        way_out = f"did you mean {near}?" if near else f"use {', '.join(sorted(known))}"
        problems.append(f"{path}: {name} is not a field ({way_out})")
    if len(problems) > before:
        return None
    ranks, nics = int(numbers["gpus_per_node"]), int(numbers["nics_per_node"])
    name, card, host = texts["name"] or path.stem, numbers["nic_bandwidth_gb_s"] * 1e9, numbers["host_memory_gb"]
    cluster = Cluster(
        device=Device(
            name=name,
            reported_as=name,
            memory_bytes=numbers["memory_gb"] * 1e9,
            memory_bandwidth=numbers["memory_bandwidth_gb_s"] * 1e9,
            node_ranks=ranks,
            node_nics=nics,
            node_mesh=switches["node_mesh"],
            node_link=Link(bandwidth=numbers["node_bandwidth_gb_s"] * 1e9, latency=numbers["node_latency_us"] * 1e-6),
            network=Link(bandwidth=card * nics / ranks, latency=numbers["network_latency_us"] * 1e-6),
            host_link=numbers["host_link_gb_s"] * 1e9,
            host_bandwidth=numbers["host_memory_gb_s"] * 1e9 / ranks,
            host_memory=None if math.isnan(host) else host * 1e9,
            **ranges,
        ),
        peaks=peaks,
        price_per_hour=numbers["price_per_hour"],
        on_cpu=switches["on_cpu"],
        source=texts["source"],
        software=software,
        layouts=layouts,
        chip="" if base is None or peaks != CLUSTERS[base].peaks else CLUSTERS[base].chip,
    )
    # A file that --calibrate wrote has speeds of a whole step, which may be any.
    notes = () if cluster.on_cpu or cluster.is_fitted else tuple(_implausible(cluster, path, table.keys()))
    return dataclasses.replace(cluster, notes=notes)


_MOST_NETWORK = 100.0  # GB/s of a GPU: a card of 800 Gb/s
_LEAST_MEMORY, _MOST_MEMORY = 100.0, 20_000.0  # GB/s of a GPU


def _implausible(cluster: Cluster, path: Path, given: Collection[str]) -> Iterator[str]:
    """Speeds that no GPU has, which a mistaken unit or an inherited number explains, with the value that was probably
    meant.

    Args:
        cluster: of a file.
        path: of the file.
        given: fields that the file has.
    """
    fields, gpus = fields_of(cluster), cluster.device.node_ranks
    card, memory = fields["nic_bandwidth_gb_s"], fields["memory_bandwidth_gb_s"]
    of_gpu, most = cluster.device.network.bandwidth / 1e9, f"the fastest have {_MOST_NETWORK:g} GB/s"
    if card > _MOST_NETWORK:
        yield (
            f"{path}: nic_bandwidth_gb_s = {card:g} is more than a network card carries; {most}. If it is in Gb/s, "
            f"write nic_bandwidth_gb_s = {card / 8:g}"
        )
    elif of_gpu > _MOST_NETWORK * (1 + 1e-9):
        way_out = f"If it is in Gb/s, write nic_bandwidth_gb_s = {card / 8:g}"
        if "nics_per_node" not in given:  # the base's, whose nodes are larger
            way_out = f"Give nics_per_node, as in nics_per_node = {gpus}"
        yield f"{path}: nic_bandwidth_gb_s = {card:g} is {of_gpu:g} GB/s per GPU; {most}. {way_out}"
    if memory < _LEAST_MEMORY:
        in_tb = memory * 1e3 <= _MOST_MEMORY
        way_out = f"If it is in TB/s, write memory_bandwidth_gb_s = {memory * 1e3:g}" if in_tb else "Give GB/s"
        yield f"{path}: memory_bandwidth_gb_s = {memory:g} is less than any GPU has. {way_out}"


class _Reader:
    """Reads a table of a cluster file; what is wrong with it is added to the problems.

    Args:
        table: with what it leaves out.
        path: of the file.
        problems: to which they are added.
    """

    def __init__(self, table: Mapping[str, Any], path: Path, problems: list[str]) -> None:
        self._table, self._path, self._problems = table, path, problems

    def _wrong(self, name: str, value: object, must: str) -> None:
        self._problems.append(f"{self._path}: {name} = {_shown(value)} {must}")

    def text(self, name: str) -> str:
        value = self._table[name]
        if isinstance(value, str) and value.isprintable():
            return value
        self._wrong(name, value, f'must be one line of text in quotes, as in {name} = "mine"')
        return ""

    def switch(self, name: str) -> bool:
        value = self._table[name]
        if not isinstance(value, bool):
            self._wrong(name, value, "must be true or false")
        return bool(value)

    def number(self, name: str) -> float:
        """NaN: not known."""
        about, value = _NUMBERS[name], self._table.get(name, math.nan)
        if name not in self._table:
            missing = f'{name} is missing ({about["meaning"]}): give it, or based_on = "a100-80g"'
            self._problems.append(f"{self._path}: {missing}")
        elif value is not None:
            is_right = isinstance(value, int) if name in _WHOLE else True
            if is_right and _is_number(value) and about["low"] <= value <= about["high"]:
                return float(value)
            kind = "a whole number" if name in _WHOLE else "a number"
            self._wrong(name, value, f"must be {kind} from {number(about['low'])} to {about['high']:,.0f}")
        return math.nan

    def _part(self, name: str, example: str) -> Mapping[str, Any]:
        """A table in the table."""
        value = self._table[name]
        if isinstance(value, dict):
            return value
        self._wrong(name, value, f"must be a table, as in [{name}] and {example}")
        return {}

    def peaks(self, usual: Mapping[str, float]) -> dict[Format, float]:
        """FLOP/s by format; `usual`: TFLOP/s of formats that the file leaves out."""
        given, before = self._part("peak_tflops", "bf16 = 312"), len(self._problems)
        if not given and not usual and isinstance(self._table["peak_tflops"], dict):
            self._problems.append(f"{self._path}: [peak_tflops] is missing: give TFLOP/s by format, as in bf16 = 312")
        for name, value in given.items():
            if name not in _FORMATS:
                way_out = f"use {one_of(_FORMATS)}{did_you_mean(name, _FORMATS)}"
                self._problems.append(f"{self._path}: peak_tflops.{name} is not a format: {way_out}")
            elif not _is_number(value) or not LEAST_TFLOPS <= value <= MOST_TFLOPS:
                bounds = f"from {number(LEAST_TFLOPS)} to {MOST_TFLOPS:,.0f}"
                self._wrong(f"peak_tflops.{name}", value, f"must be a number {bounds}")
        if len(self._problems) > before:
            return {}
        values = {**usual, **given}
        return {form: values[form] * 1e12 for form in _FORMATS if form in values}

    def ranges(self, usual: Mapping[str, Any]) -> dict[str, Range]:
        """By the field of a device; `usual`: what the file leaves out."""
        given = self._part("efficiency", "products = 0.7")
        found: dict[str, Range] = {}
        for name, values in {**usual, **given}.items():
            if name not in _RANGES:
                way_out = f"use {one_of(list(_RANGES))}{did_you_mean(name, _RANGES)}"
                self._problems.append(f"{self._path}: efficiency.{name} is not known: {way_out}")
                continue
            is_time, triple = name.endswith("_us"), values if isinstance(values, list) else [values] * 3
            low, high = (0, _MOST_MICROSECONDS) if is_time else (_LEAST_SHARE, 1)
            if len(triple) != 3 or not all(_is_number(v) and low <= v <= high for v in triple):
                bounds = f"{'microseconds' if is_time else 'shares'} from {low} to {high:,}"
                must = f"must be one number or [slow, expected, fast], {bounds}"
                self._wrong(f"efficiency.{name}", values, must)
            elif triple != sorted(triple, reverse=is_time):
                order = "fall" if is_time else "rise"
                self._wrong(f"efficiency.{name}", values, f"must {order}: [slow, expected, fast]")
            else:
                found[_RANGES[name]] = Range(*(v / (1e6 if is_time else 1) for v in triple))
        if "links" in given and "network" not in given and "link_efficiency" in found:
            found["network_efficiency"] = found["link_efficiency"]  # one number for both, as in older files
        return found

    def software(self) -> Software:
        """The trainer that a file is fitted to, with the times that were fitted with it."""
        given = self._table["software"]
        if not isinstance(given, dict) or not given.keys() <= {"name", "block_us", "step_us"}:
            shown = _shown(given) if not isinstance(given, dict) else one_of(sorted(given))
            must = f"software = {shown} must be a table with name, block_us and step_us"
            self._problems.append(f"{self._path}: {must}")
            return MEGACORE
        try:
            software = software_named(str(given.get("name", MEGACORE.name)))
        except ConfigError:
            self._wrong("software.name", given["name"], f"is not known: use {one_of(list(SOFTWARE))}")
            return MEGACORE
        times = {"block_us": software.block_seconds, "step_us": Range(*[software.step_seconds] * 3)}
        for name in times.keys() & given.keys():
            values = given[name] if isinstance(given[name], list) else [given[name]] * 3
            if len(values) != 3 or not all(_is_number(v) and 0 <= v <= _MOST_MICROSECONDS * 1e3 for v in values):
                must = f"must be microseconds from 0 to {_MOST_MICROSECONDS * 1000:,}"
                self._wrong(f"software.{name}", given[name], must)
                continue
            times[name] = Range(*(value / 1e6 for value in values))
        return dataclasses.replace(software, block_seconds=times["block_us"], step_seconds=times["step_us"].expected)

    def layouts(self) -> MeasuredLayouts | None:
        """What measured layouts take beyond the constants: a row of the file for each of them."""
        if (given := self._table.get("layouts")) is None:
            return None
        columns = [*LENGTHS, "weight"]
        fields: dict[str, Any] = given if isinstance(given, dict) and given.get("columns") == columns else {}
        rows, of_shape = fields.get("rows"), fields.get("of_shape", math.nan)
        is_share = _is_number(of_shape) and 0 <= of_shape <= 1
        if not isinstance(rows, list) or not all(map(_is_layout, rows)) or not is_share:
            must = f"layouts must have of_shape from 0 to 1, columns = {_shown(columns)} and rows of as many numbers,"
            way_out = (
                "all but the last whole and at least 1, as --fit-out wrote them: fit again, or leave the table out"
            )
            self._problems.append(f"{self._path}: {must} {way_out}")
            return None
        return MeasuredLayouts(
            rows=tuple(tuple(row[:-1]) for row in rows),
            weights=tuple(float(row[-1]) for row in rows),
            of_shape=float(of_shape),
        )


def _shown(value: object) -> str:
    """A value of a TOML file as the file may have it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_shown(item)}" for key, item in value.items()) + "}"
    return str(value)  # numbers, dates and times


def fields_of(cluster: Cluster) -> dict[str, float]:
    """The numbers of a cluster as its file has them; the file leaves out what is not known."""
    device = cluster.device
    fields = {
        "memory_gb": device.memory_bytes / 1e9,
        "memory_bandwidth_gb_s": device.memory_bandwidth / 1e9,
        "gpus_per_node": device.node_ranks,
        "node_bandwidth_gb_s": device.node_link.bandwidth / 1e9,
        "node_latency_us": device.node_link.latency * 1e6,
        "nics_per_node": device.node_nics,
        "nic_bandwidth_gb_s": device.network.bandwidth * device.node_ranks / device.node_nics / 1e9,
        "network_latency_us": device.network.latency * 1e6,
        "host_link_gb_s": device.host_link / 1e9,
        "host_memory_gb_s": device.host_bandwidth * device.node_ranks / 1e9,
        "price_per_hour": cluster.price_per_hour,
    }
    return fields if device.host_memory is None else {**fields, "host_memory_gb": device.host_memory / 1e9}


def _is_layout(row: object) -> bool:
    if not isinstance(row, list) or len(row) != len(LENGTHS) + 1 or not all(map(_is_number, row)):
        return False
    return all(isinstance(size, int) and size >= 1 for size in row[:-1]) and abs(row[-1]) <= _MOST_WEIGHT


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table_of(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the table of its file."""
    table: dict[str, Any] = {"name": cluster.name, "source": cluster.source, "on_cpu": cluster.on_cpu}
    table |= {"node_mesh": True} if cluster.device.node_mesh else {}
    table |= {name: int(value) if name in _WHOLE else float(value) for name, value in fields_of(cluster).items()}
    table["peak_tflops"] = {form: peak / 1e12 for form, peak in cluster.peaks.items()}
    table["efficiency"] = {
        name: _triple(getattr(cluster.device, field), 1e6 if name.endswith("_us") else 1.0)
        for name, field in _RANGES.items()
    }
    if (software := cluster.software) is not MEGACORE:
        table["software"] = {"name": software.name, "step_us": software.step_seconds * 1e6}
        table["software"]["block_us"] = _triple(software.block_seconds, 1e6)
    if (layouts := cluster.layouts) is not None:
        rows = [[*row, weight] for row, weight in zip(layouts.rows, layouts.weights, strict=True)]
        table["layouts"] = {"of_shape": layouts.of_shape, "columns": [*LENGTHS, "weight"], "rows": rows}
    return table


def _triple(values: Range, scale: float) -> list[float]:
    return [value * scale for value in (values.slow, values.expected, values.fast)]


def to_toml(cluster: Cluster) -> str:
    """A cluster as the text of its file."""
    lines: list[str] = []
    for name, value in _table_of(cluster).items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {_shown(value)}")
            continue
        lines += ["", f"[{name}]" + ("  # slow, expected, fast" if name == "efficiency" else "")]
        for key, inner in value.items():
            rows = [f"    {_shown(row)}," for row in inner] if key == "rows" else []
            lines += ["rows = [", *rows, "]"] if key == "rows" else [f"{key} = {_shown(inner)}"]
    return "\n".join(lines) + "\n"
