"""Checks of `nonfinite` against features that it does not support.

"skip" and "raise" are decided at the end of a step, over all of its gradients. A gradient that was
averaged separately, or given to an optimizer before, could no longer be left out. All ranks raise
the same errors.
"""

from __future__ import annotations

from typing import get_args

from fddp.runtime.nonfinite import Policy

SKIP_IN_CONTEXT = (
    "nonfinite='skip' can't skip a step whose gradients are in a context of distributed autograd: "
    "gradients can't be removed from there, and the optimizer would use each rank's own; build the "
    "wrapper with nonfinite='raise'"
)


def check_policy(policy: Policy, *, delays: bool) -> None:
    """Check the argument of the constructor.

    Args:
        policy: the argument.
        delays: True if some parameters have a delayed all-reduce.

    Raises:
        ValueError: the policy is unknown, or does not support delayed parameters.

    Example:
        >>> check_policy("skip", delays=False)
    """
    if policy not in get_args(Policy):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Policy))}, got {policy!r}")
    if delays and policy != "propagate":
        raise ValueError(
            f"nonfinite={policy!r} and delay_all_reduce_named_params can't be combined: "
            f"parameters with a delayed all-reduce are averaged separately, and could be neither "
            f"checked nor skipped with the others; leave out one of the two"
        )


def check_steps_wait(policy: Policy, way: str) -> None:
    """Check that no optimizer runs before gradients are checked.

    Args:
        policy: the argument of the constructor.
        way: name of the function that would run one.

    Raises:
        ValueError: the policy is not "propagate".
    """
    if policy != "propagate":
        raise ValueError(
            f"nonfinite={policy!r} and {way} can't be combined: the optimizer steps bucket by "
            f"bucket, before it is known if all gradients are finite; call optimizer.step() after "
            f"backward, or leave out nonfinite"
        )
