"""The Triton kernels of the folder `kernels/` at the top of a checkout, under the name `megacore.kernels`. An installed
package holds the kernels here, instead of this file. They never have the name `kernels`: that is another package, for
which transformers looks."""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
