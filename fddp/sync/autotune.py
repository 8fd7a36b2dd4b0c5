"""Search for a faster bucket plan by measurements of real steps.

All ranks end with the same plan: the times of the slowest rank decide, and rank 0 makes the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import malformed_message_error, optional
from fddp.core.sim.cost import CostModel
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import simulate
from fddp.errors import PeerError, UnevenError
from fddp.runtime.agreement import exchange
from fddp.runtime.results import Devices
from fddp.runtime.step_info import ready_times_s
from fddp.sync.engine import Engine, any_rank_has_input
from fddp.sync.measure import DEFAULT_SIZES_BYTES, largest, measure_axes
from fddp.sync.terms_codec import plan_on_leaves

_WARM_STEPS = 2  # the plan is rebuilt, and memory is allocated
_TIMED_STEPS = 2  # steps of each plan in a round
_EVERYTHING_BYTES = 2**62


@dataclass(frozen=True)
class TuneReport:
    """Expected and measured times of tuning; the same on all ranks.

    Attributes:
        before: the previous plan.
        after: the best plan in simulation.
        adopted: True if `after` is now in force, because its steps were faster.
        costs: cost model of the links, by axis.
        ready_times_s: for each leaf of the plan, seconds from the start of a step until its
            gradient arrived, on the slowest rank; NaN for leaves without gradient.
        simulated_before_s, simulated_after_s: seconds of a step in simulation.
        measured_before_s, measured_after_s: seconds of a step, median of the slowest rank's.
        transport: name of the transport on which links and steps were measured.
    """

    before: BucketPlan
    after: BucketPlan
    adopted: bool
    costs: dict[str, CostModel]
    ready_times_s: tuple[float, ...]
    simulated_before_s: float
    simulated_after_s: float
    measured_before_s: float
    measured_after_s: float
    transport: str

    @property
    def expected_gain(self) -> float:
        """Share of the step that the new plan saves in simulation."""
        return 1.0 - self.simulated_after_s / self.simulated_before_s

    @property
    def measured_gain(self) -> float:
        """Share of the step that the new plan saved in measurements."""
        return 1.0 - self.measured_after_s / self.measured_before_s

    def __str__(self) -> str:
        """Return a summary of a few lines."""
        verdict = "the new plan is kept" if self.adopted else "the old plan is kept"
        if self.after == self.before:
            verdict = "the plan is the best already"
        return "\n".join(
            [
                f"transport {self.transport}",
                f"buckets   {len(self.before.buckets)} before, {len(self.after.buckets)} after",
                f"expected  {_ms(self.simulated_before_s)} before, "
                f"{_ms(self.simulated_after_s)} after ({self.expected_gain:+.1%} gain)",
                f"measured  {_ms(self.measured_before_s)} before, "
                f"{_ms(self.measured_after_s)} after ({self.measured_gain:+.1%} gain): {verdict}",
            ]
        )


def tune(engine: Engine, call: Callable[[], object], rounds: int) -> TuneReport:
    """Implement `GradSync.tune`; `call` takes one step."""
    engine.check()
    _check(engine, rounds)
    for _ in range(_WARM_STEPS):
        _timed(engine, call)
    before = engine.program.plan
    kept = before
    try:
        costs = _costs(engine, before)
        ready_s = _ready_times_s(engine, call, rounds)
        after = _planned(engine, before, ready_s, costs)
        timings = _compared(engine, call, (before, after), rounds)
        adopted = after != before and timings[1] < timings[0]
        kept = after if adopted else before
    finally:
        if not engine.is_closed:
            engine.set_plan(kept)
    simulated = (
        simulate(engine.schedule_of(before, engine.hook), costs, ready_s).step_s,
        simulate(engine.schedule_of(after, engine.hook), costs, ready_s).step_s,
    )
    transport = engine.transport.name
    return TuneReport(
        before, after, adopted, costs, tuple(ready_s), *simulated, *timings, transport
    )


def _check(engine: Engine, rounds: int) -> None:
    received = exchange(engine.transport, repr(rounds), str, "tuning")
    check_equal("rounds", received, "pass the same rounds on every rank")
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"rounds must be an int of at least 1, got {rounds!r}")
    if engine.round is not None:
        raise UnevenError("tune synchronises many times; call it outside the loop of fddp.uneven")
    if engine.terms.schedule is not None or engine.program.schedule.result != "replicated_mean":
        raise ValueError(
            "the schedule can't change, because it was passed by the caller or gives shards; tune "
            "a GradSync with algorithm='all_reduce' or 'hierarchical', and use its plan"
        )


def _timed(engine: Engine, call: Callable[[], object]) -> tuple[float, float]:
    """Take a step, and return its start time and duration. Failures are reported to all ranks."""
    steps, error = engine.step, None
    start_s = time.perf_counter()
    try:
        call()
        engine.check()
    except BaseException as raised:
        error = raised
        engine.forget_report()  # all ranks raise here
    took_s = time.perf_counter() - start_s
    if engine.step == steps:  # the other ranks wait in a synchronisation
        engine.fail_step(
            error
            or ValueError(
                f"rank {engine.transport.rank}: the step did not synchronise; pass a step made by "
                f"value_and_grad of this GradSync"
            )
        )
    if error is not None and (engine.is_closed or engine.last_failed):
        raise error  # an error of the synchronisation: all ranks raise
    if any_rank_has_input(engine, error is not None):
        raise error or PeerError("another rank failed after its step was synchronised")
    return start_s, took_s


def _costs(engine: Engine, plan: BucketPlan) -> dict[str, CostModel]:
    total_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    sizes = [size for size in DEFAULT_SIZES_BYTES if size <= total_bytes]
    measured = measure_axes(
        engine.transport,
        engine.terms.topology,
        sizes_bytes=sizes if len(sizes) > 1 else DEFAULT_SIZES_BYTES[:2],
        device=Devices(engine.devices)[plan.buckets[0].device],
    )
    return {axis: CostModel.fit(samples) for axis, samples in measured.items()}


def _ready_times_s(engine: Engine, call: Callable[[], object], steps: int) -> list[float]:
    """Measure the ready time of each leaf, with one large bucket that does not disturb backward."""
    plan = engine.program.plan
    engine.set_plan(plan_leaves(plan.leaves, order=plan.order, caps_bytes=[_EVERYTHING_BYTES]))
    _timed(engine, call)
    seen: list[list[float]] = []
    for _ in range(steps):
        with engine.collect_steps() as taken:
            start_s, _took_s = _timed(engine, call)
        ready_s = ready_times_s(taken[-1])
        seen.append([ready_s[leaf] - start_s for leaf in plan.reduced])
    slowest = largest(
        engine.transport, [_median_of_present(column) for column in zip(*seen, strict=True)]
    )
    by_leaf = [math.nan] * len(plan.leaves)
    for leaf, time_s in zip(plan.reduced, slowest, strict=True):
        by_leaf[leaf] = time_s
    return by_leaf


def _median_of_present(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return median(present) if present else math.nan


def _planned(
    engine: Engine, before: BucketPlan, ready_s: Sequence[float], costs: dict[str, CostModel]
) -> BucketPlan:
    transport, terms = engine.transport, engine.terms
    own = None
    if transport.rank == 0:
        target = Target(costs, terms.topology, terms.algorithm, terms.deterministic)
        own = optimal_plan(before.leaves, before.order, ready_s, target).to_json()
    received = exchange(transport, own, optional(str), "tuned plan")[0]
    try:
        plan = plan_on_leaves(BucketPlan.from_json(received or ""), before.leaves)
    except ValueError as error:
        raise malformed_message_error(0, "tuned plan", error) from error
    digests = exchange(transport, plan.shared_digest, str, "tuned plan")
    way_out = "build every rank's parameters alike"
    check_equal("the digest of the tuned plan", [digest[:12] for digest in digests], way_out)
    boundaries = [bucket.leaves for bucket in plan.buckets]
    return before if boundaries == [bucket.leaves for bucket in before.buckets] else plan


def _compared(
    engine: Engine, call: Callable[[], object], plans: tuple[BucketPlan, BucketPlan], rounds: int
) -> tuple[float, float]:
    """Return the median step time of each plan, on the slowest rank. The plans take turns."""
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for plan, own_s in zip(plans, times_s, strict=True):
            engine.set_plan(plan)
            _timed(engine, call)
            own_s.extend(_timed(engine, call)[1] for _ in range(_TIMED_STEPS))
    count = rounds * _TIMED_STEPS
    slowest_s = largest(engine.transport, [*times_s[0], *times_s[1]])
    return median(slowest_s[:count]), median(slowest_s[count:])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
