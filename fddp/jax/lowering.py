"""Lowering of reductions to ordered calls of the extension in a compiled program.

[Note: tokens]
JAX adds an argument and a result, a token, to a program with an ordered effect. Each operation
takes the token of the one before it. XLA neither drops nor reorders such a call, and loops and
branches pass the token through. JAX passes the token that a program returned to the next program of
the same thread.

JAX puts tokens first in the tuple that a loop carries, so the call has its token last. If a call
took and returned exactly the tuple of the loop, XLA would treat the loop as one that changes
nothing, and its condition as a constant.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from jax.core import ShapedArray
from jax.interpreters import mlir
from torch import Tensor

from fddp.errors import TransformError
from fddp.jax import calls, communicators
from fddp.jax.internals import abstract_token
from fddp.jax.primitives import EFFECT, Call, identity_p, reduce_p
from fddp.native import extension

TARGET = "fddp_reduce"
_WITHOUT_HEADER = (
    "fddp was built where jaxlib was not installed, so reductions in compiled JAX programs call "
    "Python, which is several times slower: install jaxlib, then build fddp again, by "
    "`pip install .` in its source directory"
)


@cache
def uses_extension() -> bool:
    """Return True if XLA calls the extension, False if it calls Python through jaxlib's handler.

    The first call registers the handler, or warns that there is none.
    """
    handler = extension.load().xla_handler(calls.execute)
    if handler is None:
        warnings.warn(_WITHOUT_HEADER, stacklevel=2)
        return False
    jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
    return True


def _by_extension(ctx: Any, token: Any, operands: Sequence[Any], number: int) -> list[Any]:
    """Emit a call of the extension. Returns its token and results."""
    avals_in, avals_out = [*ctx.avals_in, abstract_token], [*ctx.avals_out, abstract_token]
    inner = replace(ctx, avals_in=avals_in, avals_out=avals_out)
    lower = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)
    *results, token = lower(inner, *operands, token, call=np.int64(number))
    return [token, *results]


def _by_callback(ctx: Any, token: Any, operands: Sequence[Any], number: int) -> list[Any]:
    """Emit a call of Python through jaxlib's handler, which passes NumPy arrays and copies results.
    Returns its token and results."""

    def call_back(*operands: np.ndarray) -> list[np.ndarray]:
        arrays = _NumpyBuffers(operands)
        problem = calls.execute(number, arrays)
        if problem is not None:
            raise RuntimeError(problem)
        return [*arrays.results, np.empty(0, np.uint8)]

    # jaxlib's handler has the token first: an extra result makes the two tuples different.
    inner = replace(ctx, avals_out=[*ctx.avals_out, ShapedArray((0,), np.dtype(np.uint8))])
    (*results, _), token, _ = mlir.emit_python_callback(
        inner,
        call_back,
        token,
        list(operands),
        inner.avals_in,
        inner.avals_out,
        has_side_effect=True,
        returns_token=True,
    )
    return [token, *results]


class _NumpyBuffers:
    """`BorrowedBuffers` over NumPy arrays."""

    def __init__(self, operands: Sequence[np.ndarray]) -> None:
        self._operands = operands
        self.results = [np.empty_like(operand) for operand in operands]

    def pack(self, buffer: Tensor, members: Sequence[int]) -> None:
        _bytes(buffer)[:] = np.concatenate([_flat(self._operands[k]) for k in members])

    def unpack(self, buffer: Tensor, members: Sequence[int]) -> None:
        ends = np.cumsum([self.results[k].nbytes for k in members])[:-1]
        for k, part in zip(members, np.split(_bytes(buffer), ends), strict=True):
            _flat(self.results[k])[:] = part


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _bytes(buffer: Tensor) -> np.ndarray:
    return buffer.view(torch.uint8).numpy()


def _lower_reduce(ctx: Any, *operands: Any, call: Call) -> list[Any]:
    emit: Callable[..., list[Any]] = _by_extension if uses_extension() else _by_callback
    communicators.communicator_by_id(call.channel).open()
    types = tuple((aval.shape, aval.dtype.name) for aval in ctx.avals_in)
    token = ctx.tokens_in.get(EFFECT)
    token, *results = emit(ctx, token, operands, calls.number_of(call, types))
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
