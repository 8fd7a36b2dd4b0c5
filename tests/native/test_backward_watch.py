"""Backward passes as a compiled observer reports them: their outputs, their end, and aborts."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fddp.core.protocol.lifecycle import Action, Event, Life, advance
from fddp.native import extension
from tests.support.backward_calls import call_in_backward
from tests.support.examples import examples


class Reports:
    """Notes reports of gradients that are in no step."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def report(self, leaves: Sequence[int]) -> bool:
        self.calls.append(f"local {leaves}")
        return True

    def refuse_early_use(self, leaf: int) -> None:
        self.calls.append(f"early use of {leaf}")


class Handler:
    """Notes what it receives."""

    def __init__(self) -> None:
        self.gate = SimpleNamespace(is_on=True)
        self.calls: list[str] = []
        self.lock = threading.RLock()
        calls, lock = self.calls, self.lock

        def on_output(*_: object) -> None:
            with lock:
                calls.append("output")

        self.watch = extension.compiled.BackwardWatch(
            self, self.gate, self.lock, on_output, Reports(calls)
        )

    def on_first_grad(self, context: int | None) -> None:
        self.calls.append("first grad" if context is None else f"context {context}")

    def on_abort(self) -> None:
        self.calls.append("abort")

    def on_end(self) -> None:
        self.calls.append("end")


def output_of(param: Tensor, in_backward: Callable[[], None] = lambda: None) -> Tensor:
    """Return an output, behind which a function is called during backward."""
    return call_in_backward(param * 2, in_backward) * 2


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def param() -> Tensor:
    return torch.ones(2, requires_grad=True)


def raise_error() -> None:
    raise ValueError("no backward here")


def test_the_end_comes_last_and_once(handler: Handler, param: Tensor) -> None:
    outputs = [output_of(param, lambda: handler.calls.append("inside")), param * 3]
    assert handler.watch.expect_outputs(outputs) == []
    for _ in range(2):
        sum(outputs, torch.zeros(())).sum().backward(retain_graph=True)
    assert handler.calls == ["inside", "end"] * 2
    assert not handler.watch.is_queued


def test_the_first_gradient_is_announced_if_it_is_expected(handler: Handler, param: Tensor) -> None:
    watched = extension.compiled.ParamSet([param], handler.watch)
    param.sum().backward()
    handler.watch.follow(True, True)
    param.sum().backward()
    output = output_of(param)
    handler.watch.expect_outputs([output])
    handler.watch.follow(False, True)
    param.sum().backward()
    assert handler.calls == ["first grad"]
    output.sum().backward()
    assert handler.calls == ["first grad", "first grad", "end"]
    del watched


def test_the_time_of_an_output_is_that_of_the_first(handler: Handler, param: Tensor) -> None:
    output = output_of(param, lambda: time.sleep(0.01))
    inner = output_of(param)
    handler.watch.expect_outputs([output, inner])
    assert handler.watch.reached_s == math.inf
    begun_s = time.perf_counter()
    (output + inner).sum().backward()
    assert begun_s <= handler.watch.reached_s <= time.perf_counter() - 0.01
    between_s = time.perf_counter()
    output_of(param).sum().backward()
    assert handler.watch.reached_s < between_s  # until the next pass begins
    again = output_of(param)
    handler.watch.expect_outputs([again])
    again.sum().backward()
    assert handler.watch.reached_s > between_s


def test_nested_passes_end_with_the_outermost(handler: Handler, param: Tensor) -> None:
    def part(x: Tensor) -> Tensor:
        output = x * param
        handler.watch.expect_outputs([output])
        return call_in_backward(output, lambda: handler.calls.append("inside"))

    x = torch.ones(2, requires_grad=True)
    output = checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)
    handler.watch.expect_outputs([output])
    output.sum().backward()
    assert handler.calls == ["inside", "inside", "end"]


def test_an_aborted_pass_is_reported(handler: Handler, param: Tensor) -> None:
    output = output_of(param, raise_error)
    handler.watch.expect_outputs([output])
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == ["abort"]
    watch = handler.watch
    assert not watch.is_queued
    assert watch.take_news() == extension.compiled.OUTPUT_REACHED + extension.compiled.PASS_ABORTED
    assert watch.take_news() == 0
    output = output_of(param)
    watch.expect_outputs([output])
    output.sum().backward()
    assert handler.calls == ["abort", "output"]  # until the handler has decided
    watch.follow(False, True)
    output = output_of(param)
    watch.expect_outputs([output])
    output.sum().backward()
    assert handler.calls == ["abort", "output", "end"]
    assert watch.take_news() == extension.compiled.OUTPUT_REACHED


