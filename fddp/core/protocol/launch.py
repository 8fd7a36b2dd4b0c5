"""The rule by which operations of a step are launched.

Operations run in the order of the schedule, each once this rule allows it. The order of collectives
therefore depends on the schedule and the control word alone, never on what has arrived on one rank.
The compiled executor follows the same rule (`csrc/step/executor.cpp`); tests replay its traces
through this one. The simulator asks it for the moment at which each operation is launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule

Phase = Literal["backward", "complete", "free"]
"""Phase of a step: gradients arrive; all have arrived, but nothing may block; operations wait for
each other."""

LAUNCHED = frozenset({"pack", "stage", "all_reduce", "reduce_scatter", "all_gather"})
"""Kinds of operations that run before the control word is known, except in repairs."""


def may_launch(
    schedule: Schedule,
    position: int,
    ready: Container[int],
    done: Container[int],
    phase: Phase,
) -> bool:
    """Return True if the next operation of a step may run.

    Args:
        schedule: the schedule.
        position: position of the operation.
        ready: buckets whose expected gradients have all arrived.
        done: positions of the collectives that have finished.
        phase: phase of the step.

    Example:
        >>> import fddp, torch
        >>> tree = {"a": torch.ones(2), "b": torch.ones(2)}
        >>> plan = fddp.plan_buckets(tree, bucket_cap_mb=[8e-6])
        >>> schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
        >>> may_launch(schedule, 0, ready=set(), done=set(), phase="backward")
        False
        >>> may_launch(schedule, 0, ready={0}, done=set(), phase="backward")
        True
    """
    op = schedule.ops[position]
    if phase == "free":
        return True
    if op.kind == "control":
        return phase == "complete"
    if op.kind not in LAUNCHED or op.when != "always":
        return False
    if phase == "backward" and (op.bucket in schedule.sequence[-1:] or op.bucket not in ready):
        return False  # the last bucket travels with the control word
    # Backward never blocks on a collective.
    return all(dep in done for dep in op.deps if is_collective(schedule.ops[dep]))


class TraceAction(NamedTuple):
    """Action of the runtime, in the trace of a step.

    Attributes:
        kind: "launch" a bucket, send the "control" word, "repair" a late bucket, or "finish".
        bucket: index of the bucket; -1 if the action has none.
    """

    kind: Literal["launch", "control", "repair", "finish"]
    bucket: int = -1


class Backward(NamedTuple):
    """Backward pass of one rank, up to the control word.

    Attributes:
        events: arrivals of gradients, as indices of leaves, and actions, in order.
        late: buckets with a gradient that arrived after their launch.
    """

    events: tuple[int | TraceAction, ...]
    late: frozenset[int]


def replay(schedule: Schedule, arrivals: Sequence[int], expected: Sequence[int]) -> Backward:
    """Replay a backward pass by the launch rule, with collectives that finish at once.

    Args:
        schedule: the schedule.
        arrivals: leaves of the plan in the order in which their gradients arrive.
        expected: for each leaf of the plan, the number of gradients that its bucket waits for: 0 if
            it is known to be unused, 2 or more if it is known to receive several.

    Example:
        >>> import fddp, torch
        >>> tree = {"a": torch.ones(2), "b": torch.ones(2)}
        >>> plan = fddp.plan_buckets(tree, bucket_cap_mb=[8e-6])
        >>> schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
        >>> events, late = replay(schedule, [1, 0], expected=[1, 1])
        >>> [event if isinstance(event, int) else (*event,) for event in events]
        [1, ('launch', 0), 0, ('launch', 1), ('control', -1)]
    """
    bucket_of = schedule.plan.bucket_of
    missing = list(expected)
    incomplete = Counter(b for leaf, b in bucket_of.items() if missing[leaf] > 0)
    ready = {bucket for bucket in schedule.sequence if not incomplete[bucket]}
    events: list[int | TraceAction] = []
    launched: set[int] = set()
    late: set[int] = set()
    position = 0

    def advance(phase: Phase) -> None:
        nonlocal position
        while position < len(schedule.ops) and may_launch(
            schedule, position, ready, range(position), phase
        ):
            op = schedule.ops[position]
            if op.kind == "control":
                events.append(TraceAction("control"))
            elif op.kind == "pack" and op.bucket not in launched:
                launched.add(op.bucket)
                events.append(TraceAction("launch", op.bucket))
            position += 1

    advance("backward")
    for leaf in arrivals:
        events.append(leaf)
        bucket = bucket_of.get(leaf, -1)
        if bucket in launched:
            late.add(bucket)
        missing[leaf] -= 1
        if missing[leaf] == 0 and bucket >= 0:
            incomplete[bucket] -= 1
            if not incomplete[bucket]:
                ready.add(bucket)
        advance("backward")
    advance("complete")
    return Backward(tuple(events), frozenset(late))
