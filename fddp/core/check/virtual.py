"""Proof of the association of a sum over virtual ranks; see [Note: virtual ranks]."""

from __future__ import annotations

from itertools import chain

from fddp.core.check.findings import Location, everywhere, join_names, nontrivial
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.virtual import Span, VirtualRanks, halves
from fddp.errors import ScheduleError


def check_virtual(schedule: Schedule) -> None:
    """Prove that each sum over virtual ranks is that of the tree, with each virtual rank once.

    Each rank sums whole nodes of the tree, and each addition joins the two halves of a node. The
    ranks' own sums are the tree over as many summands, because a node's subtree depends on its
    length alone.

    Raises:
        ScheduleError: a virtual rank is missing or repeated, an addition is none of the tree, or
            an operation reduces along some of the axes only.
    """
    virtual = schedule.virtual
    if virtual is None:
        return
    problem = _problem(virtual, schedule.topology.world_size)
    if problem is not None:
        raise ScheduleError(
            f"the sum over {virtual.count} virtual ranks: {problem}{everywhere(schedule)}"
        )
    if not schedule.deterministic:
        raise ScheduleError(
            f"the schedule has virtual ranks but is not deterministic; set deterministic=True"
            f"{everywhere(schedule)}"
        )
    axes = nontrivial(schedule, schedule.topology.names)
    for position, op in enumerate(schedule.ops):
        if op.kind == "reduce_scatter" and nontrivial(schedule, op.axes) != axes:
            Location(schedule, position).fail(
                f"it sums along {join_names(op.axes)}, but sums over virtual ranks run along all "
                f"axes at once; reduce-scatter along {join_names(axes)}"
            )


def _problem(virtual: VirtualRanks, world_size: int) -> str | None:
    """Return the first problem of the association, or None if it is that of the tree."""
    if len(virtual.spans) != world_size:
        return f"it has spans for {len(virtual.spans)} of {world_size} ranks; list those of each"
    end = 0
    for rank, span in ((rank, span) for rank, own in enumerate(virtual.spans) for span in own):
        if span.start != end:
            number = min(span.start, end)
            fault = "missing" if span.start > end else "summed twice"
            return f"on rank {rank} v{number} is {fault}; continue with v{end}"
        if span.stop != span.start + 1 and halves(span, virtual.count) is None:
            return (
                f"rank {rank} sums v{span.start} to v{span.stop - 1}, which is no node of the "
                f"tree; split it"
            )
        end = span.stop
    if end != virtual.count:
        return f"v{end} to v{virtual.count - 1} are missing; add them to the last rank"
    if world_size == 1 and virtual.sent != (1,):
        return "one rank has several partial sums, which no collective adds; sum them as one span"
    return _wrong_addition(virtual)


def _wrong_addition(virtual: VirtualRanks) -> str | None:
    spans = [*chain.from_iterable(virtual.spans)]
    if len(virtual.additions) != len(spans):
        return f"it has additions after {len(virtual.additions)} of {len(spans)} spans"
    stack: list[Span] = []
    for span, times in zip(spans, virtual.additions, strict=True):
        stack.append(span)
        if not 0 <= times < len(stack):
            return f"{times} additions after v{span.start}:{span.stop}, with {len(stack)} sums"
        for _ in range(times):
            right, left = stack.pop(), stack.pop()
            joined = Span(left.start, right.stop)
            if halves(joined, virtual.count) != (left, right):
                return (
                    f"v{left.start}:{left.stop} + v{right.start}:{right.stop} is no addition of "
                    f"the tree; add the halves of each node"
                )
            stack.append(joined)
    return None if len(stack) == 1 else f"{len(stack)} sums are left; add them"
