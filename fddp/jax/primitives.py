"""JAX primitives for reductions over ranks: transformation rules, lowering and execution.

[Note: reductions in jitted programs]
`reduce_p` reduces leaves over ranks. It has an ordered effect, the same for all groups: JAX keeps
such operations in the order in which they were traced, within a program, in loops and branches, and
between programs. It drops none, even if a result is not used. So ranks that run the same program
run the same collectives in the same order. `reduce_p` is linear and its own transpose, so
derivatives of all orders are reductions again. `identity_p` has no effect and no cost; its
transpose is `reduce_p` of the mean.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, dtypes
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fddp.errors import SyncTimeoutError, TransformError
from fddp.extend import Reduction, Site, run_operator
from fddp.jax import internals
from fddp.jax.communicators import communicator_by_id
from fddp.jax.errors import keep

Operator = Literal["psum", "pmean"]


class ReductionEffect(internals.effects.Effect):
    """Ordered effect of a reduction over ranks."""

    def __repr__(self) -> str:
        return "a reduction over fddp's ranks (give each process one device)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReductionEffect)

    def __hash__(self) -> int:
        return hash(ReductionEffect)


class StartedProgram(internals.effects.Effect):
    """Unordered effect of a program with reductions.

    JAX drops the tokens of programs that were compiled ahead of time and have only ordered effects.
    """


EFFECT = ReductionEffect()
_STARTED = StartedProgram()
internals.allow(ReductionEffect, ordered=True)
internals.allow(StartedProgram, ordered=False)


@dataclass(frozen=True)
class Call:
    """Parameters of one reduction in a traced program.

    Attributes:
        operator: sum or mean.
        channel: number of the channel, see [Note: channels].
        axes: axes of the mesh along which ranks meet; () for all ranks.
        paths: paths of the leaves, in the order of the operands.
        site: call site of the operator in the caller's code.
        roles: derivatives that led to this call, the latest last: "backward", "jvp".
    """

    operator: Operator
    channel: int
    axes: tuple[str, ...]
    paths: tuple[str, ...]
    site: Site
    roles: tuple[str, ...] = ()

    def derived(self, role: str, operator: Operator, paths: tuple[str, ...]) -> Call:
        """The call of a derivative of this call."""
        # JAX's reverse mode transposes a jvp; fddp counts the two as one "backward".
        transposes = role == "backward" and self.roles[-1:] == ("jvp",)
        before = self.roles[:-1] if transposes else self.roles
        return replace(self, operator=operator, paths=paths, roles=(*before, role))

    def __str__(self) -> str:
        roles = "".join(f"{role} of " for role in reversed(self.roles))
        return f"{roles}{self.operator}, called at {self.site}"


reduce_p = Primitive("fddp_reduce")
reduce_p.multiple_results = True
identity_p = Primitive("fddp_grad_sync")
identity_p.multiple_results = True


def _reduce_types(*avals: ShapedArray, call: Call) -> tuple[list[ShapedArray], set[Any]]:
    return [ShapedArray(aval.shape, aval.dtype) for aval in avals], {EFFECT, _STARTED}


def _jvp(
    primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, call: Call
) -> tuple[list[Any], list[Any]]:
    results = primitive.bind(*primals, call=call)
    moving = [i for i, x in enumerate(primals) if _is_inexact(x)]
    # A tangent that is zero on this rank may be nonzero on others.
    instantiated = [ad.instantiate_zeros(tangents[i]) for i in moving]
    paths = tuple(call.paths[i] for i in moving)
    reduced = primitive.bind(*instantiated, call=call.derived("jvp", call.operator, paths))
    tangents_out: list[Any] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    for i, tangent in zip(moving, reduced, strict=True):
        tangents_out[i] = tangent
    return results, tangents_out


def _transpose(
    operator: Operator | None, cotangents: Sequence[Any], *operands: Any, call: Call
) -> list[Any]:
    instantiated = [ad.instantiate_zeros(ct) for ct in cotangents]
    derived = call.derived("backward", operator or call.operator, call.paths)
    reduced = reduce_p.bind(*instantiated, call=derived)
    return [
        ct if ad.is_undefined_primal(x) else None for x, ct in zip(operands, reduced, strict=True)
    ]


def _batch(
    primitive: Primitive, operands: Sequence[Array], dims: Sequence[int | None], *, call: Call
) -> tuple[list[Array], list[int | None]]:
    # One reduction for all examples, with the batch axis first on every rank.
    fronted = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)
    ]
    return primitive.bind(*fronted, call=call), [None if dim is None else 0 for dim in dims]


def _is_inexact(x: Any) -> bool:
    return dtypes.issubdtype(jnp.result_type(x), np.inexact)


def _run(*operands: Array, call: Call) -> Any:
    _refuse_debug_run(call, for_others=False)
    return internals.apply_primitive(reduce_p, *operands, call=call)


def _refuse_debug_run(call: Call, *, for_others: bool) -> None:
    if communicator_by_id(call.channel).is_alone:
        return
    if internals.is_debug_run(for_others=for_others):
        raise TransformError(
            f"{call}: jax_debug_nans or jax_debug_infs runs the program again, on ranks whose "
            f"results had NaN or infinity only, so this reduction would meet a later one of other "
            f"ranks; what this rank computed before it is finite: look at other ranks' errors, and "
            f"at what follows the reduction"
        )


def _define(primitive: Primitive, transposed: Operator | None) -> None:
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = partial(_transpose, transposed)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)


# Lowering to ordered callbacks of a compiled program

_EXTRA = ShapedArray((0,), np.dtype(np.uint8))  # see [Note: tokens]


def _lower_reduce(ctx: Any, *operands: Any, call: Call) -> list[Any]:
    communicator_by_id(call.channel).open()

    def call_back(*arrays: np.ndarray) -> list[np.ndarray]:
        return [*_execute(call, arrays), np.empty(0, np.uint8)]

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


# Execution


def _execute(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Reduce the operands of a call. XLA calls this on one of its threads.

    Raises:
        RuntimeError: the reduction failed; its text identifies the error, see `errors.keep`.
    """
    try:
        channel = communicator_by_id(call.channel)
        # Other threads may be other ranks.
        _refuse_debug_run(call, for_others=not channel.threads)
        sums = run_operator(
            channel.communicator,
            Reduction(call.operator, call.paths, call.site, call.axes, call.roles),
            [_tensor(operand) for operand in operands],
        )
    except Exception as error:
        text = keep(_with_way_out(error, call))
    else:
        return [_array(total, operand) for total, operand in zip(sums, operands, strict=True)]
    raise RuntimeError(text)


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor over an array's memory, by its bytes, because DLPack has no bfloat16 of NumPy."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return from_dlpack(array.reshape(-1).view(np.uint8)).view(dtype).view(array.shape)