class Fails(Handler):
    """Raises where it is called."""

    def on_abort(self) -> None:
        super().on_abort()
        raise RuntimeError("nothing to restore")

    def on_end(self) -> None:
        super().on_end()
        raise KeyError("at the end")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_about_an_abort_leaves_the_first_error(param: Tensor) -> None:
    handler = Fails()
    output = output_of(param, raise_error)
    handler.watch.expect_outputs([output])
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == ["abort"]


def test_errors_at_the_end_are_raised_by_backward(param: Tensor) -> None:
    handler = Fails()
    output = output_of(param)
    handler.watch.expect_outputs([output])
    with pytest.raises(KeyError, match="at the end"):
        output.sum().backward()
    assert handler.calls == ["end"]
    assert handler.watch.take_news() == extension.compiled.OUTPUT_REACHED


def test_a_forgotten_end_does_nothing(handler: Handler, param: Tensor) -> None:
    output = output_of(param, handler.watch.forget_end)
    handler.watch.expect_outputs([output])
    output.sum().backward()
    assert handler.calls == []

    def forget_and_raise() -> None:
        handler.watch.forget_end()
        raise_error()

    output = output_of(param, forget_and_raise)
    handler.watch.expect_outputs([output])
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == []
    assert handler.watch.take_news() == extension.compiled.OUTPUT_REACHED


def unusual(handler: Handler, param: Tensor, output: Tensor, case: str) -> None:
    match case:
        case "off":
            handler.gate.is_on = False
        case "asked":
            handler.watch.follow(True, False)
        case "inputs":
            torch.autograd.grad(output.sum(), param)
            return
        case "locked":
            done, locked = threading.Event(), threading.Event()

            def hold() -> None:
                with handler.lock:
                    locked.set()
                    done.wait(0.1)

            thread = threading.Thread(target=hold)
            thread.start()
            assert locked.wait(10)
    output.sum().backward()
    if case == "locked":
        done.set()
        thread.join()


@pytest.mark.parametrize("case", ["off", "asked", "inputs", "locked"])
def test_unusual_passes_are_left_to_the_handler(handler: Handler, param: Tensor, case: str) -> None:
    output = output_of(param)
    handler.watch.expect_outputs([output])
    unusual(handler, param, output, case)
    assert handler.calls == ["output"]


def test_gradients_in_no_step_are_reported_at_the_end_of_the_pass() -> None:
    handler = Handler()
    params = [torch.ones(2, requires_grad=True) for _ in range(3)]
    watched = extension.compiled.ParamSet(params, handler.watch)

    def run(*used: int, allowed: bool = False) -> list[str]:
        handler.calls.clear()
        output = torch.stack([params[i].sum() for i in used]).sum()
        if allowed:
            handler.watch.allow_outputs([output])
        output.backward()
        return list(handler.calls)

    assert run(0) == []  # not asked for
    handler.watch.report_local(True)
    assert run(0, 2) in (["local [0, 2]"], ["local [2, 0]"])
    assert run(0, allowed=True) == []
    assert run(1) == ["local [1]"]
    handler.gate.is_on = False
    assert run(1) == []
    del watched


@pytest.mark.slow
def test_a_graph_keeps_its_handler_only_during_backward() -> None:
    gc.collect()
    gc.disable()
    try:
        owned = [Handler()]
        calls, freed = owned[0].calls, weakref.ref(owned[0])
        alive: list[bool] = []

        def drop() -> None:
            owned.clear()
            alive.append(freed() is not None)

        output = output_of(torch.ones(2, requires_grad=True), drop)
        owned[0].watch.expect_outputs([output])
        for _ in range(2):
            output.sum().backward(retain_graph=True)
        assert alive == [True, False]
        assert calls == ["end"]
    finally:
        gc.enable()


def test_the_observer_outlives_its_handler() -> None:
    owned = [Handler()]
    watch = owned[0].watch
    param = torch.ones(2, requires_grad=True)
    watched = extension.compiled.ParamSet([param], watch)
    output = param * 2
    watch.expect_outputs([output])
    owned.clear()
    output.sum().backward()
    watch.queue_end()
    assert not watch.is_queued
    del watched


