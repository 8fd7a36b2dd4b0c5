"""Schedules with one thing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain, combinations
from typing import NamedTuple, get_args

from fddp.core.plan.plan import LeafSpec, plan_leaves
from fddp.core.schedule.builder import Algorithm, make_schedule
from fddp.core.schedule.op import Buffer, Kind, Op, When
from fddp.core.schedule.schedule import Result, Scaling, Schedule, Topology


class Mutant(NamedTuple):
    """A changed schedule.

    Attributes:
        change: what was done to it.
        schedule: what came of it.
    """

    change: str
    schedule: Schedule


def base(
    algorithm: Algorithm,
    topology: Topology,
    *dtypes: str,
    scaling: Scaling = "before",
    split_mb: float | None = None,
    sparse: bool = False,
    deterministic: bool = False,
) -> Schedule:
    leaves = [LeafSpec(f"p{i}", (7,), dtype) for i, dtype in enumerate(dtypes)]
    if sparse:
        leaves.append(LeafSpec("rows", (3, 2), "float32", sparse=True))
    plan = plan_leaves(leaves, order=range(len(leaves)), caps_bytes=[1])
    return make_schedule(
        plan,
        topology,
        algorithm=algorithm,
        scaling=scaling,
        split_mb=split_mb,
        deterministic=deterministic,
    )


SPLIT_MB = 2**-15  # 32 bytes

BASES = {
    "flat": base("all_reduce", Topology(world=3), "float32", "bfloat16", sparse=True),
    "flat, retained": base("all_reduce", Topology(a=2, b=2), "float16", scaling="after"),
    "hierarchical": base("hierarchical", Topology(host=2, local=2), "float32", scaling="average"),
    "hierarchical, split": base(
        "hierarchical", Topology(host=2, local=2), "float64", split_mb=SPLIT_MB
    ),
    "three axes": base("hierarchical", Topology(a=2, b=2, c=2), "float32"),
    "riding": base("all_reduce", Topology(world=3), "bfloat16", "float32", sparse=True),
    "riding, split": base(
        "all_reduce", Topology(a=2, b=2), "float64", scaling="after", split_mb=SPLIT_MB
    ),
    "one place": base("hierarchical", Topology(host=1, a=2, b=2), "float16"),
    "deterministic": base("hierarchical", Topology(host=2, local=2), "float32", deterministic=True),
    "deterministic, flat": base(
        "all_reduce", Topology(a=2, b=2), "bfloat16", scaling="after", deterministic=True
    ),
    "shards": base("reduce_scatter", Topology(host=3, local=1), "float32", "float32"),
    "whole from shards": base("all_gather", Topology(host=2, local=2), "float32", "float32"),
}


def drop_op(ops: tuple[Op, ...], i: int, *, bypass: bool) -> tuple[Op, ...]:
    """Leaves one out; what depended on it depends on what it depended on, or on nothing."""

    def deps(op: Op) -> tuple[int, ...]:
        found = chain.from_iterable(
            (ops[i].deps if bypass else ()) if d == i else (d,) for d in op.deps
        )
        return tuple(dict.fromkeys(d - (d > i) for d in found))

    return tuple(op._replace(deps=deps(op)) for op in (*ops[:i], *ops[i + 1 :]))


def double_op(ops: tuple[Op, ...], i: int) -> tuple[Op, ...]:
    """Carries one out twice; what depended on it depends on the second."""
    second = ops[i]._replace(deps=(i,))
    later = [op._replace(deps=tuple(d + (d >= i) for d in op.deps)) for op in ops[i + 1 :]]
    return (*ops[: i + 1], second, *later)


def move_op(ops: tuple[Op, ...], i: int, to: int) -> tuple[Op, ...]:
    """Launches one at another place; dependencies stay with their operations."""
    order = [j for j in range(len(ops)) if j != i]
    order.insert(to, i)
    place = {old: new for new, old in enumerate(order)}
    return tuple(ops[j]._replace(deps=tuple(place[d] for d in ops[j].deps)) for j in order)


def swap_ops(ops: tuple[Op, ...], i: int, j: int) -> tuple[Op, ...]:
    """Exchanges two, each with the other's dependencies."""
    swapped = list(ops)
    swapped[i], swapped[j] = ops[j]._replace(deps=ops[i].deps), ops[i]._replace(deps=ops[j].deps)
    return tuple(swapped)


