"""Monitors: delays of real ranks, what is observed, reports and traces."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fddp
from fddp.core.schedule.op import Op
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.hooks import AllReduce, Bucket, BucketSpec, Future, Hook
from fddp.runtime.bucket import BucketState
from fddp.telemetry.perfetto import chrome_trace, steps_from_json, steps_to_json
from fddp.telemetry.report import MonitorReport
from fddp.telemetry.stragglers import RankSummary, StepRecord, summarize
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss
from tests.support.ranks import RankPool

DELAY_S = 0.05
STEPS = 10


class Delayed(torch.autograd.Function):
    """Lets backward take longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(DELAY_S)
        return grad


@dataclass(frozen=True)
class Sluggish(Hook[tuple[()]]):
    """The sum as it is, from a hook that takes its time where `HERE` says so."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        pause("hook" if bucket.spec.is_last else "hook in backward")

        def take(total: Tensor) -> tuple[Tensor, tuple[()]]:
            if bucket.spec.is_last:
                pause("end of hook")
            return total, state

        return all_reduce(bucket.buffer.clone()).map(take)


HERE = {"where": ""}  # what takes longer on this rank
PHASE_OF = {
    "pack": "sync",
    "unpack": "sync",
    "pack in backward": "backward",
    "hook in backward": "hook",
    "end of hook": "hook",
    "before a pmean": "forward",
}


def pause(where: str) -> None:
    if HERE["where"] == where:
        time.sleep(DELAY_S)


def slow_parts() -> ExitStack:
    """Packing and unpacking pause, too."""
    pack, unpack = BucketState.pack, BucketState.unpack

    def packed(state: BucketState, step: Any, position: int, op: Op) -> None:
        is_last = op.bucket == step.program.schedule.sequence[-1]
        pause("pack" if is_last else "pack in backward")
        pack(state, step, position, op)

    def unpacked(state: BucketState, step: Any, position: int, op: Op) -> None:
        if op.bucket == 0:
            pause("unpack")
        unpack(state, step, position, op)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(BucketState, "pack", packed))
        patched.enter_context(mock.patch.object(BucketState, "unpack", unpacked))
        return patched.pop_all()


def loss(params: Any, x: Tensor) -> Tensor:
    pause("forward")
    value = mlp_loss(params, x)
    pause("before a pmean")
    if HERE["pmean"]:
        # Ranks that wait here for another's input or forward are not slow themselves.
        value = value + 0.0 * fddp.pmean(x.sum())
    return Delayed.apply(value) if HERE["where"] == "backward" else value


def watched(rank: int, world_size: int, transport: str, cases: Sequence[tuple[int, str]]) -> Any:
    return [watched_once(rank, transport, slow, where) for slow, where in cases]


def watched_once(rank: int, transport: str, slow: int, where: str) -> Any:
    hook = Sluggish() if "hook" in where else None
    HERE.update(where="", pmean="pmean" if "pmean" in where else "")
    with (
        fddp.GradSync(mlp(), transport=transport, first_bucket_mb=1e-4, hook=hook) as sync,
        slow_parts(),
    ):
        assert sync.transport == transport
        assert len(sync.plan.buckets) > 1
        step = sync.value_and_grad(loss, with_info=True)
        step(mlp(), batch(rank, 0))
        HERE["where"] = where if slow == rank else ""
        monitor = fddp.Monitor(sync)
        for number in range(STEPS):
            pause("input")
            with monitor.phase("update"):
                pause("update")
            _, _, info = step(mlp(), batch(rank, number))
            monitor.observe(info)
        report, trace = monitor.report(), monitor.trace()
    return slow, where, report.straggler, str(report), trace


@pytest.mark.parametrize(("transport", "world_size"), [("shm", 3), ("c10d", 2)])
def test_a_delay_is_attributed_to_its_rank_and_phase(
    ranks: RankPool, transport: str, world_size: int
) -> None:
    last = world_size - 1
    cases = [(1, "input"), (0, "forward"), (last, "backward"), (0, "update"), (1, "pack")]
    cases += [(0, "pack in backward"), (last, "unpack"), (1, "hook"), (0, "hook in backward")]
    cases += [(last, "end of hook"), (1, "before a pmean")]
    told = ranks.run(world_size, watched, transport, cases)
    for found in told:
        for slow, where, straggler, text, trace in found:
            assert straggler is not None, f"{where}: {text}"
            phase = PHASE_OF.get(where, where)
            assert (straggler.rank, straggler.phase) == (slow, phase), f"{where}: {text}"
            assert straggler.behind_s > DELAY_S / 2, text
            assert straggler.phase_behind_s > DELAY_S / 2, text
            assert f"rank {slow} holds the others up by" in text
            names = [e["name"] for e in check_events(trace) if e["pid"] == slow]
            assert ("hook" in names) == ("hook" in where)
            assert set(names) >= {"input", "forward", "backward", "sync"}
    assert [case[3:] for case in told[0]] == [case[3:] for case in told[1]], "alike on all ranks"


def wrapped(rank: int, world_size: int, cases: Sequence[tuple[int, str]]) -> Any:
    found = []
    for slow, where in cases:
        model = fddp.DistributedDataParallel(Slow())
        assert model.sync_info is None
        HERE["where"] = where if slow == rank else ""
        monitor = fddp.Monitor(model)
        for number in range(STEPS + 5):  # beyond those that DDP's log takes
            with model.no_sync():
                model(batch(rank, number)).square().mean().backward()
            if number:
                monitor.observe(model.sync_info)  # no news: passed over
            model(batch(rank, number)).square().mean().backward()
            monitor.observe(model.sync_info)
        assert [record.step for record in monitor.steps] == list(range(STEPS + 5))
        found.append((slow, where, monitor.report()))
    return found


class Slow(torch.nn.Linear):
    """Has its forward or backward pass take longer."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        pause("forward")
        value = super().forward(x)
        return Delayed.apply(value) if HERE["where"] == "backward" else value


