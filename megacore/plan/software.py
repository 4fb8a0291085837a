"""Whose program runs a step: what a trainer overlaps, fuses and waits for, beyond what the flags of a run say.

The time of a step depends on the trainer as well as on the device. The trainers are few, and software.toml describes
what each of them does in its usual setting, every figure with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.config.messages import did_you_mean, one_of
from megacore.errors import ConfigError
from megacore.plan.devices import Range, tables_of


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a trainer overlaps and fuses, beyond what its flags say.

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
        step_seconds: of a step, whatever its layout: logging, the data loader, the check of gradients for NaN.
        usual: flags of a run that differ from megacore's defaults, by field; used where the run does not say otherwise.
    """

    name: str
    tensor_overlap: Range
    overlaps_forward: bool = False
    overlaps_replicas: bool
    fused_accumulation: bool = False
    sums_fp16: bool = False
    waits_in: frozenset[str] = frozenset()
    scatters_messages: bool = False
    copies_logits: bool = False
    block_seconds: Range
    host_spread: float
    step_seconds: float = 0.0
    usual: Mapping[str, str] = field(default_factory=dict)


def _trainers() -> dict[str, Software]:
    """Those of software.toml."""
    return {
        name: Software(
            name=name,
            usual=table.get("usual", {}),
            **{key: _figure(key, figure["value"]) for key, figure in table.items() if key != "usual"},
        )
        for name, table in tables_of("software.toml").items()
    }


def _figure(name: str, value: Any) -> Any:
    """A value of the file as `Software` has it."""
    if isinstance(value, list):
        return frozenset(value) if name == "waits_in" else Range(*value)
    return value


SOFTWARE: Mapping[str, Software] = _trainers()
MEGACORE, MEGATRON_LM, MEGATRON_DEEPSPEED, MEGATRON_CORE, TORCH_EAGER = SOFTWARE.values()


def software_named(name: str) -> Software:
    """The software of a name.

    Raises:
        ConfigError: there is none; with the names, and the nearest one.
    """
    if name not in SOFTWARE:
        meant = did_you_mean(name, SOFTWARE)
        raise ConfigError([f"--software {name} is not known: use {one_of(list(SOFTWARE))}{meant}"])
    return SOFTWARE[name]
