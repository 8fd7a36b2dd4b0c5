"""Placement of the control word: piggybacked on the last bucket, or reduced separately.

See [Note: piggybacked control word] in `op.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from fddp.core.protocol.control_word import (
    MOST_LEAVES,
    MOST_RANKS,
    ControlLayout,
    Format,
    limb_bits,
)
from fddp.core.schedule.op import Op, is_collective
from fddp.core.schedule.schedule import Schedule, summands
from fddp.core.text import counted

#: wire dtypes of buckets that can carry the control word
FORMATS: frozenset[str] = frozenset({"float32", "float64"})


def piggyback_problem(schedule: Schedule, bucket: int) -> str | None:
    """Return the reason why a bucket can't carry the control word, or None if it can."""
    ranks, leaves = schedule.topology.world_size, len(schedule.plan.reduced)
    wire = schedule.wire_dtypes[bucket]
    if wire not in FORMATS:
        return f"its bucket is reduced in {wire}, which can't hold it; float32 and float64 can"
    if wire == "float32" and (ranks > MOST_RANKS or leaves > MOST_LEAVES):
        return (
            f"float32 holds the control word of at most {MOST_RANKS} ranks and {MOST_LEAVES} "
            f"leaves, got {counted(ranks, 'rank')} and {counted(leaves, 'leaf')}"
        )
    if schedule.scaling == "average":
        return "an averaging collective would divide it; set scaling to 'before' or 'after'"
    return None


def control_layout(schedule: Schedule, *, with_order: bool) -> ControlLayout:
    """Return the layout of a schedule's control word, `with_order` including the ready order of
    rank 0; see [Note: limbs] in `control_word.py`."""
    leaves, buckets = len(schedule.plan.reduced), len(schedule.plan.buckets)
    fmt: Format = "float64"
    if schedule.piggyback_op >= 0:
        fmt = cast("Format", schedule.wire_dtypes[schedule.ops[schedule.piggyback_op].bucket])
    # The total weight scales all results, so a deterministic schedule needs its exact sum.
    needs_limbs = fmt == "float32" or schedule.deterministic
    bits = limb_bits(fmt, summands(schedule)) if needs_limbs else 0
    return ControlLayout(leaves, buckets, with_order, fmt, bits)


def with_piggybacked_word(schedule: Schedule) -> Schedule:
    """Piggyback the control word on the last bucket if possible; else return the same schedule.

    The collectives of the last bucket must be all-reduces over all ranks, in a dtype that can hold
    the word, and the last of them must follow all packing. The bucket must be on the CPU: on an
    accelerator, the host would wait for all queued device work to read the word.

    Example:
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.topology import Topology
        >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
        >>> piggybacked = make_schedule(plan, Topology(world=2))
        >>> [op.kind for op in piggybacked.ops[:3]]
        ['pack', 'control', 'all_reduce']
        >>> [op.kind for op in with_separate_word(piggybacked).ops[:3]]
        ['pack', 'all_reduce', 'control']
        >>> with_piggybacked_word(with_separate_word(piggybacked)) == piggybacked
        True
    """
    ops, control = schedule.ops, schedule.control
    carrier = _possible_carrier(schedule)
    if carrier < 0 or control < 0 or ops[control].bucket >= 0:
        return schedule
    order = [i for i in range(len(ops)) if i != control]
    order.insert(order.index(carrier), control)
    # Operations that depended on the control word now depend on the carrier.
    moved = _reordered(ops, order, {control: (carrier,)})
    place = order.index(control)
    moved[place] = moved[place]._replace(bucket=ops[carrier].bucket, axes=())
    moved[place + 1] = moved[place + 1]._replace(deps=(*moved[place + 1].deps, place))
    if any(dep >= i for i, op in enumerate(moved) for dep in op.deps):
        return schedule  # an operation reads the word before the carrier is launched
    return replace(schedule, ops=tuple(moved))


def with_separate_word(schedule: Schedule) -> Schedule:
    """Reduce a piggybacked control word by its own collective, right after its carrier.

    Communication hooks need this, because they replace all-reduces. A schedule with a separate
    control word is returned unchanged.
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


def _possible_carrier(schedule: Schedule) -> int:
    """Return the position of the last bucket's last all-reduce, or -1 if it can't be a carrier."""
    if not schedule.sequence:
        return -1
    ops, bucket = schedule.ops, schedule.sequence[-1]
    device = schedule.plan.buckets[bucket].device.partition("#")[0]
    if device not in ("cpu", "meta") or piggyback_problem(schedule, bucket) is not None:
        return -1
    own = [i for i, op in enumerate(ops) if op.bucket == bucket and op.when == "always"]
    chain = [i for i in own if is_collective(ops[i])]
    packs = [i for i, op in enumerate(ops) if op.kind == "pack" and op.when == "always"]
    if not chain or packs[-1] > chain[-1]:
        return -1
    are_flat = all(
        ops[i].kind == "all_reduce"
        and set(ops[i].axes) == set(schedule.topology.names)
        and not ops[i].region.shard
        for i in chain
    )
    is_last = ops[chain[-1]].region.stop == schedule.buffer_numels[bucket]
    return chain[-1] if are_flat and is_last else -1


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
