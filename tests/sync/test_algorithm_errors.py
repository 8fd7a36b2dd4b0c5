"""Bad input for algorithms, meshes, schedules and shards: errors on every rank of a usable
group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp import Topology
from fddp.errors import PeerError
from fddp.testing import assert_mean
from tests.support.endings import Ending, ending
from tests.support.models import rand
from tests.support.ranks import Launch

GRID = Topology(host=2, local=2)
FLAT = Topology(world=4)


def params() -> dict[str, Tensor]:
    return {"a": torch.ones(3), "b": torch.full((2,), 2.0)}


def schedule(topology: Topology = GRID, algorithm: Any = "all_reduce", **options: Any) -> Any:
    plan = fddp.plan_buckets(params())
    return fddp.make_schedule(plan, topology, algorithm=algorithm, **options)


def broken() -> fddp.Schedule:
    """Without the part between hosts."""
    good = schedule(algorithm="hierarchical")
    ops = tuple(
        op._replace(axes=("local",), region=op.region._replace(shard=()))
        if op.kind == "all_reduce" and op.axes == ("host",)
        else op
        for op in good.ops
    )
    return replace(good, ops=ops)


Build = Callable[[Any], fddp.GradSync]


def sync(source: Callable[[], Any] = params, **options: Any) -> Build:
    return lambda group: fddp.GradSync(source(), group=group, **options)


# The same on all ranks: the error's kind, and what its text must hold.
ALIKE: dict[str, tuple[Build, str, tuple[str, ...]]] = {
    "an unknown algorithm": (
        sync(algorithm="ring"),
        "ValueError",
        ("algorithm must be one of all_reduce, hierarchical, reduce_scatter, got 'ring'",),
    ),
    "all_gather": (
        sync(algorithm="all_gather"),
        "ValueError",
        ("got 'all_gather'",),
    ),
    "a mesh of another size": (
        sync(mesh=Topology(host=2, local=3)),
        "ValueError",
        ("Topology(host=2, local=3) has 6 ranks", "the group 4"),
    ),
    "no mesh": (
        sync(mesh=(2, 2)),
        "TypeError",
        ("mesh must be a Topology or a DeviceMesh, got tuple",),
    ),
    "hierarchical without a mesh": (
        sync(algorithm="hierarchical"),
        "ValueError",
        ("at least two axes", "got Topology(world=4)"),
    ),
    "hierarchical on one axis": (
        sync(algorithm="hierarchical", mesh=FLAT),
        "ValueError",
        ("at least two axes", "got Topology(world=4)"),
    ),
    "a sparse leaf in shards": (
        sync(algorithm="reduce_scatter", sparse=("a",)),
        "ValueError",
        ("'reduce_scatter' can't shard the sparse leaf 'a'", "select="),
    ),
    "a schedule and an algorithm": (
        sync(schedule, algorithm="reduce_scatter"),
        "ValueError",
        ("pass algorithm and reduce_dtype to make_schedule instead",),
    ),
    "a schedule and a reduce_dtype": (
        sync(schedule, reduce_dtype=torch.float32),
        "ValueError",
        ("pass algorithm and reduce_dtype to make_schedule instead",),
    ),
    "a schedule and a cap": (
        sync(schedule, bucket_cap_mb=1.0),
        "ValueError",
        ("pass bucket_cap_mb",),
    ),
    "a schedule and select": (
        sync(schedule, select=lambda path: True),
        "ValueError",
        ("select to plan_buckets instead",),
    ),
    "a schedule for more ranks": (
        sync(lambda: schedule(Topology(host=2, local=4))),
        "ValueError",
        ("the schedule is for Topology(host=2, local=4)", "the group has 4 ranks"),
    ),
    "a schedule for another mesh": (
        sync(schedule, mesh=FLAT),
        "ValueError",
        ("Topology(host=2, local=2)", "Topology(world=4)"),
    ),
    "a schedule that reduces nothing": (
        sync(lambda: schedule(algorithm="all_gather")),
        "ValueError",
        ("'replicated', which reduces nothing", "'replicated_mean' or 'sharded_mean'"),
    ),
    "a broken schedule": (
        sync(broken),
        "ScheduleError",
        ("bucket 0", "'a'", "local"),
    ),
    "a schedule without its end": (
        sync(lambda: replace(schedule(), ops=schedule().ops[:-1])),
        "ScheduleError",
        ("bucket 0", "unpack"),
    ),
}


def build(group: Any, name: str) -> Ending:
    end = ending(lambda: ALIKE[name][0](group))
    assert_usable(group)
    return end


def assert_usable(group: Any) -> None:
    """A right one works on the same group."""
    with fddp.GradSync(params(), group=group, mesh=GRID, algorithm="hierarchical") as good:
        assert_mean(good, [{"a": rand(3, seed=r).float(), "b": None} for r in range(4)])


@pytest.mark.parametrize("name", ALIKE)
def test_mistakes_on_every_rank_are_refused(name: str) -> None:
    _, kind, texts = ALIKE[name]
    for end in fddp.loopback(4, build, name):
        assert end.kinds[0] == kind
        assert all(text in end.text for text in texts), end.text


@pytest.mark.parametrize("name", ["an unknown algorithm", "a broken schedule"])
def test_the_same_on_processes(launch: Launch, name: str) -> None:
    assert {end.kinds[0] for end in launch(4, build, name)} == {ALIKE[name][1]}


# What rank 0 and what the last rank builds; what the error must hold.
MISMATCHES: dict[str, tuple[Build, Build, tuple[str, ...]]] = {
    "algorithm": (
        sync(mesh=GRID),
        sync(mesh=GRID, algorithm="hierarchical"),
        ("algorithm is all_reduce on rank 0 and hierarchical on rank 3", "same algorithm"),
    ),
    "shards": (
        sync(algorithm="reduce_scatter"),
        sync(),
        ("algorithm is reduce_scatter on rank 0 and all_reduce on rank 3",),
    ),
    "mesh": (
        sync(mesh=Topology(host=4, local=1), algorithm="hierarchical"),
        sync(mesh=GRID, algorithm="hierarchical"),
        ("mesh is Topology(host=4, local=1) on rank 0", "Topology(host=2, local=2) on rank 3"),
    ),
    "names of axes": (
        sync(mesh=Topology(a=2, b=2), algorithm="hierarchical"),
        sync(mesh=Topology(b=2, a=2), algorithm="hierarchical"),
        ("mesh is Topology(a=2, b=2) on rank 0", "same mesh on every rank"),
    ),
    "a schedule and a tree": (
        sync(schedule, mesh=GRID),
        sync(mesh=GRID),
        ("given is True on rank 0 and False on rank 3", "on every rank or on none"),
    ),
    "a schedule and its plan": (
        sync(schedule, mesh=GRID),
        sync(lambda: schedule().plan, mesh=GRID),
        ("schedule is ", "None on rank 3", "same schedule on every rank"),
    ),
    "scalings": (
        sync(schedule),
        sync(lambda: schedule(scaling="average")),
        ("schedule is ", "same schedule on every rank"),
    ),
    "a broken schedule on one rank": (
        sync(broken),
        sync(lambda: schedule(algorithm="hierarchical")),
        ("schedule is ",),
    ),
}


def build_differently(group: Any, name: str) -> Ending:
    first, other, _ = MISMATCHES[name]
    last = (group.rank if hasattr(group, "_state") else group.rank()) == 3
    end = ending(lambda: (other if last else first)(group))
    assert_usable(group)
    return end


@pytest.mark.parametrize("name", MISMATCHES)
def test_differences_between_ranks_are_refused(name: str) -> None:
    for end in fddp.loopback(4, build_differently, name):
        assert end.kinds[0] == "PlanMismatchError"
        assert all(text in end.text for text in MISMATCHES[name][2]), end.text


@pytest.mark.parametrize("name", ["algorithm", "mesh"])
def test_differences_on_processes(launch: Launch, name: str) -> None:
    assert {end.kinds[0] for end in launch(4, build_differently, name)} == {"PlanMismatchError"}


def test_mistake_on_one_rank_is_raised_on_the_others() -> None:
    def run(group: Any) -> Ending:
        mesh = Topology(host=3) if group.rank == 2 else GRID
        end = ending(lambda: fddp.GradSync(params(), group=group, mesh=mesh))
        assert_usable(group)
        return end

    for rank, end in enumerate(fddp.loopback(4, run)):
        assert end.kinds[0] == ("ValueError" if rank == 2 else "PlanMismatchError")
        assert "Topology(host=3) has 3 ranks" in end.text
        assert "rank 2" in end.text


# Methods that do not fit


@pytest.mark.parametrize("algorithm", ["all_reduce", "hierarchical", "reduce_scatter"])
def test_methods_of_another_algorithm(algorithm: Any) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(params(), group=group, mesh=GRID, algorithm=algorithm) as own:
            whole = {"sync(grads)": own, "reduce_(grads)": own.reduce_}
            shards = {
                "reduce_scatter(grads)": own.reduce_scatter,
                "all_gather(shards)": own.all_gather,
                "shard(tree)": own.shard,
            }
            unfit = whole if algorithm == "reduce_scatter" else shards
            for name, call in unfit.items():
                end = ending(lambda: call(params()))  # noqa: B023 - called at once
                assert end.kinds[0] == "ValueError"
                assert end.text.startswith(f"{name} needs a GradSync whose schedule gives a ")
                assert "build it with another algorithm" in end.text
            assert_mean(own, [params()] * 4)

    fddp.loopback(4, run)


def test_closed() -> None:
    def run(group: Any) -> None:
        own = fddp.GradSync(params(), group=group, algorithm="reduce_scatter")
        shards = own.reduce_scatter(params())
        own.close()
        for call in (
            lambda: own.reduce_scatter(params()),
            lambda: own.all_gather(shards),
            lambda: own.value_and_grad(lambda p: p["a"].sum())(params()),
        ):
            assert ending(call).kinds[0] == "ClosedError"
        assert own.shard(params())["a"].shape == shards["a"].shape, "it needs no group"

    fddp.loopback(2, run)


# Shards that are none


SHARDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too long": (
        lambda shards: {**shards, "a": torch.ones(9)},
        "leaf 'a' of the shards is float32 of shape (9,) where this rank owns",
    ),
    "whole leaves": (
        lambda shards: params(),
        "of the shards is float32 of shape",
    ),
    "of another dtype": (
        lambda shards: {**shards, "b": shards["b"].double()},
        "leaf 'b' of the shards is float64 of shape",
    ),
    "in another shape": (
        lambda shards: {**shards, "b": shards["b"][:, None]},
        "leaf 'b' of the shards is float32 of shape",
    ),
    "no tensors": (
        lambda shards: {**shards, "a": 3.0},
        "leaf 'a' of the shards is a float where this rank owns",
    ),
    "of another structure": (
        lambda shards: {"a": shards["a"]},
        "shards does not have the expected leaves",
    ),
}


def gather_wrongly(group: Any, name: str) -> tuple[Ending, list[float]]:
    with fddp.GradSync(params(), group=group, algorithm="reduce_scatter") as own:
        shards = own.reduce_scatter(params())
        wrong = SHARDS[name][0](shards) if own.rank == 1 else shards
        end = ending(lambda: own.all_gather(wrong))
        assert_mean(own, [params()] * own.world_size)
        return end, own.all_gather(shards)["a"].tolist()


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_a_rank_does_not_own(name: str) -> None:
    for rank, (end, whole) in enumerate(fddp.loopback(2, gather_wrongly, name)):
        text = end.text if rank == 1 else end.failures[1]
        assert end.kinds[0] == ("TreeMismatchError" if rank == 1 else "PeerError")
        assert SHARDS[name][1] in text
        assert whole == [1.0] * 3


def leave_out(group: Any) -> Ending:
    with fddp.GradSync(params(), group=group, algorithm="reduce_scatter") as own:
        shards = own.shard(params())
        missing = {**shards, "a": None} if own.rank == 0 else shards
        end = ending(lambda: own.all_gather(missing))
        assert own.all_gather({**shards, "a": None})["a"] is None
        assert_mean(own, [params()] * own.world_size)
        return end


def test_a_shard_that_is_none_on_some_ranks(launch: Launch) -> None:
    for end in launch(2, leave_out):
        assert end.kinds[0] == "TreeMismatchError"
        assert "leaf 'a' of the shards is None on 1 of 2 ranks" in end.text
        assert "pass its shard on every rank, or None on all" in end.text


def test_wrong_shards_on_processes(launch: Launch) -> None:
    first, second = launch(2, gather_wrongly, "too long")
    assert (first[0].kinds[0], second[0].kinds[0]) == ("PeerError", "TreeMismatchError")


def test_gathering_inside_a_transform() -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(params(), group=group, algorithm="reduce_scatter") as own:
            shards = own.shard(params())

            def loss_fn(p: Any) -> Tensor:
                return own.all_gather(fddp.tree_map(lambda s, x: s * x.sum(), shards, p))["a"].sum()

            assert ending(lambda: torch.func.grad(loss_fn)(params())).kinds[0] == "TransformError"
            assert_mean(own, [params()] * 2)

    fddp.loopback(2, run)


def test_different_calls_are_reported() -> None:
    def run(group: Any) -> Ending:
        with fddp.GradSync(params(), group=group, algorithm="reduce_scatter", timeout_s=5) as own:
            shards = own.shard(params())
            if group.rank == 0:
                return ending(lambda: own.all_gather(shards))
            return ending(lambda: own.reduce_scatter(params()))

    for end in fddp.loopback(2, run):
        assert "DesyncError" in end.kinds


def wrong_on_one_rank(group: Any, algorithm: Any, wrong: str) -> tuple[str, list[float]]:
    grads = {"a": torch.arange(4.0)}
    with fddp.GradSync(grads, group=group, algorithm=algorithm) as sync:
        right = sync.reduce_scatter if algorithm == "reduce_scatter" else sync
        outcome = ""
        try:
            (getattr(sync, wrong) if sync.rank == 1 else right)(grads)
        except (ValueError, PeerError) as error:
            outcome = f"{type(error).__name__}: {error}"
        return outcome, right(grads)["a"].tolist()


@pytest.mark.parametrize(
    ("algorithm", "wrong"),
    [
        ("reduce_scatter", "__call__"),
        ("reduce_scatter", "reduce_"),
        ("all_reduce", "reduce_scatter"),
        ("all_reduce", "all_gather"),
    ],
)
def test_a_call_with_another_signature_on_one_rank(
    launch: Launch, algorithm: str, wrong: str
) -> None:
    (outcome, first), (own, second) = launch(2, wrong_on_one_rank, algorithm, wrong)
    assert outcome.startswith("PeerError: rank 1 failed at step 0: ValueError:")
    assert own.startswith("ValueError: ")
    assert "needs a GradSync whose schedule gives a" in own
    whole = [0.0, 1.0, 2.0, 3.0]
    assert (first + second if algorithm == "reduce_scatter" else first) == whole
