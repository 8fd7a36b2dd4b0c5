"""Close of a `GradSync` while a step runs, at each point of the step and on every transport: the
rank that closes gets a `ClosedError` or the results, and the others an error that names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp.runtime.step import Step
from fddp.transport import open_transport
from fddp.transport.c10d.peer_monitor import PeerMonitor
from fddp.transport.loopback import LoopbackState
from tests.support.endings import Ending, ending
from tests.support.ranks import Launch, RankPool, launch_fixture

launch = launch_fixture("shm", "loopback")

CAPS: dict[str, Any] = {"bucket_cap_mb": 4e-3, "first_bucket_mb": 4e-3}
Close = Callable[[], object]


def leaves() -> dict[str, Tensor]:
    return {f"w{i}": torch.ones(1000) for i in range(4)}


def loss(params: dict[str, Tensor]) -> Tensor:
    return torch.stack([leaf.sum() for leaf in params.values()]).sum()


def on_a_thread(call: Close) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def in_the_loss(sync: Any, close: Close) -> Any:
    def fn(params: dict[str, Tensor]) -> Tensor:
        close()
        return loss(params)

    return sync.value_and_grad(fn)(leaves())


def on_a_thread_in_the_loss(sync: Any, close: Close) -> Any:
    return in_the_loss(sync, lambda: on_a_thread(close))


def in_the_weight(sync: Any, close: Close) -> Any:
    return sync.value_and_grad(loss, weight_fn=lambda *_: float(bool(close()) + 1))(leaves())


def in_backward(sync: Any, close: Close) -> Any:
    """After the first bucket was sent."""

    def fn(params: dict[str, Tensor]) -> Tensor:
        params = {**params, "w0": params["w0"] * 1.0}
        params["w0"].register_hook(lambda _: [close(), None][1])
        return loss(params)

    return sync.value_and_grad(fn)(leaves())


def before_a_long_wait(sync: Any, close: Close) -> Any:
    wait = Step.wait

    def closing(step: Step, handle: Any, what: str) -> None:
        on_a_thread(lambda: sync._engine.close("close() was called"))
        wait(step, handle, what)

    with mock.patch.object(Step, "wait", closing if close == sync.close else wait):
        return sync(leaves())


def between_start_and_wait(sync: Any, close: Close) -> Any:
    handle = sync.start(leaves())
    close()
    return handle.wait()


class ClosingHook(fddp.hooks.Hook[tuple[()]]):
    """Closes a `GradSync` while it reduces a bucket."""

    name = "closing"
    close: Close = staticmethod(lambda: None)

    def init(self, spec: Any) -> tuple[()]:
        return ()

    def apply(self, state: tuple[()], bucket: Any, all_reduce: Any) -> Any:
        self.close()
        return all_reduce(bucket.buffer).map(lambda total: (total, ()))


def in_the_hook(sync: Any, close: Close) -> Any:
    sync._engine.hook.close = close
    return sync(leaves())


POINTS = [
    in_the_loss,
    on_a_thread_in_the_loss,
    in_the_weight,
    in_backward,
    before_a_long_wait,
    between_start_and_wait,
    in_the_hook,
]


def close_at(point: Callable[[Any, Close], Any], group: Any) -> Ending:
    """Rank 0 closes."""
    hook = ClosingHook() if point is in_the_hook else None
    with fddp.GradSync(leaves(), group=group, timeout_s=60.0, hook=hook, **CAPS) as sync:
        close = sync.close if sync.rank == 0 else lambda: None
        return ending(lambda: point(sync, close))


def close_at_each_point(group: Any) -> dict[str, Ending]:
    return {point.__name__: close_at(point, group) for point in POINTS}


def test_a_sync_is_closed_at_each_point_of_a_step(launch: Launch) -> None:
    first, second = launch(2, close_at_each_point)
    for point, seen in first.items():
        # A close waits for a step in flight, and a step may not have to wait for long.
        may_end = ["no error"] if point in ("between_start_and_wait", "before_a_long_wait") else []
        assert seen.kinds[0] in ["ClosedError", *may_end], (point, seen)
    for point, seen in second.items():
        assert seen.kinds[0] in ("RankLostError", "no error"), (point, seen)


def test_a_handle_waits_for_the_thread_that_ends_its_step() -> None:
    """`close` waits for a step in flight, on another thread."""

    def run(group: Any) -> Any:
        sync = fddp.GradSync(leaves(), group=group, **CAPS)
        handle = sync.start(leaves())
        is_ending, goes_on = threading.Event(), threading.Event()
        finish = sync._engine.finish

        def finish_later(step: Step) -> Any:
            is_ending.set()
            goes_on.wait(10.0)
            return finish(step)

        with mock.patch.object(sync._engine, "finish", finish_later):
            closer = threading.Thread(target=sync.close)
            closer.start()
            is_ending.wait(10.0)
            threading.Timer(0.1, goes_on.set).start()
            seen = ending(handle.wait)
            closer.join()
        return seen.kinds[0]

    assert fddp.loopback(2, run) == ["no error", "no error"]


def test_a_closed_sync_holds_no_memory() -> None:
    """Neither in its pool, nor in its steps and its gathers of shards."""

    def run(group: Any) -> Any:
        with fddp.GradSync(leaves(), group=group, algorithm="reduce_scatter", **CAPS) as sync:
            sync.all_gather(sync.reduce_scatter(leaves()))
            engine = sync._engine
            before = len(engine._pool.released())
        codes = [engine.setup.code, engine.setup.gathering]
        return before > 0, engine._pool.released(), {type(c.collectives).__name__ for c in codes}

    assert fddp.loopback(2, run) == [(True, [], {"CollectivesOfOne"})] * 2


def test_an_own_close_ends_a_wait_on_threads() -> None:
    """Of a rank whose operation no other rank joins."""

    def run(group: Any) -> Any:
        transport = open_transport(group)
        if transport.rank:
            return met.wait(30.0)
        work = transport.all_reduce(torch.ones(1))
        wait = LoopbackState.wait

        def closing(*args: Any) -> Any:
            threading.Timer(0.05, transport.close).start()
            return wait(*args)

        with mock.patch.object(LoopbackState, "wait", closing):
            seen = ending(lambda: work.wait("a sum"))
        met.set()
        return seen.kinds[0]

    met = threading.Event()
    assert fddp.loopback(2, run)[0] == "ClosedError"


def close_during_a_diagnosis(rank: int, n: int) -> Any:
    """Another thread closes while a failure is handled, which closes, too."""
    transport = open_transport(name="c10d", timeout_s=1.0)
    seen = None
    if rank == 0:
        diagnose = PeerMonitor.diagnose

        def closing(*args: Any) -> Any:
            on_a_thread(transport.close)
            return diagnose(*args)

        with mock.patch.object(PeerMonitor, "diagnose", closing):
            seen = ending(lambda: transport.all_reduce(torch.ones(1)).wait("a sum"))
    dist.barrier()
    transport.close()
    return seen


def test_a_transport_is_released_once(ranks: RankPool) -> None:
    seen, _ = ranks.run(2, close_during_a_diagnosis)
    assert seen.kinds[0] == "SyncTimeoutError", seen


def close_with_an_operation_in_flight(rank: int, n: int) -> Any:
    """Over gloo, whose connections live as long as their operations."""
    transport = open_transport(name="c10d", timeout_s=60.0)
    works = [transport.all_reduce(torch.ones(1)) for _ in range(2 if rank == 0 else 1)]
    works[0].wait("the first sum")
    if rank == 0:
        transport.close()
        return ending(lambda: works[1].wait("the second sum"))
    transport.open_subgroups(fddp.Topology(world=2), [])
    return None
