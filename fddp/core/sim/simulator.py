"""Simulation of one step of a schedule on a cost model.

Rules for each rank:

- Operations launch in schedule order, as soon as the runtime's rule allows it
  (`core/protocol/launch.py`).
- Repairs run for the buckets in `late` and are skipped for all others. Operations that the rule
  allows only in the phase "free" wait for the control word. A piggybacked control word adds its
  bytes to its carrier.
- A collective begins when all ranks of its group have launched it and the group's earlier
  collectives are done. Different groups run in parallel. During backward on a rank of the group, it
  advances at the speed `CostModel.overlap`.
- Local operations take no time: the measured ready times of gradients include copies into buckets.

A sparse bucket takes three all-gathers, of sizes that are not in the plan. Together they are
assumed to move as many bytes as the dense leaf has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fddp.core.check import check_schedule
from fddp.core.check.ordering import check_dependencies
from fddp.core.entrance import entrance
from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec
from fddp.core.protocol.launch import may_launch
from fddp.core.schedule.op import Op, is_collective
from fddp.core.schedule.piggyback import control_layout
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import MOST_S, CollectiveKind, CostModel, FloatArray, preset_or_model
from fddp.core.text import counted
from fddp.core.timeline import COMPUTE, Span, Timeline, backward_span

Cost = CostModel | str | Mapping[str, CostModel | str]
ReadyTimes = Sequence[float] | npt.NDArray[np.floating] | Mapping[str, float]

MOST_SPREAD = 10.0
"""Largest spread of `Jitter`: one rank in a thousand is then slower by a factor of 10**13."""

_MOST_RANKS = 2**22  # simulated with jitter: about 100 bytes per rank and group of axes


@dataclass(frozen=True)
class Jitter:
    """Random slowdown of the compute time of each rank.

    Attributes:
        spread: standard deviation of the natural logarithm of the slowdown; the median is 1.
        straggler_rate: expected fraction of ranks that are stragglers.
        straggler_factor: additional slowdown of stragglers.

    Raises:
        ValueError: a spread outside [0, 10], a rate outside [0, 1], or a factor outside (0, 1e9].

    Example:
        >>> Jitter(straggler_rate=1.0, straggler_factor=1.5).draw(2, seed=0)
        array([1.5, 1.5])
    """

    spread: float = 0.0
    straggler_rate: float = 0.0
    straggler_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.spread <= MOST_SPREAD:
            raise ValueError(f"spread must be from 0 to {MOST_SPREAD:g}, got {self.spread!r}")
        if not 0.0 <= self.straggler_rate <= 1.0:
            raise ValueError(f"straggler_rate must be in [0, 1], got {self.straggler_rate!r}")
        if not 0.0 < self.straggler_factor <= MOST_S:
            raise ValueError(
                f"straggler_factor must be above 0 and at most {MOST_S:.0e}, got "
                f"{self.straggler_factor!r}"
            )

    def draw(self, ranks: int, seed: int) -> FloatArray:
        """Return the slowdown of each rank: float64, shape `(ranks,)`, deterministic in `seed`."""
        generator = np.random.default_rng(seed)
        factors = generator.lognormal(0.0, self.spread, ranks)
        stragglers = generator.random(ranks) < self.straggler_rate
        return np.where(stragglers, factors * self.straggler_factor, factors)


@entrance
def simulate(
    schedule: Schedule,
    cost: Cost,
    ready_times_s: ReadyTimes,
    *,
    jitter: Jitter | None = None,
    seed: int = 0,
    late: Collection[int] = (),
) -> Timeline:
    """Simulate one step of a schedule; the rules are at the top of this file.

    Without jitter, the cost does not depend on the number of ranks. With jitter, every rank is
    simulated.

    Args:
        schedule: schedule to simulate, which `check_schedule` accepts.
        cost: model of the links, or one model per axis of the topology; names of `PRESETS` stand
            for models. A group along several axes has the worst of their models.
        ready_times_s: seconds from the start of the step until the gradient of each leaf is ready,
            one per leaf of `schedule.plan.leaves`, or by path. NaN marks a leaf without a gradient,
            which delays nothing. Leaves in no bucket are ignored. The last time ends backward.
        jitter: differences between ranks; None if all are equal.
        seed: seed of the jitter.
        late: indices of the buckets that are repaired.

    Returns:
        Timeline of the last rank to finish, with the step time of each rank.

    Raises:
        TypeError: `schedule` is no schedule.
        ScheduleError: its operations are malformed, or depend on later ones.
        ValueError: times that are negative, above 1e9, missing or of the wrong length; an axis
            without a model; an unknown preset; a late bucket that is not in the plan; jitter on
            more than 4 million ranks.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> leaves = [LeafSpec("a", (250_000,), "float32"), LeafSpec("b", (250_000,), "float32")]
        >>> plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1_000_000])
        >>> schedule = make_schedule(plan, 2)
        >>> simulate(schedule, CostModel(1e-5, 1e-9), {"b": 0.004, "a": 0.010})
        Timeline(rank 0, step 11.021 ms, backward 10.000 ms, exposed 1.021 ms, 50% hidden)
        >>> simulate(schedule, "nvlink4", {"b": 0.004, "a": 0.010})
        Timeline(rank 0, step 10.009 ms, backward 10.000 ms, exposed 0.009 ms, 50% hidden)
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a Schedule, got a {type(schedule).__name__}; write "
            f"simulate(fddp.make_schedule(plan, ranks), cost, ready_times_s)"
        )
    plan, topology = schedule.plan, schedule.topology
    leaves_s = ready_seconds(plan.leaves, plan.reduced, ready_times_s)
    buckets_s = [float(np.max(leaves_s[list(b.leaves)])) for b in plan.buckets]
    check_dependencies(schedule)
    try:
        tasks = _tasks(schedule, cost, late)
    except (LookupError, ValueError):  # perhaps of buckets or axes that are not there
        check_schedule(schedule)
        raise
    shape = [size for _, size in topology.axes]
    if jitter is None:
        slowdown = np.ones([1] * len(shape))
    else:
        if topology.world_size > _MOST_RANKS:
            raise ValueError(
                f"jitter simulates each of {topology.world_size} ranks, and the limit is "
                f"{_MOST_RANKS}; omit it, or use a smaller topology"
            )
        slowdown = jitter.draw(topology.world_size, seed).reshape(shape)
    rank = 0 if jitter is None else int(np.argmax(_run(tasks, buckets_s, slowdown)))
    spans: list[Span] = []
    coordinates = topology.coordinates(rank)

    def record(task: _Task, times: Sequence[FloatArray]) -> None:
        spans.append(_span(schedule, task, [_at(time, coordinates) for time in times]))

    steps_s = _run(tasks, buckets_s, slowdown, record)
    backward_end_s = max(buckets_s, default=0.0) * _at(slowdown, coordinates)
    return Timeline(
        (backward_span(backward_end_s), *spans),
        backward_end_s,
        _at(steps_s, coordinates),
        rank,
        tuple(steps_s.ravel().tolist()),
    )


