"""Futures of hooks: lazy, run once, a stage at a time."""

from __future__ import annotations

from typing import Any

import pytest

from fddp.hooks import Future


class Started:
    """An operation in flight that completes on request."""

    def __init__(self, value: Any) -> None:
        self.is_there = False
        self.taken = 0
        self._value = value

    def future(self) -> Future[Any]:
        return Future.started(lambda: self.is_there, self._take)

    def _take(self) -> Any:
        self.taken += 1
        return self._value


def test_stages_of_values_that_are_there() -> None:
    """Done means that all stages have started; waiting starts the remaining ones."""
    future = Future.of(5).then(Future.of)
    assert not future.done
    future.advance()
    assert future.done
    assert not future.pending
    future.advance()
    assert future.wait() == 5
    assert Future.of(1).then(Future.of).map(lambda n: n + 1).then(Future.of).wait() == 2


def test_waiting_takes_once() -> None:
    work = Started(7)
    future = work.future()
    assert not future.done
    assert [future.wait(), future.wait()] == [7, 7]
    assert work.taken == 1
    assert future.done


def test_map_runs_when_asked_and_once() -> None:
    calls: list[int] = []
    work = Started(2)
    future = work.future().map(lambda n: (calls.append(n), n * 10)[1])
    assert not future.pending
    assert not future.done
    work.is_there = True
    assert future.done
    assert calls == []
    assert [future.wait(), future.wait()] == [20, 20]
    assert calls == [2]


def test_stages_start_one_at_a_time() -> None:
    first, second, third = Started(1), Started(2), Started(3)
    log: list[str] = []

    def stage(name: str, work: Started) -> Any:
        return lambda before: (log.append(f"{name} after {before}"), work.future())[1]

    future = first.future().then(stage("second", second)).map(str).then(stage("third", third))
    assert future.pending
    assert not future.ready  # the first is not there
    first.is_there = True
    assert future.ready
    assert log == []
    future.advance()
    assert log == ["second after 1"]
    assert not future.ready
    future.advance()
    assert log == ["second after 1", "third after 2"]
    assert not future.pending
    assert not future.done
    third.is_there = True
    assert future.done
    assert future.wait() == 3
    assert [work.taken for work in (first, second, third)] == [1, 1, 1]


def test_waiting_for_the_input_of_a_stage_starts_none() -> None:
    work, log = Started(1), list[str]()
    future = work.future().then(lambda n: (log.append("second"), Future.of(n + 1))[1])
    future = future.then(lambda n: (log.append("third"), Future.of(n + 1))[1])
    future.wait_ready()
    assert (work.taken, log) == (1, [])
    future.advance()
    future.wait_ready()
    assert log == ["second"]
    assert future.wait() == 3


def test_a_stage_may_have_stages_of_its_own() -> None:
    future = Future.of(1).then(lambda n: Future.of(n + 1).then(lambda m: Future.of((n, m))))
    future.advance()
    assert future.pending
    future.advance()
    assert not future.pending
    assert future.wait() == (1, 2)


def test_a_future_may_serve_twice() -> None:
    work = Started(3)
    both = work.future()
    assert both.map(lambda n: n + 1).wait() + both.map(lambda n: n * 10).wait() == 34
    assert work.taken == 1


def test_nested_futures_are_refused() -> None:
    with pytest.raises(TypeError, match="returned a Future; use then instead"):
        Future.of(1).map(Future.of).wait()
    with pytest.raises(TypeError, match="returned a int, not a Future; use map instead"):
        Future.of(1).then(lambda n: n).wait()  # type: ignore[arg-type, return-value]


def test_an_error_comes_back_each_time() -> None:
    future = Future.of(0).map(lambda n: 1 // n)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            future.wait()
