"""What JAX does not offer by a public name: its sets of effects, its tokens, running one operation.

Everything of `jax._src` that fddp uses is taken here, so that a release of JAX that moves it shows
in one place.
"""

from __future__ import annotations

from jax._src import effects as effects
from jax._src.core import abstract_token as abstract_token
from jax._src.dispatch import apply_primitive as apply_primitive
from jax._src.dispatch import runtime_tokens as runtime_tokens


def allow(effect: type[effects.Effect], *, ordered: bool) -> None:
    """Let programs with this effect be compiled, wherever it comes up, in order or not."""
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
    """Start this thread's order anew, after a program failed: its tokens failed with it."""
    runtime_tokens.clear()
