"""Simulation: held against a plain one that goes from event to event and from rank to rank."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.check import check_schedule
from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Op, chunk, is_collective
from fddp.core.schedule.piggyback import control_layout, with_separate_word
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CostModel
from fddp.core.sim.simulator import Jitter, simulate
from fddp.core.timeline import COMPUTE, BucketTimes, Span, StepTimes, Timeline
from fddp.errors import ScheduleError
from tests.support.examples import examples

# A plain simulation


class Launch(NamedTuple):
    """One operation, as one rank sees it."""

    op: int
    launch_s: float
    start_s: float
    end_s: float


@dataclasses.dataclass
class Group:
    """One group of ranks: its collectives run one after another."""

    ranks: tuple[int, ...]
    queue: list[int]
    at: int = 0
    started_s: float = math.nan
    left_s: float = math.nan  # work of the running collective; NaN if none runs


class Plain:
    """Every rank has a cursor; time advances from event to event."""

    def __init__(
        self, schedule: Schedule, cost: Any, ready_s: Any, slow: list[float], late: set[int]
    ) -> None:
        self.schedule, self.cost, self.slow, self.late = schedule, cost, slow, late
        self.world = schedule.topology.world_size
        times = [0.0 if math.isnan(t) else t for t in ready_s]
        self.ready_s = [max(times[i] for i in b.leaves) for b in schedule.plan.buckets]
        self.word = max(schedule.control, schedule.piggyback_op)  # what brings it
        self.now = 0.0
        self.cursor = [0] * self.world
        self.launch_s: list[dict[int, float]] = [{} for _ in range(self.world)]
        self.start_s: list[dict[int, float]] = [{} for _ in range(self.world)]
        self.end_s: list[dict[int, float]] = [{} for _ in range(self.world)]
        self.groups = {
            (op.axes, ranks): Group(
                ranks,
                [
                    i
                    for i, other in enumerate(schedule.ops)
                    if self.is_meeting(other) and other.axes == op.axes
                ],
            )
            for op in schedule.ops
            if is_collective(op)
            for r in range(self.world)
            for ranks in [schedule.topology.group(op.axes, r)]
        }

    def is_meeting(self, op: Op) -> bool:
        return is_collective(op) and (op.when == "always" or op.bucket in self.late)

    def backward_end_s(self, rank: int) -> float:
        return max(self.ready_s) * self.slow[rank]

    def is_done(self, rank: int, position: int) -> bool:
        op = self.schedule.ops[position]
        if op.when != "always" and op.bucket not in self.late:
            return all(self.is_done(rank, dep) for dep in op.deps)
        return position in self.end_s[rank]

    def may_run(self, rank: int, op: Op) -> bool:
        if self.now < self.backward_end_s(rank):
            if op.when != "always" or op.kind in ("control", "gather", "unpack", "add"):
                return False
            if op.bucket == self.schedule.sequence[-1]:
                return False
            if self.now < self.ready_s[op.bucket] * self.slow[rank]:
                return False
        acts_on_it = op.when != "always" or op.kind in ("gather", "unpack")
        if acts_on_it and not self.is_done(rank, self.word):
            return False
        if op.when != "always" and op.bucket not in self.late:
            return True
        return all(self.is_done(rank, dep) for dep in op.deps)

    def step_rank(self, rank: int) -> bool:
        if self.cursor[rank] == len(self.schedule.ops):
            return False
        position = self.cursor[rank]
        op = self.schedule.ops[position]
        if not self.may_run(rank, op):
            return False
        self.cursor[rank] += 1
        if op.when == "always" or op.bucket in self.late:
            self.launch_s[rank][position] = self.now
            if not is_collective(op):
                self.start_s[rank][position] = self.end_s[rank][position] = self.now
        return True

    def step_group(self, axes: tuple[str, ...], group: Group) -> bool:
        if not math.isnan(group.left_s):
            if group.left_s > 0.0:
                return False
            for rank in group.ranks:
                self.start_s[rank][group.queue[group.at]] = group.started_s
                self.end_s[rank][group.queue[group.at]] = self.now
            group.at += 1
            group.left_s = math.nan
            return True
        if group.at == len(group.queue):
            return False
        if any(group.queue[group.at] not in self.launch_s[rank] for rank in group.ranks):
            return False
        group.started_s = self.now
        group.left_s = self.work_s(self.schedule.ops[group.queue[group.at]], group.ranks[0])
        return True

    def work_s(self, op: Op, rank: int) -> float:
        """By the formula of a ring, from the bytes that the rank itself holds."""
        n, alpha_s, beta, _ = self.link(op.axes)
        if op.kind == "control":
            nbytes = 8.0 * (12 + len(self.schedule.plan.buckets) + len(self.schedule.plan.order))
        else:
            places = dict(
                zip(
                    self.schedule.topology.names,
                    self.schedule.topology.coordinates(rank),
                    strict=True,
                )
            )
            cuts = [(self.schedule.topology.size((a,)), places[a]) for a in op.region.shard]
            start, stop = chunk(op.region.start, op.region.stop, cuts)
            nbytes = (stop - start) * ITEM_BYTES[self.schedule.wire_dtypes[op.bucket]]
            if op is self.schedule.ops[self.schedule.piggyback_op]:
                layout = control_layout(self.schedule, with_order=False)
                nbytes += layout.size * ITEM_BYTES[layout.format]
        if op.kind == "all_gather":
            return (n - 1) * alpha_s + (n - 1) * beta * nbytes
        once = (n - 1) * alpha_s + (n - 1) / n * beta * nbytes
        if op.kind == "gather":
            return once + 2 * (n - 1) * alpha_s
        return once if op.kind == "reduce_scatter" else 2 * once

    def link(self, axes: tuple[str, ...]) -> tuple[int, float, float, float]:
        n = self.schedule.topology.size(axes)
        if isinstance(self.cost, CostModel):
            models = [self.cost]
        else:
            models = [self.cost[a] for a in axes if self.schedule.topology.size((a,)) > 1]
        if not models:
            return 1, 0.0, 0.0, 1.0
        return (
            n,
            max(m.alpha_s for m in models),
            max(m.beta_s_per_byte for m in models),
            min(m.overlap for m in models),
        )

    def rate(self, axes: tuple[str, ...], group: Group) -> float:
        in_backward = any(self.now < self.backward_end_s(rank) for rank in group.ranks)
        return self.link(axes)[3] if in_backward else 1.0

    def run(self) -> list[float]:
        while True:
            moved = True
            while moved:
                moved = any(self.step_rank(rank) for rank in range(self.world))
                moved |= any(self.step_group(axes, g) for (axes, _), g in self.groups.items())
            running = [(k[0], g) for k, g in self.groups.items() if not math.isnan(g.left_s)]
            events = [self.now + g.left_s / self.rate(axes, g) for axes, g in running]
            events += [t * slow for t in self.ready_s for slow in self.slow]
            ahead = [t for t in events if t > self.now]
            if not ahead:
                break
            until = min(ahead)
            for axes, group in running:
                rate = self.rate(axes, group)
                if self.now + group.left_s / rate <= until:
                    group.left_s = 0.0
                else:
                    group.left_s -= (until - self.now) * rate
            self.now = until
        assert self.cursor == [len(self.schedule.ops)] * self.world
        return [
            max([self.backward_end_s(r), *self.launch_s[r].values(), *self.end_s[r].values()])
            for r in range(self.world)
        ]

    def seen_by(self, rank: int) -> list[Launch]:
        return [
            Launch(op, launch_s, self.start_s[rank][op], self.end_s[rank][op])
            for op, launch_s in self.launch_s[rank].items()
        ]


TOPOLOGIES = (
    Topology(world=1),
    Topology(world=3),
    Topology(host=2, local=2),
    Topology(host=1, local=3),
    Topology(host=3, local=2),
    Topology(pod=2, host=2, local=2),
)

models = st.builds(
    CostModel,
    st.sampled_from((0.0, 0.01, 0.3)),
    st.sampled_from((0.0, 0.001, 0.02)),
    overlap=st.sampled_from((1.0, 0.5, 0.3)),
)


@st.composite
def plans(draw: st.DrawFn) -> BucketPlan:
    leaves = [
        LeafSpec(
            f"leaf{i}",
            (draw(st.integers(0, 12)),),
            draw(st.sampled_from(("float16", "float32", "float64"))),
            sparse=draw(st.integers(0, 5)) == 0,
        )
        for i in range(draw(st.integers(1, 7)))
    ]
    order = draw(st.permutations(range(len(leaves))))[: draw(st.integers(1, len(leaves)))]
    caps_bytes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=2))
    return plan_leaves(leaves, order=order, caps_bytes=caps_bytes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Any, list[float], set[int]]:
    plan = draw(plans())
    topology = draw(st.sampled_from(TOPOLOGIES))
    algorithms = ["all_reduce"]
    if not any(bucket.sparse for bucket in plan.buckets):
        algorithms += ["reduce_scatter", "all_gather"]
    if len(topology.axes) > 1:
        algorithms += ["hierarchical"] * 3
    schedule = make_schedule(
        plan,
        topology,
        algorithm=draw(st.sampled_from(algorithms)),  # type: ignore[arg-type]
        split_mb=draw(st.sampled_from((None, 32 / 2**20))),
    )
    cost = draw(models | st.fixed_dictionaries(dict.fromkeys(topology.names, models)))
    sixteenths = st.integers(0, 16).map(lambda n: n / 16)
    ready_s = [draw(sixteenths | st.just(math.nan)) for _ in plan.leaves]
    late = draw(st.sets(st.sampled_from(range(len(plan.buckets)))))
    return schedule, cost, ready_s, late


def assert_same(timeline: Timeline, plain: Plain) -> None:
    steps_s = plain.run()
    if len(timeline.rank_steps_s) == 1:
        assert len({round(t, 9) for t in steps_s}) == 1
        steps_s = steps_s[:1]
    assert timeline.rank_steps_s == pytest.approx(steps_s)
    assert timeline.step_s == max(timeline.rank_steps_s) == timeline.rank_steps_s[timeline.rank]
    assert timeline.backward_end_s == plain.backward_end_s(timeline.rank)
    ours = [Launch(s.op, s.launch_s, s.start_s, s.end_s) for s in timeline.spans[1:]]
    theirs = plain.seen_by(timeline.rank)
    assert [span.op for span in ours] == [span.op for span in theirs]
    assert np.array(ours) == pytest.approx(np.array(theirs).reshape(-1, 4))


@examples(200)
@given(cases(), st.data())
def test_like_the_plain_simulation(case: Any, data: st.DataObject) -> None:
    schedule, cost, ready_s, late = case
    if data.draw(st.booleans()):
        schedule = in_another_order(schedule, data)
    jitter = data.draw(st.sampled_from((None, Jitter(0.5), Jitter(0.1, 0.3, 2.0))))
    slow = [1.0] * schedule.topology.world_size
    if jitter is not None:
        slow = jitter.draw(schedule.topology.world_size, 7).tolist()
    timeline = simulate(schedule, cost, ready_s, jitter=jitter, seed=7, late=late)
    assert len(timeline.rank_steps_s) == (1 if jitter is None else len(slow))
    assert_same(timeline, Plain(schedule, cost, ready_s, slow, late))


def in_another_order(schedule: Schedule, data: st.DataObject) -> Schedule:
    """Operations may come in any order that has what they depend on first."""
    left = set(range(len(schedule.ops)))
    order: list[int] = []
    # The control word decides on repairs, so it stays ahead of them.
    control = max(schedule.control, schedule.piggyback_op)
    while left:
        free = [
            i
            for i in sorted(left)
            if not left & set(schedule.ops[i].deps)
            and (control not in left or i <= control or schedule.ops[i].when == "always")
            and (schedule.ops[i].kind not in ("unpack", "gather") or control not in left)
        ]
        order.append(data.draw(st.sampled_from(free)))
        left.remove(order[-1])
    ops = tuple(
        schedule.ops[i]._replace(deps=tuple(order.index(d) for d in schedule.ops[i].deps))
        for i in order
    )
    return dataclasses.replace(schedule, ops=ops)


# Cases that are easily followed


def two_leaves(*, world: int = 2) -> Schedule:
    leaves = [LeafSpec("a", (250_000,), "float32"), LeafSpec("b", (250_000,), "float32")]
    plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1_000_000])
    return make_schedule(plan, Topology(world=world))


def test_the_piggybacked_word_costs_its_bytes() -> None:
    riding, own = (f(two_leaves()) for f in (lambda s: s, with_separate_word))
    ready_s = {"b": 0.007, "a": 0.010}
    latency = CostModel(1e-3, 0.0)
    assert simulate(riding, latency, ready_s).step_s == pytest.approx(0.012)
    assert simulate(own, latency, ready_s).step_s == pytest.approx(0.014)
    assert [s.label for s in simulate(riding, latency, ready_s).spans if s.lane != COMPUTE] == [
        "all_reduce 0",
        "all_reduce 1",
    ]
    # Two limbs of the fingerprint, 92 of each weight, six counts, three of the method, two
    # buckets and two leaves.
    timeline = simulate(riding, CostModel(0.0, 1e-9), ready_s)
    assert timeline.step_s == pytest.approx(0.011 + 4e-9 * (2 + 92 + 92 + 6 + 3 + 2 + 2), abs=1e-12)


def test_overlap_slows_collectives_during_backward() -> None:
    cost = CostModel(0.0, 1e-9, overlap=0.25)
    timeline = simulate(with_separate_word(two_leaves()), cost, {"b": 0.007, "a": 0.010})
    first, last, control = (s for s in timeline.spans if s.lane != COMPUTE)
    # 1 ms of work: 3 ms at a quarter of the speed, and the rest alone.
    assert (first.launch_s, first.end_s) == (0.007, pytest.approx(0.01025))
    assert (last.launch_s, last.start_s) == (pytest.approx(0.010), first.end_s)
    assert last.end_s == pytest.approx(0.01125)
    assert control.launch_s == 0.010
    assert timeline.step_s == control.end_s == pytest.approx(0.01125 + 128e-9)
    assert timeline.hidden_s == pytest.approx(0.003)
    assert timeline.communication_s == pytest.approx(0.00425 + 128e-9)
    assert timeline.exposed_s == pytest.approx(0.00125 + 128e-9)


def test_leaves_without_a_gradient_hold_nothing_up() -> None:
    timeline = simulate(two_leaves(), CostModel(1e-3, 0.0), [0.010, math.nan])
    assert timeline.backward_end_s == 0.010
    assert next(s for s in timeline.spans if s.kind == "all_reduce").launch_s == 0.0
    nothing = simulate(two_leaves(), CostModel(1e-3, 0.0), [math.nan, math.nan])
    assert nothing.step_s == pytest.approx(0.004)
    assert nothing.backward_end_s == 0.0
    assert nothing.hidden_fraction == 0.0


def test_jitter_is_drawn_from_its_seed() -> None:
    jitter = Jitter(spread=0.2, straggler_rate=0.1, straggler_factor=3.0)
    assert jitter.draw(50, 1).tolist() == jitter.draw(50, 1).tolist() != jitter.draw(50, 2).tolist()
    assert Jitter().draw(5, 0).tolist() == [1.0] * 5
    factors = Jitter(straggler_rate=0.5, straggler_factor=2.0).draw(1000, 0)
    assert 400 < np.count_nonzero(factors == 2.0) < 600
    assert np.median(Jitter(spread=0.3).draw(10_000, 0)) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1,), "spread must be from 0 to 10, got -0.1"),
        ((10.5,), "spread must be from 0 to 10, got 10.5"),
        ((0.0, 2.0), r"straggler_rate must be in \[0, 1\], got 2.0"),
        ((0.0, 0.1, 0.0), r"straggler_factor must be above 0 and at most 1e\+09, got 0.0"),
        ((math.nan,), "spread must be"),
    ],
)
def test_bad_jitter(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Jitter(*arguments)


def test_ten_thousand_ranks() -> None:
    leaves = [LeafSpec(f"leaf{i:03}", (1000,), "float32") for i in range(100)]
    plan = plan_leaves(leaves, order=range(100), caps_bytes=[1])
    schedule = make_schedule(plan, Topology(host=1250, local=8), algorithm="hierarchical")
    cost, ready_s = CostModel(1e-6, 1e-9), np.arange(100) * 1e-3
    timeline = simulate(schedule, cost, ready_s, jitter=Jitter(0.05, 0.01, 2.0))
    assert len(timeline.rank_steps_s) == 10_000
    assert timeline.step_s > simulate(schedule, cost, ready_s).step_s
    # The number of ranks does not matter where all are alike.
    alike = simulate(schedule, cost, ready_s)
    assert len(alike.rank_steps_s) == 1


@pytest.mark.parametrize(
    ("ready_s", "message"),
    [
        ([0.1], r"one time for each of the 2 leaves, got the shape \(1,\)"),
        ([0.1, -0.5], r"leaf 1 \('b'\) has -0.5"),
        ([math.inf, 0.1], r"leaf 0 \('a'\) has inf"),
        ([0.1, 1e10], r"must be from 0 to 1e\+09, .* leaf 1 \('b'\) has 10000000000.0"),
        ({"a": 0.1}, "has 1 path; the plan of 2 leaves needs 'b' and 0 more"),
        ({"a": 0.1, "b": 0.1, "c": 0.1}, "the plan of 2 leaves does not have 'c'"),
    ],
)
def test_bad_ready_times(ready_s: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(two_leaves(), CostModel(0.0, 0.0), ready_s)


def test_leaves_in_no_bucket_do_not_matter() -> None:
    leaves = [LeafSpec("a", (4,), "float32"), LeafSpec("step", (), "int64")]
    schedule = make_schedule(plan_leaves(leaves, order=[0], caps_bytes=[1]), Topology(world=2))
    for ready_s in ([0.5, 9.0], [0.5, math.nan], [0.5, -1.0], {"a": 0.5}, {"a": 0.5, "step": 1.0}):
        assert simulate(schedule, CostModel(0.0, 0.0), ready_s).step_s == 0.5


def test_bad_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"cost has models of 'host', and none of the axis 'world'"
    ):
        simulate(two_leaves(), {"host": CostModel(0.0, 0.0)}, [0.0, 0.0])
    with pytest.raises(ValueError, match="late holds bucket 2; the plan has 2 buckets"):
        simulate(two_leaves(), CostModel(0.0, 0.0), [0.0, 0.0], late={2})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"deps": (9,)}, r"op 1 .*: it depends on op .*launched later"),
        ({"deps": (99,)}, r"op 1 .*: it depends on op 99, but there are ops 0 to "),
        ({"deps": (-1,)}, r"op 1 .*: it depends on op -1, but there are ops 0 to "),
        ({"bucket": 7}, r"op 1 .*: bucket must be an index of the 2 buckets"),
        ({"axes": ("host",)}, r"op 1 .*: it runs along 'host'; the axes are world"),
    ],
)
def test_a_malformed_schedule_is_refused_as_by_the_check(fields: Any, text: str) -> None:
    schedule = two_leaves()
    ops = list(schedule.ops)
    ops[1] = ops[1]._replace(**fields)
    wrong = dataclasses.replace(schedule, ops=tuple(ops))
    for call in (check_schedule, lambda it: simulate(it, CostModel(1e-5, 1e-9), [0.1, 0.2])):
        with pytest.raises(ScheduleError, match=text):
            call(wrong)


# Timelines


def test_a_notebook_draws_a_timeline() -> None:
    """A bar for each span of some length, with its time; the rest after backward is shaded."""
    timeline = simulate(two_leaves(), CostModel(1e-3, 1e-9), [0.010, 0.001])
    measured = StepTimes((BucketTimes(0, 4, 11.0, 11.0, 13.0),), 10.0, 12.5, 13.0)
    for shown, steps in ((timeline, timeline), (measured, measured.to_timeline())):
        root = ElementTree.fromstring(shown._repr_svg_())
        texts = [element.text for element in root.iter() if element.text]
        bars = [span for span in steps.spans if span.end_s > span.start_s]
        assert len([text for text in texts if " to " in text]) == len(bars) >= 2
        assert repr(steps) in texts
        assert {*steps.lanes} <= {*texts}


def test_chrome_trace() -> None:
    leaves = [LeafSpec("a", (64,), "float32"), LeafSpec("b", (64,), "float32")]
    plan = plan_leaves(leaves, order=[1, 0], caps_bytes=[1])
    schedule = make_schedule(plan, Topology(host=2, local=2), algorithm="hierarchical")
    timeline = simulate(schedule, CostModel(1e-3, 1e-9), [0.010, 0.001])
    events = json.loads(timeline.to_chrome_trace())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"compute", "local", "host", "host+local"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    for event, span in zip(spans, timeline.spans, strict=True):
        assert names[event["tid"]] == span.lane
        assert event["pid"] == timeline.rank
        assert event["ts"] == pytest.approx(span.start_s * 1e6)
        assert event["ts"] + event["dur"] == pytest.approx(span.end_s * 1e6)


def test_lanes_that_work_at_once_count_once() -> None:
    spans = tuple(
        Span(-1, "all_reduce", 0, lane, lane, start_s, start_s, end_s)
        for lane, start_s, end_s in (
            ("a", 1.0, 4.0),
            ("b", 2.0, 3.0),
            ("b", 3.5, 6.0),
            ("a", 7.0, 9.0),
            (COMPUTE, 0.0, 5.0),
        )
    )
    timeline = Timeline(spans, 5.0, 9.0, 0, (9.0,))
    assert timeline.communication_s == 7.0
    assert timeline.hidden_s == 4.0
    assert timeline.hidden_fraction == 4.0 / 7.0


def test_timelines_as_text() -> None:
    timeline = simulate(two_leaves(), CostModel(1e-3, 0.0), [0.010, 0.001])
    lines = str(timeline).splitlines()
    assert lines[0] == repr(timeline)
    assert "step 12.000 ms, backward 10.000 ms, exposed 2.000 ms, 50% hidden" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [["compute", "6"], ["world", "2"]]


times = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(times, times, times), max_size=6), times, times)
def test_a_real_step_is_seen_the_same_way(
    drawn: list[tuple[float, float, float]], backward_s: float, rest_s: float
) -> None:
    origin_s = 100.0
    end_s = origin_s + 30.0 + rest_s
    buckets = tuple(
        BucketTimes(i, 4, origin_s + ready, origin_s + ready + wait, origin_s + ready + wait + work)
        for i, (ready, wait, work) in enumerate(drawn)
    )
    step = StepTimes(buckets, origin_s, origin_s + backward_s, end_s)
    timeline = step.to_timeline(rank=3)
    assert timeline.rank == 3
    assert timeline.exposed_s == pytest.approx(step.exposed_s)
    assert 0.0 <= timeline.hidden_s <= timeline.communication_s
    for span in timeline.spans[1:]:
        bucket = buckets[span.bucket]
        assert span.launch_s == bucket.launch_s - origin_s
        assert span.end_s == bucket.done_s - origin_s
        assert span.launch_s <= span.start_s <= span.end_s
    # A collective is in flight from its launch on, also while it waits for the one before it.
    edges = sorted({t for b in buckets for t in (b.launch_s, b.done_s, step.backward_end_s)})
    total_s = hidden_s = 0.0
    for start_s, stop_s in itertools.pairwise(edges):
        if any(b.launch_s <= start_s and stop_s <= b.done_s for b in buckets):
            total_s += stop_s - start_s
            hidden_s += stop_s - start_s if stop_s <= step.backward_end_s else 0.0
    assert timeline.communication_s == pytest.approx(total_s)
    assert step.hidden_fraction == pytest.approx(hidden_s / total_s if total_s else 0.0, abs=1e-9)


def test_ranks_that_do_not_fit() -> None:
    plan = plan_leaves([LeafSpec("w", (4,), "float32")], order=[0], caps_bytes=[1])
    schedule = make_schedule(plan, Topology(world=2_000_000_000))
    simulate(schedule, CostModel(1e-6, 1e-9), [0.001])
    with pytest.raises(ValueError, match="each of 2000000000 ranks, and the limit is"):
        simulate(schedule, CostModel(1e-6, 1e-9), [0.001], jitter=Jitter(0.1))