# Beside the life of a step


class Driver:
    """Keeps a life by the events of backward passes, as the wrapper does.

    Args:
        unseen: outputs may be reached without a call.
    """

    def __init__(self, *, unseen: bool) -> None:
        self.life = Life()
        self.events: list[Event] = []
        self.calls = 0  # because an output was reached
        self._unseen = unseen
        self.watch = extension.compiled.BackwardWatch(
            self, SimpleNamespace(is_on=True), threading.RLock(), self.on_output, Reports([])
        )
        self.params = [torch.ones(2, requires_grad=True) for _ in range(2)]
        self._hooks = extension.compiled.ParamSet(self.params, self.watch)
        self._follow()

    def note(self, event: Event) -> None:
        self._take_news()
        self._execute_after(event)
        self._follow()

    def _follow(self) -> None:
        is_free = self._unseen and self.life.takes_outputs
        self.watch.follow(self.life.awaits_gradients, is_free)

    def _take_news(self) -> None:
        news = self.watch.take_news()
        if news & extension.compiled.OUTPUT_REACHED:
            self._advance("output reached")
        if news & extension.compiled.PASS_ABORTED:
            self._execute_after("pass aborted")

    def _advance(self, event: Event) -> Sequence[Action]:
        self.life, actions = advance(self.life, event)
        if event != "due" or actions:  # nothing is due before an output that is reached unseen
            self.events.append(event)
        return actions

    def _execute_after(self, event: Event) -> None:
        for action in self._advance(event):
            match action:
                case "queue end":
                    self.watch.queue_end()
                case "save":
                    self._hooks.begin(False)
                case "release" | "restore":
                    self._hooks.disarm()
                case "await report":
                    is_failing = self.life.name == "failing"
                    self._execute_after("reported failure" if is_failing else "reported regular")

    def on_output(self, *_: object) -> None:
        self.calls += 1
        self.note("due")
        self.note(
            "inputs reached" if extension.compiled.has_explicit_inputs() else "output reached"
        )

    def on_first_grad(self, context: int | None) -> None:
        self.note("due")
        self.note("grad arrived")

    def on_abort(self) -> None:
        self._take_news()
        self._follow()

    def on_end(self) -> None:
        self.note("backward ended")


def drive(driver: Driver, program: Sequence[str]) -> list[tuple[Life, int]]:
    """Run forward and backward passes; the life after each, and the number of events."""
    first, second = driver.params
    x = torch.ones(2, requires_grad=True)
    output, found = x * 1, []
    for part in program:
        try:
            match part:
                case "forward" | "forward that fails" | "forward that fails early":
                    driver.note("due")
                    driver.note("forward began")
                    inner = x * first + second
                    if part == "forward that fails":
                        inner = call_in_backward(x * first, raise_error) + second
                    if part == "forward that fails early":
                        inner = call_in_backward(inner, raise_error)
                    output = inner * 2
                    driver.watch.expect_outputs([output])
                    driver.note("outputs made")
                case "pass":
                    output.sum().backward(retain_graph=True)
                case "pass beside":
                    first.sum().backward()
                case "pass through both":
                    (output + second).sum().backward(retain_graph=True)
                case "pass for a parameter":
                    torch.autograd.backward(output.sum(), inputs=[first], retain_graph=True)
                case "pass for an input":
                    torch.autograd.backward(output.sum(), inputs=[x], retain_graph=True)
                case "due":
                    driver.note("due")
        except ValueError as error:
            assert str(error) == "no backward here"  # noqa: PT017
        assert not driver.watch.is_queued
        found.append((driver.life, len(driver.events)))
    return found


PARTS = [
    *("forward", "forward that fails", "forward that fails early"),
    *("pass", "pass", "pass beside", "pass through both"),
    *("pass for a parameter", "pass for an input", "due"),
]


@given(st.lists(st.sampled_from(PARTS), max_size=12))
@examples(300)
def test_outputs_are_taken_as_the_life_of_a_step_has_it(program: list[str]) -> None:
    """Events, and lives after each pass, are those of a driver that decides about each output."""
    unseen, asked = Driver(unseen=True), Driver(unseen=False)
    assert drive(unseen, program) == drive(asked, program)
    assert unseen.events == asked.events
    assert unseen.calls <= asked.calls
    if not any("fails" in part or "for" in part.split() for part in program):
        assert unseen.calls == 0
