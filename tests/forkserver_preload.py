"""What the fork server of `tests/distributed.py` imports once, so that no rank pays for it.

Importing torch, megacore and transformers costs seconds, and the first optimizer step imports `torch._dynamo`: over two
seconds of CPU time and 100 MB more for every rank. Done here, before the fork, they are shared: a rank starts in
milliseconds with about 11 MB of its own. `gc.freeze` keeps the collector from touching (and so copying) the inherited
pages.
"""

from __future__ import annotations

import gc
import os
from unittest import mock

# CUDA must not be initialised before the fork; this makes torch ask the driver's library instead.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import torch
import torch._dynamo
import torch.distributed.device_mesh
import torch.distributed.elastic.multiprocessing.errors
import transformers.modeling_utils  # noqa: F401

import megacore.train.bert_task
import megacore.train.engine
import megacore.train.gpt_task
import megacore.train.trainer  # noqa: F401
import tests.distributed


def warm_up() -> None:
    """Run one small training step, so that everything imported or built lazily exists before the fork."""
    torch.set_num_threads(1)  # OpenMP threads do not survive a fork
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    # No backward: autograd counts the devices on its first one, and a rank may still register one.
    model.weight.grad, model.bias.grad = torch.zeros(4, 4), torch.zeros(4)
    # The optimizer asks whether a CUDA graph is being captured, and a process that has asked cannot be forked.
    with mock.patch("torch.cuda.is_available", return_value=False):
        optimizer.step()
    np.random.default_rng(0).permutation(4)
    assert tests.distributed.SERVER_READY is False
    gc.collect()
    gc.freeze()
    tests.distributed.SERVER_READY = True


warm_up()
