"""Objects that were dropped without having been closed are closed on a thread."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.collectives.communicator import communicator_of
from fddp.transport.lifetime.finalizer import _Closer
from fddp.transport.liveness import status_store
from tests.support.polling import soon
from tests.support.ranks import launch_over

ONE = torch.ones(4)


class Thing:
    """An object to be dropped."""


def collect_where_a_lock_is_held(world: Any) -> None:
    """As where a thread is started that others wait for, under a lock, and that collects."""
    group = dist.new_group([0, 1])
    fddp.psum(ONE, group)
    transport = communicator_of(group, None).transport
    cycle: list[Any] = [group, fddp.GradSync({"w": ONE}, group=world)]
    cycle.append(cycle)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, cycle
    with status_store._lock:
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(10.0)
        assert not collector.is_alive(), "it waits for the lock"
        assert gone() is None
    assert soon(lambda: transport.closed_by)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_the_collector_waits_for_no_lock(request: pytest.FixtureRequest, transport: str) -> None:
    launch_over(transport, request)(2, collect_where_a_lock_is_held)


def test_the_thread_runs_while_it_may_be_needed() -> None:
    closer, closed = _Closer(), []
    things = [Thing(), Thing()]
    for number, thing in enumerate(things):
        closer.watch(thing, lambda number=number: closed.append(number))  # type: ignore[misc]
    assert closer._has_thread
    things.pop(0)
    del thing
    assert soon(lambda: closed == [0])
    assert closer._has_thread
    things.clear()
    assert soon(lambda: closed == [0, 1])
    assert soon(lambda: not closer._has_thread)
    more = Thing()
    closer.watch(more, lambda: closed.append(2))
    del more
    assert soon(lambda: closed == [0, 1, 2])


def test_closed_objects_are_not_watched() -> None:
    closer, closed = _Closer(), []
    things = [Thing(), Thing()]
    first, second = [closer.watch(thing, lambda: closed.append(1)) for thing in things]
    first()
    first()
    assert closer._has_thread
    second()
    assert soon(lambda: not closer._has_thread)
    things.clear()
    assert closed == []


def test_failing_close_does_not_block_others(capsys: pytest.CaptureFixture[str]) -> None:
    closer, closed = _Closer(), []

    def fail() -> None:
        raise OSError("no such connection")

    things = [Thing(), Thing()]
    for thing, close in zip(things, (fail, lambda: closed.append(1)), strict=True):
        closer.watch(thing, close)
    del thing
    things.clear()
    assert soon(lambda: closed)
    assert "OSError: no such connection" in capsys.readouterr().err