def test_delays_of_wrapped_modules_are_attributed(ranks: RankPool) -> None:
    for found in ranks.run(2, wrapped, [(1, "forward"), (0, "backward")]):
        for slow, where, report in found:
            straggler, text = report.straggler, str(report)
            assert straggler is not None, text
            # What micro-batches before the last take is in "input".
            assert straggler.rank == slow, text
            behind_s = {
                phase: report.ranks[slow].phases[phase].median_s
                - report.ranks[1 - slow].phases[phase].median_s
                for phase in ("input", where)
            }
            assert min(behind_s.values()) > DELAY_S / 2, text
            assert straggler.phase in behind_s
            assert straggler.behind_s > 1.5 * DELAY_S, text


def record_of(step: int, phases_s: dict[str, float]) -> StepRecord:
    return StepRecord(step, phases_s, StepTimes((), 1.0, 2.0, 3.0, begun_s=0.5))


# What a monitor does


def train(group: Any, steps: int, **options: Any) -> tuple[fddp.Monitor, list[Any]]:
    with fddp.GradSync(mlp(), group=group) as sync:
        step, monitor = (
            sync.value_and_grad(mlp_loss, with_info=True),
            fddp.Monitor(group, **options),
        )
        observed = []
        for number in range(steps):
            _, _, info = step(mlp(), batch(group.rank, number))
            observed.append(monitor.observe(info))
        return monitor, observed


def test_reports_come_every_so_many_steps() -> None:
    for _, observed in fddp.loopback(2, lambda group: train(group, 7, every=3)):
        assert [type(one) for one in observed] == [
            MonitorReport if number in (2, 5) else type(None) for number in range(7)
        ]
        assert [rank.last for rank in observed[5].ranks] == [5, 5]


def test_phases_add_up_to_the_time_between_ends_of_steps() -> None:
    monitor, _ = fddp.loopback(1, lambda group: train(group, 5))[0]
    assert [record.step for record in monitor.steps] == list(range(5))
    assert "input" not in monitor.steps[0].phases_s
    for before, record in zip(monitor.steps, monitor.steps[1:], strict=False):
        names = ["monitor", "input", "forward", "backward", "sync", "wait"]
        assert list(record.phases_s) == names
        took_s = record.times.end_s - before.times.end_s
        assert sum(record.phases_s.values()) == pytest.approx(took_s)
        assert all(s >= 0.0 for s in record.phases_s.values())


def test_the_window_is_bounded() -> None:
    monitor, _ = fddp.loopback(1, lambda group: train(group, 9, window=4))[0]
    assert [record.step for record in monitor.steps] == [5, 6, 7, 8]


def test_named_phases_belong_to_the_step_that_follows() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            step, monitor = sync.value_and_grad(mlp_loss, with_info=True), fddp.Monitor(group)
            for number in range(3):
                with monitor.phase("loading"):
                    time.sleep(0.01)
                _, _, info = step(mlp(), batch(0, number))
                with monitor.phase("update"):
                    pass
                monitor.observe(info)  # late is no harm
            return monitor.steps

    steps = fddp.loopback(1, run)[0]
    names = ["monitor", "update", "loading", "input", "forward", "backward", "sync", "wait"]
    assert list(steps[2].phases_s) == names
    assert steps[2].phases_s["loading"] >= 0.01 > steps[2].phases_s["input"]


