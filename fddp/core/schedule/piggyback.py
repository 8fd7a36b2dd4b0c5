"""Where the control word travels: in the tail of the last bucket, or by itself.

Both are schedules; see [Note: the word rides] in `schedule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast

from fddp.core.protocol.control_word import (
    MOST_LEAVES,
    MOST_RANKS,
    ControlLayout,
    Format,
    limb_bits,
)
from fddp.core.schedule.op import Op, is_collective
from fddp.core.schedule.schedule import Schedule

#: the formats of buckets in whose tail the word can ride
FORMATS: frozenset[str] = frozenset({"float32", "float64"})


def piggyback_problem(schedule: Schedule, bucket: int) -> str | None:
    """Why the word can't ride behind a bucket, whatever carries it; None if it can."""
    ranks, leaves = schedule.topology.world_size, len(schedule.plan.reduced)
    wire = schedule.wire_dtypes[bucket]
    if wire not in FORMATS:
        return f"its bucket travels as {wire}, which does not hold it; float32 and float64 do"
    if wire == "float32" and (ranks > MOST_RANKS or leaves > MOST_LEAVES):
        return (
            f"float32 holds the word of {MOST_RANKS} ranks and {MOST_LEAVES} leaves at most, and "
            f"there are {ranks} and {leaves}"
        )
    if schedule.scaling == "average":
        return "the collective averages, and would divide it; scale 'before' or 'after'"
    return None


def control_layout(schedule: Schedule, *, with_order: bool) -> ControlLayout:
    """The layout of a schedule's control word; see [Note: limbs] in `control_word.py`.

    Args:
        schedule: the operations.
        with_order: whether rank 0's ready order rides along.
    """
    leaves, buckets = len(schedule.plan.reduced), len(schedule.plan.buckets)
    fmt: Format = "float64"
    if schedule.piggyback_op >= 0:
        fmt = cast("Format", schedule.wire_dtypes[schedule.ops[schedule.piggyback_op].bucket])
    # The total weight is a factor on all results: of a deterministic schedule its bits count, too.
    needs_limbs = fmt == "float32" or schedule.deterministic
    bits = limb_bits(fmt, schedule.topology.world_size) if needs_limbs else 0
    return ControlLayout(leaves, buckets, with_order, fmt, bits)


def with_piggybacked_word(schedule: Schedule) -> Schedule:
    """The schedule with its control word in the tail of the last bucket, if it can ride there.

    It can where the chain of the last bucket is nothing but all-reduces over all ranks, in a format
    that holds the word, and the last of them comes after all packing. It does on the CPU only: from
    an accelerator the host would have to fetch it, and wait for all that the device has to do. Any
    other schedule, and one whose word rides already, is returned as it is.

    Example:
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.topology import Topology
        >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
        >>> riding = make_schedule(plan, Topology(world=2))
        >>> [op.kind for op in riding.ops[:3]]
        ['pack', 'control', 'all_reduce']
        >>> [op.kind for op in with_separate_word(riding).ops[:3]]
        ['pack', 'all_reduce', 'control']
        >>> with_piggybacked_word(with_separate_word(riding)) == riding
        True
    """
    ops, control = schedule.ops, schedule.control
    host = _possible_host(schedule)
    if host < 0 or control < 0 or ops[control].bucket >= 0:
        return schedule
    order = [i for i in range(len(ops)) if i != control]
    order.insert(order.index(host), control)
    # What waited for the word waits for what brings it.
    moved = _reordered(ops, order, {control: (host,)})
    place = order.index(control)
    moved[place] = moved[place]._replace(bucket=ops[host].bucket, axes=())
    moved[place + 1] = moved[place + 1]._replace(deps=(*moved[place + 1].deps, place))
    if any(dep >= i for i, op in enumerate(moved) for dep in op.deps):
        return schedule  # something acts on the word before the carrier is launched
    return replace(schedule, ops=tuple(moved))


def with_separate_word(schedule: Schedule) -> Schedule:
    """The schedule with a collective for the control word, right behind the one that carried it;
    one whose word does not ride is returned as it is.

    So it must be where a communication hook takes the place of the all-reduces.
    """
    ops, control, host = schedule.ops, schedule.control, schedule.piggyback_op
    if host < 0:
        return schedule
    bucket = ops[host].bucket
    order = [i for i in range(len(ops)) if i != control]
    order.insert(order.index(host) + 1, control)
    # Other buckets depend on the carrier for the word's sake; its own may for its elements' too.
    moved = _reordered(ops, order, {host: (control,), control: ()})
    both = _reordered(ops, order, {host: (host, control), control: ()})
    for place, old in enumerate(order):
        if ops[old].bucket == bucket and not _comes_after(ops, old, host):
            moved[place] = both[place]
    place = order.index(control)
    moved[place] = moved[place]._replace(bucket=-1, axes=schedule.topology.names)
    return replace(schedule, ops=tuple(moved))


def _possible_host(schedule: Schedule) -> int:
    """The last bucket's last all-reduce, if the word could ride in it; else -1."""
    if not schedule.sequence:
        return -1
    ops, bucket = schedule.ops, schedule.sequence[-1]
    device = schedule.plan.buckets[bucket].device.partition("#")[0]
    if device not in ("cpu", "meta") or piggyback_problem(schedule, bucket) is not None:
        return -1
    chain = [i for i, op in enumerate(ops) if op.bucket == bucket and _travels(op)]
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


def _comes_after(ops: Sequence[Op], position: int, target: int) -> bool:
    """Whether an operation waits for an operation that waits for the target."""
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


def _travels(op: Op) -> bool:
    return is_collective(op) and op.when == "always"


def _reordered(
    ops: Sequence[Op],
    order: Sequence[int],
    instead: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> list[Op]:
    """Operations in another order; dependencies stay with their operations, but for those that
    depend on others `instead`."""
    place = {old: new for new, old in enumerate(order)}
    moved = []
    for old in order:
        deps = (new for dep in ops[old].deps for new in instead.get(dep, (dep,)) if new != old)
        moved.append(ops[old]._replace(deps=tuple(dict.fromkeys(place[dep] for dep in deps))))
    return moved
