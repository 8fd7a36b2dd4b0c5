"""Placement of the control word: piggybacked on a bucket, or reduced separately.

See [Note: piggybacked control word] in `op.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.control_word import (
    MOST_LEAVES,
    MOST_RANKS,
    ControlLayout,
    Format,
    limb_bits,
)
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Scaling, Schedule, summands
from fddp.core.schedule.topology import Topology
from fddp.core.text import counted

#: wire dtypes of buckets that can carry the control word
FORMATS: frozenset[str] = frozenset({"float32", "float64"})


def piggyback_problem(
    plan: BucketPlan, topology: Topology, wire_dtype: str, scaling: Scaling
) -> str | None:
    """Return the reason why a bucket can't carry the control word, or None if it can."""
    ranks, leaves = topology.world_size, len(plan.reduced)
    if wire_dtype not in FORMATS:
        return (
            f"its bucket is reduced in {wire_dtype}, which can't hold it; float32 and float64 can"
        )
    if wire_dtype == "float32" and (ranks > MOST_RANKS or leaves > MOST_LEAVES):
        return (
            f"float32 holds the control word of at most {MOST_RANKS} ranks and {MOST_LEAVES} "
            f"leaves, got {counted(ranks, 'rank')} and {counted(leaves, 'leaf')}"
        )
    if scaling == "average":
        return "an averaging collective would divide it; set scaling to 'before' or 'after'"
    return None


def control_layout(schedule: Schedule, *, with_order: bool, groups: int = 0) -> ControlLayout:
    """Return the layout of a schedule's control word, `with_order` including the ready order of
    rank 0, and with squared norms of `groups` groups of leaves; see [Note: limbs] in
    `control_word.py`."""
    leaves, buckets = len(schedule.plan.reduced), len(schedule.plan.buckets)
    fmt: Format = "float64"
    if schedule.piggyback_op >= 0:
        fmt = cast("Format", schedule.wire_dtypes[schedule.ops[schedule.piggyback_op].bucket])
    # The total weight scales all results, so a deterministic schedule needs its exact sum.
    needs_limbs = fmt == "float32" or schedule.deterministic
    bits = limb_bits(fmt, summands(schedule)) if needs_limbs else 0
    return ControlLayout(leaves, buckets, with_order, fmt, bits, groups)


def with_separate_word(schedule: Schedule) -> Schedule:
    """Reduce a piggybacked control word by its own collective, right after its carrier.

    Communication hooks need this, because they replace all-reduces. A schedule with a separate
    control word is returned unchanged.

    Example:
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
        >>> piggybacked = make_schedule(plan, 2)
        >>> [op.kind for op in piggybacked.ops[:3]]
        ['pack', 'control', 'all_reduce']
        >>> [op.kind for op in with_separate_word(piggybacked).ops[:3]]
        ['pack', 'all_reduce', 'control']
    """
    ops, control, carrier = schedule.ops, schedule.control, schedule.piggyback_op
    if carrier < 0:
        return schedule
    bucket = ops[carrier].bucket
    order = [i for i in range(len(ops)) if i != control]
    order.insert(order.index(carrier) + 1, control)
    # Operations on other buckets need only the control word. Those on the carrier's bucket may also
    # need its elements.
    moved = _reordered(ops, order, {carrier: (control,), control: ()})
    both = _reordered(ops, order, {carrier: (carrier, control), control: ()})
    for place, old in enumerate(order):
        if ops[old].bucket == bucket and not _depends_indirectly(ops, old, carrier):
            moved[place] = both[place]
    place = order.index(control)
    moved[place] = moved[place]._replace(bucket=-1, axes=schedule.topology.names)
    return replace(schedule, ops=tuple(moved))


def _depends_indirectly(ops: Sequence[Op], position: int, target: int) -> bool:
    """Return True if an operation depends on the target through another operation."""
    stack = [dep for dep in ops[position].deps if dep > target]
    seen = set(stack)
    while stack:
        deps = ops[stack.pop()].deps
        if target in deps:
            return True
        new = {dep for dep in deps if dep > target} - seen
        seen |= new
        stack.extend(new)
    return False


def _reordered(
    ops: Sequence[Op], order: Sequence[int], instead: Mapping[int, tuple[int, ...]]
) -> list[Op]:
    """Return the operations in another order, with their dependencies renumbered. A dependency in
    `instead` is replaced by the operations given there."""
    place = {old: new for new, old in enumerate(order)}
    moved = []
    for old in order:
        deps = (new for dep in ops[old].deps for new in instead.get(dep, (dep,)) if new != old)
        moved.append(ops[old]._replace(deps=tuple(dict.fromkeys(place[dep] for dep in deps))))
    return moved
