"""What the fork server of `tests/distributed.py` imports once: no rank and no program (`tests/warm.py`) pays for it.

Importing torch costs seconds, and the first optimizer step imports `torch._dynamo`: over a second of CPU time and
100 MB more for every rank; megacore takes another half. Done here, before the fork, they are shared: a rank starts in
milliseconds with about 11 MB of its own. `gc.freeze` keeps the collector from touching (and so copying) the inherited
pages, and huge pages make a fork with its end three times as cheap: 70,000 entries of page tables are not copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import sys
from pathlib import Path
from unittest import mock

# CUDA must not be initialised before the fork; this makes torch ask the driver's library instead.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import torch
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.elastic.multiprocessing.errors
import torch.distributed.run

import tests.distributed
from megacore.observe.provenance import provenance_of
from megacore.parallel.mesh import Mesh

# What programs and tests import, as far as it is installed: a GPU's machine may lack transformers.
IMPORTED = [
    *(f"megacore.{ring}.for_training" for ring in ("observe", "plan", "survive", "watch")),
    *(
        "megacore.arrive.command_line",
        "megacore.audit.command",
        "megacore.commands.lr_range",
        "megacore.survive.keeper",
    ),
    *(f"megacore.train.{name}" for name in ("bert_task", "engine", "gpt_task", "launch", "trainer")),
    *("pretrain_bert", "pretrain_gpt", "pytest", "tests.parity.bert_runs", "tools.convert_checkpoint"),
    *("encodings.idna", "transformers.models.gpt2.modeling_gpt2"),
]


HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1; an older one refuses it, and pages stay as they are


def use_huge_pages() -> None:
    """Put this process's anonymous memory into huge pages, as far as the system can."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if found := re.fullmatch(r"(\w+)-(\w+) rw-p 0+ 00:00 0 *(\[heap\])?", line):
            start = -(-int(found[1], 16) // HUGE_PAGE) * HUGE_PAGE
            if (size := int(found[2], 16) // HUGE_PAGE * HUGE_PAGE - start) > 0:
                advise(start, size, MADV_COLLAPSE)


def warm_up() -> None:
    """Run one small training step, so that everything imported or built lazily exists before the fork."""
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    torch.set_num_threads(1)  # OpenMP threads do not survive a fork
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    # No backward: autograd counts the devices on its first one, and a rank may still register one.
    model.weight.grad, model.bias.grad = torch.zeros(4, 4), torch.zeros(4)
    # The optimizer asks whether a CUDA graph is being captured, and a process that has asked cannot be forked.
    with mock.patch("torch.cuda.is_available", return_value=False):
        optimizer.step()
    np.random.default_rng(0).permutation(4)
    provenance_of(Mesh(device=torch.device("cpu")))  # asks git, and parses the metadata of packages
    assert tests.distributed.SERVER_READY is False
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        use_huge_pages()
    tests.distributed.SERVER_READY = True


warm_up()
