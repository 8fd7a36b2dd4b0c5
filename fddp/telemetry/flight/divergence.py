"""Comparison of flights of several ranks, to find where they diverged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fddp.telemetry.flight.log import Flight, FlightLog, FlightOp, escape_control_chars, rank_names

_MOST_MEMBERS = 8  # listed of one group
_MOST_REASON = 240  # characters of a reason
_APART_S = 1.0  # least time between flights that is reported

Key = tuple[str, tuple[int, ...], int]  # name, members, index among those with both in common


class _Observation(NamedTuple):
    """Newest log of a rank, with the time and reason of the flight that first showed a failure."""

    at_s: float
    log: FlightLog
    failed_s: float = 0.0
    reason: str = ""


class Divergence(NamedTuple):
    """Finding from the logs of one `GradSync` or communicator on several ranks.

    Attributes:
        name: name of the `GradSync` or communicator.
        members: global rank of each rank of its group.
        number: operation at which ranks diverge; -1 if they do not.
        ranks: group ranks that differ from the others: they ran another operation, or have not
            reached it.
        text: the finding in words.
    """

    name: str
    members: tuple[int, ...]
    number: int
    ranks: tuple[int, ...]
    text: str


def find_divergences(flights: Iterable[Flight]) -> list[Divergence]:
    """Compare flights of several ranks, operation by operation.

    Operations are matched by number, not by time. Flights of earlier runs are ignored, as a
    restarted job may write to the same directory: a flight taken before some rank created its
    `GradSync` of that name, which all ranks do together, belongs to another one.

    Args:
        flights: flights of any number of processes, in any order. The newest of a process counts.

    Returns:
        One entry for each `GradSync` and communicator with a log.

    Example:
        >>> def flight(rank, *ops):
        ...     log = FlightLog("GradSync #1", (0, 1), rank, "shm", 60.0, 3, "in backward", ops)
        ...     return Flight("host", rank, 1.8e9, "as an example", (log,))
        >>> op = FlightOp(8, 3, "all_reduce", 0, "w", 8, 0.5, 0.0, None, "waited for")
        >>> done = op._replace(number=7, state="done")
        >>> print(find_divergences([flight(0, op), flight(1, done)])[0].text)
        GradSync #1, ranks 0 to 1: rank 1 has not reached operation 8, all_reduce of bucket 0 (w) of
        step 3, and rank 0 waits
          rank 0: at step 3, in backward; last: 8, all_reduce of bucket 0 (w) of step 3, waited for
          rank 1: at step 3, in backward; last: 7, all_reduce of bucket 0 (w) of step 3, done
    """
    newest: dict[tuple[Key, int], _Observation] = {}
    for flight in sorted(flights, key=lambda flight: flight.taken_s):
        opened: Counter[tuple[Key, int]] = Counter()
        for log in flight.logs:
            # Groups of the same ranks share names; all processes create them in the same order.
            alike = ((log.name, log.members, 0), log.rank)
            log_key = ((log.name, log.members, opened[alike]), log.rank)
            opened[alike] += 1
            newest[log_key] = _newer(newest.get(log_key), flight, log)
    groups: dict[Key, dict[int, _Observation]] = {}
    for (key, rank), taken in newest.items():
        groups.setdefault(key, {})[rank] = taken
    return [_divergence(*key[:2], dict(sorted(groups[key].items()))) for key in sorted(groups)]


def _newer(before: _Observation | None, flight: Flight, log: FlightLog) -> _Observation:
    """Return the observation after one more flight of a rank. A later flight, such as one on a
    launcher's signal, keeps the time and reason of the failure."""
    if not any(op.state == "failed" for op in log.ops):
        return _Observation(flight.taken_s, log)
    if before is not None and before.reason and before.log.made_s == log.made_s:
        return before._replace(at_s=flight.taken_s, log=log)
    return _Observation(flight.taken_s, log, flight.taken_s, flight.reason)


def _divergence(
    name: str, members: tuple[int, ...], taken: Mapping[int, _Observation]
) -> Divergence:
    made_s = max(one.log.made_s for one in taken.values())
    logs = {rank: one.log for rank, one in taken.items() if one.at_s >= made_s}
    # Clocks may have been set back since the creation, which would exclude all logs.
    logs = logs or {rank: one.log for rank, one in taken.items()}
    number, ranks, finding = _finding(logs, members)
    lines = [f"{escape_control_chars(name)}, {_span(members)}: {finding}"]
    first_s = min((taken[r].failed_s for r in logs if taken[r].reason), default=0.0)
    for rank, log in logs.items():
        lines.append(f"  {rank_names([rank], members)}: {log.at}; {_last(log)}")
        if taken[rank].reason:
            lines.append(f"    {_why(taken[rank], first_s)}")
    absent = [rank for rank in range(len(members)) if rank not in taken]
    if absent:
        lines.append(f"  {rank_names(absent, members)}: no flight")
    for rank, one in taken.items():
        if rank not in logs:
            lines.append(
                f"  {rank_names([rank], members)}: no flight; one of an earlier run is ignored, "
                f"taken {made_s - one.at_s:.1f} s before the others' "
                f"{escape_control_chars(name)} was created"
            )
    return Divergence(name, members, number, ranks, "\n".join(lines))


