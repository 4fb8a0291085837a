"""Pipeline schedules as data: pure functions that return what a rank does, in order.

A schedule is a list of actions. Consecutive transfers in it are posted together, which is what makes the order of
messages between two ranks the same on both sides. Nothing here touches a tensor; `pipeline/runtime.py` executes the
lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What an action does with one microbatch at one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECV_INPUT = "recv input"  # activations from the previous stage
    SEND_OUTPUT = "send output"  # activations to the next stage
    RECV_GRAD = "recv grad"  # gradient of the output from the next stage
    SEND_GRAD = "send grad"  # gradient of the input to the previous stage

    @property
    def is_transfer(self) -> bool:
        return self not in (Op.FORWARD, Op.BACKWARD)


@dataclass(frozen=True)
class Action:
    """One step of a rank: `op` on microbatch `microbatch` of stage `stage`."""

    op: Op
    microbatch: int
    stage: int


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Stage r runs p - r - 1 forwards ahead, then alternates, so that at most p - r microbatches are in flight; the
    bubble is (p - 1) / m of the ideal time, as GPipe's.

    Args:
        stage: this rank's stage r, counted from 0.
        stages: number of stages p.
        microbatches: number of microbatches m of a step.
    """
    ahead = min(stages - stage - 1, microbatches)
    actions: list[Action] = []
    for i in range(ahead):
        actions += _forward(i, stage, stages)
    for i in range(ahead, microbatches):
        actions += _forward(i, stage, stages)
        actions += _backward(i - ahead, stage, stages)
    for i in range(microbatches - ahead, microbatches):
        actions += _backward(i, stage, stages)
    return actions


def forward_only(stage: int, stages: int, microbatches: int) -> list[Action]:
    """Evaluation: every microbatch forward, nothing kept."""
    return [action for i in range(microbatches) for action in _forward(i, stage, stages)]


def bubble_share(stages: int, microbatches: int) -> float:
    """Idle share of a 1F1B step's total time when all stages take equally long: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def _forward(microbatch: int, stage: int, stages: int) -> list[Action]:
    receive = [] if stage == 0 else [Action(Op.RECV_INPUT, microbatch, stage)]
    send = [] if stage == stages - 1 else [Action(Op.SEND_OUTPUT, microbatch, stage)]
    return [*receive, Action(Op.FORWARD, microbatch, stage), *send]


def _backward(microbatch: int, stage: int, stages: int) -> list[Action]:
    receive = [] if stage == stages - 1 else [Action(Op.RECV_GRAD, microbatch, stage)]
    send = [] if stage == 0 else [Action(Op.SEND_GRAD, microbatch, stage)]
    return [*receive, Action(Op.BACKWARD, microbatch, stage), *send]
