"""How long a step takes: carries a schedule out on a model of the links, by the runtime's rules.

The rules, for each rank:

- Operations launch in schedule order. While backward runs, the packing and the collectives of a
  bucket launch as soon as its gradients are there and what they depend on is done. From the last
  bucket's packing on, they wait for the end of backward.
- Repairs are carried out for the buckets that are said to be late, and passed over for all others;
  like sparse buckets and unpacking, they wait for the control word. Where that rides, its bytes are
  added to those of its carrier.
- A collective begins when all ranks of its group have launched it and the group's earlier ones are
  done; different groups work in parallel. While backward runs on a rank of the group, it advances
  at the rate `CostModel.overlap`.
- What a rank does alone takes no time: the copies into buckets are within the measured times at
  which gradients were ready.

Sparse buckets travel as three all-gathers whose sizes no plan knows; together they are taken to
move as many bytes as the dense leaf has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec
from fddp.core.schedule.op import Op, is_collective
from fddp.core.schedule.piggyback import control_layout
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import MOST_S, CollectiveKind, CostModel, FloatArray
from fddp.core.timeline import COMPUTE, Span, Timeline, backward_span
from fddp.errors import ScheduleError

Cost = CostModel | Mapping[str, CostModel]
ReadyTimes = Sequence[float] | npt.NDArray[np.floating] | Mapping[str, float]

MOST_SPREAD = 10.0
"""Of jitter: one rank in a thousand is then slower by a factor of 10**13."""

_DURING_BACKWARD = frozenset({"pack", "all_reduce", "reduce_scatter", "all_gather"})
_MOST_RANKS = 2**22  # that are simulated one by one: some 100 bytes each, for each group of axes
_AFTER_CONTROL = frozenset({"gather", "unpack"})
_COUNTED_AS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "control": "control",
    "gather": "all_gather",
}


@dataclass(frozen=True)
class Jitter:
    """How ranks differ: each computes slower than measured by a factor of its own.

    Attributes:
        spread: standard deviation of the factor's natural logarithm; the median is 1.
        straggler_rate: share of the ranks that are stragglers.
        straggler_factor: what their factor is multiplied by.

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
        """A factor for each rank, shape `(ranks,)`, float64; the same for the same seed."""
        generator = np.random.default_rng(seed)
        factors = generator.lognormal(0.0, self.spread, ranks)
        stragglers = generator.random(ranks) < self.straggler_rate
        return np.where(stragglers, factors * self.straggler_factor, factors)


def simulate(
    schedule: Schedule,
    cost: Cost,
    ready_times_s: ReadyTimes,
    *,
    jitter: Jitter | None = None,
    seed: int = 0,
    late: Collection[int] = (),
) -> Timeline:
    """What one step of a schedule would take; the rules are at the top of this file.

    Costs the same for any number of ranks without jitter; with it, every rank is simulated.

    Args:
        schedule: what is carried out.
        cost: the model of the links, or one for each axis of the topology. A group along several
            axes has the worst of theirs.
        ready_times_s: seconds from the start of the step until the gradient of each leaf is there,
            for each of `schedule.plan.leaves`, or by path. NaN is a leaf that gets none, which
            holds nothing up. Leaves in no bucket do not matter. The last one ends backward.
        jitter: by how much ranks differ; None for not at all.
        seed: of the jitter.
        late: buckets that are repaired.

    Returns:
        The timeline of the rank that is the last to finish, with the step time of each rank.

    Raises:
        ValueError: times that are negative, above 1e9, missing or of another length; an axis
            without a model; a late bucket that the plan does not have; jitter on over 4 million
            ranks.
        ScheduleError: operations that wait for later ones, or name buckets, axes or shards that
            do not exist.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> leaves = [LeafSpec("a", (250_000,), "float32"), LeafSpec("b", (250_000,), "float32")]
        >>> plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1_000_000])
        >>> schedule = make_schedule(plan, Topology(world=2))
        >>> simulate(schedule, CostModel(1e-5, 1e-9), {"b": 0.004, "a": 0.010})
        Timeline(rank 0, step 11.021 ms, backward 10.000 ms, exposed 1.021 ms, 50% hidden)
    """
    plan, topology = schedule.plan, schedule.topology
    leaves_s = ready_seconds(plan.leaves, plan.reduced, ready_times_s)
    buckets_s = [float(np.max(leaves_s[list(b.leaves)])) for b in plan.buckets]
    tasks = _tasks(schedule, cost, late)
    shape = [size for _, size in topology.axes]
    if jitter is None:
        slowdown = np.ones([1] * len(shape))
    else:
        if topology.world_size > _MOST_RANKS:
            raise ValueError(
                f"jitter simulates each of {topology.world_size} ranks, and at most {_MOST_RANKS} "
                f"fit; leave it out, or take a smaller topology"
            )
        slowdown = jitter.draw(topology.world_size, seed).reshape(shape)
    rank = 0
    if jitter is not None:
        rank = int(np.argmax(_run(tasks, buckets_s, slowdown)))
    spans: list[Span] = []
    place = topology.coordinates(rank)
    steps_s = _run(tasks, buckets_s, slowdown, recorder=_Recorder(schedule, place, spans))
    backward_end_s = max(buckets_s, default=0.0) * _at(slowdown, place)
    return Timeline(
        (backward_span(backward_end_s), *spans),
        backward_end_s,
        _at(steps_s, place),
        rank,
        tuple(steps_s.ravel().tolist()),
    )


