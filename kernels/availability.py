"""Whether Triton is there, found out without importing it.

`megacore.ops` asks once, at start-up, which implementation of each operator can run. Importing Triton takes a second
and looks for a GPU driver, so the question is answered from the installed packages' metadata alone.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None where it cannot be imported.

    Triton is published under several distribution names (a CUDA build, a ROCm build, nightlies), so the import name is
    what decides, and the distribution that provides it gives the version.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    providers = metadata.packages_distributions().get("triton", [])
    return metadata.version(providers[0]) if providers else "unknown"
