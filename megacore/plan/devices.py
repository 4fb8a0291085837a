"""A device as far as a step's time depends on it: memory, links, and how much of each a step reaches.

The devices themselves, and the sources of their figures, stand in clusters.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.train.peaks import Format, peak_tflops

Case = Literal["slow", "expected", "fast"]


def tables_of(file: str) -> dict[str, dict[str, Any]]:
    """The tables of a data file of the planner, each with what it does not say from the one that it is based on."""
    found: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8")).items():
        found[name] = {**found.get(table.pop("based_on", ""), {}), **table}
    return found


@dataclass(frozen=True)
class Range:
    """An assumed value with what it may be at its worst and best."""

    slow: float
    expected: float
    fast: float

    def of(self, case: Case) -> float:
        """The value in a case."""
        value: float = getattr(self, case)
        return value


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way from one device to another.

    Attributes:
        bandwidth: bytes per second in one direction.
        latency: seconds of one message.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as torch counts devices: an MI250X card is two.

    Attributes:
        name: the value of --device.
        reported_as: the driver's name, by which `train/peaks.py` has its peaks.
        memory_bytes: capacity, as the driver reports it to a program.
        memory_bandwidth: bytes per second.
        node_ranks: devices of a node.
        node_nics: network cards of a node. Where they are fewer than the devices, several devices share one.
        node_mesh: whether each pair of devices of a node has a link of its own, without a switch: a group of fewer
            devices then has only the links among them, and a message a single one.
        node_link: between the devices of a node, from one of them to all others.
        network: between nodes; the bandwidth is a device's share of what the cards of its node carry.
        host_link: bytes per second between a device and its host's memory, in one direction.
        host_bandwidth: bytes per second of the host's memory, for each device.
        host_memory: bytes of memory of a node's host, which all devices of the node share; None: not known.
        product_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: the same of fused attention, forward and backward together.
        memory_efficiency: share of the memory's bandwidth that elementwise kernels reach.
        link_efficiency: share of the bandwidth of links in a node that collectives reach, and copies to the host.
        network_efficiency: the same of network cards.
        launch_seconds: of a kernel before it computes.
        host_seconds: of the program for each operator.
        node_spread: standard deviation of the nodes' speeds, relative. Devices of a kind differ in speed by
            8 % (Sinha et al. 2022, arXiv 2208.11035), and a step takes as long as its slowest node.
    """

    name: str
    reported_as: str
    memory_bytes: float
    memory_bandwidth: float
    node_ranks: int = 8
    node_nics: int = 8
    node_mesh: bool = False
    node_link: Link
    network: Link
    host_link: float = 32e9
    host_bandwidth: float = 50e9
    host_memory: float | None = None
    product_efficiency: Range = Range(0.62, 0.72, 0.80)
    attention_efficiency: Range = Range(0.38, 0.48, 0.58)
    memory_efficiency: Range = Range(0.70, 0.82, 0.92)
    link_efficiency: Range = Range(0.60, 0.75, 0.85)
    network_efficiency: Range = Range(0.60, 0.75, 0.85)
    launch_seconds: Range = Range(3e-6, 2e-6, 1e-6)
    host_seconds: Range = Range(25e-6, 12e-6, 6e-6)
    node_spread: Range = Range(0.03, 0.02, 0.01)

    def peak(self, form: Format) -> float | None:
        """FLOP/s of matrix products in a format; None: not known."""
        tflops = peak_tflops(self.reported_as, form)
        return None if tflops is None else tflops * 1e12

    def network_of_rank(self, sending: int) -> float:
        """Bytes per second that a rank sends to other nodes while others of its node do: not more than its own network
        card carries, nor than its share of all cards.

        Args:
            sending: how many ranks of the node send.
        """
        return self.network.bandwidth * min(max(self.node_ranks / self.node_nics, 1.0), self.node_ranks / sending)
