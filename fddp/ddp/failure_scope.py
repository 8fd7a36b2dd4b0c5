"""Exceptions of one rank in a step of a wrapped module, reported to the other ranks.

[Note: exceptions outside of backward]
A wrapped module observes its forward and backward passes, but not the code between them. If no
backward follows a forward pass, the loss function may have raised, or the script may have intended
it: scripts evaluate on one rank, and run several forward passes before a backward pass. Neither the
rank itself nor a comparison of ranks can distinguish these cases. So the caller marks the beginning
and the end of a step. The collectives that the other ranks still expect are then known: the
broadcasts and votes around a forward pass, unless a forward has begun since, and the step, unless
it has ended since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fddp.core.entrance import entrance
from fddp.ddp.forward_passes import ForwardPasses
from fddp.ddp.steps import Steps


@contextmanager
@entrance
def step_scope(ddp: Any, steps: Steps, forward: ForwardPasses) -> Iterator[None]:
    """Mark one step of a wrapped module; see `DistributedDataParallel.in_step`."""
    settings = steps.settings
    steps.settle()  # others wait for its end
    forward.leave_round()
    step, done = 0, forward.rounds
    if steps.is_open:
        step = steps.engine.step
        steps.engine.transport.enter_step(step)
    settings.enter_step(True)
    try:
        yield
    except BaseException as error:
        steps.await_abort()
        if _is_expected(steps, forward, step):
            _report(ddp, forward, error, forward.rounds - done)
        raise
    finally:
        settings.enter_step(False)
        if steps.is_open:
            steps.engine.transport.enter_step(None)


def _is_expected(steps: Steps, forward: ForwardPasses, step: int) -> bool:
    """Return True if the other ranks wait for this rank in a step."""
    if not steps.is_open or steps.is_stopped or not steps.settings.syncs:
        return False
    if forward.is_in_round or steps.engine.is_closed or steps.engine.transport.closed_by:
        return False  # the other ranks have an error as well
    return steps.engine.step == step or steps.is_owed


def _report(ddp: Any, forward: ForwardPasses, error: BaseException, done: int) -> None:
    """As `ForwardPasses.report`, without raising the error itself."""
    raised_at = error.__traceback__
    try:
        forward.report(ddp, error, done)
    except BaseException as raised:
        if raised is not error:
            raise
    finally:
        error.__traceback__ = raised_at  # without the frames of this module
