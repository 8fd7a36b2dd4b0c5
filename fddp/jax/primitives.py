"""JAX primitives for reductions over ranks, and their transformation rules.

[Note: reductions in jitted programs]
`reduce_p` reduces leaves over ranks. It has an ordered effect, the same for all groups: JAX keeps
such operations in the order in which they were traced, within a program, in loops and branches, and
between programs. It drops none, even if a result is not used. So ranks that run the same program
run the same collectives in the same order. `reduce_p` is linear and its own transpose, so
derivatives of all orders are reductions again. `identity_p` has no effect and no cost; its
transpose is `reduce_p` of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from fddp.extend import Site
from fddp.jax import internals

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


def _define(primitive: Primitive, transposed: Operator | None) -> None:
    primitive.def_impl(partial(internals.apply_primitive, primitive))
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = partial(_transpose, transposed)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)


reduce_p.def_effectful_abstract_eval(_reduce_types)
identity_p.def_abstract_eval(lambda *avals, call: list(avals))
_define(reduce_p, transposed=None)
_define(identity_p, transposed="pmean")
