"""Which bucket may go when: the readiness of buckets as a pure state machine.

Events are gradients of leaves, the end of backward, and the arrival of the control word; actions
are launches and repairs. The rules:

- buckets launch in schedule order, each when all gradients that it waits for have arrived;
- the last bucket waits for the end of backward, so that the control word travels beside it;
- at the end of backward whatever is left launches, in order: what did not come counts as zero;
- a gradient that comes after its bucket has launched makes the bucket late;
- a bucket that is late on any rank is repaired by all ranks, in schedule order.

So the sequence of collectives depends on the schedule and on the (common) control word alone,
never on what arrived on one rank. The runtime counts with a fast mutable twin of this machine;
tests hold its trace against this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fddp.errors import InternalError


class Action(NamedTuple):
    """What the runtime has to do next.

    Attributes:
        kind: "launch" a bucket, send the "control" word, "repair" a late bucket, or "finish".
        bucket: the bucket's index, or -1 where there is none.
    """

    kind: Literal["launch", "control", "repair", "finish"]
    bucket: int = -1


@dataclass(frozen=True)
class ReducerState:
    """Where one rank stands in a step.

    Attributes:
        sequence: the buckets that take part in backward, in launch order.
        bucket_of: for each leaf its bucket, or -1 for a leaf that is not reduced.
        expected: for each leaf, the number of gradients that its bucket waits for.
        arrived: for each leaf, the number of gradients that came.
        launched: how many buckets of `sequence` have launched.
        ended: whether backward has ended.
        late: buckets that received a gradient after their launch on this rank.
        done: whether the step's actions are complete.
    """

    sequence: tuple[int, ...]
    bucket_of: tuple[int, ...]
    expected: tuple[int, ...]
    arrived: tuple[int, ...]
    launched: int = 0
    ended: bool = False
    late: frozenset[int] = frozenset()
    done: bool = False

    def complete(self, bucket: int) -> bool:
        """Whether all gradients that the bucket waits for have arrived."""
        return all(
            count >= wanted
            for b, count, wanted in zip(self.bucket_of, self.arrived, self.expected, strict=True)
            if b == bucket
        )


class Transition(NamedTuple):
    """The state after an event, and what the event asks for, in order."""

    state: ReducerState
    actions: tuple[Action, ...]


def start(sequence: Sequence[int], bucket_of: Sequence[int], expected: Sequence[int]) -> Transition:
    """Begins a step.

    Args:
        sequence: buckets in launch order.
        bucket_of: for each leaf its bucket, or -1.
        expected: for each leaf, how many gradients to wait for; 0 for a leaf that is known to go
            unused, 2 or more for one that is known to receive several.

    Example:
        >>> state, actions = start(sequence=[0, 1], bucket_of=[0, 1], expected=[1, 1])
        >>> state, actions = on_ready(state, leaf=0)
        >>> actions
        (Action(kind='launch', bucket=0),)
        >>> state, actions = on_backward_end(state)
        >>> [a.kind for a in actions]
        ['launch', 'control']
    """
    state = ReducerState(
        sequence=tuple(sequence),
        bucket_of=tuple(bucket_of),
        expected=tuple(expected),
        arrived=(0,) * len(bucket_of),
    )
    return _launch(state)


def on_ready(state: ReducerState, leaf: int) -> Transition:
    """A gradient of `leaf` has arrived."""
    if state.ended:
        raise InternalError(f"a gradient of leaf {leaf} arrived after backward had ended")
    arrived = list(state.arrived)
    arrived[leaf] += 1
    bucket = state.bucket_of[leaf]
    late = state.late | {bucket} if bucket in state.sequence[: state.launched] else state.late
    return _launch(replace(state, arrived=tuple(arrived), late=late))


def on_backward_end(state: ReducerState) -> Transition:
    """Backward has ended: everything left launches, and the control word goes out."""
    if state.ended:
        raise InternalError("backward ended twice in one step")
    state, actions = _launch(replace(state, ended=True))
    return Transition(state, (*actions, Action("control")))


def on_control(state: ReducerState, late: Sequence[int]) -> Transition:
    """The control word is in: `late` are the buckets that are late on any rank."""
    if not state.ended or state.done:
        raise InternalError("the control word came before the end of backward, or twice")
    missing = state.late - set(late)
    if missing:
        raise InternalError(f"buckets {sorted(missing)} are late here but not in the control word")
    repairs = [Action("repair", b) for b in state.sequence if b in set(late)]
    return Transition(replace(state, done=True), (*repairs, Action("finish")))


def _launch(state: ReducerState) -> Transition:
    actions = []
    while state.launched < len(state.sequence):
        bucket = state.sequence[state.launched]
        is_last = state.launched == len(state.sequence) - 1
        if not state.ended and (is_last or not state.complete(bucket)):
            break
        actions.append(Action("launch", bucket))
        state = replace(state, launched=state.launched + 1)
    return Transition(state, tuple(actions))
