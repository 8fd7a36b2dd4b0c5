"""Typed interface of the compiled observer of backward passes; see [Note: the end of backward]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fddp.native import extension


class Gate(Protocol):
    """Switch for all backward passes; see `BackwardWatch`."""

    is_on: bool


class LocalReports(Protocol):
    """Receiver of reports about gradients that are in no step."""

    def report(self, leaves: Sequence[int]) -> bool:
        """Report a backward pass that left gradients to these leaves, at its end. Return False if
        further passes are not to be reported."""

    def refuse_early_use(self, leaf: int) -> None:
        """Report a user's hook that has changed a parameter or cleared its gradient."""


class PassHandler(Protocol):
    """Receiver of the events that a `BackwardWatch` observes."""

    def on_first_grad(self, context: int | None) -> None:
        """Open a step, before the gradient is accumulated, in a context of distributed autograd if
        one is given. Must not raise."""

    def on_abort(self) -> None:
        """Take the news that a backward pass was aborted, whose end had been queued."""

    def finish(self) -> None:
        """End the step at the end of a backward pass."""


OUTPUT_REACHED, PASS_ABORTED = 1, 2
"""News of a `BackwardWatch`; they come in this order."""


class BackwardWatch(Protocol):
    """Observer of the backward passes through a module (csrc/autograd/backward_watch.h).

    Attributes:
        is_queued: True within a backward pass whose end was queued.
        reached_s: time at which the last pass reached an output, in seconds of `perf_counter`;
            infinity if it did not.
        reports_local: True if gradients that are in no step are reported, unless the gate is off.
    """

    is_queued: bool
    reached_s: float
    reports_local: bool

    def expect_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """Hook outputs of a forward pass. Return those outputs that are leaves. They are not
        hooked, because the caller has to remove their hooks."""

    def allow_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """Hook outputs of a forward pass, and report no gradients of passes through them. Return
        those outputs that are leaves, as `expect_outputs`."""

    def reach_allowed_output(self, grad: Tensor) -> None:
        """Hook of such an output that is a leaf."""

    def follow(self, awaits_gradients: bool, takes_outputs: bool) -> None:
        """Follow the handler's `Life`: call `on_first_grad` for gradients, and take outputs without
        the handler, or not."""

    def take_news(self) -> int:
        """Return what happened without the handler since the last call: a sum of news."""

    def report_local(self, on: bool) -> None:
        """Set `reports_local`."""

    def note_output(self) -> None:
        """Note that the running backward pass has reached an output."""

    def queue_end(self) -> None:
        """Queue `finish` at the end of the running graph task, unless one is queued already."""

    def forget_end(self) -> None:
        """Forget the queued end, which then does nothing."""

    def reach_output(self, grad: Tensor) -> None:
        """Hook of an output that is a leaf."""


def backward_watch(
    handler: PassHandler,
    gate: Gate,
    lock: Any,
    on_output: Callable[..., None],
    reports: LocalReports,
) -> BackwardWatch:
    """Return the observer of one module.

    Args:
        handler: receiver of events, held weakly.
        gate: switch for all backward passes.
        lock: the handler's `threading.RLock`.
        on_output: hook that is called where the handler has to decide whether a backward pass takes
            a step: the pass has explicit inputs, compiled autograd runs it, `takes_outputs` was
            given as False, `gate` is off, or another thread has the lock. Otherwise the pass takes
            one, without a call.
        reports: receiver of reports about gradients that are in no step.
    """
    make = extension.load().BackwardWatch
    return cast(BackwardWatch, make(handler, gate, lock, on_output, reports))


def is_compiled_backward() -> bool:
    """Return True within a backward pass that compiled autograd runs."""
    return cast(bool, extension.load().is_compiled_backward())


def has_explicit_inputs() -> bool:
    """Return True if the running backward pass has explicit inputs (`autograd.grad`)."""
    return cast(bool, extension.load().has_explicit_inputs())
