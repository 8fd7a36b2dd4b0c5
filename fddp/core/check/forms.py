"""Proof of the buckets of a schedule by their forms.

[Note: forms]
The form of a bucket is a schedule of this bucket alone, in the smallest numbers: its operations and
the reduction of the control word in launch order, their dependencies on each other, and the ranks
of its element bounds among each other. A schedule has thousands of buckets and a handful of forms,
and a form is proved once in a process. A plan that is rebuilt for another order of leaves moves
bounds and changes the number of buckets, but not the forms, so its schedule needs no second proof.

A bucket is correct if its form is, for three reasons. Execution of a bucket reads no other bucket.
It only compares bounds with each other, with 0 and with the number of elements, and their ranks
compare alike; the two checks that calculate with bounds, of padding and of equal chunks, are made
here on the true ones. And the form has no more dependencies than the schedule: of those on other
buckets only the one on the control word is kept. Its operations are ordered only where those of the
schedule are, and a proof holds for every stronger order.

The converse is not true: a bucket whose operations are ordered through another bucket may be
correct while its form is not. A schedule with such a bucket is proved by execution of each bucket,
which also words all errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from fddp.core.check.execution import check_by_execution
from fddp.core.check.ordering import check_order
from fddp.core.check.well_formed import padding_limit
from fddp.core.plan.plan import LeafSpec, plan_leaves
from fddp.core.schedule.op import CONTROL_REGION, Buffer, Kind, Op, Region, When
from fddp.core.schedule.schedule import Result, Scaling, Schedule
from fddp.core.schedule.topology import Topology
from fddp.errors import ScheduleError

_MAX_OPS = 256  # in a form; larger buckets, in many pieces, are rare, and would be kept in memory
_MAX_FORMS = 1024

_FormRegion = tuple[Buffer, int, int, tuple[str, ...]]
_FormOp = tuple[Kind, int, tuple[str, ...], _FormRegion, tuple[int, ...], When]
"""The fields of an `Op`. Large schedules have many, and plain tuples are made faster."""


class _Terms(NamedTuple):
    """Properties of a schedule that the proof of each of its buckets reads."""

    topology: Topology
    scaling: Scaling
    result: Result
    deterministic: bool


class _Form(NamedTuple):
    """A bucket alone; see [Note: forms].

    Attributes:
        terms: properties of the schedule.
        dtype, wire_dtype, sparse: properties of the bucket.
        numel: rank of its number of elements among the bounds.
        ops: its operations and the reduction of the control word.
    """

    terms: _Terms
    dtype: str
    wire_dtype: str
    sparse: bool
    numel: int
    ops: tuple[_FormOp, ...]

    def schedule(self) -> Schedule:
        """Return the form as a schedule."""
        # Regions of any whole number of these units can be cut into equal chunks along all axes.
        unit = self.terms.topology.world_size
        leaf = LeafSpec("leaf", (self.numel * unit,), self.dtype, sparse=self.sparse)
        ops = []
        for kind, bucket, axes, (buffer, start, stop, shard), deps, when in self.ops:
            region = Region(buffer, start * unit, stop * unit, shard)
            ops.append(Op(kind, bucket, axes, region, deps, when))
        plan = plan_leaves([leaf], order=[0], caps_bytes=[1])
        return Schedule(
            plan,
            self.terms.topology,
            tuple(ops),
            (self.wire_dtype,),
            self.terms.scaling,
            self.terms.result,
            self.terms.deterministic,
        )


def is_proved_by_forms(schedule: Schedule) -> bool:
    """Return True if the forms of all buckets are correct, which proves the schedule.

    False does not mean that the schedule is wrong; see [Note: forms].

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> leaves = [LeafSpec(name, (8,), "float32") for name in "abc"]
        >>> schedule = make_schedule(plan_leaves(leaves, order=range(3), caps_bytes=[1]), 4)
        >>> is_proved_by_forms(schedule)
        True
    """
    by_bucket = _positions(schedule)
    if by_bucket is None:
        return False
    try:
        control = check_order(schedule)
    except ScheduleError:
        return False
    topology = schedule.topology
    terms = _Terms(topology, schedule.scaling, schedule.result, schedule.deterministic)
    parts = cache(topology.size)
    for bucket, positions in enumerate(by_bucket):
        if len(positions) > _MAX_OPS:
            return False
        form = _form(schedule, terms, bucket, positions, control)
        if not _is_correct(form):
            return False
        limit = padding_limit(schedule, bucket)
        for position in positions:
            op = schedule.ops[position]
            start, stop, shard = op.region.start, op.region.stop, op.region.shard
            own = shard if op.kind != "reduce_scatter" else (*shard, *op.axes)
            if stop > limit or (stop - start) % parts(own):
                return False
    return True


def _positions(schedule: Schedule) -> list[list[int]] | None:
    """Return the positions of the operations of each bucket; None if there is no bucket, or an
    operation names a bucket, axis or element that cannot exist."""
    by_bucket: list[list[int]] = [[] for _ in schedule.plan.buckets]
    axes = frozenset(schedule.topology.names)
    for position, op in enumerate(schedule.ops):
        region = op.region
        if not 0 <= region.start <= region.stop:
            return None
        if not (axes.issuperset(op.axes) and axes.issuperset(region.shard)):
            return None
        if 0 <= op.bucket < len(by_bucket):
            by_bucket[op.bucket].append(position)
        elif op.kind != "control" or op.bucket != -1:
            return None
    return by_bucket or None


@lru_cache(maxsize=_MAX_FORMS)
def _is_correct(form: _Form) -> bool:
    try:
        check_by_execution(form.schedule())
    except ScheduleError:
        return False
    return True


def _form(
    schedule: Schedule, terms: _Terms, bucket: int, positions: Sequence[int], control: int
) -> _Form:
    """Return the form of a bucket with operations at `positions`, if op `control` reduces the
    control word."""
    ops, spec = schedule.ops, schedule.plan.buckets[bucket]
    members = positions if control in positions else sorted((*positions, control))
    numbers = {position: number for number, position in enumerate(members)}
    regions = [ops[position].region for position in positions]
    bounds = {0, spec.numel, *(r.start for r in regions), *(r.stop for r in regions)}
    ranks = {bound: rank for rank, bound in enumerate(sorted(bounds))}
    own = []
    for position in members:
        kind, number, axes, region, deps, when = ops[position]
        part: _FormRegion = region
        if number == bucket:
            number = 0
            part = (region.buffer, ranks[region.start], ranks[region.stop], region.shard)
        elif number >= 0:  # the all-reduce of another bucket that carries the control word
            kind, number, axes, part = "control", -1, terms.topology.names, CONTROL_REGION
        deps = tuple([numbers[dep] for dep in deps if dep in numbers])
        own.append((kind, number, axes, part, deps, when))
    wire_dtype = schedule.wire_dtypes[bucket]
    return _Form(terms, spec.dtype, wire_dtype, spec.sparse, ranks[spec.numel], tuple(own))
