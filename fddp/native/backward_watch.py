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
        """Note that a backward pass was aborted, whose end had been queued."""

    def finish(self, *, required: bool) -> None:
        """End the step at the end of a backward pass; calls `forget_end`."""


class BackwardWatch(Protocol):
    """Observer of the backward passes through a module (csrc/autograd/backward_watch.h).

    Attributes:
        expects_grads: True if gradients belong to a step that come without an output being reached.
        is_queued: True within a backward pass whose end was queued.
        is_aborted: True if that pass was aborted.
        is_required: True if that pass takes a step even without a gradient.
        asks_driver: True if the handler decides about every pass that reaches an output.
        reports_local: True if gradients that are in no step are reported, unless the gate is off.
    """

    expects_grads: bool
    is_queued: bool
    is_aborted: bool
    is_required: bool
    asks_driver: bool
    reports_local: bool

    def expect_outputs(self, outputs: list[Tensor], on: bool) -> list[Tensor]:
        """Hook outputs of a forward pass, and expect gradients if `on`. Return those outputs that
        are leaves. They are not hooked, because the caller has to remove their hooks."""

    def allow_outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        """Hook outputs of a forward pass, and report no gradients of passes through them. Return
        those outputs that are leaves, as `expect_outputs`."""

    def reach_allowed_output(self, grad: Tensor) -> None:
        """Hook of such an output that is a leaf."""

    def expect_grads(self, on: bool) -> None:
        """Set `expects_grads`, and watch for gradients if it is True."""

    def watch(self, on: bool) -> None:
        """Enable or disable `on_first_grad`."""

    def note_output(self) -> None:
        """Note that the running backward pass has reached an output. Watch for gradients."""

    def note_step(self) -> float:
        """Expect no gradients after the running pass if it has reached an output. Return the time
        at which it did, in seconds of `perf_counter`; infinity if it did not."""

    def forget_output(self) -> None:
        """Forget that an output was reached."""

    def queue_end(self, required: bool) -> bool:
        """Queue `finish` at the end of the running graph task, unless one is queued already. Return
        False, without effect, if the last pass was aborted."""

    def forget_end(self) -> None:
        """Forget the queued end, which then does nothing, or that a pass was aborted."""

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
            a step: the pass has explicit inputs, compiled autograd runs it, the last one was
            aborted, `gate` is off, or another thread has the lock. Otherwise the pass takes one,
            without a call.
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
