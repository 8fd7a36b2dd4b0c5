"""Private API of JAX: effects, their tokens, running a single primitive, and debug runs.

All imports from `jax._src` are in this module, so that a release of JAX that moves them breaks one
place only.
"""

from __future__ import annotations

import sys
from types import FrameType

from jax._src import effects as effects
from jax._src.api_util import InternalFloatingPointError, maybe_recursive_nan_check
from jax._src.dispatch import apply_primitive as apply_primitive
from jax._src.dispatch import runtime_tokens as runtime_tokens


def allow(effect: type[effects.Effect], *, ordered: bool) -> None:
    """Register an effect as allowed everywhere: in compiled programs, control flow, custom
    derivatives and rematerialisation."""
    if ordered:
        effects.ordered_effects.add_type(effect)
    for allowed in (
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        allowed.add_type(effect)


def forget_tokens() -> None:
    """Reset this thread's tokens, which have failed with a program."""
    runtime_tokens.clear()


def is_debug_run(*, for_others: bool) -> bool:
    """Return True if JAX runs a program again because its results had NaN or infinity.

    Under `jax_debug_nans` and `jax_debug_infs` it does so on each rank that has one, while it
    handles an error of its own.

    Args:
        for_others: True where the thread may be XLA's, which runs programs for other threads.
    """
    handled: BaseException | None = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, InternalFloatingPointError):
        handled = handled.__context__
    if handled is not None:
        return True
    if not for_others or not _is_thread_of_xla():
        return False
    again = maybe_recursive_nan_check.__code__
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is again:
                return True
            caller = caller.f_back
    return False


def _is_thread_of_xla() -> bool:
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("jax.")