def changes_of_lists(ops: tuple[Op, ...]) -> Iterator[tuple[str, tuple[Op, ...]]]:
    for i in range(len(ops)):
        yield "operation dropped", drop_op(ops, i, bypass=True)
        yield "operation dropped, with its dependencies", drop_op(ops, i, bypass=False)
        yield "operation doubled", double_op(ops, i)
        for to in {0, i - 1, i + 1, i + 3, len(ops) - 1}:
            if 0 <= to < len(ops):
                yield "launch moved", move_op(ops, i, to)
        if i + 1 < len(ops):
            yield "neighbours swapped", swap_ops(ops, i, i + 1)


def changes_of_op(schedule: Schedule, op: Op, position: int) -> Iterator[tuple[str, Op]]:
    names, region = schedule.topology.names, op.region
    subsets = [*chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))]
    for axes in subsets:
        yield "wrong group", op._replace(axes=axes)
    for shard in [*subsets, names[::-1], (*region.shard, names[0]), ("elsewhere",)]:
        yield "shard changed", op._replace(region=region._replace(shard=shard))
    for d in range(len(op.deps)):
        others = op.deps[:d] + op.deps[d + 1 :]
        yield "dependency dropped", op._replace(deps=others)
        for dep in (op.deps[d] - 1, op.deps[d] + 1):
            yield "dependency changed", op._replace(deps=(dep, *others))
    for dep in (position, position + 1, len(schedule.ops), -1):
        yield "dependency added", op._replace(deps=(*op.deps, dep))
    size = schedule.topology.world_size
    for start, stop in (
        (-1, -1),
        (1, 1),
        (0, -1),
        (1, 0),
        (0, 1),
        (size, size),
        (0, -size),
        (0, size),
        (size, 0),
    ):
        moved = region._replace(start=region.start + start, stop=region.stop + stop)
        if moved.start >= -1 and moved.stop >= -1:
            yield "region moved", op._replace(region=moved)
    for buffer in get_args(Buffer):
        yield "buffer changed", op._replace(region=region._replace(buffer=buffer))
    for when in get_args(When):
        yield "condition changed", op._replace(when=when)
    for kind in get_args(Kind):
        yield "kind changed", op._replace(kind=kind)
    for bucket in range(-1, len(schedule.plan.buckets) + 1):
        yield "bucket changed", op._replace(bucket=bucket)


def changes_of_fields(schedule: Schedule) -> Iterator[Mutant]:
    for scaling in get_args(Scaling):
        yield Mutant("scaling changed", dataclasses.replace(schedule, scaling=scaling))
    for result in get_args(Result):
        yield Mutant("result changed", dataclasses.replace(schedule, result=result))
    other = dataclasses.replace(schedule, deterministic=not schedule.deterministic)
    yield Mutant("deterministic changed", other)
    for b in range(len(schedule.wire_dtypes)):
        for other in ("float16", "bfloat16", "float32", "float64", "complex64", "int8"):
            wire_dtypes = (*schedule.wire_dtypes[:b], other, *schedule.wire_dtypes[b + 1 :])
            yield Mutant(
                "wire dtype changed", dataclasses.replace(schedule, wire_dtypes=wire_dtypes)
            )


def mutants(schedule: Schedule) -> list[Mutant]:
    """All of them, each schedule once, without the one they come from."""
    found: dict[Schedule, str] = {}
    for change, ops in changes_of_lists(schedule.ops):
        found.setdefault(dataclasses.replace(schedule, ops=ops), change)
    for position, op in enumerate(schedule.ops):
        for change, new in changes_of_op(schedule, op, position):
            ops = (*schedule.ops[:position], new, *schedule.ops[position + 1 :])
            found.setdefault(dataclasses.replace(schedule, ops=ops), change)
    for change, mutant in changes_of_fields(schedule):
        found.setdefault(mutant, change)
    found.pop(schedule, None)
    return [Mutant(change, mutant) for mutant, change in found.items()]
