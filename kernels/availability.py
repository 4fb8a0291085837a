"""Whether Triton is there, found out without importing it. `megacore.ops` asks once, at start-up, which implementation
of each operator can run. Importing Triton takes a second and looks for a GPU driver, so the question is answered from
where packages lie. Its version is in their metadata, which take a third of a second to read: it is looked up where it
is printed."""

from __future__ import annotations

import importlib.util
from importlib import metadata


def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str:
    """The installed version. Triton is published under several distribution names (a CUDA build, a ROCm build,
    nightlies), so the import name decides, and the distribution that provides it gives the version."""
    providers = metadata.packages_distributions().get("triton", [])
    return metadata.version(providers[0]) if providers else "unknown"
