"""Monitors: reports, records, phases and exporters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp.extend import StepTimes
from fddp.watch import MonitorReport, RankSummary, StepRecord
from fddp.watch.trace import chrome_trace, trace_message
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss
from tests.support.monitored import (
    DELAY_S,
    STEPS,
    check_events,
    check_steps_add_up,
    record_of,
    train_monitored,
)


def test_phases_add_up_to_the_time_between_ends_of_steps() -> None:
    monitor = fddp.loopback(1, lambda group: train_monitored(group, 5))[0]
    assert [record.step for record in monitor.steps] == list(range(5))
    assert "input" not in monitor.steps[0].phases_s
    check_steps_add_up(monitor.steps)
    for record in monitor.steps[1:]:
        names = ["monitor", "input", "forward", "backward", "sync", "wait"]
        assert [name for name in record.phases_s if name != "gc"] == names


def test_ranks_without_a_step_are_named() -> None:
    def run(group: Any) -> list[str]:
        monitor = fddp.watch.Monitor(group)
        outcome = [ending(monitor.report).text, ending(monitor.trace).text]
        if group.rank == 0:
            (record,) = train_record()
            monitor._steps.append(record)
        return [*outcome, ending(monitor.report).text]

    for report, trace, half in fddp.loopback(2, run):
        assert report == trace
        assert report.startswith("the monitor has observed no step on ranks 0, 1; call observe")
        assert half.startswith("the monitor has observed no step on rank 1;")


def train_record() -> list[StepRecord]:
    return [record_of(0, {"forward": 1.0, "wait": 1.0})]


def test_phases_within_phases_count_once() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            monitor = fddp.watch.Monitor(sync, exporters=[Leisurely()])
            for number in range(3):
                info = step(mlp(), batch(0, number))[2]
                with monitor.phase("late"):
                    pass
                monitor.observe(info)
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
    check_steps_add_up(steps)
    assert ("late" in steps[0].phases_s, "late" in steps[2].phases_s) == (False, True)
    phases_s = steps[1].phases_s  # of the step that follows
    assert {*phases_s} - {"input", "forward", "backward", "gc", "sync", "wait"} == {
        *("monitor", "other", "update", "clipping")
    }
    assert phases_s["clipping"] >= 0.05 > phases_s["update"] >= 0.01
    assert phases_s["monitor"] >= DELAY_S, "2000 others have not pushed it out"


def test_phases_of_a_step_may_be_named() -> None:
    """Those before `sync(grads)`, in a loop of which only the caller knows them."""

    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            monitor = fddp.watch.Monitor(sync)
            for _ in range(3):
                for name in ("input", "forward", "backward"):
                    with monitor.phase(name):
                        time.sleep(DELAY_S)
                monitor.observe(sync(mlp(), with_info=True)[1])
            return monitor.steps, monitor.trace()

    steps, trace = fddp.loopback(1, run)[0]
    check_steps_add_up(steps)
    check_events(trace)
    for record in steps[1:]:
        named_s = [record.phases_s[name] for name in ("input", "forward", "backward")]
        assert all(s >= DELAY_S for s in named_s)


def test_invalid_arguments_are_refused() -> None:
    def run(group: Any) -> list[str]:
        sync = fddp.GradSync(mlp(), group=group)
        monitor = fddp.watch.Monitor(sync)
        monitor.observe(sync(mlp(), with_info=True)[1])
        names: tuple[Any, ...] = ("", "step", "behind", "sync", "monitor", "gc", "communication")
        names += (None, 3, ("a", 1))
        for name in names:
            kind = ending(lambda name=name: monitor.phase(name).__enter__()).kinds[0]
            assert kind == ("ValueError" if isinstance(name, str) else "TypeError")
        calls = [
            lambda: fddp.watch.Monitor(group, window=0),
            lambda: monitor.phase("wait").__enter__(),
            lambda: monitor.observe(None),  # type: ignore[arg-type]
            lambda: monitor.trace(steps=0),
            lambda: monitor.trace(steps=2.5),  # type: ignore[arg-type]
        ]
        sync.close()
        return [ending(call).text for call in [*calls, lambda: fddp.watch.Monitor(sync)]]

    assert fddp.loopback(2, run)[1] == [
        "window must be 1 or more, got 0",
        "'wait' can't be a phase's name; choose another",
        "observe takes the SyncInfo of a step with with_info=True, got a NoneType",
        "steps must be 1 or more, got 0",
        "steps is a number of steps, got 2.5",
        "this GradSync, or its owner, is closed (close() was called); build a new one on a working "
        "group, or rebuild this one there with its plan and state: sync = sync.rebuild(group)",
    ]


class Full:
    """An exporter that can write no more."""

    def step(self, info: Any, record: Any) -> None:
        raise OSError(28, "No space left on device")

    def report(self, report: Any) -> None:
        raise OSError(28, "No space left on device")


def test_a_failing_exporter_on_one_rank_does_not_affect_other_reports() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync, fddp.Communicator(group, timeout_s=5) as of:
            exporters = [Full()] if group.rank == 0 else []
            monitor = fddp.watch.Monitor(of, exporters=exporters)
            outcome = []
            for _ in range(2):
                _, info = sync(mlp(), with_info=True)
                outcome.append(ending(lambda info=info: monitor.observe(info)).kinds)
            return outcome, ending(monitor.report).kinds[0]

    full, well = fddp.loopback(2, run)
    assert [kinds[0] for kinds in full[0]] == ["OSError", "OSError"]
    assert full[1] == "OSError"
    assert well == ([("no error",)] * 2, "no error")


class Leisurely:
    """An exporter that takes its time."""

    def step(self, info: Any, record: Any) -> None:
        time.sleep(DELAY_S)

    def report(self, report: Any) -> None:
        time.sleep(DELAY_S)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, 0, 1])
def test_exporter_time_is_not_a_phase_of_the_rank(slow: int | None) -> None:
    """Slow ones on rank 0 are distinguished from its own input, and from other ranks' input."""

    def run(group: Any) -> tuple[fddp.watch.Monitor, MonitorReport]:
        exporters = [Leisurely()] if group.rank == 0 else []
        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(mlp_loss, with_info=True)
            monitor = fddp.watch.Monitor(sync, exporters=exporters)
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
    assert str(report) == str(other)
    held = [one for one in report.stragglers if one.behind_s > quick_s]
    assert [(one.rank, one.phase) for one in held] == ([] if slow is None else [(slow, "input")])
    assert all(one.behind_s < most_s for one in held), "the input's delay alone"
    if slow != 0:
        assert phases["input"].median_s < quick_s
    inputs = [e["args"] for e in check_events(monitor_trace(monitor)) if e["name"] == "input"]
    assert all(own["monitor_ms"] >= 1e3 * DELAY_S for own in inputs)