def test_invalid_calls_are_refused() -> None:
    def run(group: Any) -> list[str]:
        monitor = fddp.Monitor(group)
        told = [
            ending(lambda: fddp.Monitor(group, every=0)).text,
            ending(lambda: monitor.phase("wait").__enter__()).text,
            ending(monitor.report).text,
            ending(monitor.trace).text,
        ]
        if group.rank == 0:
            (record,) = train_record()
            monitor._steps.append(record)
        return [*told, ending(monitor.report).text]

    for every, phase, report, trace, half in fddp.loopback(2, run):
        assert every == "every must be 1 or more, got 0"
        assert phase == "'wait' can't be a phase's name; choose another"
        assert report == trace
        assert report.startswith("the monitor has observed no step on ranks 0, 1; call observe")
        assert half.startswith("the monitor has observed no step on rank 1;")


def train_record() -> list[StepRecord]:
    return [record_of(0, {"forward": 1.0, "wait": 1.0})]


@pytest.mark.parametrize("name", ["", "step", "behind", "input", "monitor", None, 3, ("a", 1)])
def test_names_that_no_phase_can_have(name: Any) -> None:
    def run(group: Any) -> str:
        return ending(lambda: fddp.Monitor(group).phase(name).__enter__()).kinds[0]

    assert fddp.loopback(1, run) == ["ValueError" if isinstance(name, str) else "TypeError"]


def test_phases_within_phases_count_once() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            monitor = fddp.Monitor(sync, exporters=[Leisurely()])
            for number in range(2):
                monitor.observe(step(mlp(), batch(0, number))[2])
                if number == 0:
                    with monitor.phase("update"):
                        time.sleep(0.01)
                        with monitor.phase("clipping"):
                            time.sleep(0.05)
                    for _ in range(2000):
                        with monitor.phase("other"):
                            pass
                    kept = len(monitor._named)
                    with monitor.phase("update"):
                        time.sleep(0.01)
                        with monitor.phase("clipping"):
                            time.sleep(0.05)
            return kept, monitor.steps

    kept, steps = fddp.loopback(1, run)[0]
    assert kept == 1000
    phases_s, times = steps[1].phases_s, steps[1].times
    assert phases_s["clipping"] >= 0.05 > phases_s["update"] >= 0.01
    assert phases_s["monitor"] >= DELAY_S, "2000 others have not pushed it out"
    took_s = times.end_s - steps[0].times.end_s
    assert sum(phases_s.values()) == pytest.approx(took_s)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"every": 1.5}, "TypeError"),
        ({"every": True}, "TypeError"),
        ({"window": None}, "TypeError"),
        ({"window": 0}, "ValueError"),
        ({"exporters": [3]}, "TypeError"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], kind: str) -> None:
    assert fddp.loopback(1, lambda g: ending(lambda: fddp.Monitor(g, **options)).kinds[0]) == [kind]


def test_ranks_make_their_monitors_alike() -> None:
    def run(group: Any) -> list[str]:
        def made(**options: Any) -> str:
            return ending(lambda: fddp.Monitor(group, **options)).text

        return [
            made(every=3 - group.rank),
            made(every=None if group.rank else 3),
            made(every=3, window=9 * (1 - group.rank)),
            made(every=3, window=4 + group.rank),
        ]

    one, two = fddp.loopback(2, run)
    assert one[:3] == [
        "Monitor on rank 0 of 2: every is 3 on rank 0 and 2 on rank 1; pass the same on every rank",
        "Monitor on rank 0 of 2: every is 3 on rank 0 and None on rank 1; pass the same on every "
        "rank",
        "Monitor on rank 0 of 2: rank 1 passed an argument that it can't take",
    ]
    assert [text.replace("on rank 1 of", "on rank 0 of") for text in two[:2]] == one[:2]
    assert two[2] == "window must be 1 or more, got 0"
    assert one[3] == two[3] == ending(lambda: None).text


