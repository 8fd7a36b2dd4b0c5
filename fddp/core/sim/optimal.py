"""Bucket boundaries that minimise the simulated step time.

Buckets are sent in the order in which they become ready, over a channel that carries one at a time.
A bucket that ends at leaf i begins when leaf i is ready and the channel is free, and takes
a + b * bytes. An earlier end of the first i leaves is never worse for the rest, so dynamic
programming over i finds the best boundaries. The problem, and merging gradients as its solution,
are from S. Shi, X. Chu and B. Li, "MG-WFBP: Efficient data communication for distributed
synchronous SGD algorithms", IEEE INFOCOM 2019. The algorithm here is exact for one channel; theirs
is greedy.

[Note: work clock]
Communication may be slower during backward. Time is therefore measured in work that the channel can
have done, so that the duration of a bucket does not depend on its start.

With several dtypes or devices, or several collectives per bucket, the result is not proven optimal.
Classes of leaves are optimised in turn, with the buckets of other classes fixed. A chain of
collectives is approximated by one channel in several ways, and the candidate with the shortest
simulated step wins. The plans of DistributedDataParallel are always among the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fddp.core.plan.bucket import Bucket, assign_buckets
from fddp.core.plan.defaults import MIB
from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec
from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.builder import Algorithm, make_schedule
from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import FloatArray
from fddp.core.sim.simulator import (
    Cost,
    ReadyTimes,
    collective_time_s,
    group_model,
    ready_seconds,
    simulate,
)

_DDP_CAPS_BYTES = (MIB, 25 * MIB)
_ROUNDS = 4  # of optimisation of classes in turn; most converge in two
_HALVINGS = 10  # of the cap, for schedules that are not described by one channel
_ROUNDING = 1e-12  # relative tolerance of times

Ends = tuple[int, ...]  # of the buckets of a class, as numbers of leaves of the class


class Target(NamedTuple):
    """Cost model of an optimised plan, and arguments of `make_schedule`."""

    cost: Cost  # model of the links, or one model per axis
    topology: Topology
    algorithm: Algorithm = "all_reduce"
    deterministic: bool = False

    def schedule_of(self, plan: BucketPlan) -> Schedule:
        return make_schedule(
            plan, self.topology, algorithm=self.algorithm, deterministic=self.deterministic
        )


class _Channel(NamedTuple):
    """Channel that carries one bucket at a time; seconds of work outside of backward."""

    bucket_s: float  # per bucket
    byte_s: float  # per byte
    slot_s: float  # per bucket, for its slot in the control word, after the end of backward
    overlap: float  # speed during backward


class _Class(NamedTuple):
    """Leaves of one dtype and device. Arrays have shape `(leaves,)`; `begins` has one more."""

    positions: list[int]  # in the ready order
    ready: FloatArray  # on the work clock; the last leaf of all is ready at the end of backward
    begins: FloatArray  # bytes of the class before each leaf, and in total


class _ReservedInterval(NamedTuple):
    """Bucket of another class."""

    position: int  # of its last leaf, in the ready order
    ready: float
    work: float


def optimal_plan(
    leaves: Sequence[LeafSpec], reduced: Sequence[int], ready_times_s: ReadyTimes, target: Target
) -> BucketPlan:
    """Return the plan with the shortest simulated step; `fddp.plan_optimal` plans a tree.

    Args:
        leaves: all leaves of a tree, in canonical order.
        reduced: indices of the leaves to reduce; leaves with equal times keep this order.
        ready_times_s: time at which each gradient is ready, as in `simulate`; leaves without a
            gradient come first.
        target: cost model, topology and algorithm.

    Raises:
        ValueError: as in `simulate` and `make_schedule`.

    Example:
        >>> from fddp.core.sim.cost import CostModel
        >>> leaves = [LeafSpec(name, (1000,), "float32") for name in "abc"]
        >>> target = Target(CostModel(1e-3, 1e-9), Topology(world=2))
        >>> plan = optimal_plan(leaves, [2, 1, 0], {"c": 0.0, "b": 0.001, "a": 0.004}, target)
        >>> [bucket.leaves for bucket in plan.buckets]
        [(2, 1), (0,)]
    """
    leaves = tuple(leaves)
    times_s = ready_seconds(leaves, reduced, ready_times_s)
    order = sorted(reduced, key=lambda leaf: times_s[leaf])

    def step_s(plan: BucketPlan) -> float:
        schedule = target.schedule_of(plan)
        return simulate(schedule, target.cost, times_s).step_s

    return min(_candidates(leaves, reduced, order, times_s, target), key=step_s)


def _candidates(
    leaves: tuple[LeafSpec, ...],
    reduced: Sequence[int],
    order: Sequence[int],
    times_s: FloatArray,
    target: Target,
) -> Iterator[BucketPlan]:
    channels = _channels(target, leaves[order[-1]].dtype if len(order) else "float32")
    for channel in channels:
        classes = _classes(leaves, order, times_s, channel.overlap)
        for ends in _splits(classes, channel, leaves, order):
            yield _plan(leaves, order, classes, ends)
    yield plan_leaves(leaves, order=order, caps_bytes=_DDP_CAPS_BYTES)
    yield plan_leaves(leaves, order=reduced, caps_bytes=_DDP_CAPS_BYTES)
    if len(channels) > 1:
        total_bytes = sum(leaves[leaf].nbytes for leaf in order)
        for halvings in range(_HALVINGS):
            yield plan_leaves(leaves, order=order, caps_bytes=(max(1, total_bytes >> halvings),))


def _channels(target: Target, dtype: str) -> list[_Channel]:
    """Return one channel for each group of a bucket's collectives, and one for all of them
    together. The bucket is the last one, which may carry the control word."""
    elements = 2**40  # divisible by most group sizes, to avoid padding
    leaf = LeafSpec("", (elements,), dtype)
    plan = plan_leaves([leaf], order=[0], caps_bytes=[1])
    schedule = target.schedule_of(plan)
    models = {axes: group_model(target.cost, target.topology, axes) for axes in schedule.groups}
    slot_s = 0.0
    ways: dict[tuple[str, ...], _Channel] = {}
    for position, op in enumerate(schedule.ops):
        if not is_collective(op) or op.when != "always":
            continue
        model, ranks = models[op.axes], target.topology.size(op.axes)
        if op.kind == "control":
            slot_s = model.time_s("control", 8.0, ranks) - model.time_s("control", 0.0, ranks)
            continue
        alone = op._replace(deps=())  # differs from the carrier, whose time includes the word
        empty = alone._replace(region=op.region._replace(start=0, stop=0))
        bucket_s = collective_time_s(schedule, empty, model)
        byte_s = (collective_time_s(schedule, alone, model) - bucket_s) / leaf.nbytes
        way = ways.get(op.axes, _Channel(0.0, 0.0, 0.0, model.overlap))
        ways[op.axes] = way._replace(bucket_s=way.bucket_s + bucket_s, byte_s=way.byte_s + byte_s)
        if position == schedule.piggyback_op:
            slot_s = byte_s * ITEM_BYTES[dtype]
    whole = _Channel(
        sum(way.bucket_s for way in ways.values()),
        sum(way.byte_s for way in ways.values()),
        0.0,
        min((way.overlap for way in ways.values()), default=1.0),
    )
    return [way._replace(slot_s=slot_s) for way in dict.fromkeys([*ways.values(), whole])]


def _classes(
    leaves: Sequence[LeafSpec], order: Sequence[int], times_s: FloatArray, overlap: float
) -> list[_Class]:
    """Group the dense leaves by dtype and device, in ready order."""
    positions: dict[tuple[str, str], list[int]] = {}
    for position, leaf in enumerate(order):
        if not leaves[leaf].sparse:
            spec = leaves[leaf]
            positions.setdefault((spec.dtype, spec.device), []).append(position)
    # Work clock: it runs at the speed `overlap` until the end of backward.
    ready = overlap * times_s[list(order)]
    held = max((members[-1] for members in positions.values()), default=-1)
    ready[held] = overlap * times_s.max()
    nbytes = np.array([float(leaves[leaf].nbytes) for leaf in order])
    return [
        _Class(members, ready[members], np.concatenate([[0.0], np.cumsum(nbytes[members])]))
        for members in positions.values()
    ]


def _splits(
    classes: Sequence[_Class],
    channel: _Channel,
    leaves: Sequence[LeafSpec],
    order: Sequence[int],
) -> Iterator[list[Ends]]:
    """Yield candidates: the ends of the buckets of each class."""
    if len(classes) < 2:
        yield [_optimum(leaves_of_one, channel) for leaves_of_one in classes]
        return
    capped: dict[tuple[str, str], list[int]] = {}
    for bucket in assign_buckets(leaves, order, _DDP_CAPS_BYTES):
        if not bucket.sparse:
            ends = capped.setdefault((bucket.dtype, bucket.device), [])
            ends.append((ends[-1] if ends else 0) + len(bucket.leaves))
    firsts = (order[members.positions[0]] for members in classes)
    yield _in_turn(
        classes, channel, [tuple(capped[leaves[i].dtype, leaves[i].device]) for i in firsts]
    )
    yield _in_turn(classes, channel, [(len(members.positions),) for members in classes])
    yield _in_turn(classes, channel, [tuple(range(1, len(c.positions) + 1)) for c in classes])


def _in_turn(classes: Sequence[_Class], channel: _Channel, ends: list[Ends]) -> list[Ends]:
    """Optimise each class with the buckets of the others fixed, until nothing changes."""
    for _ in range(_ROUNDS):
        before = list(ends)
        for number, members in enumerate(classes):
            busy = [
                bucket
                for other, its_ends in enumerate(ends)
                if other != number
                for bucket in _busy(classes[other], its_ends, channel)
            ]
            ends[number], _ = _earliest(members, channel, sorted(busy))
        if ends == before:
            break
    return _merged(classes, channel, ends)


def _merged(classes: Sequence[_Class], channel: _Channel, ends: Sequence[Ends]) -> list[Ends]:
    """Merge each bucket with the next one of its class if that does not delay the end."""
    buckets = sorted(
        (bucket, number, end)
        for number, members in enumerate(classes)
        for bucket, end in zip(_busy(members, ends[number], channel), ends[number], strict=True)
    )
    ready = np.array([bucket.ready for bucket, _, _ in buckets])
    work = np.array([bucket.work for bucket, _, _ in buckets])
    limit = _finish(ready, work) * (1.0 + _ROUNDING)
    kept: list[list[int]] = [[] for _ in classes]
    numbers = [number for _, number, _ in buckets]
    for i, (_, number, end) in enumerate(buckets):
        if number in numbers[i + 1 :]:
            following = numbers.index(number, i + 1)
            less_ready, less_work = ready.copy(), work.copy()
            less_ready[i], less_work[i] = -np.inf, 0.0
            less_work[following] += work[i] - channel.bucket_s
            if _finish(less_ready, less_work) <= limit:
                ready, work = less_ready, less_work
                continue
        kept[number].append(end)
    return [tuple(its_ends) for its_ends in kept]


def _finish(ready: FloatArray, work: FloatArray) -> float:
    """Return the end of the last bucket on the channel."""
    return float((ready + work[::-1].cumsum()[::-1]).max())


def _busy(members: _Class, ends: Ends, channel: _Channel) -> Iterator[_ReservedInterval]:
    for start, end in pairwise((0, *ends)):
        nbytes = float(members.begins[end] - members.begins[start])
        yield _ReservedInterval(
            members.positions[end - 1],
            float(members.ready[end - 1]),
            channel.bucket_s + channel.byte_s * nbytes,
        )


def _earliest(
    members: _Class, channel: _Channel, busy: Sequence[_ReservedInterval] = ()
) -> tuple[Ends, float]:
    """Return the boundaries with the earliest end on the channel, and that end.

    Times exclude the work of earlier `busy` buckets, which does not depend on the boundaries.
    """
    sent = channel.byte_s * members.begins
    free = np.zeros(len(sent))
    # For each start of the next bucket, the end of the busy buckets since that start.
    held = np.full(len(sent), -np.inf)
    origins = [0] * len(sent)
    served, waiting = 0.0, list(reversed(busy))
    for i, position in enumerate(members.positions, start=1):
        while waiting and waiting[-1].position < position:
            bucket = waiting.pop()
            np.maximum(held[:i], bucket.ready - served, out=held[:i])
            served += bucket.work
        start = np.maximum(np.maximum(free[:i], held[:i]), members.ready[i - 1] - served)
        start -= sent[:i]
        origins[i] = j = int(start.argmin())
        free[i] = start[j] + channel.bucket_s + sent[i]
    ends = []
    i = len(members.positions)
    while i > 0:
        ends.append(i)
        i = origins[i]
    return tuple(reversed(ends)), float(free[-1])


def _optimum(members: _Class, channel: _Channel) -> Ends:
    """Return the boundaries with the earliest end of all communication and the control word.

    Each bucket lengthens the control word. The search increases the number of buckets until another
    bucket costs more than all further ones could gain.
    """
    count = len(members.positions)
    _, bound = _earliest(members, channel)
    free = [np.concatenate([[0.0], np.full(count, np.inf)])]  # with at most 0, 1, 2, ... buckets
    best, buckets = np.inf, 0
    while best > (bound + channel.slot_s * len(free)) * (1.0 + _ROUNDING) and len(free) <= count:
        free.append(_with_one_more(free[-1], members, channel))
        total = free[-1][-1] + channel.slot_s * (len(free) - 1)
        if total < best:
            best, buckets = total, len(free) - 1
    sent = channel.byte_s * members.begins
    ends = []
    i = count
    while i > 0:
        ends.append(i)
        buckets -= 1
        start = np.maximum(free[buckets][:i], members.ready[i - 1])
        i = int((start - sent[:i]).argmin())
    return tuple(reversed(ends))


def _with_one_more(free: FloatArray, members: _Class, channel: _Channel) -> FloatArray:
    """Return the end of the first 0, 1, 2, ... leaves with one more bucket than in `free`; shape
    `(leaves + 1,)`."""
    sent = channel.byte_s * members.begins
    ends = np.zeros(len(free))
    for i, ready in enumerate(members.ready, start=1):
        start = np.maximum(free[:i], ready)
        ends[i] = (start - sent[:i]).min() + channel.bucket_s + sent[i]
    return ends


def _plan(
    leaves: tuple[LeafSpec, ...],
    order: Sequence[int],
    classes: Sequence[_Class],
    ends: Sequence[Ends],
) -> BucketPlan:
    """Return the plan with these boundaries: dense buckets in ready order, then sparse ones."""
    members = sorted(
        (
            one.positions[start:end]
            for one, its_ends in zip(classes, ends, strict=True)
            for start, end in pairwise((0, *its_ends))
        ),
        key=lambda positions: positions[-1],
    )
    buckets = []
    for positions in members:
        bucket = Bucket.of(leaves, [order[position] for position in positions], 0)
        buckets.append(replace(bucket, cap_bytes=max(1, bucket.nbytes)))
    buckets += assign_buckets(leaves, [leaf for leaf in order if leaves[leaf].sparse], (1,))
    caps_bytes = (max((bucket.cap_bytes for bucket in buckets), default=0) or 1,)
    return BucketPlan(leaves, tuple(buckets), caps_bytes, tuple(order))
