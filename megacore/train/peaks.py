"""The peak speed of a device; model FLOPs utilization is a share of it.

Dense throughput (without structured sparsity) of matrix products with fp32 accumulation, at the boost clock, from the
manufacturers' data sheets and architecture white papers (NVIDIA: V100, T4, A100, A30, A10, A40, L4, L40, L40S, H100,
H20, H200, GH200, HGX B200, HGX B300, GB200 NVL72 and GB300 NVL72 data sheets; Ampere GA102 and Ada white papers. AMD:
Instinct MI200, MI300 and MI350 series data sheets). NVIDIA's sheets of Hopper and Blackwell state twice as much, with
sparsity. Names are those that the drivers report, matched whole: cards of one chip may differ by a third (H100 SXM,
PCIe, NVL), and a slice of a device (MIG) has a part of its peak. GB200 and GB300 have the figures of a rack, one 72nd;
boards with a lower power limit have less. A device whose figure is not certain is not listed: `--peak-tflops` gives it.

Peaks in fp8 are for plans to show what a device has: MFU counts against bf16, in which --fp8 leaves a third of the
products of its layers, and all others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Peaks:
    """TFLOP/s of a device as torch counts them (an MI250X is two); None: no fast products, or the figure is not
    known."""

    fp16: float | None
    bf16: float | None
    tf32: float | None = None
    fp32: float | None = None
    fp8: float | None = None


def _ampere(half: float, fp32: float | None = None, fp8: float | None = None) -> Peaks:
    """From Ampere on bf16 is as fast as fp16, and tf32 half as fast."""
    return Peaks(half, half, half / 2, fp32, fp8)


_MEMORY = r"( \d+GB)?"
_TABLE: tuple[tuple[str, Peaks], ...] = (
    (r"Tesla T4", Peaks(65.0, None, None, 8.1)),
    (r"Tesla V100-SXM[23]-\d+GB(-LS)?", Peaks(125.0, None, None, 15.7)),
    (r"Tesla V100-PCIE-\d+GB", Peaks(112.0, None, None, 14.0)),
    (r"Tesla V100S-PCIE-\d+GB", Peaks(130.0, None, None, 16.4)),
    (r"(NVIDIA )?A[18]00(-SXM4|-PCIE)?-\d+GB|NVIDIA A[18]00 \d+GB PCIe", _ampere(312.0, 19.5)),
    (r"NVIDIA A30", _ampere(165.0, 10.3)),
    (r"NVIDIA A10", _ampere(125.0, 31.2)),
    (r"NVIDIA A40", _ampere(149.7, 37.4)),
    (r"NVIDIA RTX A6000", _ampere(154.8, 38.7)),
    (r"NVIDIA GeForce RTX 3090", _ampere(71.0, 35.6)),
    (r"NVIDIA GeForce RTX 3090 Ti", _ampere(80.0, 40.0)),
    (r"NVIDIA L4", _ampere(121.0, 30.3)),
    (r"NVIDIA L40", _ampere(181.05, 90.5)),
    (r"NVIDIA L40S", _ampere(362.05, 91.6)),
    (r"NVIDIA RTX 6000 Ada Generation", _ampere(364.2, 91.1)),
    (r"NVIDIA GeForce RTX 4080", _ampere(97.5, 48.7)),
    (r"NVIDIA GeForce RTX 4090", _ampere(165.2, 82.6, 330.3)),
    (r"NVIDIA H[18]00( 80GB HBM3| SXM5?)?", _ampere(989.4, 66.9, 1978.9)),
    (r"NVIDIA H[18]00( 80GB)? PCIe", _ampere(756.0, 51.2)),
    (r"NVIDIA H100 NVL", _ampere(835.0, 60.0)),
    (r"NVIDIA H20" + _MEMORY, _ampere(148.0, 44.0)),
    (r"NVIDIA H200( 141GB HBM3e)?", _ampere(989.4, 66.9, 1978.9)),
    (r"NVIDIA H200 NVL", _ampere(835.0, 60.0)),
    (r"NVIDIA GH200 \d+G[B]?( HBM3e?)?", _ampere(989.4, 66.9)),
    (r"NVIDIA B200", _ampere(2250.0, 75.0, 4500.0)),
    (r"NVIDIA B300( SXM6 AC)?", _ampere(2250.0, 75.0, 4500.0)),
    (r"NVIDIA GB[23]00", _ampere(2500.0, 80.0, 5000.0)),
    (r"AMD Instinct MI210", Peaks(181.0, 181.0, None, 45.3)),
    (r"AMD Instinct MI250", Peaks(181.0, 181.0, None, 45.3)),
    (r"AMD Instinct MI250X", Peaks(191.5, 191.5, None, 47.9)),
    (r"AMD Instinct MI300A", Peaks(980.6, 980.6, 490.3, 122.6)),
    (r"AMD Instinct MI3(00|25)X( OAM)?", Peaks(1307.4, 1307.4, 653.7, 163.4, 2614.9)),
    (r"AMD Instinct MI355X( OAM)?", Peaks(2516.6, 2516.6, None, 157.3, 5033.2)),
)


def peak_tflops(device_name: str, form: Format) -> float | None:
    """The dense peak of a device in TFLOP/s, or None where it is not known. `device_name`: as its driver reports it.
    `form`: of the factors of a matrix product; `tf32` is fp32 that the device may round."""
    for pattern, peaks in _TABLE:
        if re.fullmatch(pattern, device_name.strip()):
            peak: float | None = getattr(peaks, form)
            return peak
    return None