def test_unobservable_objects_are_refused() -> None:
    def run(group: Any) -> list[str]:
        sync = fddp.GradSync(mlp(), group=group)
        monitor = fddp.Monitor(sync)
        monitor.observe(sync(mlp(), with_info=True)[1])
        calls = [
            lambda: monitor.observe(None),  # type: ignore[arg-type]
            lambda: monitor.trace(steps=0),
            lambda: monitor.trace(steps=-3),
            lambda: monitor.trace(steps=2.5),  # type: ignore[arg-type]
        ]
        sync.close()
        return [ending(call).text for call in [*calls, lambda: fddp.Monitor(sync)]]

    assert fddp.loopback(2, run)[1] == [
        "observe takes the SyncInfo of a step with with_info=True, got a NoneType",
        "steps must be 1 or more, got 0",
        "steps must be 1 or more, got -3",
        "steps is a number of steps, got 2.5",
        "this GradSync is closed; pass one that takes steps",
    ]


class Full:
    """An exporter that can write no more."""

    def step(self, info: Any, record: Any) -> None:
        raise OSError(28, "No space left on device")

    def report(self, report: Any) -> None:
        raise AssertionError("not after a step that failed")


def test_an_exporter_that_fails_on_one_rank_leaves_the_others_their_report() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync, fddp.Communicator(group, timeout_s=5) as of:
            exporters = [Full()] if group.rank == 0 else []
            monitor = fddp.Monitor(of, every=1, exporters=exporters)
            told = []
            for _ in range(2):
                _, info = sync(mlp(), with_info=True)
                told.append(ending(lambda info=info: monitor.observe(info)).kinds)
            return told, len(monitor.report().ranks) if group.rank else monitor._make_report()

    full, well = fddp.loopback(2, run)
    assert [kinds[0] for kinds in full[0]] == ["OSError", "OSError"]
    assert well == ([("no error",)] * 2, 2)


class Leisurely:
    """An exporter that takes its time."""

    def step(self, info: Any, record: Any) -> None:
        time.sleep(DELAY_S)

    def report(self, report: Any) -> None:
        time.sleep(DELAY_S)


def check_steps_add_up(steps: Sequence[StepRecord]) -> None:
    for before, record in itertools.pairwise(steps):
        took_s = record.times.end_s - before.times.end_s
        assert sum(record.phases_s.values()) == pytest.approx(took_s)
        assert all(s >= 0.0 for s in record.phases_s.values())


@pytest.mark.parametrize("slow", [None, 0, 1])
def test_exporter_time_is_not_a_phase_of_the_rank(slow: int | None) -> None:
    """They are slow on rank 0, and are told apart from the input of the same rank, or another's."""

    def run(group: Any) -> tuple[fddp.Monitor, MonitorReport]:
        exporters = [Leisurely()] if group.rank == 0 else []
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            monitor = fddp.Monitor(sync, every=4, exporters=exporters)
            for number in range(STEPS):
                if group.rank == slow:
                    time.sleep(DELAY_S)
                monitor.observe(step(mlp(), batch(0, number))[2])
            return monitor, monitor.report()

    (monitor, report), (_, other) = fddp.loopback(2, run)
    check_steps_add_up(monitor.steps)
    quick_s, most_s = 0.4 * DELAY_S, 1.6 * DELAY_S
    phases = report.ranks[0].phases
    assert phases["monitor"].median_s >= DELAY_S
    assert report.ranks[1].phases["monitor"].median_s < quick_s
    assert "exporters of the monitor take" in report.finding.splitlines()[-1]
    assert "longer on rank 0 than on the others" in report.finding
    assert str(report) == str(other)
    held = [one for one in report.stragglers if one.behind_s > quick_s]
    assert [(one.rank, one.phase) for one in held] == ([] if slow is None else [(slow, "input")])
    assert all(one.behind_s < most_s for one in held), "the input's delay alone"
    if slow != 0:
        assert phases["input"].median_s < quick_s
    inputs = [e["args"] for e in check_events(monitor_trace(monitor)) if e["name"] == "input"]
    assert all(own["monitor_ms"] >= 1e3 * DELAY_S for own in inputs)


def monitor_trace(monitor: fddp.Monitor) -> str:
    """Of its own rank alone."""
    return chrome_trace({0: monitor.steps})


