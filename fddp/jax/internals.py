"""Private API of JAX: effects, their tokens, and running a single primitive.

All imports from `jax._src` are in this module, so that a release of JAX that moves them breaks one
place only.
"""

from __future__ import annotations

from jax._src import effects as effects
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
