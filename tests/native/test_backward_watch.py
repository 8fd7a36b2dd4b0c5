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
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fddp.native import extension
from tests.support.backward_calls import call_in_backward


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

    def finish(self, *, required: bool) -> None:
        self.calls.append("end" if required else "end of nothing")
        self.watch.forget_end()


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
    assert handler.watch.expect_outputs(outputs, False) == []
    for _ in range(2):
        sum(outputs, torch.zeros(())).sum().backward(retain_graph=True)
    assert handler.calls == ["inside", "end"] * 2
    assert not handler.watch.is_queued


def test_the_first_gradient_is_announced_if_it_is_expected(handler: Handler, param: Tensor) -> None:
    watched = extension.compiled.ParamSet([param], handler.watch)
    param.sum().backward()
    handler.watch.expect_grads(True)
    param.sum().backward()
    output = output_of(param)
    handler.watch.expect_outputs([output], False)
    param.sum().backward()
    assert handler.calls == ["first grad"]
    output.sum().backward()
    assert handler.calls == ["first grad", "first grad", "end"]
    del watched


def test_the_time_of_an_output_is_that_of_the_first(handler: Handler, param: Tensor) -> None:
    output = output_of(param, lambda: time.sleep(0.01))
    inner = output_of(param)
    handler.watch.expect_outputs([output, inner], True)
    assert handler.watch.note_step() == math.inf
    assert handler.watch.expects_grads
    begun_s = time.perf_counter()
    (output + inner).sum().backward()
    reached_s = handler.watch.note_step()
    assert begun_s <= reached_s <= time.perf_counter() - 0.01
    assert not handler.watch.expects_grads
    handler.watch.forget_output()
    assert handler.watch.note_step() == math.inf


def test_nested_passes_end_with_the_outermost(handler: Handler, param: Tensor) -> None:
    def part(x: Tensor) -> Tensor:
        output = x * param
        handler.watch.expect_outputs([output], True)
        return call_in_backward(output, lambda: handler.calls.append("inside"))

    x = torch.ones(2, requires_grad=True)
    output = checkpoint(part, checkpoint(part, x, use_reentrant=True), use_reentrant=True)
    handler.watch.expect_outputs([output], True)
    output.sum().backward()
    assert handler.calls == ["inside", "inside", "end"]


def test_an_aborted_pass_is_reported(handler: Handler, param: Tensor) -> None:
    output = output_of(param, raise_error)
    handler.watch.expect_outputs([output], True)
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == ["abort"]
    watch = handler.watch
    assert (watch.is_queued, watch.is_aborted, watch.is_required) == (False, True, True)
    assert not watch.queue_end(True)
    output = output_of(param)
    watch.expect_outputs([output], True)
    output.sum().backward()
    assert handler.calls == ["abort", "output"]
    watch.forget_end()
    output = output_of(param)
    watch.expect_outputs([output], True)
    output.sum().backward()
    assert handler.calls == ["abort", "output", "end"]


class Fails(Handler):
    """Raises where it is called."""

    def on_abort(self) -> None:
        super().on_abort()
        raise RuntimeError("nothing to restore")

    def finish(self, *, required: bool) -> None:
        super().finish(required=required)
        raise KeyError("at the end")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_about_an_abort_leaves_the_first_error(param: Tensor) -> None:
    handler = Fails()
    output = output_of(param, raise_error)
    handler.watch.expect_outputs([output], True)
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == ["abort"]


def test_errors_at_the_end_are_raised_by_backward(param: Tensor) -> None:
    handler = Fails()
    output = output_of(param)
    handler.watch.expect_outputs([output], True)
    with pytest.raises(KeyError, match="at the end"):
        output.sum().backward()
    assert handler.calls == ["end"]
    assert not handler.watch.is_aborted


def test_a_forgotten_end_does_nothing(handler: Handler, param: Tensor) -> None:
    output = output_of(param, handler.watch.forget_end)
    handler.watch.expect_outputs([output], True)
    output.sum().backward()
    assert handler.calls == []

    def forget_and_raise() -> None:
        handler.watch.forget_end()
        raise_error()

    output = output_of(param, forget_and_raise)
    handler.watch.expect_outputs([output], True)
    with pytest.raises(ValueError, match="no backward here"):
        output.sum().backward()
    assert handler.calls == []
    assert not handler.watch.is_aborted


def unusual(handler: Handler, param: Tensor, output: Tensor, case: str) -> None:
    match case:
        case "off":
            handler.gate.is_on = False
        case "asked":
            handler.watch.asks_driver = True
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
    handler.watch.expect_outputs([output], True)
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
    handler.watch.reports_local = True
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
        owned[0].watch.expect_outputs([output], True)
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
    watch.expect_outputs([output], True)
    owned.clear()
    output.sum().backward()
    assert watch.queue_end(True)
    assert not watch.is_queued
    del watched
