"""Ranges of the operations of a step in torch's profiler."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.ranks import RankPool, run_fresh
from tests.support.wrapped_net import DDP, TINY_CAP_MB, batch, net

if TYPE_CHECKING:
    from fddp.transport.loopback import LoopbackGroup

SMALL: Any = {"bucket_cap_mb": 1e-3, "first_bucket_mb": 1e-3}  # a bucket for each leaf
NUMEL = 1000
SIZE = f"{4 * NUMEL} bytes of float32"
KINDS = ("pack", "all_reduce", "unpack")


class Range(NamedTuple):
    """A range of a Chrome trace, with times in microseconds."""

    name: str
    thread: int
    start: float
    end: float
    dims: Any
    dtypes: Any

    @property
    def bucket(self) -> str:
        return self.name.partition(" ")[2]


def ranges_of(profile: Any, path: Path) -> list[Range]:
    """All ranges of a profile, as a viewer gets them."""
    profile.export_chrome_trace(str(path))
    return [
        Range(
            event["name"],
            event["tid"],
            event["ts"],
            event["ts"] + event["dur"],
            event["args"].get("Input Dims"),
            event["args"].get("Input type"),
        )
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("ph") == "X" and event["name"].startswith(("fddp", "gloo", "signal"))
    ]


def overlapping_steps(rank: int, world_size: int, folder: str, transport: Any) -> list[Range]:
    """Ranges of a step in which rank 1 sends nothing before a point in rank 0's backward pass."""
    store = dist.distributed_c10d._get_default_store()
    params = {name: torch.ones(NUMEL) for name in ("first", "second", "third")}
    number = 0

    def signal() -> None:
        """Let the other rank go on."""
        with torch.profiler.record_function("signal"):
            if rank == 0:
                store.set(f"signal of step {number}", "")

    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        key = f"signal of step {number}"
        if rank == 1:
            store.wait([key], timedelta(seconds=60))
        x = call_in_backward(params["first"] * 2, signal)
        return (x * params["second"] * params["third"]).sum()

    with fddp.GradSync(params, transport=transport, **SMALL) as sync:
        step = sync.value_and_grad(loss_fn)
        while number < 3:
            step(params)
            number += 1
        assert [bucket.leaves for bucket in sync.plan.buckets] == [(2,), (1,), (0,)]
        with torch.profiler.profile(record_shapes=True) as profile:
            step(params)
    return ranges_of(profile, Path(folder) / f"{rank}.json")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_collectives_are_shown_beside_the_backward_pass_that_hides_them(
    ranks: RankPool, tmp_path: Path, transport: str
) -> None:
    """From the start, in rows of their own, with bucket, bytes and dtype."""
    found, _ = ranks.run(2, overlapping_steps, str(tmp_path), transport)
    own = [one for one in found if not one.name.startswith("gloo")]
    by_name = {one.name: one for one in own}
    assert len(by_name) == len(own)
    buckets = [
        [by_name.pop(f"fddp::{kind} bucket {b}: {SIZE}") for kind in KINDS] for b in range(3)
    ]
    signal, _ = by_name.pop("signal"), by_name.pop("fddp::control")
    assert not by_name
    for pack, collective, unpack in buckets:
        assert pack.thread == unpack.thread == signal.thread != collective.thread
        assert pack.end <= collective.start <= collective.end <= unpack.start
        assert collective.dtypes == ["float"]
    (_, first, _), (_, second, _), (_, last, _) = buckets
    for collective in (first, second):  # in which rank 1 takes part once the signal has begun
        assert collective.start <= signal.start <= collective.end
        assert collective.dims == [[NUMEL]]
    assert last.dims[0][0] > NUMEL  # with the control word
    # Of ranges in one row that overlap, a viewer would leave one out.
    assert first.thread != second.thread


def steps_in_flight(rank: int, world_size: int, folder: str, transport: Any) -> list[Range]:
    """Ranges of some steps, and of what the rank does while their collectives run."""
    grads = {"a": torch.ones(100_000), "b": torch.ones(100_000)}  # not sent at once
    with fddp.GradSync(grads, transport=transport, **SMALL) as sync:
        sync(grads)
        with torch.profiler.profile() as profile:
            for _ in range(10):
                handle = sync.start(grads)
                for _ in range(50):
                    with torch.profiler.record_function("signal"):
                        time.sleep(0.001)
                handle.wait()
    return ranges_of(profile, Path(folder) / f"{rank}.json")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_collective_may_end_before_it_is_waited_for(
    ranks: RankPool, tmp_path: Path, transport: str
) -> None:
    """If it ended at the wait, none would end before the last signal of its step."""
    for found in ranks.run(2, steps_in_flight, str(tmp_path), transport):
        others = [one.end for one in found if one.name == "signal"]
        last = [max(others[i : i + 50]) for i in range(0, len(others), 50)]
        ends = [one.end for one in found if one.name.startswith("fddp::all_reduce bucket 0")]
        assert len(ends) == len(last) == 10
        assert any(end < limit for end, limit in zip(sorted(ends), last, strict=True))


