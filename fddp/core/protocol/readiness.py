"""Readiness of buckets as a pure state machine.

Events: a gradient of a leaf arrives, backward ends, the control word arrives. Actions: launch or
repair a bucket. Rules:

- buckets launch in schedule order, each once all gradients that it waits for have arrived;
- the last bucket waits for the end of backward, so that the control word travels with it;
- at the end of backward, the remaining buckets launch in order, with zeros for missing gradients;
- a gradient that arrives after the launch of its bucket makes the bucket late;
- a bucket that is late on any rank is repaired by all ranks, in schedule order.

The sequence of collectives therefore depends only on the schedule and on the control word, which
are common to all ranks. The runtime uses a fast mutable equivalent; tests compare it with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fddp.errors import InternalError


class Action(NamedTuple):
    """Next action of the runtime.

    Attributes:
        kind: "launch" a bucket, send the "control" word, "repair" a late bucket, or "finish".
        bucket: index of the bucket; -1 if the action has none.
    """

    kind: Literal["launch", "control", "repair", "finish"]
    bucket: int = -1


@dataclass(frozen=True)
class ReducerState:
    """State of one rank within a step."""

    sequence: tuple[int, ...]  # buckets that take part in backward, in launch order
    bucket_of: tuple[int, ...]  # for each leaf, its bucket; -1 if it is not reduced
    expected: tuple[int, ...]  # for each leaf, the number of gradients that its bucket waits for
    arrived: tuple[int, ...]  # for each leaf, the number of gradients that arrived
    launched: int = 0  # number of buckets of `sequence` that have launched
    ended: bool = False  # True once backward has ended
    late: frozenset[int] = frozenset()  # buckets with a gradient after their launch on this rank
    done: bool = False  # True once all actions of the step have been issued

    def complete(self, bucket: int) -> bool:
        """Return True if all gradients that the bucket waits for have arrived."""
        return all(
            count >= wanted
            for b, count, wanted in zip(self.bucket_of, self.arrived, self.expected, strict=True)
            if b == bucket
        )


class Transition(NamedTuple):
    """State after an event, and the resulting actions in order."""

    state: ReducerState
    actions: tuple[Action, ...]


def start(sequence: Sequence[int], bucket_of: Sequence[int], expected: Sequence[int]) -> Transition:
    """Begin a step.

    Args:
        sequence: buckets in launch order.
        bucket_of: for each leaf, its bucket or -1.
        expected: for each leaf, the number of gradients to wait for: 0 if it is known to be unused,
            2 or more if it is known to receive several.

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
    """Handle a gradient of `leaf`."""
    if state.ended:
        raise InternalError(f"a gradient of leaf {leaf} arrived after backward had ended")
    arrived = list(state.arrived)
    arrived[leaf] += 1
    bucket = state.bucket_of[leaf]
    late = state.late | {bucket} if bucket in state.sequence[: state.launched] else state.late
    return _launch(replace(state, arrived=tuple(arrived), late=late))


def on_backward_end(state: ReducerState) -> Transition:
    """Handle the end of backward: launch the remaining buckets and send the control word."""
    if state.ended:
        raise InternalError("backward ended twice in one step")
    state, actions = _launch(replace(state, ended=True))
    return Transition(state, (*actions, Action("control")))


def on_control(state: ReducerState, late: Sequence[int]) -> Transition:
    """Handle the control word. `late` holds the buckets that are late on any rank."""
    if not state.ended or state.done:
        raise InternalError("the control word arrived before the end of backward, or twice")
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