def _array(tensor: Tensor, like: np.ndarray) -> np.ndarray:
    """An array of the same dtype as `like` over a tensor's memory."""
    return tensor.view(-1).view(torch.uint8).numpy().view(like.dtype).reshape(like.shape)


def _with_way_out(error: Exception, call: Call) -> Exception:
    """Add a hint to a timeout if ranks are threads: XLA may not have a thread for each of them."""
    if isinstance(error, SyncTimeoutError) and communicator_by_id(call.channel).threads:
        hint = (
            "; ranks that are threads share XLA's thread pool, one thread for each core: call "
            'jax.config.update("jax_cpu_enable_async_dispatch", False) before JAX is used, so that '
            "each rank's thread runs its own programs, or run ranks as processes"
        )
        error.args = (f"{error.args[0]}{hint}", *error.args[1:])
    return error


# Registration

reduce_p.def_effectful_abstract_eval(_reduce_types)
identity_p.def_abstract_eval(lambda *avals, call: list(avals))
reduce_p.def_impl(_run)
identity_p.def_impl(partial(internals.apply_primitive, identity_p))
_define(reduce_p, transposed=None)
_define(identity_p, transposed="pmean")
mlir.register_lowering(reduce_p, _lower_elsewhere)
mlir.register_lowering(reduce_p, _lower_reduce, platform="cpu")
mlir.register_lowering(identity_p, lambda ctx, *operands, call: operands)
