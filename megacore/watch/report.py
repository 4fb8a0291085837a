"""What a person reads about ranks: one rank's phase in words, the table of all ranks, the report of a hang."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from megacore.config.dimensions import describe_rank, group_in_words
from megacore.config.messages import ranks_in_words
from megacore.parallel.heartbeat import Channel, Phase
from megacore.watch.blame import Seen, Verdict
from megacore.watch.record import Record

_WIDTH = 120
_STACK_LINES = 14

_IN_WORDS = {
    Phase.IMPORT: "import of libraries",
    Phase.CONNECT: "connection to the master (MASTER_ADDR, MASTER_PORT)",
    Phase.BUILD: "build of the model",
    Phase.INDEX: "index build of the data",
    Phase.LOAD: "load of a checkpoint",
    Phase.FIRST_STEP: "first step",
    Phase.DATA: "data (next batch)",
    Phase.EVALUATE: "evaluation",
    Phase.CHECK: "check of replicas",
    Phase.SINK: "log and sinks",
    Phase.BETWEEN_STEPS: "between steps",
    Phase.OUTSIDE: "the program's code, outside of the engine",
    Phase.SHIFT: "ring shift",
    Phase.GATHER_OBJECTS: "exchange of values",
    Phase.TIED_SUM: "sum of tied gradients",
    Phase.MEET: "meeting of the ranks",
}


def name_of(phase: Phase) -> str:
    """A phase in a person's words."""
    return _IN_WORDS.get(phase, phase.in_words)


def phase_in_words(record: Record) -> str:
    """`forward of microbatch 3 of stage 1`, `receive from rank 5, number 12`, `all-reduce over dp, number 7, 4 KiB`."""
    words = name_of(record.phase)
    if record.microbatch is not None:
        words += f" of microbatch {record.microbatch} of stage {record.stage}"
    if record.channel is not None:
        words += f" {channel_in_words(record.channel, record)}, number {record.awaited}"
        words += f", {_bytes(record.nbytes)}" if record.nbytes else ""
    if record.section not in (record.phase, Phase.STEP, Phase.START):
        words += f" ({name_of(record.section)})"
    return words


def channel_in_words(channel: Channel, record: Record) -> str:
    """`over dp`, `over all ranks`, `from rank 5`, as the rank of the record sees it."""
    if channel.is_message:
        sender, receiver = channel.ranks
        return f"to rank {receiver}" if sender == record.rank else f"from rank {sender}"
    return group_in_words(channel.ranks, record.identity.degrees)


def table(seen: Iterable[Seen], absent: Sequence[int] = ()) -> list[str]:
    """Lines with what each rank does, ranks in the same phase folded into one line, the longest wait first. `absent`:
    those that should have a ledger and do not."""
    folded: dict[tuple[str, int], list[Seen]] = {}
    ordered = sorted(seen, key=lambda one: one.rank)
    for one in ordered:
        state = "" if one.state == "running" or one.is_done else f" [process {one.state}]"
        folded.setdefault((phase_in_words(one.record) + state, one.record.step), []).append(one)
    rows = [
        (ranks_in_words([one.rank for one in ones]), str(step), _range([one.record.age for one in ones]), words)
        for (words, step), ones in sorted(folded.items(), key=lambda item: -max(one.record.age for one in item[1]))
    ]
    if absent:
        rows.insert(0, (ranks_in_words(absent), "-", "-", "has written nothing"))
    rows.insert(0, ("ranks", "step", "for", "phase"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return [textwrap.shorten(line, _WIDTH - 4) if len(line) > _WIDTH - 4 else line for line in lines]


def hang_report(
    seen: Sequence[Seen],
    verdict: Verdict,
    *,
    seconds: float,
    allowed: str,
    stacks: Mapping[int, str],
    world_size: int,
) -> str:
    """The message about a hang, without the program's name in front. `seconds`: for which no rank has moved. `allowed`:
    for how long they may, in words. `stacks`: as faulthandler writes them, of the ranks that were asked; empty where a
    process did not answer."""
    records = {one.rank: one.record for one in seen}
    step = max(record.step for record in records.values())
    some = next(iter(records.values()))
    lines = [f"hang at step {step}: {headline(verdict, records, some.identity.degrees)}"]
    lines += _field("why", f"{verdict.why}; no rank has moved for {seconds:.1f} s")
    lines += _field("limit", allowed)
    for rank in verdict.ranks if verdict.kind != "cycle" else ():
        if rank in records:
            lines += _field(f"rank {rank}", f"{phase_in_words(records[rank])}, for {records[rank].age:.1f} s")
            stack = main_stack(stacks.get(rank, ""))
            lines += _field("stack", _about_stack(stack, is_asked=rank in stacks, host=records[rank].identity.host))
            lines += [f"    {line}"[:_WIDTH] for line in stack]
    rows = table(seen, [rank for rank in range(world_size) if rank not in records])
    lines += [f"  {row}" for row in rows]
    return "\n".join(lines)


def deaths_in_words(dead: Sequence[Seen]) -> str:
    """`rank 3 (pid 8) on node-a has died in the phase: import of libraries`, for ranks of one node, one or more."""
    names = ", ".join(f"rank {one.rank} (pid {one.record.identity.pid})" for one in dead)
    return f"{names} on {dead[0].record.identity.host} has died in the phase: {phase_in_words(dead[0].record)}"


def headline(verdict: Verdict, records: Mapping[int, Record], degrees: Mapping[str, int]) -> str:
    """Who, in one line."""
    named = ", ".join(_described(rank, records, degrees) for rank in verdict.ranks[:4])
    named += f" and {len(verdict.ranks) - 4} more" if len(verdict.ranks) > 4 else ""
    if verdict.kind == "cycle":
        return f"cycle, no single blocking rank: {named}"
    if verdict.kind == "undetermined":
        return "the blocking rank is unknown"
    held = "blocks the run" if len(verdict.ranks) == 1 else "block the run"
    return f"{named} {held}" if verdict.is_certain else f"probably {named} {held}"


def main_stack(dump: str) -> list[str]:
    """The main thread's frames of a dump of all threads, which faulthandler writes last; the innermost ones."""
    threads = [part.splitlines() for part in dump.strip().split("\n\n") if part.strip()]
    if not threads:
        return []
    frames = [line.strip() for line in threads[-1] if line.startswith("  ")]
    return frames[:_STACK_LINES]


def _about_stack(stack: Sequence[str], *, is_asked: bool, host: str) -> str:
    if not is_asked:
        return f"not asked: only those of the first node are collected, and this rank is on {host}"
    return "most recent call first" if stack else "did not answer"


def _described(rank: int, records: Mapping[int, Record], degrees: Mapping[str, int]) -> str:
    if rank not in records:
        return f"rank {rank} ({describe_rank(rank, degrees)})"
    who = records[rank].identity
    return f"rank {rank} ({describe_rank(rank, degrees)}; pid {who.pid} on {who.host})"


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<10}", subsequent_indent=" " * 12)


def _range(ages: Sequence[float]) -> str:
    low, high = f"{min(ages):.1f}", f"{max(ages):.1f}"
    return f"{low} s" if low == high else f"{low}-{high} s"


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
