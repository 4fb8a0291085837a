"""The peak of a device is that of its own data sheet, or none at all."""

from __future__ import annotations

import pytest

from megacore.train.peaks import Format, peak_tflops


@pytest.mark.parametrize(
    ("name", "form", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.0),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H200 NVL", "bf16", 835.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA B200", "fp32", 75.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA GB300", "fp8", 5000.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("A100-SXM4-40GB", "fp32", 19.5),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # which it has no fast products of
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI300X", "fp8", 2614.9),
        ("AMD Instinct MI355X", "bf16", 2516.6),
        ("AMD Instinct MI355X", "tf32", None),
        ("AMD Instinct MI250X", "bf16", 191.5),  # torch sees each of its two halves
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H1000", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA GeForce RTX 5090", "bf16", None),
        ("NVIDIA GB200 NVL4", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks(name: str, form: Format, peak: float | None) -> None:
    assert peak_tflops(name, form) == peak
