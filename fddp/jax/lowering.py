"""Lowering of reductions to ordered callbacks of a compiled program.

[Note: tokens]
JAX adds an argument and a result, a token, to a program with an ordered effect. Each operation
takes the token of the one before it. XLA neither drops nor reorders such a call, and loops and
branches pass the token through. JAX passes the token that a program returned to the next program of
the same thread.

JAX puts tokens first in the tuple that a loop carries, and its callbacks have theirs first, too. If
a call took and returned exactly the tuple of the loop, XLA would treat the loop as one that changes
nothing, and its condition as a constant. So each call has one more result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from fddp.errors import TransformError
from fddp.jax import calls
from fddp.jax.communicators import communicator_by_id
from fddp.jax.primitives import EFFECT, Call, identity_p, reduce_p

_EXTRA = ShapedArray((0,), np.dtype(np.uint8))  # see [Note: tokens]


def _lower_reduce(ctx: Any, *operands: Any, call: Call) -> list[Any]:
    communicator_by_id(call.channel).open()

    def call_back(*arrays: np.ndarray) -> list[np.ndarray]:
        return [*calls.execute(call, arrays), np.empty(0, np.uint8)]

    inner = replace(ctx, avals_out=[*ctx.avals_out, _EXTRA])
    (*results, _), token, _ = mlir.emit_python_callback(
        inner,
        call_back,
        ctx.tokens_in.get(EFFECT),
        list(operands),
        inner.avals_in,
        inner.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
    return results


def _lower_elsewhere(ctx: Any, *operands: Any, call: Call) -> list[Any]:
    platforms = ", ".join(ctx.module_context.platforms)
    raise TransformError(
        f"{call}: compiled for {platforms}, and reductions in compiled programs run on the CPU "
        f"only; compile the program for the CPU (jax.default_device, or arrays in CPU memory), or "
        f"call GradSync on the program's results"
    )


mlir.register_lowering(reduce_p, _lower_elsewhere)
mlir.register_lowering(reduce_p, _lower_reduce, platform="cpu")
mlir.register_lowering(identity_p, lambda ctx, *operands, call: operands)
