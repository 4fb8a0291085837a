"""How long a step takes on a device, from the launches and transfers that it consists of: a roofline, and a time line.

A launch takes as long as its bytes need at the memory's bandwidth or its FLOPs at the peak, whichever is longer
(Williams et al. 2009, CACM 52(4)), and a fixed time before it computes. A transfer runs on a separate stream beside
what is launched after it, until a launch reads its result; what that launch waits for is exposed. The host issues one
operator after the other; where it is late, that is, issues an operator after the device has finished those before
it, the device waits.

The events come from `megacore.tracer.step_trace`, which records them; nothing here loads torch. All times are
estimates: each is computed in the slow, the expected and the fast case of `Device`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megacore.plan.devices import Case, Device
from megacore.train.peaks import Format

Phase = Literal["forward", "backward", "update"]
Kind = Literal["product", "attention", "memory"]
Pattern = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "message"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """An operator that the device runs.

    Attributes:
        name: of the operator.
        phase: of the step.
        kind: of what limits it.
        bytes: read and written, each once.
        flops: by the full-attention convention, backward of attention twice its forward.
        work: FLOPs that are executed: of attention those of visible pairs, and with what its backward repeats.
        form: of a product's factors.
        waits: numbers of the transfers whose results it is the first to read.
    """

    name: str
    phase: Phase
    kind: Kind = "memory"
    bytes: float = 0.0
    flops: float = 0.0
    work: float = 0.0
    form: Format = "bf16"
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What the ranks of a group send each other.

    Attributes:
        pattern: which bytes travel.
        bytes: of the whole tensor: what is reduced, gathered or scattered.
        ranks: of the group.
        stride: distance of its ranks' numbers.
        among: the ranks that form such groups at the same time (`crossing`); None: the first that do.
    """

    pattern: Pattern
    bytes: float
    ranks: int
    stride: int = 1
    among: range | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer(Collective):
    """A collective that an operator starts.

    Attributes:
        name: of the operator.
        phase: of the step.
        number: by which launches wait for it.
        role: of the group, such as `layer` (tensor parallel) or `replicas` (data parallel).
    """

    name: str
    phase: Phase
    number: int
    role: str


Event = Launch | Transfer


