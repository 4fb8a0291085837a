"""Devices by short names, as far as a step's time depends on them: memory, links, and how much of each a step reaches.

What a data sheet states stands here once: bandwidths of memory and links from the manufacturers' data sheets (NVIDIA
A100, H100, H200 and HGX B200; AMD MI250X), the peaks of matrix products in `train/peaks.py`. Capacities are those that
the drivers report to programs (CUDA's and HIP's total memory), which are not the rounded numbers in the names: an H100
of "80 GB" has 79.11 GiB, which are 84.9e9 bytes. Bandwidths are of one direction. What a step
reaches of them is assumed, as three values: slow, expected and fast. A device's `network` is its share of what the
network cards of common nodes carry. The memory of a node's host is that of NVIDIA's DGX systems (DGX A100 of 320 GB and
640 GB, DGX H100, H200 and B200) and, beside MI250X, of LUMI-G and Frontier; other nodes have less or more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megacore.config.messages import did_you_mean, one_of
from megacore.errors import UserError
from megacore.train.peaks import Format, peak_tflops

Case = Literal["slow", "expected", "fast"]


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
        node_link: between the devices of a node.
        network: between nodes, per device.
        host_link: bytes per second between a device and its host's memory, in one direction.
        host_bandwidth: bytes per second of the host's memory, for each device.
        host_memory: bytes of memory of a node's host, which all devices of the node share; None: not known.
        product_efficiency: share of the peak that large matrix products reach.
        attention_efficiency: the same of fused attention, forward and backward together.
        memory_efficiency: share of the memory's bandwidth that elementwise kernels reach.
        link_efficiency: share of a link's bandwidth that collectives reach.
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
    node_link: Link
    network: Link
    host_link: float = 32e9
    host_bandwidth: float = 50e9
    host_memory: float | None = None
    product_efficiency: Range = Range(0.62, 0.72, 0.80)
    attention_efficiency: Range = Range(0.38, 0.48, 0.58)
    memory_efficiency: Range = Range(0.70, 0.82, 0.92)
    link_efficiency: Range = Range(0.60, 0.75, 0.85)
    launch_seconds: Range = Range(3e-6, 2e-6, 1e-6)
    host_seconds: Range = Range(25e-6, 12e-6, 6e-6)
    node_spread: Range = Range(0.03, 0.02, 0.01)

    def peak(self, form: Format) -> float | None:
        """FLOP/s of matrix products in a format; None: not known."""
        tflops = peak_tflops(self.reported_as, form)
        return None if tflops is None else tflops * 1e12


_GIB = 2.0**30
_NVLINK_3 = Link(bandwidth=300e9, latency=3e-6)
_NVLINK_4 = Link(bandwidth=450e9, latency=3e-6)
_NVLINK_5 = Link(bandwidth=900e9, latency=3e-6)
_INFINITY_FABRIC = Link(bandwidth=50e9, latency=4e-6)  # between two cards, which a ring of all devices passes
_PCIE_4, _PCIE_5 = 32e9, 64e9  # of 16 lanes
# Two processors for 8 devices: 16 channels of DDR4-3200, DDR5-4800 and DDR5-5600.
_DDR4_3200, _DDR5_4800, _DDR5_5600 = 410e9 / 8, 614e9 / 8, 717e9 / 8
_AMPERE_PRODUCTS = Range(0.75, 0.83, 0.90)  # an A100 holds its clock in products; later devices lower it
_AMPERE_LINKS = Range(0.55, 0.65, 0.80)  # sums over 2 to 8 A100 reach 0.49 to 0.67 of NVLink (nccl-tests, 32 to 128 MB)

DEVICES = (
    Device(
        name="a100-40g",
        reported_as="NVIDIA A100-SXM4-40GB",
        memory_bytes=39.39 * _GIB,
        memory_bandwidth=1555e9,
        node_link=_NVLINK_3,
        network=Link(bandwidth=25e9, latency=6e-6),
        host_link=_PCIE_4,
        host_bandwidth=_DDR4_3200,
        host_memory=1024 * _GIB,
        product_efficiency=_AMPERE_PRODUCTS,
        link_efficiency=_AMPERE_LINKS,
        attention_efficiency=Range(0.50, 0.58, 0.65),
    ),
    Device(
        name="a100-80g",
        reported_as="NVIDIA A100-SXM4-80GB",
        memory_bytes=79.15 * _GIB,
        memory_bandwidth=2039e9,
        node_link=_NVLINK_3,
        network=Link(bandwidth=25e9, latency=6e-6),
        host_link=_PCIE_4,
        host_bandwidth=_DDR4_3200,
        host_memory=2048 * _GIB,
        product_efficiency=_AMPERE_PRODUCTS,
        link_efficiency=_AMPERE_LINKS,
        attention_efficiency=Range(0.50, 0.58, 0.65),
    ),
    Device(
        name="h100",
        reported_as="NVIDIA H100 80GB HBM3",
        memory_bytes=79.11 * _GIB,
        memory_bandwidth=3350e9,
        node_link=_NVLINK_4,
        network=Link(bandwidth=50e9, latency=6e-6),
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_4800,
        host_memory=2048 * _GIB,
    ),
    Device(
        name="h200",
        reported_as="NVIDIA H200",
        memory_bytes=139.8 * _GIB,
        memory_bandwidth=4800e9,
        node_link=_NVLINK_4,
        network=Link(bandwidth=50e9, latency=6e-6),
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_4800,
        host_memory=2048 * _GIB,
    ),
    Device(
        name="b200",
        reported_as="NVIDIA B200",
        memory_bytes=178.35 * _GIB,
        memory_bandwidth=7700e9,
        node_link=_NVLINK_5,
        network=Link(bandwidth=50e9, latency=6e-6),
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_5600,
        host_memory=2048 * _GIB,
    ),
    Device(
        name="mi250x",
        reported_as="AMD Instinct MI250X",
        memory_bytes=63.98 * _GIB,
        memory_bandwidth=1638e9,
        node_link=_INFINITY_FABRIC,
        network=Link(bandwidth=12.5e9, latency=6e-6),
        host_link=36e9,  # Infinity Fabric; one processor
        host_bandwidth=_DDR4_3200 / 2,
        host_memory=512 * _GIB,
        product_efficiency=Range(0.55, 0.68, 0.78),
        attention_efficiency=Range(0.25, 0.38, 0.50),
    ),
)


def device_named(name: str, devices: Iterable[Device] = DEVICES) -> Device:
    """The device of a name.

    Raises:
        UserError: there is none; the message has the names, and the nearest one.
    """
    by_name = {device.name: device for device in devices}
    if name not in by_name:
        raise UserError(f"--device {name} is not known: use {one_of(list(by_name))}{did_you_mean(name, by_name)}")
    return by_name[name]
