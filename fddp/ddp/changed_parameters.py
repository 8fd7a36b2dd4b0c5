"""Parameters of a wrapped module that change between steps.

[Note: changed parameters]
The parameters of a wrapped module may change between steps. A parameter that is frozen stays in the
plan, unused. If one is unfrozen, replaced or added, the rank can run neither a step of the old plan
nor the collectives that make a new plan before all ranks are ready for it. So it fails its next
step with `ParametersChangedError` and leaves its gradients untouched. If all ranks fail with this
error, they make a new plan and repeat the step. Otherwise all of them raise. If a rank fails for
another reason, the others raise that error, and the comparison waits for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from fddp.errors import FddpError, PlanMismatchError
from fddp.runtime.failures import peer_error
from fddp.sync.engine import Engine

_CHANGE = "freeze, unfreeze and replace parameters on all ranks between the same two steps"


class ParametersChangedError(FddpError):
    """A rank's parameters are no longer those of the plan."""

    def __init__(self) -> None:
        super().__init__(f"this rank's parameters have changed; {_CHANGE}")


def check_changed_everywhere(engine: Engine, failures: Sequence[str]) -> None:
    """Check that all ranks failed the last step because their parameters changed.

    Args:
        engine: the engine of the failed step.
        failures: texts of the errors by rank; empty for ranks without an error.

    Raises:
        PeerError: a rank failed for another reason.
        PlanMismatchError: a rank has not failed.
    """
    rank = engine.transport.rank
    # A rank that failed before its forward pass has not compared its parameters.
    others = {
        other: text
        for other, text in enumerate(failures)
        if text and not text.startswith(ParametersChangedError.__name__)
    }
    if others:
        raise peer_error(engine.step - 1, others)
    for other, text in enumerate(failures):
        if not text:
            raise PlanMismatchError(
                f"the parameters of the wrapped module have changed on rank {rank}, but not on "
                f"rank {other}; {_CHANGE}"
            )