class Totals(NamedTuple):
    """Of the launches of one operator."""

    launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """The sum with a multiple of another."""
        return Totals(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of a step, or of a part of one, in one case.

    Attributes:
        seconds: from its first operator to its last.
        rows: by phase, kind and operator; of a transfer its whole time, hidden or not.
        exposed: seconds that launches waited for transfers, by role.
        late: seconds in which the device had nothing to do because the host had not issued the next operator yet.
        update: seconds of the launches of the update.
        work: FLOPs that are executed.
    """

    seconds: float
    rows: Mapping[tuple[str, str, str], Totals]
    exposed: Mapping[str, float] = field(default_factory=dict)
    late: float = 0.0
    update: float = 0.0
    work: float = 0.0

    def plus(self, other: Timing, times: float = 1.0) -> Timing:
        """The sum with a multiple of another, which may be negative."""
        none = Totals()
        rows = {
            key: self.rows.get(key, none).plus(other.rows.get(key, none), times) for key in {**self.rows, **other.rows}
        }
        roles = {**self.exposed, **other.exposed}
        exposed = {role: self.exposed.get(role, 0.0) + times * other.exposed.get(role, 0.0) for role in roles}
        return Timing(
            seconds=self.seconds + times * other.seconds,
            rows=rows,
            exposed=exposed,
            late=self.late + times * other.late,
            update=self.update + times * other.update,
            work=self.work + times * other.work,
        )


@dataclass(frozen=True, kw_only=True)
class StepEvents:
    """What was recorded of consecutive steps; a later one may wait for transfers of the one before.

    Attributes:
        before: a step, whose end the next one begins with.
        one: a step of one microbatch.
        two: a step of two, after it; of any number of microbatches each further one adds the difference.
    """

    before: Sequence[Event]
    one: Sequence[Event]
    two: Sequence[Event]

    def timing(
        self, device: Device, *, microbatches: int, case: Case = "expected", peak: float | None = None
    ) -> Timing:
        """A step of that many microbatches.

        Args:
            device: that computes.
            microbatches: per replica.
            case: which of the device's assumed values.
            peak: FLOP/s of products instead of the device's.
        """
        clock = Clock(device, case=case, peak=peak)
        clock.run(self.before)
        one, two = clock.run(self.one), clock.run(self.two)
        return one.plus(two.plus(one, -1.0), microbatches - 1.0)


def launch_seconds(launch: Launch, device: Device, *, case: Case = "expected", peak: float | None = None) -> float:
    """How long a launch takes.

    Raises:
        ValueError: the device's peak in the launch's format is not known, and none is given.
    """
    seconds = launch.bytes / (device.memory_bandwidth * device.memory_efficiency.of(case))
    if launch.work:
        peak = peak or device.peak(launch.form)
        if peak is None:
            raise ValueError(f"the peak of {device.name} in {launch.form} is not known")
        efficiency = device.attention_efficiency if launch.kind == "attention" else device.product_efficiency
        seconds = max(seconds, launch.work / (peak * efficiency.of(case)))
    return seconds + device.launch_seconds.of(case)


def transfer_seconds(transfer: Collective, device: Device, *, case: Case = "expected") -> float:
    """How long a collective takes by itself, while all groups of its kind communicate.

    A rank never sends faster than its own network cards, and ranks that send at once share the cards of their node.
    What follows from that depends on the pattern:

    - A ring collective (all-reduce, all-gather, reduce-scatter) enters and leaves a node once in each of its channels,
      and NCCL gives every rank of the node a channel with the card of that rank. A ring with k ranks in a node so
      reaches k times the share of a rank: one ring of all 8 ranks has all 8 cards, each of 8 rings has one. The node
      where it has the fewest ranks decides.
    - An all-to-all of n ranks, k of them in a node: each rank sends (n - k) / n of its bytes over its own cards and,
      at the same time, (k - 1) / n within the node. Other ranks' cards do not help, for these send as much.
    - A message goes over the cards of the rank that sends it. One rank of each group sends over the border of a node at
      a time, whether the groups are pipelines or the rings of context parallelism; the others stay within the node.

    An all-reduce takes the faster of two algorithms, as NCCL chooses: a ring, with 2 (n - 1) messages one after the
    other and 2 (n - 1) / n of the bytes over each link (Patarasuk and Yuan 2009, JPDC 69(2)); or a pair of binary
    trees, with 2 log2 n messages and twice the bytes (Sanders, Speck and Traeff 2009, Parallel Computing 35(12)). The
    others are rings of one pass; a message goes over one link.
    """
    n = transfer.ranks
    if n == 1:
        return 0.0
    over = crossing(n, transfer.stride, transfer.among or range(n * transfer.stride), device.node_ranks)
    within = _node_bandwidth(transfer, device) * device.link_efficiency.of(case)
    if not over.groups:
        return _fastest(transfer, device.node_link.latency, within)
    sending = over.groups if transfer.pattern == "message" else over.ranks
    own = device.network_of_rank(sending) * device.network_efficiency.of(case)
    if transfer.pattern == "all-to-all":
        outside = (n - over.least) / n * transfer.bytes / own
        inside = (over.least - 1) / n * transfer.bytes / within
        return (n - 1) * device.network.latency + max(outside, inside)
    channels = 1 if transfer.pattern == "message" else over.least
    return _fastest(transfer, device.network.latency, min(channels * own, within))


def _node_bandwidth(transfer: Collective, device: Device) -> float:
    """Of the links from a rank to the others of its group, where all of them are in its node."""
    bandwidth = device.node_link.bandwidth
    if not device.node_mesh:
        return bandwidth
    peers = 1 if transfer.pattern == "message" else min(transfer.ranks, device.node_ranks) - 1
    return bandwidth * peers / (device.node_ranks - 1)


def _fastest(transfer: Collective, latency: float, bandwidth: float) -> float:
    return min(steps * latency + share * transfer.bytes / bandwidth for steps, share in _algorithms(transfer))


def _algorithms(transfer: Collective) -> Iterator[tuple[int, float]]:
    """Of each algorithm the messages that follow each other, and the share of the bytes that a link carries."""
    ranks = transfer.ranks
    if transfer.pattern == "message":
        yield 1, 1.0
        return
    passes = 2 if transfer.pattern == "all-reduce" else 1
    yield passes * (ranks - 1), passes * (ranks - 1) / ranks
    if transfer.pattern == "all-reduce":
        yield 2 * math.ceil(math.log2(ranks)), 2.0


class Clock:
    """Runs events one after the other: the host issues them, launches share one stream, and the transfers of each role
    another.

    Args:
        device: that computes.
        case: which of its assumed values.
        peak: FLOP/s of products instead of the device's.
    """

    def __init__(self, device: Device, *, case: Case = "expected", peak: float | None = None) -> None:
        self._device, self._case, self._peak = device, case, peak
        self._host = self._stream = 0.0
        self._links: dict[str, float] = {}
        self._ends: dict[int, tuple[float, str]] = {}

    def run(self, events: Iterable[Event]) -> Timing:
        """Time the events. A transfer that has not finished at their end continues beside the next ones."""
        begin = self._stream
        rows: dict[tuple[str, str, str], Totals] = {}
        exposed: dict[str, float] = {}
        late, update, work = 0.0, 0.0, 0.0
        for event in events:
            self._host += self._device.host_seconds.of(self._case)
            if isinstance(event, Transfer):
                seconds = transfer_seconds(event, self._device, case=self._case)
                start = max(self._stream, self._host, self._links.get(event.role, 0.0))
                self._links[event.role] = start + seconds
                self._ends[event.number] = start + seconds, event.role
                key, totals = (event.phase, "transfer", event.name), Totals(1.0, event.bytes, 0.0, seconds)
            else:
                late += max(self._host - self._stream, 0.0)
                self._stream = max(self._host, self._stream)
                for number in event.waits:
                    end, role = self._ends.pop(number, (0.0, ""))
                    exposed[role] = exposed.get(role, 0.0) + max(end - self._stream, 0.0)
                    self._stream = max(end, self._stream)
                seconds = launch_seconds(event, self._device, case=self._case, peak=self._peak)
                self._stream += seconds
                update += seconds if event.phase == "update" else 0.0
                work += event.work
                key, totals = (event.phase, event.kind, event.name), Totals(1, event.bytes, event.flops, seconds)
            rows[key] = rows.get(key, Totals()).plus(totals)
        exposed.pop("", None)
        return Timing(seconds=self._stream - begin, rows=rows, exposed=exposed, late=late, update=update, work=work)


# ---- which groups of ranks reach from one node to another ------------------------------------------------------------
# The rule by which transfers are timed and bytes are counted. Nodes hold consecutive ranks. The groups of one kind,
# such as all data-parallel groups, lie in blocks of consecutive ranks: with 2 ranks and a stride of 3 the groups 0 3, 1
# 4, 2 5 are a block, and 6 9, 7 10, 8 11 the next one. Where a node begins inside a block, a group of the block is in
# both nodes. All of them communicate at the same time, and a step waits for the slowest. So it is not enough that a
# group would fit into a node: `--tp 3` on nodes of 8 ranks has the group 6 7 8.


class Crossing(NamedTuple):
    """The groups that have ranks in one node and others in another.

    Attributes:
        groups: how many of them share the network cards of a node, on the node with the most. 0: every group lies in a
            node.
        ranks: how many ranks they have in a node together, on the node with the most.
        least: the fewest ranks that one of them has in one of its nodes.
    """

    groups: int
    ranks: int
    least: int


def groups_between_nodes(ranks: int, stride: int, among: range, node_ranks: int) -> int:
    """How many of the groups that reach from a node to another share its network cards; arguments of `crossing`."""
    return crossing(ranks, stride, among, node_ranks).groups


@functools.lru_cache(maxsize=65536)
def crossing(ranks: int, stride: int, among: range, node_ranks: int) -> Crossing:
    """Which of the groups reach from one node to another.

    Args:
        ranks: of a group.
        stride: distance of its ranks' numbers.
        among: the ranks that form the groups, block after block. Where they are fewer than `ranks * stride`, they are
            one block, in which only so many groups fit: first and last pipeline stage are such pairs.
        node_ranks: of a node.
    """
    if ranks == 1:
        return Crossing(0, 0, 0)
    block = min(ranks * stride, len(among))
    side_by_side = block - (ranks - 1) * stride  # groups of a block
    most, together, least = 0, 0, ranks
    # Nodes divide blocks alike again after as many ranks as both divide.
    nodes = range(among.start // node_ranks, -(-among.stop // node_ranks))[: block // math.gcd(block, node_ranks) + 1]
    for node in nodes:
        low, high = max(node * node_ranks, among.start), min((node + 1) * node_ranks, among.stop)
        groups = in_node = 0
        for number in {(low - among.start) // block, (high - 1 - among.start) // block}:  # others lie in the node
            begin = among.start + number * block
            inside = min(high, begin + block) - max(low, begin)
            if across := min(side_by_side, inside, block - inside):
                groups += across
                in_node += inside - (min(side_by_side, inside) - across) * ranks  # without groups that are all here
                least = min(least, max(inside // side_by_side, 1))
        most, together = max(most, groups), max(together, in_node)
    return Crossing(most, together, least if most else 0)
