"""Downloads what `make gpu-check` may lack on a machine without a network: `make gpu-wheels WHEELS=DIR`.

    python -m benchmarks.gpu_check.download --wheels DIR

The list is the closure of setup.cfg's requirements and of its extra `gpu`, at the versions of constraints.txt, without
what comes with a GPU's torch. Wheels are those of Python 3.12 on x86-64 Linux, whatever runs this.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.gpu_check.wheels import ROOT, canonical, requirements

# A machine with a GPU has these, in the builds that fit it; so has it what they need.
PROVIDED = {"torch", "triton", "numpy"}
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
_TARGET = {
    "python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "platform_machine": "x86_64",
    "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
    "implementation_name": "cpython", "platform_python_implementation": "CPython",
}  # fmt: skip


def wanted() -> list[str]:
    """The requirements to download, sorted; constraints.txt has the versions of those that name none."""
    found, waiting = dict[str, str](), [Requirement(line) for line in requirements()]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if name in PROVIDED or name in found:
            continue
        found[name] = f"{name}{requirement.specifier}"
        with contextlib.suppress(metadata.PackageNotFoundError):  # of one that is not installed here, nothing is known
            for need in map(Requirement, metadata.requires(name) or []):
                environments = ({**_TARGET, "extra": extra} for extra in ("", *requirement.extras))
                if need.marker is None or any(map(need.marker.evaluate, environments)):
                    waiting.append(need)
    return sorted(found.values())


def download(names: Sequence[str], directory: Path) -> int:
    """Fill a folder with exactly these wheels, and return their bytes. Raises CalledProcessError where a package has no
    wheel for the target."""
    options = f"-q --no-deps --only-binary=:all: --disable-pip-version-check --python-version {PYTHON}".split()
    options += ["-c", str(ROOT / "constraints.txt"), "--implementation", "cp"]
    options += (word for platform in PLATFORMS for word in ("--platform", platform))
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "-d", fresh, *names], check=True)
        for old in directory.glob("*.whl"):  # another version of the same package would stop the installation
            old.unlink()
        wheels = [wheel.rename(directory / wheel.name) for wheel in Path(fresh).glob("*.whl")]
    return sum(wheel.stat().st_size for wheel in wheels)


def main(argv: Sequence[str] | None = None) -> int:
    """Download, and say how much it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR", help="the folder to fill")
    options, names = parser.parse_args(argv), wanted()
    size = download(names, options.wheels) / 2**20
    print(f"{len(names)} wheels for Python {PYTHON}, {size:.1f} MiB, in {options.wheels}: {' '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