def monitor_trace(monitor: fddp.watch.Monitor) -> str:
    """Of its own rank alone."""
    return chrome_trace([trace_message(monitor.steps)])


def test_exporter_time_is_not_part_of_the_next_forward_pass() -> None:
    """Both calls of a wrapped module come before both backward passes."""

    def run(group: Any) -> fddp.watch.Monitor:
        model = fddp.DistributedDataParallel(torch.nn.Linear(8, 1), process_group=group)
        exporters = [Leisurely()] if group.rank == 0 else []
        monitor = fddp.watch.Monitor(model, exporters=exporters)
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


@pytest.mark.slow
def test_waiting_between_steps_is_not_slow() -> None:
    """In the votes of `uneven` and in operators, with names of phases or without. Rank 0 has two
    inputs fewer; rounds without input are observed, too."""

    def run(group: Any) -> Any:
        def inputs() -> Iterator[Tensor]:
            for number in range(STEPS - 2 * (group.rank == 0)):
                time.sleep(DELAY_S * group.rank)
                yield batch(0, number)

        with fddp.GradSync(mlp(), group=group) as sync:
            step, monitor = sync.value_and_grad(mlp_loss, with_info=True), fddp.watch.Monitor(sync)
            for x in fddp.uneven(inputs(), sync):
                with monitor.phase("metrics"):
                    time.sleep(DELAY_S * group.rank)
                    with monitor.phase("mean"):
                        fddp.pmean(torch.ones(3), group)
                monitor.observe(step(mlp(), x)[2])
            return monitor.steps, monitor.report()

    outcome = fddp.loopback(2, run)
    for steps, report in outcome:
        check_steps_add_up(steps)
        assert [rank.last for rank in report.ranks] == [STEPS - 1] * 2
    quick, slow = (rank.phases for rank in outcome[0][1].ranks)
    assert slow["input"].median_s >= DELAY_S
    assert slow["metrics"].median_s >= DELAY_S
    assert quick["wait"].median_s > DELAY_S
    # Where votes and means counted as the rank's own, these would be as long as its waits.
    assert quick["input"].median_s < DELAY_S / 2.0
    assert quick["mean"].median_s < DELAY_S / 2.0


