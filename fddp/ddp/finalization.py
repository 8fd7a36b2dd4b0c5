"""Steps that the caller closes after their backward pass, as in torch 2.15.

[Note: manual finalization]
With manual finalization the end of backward leaves the step open, and `finalize` closes it. The
last bucket, which carries the control word, is sent in between, so that its all-reduce overlaps
other work. From then on the step can take no further gradient and report no failure. Within
`in_step` an exception has to reach the other ranks, so there the last bucket is sent by `finalize`.
A hook within backward may call `finalize`, too, if every parameter has its gradients.
"""

from __future__ import annotations

from fddp.ddp.failure_scope import drop_step
from fddp.ddp.step_runner import StepRunner
from fddp.ddp.steps import Steps

NOT_MANUAL = (
    "finalize_backward() was called, but manual backward finalization is not required; set "
    "require_manual_backward_finalization = True before forward"
)
ALL_DELAYED = (
    "Manual backward finalization is not supported when all parameters have a delayed all-reduce "
    "(delay_all_reduce_named_params); leave one of the two out"
)
TOO_LATE = (
    "require_manual_backward_finalization cannot change after forward while a backward pass is "
    "expected or in progress; set it before forward, or after finalize_backward()"
)
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


def finalize(steps: Steps) -> None:
    """Close a step under manual finalization.

    Raises:
        RuntimeError: there is no such step, it lacks gradients, or some came too late.
        Exception: as `Steps.finish`.
    """
    with steps.lock:
        if not steps.is_suspended:
            if not steps.passes.is_queued or steps.runner.step is None:
                raise RuntimeError(_NOTHING)
            _check_complete(steps.runner)
        elif _has_left_out(steps.runner):
            drop_step(steps)
            raise RuntimeError(_LEFT_OUT)
        steps.end(required=True)


def is_in_progress(steps: Steps) -> bool:
    """Return True if a backward pass is expected or in progress, or its step is not closed."""
    with steps.lock:
        passes = steps.passes
        return steps.is_open and (
            passes.expects_grads or passes.is_queued or steps.runner.current is not None
        )


def needs_end_of_backward(runner: StepRunner) -> bool:
    """Return True if the next step can be closed only after backward: the plan or the parameters
    change, or some parameters may have no gradient."""
    engine = runner.engine
    is_partial = engine.arrivals is not None and 0 in engine.arrivals.counts
    return runner.has_changed or engine.program.control.with_order or is_partial


def _has_left_out(runner: StepRunner) -> bool:
    arrived = None if runner.current is None else runner.current.arrived
    step = runner.step
    return step is not None and arrived is not None and step.contributions.arrived() > arrived


def _check_complete(runner: StepRunner) -> None:
    """Raise a RuntimeError if parameters lack gradients, within backward."""
    found = None if runner.step is None else runner.step.contributions.backward
    if found is None:
        raise RuntimeError(f"{_INCOMPLETE}; {_LATER}")
    counts = runner.parameters.hooks.counts()
    rows = zip(runner.parameters.names, counts, found.expected, strict=True)
    missing = [name for name, count, expected in rows if count < max(1, expected)]
    if missing:
        raise RuntimeError(f"{_INCOMPLETE}: {', '.join(missing)}; {_LATER}")
