"""What torch reads from the environment as it is loaded, and which values are better for training than torch's.

Both concern CUDA. Runs on a CPU are the same with and without them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # Freed memory serves allocations of other sizes: what is reserved stays near what is used.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Communication starts before kernels of the computation that wait for a free processor.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}
_OLDER_NAMES = {"PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")}


def set_torch_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, under this or an older name. Call it before torch is imported.

    Args:
        environment: of this process.
    """
    for name, value in DEFAULTS.items():
        if not any(known in environment for known in (name, *_OLDER_NAMES.get(name, ()))):
            environment[name] = value
