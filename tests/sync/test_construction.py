"""Arguments that ranks must agree on: compared when a `GradSync` is built, errors on every rank."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp import Topology
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of, size_of
from tests.support.ranks import RankPool
from tests.support.simple_step import grads, params, step

MIB = 1048576
RANKS = 4
GRID = Topology(host=2, local=2)
FLAT = Topology(world=4)
Build = Callable[[Any], fddp.GradSync]


def sync(source: Any = params, **options: Any) -> Build:
    """Builds a `GradSync` from a tree, a plan or a schedule, or from a function that makes one."""
    return lambda group: fddp.GradSync(
        source() if callable(source) else source, group=group, **options
    )


def other(**changes: Any) -> dict[str, Any]:
    tree = {**params(), **changes}
    return {key: leaf for key, leaf in tree.items() if leaf is not Ellipsis}


def image(strided: bool) -> dict[str, Tensor]:
    leaf = torch.zeros(2, 3, 4, 5)
    return {"w": leaf.contiguous(memory_format=torch.channels_last) if strided else leaf}


def plan(**options: Any) -> fddp.BucketPlan:
    return fddp.plan_buckets(params(), **options)


def schedule(topology: Topology = GRID, algorithm: Any = "all_reduce", **options: Any) -> Any:
    return fddp.make_schedule(plan(), topology, algorithm=algorithm, **options)


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


# By name: what the first ranks and what the last rank builds; what the error must hold.
MISMATCHES: dict[str, tuple[Build, Build, tuple[str, ...]]] = {
    "shape": (sync(), sync(other(a=torch.ones(4))), ("'a'", "(3,)", "(4,)")),
    "dtype": (sync(), sync(other(a=torch.ones(3).double())), ("'a'", "float32", "float64")),
    "name": (sync(), sync(other(a=..., aa=torch.ones(3))), ("'a'", "'aa'")),
    "a leaf more": (sync(), sync(other(c=torch.ones(1))), ("'c'", "2 leaves", "3")),
    "a leaf less": (sync(), sync(other(b=...)), ("'b'", "2 leaves", "1")),
    "strides": (sync(image(False)), sync(image(True)), ("'w'", "strides (60, 1, 15, 3)")),
    "bucket_cap_mb": (
        sync(bucket_cap_mb=25.0),
        sync(bucket_cap_mb=10),
        (str(25 * MIB), str(10 * MIB), "bucket_cap_mb"),
    ),
    "first_bucket_mb": (
        sync(),
        sync(first_bucket_mb=2.0),
        (str(MIB), str(2 * MIB), "first_bucket_mb"),
    ),
    "reduce_dtype": (
        sync(),
        sync(reduce_dtype=torch.float32),
        ("reduce_dtype", "None", "float32"),
    ),
    "transport": (
        sync(),
        lambda g: fddp.GradSync(params(), group=g, transport=transport_of(g)),
        ("transport", "auto"),
    ),
    "sparse": (sync(), sync(sparse=("a",)), ("'a'", "sparse")),
    "select": (sync(), sync(select=lambda path: path != "a"), ("'a'", "select")),
    "plan and parameters": (sync(plan), sync(), ("plan", "True", "False")),
    "plans of another order": (
        sync(plan(order=[0, 1])),
        sync(plan(order=[1, 0])),
        ("same leaves", "same plan"),
    ),
    "algorithm": (
        sync(mesh=GRID),
        sync(mesh=GRID, algorithm="hierarchical"),
        ("algorithm is all_reduce on rank 0 and hierarchical on rank 3", "same algorithm"),
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
        sync(plan, mesh=GRID),
        ("schedule is ", "None on rank 3", "same schedule on every rank"),
    ),
    "nonfinite": (
        sync(nonfinite="skip"),
        sync(nonfinite="raise"),
        ("nonfinite is skip on rank 0 and raise on rank 3; pass the same nonfinite on every",),
    ),
    "deterministic": (
        sync(deterministic=True),
        sync(),
        ("deterministic is True on rank 0 and False on rank 3",),
    ),
    "virtual_ranks": (
        sync(virtual_ranks=4),
        sync(virtual_ranks=5),
        ("virtual_ranks is 4 on rank 0 and 5 on rank 3",),
    ),
    "a broken schedule on one rank": (
        sync(broken),
        sync(lambda: schedule(algorithm="hierarchical")),
        ("schedule is ",),
    ),
}


def transport_of(group: Any) -> Any:
    return "loopback" if "Loopback" in type(group).__name__ else "c10d"


def tried(group: Any, build: Build) -> tuple[Ending, Any]:
    """The outcome, and the gradients of a good step after it."""
    seen = ending(lambda: build(group))
    with fddp.GradSync(params(), group=group) as good:
        return seen, step(good)[1]


def build(group: Any, name: str) -> tuple[Ending, Any]:
    first, last, _ = MISMATCHES[name]
    return tried(group, last if rank_of(group) == size_of(group) - 1 else first)


def check_mismatch(runs: list[Any], name: str) -> None:
    assert len({seen.text for seen, _ in runs}) == 1, "the same error on all ranks"
    for seen, after in runs:
        assert seen.kinds[0] == "PlanMismatchError"
        assert "rank 0" in seen.text or "ranks 0" in seen.text
        assert "3" in seen.text, "the last rank"
        for text in MISMATCHES[name][2]:
            assert text in seen.text
        assert ";" in seen.text, "what differs; the way out"
        assert after["a"].tolist() == [2.0] * 3


@pytest.mark.parametrize("name", MISMATCHES)
def test_differing_ranks_are_named_on_every_rank(name: str) -> None:
    check_mismatch(fddp.loopback(RANKS, build, name, timeout_s=10.0), name)


def test_ranks_that_differ_on_real_processes(ranks: RankPool) -> None:
    for pair in zip(*ranks.run(RANKS, build_some), strict=True):
        check_mismatch([run for _, run in pair], pair[0][0])


def build_some(rank: int, world_size: int) -> Any:
    return [
        (name, build(dist.group.WORLD, name)) for name in ("shape", "transport", "sparse", "mesh")
    ]


def test_leaves_that_are_not_reduced_may_differ() -> None:
    def run(group: Any) -> Any:
        own = {
            "step": torch.zeros(group.rank, dtype=torch.int64),
            f"count{group.rank}": torch.tensor(1),
        }
        with fddp.GradSync({**params(), **own}, group=group) as good:
            return good({**grads(), "step": None, f"count{group.rank}": None})["a"].tolist()

    assert fddp.loopback(2, run) == [[1.0] * 3] * 2


# Arguments that make no sense: the error's kind, and what its text must hold.
INVALID: dict[str, tuple[Build, str, tuple[str, ...]]] = {
    **{
        f"{name}={cap!r}": (sync(**{name: cap}), "ValueError", (name, repr(cap)))
        for name in ("bucket_cap_mb", "first_bucket_mb")
        for cap in (0, -1.0, math.nan, math.inf, "25", None, True)
    },
    "bucket_cap_mb=[]": (sync(bucket_cap_mb=[]), "ValueError", ("bucket_cap_mb", "empty")),
    "bucket_cap_mb=[1, 0]": (sync(bucket_cap_mb=[1, 0]), "ValueError", ("bucket_cap_mb[1]", "0")),
    "sparse=a path that is not there": (sync(sparse=("aa",)), "ValueError", ("'aa'", "'a'")),
    "sparse=a str": (sync(sparse="a"), "ValueError", ("collection of paths", "'a'")),
    **{
        f"reduce_dtype={dtype!r}": (sync(reduce_dtype=dtype), "ValueError", (str(dtype), "float64"))
        for dtype in (torch.float16, torch.int32, torch.complex64, "float32", torch.float8_e5m2)
    },
    "transport=a bird": (sync(transport="pigeon"), "ValueError", ("'pigeon'", "'loopback'")),
    "transport=another": (sync(transport="c10d"), "ValueError", ("'c10d'", "'loopback'")),
    **{
        f"timeout_s={limit!r}": (sync(timeout_s=limit), "ValueError", ("timeout_s", repr(limit)))
        for limit in (0, -1.0, math.nan, math.inf, "5")
    },
    "select=declines all": (sync(select=lambda path: False), "NoGradientError", ("select",)),
    "select=raises": (sync(select=lambda path: 1 / 0), "ZeroDivisionError", ("division",)),
    "select=not callable": (sync(select="a"), "TypeError", ()),
    "no float leaf": (
        sync({"step": torch.tensor(3)}),
        "NoGradientError",
        ("int64", "floating or complex"),
    ),
    "an empty tree": (sync({}), "NoGradientError", ("empty",)),
    "None": (sync(None), "NoGradientError", ()),
    "a str leaf": (sync({**params(), "name": "net"}), "TypeError", ("'name'", "str")),
    "a float8 leaf": (
        sync({**params(), "q": torch.zeros(2).to(torch.float8_e4m3fn)}),
        "TypeError",
        ("'q'", "float8_e4m3fn", "select="),
    ),
    "an unknown algorithm": (
        sync(algorithm="ring"),
        "ValueError",
        ("algorithm must be one of all_reduce, hierarchical, reduce_scatter, got 'ring'",),
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
    "nonfinite": (
        sync(nonfinite="ignore"),
        "ValueError",
        ("one of propagate, skip, raise, got 'ignore'",),
    ),
    "deterministic": (
        sync(deterministic=1),
        "TypeError",
        ("deterministic must be True or False, got 1",),
    ),
    "too few virtual ranks": (
        sync(virtual_ranks=3),
        "ValueError",
        ("3 virtual ranks can be carried by 1 to 3 ranks",),
    ),
    "a plan and a cap": (sync(plan, bucket_cap_mb=3.0), "ValueError", ("plan_buckets",)),
    "a plan and sparse leaves": (sync(plan, sparse=("a",)), "ValueError", ("plan_buckets",)),
    "a schedule and an algorithm": (
        sync(schedule, algorithm="reduce_scatter"),
        "ValueError",
        ("pass algorithm and reduce_dtype to make_schedule instead",),
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
    "a plan without buckets": (
        sync(fddp.BucketPlan((fddp.LeafSpec("w", (3,), "float32"),), (), (1024,), ())),
        "NoGradientError",
        ("1 leaf and no bucket",),
    ),
}


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
def test_invalid_arguments(name: str, culprits: tuple[int, ...]) -> None:
    bad, kind, texts = INVALID[name]

    def run(group: Any) -> tuple[Ending, Any]:
        return tried(group, bad if group.rank in culprits else sync())

    for rank, (seen, after) in enumerate(fddp.loopback(RANKS, run, timeout_s=10.0)):
        if rank in culprits:
            assert kind in seen.kinds
            assert f"rank {rank}" in seen.text
        else:
            assert seen.kinds[0] == "PlanMismatchError"
            assert "rank 1 could not build its plan" in seen.text
            assert kind in seen.text
        for text in texts:
            assert text in seen.text
        assert after["a"].tolist() == [2.0] * 3


# Found after the arguments were compared, so on all ranks alike.
UNPROVED: dict[str, tuple[Build, str, tuple[str, ...]]] = {
    "a sparse leaf in shards": (
        sync(algorithm="reduce_scatter", sparse=("a",)),
        "ValueError",
        ("'reduce_scatter' can't shard the sparse leaf 'a'", "select="),
    ),
    "a broken schedule": (sync(broken), "ScheduleError", ("bucket 0", "'a'", "local")),
    "a schedule without its end": (
        sync(lambda: replace(schedule(), ops=schedule().ops[:-1])),
        "ScheduleError",
        ("bucket 0", "unpack"),
    ),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_schedules_that_are_not_proved(name: str) -> None:
    bad, kind, texts = UNPROVED[name]
    for seen, after in fddp.loopback(RANKS, tried, bad):
        assert seen.kinds[0] == kind
        assert all(text in seen.text for text in texts), seen.text
        assert after["a"].tolist() == [2.0] * 3


def test_missing_group_is_refused() -> None:
    seen = ending(lambda: fddp.GradSync(params()))
    assert seen.kinds[0] == "FddpError"
    assert "init_process_group" in seen.text
    assert "fddp.loopback" in seen.text


def test_a_rank_that_does_not_come() -> None:
    over = threading.Event()

    def run(group: Any) -> Ending | None:
        if group.rank == 1:
            over.wait()
            return None
        try:
            return ending(lambda: fddp.GradSync(params(), group=group, timeout_s=0.2))
        finally:
            over.set()

    seen, _ = fddp.loopback(2, run)
    assert seen.kinds[0] == "SyncTimeoutError"
    assert "0.2" in seen.text
    assert "rank 1" in seen.text
