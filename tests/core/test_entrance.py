"""Entrances: the frames that errors keep, and all that stays as it is without an entrance."""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from fddp.core.entrance import CALL_CODE, entrance
from fddp.errors import InternalError

SOURCE = """
@entrance
def door(call):
    return middle(call)

def middle(call):
    return inner(call)

def inner(call):
    value = Thing()
    return call()

def fail():
    raise ValueError("an odd number")

def break_():
    raise InternalError("an invariant")

def fail_from():
    try:
        middle(fail)
    except ValueError as error:
        raise KeyError("no key") from error

def fail_again():
    try:
        middle(fail)
    except ValueError:
        raise KeyError("no key")

def in_a_library():
    with stack() as exits:
        exits.callback(fail)

@entrance
def numbers(call):
    try:
        yield 1
        middle(call)
    finally:
        yield "closed"
"""


class Thing:
    """A value in a local variable of a frame that tracebacks leave out."""


# As a module of fddp, so that its frames are fddp's.
FDDP: dict[str, Any] = {
    "__name__": "fddp.somewhere",
    "entrance": entrance,
    "stack": contextlib.ExitStack,
    "InternalError": InternalError,
    "Thing": Thing,
}
exec(SOURCE, FDDP)
door, middle, fail, numbers = (FDDP[name] for name in ("door", "middle", "fail", "numbers"))


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("no error was raised")


def frames(error: BaseException | None) -> list[str]:
    """Functions in a traceback, without helpers of this file, and without wrappers of `entrance`,
    which are in it before Python 3.11."""
    assert error is not None
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [code.co_name for code in codes if code.co_filename != CALL_CODE.co_filename]
    return [name for name in names if name not in ("raised", "<lambda>")]


def users() -> Any:
    raise LookupError("of the caller")


def test_the_entrance_and_the_line_that_noticed_stay() -> None:
    assert frames(raised(lambda: door(fail))) == ["door", "fail"]


def test_frames_of_the_caller_stay() -> None:
    assert frames(raised(lambda: door(users))) == ["door", "inner", "users"]


def test_the_last_call_of_the_caller_stays() -> None:
    def second() -> Any:
        return middle(fail)

    def first() -> Any:
        return middle(second)

    assert frames(raised(lambda: door(first))) == ["door", "first", "second", "middle", "fail"]


def test_the_outermost_entrance_decides() -> None:
    def first() -> Any:
        return door(lambda: door(fail))

    assert frames(raised(lambda: door(first))) == ["door", "first", "door", "fail"]


def test_libraries_within_fddp_are_left_out() -> None:
    assert frames(raised(lambda: door(FDDP["in_a_library"]))) == ["door", "fail"]
    assert "__exit__" in frames(raised(lambda: middle(FDDP["in_a_library"])))


@pytest.mark.parametrize(
    ("call", "link"), [("fail_from", "__cause__"), ("fail_again", "__context__")]
)
def test_errors_that_led_to_it_are_treated_alike(call: str, link: str) -> None:
    error = raised(lambda: door(FDDP[call]))
    assert frames(error) == ["door", call]
    assert frames(getattr(error, link)) == [call, "fail"]


def test_a_chain_may_be_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    def circle() -> None:
        raise first

    assert frames(raised(lambda: door(circle))) == ["door", "inner", "circle"]


def test_a_stored_error_can_be_raised_again() -> None:
    stored = raised(lambda: door(fail))
    FDDP["stored"] = stored
    exec("def again():\n    raise stored", FDDP)
    assert frames(raised(lambda: door(FDDP["again"]))) == ["door", "door", "fail"]


def test_broken_invariants_show_all() -> None:
    assert frames(raised(lambda: door(FDDP["break_"]))) == ["door", "middle", "inner", "break_"]


def test_interrupts_show_all() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert frames(raised(lambda: door(interrupt))) == ["door", "middle", "inner", "interrupt"]


@pytest.mark.parametrize(
    ("value", "short"), [("1", False), ("yes", False), ("0", True), ("", True)]
)
def test_the_environment_is_read_when_an_error_leaves(
    value: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDDP_FULL_TRACEBACK", value)
    assert (frames(raised(lambda: door(fail))) == ["door", "fail"]) is short


def test_wrong_arguments_are_raised_at_the_call() -> None:
    error = raised(lambda: door())
    assert str(error) == "door() missing 1 required positional argument: 'call'"
    assert frames(error) == []


def test_iterations_are_entrances() -> None:
    iterator = numbers(fail)
    assert next(iterator) == 1
    error = raised(lambda: [*iterator])
    assert frames(error) == ["numbers", "fail"]


def test_errors_are_thrown_into_iterations() -> None:
    iterator = numbers(fail)
    assert next(iterator) == 1
    assert iterator.throw(LookupError("of the caller")) == "closed"
    assert frames(raised(lambda: next(iterator))) == ["numbers"]


def test_no_cycle_keeps_locals_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    things: list[weakref.ref[Any]] = []

    class Noted(Thing):
        def __init__(self) -> None:
            things.append(weakref.ref(self))

    monkeypatch.setitem(FDDP, "Thing", Noted)
    gc.disable()
    try:
        error = raised(lambda: door(fail))
        assert things[0]() is not None
        del error
        assert things[0]() is None
    finally:
        gc.enable()


def test_functions_stay_themselves() -> None:
    assert (door.__name__, [*inspect.signature(door).parameters]) == ("door", ["call"])
    assert door(lambda: 3) == 3
