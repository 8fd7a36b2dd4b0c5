"""States of communication hooks, as callers pass them from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fddp.errors import TreeMismatchError
from fddp.sync.engine import Engine


def init_states(engine: Engine) -> tuple[Any, ...]:
    """State of the hook by bucket before the first step; () if there is none to keep."""
    bound = engine.bound_hook
    return () if bound is None else bound.init_states(engine.program)


def checked_states(engine: Engine, states: Any, source: str) -> Sequence[Any]:
    """Return the caller's states, if they have the form of this hook's.

    Args:
        engine: has the hook.
        states: the states; None if none were passed.
        source: expression by which callers pass them, for errors.

    Raises:
        ValueError: no states were passed, and the hook needs some.
        TreeMismatchError: the states differ in form from those of `init_states`.
    """
    bound = engine.bound_hook
    if bound is not None and bound.stateful:
        if states is None:
            raise ValueError(
                f"{bound.hook.name} keeps state, which this call would lose; begin with "
                f"sync.init_state(), and pass the state on by {source}"
            )
        return bound.checked(states)
    if states is not None and states != ():
        raise TreeMismatchError(
            f"no hook keeps state, got a state of type {type(states).__name__}; pass the result of "
            f"init_state, which is ()"
        )
    return ()
