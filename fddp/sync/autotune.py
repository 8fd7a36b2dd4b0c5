"""Finds a faster bucket plan for a real step: measures, plans, compares, and keeps what is better.

Every rank takes the same steps and ends with the same plan: times are exchanged and the slowest
rank's count, and rank 0 plans for all.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fddp.core.plan.plan import Bucket, BucketPlan, plan_leaves
from fddp.core.protocol.messages import Schema, decode, malformed_message_error
from fddp.core.sim.cost import CostModel
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import simulate
from fddp.errors import PeerError, PlanMismatchError, UnevenError
from fddp.runtime.agreement import exchange
from fddp.runtime.results import Devices
from fddp.sync.engine import Engine, any_rank_has_input
from fddp.sync.measure import DEFAULT_SIZES_BYTES, largest, measure_axes

_WARM_STEPS = 2  # until a plan has been rebuilt and memory is warm
_TIMED_STEPS = 2  # of each plan in a round
_EVERYTHING_BYTES = 2**62
_PLAN: Schema = {
    "buckets": [
        {
            "leaves": [int],
            "offsets": [int],
            "numel": int,
            "dtype": str,
            "device": str,
            "cap_bytes": int,
            "sparse": bool,
        }
    ],
    "caps": [int],
    "order": [int],
}


@dataclass(frozen=True)
class TuneReport:
    """What tuning expected and what it then measured; the same on all ranks.

    Attributes:
        before: the plan that was in force.
        after: the best plan in simulation.
        adopted: whether `after` is in force now, because it was measured to be faster.
        costs: the model of the links, for each axis.
        ready_times_s: for each leaf of the plan, seconds from the start of a step until its
            gradient was there, on the slowest rank; NaN where none came.
        simulated_before_s, simulated_after_s: seconds of a step in simulation.
        measured_before_s, measured_after_s: seconds of a step, median of the slowest rank's.
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

    @property
    def expected_gain(self) -> float:
        """Share of the step that the new plan saves in simulation."""
        return 1.0 - self.simulated_after_s / self.simulated_before_s

    @property
    def measured_gain(self) -> float:
        """Share of the step that it saved when it was tried."""
        return 1.0 - self.measured_after_s / self.measured_before_s

    def __str__(self) -> str:
        """A few lines for a person."""
        verdict = "the new plan is kept" if self.adopted else "the old plan is kept"
        if self.after == self.before:
            verdict = "the plan is the best already"
        return "\n".join(
            [
                f"buckets   {len(self.before.buckets)} before, {len(self.after.buckets)} after",
                f"expected  {_ms(self.simulated_before_s)} before, "
                f"{_ms(self.simulated_after_s)} after ({self.expected_gain:+.1%} gain)",
                f"measured  {_ms(self.measured_before_s)} before, "
                f"{_ms(self.measured_after_s)} after ({self.measured_gain:+.1%} gain): {verdict}",
            ]
        )


def tune(engine: Engine, call: Callable[[], object], rounds: int) -> TuneReport:
    """`GradSync.tune` on its engine; `call` takes one step."""
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
        simulate(engine.terms.schedule_of(before), costs, ready_s).step_s,
        simulate(engine.terms.schedule_of(after), costs, ready_s).step_s,
    )
    return TuneReport(before, after, adopted, costs, tuple(ready_s), *simulated, *timings)


def _check(engine: Engine, rounds: int) -> None:
    received = exchange(engine.transport, repr(rounds), str, "tuning")
    if len({*received}) > 1:
        raise PlanMismatchError(
            f"rounds are {', '.join(received)} by rank; tune with the same on every rank"
        )
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"rounds must be an int of at least 1, got {rounds!r}")
    if engine.round is not None:
        raise UnevenError("tune synchronises many times; call it outside the loop of fddp.uneven")
    if engine.terms.schedule is not None or engine.program.schedule.result != "replicated_mean":
        raise ValueError(
            "a schedule that was passed in, and one whose shards are in use, can't change; tune a "
            "GradSync with algorithm='all_reduce' or 'hierarchical', and pass on its plan"
        )