def ready_seconds(
    leaves: Sequence[LeafSpec], reduced: Sequence[int], ready_times_s: ReadyTimes
) -> FloatArray:
    """Return the validated ready times of all leaves: float64 of shape `(len(leaves),)`.

    Args:
        leaves: all leaves of a tree.
        reduced: indices of the bucketed leaves; the result is 0 for the others.
        ready_times_s: as in `simulate`; NaN becomes 0.

    Raises:
        ValueError: times that are negative, above 1e9, missing or of the wrong length.
    """
    if isinstance(ready_times_s, Mapping):
        given = _by_path(leaves, reduced, ready_times_s)
    else:
        given = np.asarray(ready_times_s, dtype=np.float64)
        if given.shape != (len(leaves),):
            raise ValueError(
                f"ready_times_s must have one time for each of the {len(leaves)} leaves, got the "
                f"shape {given.shape}"
            )
    times_s = np.zeros(len(leaves))
    kept = list(reduced)
    times_s[kept] = np.nan_to_num(given[kept], nan=0.0, posinf=np.inf, neginf=-np.inf)
    wrong = np.flatnonzero((times_s < 0.0) | (times_s > MOST_S))
    if wrong.size:
        leaf = int(wrong[0])
        raise ValueError(
            f"ready_times_s must be from 0 to {MOST_S:.0e}, or NaN for a leaf without gradient; "
            f"leaf {leaf} ({leaves[leaf].path!r}) has {float(times_s[leaf])!r}"
        )
    return times_s


