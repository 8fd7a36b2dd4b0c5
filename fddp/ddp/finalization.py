"""Steps that the caller closes after their backward pass, as in torch 2.15.

[Note: manual finalization]
With manual finalization the end of backward leaves the step open, and `finalize` closes it. The
last bucket, which carries the control word, is sent in between, so that its all-reduce overlaps
other work. From then on the step can take no further gradient and report no failure. Within
`in_step` an exception has to reach the other ranks, so there the last bucket is sent by `finalize`.
A hook within backward may call `finalize`, too, if every parameter has its gradients.
"""

from __future__ import annotations

from fddp.ddp.parameters import HookedParameters
from fddp.runtime.step import Step
from fddp.sync.engine import Engine

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
UNFINALIZED = (
    "Expected to have finalized the prior backward pass before starting a new one; call "
    "finalize_backward() after each backward pass, as require_manual_backward_finalization is set"
)
NOTHING = (
    "finalize_backward() was called, but no step requires finalization: it was finalized already, "
    "or no backward pass has synchronised gradients since, as within no_sync()"
)
LEFT_OUT = (
    "gradients arrived between a backward pass and its finalize_backward(), and are in no step; "
    "this rank has dropped the results of the step: call finalize_backward() before any other "
    "backward pass through the module"
)
_INCOMPLETE = "finalize_backward() was called before all parameters had their gradients"
_LATER = "call it when backward has returned; see should_finalize_after_backward"


def check_complete(step: Step, parameters: HookedParameters) -> None:
    """Raise a RuntimeError if parameters lack gradients, within backward."""
    expected = step.contributions.expected
    if not expected:
        raise RuntimeError(f"{_INCOMPLETE}; {_LATER}")
    rows = zip(parameters.names, parameters.hooks.counts(), expected, strict=True)
    missing = [name for name, count, least in rows if count < max(1, least)]
    if missing:
        raise RuntimeError(f"{_INCOMPLETE}: {', '.join(missing)}; {_LATER}")


def needs_end_of_backward(engine: Engine) -> bool:
    """Return True if the next step can be closed only after backward: the plan changes, or some
    parameters may have no gradient."""
    is_partial = engine.arrivals is not None and 0 in engine.arrivals.counts
    return engine.program.control.with_order or is_partial