def _why(one: _Observation, first_s: float) -> str:
    """Return the reason of a failure, which may hold the only mention of a late or missing rank."""
    line = escape_control_chars(next(iter(one.reason.splitlines()), ""))
    line = line if len(line) <= _MOST_REASON else f"{line[: _MOST_REASON - 2]}.."
    later_s = one.failed_s - first_s
    return f"{later_s:.1f} s later: {line}" if later_s >= _APART_S else line


def _span(members: Sequence[int]) -> str:
    """Format the ranks of a group, with their global ranks if these differ."""
    span = f"ranks 0 to {len(members) - 1}" if len(members) > 1 else "rank 0"
    if list(members) == list(range(len(members))):
        return span
    labels = [str(member) for member in members]
    if len(labels) > _MOST_MEMBERS:
        labels = [*labels[: _MOST_MEMBERS - 2], "..", labels[-1]]
    return f"{span} (global {', '.join(labels)})"


def _finding(
    logs: Mapping[int, FlightLog], members: Sequence[int]
) -> tuple[int, tuple[int, ...], str]:
    """Return the first operation that is not equal, or not done, on all ranks."""
    ops = {rank: {op.number: op for op in log.ops} for rank, log in logs.items()}
    used = {rank: of for rank, of in ops.items() if of}
    if not used:
        return -1, (), "no operation yet"
    first = max(min(of) for of in used.values())
    newest = max(max(of) for of in used.values())
    for number in sorted({n for of in used.values() for n in of if n >= first}):
        there = {rank: of[number] for rank, of in ops.items() if number in of}
        if odd := _odd(there):
            return number, odd, _difference(number, there, members)
        absent = tuple(rank for rank in ops if rank not in there)
        if absent:
            have = "has" if len(absent) == 1 else "have"
            op = next(iter(there.values()))
            waiting = [rank for rank, of in ops.items() if any(map(_is_awaited, of.values()))]
            waiting = [rank for rank in waiting if rank not in absent]
            also = f", and {rank_names(waiting, members)} {_verb(waiting)}" if waiting else ""
            missing = f"{rank_names(absent, members)} {have} not reached operation {number}"
            return number, absent, f"{missing}, {op.what}{also}"
        late = {rank: op for rank, op in there.items() if _is_awaited(op)}
        if late:
            op = next(iter(late.values()))
            who = f"{rank_names(late, members)} {_verb(late)}"
            return number, tuple(late), f"{who} for {number}, {op.what}"
    for rank, of in ops.items():
        for number, op in of.items():
            if op.state == "failed":
                where = rank_names([rank], members)
                return number, (rank,), f"operation {number}, {op.what}, failed on {where}"
    return -1, (), f"all ranks agree up to operation {newest}"


def _odd(there: Mapping[int, FlightOp]) -> tuple[int, ...]:
    """Return the ranks whose operation is not the most common one (in a tie, the lowest rank's)."""
    kinds = {rank: _kind(op) for rank, op in there.items()}
    common = max(kinds.values(), key=list(kinds.values()).count, default=())
    return tuple(rank for rank, kind in kinds.items() if kind != common)


def _kind(op: FlightOp) -> tuple[object, ...]:
    return op.step, op.kind, op.bucket, op.leaves, op.nbytes


def _difference(number: int, there: Mapping[int, FlightOp], members: Sequence[int]) -> str:
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for rank, op in there.items():
        by_kind.setdefault(_kind(op), []).append(rank)
    sides = (
        f"{there[ranks[0]].what}, {there[ranks[0]].nbytes} bytes, on {rank_names(ranks, members)}"
        for ranks in by_kind.values()
    )
    return f"operation {number} is {'; '.join(sides)}"


def _is_awaited(op: FlightOp) -> bool:
    """Return True if a rank waits for the operation, or did until it failed."""
    return op.waited_s is not None and op.state in ("waited for", "failed")


def _last(log: FlightLog) -> str:
    if not log.ops:
        return "no operation yet"
    op = log.ops[-1]
    return f"last: {op.number}, {op.what}, {op.state}"


def _verb(ranks: Sequence[int] | Mapping[int, object]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