def _by_path(
    leaves: Sequence[LeafSpec], reduced: Sequence[int], times_s: Mapping[str, float]
) -> FloatArray:
    paths = [leaf.path for leaf in leaves]
    unknown = sorted(times_s.keys() - set(paths))
    missing = sorted({paths[leaf] for leaf in reduced} - times_s.keys())
    if unknown or missing:
        what, which = ("does not have", unknown) if unknown else ("needs", missing)
        raise ValueError(
            f"ready_times_s has {counted(len(times_s), 'path')}; the plan of "
            f"{counted(len(paths), 'leaf')} {what} "
            f"{which[0]!r} and {len(which) - 1} more; use NaN for a leaf without gradient"
        )
    return np.array([times_s.get(path, math.nan) for path in paths], dtype=np.float64)


def group_model(cost: Cost, topology: Topology, axes: Collection[str]) -> CostModel:
    """Return the model of a group along `axes`: the worst model of the axes of size above 1.

    Raises:
        ValueError: an axis has no model.
    """
    if not isinstance(cost, Mapping):
        return preset_or_model(cost)
    models = []
    for name, size in topology.axes:
        if name in axes and size > 1:
            if name not in cost:
                raise ValueError(
                    f"cost has models of {', '.join(map(repr, cost)) or 'no axis'}, and none of "
                    f"the axis {name!r} of {topology}"
                )
            models.append(preset_or_model(cost[name]))
    return CostModel.worst(models) if models else CostModel(0.0, 0.0)


def collective_bytes(schedule: Schedule, op: Op) -> float:
    """Return the bytes of the group's whole buffer, including a piggybacked control word, and the
    rows of a reduce-scatter in which some rank sends several partial sums."""
    if op.kind == "control":
        return _word_bytes(schedule)
    # The region of an all-gather is sharded by its own axes, the buffer of the group is not.
    sharding = op.region.shard
    if op.kind == "all_gather":
        sharding = sharding[: len(sharding) - len(op.axes)]
    topology = schedule.topology
    elements = (op.region.stop - op.region.start) / topology.size(sharding)
    nbytes = elements * ITEM_BYTES[schedule.wire_dtypes[op.bucket]]
    if op.kind == "reduce_scatter" and schedule.virtual is not None:
        stage = schedule.virtual.stage(topology.size(op.region.shard), topology.size(op.axes))
        nbytes *= max(max(tree.summands) for tree in stage)
    carries = schedule.piggyback_op >= 0 and op == schedule.ops[schedule.piggyback_op]
    return nbytes + _word_bytes(schedule) if carries else nbytes


def _word_bytes(schedule: Schedule) -> float:
    layout = control_layout(schedule, with_order=False)
    return float(layout.size * ITEM_BYTES[layout.format])


def collective_time_s(schedule: Schedule, op: Op, model: CostModel) -> float:
    """Return the time in seconds of a collective outside of backward."""
    ranks, nbytes = schedule.topology.size(op.axes), collective_bytes(schedule, op)
    if op.kind == "stage":
        raise ValueError(
            "the schedule has stages of a communication hook, which decides itself how much it "
            "sends; simulate the schedule without the hook"
        )
    if op.kind == "gather":  # counts and indices travel before the values
        empty_s = model.time_s("all_gather", 0.0, ranks)
        return model.time_s("all_gather", nbytes, ranks) + 2.0 * empty_s
    return model.time_s(cast("CollectiveKind", op.kind), nbytes, ranks)


class _Task(NamedTuple):
    """Operation that is not skipped."""

    position: int
    ready: int  # the bucket whose gradients it waits for, or -1 for the end of backward
    waits: tuple[int, ...]  # positions of the collectives that it waits for
    group: tuple[int, ...] | None  # indices of the axes of a collective; None if local
    work_s: float
    overlap: float


