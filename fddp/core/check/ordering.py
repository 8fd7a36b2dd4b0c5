"""What surely comes before what.

[Note: required dependencies]
Two operations that touch the same elements must be connected by dependencies. That one is launched
before the other is not enough: a collective takes effect at any time between its launch and the
moment when something waits for it, and two collectives of one group may run at the same time, as
gloo's threads do. Dependencies on operations that are skipped pass through to what these depend
on. What acts on the control word (conditional operations, gathering, and unpacking, which looks up
the total weight and who used a leaf) depends on it in the same way. The word itself tells what all
packing found; packing ends when it is launched, so that launching the word later is enough. Where
the word rides, what acts on it depends on its carrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from fddp.core.check.findings import everywhere, fail, in_words, wide
from fddp.core.schedule.op import Op, is_piggybacked
from fddp.core.schedule.piggyback import piggyback_problem
from fddp.core.schedule.schedule import Schedule
from fddp.errors import ScheduleError


class Order:
    """Which operations must have finished before others start.

    Args:
        ops: all operations; dependencies point backwards.
        positions: those that are asked about.
    """

    def __init__(self, ops: Sequence[Op], positions: Sequence[int]) -> None:
        self._bits = {position: 1 << number for number, position in enumerate(positions)}
        self._before: list[int] = []  # for each operation, the bits of all that came before
        for op in ops:
            before = 0
            for dep in op.deps:
                before |= self._before[dep] | self._bits.get(dep, 0)
            self._before.append(before)

    def holds(self, earlier: int, later: int) -> bool:
        """Whether one has finished when the other starts, whatever was skipped in between."""
        return bool(self._before[later] & self._bits[earlier])


def check_order(schedule: Schedule) -> int:
    """Judges dependencies, and the control word's place; the position of what brings its sum.

    Raises:
        ScheduleError: an operation waits for one that comes later, or not exactly one reduces the
            control word, after all that it tells of; or it rides where it can't.
    """
    ops = schedule.ops
    for position, op in enumerate(ops):
        for dep in op.deps:
            if not 0 <= dep < position:
                _fail_dependency(schedule, position, dep)
    controls = [position for position, op in enumerate(ops) if op.kind == "control"]
    if not controls:
        raise ScheduleError(
            "no operation reduces the control word, from which ranks learn what came late and who "
            f"failed; put one after the last pack{everywhere(schedule)}"
        )
    if len(controls) > 1:
        fail(schedule, controls[1], f"op {controls[0]} reduces it already; keep one of the two")
    (control,) = controls
    for position in range(control + 1, len(ops)):
        if ops[position].kind == "pack" and ops[position].when == "always":
            fail(
                schedule,
                position,
                f"it is launched after {schedule.describe(control)}, which tells what all packing "
                f"found; launch it before",
            )
    return _check_ride(schedule, control) if is_piggybacked(ops[control]) else control


def _check_ride(schedule: Schedule, control: int) -> int:
    """Judges a word that rides, and what carries it; the position of that."""
    ops, carrier, bucket = schedule.ops, schedule.piggyback_op, schedule.ops[control].bucket
    for position in range(control + 1, len(ops)):
        if control in ops[position].deps and position != carrier:
            fail(
                schedule,
                position,
                f"it waits for the control word, op {control}, which each rank writes by itself; "
                f"only the all-reduce in whose tail it rides depends on it, and others on that",
            )
    if carrier < 0:
        fail(
            schedule,
            control,
            "no all-reduce of its bucket depends on it, so that nothing would sum it; let the last "
            "one depend on it, or name bucket -1 and axes",
        )
    problem = piggyback_problem(schedule, bucket)
    if problem is not None:
        fail(schedule, control, f"{problem}; or name bucket -1 and axes")
    op, names = ops[carrier], schedule.topology.names
    if wide(schedule, op.axes) != wide(schedule, names):
        fail(
            schedule,
            carrier,
            f"it carries the control word, for which all ranks must meet; let it run along "
            f"{in_words(names)}",
        )
    end = schedule.buffer_numels[bucket]
    if op.region.buffer != "bucket" or op.region.stop != end or wide(schedule, op.region.shard):
        fail(
            schedule,
            carrier,
            f"it carries the control word, which lies behind element {end} of the bucket's buffer, "
            f"where the elements {op.region.start}:{op.region.stop} that it works on do not end; "
            f"let the last undivided piece carry it",
        )
    return carrier


def _fail_dependency(schedule: Schedule, position: int, dep: int) -> None:
    if not 0 <= dep < len(schedule.ops):
        last = len(schedule.ops) - 1
        fail(
            schedule,
            position,
            f"it waits for op {dep}, and there are ops 0 to {last}; leave it out",
        )
    if dep == position:
        fail(schedule, position, "it waits for itself; leave that dependency out")
    cycle = " -> ".join(str(i) for i in (position, *_path(schedule.ops, dep, position)))
    fail(
        schedule,
        position,
        f"it waits for {schedule.describe(dep)}, and ranks launch that later, when this one has "
        f"started: {cycle} is a cycle, in which all of them wait for ever; launch op {dep} first",
    )


def _path(ops: Sequence[Op], start: int, end: int) -> list[int]:
    """From an operation through dependencies to an earlier one, or straight by launch order."""
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
    """Judges that whatever acts on the control word waits for what brings it, op `control`.

    Raises:
        ScheduleError: an operation may start before the word is in.
    """
    for position in positions:
        op = schedule.ops[position]
        conditional = op.when != "always"
        if not conditional and op.kind not in ("gather", "unpack"):
            continue
        if order.holds(control, position):
            continue
        if conditional:
            problem = (
                f"it runs only {op.when!r}, as the control word says, and does not wait for that "
                f"word: some ranks would take this branch and others not, and wait for ever"
            )
        else:
            problem = "it needs what the control word says, and does not wait for it"
        fail(schedule, position, f"{problem}; let it depend on op {control}, also through others")