def test_steps_of_several_syncs_may_be_observed_by_one_monitor() -> None:
    """A critic and a generator, whose steps have numbers of their own."""

    def train_monitored(group: Any) -> tuple[int, int, list[bool]]:
        params = {"w": torch.ones(3)}
        with fddp.GradSync(params, group=group) as often, fddp.GradSync(params, group=group) as now:
            monitor = fddp.watch.Monitor(group, window=4)
            for sync in [often] * 9 + [now] * 2:
                monitor.observe(sync(params, with_info=True)[1])
            (own, _) = monitor.report().ranks
            has_input = ["input" in record.phases_s for record in monitor.steps]
            return own.first, own.last, has_input

    assert fddp.loopback(2, train_monitored) == [(7, 1, [True, True, False, True])] * 2


def test_an_info_counts_once() -> None:
    def run(group: Any) -> int:
        with fddp.GradSync(mlp(), group=group) as sync:
            _, info = sync(mlp(), with_info=True)
            monitor = fddp.watch.Monitor(group)
            monitor.observe(info)
            monitor.observe(info)
            return len(monitor.steps)

    assert fddp.loopback(1, run) == [1]


def test_rank_in_another_call_is_reported() -> None:
    def run(group: Any) -> Any:
        monitor = fddp.watch.Monitor(group)
        monitor._steps.extend(train_record())
        seen = ending(lambda: monitor.report() if group.rank else fddp.pmean(torch.ones(3), group))
        fddp.pmean(torch.ones(3), group)  # and the group is usable
        return seen

    for seen in fddp.loopback(2, run):
        assert seen.kinds[0] == "DesyncError"
        assert "all_gather" in seen.text
        assert "pmean" in seen.text


def test_a_report_shows_phases_and_the_finding() -> None:
    def rank(number: int, forward_s: float) -> RankSummary:
        times = StepTimes((), 1.0, 2.0, 3.0, begun_s=0.5)
        phases_s = {"input": 0.001, "forward": forward_s, "backward": 0.02, "wait": 0.003}
        return RankSummary.of(number, [StepRecord(n, phases_s, times) for n in range(4, 13)])

    report = MonitorReport.of([rank(0, 0.010), rank(1, 0.060)])
    assert str(report).splitlines() == [
        "steps 4 to 12, 2 ranks; ms, median ± MAD",
        "rank        input       forward      backward         wait          step",
        "   0  1.00 ± 0.00  10.00 ± 0.00  20.00 ± 0.00  3.00 ± 0.00  34.00 ± 0.00",
        "   1  1.00 ± 0.00  60.00 ± 0.00  20.00 ± 0.00  3.00 ± 0.00  84.00 ± 0.00",
        "",
        "rank 1 holds the others up by 50.0 ms a step (85% of it), most of all in forward "
        "(+50.0 ms)",
    ]
    linked = MonitorReport.of([replace(report.ranks[0], link_s=0.004), report.ranks[1]])
    assert [line.split()[-1] for line in str(linked).splitlines()[1:3]] == ["link", "4.00"]
    assert "<td>60.00 ± 0.00</td>" in report._repr_html_()
    assert json.loads(report.to_json())["stragglers"][0][:2] == [1, "forward"]
    alone = MonitorReport.of([rank(0, 0.010)])
    assert str(alone).endswith("no straggler: there is one rank")
    alike = [rank(0, 0.010), rank(1, 0.010)]
    assert MonitorReport.of(alike).finding == (
        "no straggler: no rank takes longer for its own part than the others, beyond noise"
    )