def test_exporter_time_is_not_part_of_the_next_forward_pass() -> None:
    """Both calls of a wrapped module come before both backward passes."""

    def run(group: Any) -> fddp.Monitor:
        model = fddp.DistributedDataParallel(torch.nn.Linear(8, 1), process_group=group)
        exporters = [Leisurely()] if group.rank == 0 else []
        monitor = fddp.Monitor(model, every=2, exporters=exporters)
        for _ in range(2):
            for output in [model(torch.ones(2, 8)) for _ in range(2)]:
                output.sum().backward()
                assert model.sync_info is not None
                monitor.observe(model.sync_info)
        return monitor

    monitor = fddp.loopback(2, run)[0]
    check_steps_add_up(monitor.steps)
    for record in monitor.steps[1:]:
        assert record.phases_s["monitor"] >= DELAY_S > 2.0 * record.phases_s["forward"]
    check_events(monitor_trace(monitor))


def test_rounds_without_input_are_observed_too() -> None:
    def run(group: Any) -> list[int]:
        lasts = []
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            monitor = fddp.Monitor(sync, every=2)
            for x in fddp.uneven([batch(0, n) for n in range(2 + 2 * group.rank)], sync):
                if report := monitor.observe(step(mlp(), x)[2]):
                    lasts += [rank.last for rank in report.ranks]
        return lasts

    assert fddp.loopback(2, run) == [[1, 1, 3, 3]] * 2


def test_waiting_between_steps_is_not_slow() -> None:
    """In the votes of `uneven` and in operators, with names of phases or without."""

    def run(group: Any) -> Any:
        def inputs() -> Iterator[Tensor]:
            for number in range(STEPS):
                time.sleep(DELAY_S * group.rank)
                yield batch(0, number)

        with fddp.GradSync(mlp(), group=group) as sync:
            step, monitor = sync.value_and_grad(mlp_loss, with_info=True), fddp.Monitor(sync)
            for x in fddp.uneven(inputs(), sync):
                with monitor.phase("metrics"):
                    time.sleep(DELAY_S * group.rank)
                    with monitor.phase("mean"):
                        fddp.pmean(torch.ones(3), group)
                monitor.observe(step(mlp(), x)[2])
            return monitor.steps, monitor.report()

    told = fddp.loopback(2, run)
    for steps, _ in told:
        for before, record in itertools.pairwise(steps):
            took_s = record.times.end_s - before.times.end_s
            assert sum(record.phases_s.values()) == pytest.approx(took_s)
    quick, slow = (rank.phases for rank in told[0][1].ranks)
    assert slow["input"].median_s >= DELAY_S
    assert slow["metrics"].median_s >= DELAY_S
    assert quick["wait"].median_s > DELAY_S
    # Where votes and means counted as the rank's own, these would be as long as its waits.
    assert quick["input"].median_s < DELAY_S / 2.0
    assert quick["mean"].median_s < DELAY_S / 2.0


def test_steps_of_several_syncs_may_be_observed_by_one_monitor() -> None:
    """A critic and a generator, whose steps have numbers of their own."""

    def train(group: Any) -> tuple[int, int]:
        params = {"w": torch.ones(3)}
        with fddp.GradSync(params, group=group) as often, fddp.GradSync(params, group=group) as now:
            monitor = fddp.Monitor(group, window=4)
            for sync in [often] * 9 + [now] * 2:
                monitor.observe(sync(params, with_info=True)[1])
            (own, _) = monitor.report().ranks
            return own.first, own.last

    assert fddp.loopback(2, train) == [(7, 1)] * 2


def test_rank_in_another_call_is_reported() -> None:
    def run(group: Any) -> Any:
        monitor = fddp.Monitor(group)
        monitor._steps.extend(train_record())
        seen = ending(lambda: monitor.report() if group.rank else fddp.pmean(torch.ones(3), group))
        fddp.pmean(torch.ones(3), group)  # and the group goes on
        return seen

    for seen in fddp.loopback(2, run):
        assert seen.kinds[0] == "DesyncError"
        assert "all_gather" in seen.text
        assert "pmean" in seen.text


