"""Sharded schedules: reduce-scatter, update of shards and all-gather, also across steps.

Each rank updates its shard of the parameters, and all-gathers the shards of the others. Leaves that
the forward pass uses last are not needed when it begins, so that the all-gathers may overlap with
it, and the reduce-scatters with backward (L. Zhang et al., "DeAR: Accelerating Distributed Deep
Learning with Fine-Grained All-Reduce Pipelining", arXiv 2302.12445). Buckets are gathered in the
order of their first use (Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN
Training Acceleration", SOSP 2019). `fddp.check_schedule` proves that no bucket is read in flight.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.messages import Schema, decode
from fddp.core.schedule.builder import make_all_gather_schedule
from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule
from fddp.core.tables import abridged, html_table, plain_table
from fddp.core.text import counted, size_text

ShardEventKind = Literal["wait", "use", "reduce", "update", "gather"]
GatherAt = Literal["next_forward", "step_end"]

_FORMAT = "fddp.ShardedSchedule/1"  # name and version: the first field of every document
_SCHEMA: Schema = {"format": _FORMAT, "reduce": str, "gather": str, "events": [(str, int)]}
_HEADER = ("event", "kind", "bucket", "first leaf", "last leaf", "size")
_NUMERIC_COLUMNS = (0, 2, 5)
_SHOWN_IN_HTML = 60


class ShardEvent(NamedTuple):
    """An action on one bucket.

    Attributes:
        kind: "wait" for the all-gather of its parameters; "use" them in forward, for the first
            time; launch the "reduce"-scatter of its gradients, in backward; "update" the shard of
            its parameters; launch the "gather" of the shards.
        bucket: index of the bucket.
    """

    kind: ShardEventKind
    bucket: int


@dataclass(frozen=True, repr=False)
class ShardedSchedule:
    """Events of one step with sharded updates, which repeats; the same on every rank.

    A step begins with its forward pass. An all-gather that is launched in one step may be awaited
    in the next. Construction validates types only. `fddp.check_schedule` proves that each bucket is
    gathered once between its update and its next use.

    Attributes:
        reduce: operations of the gradients, with the result "sharded_mean".
        gather: operations of the parameters, with the result "replicated".
        events: events of one step in order.

    Raises:
        ValueError: a field has the wrong type.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> leaves = [LeafSpec(name, (4,), "float32") for name in "ab"]
        >>> plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1])
        >>> reduce = make_schedule(plan, 2, algorithm="reduce_scatter")
        >>> schedule = make_sharded_schedule(reduce)
        >>> [f"{event.kind} {event.bucket}" for event in schedule.events]
        ... # doctest: +NORMALIZE_WHITESPACE
        ['wait 1', 'use 1', 'wait 0', 'use 0', 'reduce 0', 'reduce 1', 'update 0', 'update 1',
         'gather 1', 'gather 0']
        >>> ShardedSchedule.from_json(schedule.to_json()) == schedule
        True
    """

    reduce: Schedule
    gather: Schedule
    events: tuple[ShardEvent, ...]

    def __post_init__(self) -> None:
        for name in ("reduce", "gather"):
            value = getattr(self, name)
            if not isinstance(value, Schedule):
                raise ValueError(f"{name} must be a Schedule, got {type(value).__name__}")
        if not isinstance(self.events, tuple):
            raise ValueError(f"events must be a tuple, got {type(self.events).__name__}")
        for number, event in enumerate(self.events):
            is_event = isinstance(event, ShardEvent) and event.kind in get_args(ShardEventKind)
            if not is_event or type(event.bucket) is not int:
                raise ValueError(f"events[{number}] is no event: {reprlib.repr(event)}")
            if not 0 <= event.bucket < len(self.plan.buckets):
                raise ValueError(
                    f"events[{number}] is of bucket {event.bucket}, and there are "
                    f"{counted(len(self.plan.buckets), 'bucket')}"
                )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[ShardedSchedule], tuple[object, ...]]:
        # Drops cached properties, and validates the fields again on loading.
        return type(self), (self.reduce, self.gather, self.events)

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan."""
        return self.reduce.plan

    def order(self, kind: ShardEventKind) -> tuple[int, ...]:
        """Buckets of the events of a kind, in order."""
        return tuple(event.bucket for event in self.events if event.kind == kind)

    @cached_property
    def crossing(self) -> tuple[int, ...]:
        """Buckets whose all-gather is in flight between steps, in the order of their waits."""
        gathered: set[int] = set()
        crossing = []
        for kind, bucket in self.events:
            if kind == "gather":
                gathered.add(bucket)
            elif kind == "wait" and bucket not in gathered:
                crossing.append(bucket)
        return tuple(crossing)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the schedule's JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the schedule as one line of JSON. `from_json` restores an equal schedule."""
        document = {
            "format": _FORMAT,
            "reduce": self.reduce.to_json(),
            "gather": self.gather.to_json(),
            "events": self.events,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ShardedSchedule:
        """Restore a schedule from `to_json`. `fddp.check_schedule` verifies its events.

        Raises:
            ValueError: the text is malformed; the message names the field.
        """
        document = decode(text, _SCHEMA, "sharded schedule JSON")
        return cls(
            Schedule.from_json(document["reduce"]),
            Schedule.from_json(document["gather"]),
            tuple(ShardEvent(kind, bucket) for kind, bucket in document["events"]),
        )

    def describe(self, number: int) -> str:
        """Describe an event for error messages."""
        kind, bucket = self.events[number]
        return f"event {number} ({kind} of {self.reduce.describe_bucket(bucket)})"

    def __repr__(self) -> str:
        crossing = len(self.crossing)
        return (
            f"ShardedSchedule({counted(len(self.plan.buckets), 'bucket')}, {crossing} in flight "
            f"between steps, {self.reduce.topology})"
        )

    def __str__(self) -> str:
        """Table of the events."""
        rows = map(self._row, range(len(self.events)))
        return f"{self!r}\n{plain_table(_HEADER, rows, _NUMERIC_COLUMNS)}"

    def _repr_html_(self) -> str:
        left_out = ("…", "({} more events)")
        rows = abridged(len(self.events), self._row, _SHOWN_IN_HTML, left_out)
        return html_table(repr(self), _HEADER, rows)

    def _row(self, number: int) -> tuple[str, ...]:
        kind, index = self.events[number]
        bucket, paths = self.plan.buckets[index], self.plan.paths
        ends = paths[bucket.leaves[0]], paths[bucket.leaves[-1]]
        return (str(number), kind, str(index), *ends, size_text(bucket.nbytes))


def make_sharded_schedule(
    reduce: Schedule,
    gather: GatherAt = "next_forward",
    *,
    forward_order: Sequence[int] | None = None,
) -> ShardedSchedule:
    """Return the sharded schedule around a schedule that reduce-scatters gradients.

    Args:
        reduce: schedule of the gradients, of the algorithm "reduce_scatter".
        gather: "next_forward" to wait for the all-gather of each bucket before its first use in the
            next forward pass, in this order; "step_end" to wait for all of them after the update.
        forward_order: indices of the leaves in the order of their first use in forward; by default
            the reverse of the plan's order, which is that of backward.

    Raises:
        TypeError: `reduce` is no schedule.
        ValueError: it leaves no shards; `gather` is unknown; or `forward_order` is no permutation
            of the leaves in buckets.
    """
    if not isinstance(reduce, Schedule):
        raise TypeError(f"reduce must be a Schedule, got a {type(reduce).__name__}")
    if gather not in get_args(GatherAt):
        raise ValueError(f"gather must be one of {', '.join(get_args(GatherAt))}, got {gather!r}")
    uses = _order_of_use(reduce.plan, forward_order)
    waits = [ShardEvent("wait", bucket) for bucket in uses]
    in_forward = [ShardEvent("use", bucket) for bucket in uses]
    at_end: list[ShardEvent] = []
    if gather == "next_forward":
        pairs = zip(waits, in_forward, strict=True)
        in_forward = [event for pair in pairs for event in pair]
    else:
        at_end = waits
    events = (
        *in_forward,
        *(ShardEvent("reduce", bucket) for bucket in reduce.sequence),
        *(ShardEvent("update", bucket) for bucket in reduce.sequence),
        *(ShardEvent("gather", bucket) for bucket in uses),
        *at_end,
    )
    return ShardedSchedule(reduce, make_all_gather_schedule(reduce, uses), events)


def _order_of_use(plan: BucketPlan, forward_order: Sequence[int] | None) -> list[int]:
    """Return the buckets in the order of the first use of one of their leaves."""
    order = plan.order[::-1] if forward_order is None else tuple(forward_order)
    if sorted(order) != sorted(plan.order):
        raise ValueError(
            f"forward_order must hold each of the {counted(len(plan.order), 'leaf')} in buckets "
            f"once, got {reprlib.repr(order)}"
        )
    return list(dict.fromkeys(plan.bucket_of[leaf] for leaf in order))


def gather_launches(gather: Schedule) -> list[int]:
    """Return the buckets of a schedule of all-gathers, in the order of their first operation after
    the control word."""
    return list(
        dict.fromkeys(
            op.bucket
            for op in gather.ops[max(0, gather.control) :]
            if op.kind == "unpack" or (is_collective(op) and op.kind != "control")
        )
    )
