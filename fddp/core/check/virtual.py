"""Proof of the association of a sum over virtual ranks; see [Note: virtual ranks]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fddp.core.check.findings import Location, everywhere, join_names, nontrivial
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.virtual import Span, VirtualRanks, halves, join
from fddp.errors import ScheduleError


def check_virtual(schedule: Schedule) -> None:
    """Prove that each sum over virtual ranks is that of the tree, with each virtual rank once. The
    schedule is correct otherwise.

    Each rank sums whole nodes of the tree, and each addition joins the two halves of a node, along
    all axes at once or along one after the other. The ranks' own sums are the tree over as many
    summands, because a node's subtree depends on its length alone.

    Raises:
        ScheduleError: a virtual rank is missing or repeated, an addition is none of the tree, or
            an operation reduces along other axes than the innermost ones that are left.
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
    stages = {(1, schedule.topology.world_size)}
    for position, op in enumerate(schedule.ops):
        if op.kind == "reduce_scatter" and nontrivial(schedule, op.axes):
            stages.add(_stage(Location(schedule, position), op))
    problem = _wrong_stage(virtual, stages)
    if problem is not None:
        raise ScheduleError(
            f"the sum over {virtual.count} virtual ranks along one axis after the other: {problem}"
            f"{everywhere(schedule)}"
        )


def _stage(at: Location, op: Op) -> tuple[int, int]:
    """Return the number of ranks along the axes that are summed before an operation, and along its
    own. Its ranks carry neighbouring runs of virtual ranks if these axes are the innermost."""
    topology = at.schedule.topology
    names = nontrivial(at.schedule, topology.names)
    for axes in (op.region.shard, (*op.region.shard, *op.axes)):
        found = {*nontrivial(at.schedule, axes)}
        inmost = names[len(names) - len(found) :]
        if found != {*inmost}:
            at.fail(
                f"it sums along {join_names(op.axes)} while its elements are not sharded along the "
                f"inner axes, so that all but one of the sums over virtual ranks that these left "
                f"are lost; all-gather along the inner axes after it"
            )
    return topology.size(op.region.shard), topology.size(op.axes)


def _wrong_stage(virtual: VirtualRanks, stages: set[tuple[int, int]]) -> str | None:
    """Return the first problem of sums along some axes, or None if each addition is one of the
    tree, and ranks end with the same sums along all axes at once as along one after the other."""
    left = {1: virtual.spans}  # spans whose sums are left, for each block of ranks
    for block, parts in sorted(stages | {(1, block) for block, _ in stages}):
        after = []
        for number, tree in enumerate(virtual.stage(block, parts)):
            own = left[block][number * parts : (number + 1) * parts]
            if tree.summands != tuple(map(len, own)):
                return f"{parts} blocks of {block} ranks have other sums than they are said to have"
            found = _added([*chain.from_iterable(own)], tree.additions, virtual.count)
            if isinstance(found, str):
                return found
            after.append(tuple(found))
        if left.setdefault(block * parts, tuple(after)) != tuple(after):
            return f"blocks of {block * parts} ranks end with other sums than at once"
    return None


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
    found = _added([*chain.from_iterable(virtual.spans)], virtual.additions, virtual.count)
    if isinstance(found, str):
        return found
    return None if len(found) == 1 else f"{len(found)} sums are left; add them"


def _added(spans: Sequence[Span], additions: Sequence[int], count: int) -> list[Span] | str:
    """Return the spans of the sums that additions leave, or the first problem."""
    if len(additions) != len(spans):
        return f"it has additions after {len(additions)} of {len(spans)} spans"
    stack: list[Span] = []
    for span, times in zip(spans, additions, strict=True):
        stack.append(span)
        if not 0 <= times < len(stack):
            return f"{times} additions after v{span.start}:{span.stop}, with {len(stack)} sums"
        for _ in range(times):
            right, left = stack.pop(), stack.pop()
            joined = join(left, right)
            if halves(joined, count) != (left, right):
                return (
                    f"v{left.start}:{left.stop} + v{right.start}:{right.stop} is no addition of "
                    f"the tree; add the halves of each node"
                )
            stack.append(joined)
    return stack
