"""megacore: a 3D-parallel trainer for transformer language models.

Tensor x pipeline x data parallelism with one command and one code path, from a laptop core (gloo) to many GPU nodes
(NCCL). Importing the package is cheap on purpose: nothing here imports torch, so that a wrong flag is refused before
it is loaded.
"""

__version__ = "0.1.0"
