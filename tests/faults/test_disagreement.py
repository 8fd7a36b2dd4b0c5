"""Ranks that disagree: an error by name on every rank, no hang, no wrong mean.

The cases are generated, see `disagreement.py`. `make disagree` plays 1,000 on threads, and 100
each over gloo and shared memory, in place of a few.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import fddp
from fddp.collectives.communicator import communicator_of
from tests.support.disagreement import KINDS, Case, Seen, cases, play, problems
from tests.support.endings import Ending, ending
from tests.support.on_ranks import on_processes
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.process_resources import open_file_count
from tests.support.ranks import Launch, RankPool, launch_over, split_into_hosts
from tests.support.source_lines import line_of

MANY = int(os.environ.get("DISAGREEMENTS", "0")) or len(KINDS)
LATE_S = 2.0
OVER_BOTH = pytest.mark.parametrize("transport", ["c10d", "shm"])
BY_NIGHT_OVER_SHM = pytest.mark.parametrize(
    "transport", ["c10d", pytest.param("shm", marks=pytest.mark.nightly)]
)
BY_NIGHT_OVER_GLOO = pytest.mark.parametrize(
    "transport", [pytest.param("c10d", marks=pytest.mark.nightly), "shm"]
)


@pytest.mark.slow
def test_generated_disagreements_on_threads(record_property: Any) -> None:
    """On threads, which cost little; every kind at least once."""
    played, found = Counter[str](), []
    for case in cases(7, MANY):
        seen = fddp.loopback(case.ranks, play, case, 4.0, timeout_s=20.0)
        played[case.kind] += 1
        found += [f"{case}: {problem}" for problem in problems(case, seen)]
    assert not found, "\n".join(found)
    assert set(played) == set(KINDS)
    record_property("cases", dict(played))


#: one of each way in which ranks can part; ranks wait for each other in the last two alone
SAMPLE = [
    "shape",
    "cap",
    "hook",
    "schedule",
    "step number",
    "shards",
    "weight",
    "gradient's dtype",
    "set_hook",
    "not in a round",
    "loss with operators",
    "order of operators",
    "built and broadcast",
    "replicas",
    "swapped, other trees",
    "operator and sync",
]


@BY_NIGHT_OVER_SHM
def test_generated_disagreements_on_processes(
    request: pytest.FixtureRequest, transport: str
) -> None:
    launch = launch_over(transport, request)
    played = [Case(11 + k, kind, 2, k % 2) for k, kind in enumerate(SAMPLE)]
    for case, seen in zip(played, zip(*launch(2, play_all, played), strict=True), strict=True):
        assert not problems(case, list(seen)), case
    if MANY < 1000:
        return
    for case in cases(8, MANY // 10):
        assert not problems(case, launch(case.ranks, play, case, 3.0)), case


def play_all(group: Any, played: list[Case]) -> list[Seen]:
    return [play(group, case, 2.0) for case in played]


def test_the_checks_can_fail() -> None:
    """The oracle of the generated cases rejects wrong outcomes."""
    case = Case(0, "shape", 2, 1)
    good = Seen(
        "DesyncError", ("DesyncError", "FddpError"), "rank 0 has ..., rank 1 has ...", "", ""
    )
    assert not problems(case, [good, good])
    for bad in (
        good._replace(wrong="w is 1.0 instead of 1.5"),
        good._replace(after="ClosedError"),
        good._replace(error="KeyError", bases=("KeyError",)),
        good._replace(text="ranks differ"),
        good._replace(error="", bases=()),
    ):
        assert problems(case, [bad, good])
    assert problems(case._replace(kind="timeout"), [good, good])


# What a timeout says

W = {"w": torch.ones(3)}
PATIENCE_S = 4.0  # ranks then wait for one second for each other's reports


def waiting(rank: int, n: int, transport: Any, case: str) -> Ending:
    first = fddp.GradSync(W, transport=transport, timeout_s=PATIENCE_S)
    second = fddp.GradSync(W, transport=transport, timeout_s=PATIENCE_S)
    fddp.psum(W)
    first(W), second(W)
    if case == "swapped":
        seen = ending(lambda: (second if rank else first)(W))
    elif rank == 0:
        seen = ending(lambda: first(W))
    elif case == "operator":
        seen = ending(lambda: fddp.Communicator(timeout_s=PATIENCE_S))
    else:
        time.sleep(PATIENCE_S + 2.5)
        seen = ending(lambda: None)
    dist.barrier()
    return seen


@BY_NIGHT_OVER_GLOO
def test_errors_name_the_pending_operations(ranks: RankPool, transport: str) -> None:
    first, second = ranks.run(2, waiting, transport, "swapped")
    one = "waiting for bucket 0 (w) of step 1 of GradSync #1"
    two = "waiting for bucket 0 (w) of step 1 of GradSync #2"
    gave_up = "after giving up bucket 0 (w) of step 1 of GradSync #"
    for seen in (first, second):
        assert seen.kinds[0] == "SyncTimeoutError"
        assert "GradSync #1" in seen.text
        assert "GradSync #2" in seen.text
        called = line_of(__file__, "(second if rank else first)(W)")
        assert f"test_disagreement.py:{called} in <lambda>, from " in seen.text
        assert f"test_disagreement.py:{called} in waiting" in seen.text, "who called that"
    assert f"rank 0: {one}" in first.text
    assert f"rank 1: {two}" in first.text or gave_up in first.text
    assert f"rank 1: {two}" in second.text


@BY_NIGHT_OVER_SHM
def test_a_rank_that_computes(ranks: RankPool, transport: str) -> None:
    """The error names its line, and its last finished operation."""
    seen, _ = ranks.run(2, waiting, transport, "busy")
    assert seen.kinds[0] == "SyncTimeoutError"
    assert "rank 0: waiting for bucket 0 (w) of step 1 of GradSync #1, called at" in seen.text
    line = line_of(__file__, "time.sleep(PATIENCE_S + 2.5)")
    assert (
        f"rank 1: at {__file__}:{line} in waiting, from "  # the lines of tests/support/ranks.py
        in seen.text
    )
    assert "in _serve, after bucket 0 (w) of step 0 of GradSync #2" in seen.text


def test_a_rank_that_opens_another_transport(ranks: RankPool) -> None:
    first, second = ranks.run(2, waiting, "c10d", "operator")
    assert "rank 1: " in first.text
    assert "the opening of a Communicator" in first.text
    assert second.kinds[0] == "SyncTimeoutError"
    assert "rank 0 did not open theirs" in second.text
    assert "rank 1: waiting for the opening of a Communicator, called at " in second.text
    assert "GradSync #1" in second.text


def test_threads_raise_equal_errors() -> None:
    together = threading.Barrier(2)

    def run(group: Any) -> Ending:
        syncs = [fddp.GradSync(W, group=group, timeout_s=0.3) for _ in range(2)]
        for sync in syncs:
            sync(W)
        seen = ending(lambda: syncs[group.rank](W))
        together.wait(20.0)  # a rank that returns is lost to the others
        return seen

    for seen in fddp.loopback(2, run):
        assert seen.kinds[0] == "SyncTimeoutError"
        assert "bucket 0 (w) of step 1 of GradSync #1" in seen.text
        assert "bucket 0 (w) of step 1 of GradSync #2" in seen.text


@on_processes(2)
def test_agreeing_ranks_raise_nothing(rank: int, n: int) -> None:
    """Without a failure no rank asks or answers, and no resources remain."""
    with fddp.GradSync(W) as sync:  # what torch makes once
        sync(W)
    dist.barrier()
    descriptors = open_file_count()
    with fddp.GradSync(W, timeout_s=4.0) as sync:
        board: Any = sync._engine.transport.status.board
        for _ in range(3):
            sync(W)
            time.sleep(0.6 * rank)  # within a quarter of the time limit
        assert not board._store.check(["questions"]) or board._store.add("questions", 0) == 0
        assert not board._store.check([f"answer/{rank}"])
        thread = board._responder._thread
        assert thread.is_alive()
    thread.join(10.0)
    assert not thread.is_alive()
    assert open_file_count() <= descriptors


# Operators in loss functions


@OVER_BOTH
@on_processes(3)
def test_a_rank_that_fails_beside_an_operator(rank: int, n: int, transport: Any) -> None:
    """The others get the error in the operator, long before its timeout, and all continue."""
    with fddp.GradSync(W, transport=transport, timeout_s=LONG_S) as sync:

        def loss(params: Any, x: float) -> torch.Tensor:
            mean = fddp.pmean(params["w"] * x)
            if x > 5.0 and rank == 1:
                raise ArithmeticError("a bad batch")
            return (mean + fddp.pmean(params["w"] * x)).sum()

        step = sync.value_and_grad(loss)
        assert step(W, 1.0 + rank)[1]["w"].tolist() == pytest.approx([4.0] * 3)
        begin_s = time.perf_counter()
        seen = ending(lambda: step(W, 10.0 + rank))
        assert time.perf_counter() - begin_s < PROMPT_S
        assert step(W, 2.0 + rank)[1]["w"].tolist() == pytest.approx([6.0] * 3)
    if rank == 1:
        assert seen.kinds[0] == "ArithmeticError"
    else:
        assert seen.kinds[0] == "PeerError"
        assert "pmean of 1 leaf ('')" in seen.text
        assert "rank 1 failed: ArithmeticError: a bad batch in step 1 of GradSync #" in seen.text


@BY_NIGHT_OVER_GLOO
@on_processes(3)
def test_operators_work_after_an_abandoned_step_on_processes(
    rank: int, n: int, transport: Any
) -> None:
    """Rank 1 alone calls an operator in its loss, until the step's time is over on the others. All
    open anew what it has left half way through a call of its own."""
    group = dist.new_group(list(range(n)))  # others may keep using the default one
    assert fddp.pmean(W, group)["w"].tolist() == W["w"].tolist()
    with fddp.GradSync(W, group=group, transport=transport, timeout_s=LATE_S) as sync:

        def loss(params: Any) -> torch.Tensor:
            own = params["w"] * 1.0
            return (fddp.pmean(own, group) if rank == 1 else own).sum()

        begin_s = time.perf_counter()
        seen = ending(lambda: sync.value_and_grad(loss)(W))
        # Not the operator's time, which is that of its group.
        assert time.perf_counter() - begin_s < PROMPT_S
        assert seen.kinds[0] == "SyncTimeoutError"
    means = [fddp.pmean(torch.tensor(rank + number), group).item() for number in (1.0, 2.0)]
    assert means == [2.0, 3.0]


# Calls of one sync that ranks swap

BIG = {"w": torch.ones(3000), "b": torch.ones(5)}


def vote(sync: fddp.GradSync) -> None:
    for _ in fddp.uneven(range(1), sync):
        sync(BIG)


#: ways to call a `GradSync` that begin with operations of different sizes
CALLS: dict[str, Any] = {
    "step": lambda sync: sync(BIG),
    "uneven": vote,
    "set_hook": lambda sync: sync._engine.set_hook(None),
    "tune": lambda sync: sync.tune(sync.value_and_grad(lambda p: p["w"].sum()), BIG),
}
PAIRS = [("step", "uneven"), ("set_hook", "step"), ("step", "tune"), ("tune", "uneven")]


CAPS = ("bucket_cap_mb", "first_bucket_mb")
LEAVES = {f"w{i}": torch.ones(300) for i in range(6)}


@BY_NIGHT_OVER_GLOO
@on_processes(3)
def test_swapped_calls_amid_buckets(rank: int, n: int, transport: Any) -> None:
    """A rank in a step of six buckets waits for the last one first, whose word it needs."""
    for pair in ("step", "set_hook"), ("set_hook", "step"):
        options: Any = {"transport": transport, **dict.fromkeys(CAPS, 0.0011)}
        with fddp.GradSync(LEAVES, timeout_s=PATIENCE_S, **options) as sync:
            assert len(sync.plan.buckets) == 6
            calls = {"step": lambda: sync(LEAVES), "set_hook": lambda: sync._engine.set_hook(None)}
            seen = ending(calls[pair[rank % 2]])
        assert seen.kinds[0] == "DesyncError", seen
        assert re.search("rank 0 all_(reduce|gather) of .*, rank 1 all_(reduce|gather)", seen.text)
        dist.barrier()


def swap_on_threads(group: Any, odd: int, seen: dict[int, Ending]) -> None:
    """A rank ends with its error while others have still to meet theirs."""
    sync = fddp.GradSync(LEAVES, group=group, **dict.fromkeys(CAPS, 0.0011))
    calls = [lambda: sync(LEAVES), lambda: sync._engine.set_hook(None)]
    for call in reversed(calls) if group.rank == odd else calls:
        seen[group.rank] = ending(call)
        if seen[group.rank].kinds:
            return


@pytest.mark.slow
def test_swapped_calls_on_threads_are_raised_on_every_rank() -> None:
    for turn in range(60):
        seen: dict[int, Ending] = {}
        fddp.loopback(3, swap_on_threads, turn % 3, seen, timeout_s=30.0)
        assert [seen[rank].kinds[:1] for rank in range(3)] == [("DesyncError",)] * 3, seen
        for own in seen.values():
            assert f"rank {turn % 3} all_" in own.text
            assert own.text.count(" all_") == 2


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.nightly)])
@OVER_BOTH
@on_processes(2)
def test_swapped_calls_of_one_sync(rank: int, n: int, transport: Any, deterministic: bool) -> None:
    """Sizes differ of what meets: gloo would end the process of such ranks."""
    for pair in PAIRS:
        options: Any = {"transport": transport, "deterministic": deterministic}
        with fddp.GradSync(BIG, timeout_s=PATIENCE_S, **options) as sync:
            sync(BIG)
            seen = ending(lambda: CALLS[pair[rank]](sync))  # noqa: B023
        assert seen.kinds[0] == "DesyncError", seen
        assert "rank 0" in seen.text
        assert "rank 1" in seen.text
        dist.barrier()


@pytest.mark.parametrize(
    ("transport", "other"),
    [
        ("c10d", "step"),
        ("shm", "sync"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                *(("c10d", "sync"), ("c10d", "reduce_scatter")),
                *(("shm", "step"), ("shm", "reduce_scatter")),
            )
        ),
    ],
)
@on_processes(2)
def test_a_rank_that_gathers_while_another_takes_a_step(
    rank: int, n: int, transport: Any, other: str
) -> None:
    options: Any = {"algorithm": "reduce_scatter", "transport": transport, "timeout_s": PATIENCE_S}
    with fddp.GradSync(BIG, **options) as sync:
        step = sync.value_and_grad(lambda p: p["w"].sum())
        calls: dict[str, Any] = {
            "sync": lambda: sync(BIG),
            "reduce_scatter": lambda: sync.reduce_scatter(BIG),
            "step": lambda: step(BIG),
        }
        own = sync.shard(BIG)
        seen = ending(lambda: sync.start_all_gather(own).wait() if rank == 0 else calls[other]())
    assert seen.kinds[0] == "DesyncError", seen
    assert re.search("rank 0 all_.*, rank 1 (all_reduce|reduce_scatter) of", seen.text)


def swap_methods(group: Any) -> list[Ending]:
    params = {"w": torch.ones(4)}
    hundreds = {"w": torch.full((4,), 100.0)}
    seen = []
    with fddp.GradSync(params, group=group) as sync:
        step = sync.value_and_grad(lambda params: params["w"].sum())
        pairs = [
            (lambda: sync(hundreds), lambda: step(params)),
            (lambda: sync.reduce_(hundreds), lambda: sync(hundreds)),
            (lambda: step(params), lambda: sync.update(hundreds, ())),
        ]
        for pair in pairs:
            seen.append(ending(pair[sync.rank % 2]))
            seen.append(ending(lambda: sync(params)))  # the group is usable
        # A rank that brings nothing may meet any call.
        call = (lambda: sync(hundreds, weight=0.0)) if sync.rank == 1 else lambda: step(params)[1]
        assert call()["w"].tolist() == [1.0] * 4
    return seen


def test_swapped_methods_of_one_sync(launch: Launch) -> None:
    """The same leaves in the same step: only the calls show the difference."""
    words = [
        "step 0 is sync(grads) on rank 0 and a step of value_and_grad on rank 1",
        "step 2 is reduce_(grads) on rank 0 and sync(grads) on rank 1",
        "step 4 is a step of value_and_grad on rank 0 and update(grads, state) on rank 1",
    ]
    for outcome in launch(3, swap_methods):
        assert [seen.kinds[:1] for seen in outcome] == [("DesyncError",), ("no error",)] * 3
        for text, seen in zip(words, outcome[::2], strict=True):
            assert text in seen.text


# Failures of operators on a bare group


def go_on_unequally(group: Any) -> list[Ending]:
    """Rank 1 has called one operator more when a failure closes the communicator."""
    rank = group.rank
    fddp.psum(W, group)
    communicator = communicator_of(group, None)
    communicator.begun += rank
    communicator.transport.close()
    together: threading.Barrier = group.state.__dict__.setdefault("barrier", threading.Barrier(2))
    together.wait(20.0)
    return [ending(lambda: fddp.psum(W, group)) for _ in range(2)]


def test_operators_fail_out_of_step() -> None:
    for outcome in fddp.loopback(2, go_on_unequally):
        for seen in outcome:
            assert seen.kinds[0] == "DesyncError"
            assert "the number of calls is 1 on rank 0 and 2 on rank 1; " in seen.text


@on_processes(2)
def test_a_graph_ends_with_its_group(rank: int, n: int) -> None:
    group = dist.new_group([0, 1])
    graph = make_fx(lambda x: fddp.psum(x, group))(torch.ones(2))
    assert graph(torch.ones(2)).tolist() == [2.0, 2.0]
    dist.destroy_process_group(group)
    seen = ending(lambda: graph(torch.ones(2)))
    assert seen.kinds[0] == "ClosedError"
    assert "is gone, with its group; trace or compile anew" in seen.text


# Sizes that callers decide about


@dataclass(frozen=True)
class Uneven(fddp.hooks.Hook[tuple[()]]):
    """Rank 1 hands over other sizes, in the first stage or the second."""

    how: str
    rank: int

    @property
    def name(self) -> str:
        return f"Uneven({self.how})"

    def init(self, spec: Any) -> tuple[()]:
        return ()

    def apply(self, state: tuple[()], bucket: Any, all_reduce: Any) -> Any:
        own = bucket.buffer[: 5 + self.rank].clone()
        if self.how == "first":
            return all_reduce(own).map(lambda _: (bucket.buffer, state))
        if self.how == "gathered":
            return all_reduce.all_gather(own).map(lambda _: (bucket.buffer, state))
        return (
            all_reduce(bucket.buffer)
            .then(lambda _: all_reduce(own))
            .map(lambda _: (bucket.buffer, state))
        )


@OVER_BOTH
@on_processes(2)
def test_hooks_that_hand_over_other_sizes(rank: int, n: int, transport: Any) -> None:
    for how in ("first", "gathered", "second"):
        hook = Uneven(how, rank)
        with fddp.GradSync(BIG, hook=hook, transport=transport, timeout_s=5.0) as sync:
            seen = ending(lambda: sync(BIG))
        assert seen.kinds[0] == "DesyncError", seen
        assert "(5,)" in seen.text or "(10,)" in seen.text
        assert "(6,)" in seen.text or "(12,)" in seen.text
        dist.barrier()


@dataclass(frozen=True)
class Changing(Uneven):
    """Rank 1 hands over another size from its second step on."""

    steps: list[int] = field(default_factory=list, compare=False)

    def apply(self, state: tuple[()], bucket: Any, all_reduce: Any) -> Any:
        self.steps.append(len(self.steps))
        own = bucket.buffer[: 5 + self.rank * (len(self.steps) > 1)].clone()
        return all_reduce(own).map(lambda _: (bucket.buffer, state))


@OVER_BOTH
@on_processes(2)
def test_hooks_that_hand_over_other_sizes_later(rank: int, n: int, transport: Any) -> None:
    hook = Changing("later", rank)
    with fddp.GradSync(BIG, hook=hook, transport=transport, timeout_s=2.0) as sync:
        sync(BIG)
        seen = ending(lambda: sync(BIG))
    assert seen.kinds[0] == "DesyncError", seen
    if transport == "c10d" and rank:
        assert "hook is all_reduce of torch.float32 (6,) and was all_reduce of" in seen.text
        assert "which has not changed on all ranks" in seen.text


@on_processes(2)
def test_buffers_of_another_size(rank: int, n: int) -> None:
    """Of a wrapped module, over gloo, which would end the process."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    with split_into_hosts([[0], [1]]):
        module = torch.nn.BatchNorm1d(3)
        wrapped = fddp.DistributedDataParallel(module, process_group=group)
        wrapped(torch.randn(4, 3)).sum().backward()
    if rank:
        module.register_buffer("running_mean", torch.zeros(7))
    seen = ending(lambda: wrapped(torch.randn(4, 3)))
    if rank:
        assert seen.kinds[0] == "DesyncError"
        assert "'running_mean' of the module is torch.float32 (7,) on rank 1" in seen.text
    else:
        assert seen.kinds[0] == "no error"


def test_openings_are_compared() -> None:
    def run(group: Any) -> Ending:
        if group.rank:
            return ending(lambda: fddp.broadcast(W, group=group))
        return ending(lambda: fddp.GradSync(W, group=group))

    for seen in fddp.loopback(2, run):
        assert seen.kinds[0] == "DesyncError"
        assert "rank 0 opens a GradSync where rank 1 opens a broadcast" in seen.text
