"""Where a wrapped module can't keep what `nonfinite` promises: refused on all ranks alike.

"skip" and "raise" are decided at the end of a step, over all of its gradients. What was averaged
apart from them, or given to an optimizer before, could no longer be left out.
"""

from __future__ import annotations

from typing import get_args

from fddp.runtime.nonfinite import Policy


def check_policy(policy: Policy, *, delays: bool) -> None:
    """Checks the argument of the constructor; `delays` says whether some parameters have a delayed
    all-reduce.

    Raises:
        ValueError: there is no such policy, or it would not hold for those parameters.

    Example:
        >>> check_policy("skip", delays=False)
    """
    if policy not in get_args(Policy):
        raise ValueError(f"nonfinite must be one of {', '.join(get_args(Policy))}, got {policy!r}")
    if delays and policy != "propagate":
        raise ValueError(
            f"nonfinite={policy!r} and delay_all_reduce_named_params can't both be: parameters "
            f"with a delayed all-reduce are averaged apart, and could be neither judged nor left "
            f"out with the others; leave out one of the two"
        )


def check_steps_wait(policy: Policy, way: str) -> None:
    """Checks that no optimizer takes gradients before they are judged; `way` names how one would.

    Raises:
        ValueError: it would.
    """
    if policy != "propagate":
        raise ValueError(
            f"nonfinite={policy!r} and {way} can't both be: the optimizer steps bucket by bucket, "
            f"before it is known whether all gradients are finite; call optimizer.step() after "
            f"backward, or leave out nonfinite"
        )


def skip_in_context_problem() -> str:
    """What is wrong with leaving out a step whose gradients are in distributed autograd."""
    return (
        "nonfinite='skip' can't leave out a step whose gradients are in a context of distributed "
        "autograd: none can be taken from there, and the optimizer would go on with each rank's "
        "own; build the wrapper with nonfinite='raise'"
    )
