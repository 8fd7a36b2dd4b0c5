"""Steps that the caller closes after their backward pass; see [Note: manual finalization]."""

from __future__ import annotations

import time

from fddp.ddp.backward_steps import BackwardDriver, Suspension, drop_step
from fddp.ddp.step_runner import StepRunner
from fddp.runtime.contributions import BackwardContributions
from fddp.runtime.interpreter import send_last_bucket

_NOTHING = (
    "finalize_backward() was called, but no step requires finalization: it was finalized already, "
    "or no backward pass has synchronised gradients since, as within no_sync()"
)
_INCOMPLETE = "finalize_backward() was called before all parameters had their gradients"
_LATER = "call it when backward has returned; see should_finalize_after_backward"
_LEFT_OUT = (
    "gradients arrived between a backward pass and its finalize_backward(), and are in no step; "
    "this rank has dropped the results of the step: call finalize_backward() before any other "
    "backward pass through the module"
)


class FinalizingDriver(BackwardDriver):
    """Driver whose steps are closed at the end of backward, or by `finalize`."""

    def finish(self, *, required: bool) -> None:
        """Close the step at the end of backward, or leave that to `finalize`.

        Args:
            required: True if a step is taken even if no gradient came.

        Raises:
            Exception: as `BackwardDriver.finish`.
        """
        if not self._switch.is_manual:
            super().finish(required=required)
            return
        with self._lock:
            if not self._suspend(required=required):
                super().finish(required=required)

    def _suspend(self, *, required: bool) -> bool:
        """Leave the step open for `finalize`. Return False if there is none."""
        runner = self.runner
        if self._context is None:
            if required and not runner.is_begun:
                runner.open()
            if runner.step is None:
                return False
        self.passes.forget_end()
        self._set_suspension(Suspension(ended_s=time.perf_counter()))
        if not self._switch.in_step and runner.step is not None:
            runner.fail_on_misuse(runner.parameters.used_names())
            send_last_bucket(runner.step)
            self.suspension.arrived = runner.step.contributions.arrived()
        return True

    def finalize(self) -> None:
        """Close a step under manual finalization.

        Raises:
            RuntimeError: there is no such step, it lacks gradients, or some came too late.
            Exception: as `BackwardDriver.finish`.
        """
        with self._lock:
            if not self.suspension.is_active:
                if not self.passes.is_queued or self.runner.step is None:
                    raise RuntimeError(_NOTHING)
                check_complete(self.runner)
            elif self._has_left_out():
                drop_step(self)
                raise RuntimeError(_LEFT_OUT)
            super().finish(required=True)

    def _has_left_out(self) -> bool:
        step, arrived = self.runner.step, self.suspension.arrived
        return step is not None and arrived is not None and step.contributions.arrived() > arrived

    @property
    def is_open(self) -> bool:
        """True if a backward pass is expected or in progress, or its step is not closed."""
        with self._lock:
            return self.passes.expects_grads or self.passes.is_queued or self.runner.is_begun


def needs_end_of_backward(runner: StepRunner) -> bool:
    """Return True if the next step can be closed only after backward: the plan or the parameters
    change, or some parameters may have no gradient."""
    engine = runner.engine
    is_partial = engine.arrivals is not None and 0 in engine.arrivals.counts
    return runner.has_changed or engine.program.control.with_order or is_partial


def check_complete(runner: StepRunner) -> None:
    """Raise a RuntimeError if parameters lack gradients, within backward."""
    found = None if runner.step is None else runner.step.contributions
    if not isinstance(found, BackwardContributions):
        raise RuntimeError(f"{_INCOMPLETE}; {_LATER}")
    counts = runner.parameters.hooks.counts()
    rows = zip(runner.parameters.names, counts, found.expected, strict=True)
    missing = [name for name, count, expected in rows if count < max(1, expected)]
    if missing:
        raise RuntimeError(f"{_INCOMPLETE}: {', '.join(missing)}; {_LATER}")
