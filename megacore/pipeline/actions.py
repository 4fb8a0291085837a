"""The vocabulary of pipeline schedules: actions, what each depends on, and a schedule as one list of them a rank.

Nothing in these types touches a tensor. `schedule.py` writes lists, `simulate.py` proves and times them,
`runtime.py` executes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from megacore.errors import UserError


class ScheduleError(UserError):
    """A schedule that cannot be run as it stands; the message names the rank and the action."""


class Op(Enum):
    """What an action does with one microbatch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # both of the following at once
    INPUT_GRAD = "I"  # the gradient of the stage's input, which the stage before waits for
    WEIGHT_GRAD = "W"  # the gradients of the stage's weights, which nobody waits for
    RECV_INPUT = "recv input"  # activations from the stage before
    SEND_OUTPUT = "send output"  # activations to the stage after
    RECV_GRAD = "recv grad"  # gradient of the output from the stage after
    SEND_GRAD = "send grad"  # gradient of the input to the stage before

    @property
    def is_transfer(self) -> bool:
        return self in _TRANSFERS

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECV_INPUT, Op.RECV_GRAD)


_TRANSFERS = frozenset({Op.RECV_INPUT, Op.SEND_OUTPUT, Op.RECV_GRAD, Op.SEND_GRAD})


@dataclass(frozen=True)
class Action:
    """One step of a rank: `op` on microbatch `microbatch` of stage `stage`."""

    op: Op
    microbatch: int
    stage: int

    def __str__(self) -> str:
        """`2F7` is the forward of microbatch 7 at stage 2; `send output of 2F7`, `recv grad for 2F7` are transfers."""
        if not self.op.is_transfer:
            return f"{self.stage}{self.op.value}{self.microbatch}"
        preposition = "for" if self.op.is_receive else "of"
        return f"{self.op.value} {preposition} {self.stage}F{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank of a pipeline does, in order.

    Stage s lies on rank s mod p, so that with v stages a rank the model goes v times through the ranks.

    Attributes:
        name: for people.
        ranks: number of pipeline ranks p.
        virtual_stages: stages v of a rank.
        microbatches: number of microbatches m.
        actions: of each rank.
    """

    name: str
    ranks: int
    virtual_stages: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages of the model, p v."""
        return self.ranks * self.virtual_stages

    def computations(self, rank: int) -> list[Action]:
        """A rank's actions without the transfers."""
        return [action for action in self.actions[rank] if not action.op.is_transfer]

    def batches(self, rank: int) -> Iterator[tuple[bool, list[Action]]]:
        """A rank's actions in runs of transfers, which are posted together, and runs of computations.

        Yields:
            Whether the run is of transfers, and the run.
        """
        for is_transfer, run in groupby(self.actions[rank], key=lambda action: action.op.is_transfer):
            yield is_transfer, list(run)


Key = tuple[str, int, int]  # ("output" | "gradient" | "done", stage, microbatch)


def requirements(action: Action, stages: int) -> list[Key]:
    """What must exist before a computation can begin, wherever it is made."""
    stage, i = action.stage, action.microbatch
    if action.op is Op.FORWARD:
        return [("output", stage - 1, i)] if stage > 0 else []
    if action.op is Op.WEIGHT_GRAD:
        return [("gradient", stage, i)]
    return [("output", stage, i)] + ([("gradient", stage + 1, i)] if stage < stages - 1 else [])


def result(action: Action) -> Key:
    """What a computation makes: the output, the gradient of the input, or only weight gradients."""
    kinds = {Op.FORWARD: "output", Op.BACKWARD: "gradient", Op.INPUT_GRAD: "gradient", Op.WEIGHT_GRAD: "done"}
    return kinds[action.op], action.stage, action.microbatch


def transfers_of(action: Action, stages: int) -> tuple[Action, Action] | None:
    """The send and the receive that follow a computation, or None where its result stays where it is."""
    stage, i = action.stage, action.microbatch
    if action.op is Op.FORWARD and stage < stages - 1:
        return Action(Op.SEND_OUTPUT, i, stage), Action(Op.RECV_INPUT, i, stage + 1)
    if action.op in (Op.BACKWARD, Op.INPUT_GRAD) and stage > 0:
        return Action(Op.SEND_GRAD, i, stage), Action(Op.RECV_GRAD, i, stage - 1)
    return None


def message(transfer: Action) -> Key:
    """What a transfer carries, the same for the sending and the receiving side."""
    stage, i = transfer.stage, transfer.microbatch
    return {
        Op.SEND_OUTPUT: ("output", stage, i),
        Op.RECV_INPUT: ("output", stage - 1, i),
        Op.SEND_GRAD: ("gradient", stage, i),
        Op.RECV_GRAD: ("gradient", stage + 1, i),
    }[transfer.op]


def peer_stage(transfer: Action) -> int:
    """The stage at the other end of a transfer."""
    return transfer.stage + (1 if transfer.op in (Op.SEND_OUTPUT, Op.RECV_GRAD) else -1)


def show(actions: Sequence[Action]) -> str:
    """Actions in a line, for messages."""
    return ", ".join(map(str, actions))