def test_a_report_shows_phases_buckets_and_the_finding() -> None:
    def rank(number: int, forward_s: float) -> RankSummary:
        buckets = (BucketTimes(0, 8, 1.5, 1.6, 2.5),)
        times = StepTimes(buckets, 1.0, 2.0, 3.0, begun_s=0.5)
        phases_s = {"input": 0.001, "forward": forward_s, "backward": 0.02, "wait": 0.003}
        return summarize(number, [StepRecord(n, phases_s, times) for n in range(4, 13)])

    report = MonitorReport.of([rank(0, 0.010), rank(1, 0.060)])
    assert str(report).splitlines() == [
        "steps 4 to 12, 2 ranks; ms, median ± MAD",
        "rank        input       forward      backward         wait          step",
        "   0  1.00 ± 0.00  10.00 ± 0.00  20.00 ± 0.00  3.00 ± 0.00  34.00 ± 0.00",
        "   1  1.00 ± 0.00  60.00 ± 0.00  20.00 ± 0.00  3.00 ± 0.00  84.00 ± 0.00",
        "",
        "buckets; ms since the rank's backward began, median",
        "bucket  rank   ready  launch     done",
        "     0     0  500.00  600.00  1500.00",
        "     0     1  500.00  600.00  1500.00",
        "",
        "rank 1 holds the others up by 50.0 ms a step (85% of it), most of all in forward "
        "(+50.0 ms)",
    ]
    assert json.loads(report.to_json())["stragglers"][0][:2] == [1, "forward"]
    alone = MonitorReport.of([rank(0, 0.010)])
    assert str(alone).endswith("no straggler: there is one rank")
    alike = [rank(0, 0.010), rank(1, 0.010)]
    assert MonitorReport.of(alike).finding == (
        "no straggler: no rank takes longer for its own part than the others"
    )


# Traces


def check_events(text: str) -> list[dict[str, Any]]:
    """Holds a trace against the Trace Event Format, in its JSON object form; its spans.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(trace) <= {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans = []
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert event["args"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0.0
            assert event["dur"] >= 0.0
            assert isinstance(event["cat"], str)
            spans.append(event)
    for lane in {(event["pid"], event["tid"]) for event in spans}:
        open_until: list[float] = []
        for event in sorted(
            (e for e in spans if (e["pid"], e["tid"]) == lane), key=lambda e: (e["ts"], -e["dur"])
        ):
            while open_until and open_until[-1] <= event["ts"] + 1e-2:
                open_until.pop()
            end = event["ts"] + event["dur"]
            if open_until:
                # Collectives follow each other; of two that end together, one may have no length.
                assert event["name"] in ("hook", "wait") if event["tid"] == 0 else not event["dur"]
                assert end <= open_until[-1] + 1e-2, "spans of a thread nest, or follow each other"
            open_until.append(end)
    return spans


def test_a_trace_holds_all_ranks_and_steps() -> None:
    def run(group: Any) -> str:
        monitor, _ = train(group, 6)
        return monitor.trace(4)

    one, two = fddp.loopback(2, run)
    assert one == two
    spans = check_events(one)
    assert {span["pid"] for span in spans} == {0, 1}
    assert {span["args"]["step"] for span in spans} == {2, 3, 4, 5}
    for rank in (0, 1):
        names = [s["name"] for s in spans if s["pid"] == rank and s["args"]["step"] == 5]
        assert {"input", "forward", "backward", "sync", "bucket 0"} <= set(names)
    assert all(span["args"]["bytes"] > 0 for span in spans if span["tid"] == 1)


def test_clocks_are_set_by_the_ends_of_collectives() -> None:
    def steps_from_clock(zero_s: float) -> list[StepRecord]:
        steps = []
        for n in range(3):
            at_s = zero_s + n
            buckets = (BucketTimes(0, 8, at_s + 0.4, at_s + 0.4, at_s + 0.7),)
            times = StepTimes(buckets, at_s + 0.3, at_s + 0.5, at_s + 0.8, begun_s=at_s + 0.1)
            phases_s = {"input": 0.1, "forward": 0.2, "backward": 0.2, "wait": 0.3}
            steps.append(StepRecord(n, phases_s, times))
        return steps

    trace = chrome_trace({0: steps_from_clock(1e5), 1: steps_from_clock(3.0)})
    starts: dict[Any, list[float]] = {}
    for span in check_events(trace):
        starts.setdefault((span["args"]["step"], span["name"]), []).append(span["ts"])
    for first, second in starts.values():
        assert first == pytest.approx(second, abs=1.0)


def test_steps_travel_as_they_are() -> None:
    monitor, _ = fddp.loopback(1, lambda group: train(group, 3))[0]
    read = steps_from_json(steps_to_json(monitor.steps), 0)
    for one, two in zip(read, monitor.steps, strict=True):
        assert (one.step, one.phases_s) == (two.step, two.phases_s)
        assert one.times.buckets == two.times.buckets
        assert one.times.begun_s == two.times.begun_s
        assert (one.times.waits, one.times.hooks) == (two.times.waits, two.times.hooks)
    assert check_events(chrome_trace({})) == []


def test_steps_without_info_have_no_beginning() -> None:
    assert math.isnan(StepTimes((), 1.0, 2.0, 3.0).begun_s)