def _timed(engine: Engine, call: Callable[[], object]) -> tuple[float, float]:
    """When a step began, and how long it took; what goes wrong in it is told to all ranks."""
    steps, error = engine.step, None
    start_s = time.perf_counter()
    try:
        call()
    except BaseException as raised:
        error = raised
    took_s = time.perf_counter() - start_s
    if engine.step == steps:  # the others wait in the synchronisation that this rank left out
        engine.fail_step(error or _no_step(engine))
    if error is not None and (engine.is_closed or engine.last_failed):
        raise error  # from the synchronisation itself: all ranks raise
    if any_rank_has_input(engine, error is not None):
        raise error or PeerError("another rank failed after its step was synchronised")
    return start_s, took_s


def _no_step(engine: Engine) -> ValueError:
    return ValueError(
        f"rank {engine.transport.rank}: the step did not synchronise; pass one that was made by "
        f"value_and_grad of the GradSync that is tuned"
    )


def _costs(engine: Engine, plan: BucketPlan) -> dict[str, CostModel]:
    """By axis, from collectives of the sizes that buckets of this plan can have."""
    total_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    sizes = [size for size in DEFAULT_SIZES_BYTES if size <= total_bytes]
    measured = measure_axes(
        engine.transport,
        engine.terms.topology,
        sizes_bytes=sizes if len(sizes) > 1 else DEFAULT_SIZES_BYTES[:2],
        device=Devices()[plan.buckets[0].device],
    )
    return {axis: CostModel.fit(samples) for axis, samples in measured.items()}


def _ready_times_s(engine: Engine, call: Callable[[], object], steps: int) -> list[float]:
    """By leaf of the plan; measured with buckets so large that nothing disturbs backward."""
    plan = engine.program.plan
    engine.set_plan(plan_leaves(plan.leaves, order=plan.order, caps_bytes=[_EVERYTHING_BYTES]))
    _timed(engine, call)
    seen: list[list[float]] = []
    for _ in range(steps):
        with engine.watched() as taken:
            start_s, _took_s = _timed(engine, call)
        ready_s = taken[-1].ready_times_s()
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
    """Rank 0's best plan, on this rank's leaves."""
    transport, terms = engine.transport, engine.terms
    own = b""
    if transport.rank == 0:
        target = Target(costs, terms.topology, terms.algorithm, terms.deterministic)
        own = _encoded(optimal_plan(before.leaves, before.order, ready_s, target))
    try:
        plan = _decoded(transport.exchange(own)[0], before)
    except ValueError as error:
        raise malformed_message_error(0, "tuning", error) from error
    digests = exchange(transport, plan.shared_digest, str)
    if len({*digests}) > 1:
        raise PlanMismatchError(
            f"the tuned plan has the digests {[digest[:12] for digest in digests]} by rank; build "
            f"every rank's parameters alike"
        )
    boundaries = [bucket.leaves for bucket in plan.buckets]
    return before if boundaries == [bucket.leaves for bucket in before.buckets] else plan


def _encoded(plan: BucketPlan) -> bytes:
    """The plan in terms of the control word's slots, which mean the same leaves on all ranks."""
    slots = {leaf: slot for slot, leaf in enumerate(plan.reduced)}
    buckets = [
        {**asdict(bucket), "leaves": [slots[leaf] for leaf in bucket.leaves]}
        for bucket in plan.buckets
    ]
    order = [slots[leaf] for leaf in plan.order]
    return json.dumps({"buckets": buckets, "caps": plan.caps_bytes, "order": order}).encode()


def _decoded(text: bytes, before: BucketPlan) -> BucketPlan:
    """What `_encoded` gave, on this rank's leaves.

    Raises:
        ValueError: it is something else.
    """
    document: dict[str, Any] = decode(text, _PLAN)
    reduced = before.reduced
    slots = [*document["order"], *(slot for b in document["buckets"] for slot in b["leaves"])]
    if not all(0 <= slot < len(reduced) for slot in slots):
        raise ValueError(f"a plan of {len(reduced)} leaves has another")
    buckets = []
    for fields in document["buckets"]:
        leaves = tuple(reduced[slot] for slot in fields.pop("leaves"))
        buckets.append(Bucket(leaves, tuple(fields.pop("offsets")), **fields))
    order = tuple(reduced[slot] for slot in document["order"])
    return BucketPlan(before.leaves, tuple(buckets), tuple(document["caps"]), order)


def _compared(
    engine: Engine, call: Callable[[], object], plans: tuple[BucketPlan, BucketPlan], rounds: int
) -> tuple[float, float]:
    """Median step of each plan, taken in turn, in seconds of the slowest rank."""
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
