"""Detection of stragglers, by pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fddp.watch import MonitorReport, RankSummary, RobustStats
from fddp.watch.stragglers import find_stragglers
from tests.support.examples import examples
from tests.support.monitored import record_of


def summary_of(rank: int, own_s: Sequence[dict[str, float]]) -> RankSummary:
    """Summary of a rank with these times of its own phases; it waits for no other."""
    return RankSummary.of(rank, [record_of(n, {**of, "wait": 1e-3}) for n, of in enumerate(own_s)])


PHASES = ("input", "forward", "backward")
noise = st.floats(-1.0, 1.0)
steps_of_rank = st.lists(st.tuples(noise, noise, noise), min_size=24, max_size=24)


def steps_from(noises: Sequence[tuple[float, ...]], scale_s: float) -> list[dict[str, float]]:
    typical_s = {"input": 0.005, "forward": 0.010, "backward": 0.020}
    return [
        {p: typical_s[p] + scale_s * of for p, of in zip(PHASES, noises_, strict=True)}
        for noises_ in noises
    ]


@given(
    st.lists(steps_of_rank, min_size=2, max_size=5),
    st.data(),
    st.sampled_from(PHASES),
    st.floats(0.02, 1.0),
)
@examples(40)
def test_a_delay_is_found_under_any_noise(
    noises: list[Any], data: st.DataObject, phase: str, delay_s: float
) -> None:
    """Noise of a millisecond at most, in any distribution."""
    slow = data.draw(st.integers(0, len(noises) - 1))
    summaries = []
    for rank, of in enumerate(noises):
        steps = steps_from(of, 0.001)
        if rank == slow:
            steps = [{**step, phase: step[phase] + delay_s} for step in steps]
        summaries.append(summary_of(rank, steps))
    found = find_stragglers(summaries)
    assert [(one.rank, one.phase) for one in found] == [(slow, phase)]
    assert found[0].behind_s == pytest.approx(delay_s, abs=0.007)


@given(st.lists(steps_of_rank, min_size=1, max_size=1), st.integers(2, 6))
@examples(20)
def test_ranks_that_are_alike_have_no_straggler(noises: list[Any], world_size: int) -> None:
    steps = steps_from(noises[0], 0.004)
    assert find_stragglers([summary_of(rank, steps) for rank in range(world_size)]) == ()


@pytest.mark.parametrize(
    ("ranks", "steps", "scale_s", "seed"), [(4, 50, 0.003, 7), (2, 9, 0.001, 3)]
)
def test_noise_makes_no_straggler(ranks: int, steps: int, scale_s: float, seed: int) -> None:
    """At most one draw in a hundred names a rank: with 30% of noise, and with 10% over the fewest
    steps that are judged."""
    random = torch.Generator().manual_seed(seed)
    named = 0
    for _ in range(400):
        noises = torch.randn(ranks, steps, 3, generator=random).tolist()
        found = find_stragglers(
            [summary_of(r, steps_from(of, scale_s)) for r, of in enumerate(noises)]
        )
        named += bool(found)
    assert named <= 4


def test_monitor_time_is_apart_from_its_rank() -> None:
    def report_of(*monitor_s: float, slow: int | None = None) -> MonitorReport:
        return MonitorReport.of(
            summary_of(r, [{"input": 0.03 if r == slow else 0.01, "monitor": s}] * 9)
            for r, s in enumerate(monitor_s)
        )

    none = "no straggler: no rank takes longer for its own part than the others, beyond noise"
    slow = "holds the others up by 20.0 ms a step ({}% of it), most of all in input (+20.0 ms)"
    assert report_of(0.04, 0.02, 0.02).finding == none
    assert report_of(0.04, 0.02, 0.02, slow=0).finding == f"rank 0 {slow.format(65)}"
    assert report_of(0.04, 0.02, 0.02, slow=1).finding == f"rank 1 {slow.format(39)}"
    assert "40.00 ± 0.00" in str(report_of(0.04, 0.02)).splitlines()[2]


def test_a_delay_of_one_phase_is_found_through_the_noise_of_others() -> None:
    """Of 200 draws, with a sleep of 20 ms in 12 steps of 35 ms with noise of 8 ms."""
    random = torch.Generator().manual_seed(5)
    found = []
    for _ in range(200):
        noises = torch.randn(2, 12, 3, generator=random) * torch.tensor([0.1, 8.0, 8.0])
        steps = [steps_from(of.tolist(), 0.001) for of in noises]
        late = [{**step, "input": step["input"] + 0.02} for step in steps[1]]
        stragglers = find_stragglers([summary_of(0, steps[0]), summary_of(1, late)])
        found.append([one.rank for one in stragglers])
    assert found.count([1]) >= 196
    assert all(ranks in ([], [1]) for ranks in found)


NOISE_S = (-0.03, 0.03, -0.01, 0.02, -0.02, 0.01, 0.0, 0.03, -0.03)
HICCUP_S = [2.0, *[0.01] * 19]
#: seconds of forward passes by rank, and how far behind which ranks are
EXAMPLES: dict[str, tuple[list[list[float]], dict[int, float]]] = {
    "half of the ranks": ([[0.06] * 9] * 2 + [[0.01] * 9] * 2, {0: 0.05, 1: 0.05}),
    "three of five ranks": (
        [[0.06] * 9] * 3 + [[0.01] * 9] * 2,
        {0: 0.05, 1: 0.05, 2: 0.05},
    ),
    "a delay within noise": ([[0.1 + 0.01 * r + of for of in NOISE_S] for r in range(2)], {}),
    "one slow step": ([[0.01] * 20, HICCUP_S], {}),
    "behind one with a slow step": ([HICCUP_S, [0.06] * 20], {1: 0.05}),
    "few steps": ([[0.01] * 8, [1.01] * 8], {}),
    "just enough steps": ([[0.01] * 9, [1.01] * 9], {1: 1.0}),
    "one rank": ([[0.01] * 9], {}),
    "a tenth of a millisecond": ([[0.002] * 20, [0.0021] * 20], {}),
    "more than half a millisecond": ([[0.002] * 20, [0.0026] * 20], {1: 6e-4}),
    "a hundredth of the step": ([[1.0] * 20, [1.01] * 20], {}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_stragglers(name: str) -> None:
    ranks, behind_s = EXAMPLES[name]
    found = find_stragglers(
        [summary_of(r, [{"forward": s} for s in own]) for r, own in enumerate(ranks)]
    )
    assert {one.rank: one.behind_s for one in found} == pytest.approx(behind_s)


def waiting(rank: int, wait_s: float, link_s: float | None, forward_s: float = 0.01) -> RankSummary:
    """Summary of a rank of which only the waits, link and forward pass are of interest."""
    records = [record_of(n, {"forward": forward_s, "wait": wait_s}) for n in range(9)]
    return replace(RankSummary.of(rank, records), link_s=link_s)


_links = st.lists(st.floats(0.001, 0.002), min_size=3, max_size=8)


@given(_links, st.data(), st.floats(0.02, 1.0), st.floats(0.001, 2.0))
def test_a_slow_link_is_named_for_as_long_as_all_wait(
    links_s: list[float], data: st.DataObject, delay_s: float, wait_s: float
) -> None:
    slow = data.draw(st.integers(0, len(links_s) - 1))
    links_s[slow] += delay_s
    # Each other rank waits for ranks, too; the last one to arrive waits for links alone.
    waits_s = [wait_s + 0.1 * rank for rank in range(len(links_s))]
    found = find_stragglers(
        [waiting(r, *of) for r, of in enumerate(zip(waits_s, links_s, strict=True))]
    )
    step_s = statistics.median(waits_s) + 0.01
    if min(delay_s, wait_s) > 0.02 * step_s + 0.002:
        assert [(one.rank, one.phase) for one in found] == [(slow, "communication")]
        assert found[0].behind_s == pytest.approx(min(delay_s, wait_s), abs=0.002)
    assert all(one.rank == slow for one in found)
    assert all(one.behind_s == one.phase_behind_s <= wait_s for one in found)


@given(_links, st.floats(0.0, 2.0))
def test_links_that_are_alike_make_no_straggler(links_s: list[float], wait_s: float) -> None:
    assert find_stragglers([waiting(r, wait_s, s) for r, s in enumerate(links_s)]) == ()


def test_links_beside_own_work() -> None:
    """A rank is named for the larger of both; a rank whose link is unknown, for its own work."""

    def found(*summaries: RankSummary) -> list[tuple[int, str]]:
        return [(one.rank, one.phase) for one in find_stragglers(summaries)]

    quick = [waiting(0, 0.06, 0.001), waiting(1, 0.06, 0.001)]
    assert found(*quick, waiting(2, 0.05, 0.09, 0.02)) == [(2, "communication")]
    assert found(*quick, waiting(2, 0.05, 0.09, 0.09)) == [(2, "forward")]
    assert found(*quick, waiting(2, 0.05, None, 0.09)) == [(2, "forward")]
    assert found(*quick, waiting(2, 0.00, 0.09)) == [], "hidden behind its own work"
    alone = [waiting(r, 0.05, None) for r in (0, 1)]
    assert found(*alone, waiting(2, 0.05, 0.09)) == [], "with nothing to compare"


def test_stragglers_are_listed_slowest_first() -> None:
    forward_s = [0.01, 0.06, 0.01, 0.11, 0.01]
    report = MonitorReport.of(summary_of(r, [{"forward": s}] * 9) for r, s in enumerate(forward_s))
    assert [one.rank for one in report.stragglers] == [3, 1]
    assert report.straggler == report.stragglers[0]


def test_sums_run_for_others_make_no_straggler() -> None:
    """The last rank to arrive may run them, whereupon its sync takes longer; the rest is noise."""
    steps = [[{"forward": 0.1 + of, "sync": s} for of in NOISE_S] for s in (0.001, 0.02)]
    assert find_stragglers([summary_of(r, own) for r, own in enumerate(steps)]) == ()


@pytest.mark.parametrize(("forward_s", "phase"), [(0.105, "forward"), (0.1, "sync")])
def test_a_late_rank_is_slow_in_sync_for_another_cause(forward_s: float, phase: str) -> None:
    """On a host with fewer cores than ranks it makes way for those that have waited for it."""
    own = [[{"forward": 0.1, "sync": 0.001}] * 9, [{"forward": forward_s, "sync": 0.009}] * 9]
    (found,) = find_stragglers([summary_of(r, steps) for r, steps in enumerate(own)])
    assert (found.rank, found.phase) == (1, phase)


def test_different_steps_are_not_compared() -> None:
    def steps_of(rank: int, first: int) -> RankSummary:
        phases_s = {"forward": 0.01 + rank, "wait": 1e-3}
        return RankSummary.of(rank, [record_of(n, phases_s) for n in range(first, first + 10)])

    report = MonitorReport.of([steps_of(0, 0), steps_of(1, 10), steps_of(2, 0)])
    assert report.stragglers == ()
    spans = "steps 0 to 9 on ranks 0, 2, 10 to 19 on rank 1"
    assert report.finding == (
        f"no finding: the ranks have observed different steps ({spans}); call observe(info) on "
        f"every rank after each step"
    )
    assert str(report).startswith(f"{spans}, 3 ranks; ms")
    alike = MonitorReport.of([steps_of(0, 0), steps_of(1, 0)])
    assert [one.rank for one in alike.stragglers] == [1]


@given(st.lists(steps_of_rank, min_size=2, max_size=4), st.floats(1.0, 1e3), st.randoms())
@examples(25)
def test_the_finding_keeps_its_sense(noises: list[Any], factor: float, random: Any) -> None:
    """Under another unit of time, and under another order of the ranks."""
    steps = [steps_from(of, 0.02) for of in noises]
    found = find_stragglers([summary_of(r, of) for r, of in enumerate(steps)])
    scaled = [[{p: s * factor for p, s in step.items()} for step in of] for of in steps]
    others = [
        RankSummary.of(r, [record_of(n, {**of, "wait": 1e-3 * factor}) for n, of in enumerate(own)])
        for r, own in enumerate(scaled)
    ]
    random.shuffle(others)
    again = find_stragglers(others)
    above = {one.rank for one in again if one.behind_s / factor > 5.1e-4}  # the least lead
    assert above <= {one.rank for one in found} <= {one.rank for one in again}
    for one in found:
        assert one.behind_s > 0.0
        assert one.phase_behind_s > 0.0


def test_a_step_whose_start_is_unknown_does_not_count() -> None:
    """Unless there is no other."""
    first, second = record_of(4, {"forward": 9.0}), record_of(5, {"input": 1.0, "forward": 2.0})
    summary = RankSummary.of(0, [first, second])
    assert (summary.first, summary.last) == (4, 5)
    assert summary.own == summary.step == RobustStats.of([3.0])
    assert RankSummary.of(0, [first]).own == RobustStats.of([9.0])


def test_a_step_without_a_phase_counts_as_zero() -> None:
    records = [record_of(n, {"input": 1.0, "late": 6.0} if n else {"input": 1.0}) for n in (0, 1)]
    assert RankSummary.of(0, records).phases["late"] == RobustStats.of([0.0, 6.0])


def test_phases_of_a_report_are_in_the_order_of_a_step() -> None:
    """Those measured by name are parts of the time before it; the monitor's own comes last."""
    phases_s = dict.fromkeys(["monitor", "sync", "update", "backward", "input", "forward"], 1.0)
    report = MonitorReport.of([summary_of(0, [phases_s] * 9), summary_of(1, [{"clip": 1.0}] * 9)])
    assert report.phases == (
        *("input", "update", "clip", "forward", "backward", "sync", "wait", "monitor"),
    )


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=9))
def test_statistics_are_robust(seconds: list[float]) -> None:
    stats = RobustStats.of(seconds)
    assert min(seconds) <= stats.median_s <= max(seconds) == stats.most_s
