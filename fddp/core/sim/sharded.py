"""Simulation of sharded schedules over several steps, all ranks alike.

Rules, the same as those of the runtime:

- A step computes its forward pass, its backward pass and the update of the shards. Forward waits
  before the first use of a bucket until its all-gather, and those before it in the schedule, are
  done. The update waits for all reduce-scatters and the control word.
- Operations launch in the order of their schedule: those of gradients when their bucket is ready
  (the last bucket at the end of backward), the first all-gather of each bucket after the update,
  further ones of several axes when forward waits for the bucket, or for one before it if the
  all-gather that they wait for is done by then.
- The collectives of a group run one after the other, and different groups in parallel. While the
  rank computes, they advance at the speed `CostModel.overlap`.
- Packing and unpacking take no time; measured compute times include them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.sharded import ShardedSchedule
from fddp.core.sim.cost import MOST_S
from fddp.core.sim.simulator import (
    Cost,
    ReadyTimes,
    collective_time_s,
    group_model,
    ready_seconds,
)
from fddp.core.timeline import COMPUTE, Span

_MOST_STEPS = 1000


@dataclass(frozen=True)
class ShardedTimeline:
    """Simulated steps of a sharded schedule; seconds since the start of the first step.

    Attributes:
        spans: forward (in parts, between waits), backward and update of each step, and collectives
            in the order of their launches.
        begins_s: start of each step, and the end of the last one.
        compute_s: seconds of compute of a step.
        communication_s: seconds that the busiest group communicates in a step, undisturbed.
    """

    spans: tuple[Span, ...]
    begins_s: tuple[float, ...]
    compute_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """Duration of the last step, which equals that of all later ones."""
        return self.begins_s[-1] - self.begins_s[-2]

    @property
    def ratio(self) -> float:
        """`step_s` over the larger of compute and communication; 1 if all of the other is hidden.
        NaN if both are 0."""
        least_s = max(self.compute_s, self.communication_s)
        return self.step_s / least_s if least_s else math.nan


@dataclass(frozen=True)
class ComputeTimes:
    """Compute of one step on one rank.

    Attributes:
        forward_s: seconds of a forward pass.
        use_times_s: seconds of compute from the start of forward until the first use of each leaf,
            one per leaf of the plan, or by path.
        ready_times_s: seconds from the start of backward until the gradient of each leaf is ready,
            in the same form; the last one ends backward.
        update_s: seconds of the update of a rank's shards.

    Raises:
        ValueError: `forward_s` or `update_s` is negative or above 1e9.
    """

    forward_s: float
    use_times_s: ReadyTimes
    ready_times_s: ReadyTimes
    update_s: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in (("forward_s", self.forward_s), ("update_s", self.update_s)):
            if not 0.0 <= seconds <= MOST_S:
                raise ValueError(f"{name} must be from 0 to {MOST_S:.0e}, got {seconds!r}")


def simulate_sharded(
    schedule: ShardedSchedule, cost: Cost, times: ComputeTimes, *, steps: int = 2
) -> ShardedTimeline:
    """Simulate steps of a sharded schedule; the rules are at the top of this file.

    The first step begins with whole parameters on all ranks.

    Args:
        schedule: schedule to simulate.
        cost: model of the links, as in `fddp.simulate`.
        times: compute of a step.
        steps: number of steps, from 2 to 1000.

    Raises:
        ValueError: an argument is invalid; as in `fddp.simulate`.
        ScheduleError: the schedule of the gradients has unknown buckets or axes.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.schedule.sharded import make_sharded_schedule
        >>> from fddp.core.sim.cost import CostModel
        >>> leaves = [LeafSpec("a", (250_000,), "float32"), LeafSpec("b", (250_000,), "float32")]
        >>> plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1_000_000])
        >>> reduce = make_schedule(plan, 2, algorithm="reduce_scatter")
        >>> times = ComputeTimes(0.004, {"a": 0.0, "b": 0.002}, {"b": 0.002, "a": 0.004})
        >>> for gather in ("step_end", "next_forward"):
        ...     schedule = make_sharded_schedule(reduce, gather)
        ...     found = simulate_sharded(schedule, CostModel(0.0, 1e-9), times)
        ...     print(f"{found.step_s * 1e3:.2f} ms")
        9.50 ms
        9.00 ms
    """
    if not isinstance(schedule, ShardedSchedule):
        raise TypeError(
            f"schedule must be a ShardedSchedule, got a {type(schedule).__name__}; write "
            f"make_sharded_schedule(schedule)"
        )
    if type(steps) is not int or not 2 <= steps <= _MOST_STEPS:
        raise ValueError(f"steps must be an int from 2 to {_MOST_STEPS}, got {steps!r}")
    plan = schedule.plan
    ready_s = ready_seconds(plan.leaves, plan.reduced, times.ready_times_s)
    use_s = ready_seconds(plan.leaves, plan.reduced, times.use_times_s, "use_times_s")
    run = _Run(
        schedule,
        cost,
        times,
        [float(np.max(ready_s[list(bucket.leaves)])) for bucket in plan.buckets],
        [float(np.min(use_s[list(bucket.leaves)])) for bucket in plan.buckets],
    )
    begins_s = [0.0]
    for _ in range(steps):
        run.step()
        begins_s.append(run.link.now_s)
    compute_s = times.forward_s + max(run.ready_s, default=0.0) + times.update_s
    return ShardedTimeline(
        (*run.spans, *run.link.spans(schedule)), tuple(begins_s), compute_s, run.link.busy_s / steps
    )


@dataclass
class _Work:
    """A collective in flight."""

    is_gather: bool
    position: int
    lane: str
    left_s: float
    overlap: float
    launch_s: float
    start_s: float = math.nan
    end_s: float = math.nan

    @property
    def is_done(self) -> bool:
        return not math.isnan(self.end_s)


@dataclass
class _Link:
    """Groups that carry collectives one after the other, and the clock."""

    now_s: float = 0.0
    launched: list[_Work] = field(default_factory=list)
    queues: dict[str, deque[_Work]] = field(default_factory=dict)
    totals_s: dict[str, float] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Seconds of work of the busiest group."""
        return max(self.totals_s.values(), default=0.0)

    def launch(self, work: _Work) -> None:
        """Add a collective to the queue of its group."""
        self.launched.append(work)
        self.queues.setdefault(work.lane, deque()).append(work)
        self.totals_s[work.lane] = self.totals_s.get(work.lane, 0.0) + work.left_s

    def compute(self, seconds: float) -> None:
        """Let time pass while the rank computes."""
        until_s = self.now_s + max(0.0, seconds)
        while self._advance(until_s, computes=True):
            pass
        self.now_s = until_s

    def wait(self, works: Collection[_Work]) -> None:
        """Let time pass until collectives are done."""
        while not all(work.is_done for work in works):
            self._advance(math.inf, computes=False)

    def _advance(self, until_s: float, *, computes: bool) -> bool:
        """Advance to the next end of a collective, or to a time; return False for the latter."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        ends_s = []
        for work in heads:
            work.start_s = self.now_s if math.isnan(work.start_s) else work.start_s
            ends_s.append(self.now_s + work.left_s / (work.overlap if computes else 1.0))
        next_s = min([until_s, *ends_s])
        for work, end_s in zip(heads, ends_s, strict=True):
            if end_s <= next_s:
                work.left_s, work.end_s = 0.0, next_s
                self.queues[work.lane].popleft()
            else:
                work.left_s -= (next_s - self.now_s) * (work.overlap if computes else 1.0)
        self.now_s = next_s
        return next_s < until_s

    def spans(self, schedule: ShardedSchedule) -> list[Span]:
        """Return the collectives; those that have not finished end now."""
        spans = []
        for work in self.launched:
            op = (schedule.gather if work.is_gather else schedule.reduce).ops[work.position]
            start_s = self.now_s if math.isnan(work.start_s) else work.start_s
            end_s = work.end_s if work.is_done else self.now_s
            times_s = work.launch_s, start_s, end_s
            label = f"{op.kind} {op.bucket}" if op.bucket >= 0 else op.kind
            spans.append(Span(work.position, op.kind, op.bucket, work.lane, label, *times_s))
        return spans


class _Operations:
    """Operations of a schedule in one step, which are launched in order."""

    def __init__(self, schedule: Schedule, cost: Cost, link: _Link, *, is_gather: bool) -> None:
        self._schedule, self._link, self._is_gather = schedule, link, is_gather
        self._models = {a: group_model(cost, schedule.topology, a) for a in schedule.groups}
        self._cursor = 0
        self._works: dict[int, _Work] = {}  # by position
        ops = schedule.ops
        self._further = deque(  # collectives that wait for others
            position
            for position, op in enumerate(ops)
            if is_collective(op) and any(is_collective(ops[dep]) for dep in op.deps)
        )

    def poll(self, ready: Collection[int]) -> None:
        """Launch what has to wait neither for buckets that are not `ready` nor for collectives."""
        ops = self._schedule.ops
        while self._cursor < len(ops):
            op = ops[self._cursor]
            is_local = op.kind in ("unpack", "gather") or op.when != "always"
            if is_local or (op.bucket >= 0 and op.bucket not in ready):
                return
            if any(not work.is_done for work in self._awaited(self._cursor)):
                return
            self._launch(self._cursor)
            self._cursor += 1

    def run(self, stop: int) -> None:
        """Launch all operations before a position, and wait where they have to."""
        while self._cursor < stop:
            self._link.wait(self._awaited(self._cursor))
            self._launch(self._cursor)
            self._cursor += 1

    def launch_ahead(self) -> None:
        """Launch the collectives that have to wait for no other, up to the first that has to."""
        while self._further:
            if not all(work.is_done for work in self._awaited(self._further[0])):
                return
            self._launch(self._further.popleft())

    def _awaited(self, position: int) -> list[_Work]:
        op = self._schedule.ops[position]
        if op.when != "always":
            return []
        return [self._works[dep] for dep in op.deps if dep in self._works]

    def _launch(self, position: int) -> None:
        """Launch an operation, unless it was launched ahead."""
        op, link = self._schedule.ops[position], self._link
        if not is_collective(op) or op.when != "always" or position in self._works:
            return
        model = self._models[op.axes]
        lane, work_s = "+".join(op.axes), collective_time_s(self._schedule, op, model)
        work = _Work(self._is_gather, position, lane, work_s, model.overlap, link.now_s)
        self._works[position] = work
        link.launch(work)


class _Run:
    """Steps of a sharded schedule on one rank."""

    def __init__(
        self,
        schedule: ShardedSchedule,
        cost: Cost,
        times: ComputeTimes,
        ready_s: Sequence[float],
        use_s: Sequence[float],
    ) -> None:
        self.schedule, self.cost, self.times = schedule, cost, times
        self.ready_s = ready_s
        self.use_s = [min(time_s, times.forward_s) for time_s in use_s]
        self.link = _Link()
        self.spans: list[Span] = []
        self._gather: _Operations | None = None
        self._unpacks = {
            op.bucket: position + 1
            for position, op in enumerate(schedule.gather.ops)
            if op.kind == "unpack"
        }

    def step(self) -> None:
        """Take one step."""
        self._forward()
        self._backward()
        self._compute("update", self.times.update_s)
        schedule, link = self.schedule, self.link
        self._gather = _Operations(schedule.gather, self.cost, link, is_gather=True)
        self._gather.poll(range(len(schedule.plan.buckets)))
        at_end = {*range(len(schedule.plan.buckets))} - {*schedule.crossing}
        self._gather.run(max((self._unpacks[bucket] for bucket in at_end), default=0))

    def _forward(self) -> None:
        done_s = 0.0
        if self._gather is not None:
            for bucket in sorted(range(len(self.use_s)), key=self.use_s.__getitem__):
                self._compute("forward", self.use_s[bucket] - done_s)
                self._gather.launch_ahead()
                self._gather.run(self._unpacks[bucket])
                self._gather.launch_ahead()
                done_s = self.use_s[bucket]
        self._compute("forward", self.times.forward_s - done_s)

    def _backward(self) -> None:
        start_s = self.link.now_s
        reduce = self.schedule.reduce
        operations = _Operations(reduce, self.cost, self.link, is_gather=False)
        last = reduce.sequence[-1:]
        ready: set[int] = set()
        end_s = max(self.ready_s, default=0.0)
        for bucket in sorted(range(len(self.ready_s)), key=self.ready_s.__getitem__):
            self.link.compute(start_s + self.ready_s[bucket] - self.link.now_s)
            ready.add(bucket)
            operations.poll(ready.difference(last))
        self._note("backward", start_s, start_s + end_s)
        self.link.compute(start_s + end_s - self.link.now_s)
        operations.run(len(reduce.ops))

    def _compute(self, kind: str, seconds: float) -> None:
        start_s = self.link.now_s
        self.link.compute(seconds)
        self._note(kind, start_s, self.link.now_s)

    def _note(self, kind: str, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(-1, kind, -1, COMPUTE, kind, start_s, start_s, end_s))