def ready_seconds(
    leaves: Sequence[LeafSpec], reduced: Sequence[int], ready_times_s: ReadyTimes
) -> FloatArray:
    """When each leaf stops holding its bucket up: shape `(len(leaves),)`, float64.

    Args:
        leaves: every leaf of a tree.
        reduced: indices of those that matter; the others are 0 in the result.
        ready_times_s: as in `simulate`; NaN becomes 0.

    Raises:
        ValueError: times that are negative, above 1e9, missing or of another length.
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
    leaves: Sequence[LeafSpec], reduced: Sequence[int], ready_times_s: Mapping[str, float]
) -> FloatArray:
    paths = [leaf.path for leaf in leaves]
    unknown = sorted(ready_times_s.keys() - set(paths))
    missing = sorted({paths[leaf] for leaf in reduced} - ready_times_s.keys())
    if unknown or missing:
        what, which = ("does not know", unknown) if unknown else ("needs", missing)
        raise ValueError(
            f"ready_times_s has {len(ready_times_s)} paths; the plan of {len(paths)} leaves {what} "
            f"{which[0]!r} and {len(which) - 1} more; NaN says that a leaf gets no gradient"
        )
    return np.array([ready_times_s.get(path, math.nan) for path in paths], dtype=np.float64)


def group_model(cost: Cost, topology: Topology, axes: Collection[str]) -> CostModel:
    """The model of a group along these axes: the worst of those with more than one place.

    Raises:
        ValueError: an axis has no model.
    """
    if isinstance(cost, CostModel):
        return cost
    models = []
    for name, size in topology.axes:
        if name in axes and size > 1:
            if name not in cost:
                raise ValueError(
                    f"cost has models of {', '.join(map(repr, cost)) or 'no axis'}, and none of "
                    f"the axis {name!r} of {topology}"
                )
            models.append(cost[name])
    return CostModel.worst(models) if models else CostModel(0.0, 0.0)


def collective_bytes(schedule: Schedule, op: Op) -> float:
    """Bytes of the whole buffer that a group works on in this operation, with those of the control
    word where it rides in it."""
    if op.kind == "control":
        return _word_bytes(schedule)
    # Before an all-gather, a rank has only its own part of what the group works on.
    sharding = op.region.shard
    if op.kind == "all_gather":
        sharding = sharding[: len(sharding) - len(op.axes)]
    elements = (op.region.stop - op.region.start) / schedule.topology.size(sharding)
    nbytes = elements * ITEM_BYTES[schedule.wire_dtypes[op.bucket]]
    carries = schedule.piggyback_op >= 0 and op == schedule.ops[schedule.piggyback_op]
    return nbytes + _word_bytes(schedule) if carries else nbytes


def _word_bytes(schedule: Schedule) -> float:
    layout = control_layout(schedule, with_order=False)
    return float(layout.size * ITEM_BYTES[layout.format])


def collective_time_s(schedule: Schedule, op: Op, model: CostModel) -> float:
    """Seconds that a collective takes while nothing disturbs it."""
    ranks, kind = schedule.topology.size(op.axes), _COUNTED_AS[op.kind]
    time_s = model.time_s(kind, collective_bytes(schedule, op), ranks)
    if op.kind == "gather":  # counts and indices travel before the values
        time_s += 2.0 * model.time_s(kind, 0.0, ranks)
    return time_s


class _Task(NamedTuple):
    """An operation that is carried out."""

    position: int
    ready: int  # the bucket that it waits for, or -1 for the end of backward
    waits: tuple[int, ...]  # positions of the collectives that must be done
    group: tuple[int, ...] | None  # numbers of the axes along which ranks meet; None for alone
    work_s: float
    overlap: float


def _tasks(schedule: Schedule, cost: Cost, late: Collection[int]) -> list[_Task]:
    buckets = len(schedule.plan.buckets)
    wrong = sorted(set(late) - set(range(buckets)))
    if wrong:
        raise ValueError(f"late holds bucket {wrong[0]}; the plan has {buckets} buckets")
    names = schedule.topology.names
    models = {axes: group_model(cost, schedule.topology, axes) for axes in schedule.groups}
    tasks: list[_Task] = []
    done_by: list[tuple[int, ...]] = []  # for each operation, the collectives that it amounts to
    control: tuple[int, ...] = ()
    knows = False  # whether the control word must be in
    for position, op in enumerate(schedule.ops):
        _check_names(schedule, position)
        waits = [wait for dep in op.deps for wait in done_by[dep]]
        knows = knows or op.when != "always" or op.kind in _AFTER_CONTROL
        if knows:  # also to pass over an operation, and so for all after it
            waits.extend(control)
        if op.when != "always" and op.bucket not in late:
            done_by.append(tuple(dict.fromkeys(waits)))
            continue
        is_early = op.kind in _DURING_BACKWARD and op.when == "always"
        ready = op.bucket if is_early and op.bucket not in schedule.sequence[-1:] else -1
        group, work_s, overlap = None, 0.0, 1.0
        if is_collective(op):
            group = tuple(names.index(axis) for axis in op.axes)
            model = models[op.axes]
            work_s, overlap = collective_time_s(schedule, op, model), model.overlap
        tasks.append(_Task(position, ready, tuple(dict.fromkeys(waits)), group, work_s, overlap))
        # What a rank did alone is done: its later operations come later anyway.
        done_by.append(() if group is None else (position,))
        if position == max(schedule.control, schedule.piggyback_op):
            control = (position,)
    return tasks


def _check_names(schedule: Schedule, position: int) -> None:
    """What a schedule written by hand may get wrong, as far as it would stop a simulation."""
    op, plan, names = schedule.ops[position], schedule.plan, schedule.topology.names
    problem = None
    if any(not 0 <= dep < position for dep in op.deps):
        problem = f"waits for operations {op.deps}, which must come before it"
    elif op.kind != "control" and not 0 <= op.bucket < len(plan.buckets):
        problem = f"names bucket {op.bucket} of {len(plan.buckets)}"
    elif not {*op.axes, *op.region.shard} <= set(names):
        problem = f"names axes that {schedule.topology} does not have"
    if problem is not None:
        raise ScheduleError(
            f"{schedule.describe(position)} {problem}; fddp.check_schedule judges schedules",
            op=position,
            bucket=op.bucket,
        )


class _Recorder(NamedTuple):
    """Writes down what one rank sees."""

    schedule: Schedule
    place: tuple[int, ...]
    spans: list[Span]

    def record_(self, task: _Task, launch: FloatArray, start: FloatArray, end: FloatArray) -> None:
        op = self.schedule.ops[task.position]
        label = op.kind if op.kind == "control" else f"{op.kind} {op.bucket}"
        self.spans.append(
            Span(
                task.position,
                op.kind,
                op.bucket,
                COMPUTE if task.group is None else "+".join(op.axes) or "alone",
                label if op.when == "always" else f"{label} ({op.when})",
                _at(launch, self.place),
                _at(start, self.place),
                _at(end, self.place),
            )
        )


def _run(
    tasks: Sequence[_Task],
    buckets_s: Sequence[float],
    slowdown: FloatArray,
    recorder: _Recorder | None = None,
) -> FloatArray:
    """When each rank is done.

    Arrays have one dimension for each axis of the topology. Along those in which all ranks have the
    same value, as those of one group have, they have length 1.
    """
    backward_end = max(buckets_s, default=0.0) * slowdown
    group_ends: dict[tuple[int, ...], FloatArray] = {}  # when backward has ended in each group
    free: dict[tuple[int, ...], FloatArray] = {}  # when each group's earlier collectives are done
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
        if recorder is not None:
            recorder.record_(task, cursor, start, end)
    finish = np.maximum(cursor, backward_end)
    for last in free.values():
        np.maximum(finish, last, out=finish)
    return finish


def _end(start: FloatArray, work_s: float, overlap: float, backward_end: FloatArray) -> FloatArray:
    """When work is done that advances at the rate `overlap` before the end of backward."""
    disturbed = np.maximum(backward_end - start, 0.0)
    ends_within = work_s <= disturbed * overlap
    return start + np.where(ends_within, work_s / overlap, work_s + disturbed * (1.0 - overlap))


def _at(values: FloatArray, place: tuple[int, ...]) -> float:
    """The value of the rank at `place`."""
    index = tuple(0 if length == 1 else i for length, i in zip(values.shape, place, strict=True))
    return float(values[index])
