"""Order of operations.

[Note: required dependencies]
Two operations that use the same elements must be connected by dependencies. Launch order is not
enough: a collective takes effect at any time between its launch and its wait, and two collectives
of one group may run at the same time, as in gloo's threads. A dependency on a skipped operation
stands for the dependencies of that operation. Operations that read the control word (conditional
operations, gathers, and unpacks, which read the total weight and the use of leaves) must depend on
it, or on its carrier if it is piggybacked. The control word describes the packed gradients. Packing
is synchronous, so the word only needs to be launched after all packing.
"""

from __future__ import annotations

from collections.abc import Sequence

from fddp.core.check.findings import Location, everywhere, join_names, nontrivial
from fddp.core.schedule.op import Op, is_piggybacked
from fddp.core.schedule.piggyback import piggyback_problem
from fddp.core.schedule.schedule import Schedule
from fddp.errors import ScheduleError


class Order:
    """Partial order of operations by their dependencies, which point backwards. `positions` can be
    passed to `holds` as `earlier`."""

    def __init__(self, ops: Sequence[Op], positions: Sequence[int]) -> None:
        self._bits = {position: 1 << number for number, position in enumerate(positions)}
        self._before: list[int] = []  # for each operation, the bits of its transitive dependencies
        for op in ops:
            before = 0
            for dep in op.deps:
                before |= self._before[dep] | self._bits.get(dep, 0)
            self._before.append(before)

    def holds(self, earlier: int, later: int) -> bool:
        """Return True if `later` starts after the end of `earlier`, whatever is skipped."""
        return bool(self._before[later] & self._bits[earlier])


def check_dependencies(schedule: Schedule) -> None:
    """Check that operations depend on earlier ones.

    Raises:
        ScheduleError: one depends on a later one, or on none of the schedule.
    """
    for position, op in enumerate(schedule.ops):
        for dep in op.deps:
            if not 0 <= dep < position:
                _fail_dependency(schedule, position, dep)


def check_order(schedule: Schedule) -> int:
    """Check dependencies and the control word, and return the position of its reduction.

    Raises:
        ScheduleError: an operation depends on a later one; the control word is not reduced exactly
            once after all packing; or it is piggybacked on a bucket that can't carry it.
    """
    check_dependencies(schedule)
    ops = schedule.ops
    controls = [position for position, op in enumerate(ops) if op.kind == "control"]
    if not controls:
        raise ScheduleError(
            "no operation reduces the control word, which reports late gradients and failed ranks; "
            f"insert one after the last pack{everywhere(schedule)}"
        )
    if len(controls) > 1:
        Location(schedule, controls[1]).fail(
            f"op {controls[0]} already reduces it; remove one of the two"
        )
    (control,) = controls
    for position in range(control + 1, len(ops)):
        if ops[position].kind == "pack" and ops[position].when == "always":
            Location(schedule, position).fail(
                f"it is launched after {schedule.describe(control)}, which describes all packed "
                f"gradients; launch it earlier"
            )
    return _check_piggyback(schedule, control) if is_piggybacked(ops[control]) else control


def _check_piggyback(schedule: Schedule, control: int) -> int:
    """Check a piggybacked control word and its carrier, and return the carrier's position."""
    ops, carrier, bucket = schedule.ops, schedule.piggyback_op, schedule.ops[control].bucket
    for position in range(control + 1, len(ops)):
        if control in ops[position].deps and position != carrier:
            Location(schedule, position).fail(
                f"it depends on the control word, op {control}, which is not reduced yet; only the "
                f"all-reduce that carries the word may depend on it, and others on that all-reduce"
            )
    if carrier < 0:
        Location(schedule, control).fail(
            "no all-reduce of its bucket depends on it, so it would not be reduced; make the last "
            "all-reduce depend on it, or set bucket -1 and axes"
        )
    wire_dtype = schedule.wire_dtypes[bucket]
    problem = piggyback_problem(schedule.plan, schedule.topology, wire_dtype, schedule.scaling)
    if problem is not None:
        Location(schedule, control).fail(f"{problem}; or set bucket -1 and axes")
    names = schedule.topology.names
    axes, (buffer, start, stop, shard) = ops[carrier].axes, ops[carrier].region
    if nontrivial(schedule, axes) != nontrivial(schedule, names):
        Location(schedule, carrier).fail(
            f"it carries the control word, which all ranks must reduce; run it along "
            f"{join_names(names)}"
        )
    end = schedule.buffer_numels[bucket]
    if buffer != "bucket" or stop != end or nontrivial(schedule, shard):
        Location(schedule, carrier).fail(
            f"it carries the control word, which lies behind element {end} of the bucket's buffer, "
            f"but its own elements are {start}:{stop}; make the last piece carry it, not sharded"
        )
    return carrier


def _fail_dependency(schedule: Schedule, position: int, dep: int) -> None:
    if not 0 <= dep < len(schedule.ops):
        last = len(schedule.ops) - 1
        Location(schedule, position).fail(
            f"it depends on op {dep}, but there are ops 0 to {last}; remove that dependency"
        )
    if dep == position:
        Location(schedule, position).fail("it depends on itself; remove that dependency")
    cycle = " -> ".join(str(i) for i in (position, *_path(schedule.ops, dep, position)))
    Location(schedule, position).fail(
        f"it depends on {schedule.describe(dep)}, which is launched later: {cycle} is a cycle, a "
        f"deadlock on all ranks; launch op {dep} first"
    )


def _path(ops: Sequence[Op], start: int, end: int) -> list[int]:
    """Return a path of dependencies from `start` to the earlier operation `end`; both without the
    operations in between if they are ordered only by launch."""
    came_from = {start: start}
    stack = [start]
    while stack and end not in came_from:
        position = stack.pop()
        for dep in ops[position].deps:
            if end <= dep < position and dep not in came_from:
                came_from[dep] = position
                stack.append(dep)
    if end not in came_from:
        return [start, end]
    path = [end]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


def check_reads_of_control(
    schedule: Schedule, control: int, positions: Sequence[int], order: Order
) -> None:
    """Check that operations that read the control word depend on its reduction, op `control`.

    Raises:
        ScheduleError: an operation may start before the control word is reduced.
    """
    for position in positions:
        op = schedule.ops[position]
        conditional = op.when != "always"
        reads = conditional or op.kind in ("gather", "unpack")
        if not reads or order.holds(control, position):
            continue
        problem = "it reads the control word but does not depend on it"
        if conditional:
            problem = (
                f"it runs only {op.when!r}, as the control word decides, but does not depend on "
                f"the word: ranks would take different branches and deadlock"
            )
        Location(schedule, position).fail(
            f"{problem}; make it depend on op {control}, directly or indirectly"
        )