def update(group: LoopbackGroup, folder: str, options: dict[str, Any]) -> Any:
    """Ranges of a step of rank 0, and the operations of its schedule."""
    params = {"a": torch.ones(NUMEL), "b": torch.ones(NUMEL)}
    with fddp.GradSync(params, group=group, **SMALL, **options) as sync:
        step = sync.value_and_grad(lambda params: (params["a"] * params["b"]).sum())
        step(params)
        if group.rank > 0:
            return step(params)
        with torch.profiler.profile() as profile:
            step(params)
        return ranges_of(profile, Path(folder) / "trace.json"), sync.schedule.ops


def names_of(profile: Any, folder: str) -> list[str]:
    found = ranges_of(profile, Path(folder) / "trace.json")
    return sorted(one.name for one in found if one.name.startswith("fddp::"))


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"hook": fddp.hooks.int8()}],
    ids=["native", "deterministic", "hook in stages"],
)
def test_each_operation_that_runs_is_a_range(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever runs it. The other rank is a thread that is not profiled."""
    (found, ops), _ = fddp.loopback(2, update, str(tmp_path), options)
    names = sorted(one.name for one in found)
    wanted = [f"fddp::{op.kind} bucket {op.bucket}: {SIZE}" for op in ops if op.when == "always"]
    (control,) = [op for op in ops if op.kind == "control"]
    wanted.remove(f"fddp::control bucket {control.bucket}: {SIZE}")
    wanted.append("fddp::control")
    if control.bucket < 0:
        (word,) = [name for name in names if name.startswith("fddp::all_reduce control word: ")]
        assert word.endswith(" bytes of float64")
        wanted.append(word)
    assert names == sorted(wanted)
    unpacked = {one.bucket: one.start for one in found if one.name.startswith("fddp::unpack")}
    for one in found:
        if one.bucket in unpacked and not one.name.startswith("fddp::unpack"):
            assert one.end <= unpacked[one.bucket]


def repair(group: LoopbackGroup, folder: str) -> list[str]:
    """Names of the ranges of a step in which a layer is used again."""
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True)
    for through in [(0, 1, 2), (0,), (0,)]:
        ddp(batch(group.rank), through=through).sum().backward()
    if group.rank > 0:
        ddp(batch(group.rank), through=(0, 1)).sum().backward()
        return []
    with torch.profiler.profile() as profile:
        ddp(batch(group.rank), through=(0, 1)).sum().backward()
    return names_of(profile, folder)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_repairs_are_named(tmp_path: Path) -> None:
    names, _ = fddp.loopback(2, repair, str(tmp_path))
    kinds = Counter(name.split(" ")[0] for name in names if " (late): " in name)
    assert set(kinds) == {"fddp::pack", "fddp::all_reduce", "fddp::add"}
    assert len(set(kinds.values())) == 1


# Operators of the graph, which torch shows.
OPERATORS = {"fddp::start_gradients", "fddp::finish_step"}


def in_a_graph(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Names of the ranges of an eager and of a compiled step."""
    torch._dynamo.reset()
    params = {"a": torch.ones(NUMEL), "b": torch.ones(NUMEL)}
    found = []
    with fddp.GradSync(params, **SMALL) as sync:
        step = sync.value_and_grad(lambda params: (params["a"] * params["b"]).sum())
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            function(params)
            with torch.profiler.profile() as profile:
                function(params)
            found.append(names_of(profile, f"{folder}/{rank}"))
    eager, compiled = found
    return eager, [name for name in compiled if name not in OPERATORS]


def test_a_graph_shows_what_an_eager_step_shows(ranks: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for eager, compiled in ranks.run(2, in_a_graph, str(tmp_path)):
        assert {f"fddp::{kind} bucket 1: {SIZE}" for kind in KINDS} < {*eager}
        assert compiled == eager


def rows() -> int:
    """Number of threads that stand for rows of collectives."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("fddp-collective\n")


def around_profiles(rank: int, world_size: int, transport: Any) -> None:
    params = {f"w{i}": torch.ones(NUMEL) for i in range(4)}
    with fddp.GradSync(params, transport=transport, **SMALL) as sync:

        def reused() -> bool:
            """Return True if steps whose results are dropped use the same memory again."""
            found = set()
            for _ in range(20):
                means = sync(params)
                found |= {mean.data_ptr() for mean in means.values()}
                del means
            return len(found) < 20 * len(params) // 2

        assert reused()
        assert rows() == 0  # without a profiler, no range is begun
        with torch.profiler.profile(record_shapes=True):
            assert reused()  # nothing is kept alive
        assert 0 < rows() <= len(params)
        # A collective that ends after the profiler.
        with torch.profiler.profile():
            handle = sync.start(params)
        with torch.profiler.profile() as profile:
            means = handle.wait()
        assert not [
            e.name for e in profile.events() if e.name.startswith("fddp::all_reduce bucket 0")
        ]
        assert torch.equal(means["w0"], params["w0"])


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_ranges_start_and_keep_nothing_beyond_a_profile(transport: str) -> None:
    """In new processes, of which no other test has profiled a step."""
    for outcome in run_fresh(2, around_profiles, transport):
        assert outcome.error is None
