"""Whose program runs a step: what a trainer overlaps, fuses and waits for, beyond what the flags of a run say.

The time of a step depends on the trainer as well as on the device. The entries are few, and each describes what its
trainer does in its usual setting (docs/guides/planner.md). Where each figure is from:

- `megacore`: this program. The host's time per block: docs/reports/measured.md, "The host's time".
- `megatron-lm`: Megatron-LM and Megatron-DeepSpeed of 2021 to 2023. Narayanan et al. 2021 (arXiv 2104.04473): sums of
  tensor parallelism and messages of 1F1B wait, interleaved schedules send beside computing. Jiang et al. 2024
  (arXiv 2402.15627, table 3) list what this software does not overlap: reductions between replicas, among others. The
  host's time per block is fitted to published steps (tests/plans/leave_one_out.py).
- `megatron-core`: Megatron-Core of 2024 and later, as in NeMo: user buffers run beside products, and products add
  gradients up (NVIDIA's performance recipes for NeMo 24.12).
- `torch-eager`: trainers of plain PyTorch modules, such as torchtitan without compilation, nanotron or Transformers:
  their loss makes a copy of all logits in fp32, and sums of tensor parallelism wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megacore.config.messages import did_you_mean, one_of
from megacore.errors import ConfigError
from megacore.plan.devices import Range

_NONE = Range(0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a trainer overlaps and fuses, beyond what its flags say. The defaults are megacore's.

    Attributes:
        name: the value of --software.
        tensor_overlap: share of a backward product beside which a sum over the layer group runs; the two compete for
            processors and memory.
        overlaps_forward: whether sums in forward are split into parts and run beside products as well.
        overlaps_replicas: whether reductions and gatherings between replicas may run beside computing, as the flags
            say; otherwise they never do.
        fused_accumulation: whether a product adds the gradient of a weight to the sum of the step.
        sums_fp16: whether gradients of fp16 runs are added up and reduced in fp16, whatever --grad-reduce-dtype says.
        waits_in: schedules in which a pipeline rank computes nothing while it sends or receives.
        scatters_messages: whether each tensor-parallel rank sends a part of a message between stages, and the receiving
            ranks gather it in their node; otherwise every rank sends all of it. Sequence parallelism needs neither.
        copies_logits: whether the loss makes an fp32 copy of all logits, and passes over it again and again.
        block_seconds: of the host's program for one pass through a block, forward or backward, where that is more than
            its operators' `Device.host_seconds`. Compiled code does not need it.
        host_spread: standard deviation of `block_seconds` between ranks, relative. A sum of the layer group starts when
            the slowest of its hosts has issued it.
        usual: flags of a run that differ from megacore's defaults, by field; used where the run does not say otherwise.
    """

    name: str = "megacore"
    tensor_overlap: Range = field(default=Range(0.0, 0.5, 0.8))
    overlaps_forward: bool = False
    overlaps_replicas: bool = True
    fused_accumulation: bool = False
    sums_fp16: bool = False
    waits_in: frozenset[str] = frozenset()
    scatters_messages: bool = False
    copies_logits: bool = False
    block_seconds: Range = field(default=Range(0.75e-3, 0.5e-3, 0.3e-3))
    host_spread: float = 0.08
    usual: Mapping[str, str] = field(default_factory=dict)


MEGACORE = Software()
MEGATRON_LM = Software(
    name="megatron-lm",
    tensor_overlap=_NONE,
    overlaps_replicas=False,
    sums_fp16=True,
    waits_in=frozenset({"gpipe", "1f1b"}),
    scatters_messages=True,
    copies_logits=True,
    block_seconds=Range(1.3e-3, 1.1e-3, 0.9e-3),
    usual={
        "attention": "--attention fused-softmax",
        "hidden_dropout": "--hidden-dropout 0.1",
        "attention_dropout": "--attention-dropout 0.1",
        "sequence_parallel": "--no-sequence-parallel",
        "schedule": "--schedule 1f1b",
        "pipeline_balance": "--pipeline-balance parameters",
    },
)
MEGATRON_DEEPSPEED = replace(MEGATRON_LM, name="megatron-deepspeed", scatters_messages=False)
MEGATRON_CORE = Software(
    name="megatron-core",
    tensor_overlap=Range(0.5, 0.9, 1.0),
    overlaps_forward=True,
    fused_accumulation=True,
    copies_logits=True,
)
TORCH_EAGER = Software(name="torch-eager", tensor_overlap=_NONE, copies_logits=True)

SOFTWARE: Mapping[str, Software] = {
    one.name: one for one in (MEGACORE, MEGATRON_LM, MEGATRON_DEEPSPEED, MEGATRON_CORE, TORCH_EAGER)
}


def software_named(name: str) -> Software:
    """The software of a name.

    Raises:
        ConfigError: there is none; with the names, and the nearest one.
    """
    if name not in SOFTWARE:
        meant = did_you_mean(name, SOFTWARE)
        raise ConfigError([f"--software {name} is not known: use {one_of(list(SOFTWARE))}{meant}"])
    return SOFTWARE[name]
