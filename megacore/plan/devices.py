"""Devices by short names, as far as a step's time depends on them: memory, links, and how much of each a step reaches.

What a data sheet states stands here once: bandwidths of memory and links from the manufacturers' data sheets (NVIDIA
A100, H100, H200, HGX B200, DGX B300, GB200 NVL72, GB300 NVL72 and GeForce RTX 4090; AMD MI250X, MI300X and MI355X), the
peaks of matrix products in `train/peaks.py`. Capacities are those that the drivers report to programs (CUDA's and HIP's
total memory), which are not the rounded numbers in the names: an H100 of "80 GB" has 79.11 GiB, which are 84.9e9 bytes.
Bandwidths are of one direction. What a step reaches of them is assumed, as three values: slow, expected and fast. A
device's `network` is its share of what the network cards of common nodes carry: a card for each device, of 200 Gb/s
(A100), 400 Gb/s (H100, H200, B200, GB200, MI300X, MI355X) or 800 Gb/s (B300, GB300). The memory of a node's host is
that of NVIDIA's DGX systems (DGX A100 of 320 GB and 640 GB, DGX H100, H200, B200, B300, GB200 and GB300) and, beside
MI250X, of LUMI-G and Frontier; other nodes have less or more.

A node of GB200 and GB300 is what NVLink joins: a rack of 72, of which it counts 64. Jobs take 16 of a rack's 18 trays,
so that groups of 2, 4, ..., 64 ranks lie in one rack, as in NVIDIA's own recipes.

Checked against measured steps (docs/guides/planner.md) are A100, H100 and GB200, the last one with dense models. Never
checked are B200, B300 and GB300, whose products are derived from GB200's, and H200, MI250X, MI300X, MI355X and
RTX 4090, whose efficiencies are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


_GIB = 2.0**30
_NVLINK_3 = Link(bandwidth=300e9, latency=3e-6)
_NVLINK_4 = Link(bandwidth=450e9, latency=3e-6)
_NVLINK_5 = Link(bandwidth=900e9, latency=3e-6)
_INFINITY_FABRIC = Link(bandwidth=50e9, latency=4e-6)  # between two cards, which a ring of all devices passes
_INFINITY_FABRIC_3 = Link(bandwidth=7 * 64e9, latency=4e-6)  # a link to each of the other seven
_INFINITY_FABRIC_4 = Link(bandwidth=7 * 76.8e9, latency=4e-6)
_HDR, _NDR, _XDR = (Link(bandwidth=gigabits * 1e9 / 8, latency=6e-6) for gigabits in (200, 400, 800))
_PCIE_4, _PCIE_5, _PCIE_6 = 32e9, 64e9, 128e9  # of 16 lanes
_C2C = 450e9 / 2  # of a Grace processor, for two devices
# Two processors for 8 devices: 16 channels of DDR4-3200, DDR5-4800 and DDR5-5600.
_DDR4_3200, _DDR5_4800, _DDR5_5600 = 410e9 / 8, 614e9 / 8, 717e9 / 8
_LPDDR5X = 14e12 / 72  # of a rack
_RACK = 64  # of the 72 devices that NVLink joins
_AMPERE_PRODUCTS = Range(0.75, 0.83, 0.90)  # an A100 holds its clock in products; later devices lower it
_CDNA_PRODUCTS, _CDNA_ATTENTION = Range(0.38, 0.50, 0.62), Range(0.25, 0.35, 0.50)
# Products of Blackwell run into the limit of power sooner than Hopper's. GB200: fitted to its steps in bf16
# (tests/plans/published.py). The others: by how much faster they are than GB200 with one model and layout in fp8, 8B on
# 8 devices and DeepSeek-V3 on 256 (NVIDIA's performance summary of Megatron-Bridge, 25.11 and 26.02).
_GB200_PRODUCTS, _B200_PRODUCTS = Range(0.43, 0.52, 0.62), Range(0.46, 0.56, 0.66)
_BLACKWELL_ULTRA_PRODUCTS = Range(0.52, 0.62, 0.72)
_AMPERE_LINKS = Range(0.55, 0.65, 0.80)  # sums over 2 to 8 A100 reach 0.49 to 0.67 of NVLink (nccl-tests, 32 to 128 MB)

DEVICES = (
    Device(
        name="a100-40g",
        reported_as="NVIDIA A100-SXM4-40GB",
        memory_bytes=39.39 * _GIB,
        memory_bandwidth=1555e9,
        node_link=_NVLINK_3,
        network=_HDR,
        host_link=_PCIE_4,
        host_bandwidth=_DDR4_3200,
        host_memory=1024 * _GIB,
        product_efficiency=_AMPERE_PRODUCTS,
        link_efficiency=_AMPERE_LINKS,
        network_efficiency=_AMPERE_LINKS,
        attention_efficiency=Range(0.50, 0.58, 0.65),
    ),
    Device(
        name="a100-80g",
        reported_as="NVIDIA A100-SXM4-80GB",
        memory_bytes=79.15 * _GIB,
        memory_bandwidth=2039e9,
        node_link=_NVLINK_3,
        network=_HDR,
        host_link=_PCIE_4,
        host_bandwidth=_DDR4_3200,
        host_memory=2048 * _GIB,
        product_efficiency=_AMPERE_PRODUCTS,
        link_efficiency=_AMPERE_LINKS,
        network_efficiency=_AMPERE_LINKS,
        attention_efficiency=Range(0.50, 0.58, 0.65),
    ),
    Device(
        name="h100",
        reported_as="NVIDIA H100 80GB HBM3",
        memory_bytes=79.11 * _GIB,
        memory_bandwidth=3350e9,
        node_link=_NVLINK_4,
        network=_NDR,
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
        network=_NDR,
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
        network=_NDR,
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_5600,
        host_memory=2048 * _GIB,
        product_efficiency=_B200_PRODUCTS,
    ),
    Device(
        name="b300",
        reported_as="NVIDIA B300 SXM6 AC",
        memory_bytes=267.69 * _GIB,
        memory_bandwidth=8000e9,
        node_link=_NVLINK_5,
        network=_XDR,
        host_link=_PCIE_6,
        host_bandwidth=_DDR5_5600,
        host_memory=2048 * _GIB,
        product_efficiency=_BLACKWELL_ULTRA_PRODUCTS,
    ),
    Device(
        name="gb200",
        reported_as="NVIDIA GB200",
        memory_bytes=184.31 * _GIB,
        memory_bandwidth=8000e9,
        node_ranks=_RACK,
        node_nics=_RACK,
        node_link=_NVLINK_5,
        network=_NDR,
        host_link=_C2C,
        host_bandwidth=_LPDDR5X,
        host_memory=_RACK / 2 * 480e9,
        product_efficiency=_GB200_PRODUCTS,
    ),
    Device(
        name="gb300",
        reported_as="NVIDIA GB300",
        memory_bytes=276.50 * _GIB,
        memory_bandwidth=8000e9,
        node_ranks=_RACK,
        node_nics=_RACK,
        node_link=_NVLINK_5,
        network=_XDR,
        host_link=_C2C,
        host_bandwidth=_LPDDR5X,
        host_memory=_RACK / 2 * 480e9,
        product_efficiency=_BLACKWELL_ULTRA_PRODUCTS,
    ),
    Device(
        name="mi250x",
        reported_as="AMD Instinct MI250X",
        memory_bytes=63.98 * _GIB,
        memory_bandwidth=1638e9,
        node_nics=4,
        node_link=_INFINITY_FABRIC,
        network=Link(bandwidth=12.5e9, latency=6e-6),
        host_link=36e9,  # Infinity Fabric; one processor
        host_bandwidth=_DDR4_3200 / 2,
        host_memory=512 * _GIB,
        product_efficiency=Range(0.55, 0.68, 0.78),
        attention_efficiency=Range(0.25, 0.38, 0.50),
    ),
    Device(
        name="mi300x",
        reported_as="AMD Instinct MI300X",
        memory_bytes=191.69 * _GIB,
        memory_bandwidth=5300e9,
        node_mesh=True,
        node_link=_INFINITY_FABRIC_3,
        network=_NDR,
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_4800,
        host_memory=2048 * _GIB,
        product_efficiency=_CDNA_PRODUCTS,
        attention_efficiency=_CDNA_ATTENTION,
    ),
    Device(
        name="mi355x",
        reported_as="AMD Instinct MI355X",
        memory_bytes=287.98 * _GIB,
        memory_bandwidth=8000e9,
        node_mesh=True,
        node_link=_INFINITY_FABRIC_4,
        network=_NDR,
        host_link=_PCIE_5,
        host_bandwidth=_DDR5_5600,
        host_memory=2048 * _GIB,
        product_efficiency=_CDNA_PRODUCTS,
        attention_efficiency=_CDNA_ATTENTION,
    ),
    Device(
        name="rtx4090",
        reported_as="NVIDIA GeForce RTX 4090",
        memory_bytes=23.52 * _GIB,
        memory_bandwidth=1008e9,
        node_nics=1,
        node_link=Link(bandwidth=_PCIE_4, latency=10e-6),  # by way of the host's memory
        network=Link(bandwidth=12.5e9 / 8, latency=10e-6),  # a card of 100 Gb/s, assumed
        host_link=_PCIE_4,
        host_bandwidth=_DDR4_3200,
        host_memory=512 * _GIB,  # assumed
        link_efficiency=Range(0.35, 0.50, 0.70),
    ),
)
