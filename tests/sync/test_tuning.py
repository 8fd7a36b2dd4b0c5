"""`GradSync.tune`: one plan on all ranks, the better one, and right gradients; `measure_cost`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CostModel, Sample
from fddp.errors import PeerError, PlanMismatchError, UnevenError
from fddp.sync import autotune, measure
from fddp.sync.measure import measure_axes, measure_cost
from fddp.transport import Group, LoopbackGroup, open_transport
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits
from tests.support.ranks import Launch, RankPool


def tuned(group: Any, mesh: fddp.Topology | None = None, algorithm: Any = "all_reduce") -> Any:
    """The report, the plan in force after it, and the gradients of a step."""
    params = mlp()
    with fddp.GradSync(params, group=group, mesh=mesh, algorithm=algorithm) as sync:
        step = sync.value_and_grad(mlp_loss)
        report = sync.tune(step, params, batch(sync.rank, 0), rounds=2)
        return report, sync.plan, step(params, batch(sync.rank, 1))[1]


def check(results: list[Any]) -> None:
    reports = [report for report, _, _ in results]
    first = reports[0]
    for report, plan, _ in results:
        assert report.after.shared_digest == first.after.shared_digest
        assert plan == (report.after if report.adopted else report.before)
        faster = report.measured_after_s < report.measured_before_s
        assert report.adopted == (faster and report.after != report.before)
        assert (report.costs, report.ready_times_s) == (first.costs, first.ready_times_s)
        assert report.simulated_after_s <= report.simulated_before_s * (1 + 1e-9)
    times_s = first.ready_times_s
    assert len(times_s) == len(first.before.leaves)
    assert all(time_s > 0.0 for time_s in times_s)
    # The last layer's gradients come first.
    by_path = dict(zip(first.before.paths, times_s, strict=True))
    assert by_path["layer3.weight"] < by_path["layer0.weight"]
    grads = [grads for _, _, grads in results]
    assert same_bits(grads)
    inputs = [(batch(rank, 1),) for rank in range(len(results))]
    truth = mean_gradients(mlp_loss, mlp(), inputs, [1.0] * len(results))
    assert largest_difference(grads[0], truth) < 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_end_with_the_better_plan(launch: Launch, world_size: int) -> None:
    check(launch(world_size, tuned))


def test_along_axes(launch: Launch) -> None:
    results = launch(4, tuned, fddp.Topology(host=2, local=2), "hierarchical")
    check(results)
    assert set(results[0][0].costs) == {"host", "local"}


@pytest.mark.parametrize("faster", ["before", "after"])
def test_measured_times_decide(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    params = mlp()
    caps = fddp.plan_buckets(params, bucket_cap_mb=1e-4, first_bucket_mb=1e-4).caps_bytes
    assert len(caps) == 2
    timings = (1.0, 2.0) if faster == "before" else (2.0, 1.0)
    monkeypatch.setattr(autotune, "_compared", lambda *_: timings)

    def on_rank(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group, bucket_cap_mb=1e-4, first_bucket_mb=1e-4) as sync:
            step = sync.value_and_grad(mlp_loss)
            report = sync.tune(step, mlp(), batch(sync.rank, 0), rounds=1)
            return report, sync.plan

    for report, plan in fddp.loopback(2, on_rank):
        assert report.after != report.before
        assert report.adopted is (faster == "after")
        assert plan == getattr(report, faster)
        assert report.measured_gain == (-1.0 if faster == "before" else 0.5)
        kept = "new" if report.adopted else "old"
        assert f"the {kept} plan is kept" in str(report)


def test_unused_leaves_have_no_time_and_local_ones_may_differ() -> None:
    def on_rank(group: Any) -> Any:
        params = {"used": torch.ones(3), "unused": torch.ones(3), "count": torch.ones(2).long()}
        params["own"] = torch.ones(2 + group.rank)
        with fddp.GradSync(params, group=group, select=lambda path: path != "own") as sync:
            step = sync.value_and_grad(lambda p: p["used"].sum() * p["own"].sum())
            return sync.tune(step, params, rounds=1), step(params)[1]["unused"]

    for report, unused in fddp.loopback(2, on_rank):
        by_path = dict(zip(report.before.paths, report.ready_times_s, strict=True))
        assert by_path["used"] > 0.0
        assert math.isnan(by_path["unused"])
        assert math.isnan(by_path["count"])
        assert unused is None


def test_gradients_that_are_all_there() -> None:
    """Each from the start of its step, so that no time is longer than all steps."""

    def on_rank(group: Any) -> Any:
        grads = {"a": torch.ones(1000), "b": torch.ones(1000)}
        with fddp.GradSync(grads, group=group) as sync:
            start_s = time.perf_counter()
            report = sync.tune(sync, grads, rounds=1)
            return report.ready_times_s, time.perf_counter() - start_s

    for times_s, took_s in fddp.loopback(2, on_rank):
        assert all(0.0 <= time_s <= took_s for time_s in times_s)


# What can't be tuned


def refused(group: Any, case: str) -> str:
    params = mlp(layers=2)
    options: dict[str, Any] = {"algorithm": "reduce_scatter"} if case == "shards" else {}
    source: Any = params
    if case == "schedule":
        topology = fddp.Topology(world=2)
        source = fddp.make_schedule(fddp.plan_buckets(params), topology)
    with fddp.GradSync(source, group=group, **options) as sync:
        step: Any = sync.value_and_grad(mlp_loss)
        plan = sync.plan
        rounds: Any = {"rounds": 0, "mismatch": 1 + sync.rank}.get(case, 1)
        if case == "no step":
            step = mlp_loss
        try:
            if case == "uneven":
                for x in fddp.uneven([batch(sync.rank, 0)], sync):
                    step(params, x)
                    sync.tune(step, params, x)
            sync.tune(step, params, batch(sync.rank, 0), rounds=rounds)
        except (ValueError, PlanMismatchError, UnevenError) as error:
            if case == "uneven":
                return f"{type(error).__name__}: {error}"
            assert sync.plan.shared_digest == plan.shared_digest or case == "no step"
            step = sync.value_and_grad(mlp_loss)
            step(params, batch(sync.rank, 0))
            return f"{type(error).__name__}: {error}"
    return "went through"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rounds", "ValueError: rounds must be an int of at least 1, got 0"),
        ("mismatch", "PlanMismatchError: rounds is 1 on rank 0 and 2 on rank 1; pass"),
        ("shards", "ValueError: the schedule can't change, because it was passed"),
        ("schedule", "ValueError: the schedule can't change, because it was passed"),
        ("no step", "the step did not synchronise; pass a step made by value_and_grad"),
        ("uneven", "UnevenError: tune synchronises many times"),
    ],
)
def test_refusals(case: str, text: str) -> None:
    for outcome in fddp.loopback(2, refused, case):
        assert text in outcome


def failing(group: Any, when: str) -> Any:
    """A step that fails on rank 1 within its loss function, or outside of its synchronisation."""
    params = mlp(layers=2)
    calls: Iterator[int] = iter(range(100))
    is_due = False

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        if is_due and when == "within":
            raise ZeroDivisionError("on purpose")
        return mlp_loss(params, x)

    def step(params: Any, x: Tensor) -> None:
        nonlocal is_due
        is_due = sync.rank == 1 and next(calls) == 4
        if is_due and when == "before":
            raise ZeroDivisionError("on purpose")
        if is_due and when == "instead":
            return
        synced(params, x)
        if is_due and when == "after":
            raise ZeroDivisionError("on purpose")

    with fddp.GradSync(params, group=group) as sync:
        synced = sync.value_and_grad(loss_fn)
        synced(params, batch(sync.rank, 0))
        plan = sync.plan
        with pytest.raises((ZeroDivisionError, ValueError, PeerError)) as caught:
            sync.tune(step, params, batch(sync.rank, 0), rounds=2)
        assert sync.plan == plan
        is_due = False
        return type(caught.value).__name__, synced(params, batch(sync.rank, 1))[1]


@pytest.mark.parametrize("when", ["before", "within", "instead", "after"])
def test_a_failed_step_is_raised_and_keeps_the_old_plan(when: str) -> None:
    results = fddp.loopback(2, failing, when)
    own = "ValueError" if when == "instead" else "ZeroDivisionError"
    assert [name for name, _ in results] == ["PeerError", own]
    assert same_bits([grads for _, grads in results])


# Measured samples: their structure, and that all ranks have the same; times are not asserted

SQUARE = Topology(host=2, local=2)
SIZES_BYTES = (1, 1000, 70_000)


def small_on_rank(group: Group) -> tuple[Sample, ...]:
    return measure_cost(group, sizes_bytes=SIZES_BYTES, repeats=2, timeout_s=20)


@pytest.mark.parametrize("world_size", [2, 3])
def test_samples_of_a_group(launch: Launch, world_size: int) -> None:
    samples, *others = launch(world_size, small_on_rank)
    assert all(other == samples for other in others)
    numels = [max(1, size // 4 // world_size) * world_size for size in SIZES_BYTES]
    assert [(s.kind, s.nbytes, s.ranks, s.busy) for s in samples] == [
        ("all_reduce", 4 * numel, world_size, busy) for busy in (False, True) for numel in numels
    ] * 2
    assert all(0.0 < sample.time_s < math.inf for sample in samples)
    cost = CostModel.fit(samples)
    assert 0.0 < cost.overlap <= 1.0


def test_the_slowest_ranks_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_time_s", lambda link, probe: 1.0 + link.transport.rank)
    samples = fddp.loopback(3, small_on_rank)[0]
    assert {sample.time_s for sample in samples} == {3.0}


def axes_on_rank(group: Group) -> dict[str, tuple[Sample, ...]]:
    with open_transport(group, timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, [("local",)])
        by_axis = measure_axes(transport, SQUARE, sizes_bytes=SIZES_BYTES, repeats=1)
        total = torch.ones(1)
        transport.all_reduce(total, axes=("local",)).wait("a group that was open before")
        assert total.item() == 2
    whole = measure_cost(group, mesh=SQUARE, sizes_bytes=SIZES_BYTES, repeats=1, timeout_s=20)
    assert whole.keys() == by_axis.keys()
    return by_axis


def test_samples_of_each_axis(launch: Launch) -> None:
    first, *others = launch(4, axes_on_rank)
    assert all(other == first for other in others)
    assert list(first) == ["host", "local"]
    for samples in first.values():
        assert {sample.ranks for sample in samples} == {2}
        assert [(s.kind, s.busy) for s in samples[:: len(SIZES_BYTES)]] == [
            ("all_reduce", False),
            ("reduce_scatter", False),
            ("all_gather", False),
            ("all_reduce", True),
        ]
        assert CostModel.fit(samples).algorithm == "ring"


def mesh_on_rank(rank: int, world_size: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("host", "local"))
    by_axis = measure_cost(mesh=mesh, sizes_bytes=(64,), repeats=1)
    assert all(sample.kind == "all_reduce" for sample in by_axis["local"])
    return list(by_axis)


def test_a_device_mesh_brings_its_axes(ranks: RankPool) -> None:
    assert ranks.run(2, mesh_on_rank) == [["local"], ["local"]]


def mistakes_on_rank(group: Group) -> None:
    for wrong in ({"repeats": 0}, {"repeats": 1.5}, {"sizes_bytes": (4, -4)}):
        (name, value), *_ = wrong.items()
        with pytest.raises(ValueError, match=f"{name}: .* is no int of at least 1"):
            measure_cost(group, timeout_s=20, **{name: value})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="has 4 ranks and the transport 2"):
        measure_cost(group, mesh=SQUARE, timeout_s=20)
    with pytest.raises(TypeError, match="mesh must be a Topology or a DeviceMesh, got str"):
        measure_cost(group, mesh="local")  # type: ignore[call-overload]


def test_mistakes_are_named(launch: Launch) -> None:
    launch(2, mistakes_on_rank)


def test_disagreeing_ranks_are_named_with_the_difference() -> None:
    def differ(group: LoopbackGroup) -> None:
        with pytest.raises(PlanMismatchError, match=r"rank 0 and \[64\], 2 and cpu on rank 1"):
            measure_cost(group, sizes_bytes=(64,), repeats=1 + group.rank)

    fddp.loopback(2, differ)


def test_one_rank_has_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="a group of one rank has nothing to measure"):
        fddp.loopback(1, measure_cost)