def _tasks(schedule: Schedule, cost: Cost, late: Collection[int]) -> list[_Task]:
    buckets = len(schedule.plan.buckets)
    wrong = sorted(set(late) - set(range(buckets)))
    if wrong:
        raise ValueError(f"late holds bucket {wrong[0]}; the plan has {counted(buckets, 'bucket')}")
    names = schedule.topology.names
    models = {axes: group_model(cost, schedule.topology, axes) for axes in schedule.groups}
    tasks: list[_Task] = []
    done_by: list[tuple[int, ...]] = []  # the collectives that a dependency on each op waits for
    control: tuple[int, ...] = ()
    after_control = False
    for position, op in enumerate(schedule.ops):
        waits = [wait for dep in op.deps for wait in done_by[dep]]
        before = range(position)  # all done, so that the rule depends on gradients alone
        in_backward = may_launch(schedule, position, {op.bucket}, before, "backward")
        # Even skipping an operation needs the control word, so all later operations wait for it.
        after_control |= not may_launch(schedule, position, (), before, "complete")
        if after_control:
            waits.extend(control)
        if op.when != "always" and op.bucket not in late:
            done_by.append(tuple(dict.fromkeys(waits)))
            continue
        ready = op.bucket if in_backward else -1
        group, work_s, overlap = None, 0.0, 1.0
        if is_collective(op):
            group = tuple(names.index(axis) for axis in op.axes)
            model = models[op.axes]
            work_s, overlap = collective_time_s(schedule, op, model), model.overlap
        tasks.append(_Task(position, ready, tuple(dict.fromkeys(waits)), group, work_s, overlap))
        # A local operation is done when it is launched, before all later ones.
        done_by.append(() if group is None else (position,))
        if position == max(schedule.control, schedule.piggyback_op):
            control = (position,)
    return tasks


def _span(schedule: Schedule, task: _Task, times_s: Sequence[float]) -> Span:
    """Return the span of a task, given its launch, start and end on one rank."""
    op = schedule.ops[task.position]
    lane = COMPUTE if task.group is None else "+".join(op.axes) or "alone"
    label = op.kind if op.kind == "control" else f"{op.kind} {op.bucket}"
    label = label if op.when == "always" else f"{label} ({op.when})"
    return Span(task.position, op.kind, op.bucket, lane, label, *times_s)


def _run(
    tasks: Sequence[_Task],
    buckets_s: Sequence[float],
    slowdown: FloatArray,
    record: Callable[[_Task, Sequence[FloatArray]], None] = lambda task, times: None,
) -> FloatArray:
    """Return the end of each rank's step. `record` receives launch, start and end of each task.

    Arrays have one dimension per axis of the topology, of length 1 if all ranks along the axis have
    the same value, such as the ranks of one group.
    """
    backward_end = max(buckets_s, default=0.0) * slowdown
    group_ends: dict[tuple[int, ...], FloatArray] = {}  # end of backward in each group
    free: dict[tuple[int, ...], FloatArray] = {}  # end of each group's earlier collectives
    done: dict[int, FloatArray] = {}
    cursor = np.zeros_like(slowdown)
    for task in tasks:
        gate = backward_end if task.ready < 0 else buckets_s[task.ready] * slowdown
        np.maximum(cursor, gate, out=cursor)
        for position in task.waits:
            np.maximum(cursor, done[position], out=cursor)
        start = end = cursor
        if task.group is not None:
            if task.group not in free:
                group_ends[task.group] = backward_end.max(axis=task.group, keepdims=True)
                free[task.group] = np.zeros_like(group_ends[task.group])
            start = np.maximum(cursor.max(axis=task.group, keepdims=True), free[task.group])
            end = _end(start, task.work_s, task.overlap, group_ends[task.group])
            free[task.group] = done[task.position] = end
        record(task, (cursor, start, end))
    finish = np.maximum(cursor, backward_end)
    for last in free.values():
        np.maximum(finish, last, out=finish)
    return finish


def _end(start: FloatArray, work_s: float, overlap: float, backward_end: FloatArray) -> FloatArray:
    """Return the end of work that advances at the speed `overlap` until the end of backward."""
    disturbed = np.maximum(backward_end - start, 0.0)
    ends_within = work_s <= disturbed * overlap
    return start + np.where(ends_within, work_s / overlap, work_s + disturbed * (1.0 - overlap))


def _at(values: FloatArray, coordinates: tuple[int, ...]) -> float:
    pairs = zip(values.shape, coordinates, strict=True)
    return float(values[tuple(0 if length == 1 else i for length, i in pairs)])
