"""What the figures were taken on, and the two rates that bound them: of copying, and of a large matrix product."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu_check.device import copy_rate, matmul_rate, open_device, total_memory, version_of
from benchmarks.gpu_check.records import Records, part_parser
from megacore.train.metrics import device_name
from megacore.train.peaks import peak_tflops

# What nvidia-smi is asked for; it reads, and changes nothing.
_DRIVER = ("driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit", "vbios_version")
_PACKAGES = ("torch", "triton", "transformers", "numpy", "liger-kernel")


def driver() -> dict[str, str]:
    """What the driver says of the first GPU; empty where there is no nvidia-smi."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_DRIVER)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_DRIVER, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Record it."""
    options = part_parser(__doc__).parse_args(argv)
    device = open_device(options.device)
    records = Records(options.records)
    name = device_name(device)
    records.add(
        "machine", device=name, device_type=device.type, memory_bytes=total_memory(device),
        devices=0 if device.type == "cpu" else torch.accelerator.device_count(), peak_tflops=peak_tflops(name, "bf16"),
        cpus=os.cpu_count(), python=platform.python_version(), cuda=torch.version.cuda, kernel=platform.release(),
        driver=driver() if device.type == "cuda" else {}, versions={name: version_of(name) for name in _PACKAGES},
        allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    )  # fmt: skip
    copied, multiplied = (rate(device, small=options.small) for rate in (copy_rate, matmul_rate))
    records.add("rates", copy_bytes_per_second=copied, matmul_flops_per_second=multiplied)
    return 0


if __name__ == "__main__":
    sys.exit(main())
