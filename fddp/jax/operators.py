"""Reductions over ranks for traced programs, on pytrees of JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Primitive

from fddp import Communicator
from fddp.extend import SUMMABLE_DTYPES, Group, Mesh, call_site, entrance, leaf_text, tree_flatten
from fddp.jax.communicators import JitCommunicator, jit_communicator_of
from fddp.jax.primitives import Call, Operator, identity_p, reduce_p

Tree = TypeVar("Tree")
Axis = str | Sequence[str] | None

_JAX = str(Path(jax.__file__).parent) + "/"
_SUMMABLE = frozenset(str(dtype).removeprefix("torch.") for dtype in SUMMABLE_DTYPES)


@entrance
def pmean(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
) -> Tree:
    """Mean over ranks of each leaf, inside or outside of `jax.jit`.

    It is one operation with an ordered effect: it runs in the order in which it was traced, in
    every iteration of a loop, and also if its result is not used. It is differentiable in forward
    and reverse mode, to any order, and is its own transpose, as `fddp.pmean`. Under `jax.vmap` all
    examples are reduced in one operation. All ranks must run the same program. In a function passed
    to `jax.custom_derivatives.linear_call` under `jit`, JAX raises a KeyError, as for its own
    ordered effects; use `jax.custom_vjp`.

    Args:
        tree: arrays of floating or complex dtypes, traced or not, or values that `jnp.asarray`
            accepts; None stays None. Ranks must have the same paths, shapes and dtypes.
        group: as for `fddp.pmean`; the function closes over it. A `Communicator` must not be used
            otherwise until the program has run; its `stopping` is read after that.
        mesh: the axes of the ranks, as for `GradSync`.
        axis: one or more names of axes of the mesh. The mean is over ranks that differ only in
            these axes; None for all ranks.

    Returns:
        A tree of the same structure, the same on all ranks that take part.

    Raises:
        TypeError: a leaf is not an array, or its dtype has no mean.
        ValueError: `axis` does not name axes of the mesh.
        TransformError: the program is compiled for another platform than the CPU.
        jax.errors.JaxRuntimeError: the reduction failed; raised where results are waited for. Its
            text contains the error of `fddp.pmean`, which `named_errors` raises instead.

    Example:
        >>> import fddp, jax, jax.numpy as jnp
        >>> from fddp.jax import pmean
        >>> def gradient(group):
        ...     loss = lambda w: pmean((w * group.rank) ** 2, group)
        ...     return jax.jit(jax.value_and_grad(loss))(jnp.array(3.0))
        >>> [(float(loss), float(grad)) for loss, grad in fddp.loopback(2, gradient)]
        [(4.5, 0.0), (4.5, 6.0)]
    """
    return _bound(reduce_p, "pmean", tree, jit_communicator_of(group, mesh), axis)


@entrance
def psum(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
) -> Tree:
    """Sum over ranks of each leaf, inside or outside of `jax.jit`.

    Arguments, result and errors are those of `pmean`; integers are supported, too.

    Example:
        >>> import fddp, jax, jax.numpy as jnp
        >>> from fddp.jax import psum
        >>> fddp.loopback(2, lambda group: int(jax.jit(lambda n: psum(n, group))(3 + group.rank)))
        [7, 7]
    """
    return _bound(reduce_p, "psum", tree, jit_communicator_of(group, mesh), axis)


@entrance
def grad_sync(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
) -> Tree:
    """Identity whose cotangents are averaged over ranks, as `fddp.sync_on_backward`.

    Applied to the parameters in a loss function, it turns the gradient of each rank's local loss
    into the gradient of the mean loss. Only its transpose communicates; tangents are not changed.
    To average existing gradients, use `pmean`.

    Args:
        tree: arrays, usually parameters, the same on all ranks; None stays None. Leaves that are
            neither floating nor complex are returned unchanged.
        group, mesh, axis: as for `pmean`.

    Raises:
        As `pmean`.

    Example:
        >>> import fddp, jax, jax.numpy as jnp
        >>> from fddp.jax import grad_sync
        >>> def gradient(group):
        ...     loss = lambda w: grad_sync(w, group) * group.rank
        ...     return float(jax.jit(jax.grad(loss))(jnp.array(1.0)))
        >>> fddp.loopback(2, gradient)
        [0.5, 0.5]
    """
    return _bound(identity_p, "pmean", tree, jit_communicator_of(group, mesh), axis)


def _bound(
    primitive: Primitive, operator: Operator, tree: Tree, channel: JitCommunicator, axis: Axis
) -> Tree:
    name = operator if primitive is reduce_p else "grad_sync"
    leaves, treedef = tree_flatten(tree)
    arrays = {
        path: _array(leaf, path, name)
        for path, leaf in zip(treedef.paths, leaves, strict=True)
        if leaf is not None
    }
    paths = tuple(path for path, array in arrays.items() if _takes(name, array, path))
    if paths:
        call = Call(operator, channel.number, _axes(name, channel, axis), paths, call_site(_JAX))
        results = primitive.bind(*(arrays[path] for path in paths), call=call)
        arrays.update(zip(paths, results, strict=True))
    reduced: Tree = treedef.unflatten([arrays.get(path) for path in treedef.paths])
    return reduced


def _array(leaf: Any, path: str, name: str) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"{name}: {leaf_text(path)} is a tensor of torch, but this operator is for JAX "
            f"programs; use fddp.{'sync_on_backward' if name == 'grad_sync' else name}"
        )
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"{name}: {leaf_text(path)} is a {type(leaf).__name__}; it takes arrays, numbers and "
            f"None (separate the arrays first, for example with equinox.partition)"
        ) from error


def _takes(name: str, array: jax.Array, path: str) -> bool:
    """Return True if the leaf is reduced. Raise if it should be, but can't be."""
    dtype = array.dtype.name
    inexact = jnp.issubdtype(array.dtype, np.inexact)
    if name == "grad_sync" and not inexact:
        return False
    if name == "pmean" and not inexact:
        raise TypeError(
            f"pmean: {leaf_text(path)} is of {dtype}, which can't represent a mean; use psum, or "
            f"convert it to a floating dtype"
        )
    if dtype not in _SUMMABLE:
        raise TypeError(
            f"{name}: {leaf_text(path)} is of {dtype}, which can't be summed over ranks; convert "
            f"it to one of {', '.join(sorted(_SUMMABLE))}"
        )
    return True


def _axes(name: str, channel: JitCommunicator, axis: Axis) -> tuple[str, ...]:
    """The named axes in the topology's order; () for all ranks."""
    if axis is None:
        return ()
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    known = () if channel.topology is None else channel.topology.names
    if not names or len(set(names)) != len(names) or not set(names) <= set(known):
        raise ValueError(
            f"{name}: axis={axis!r} must name distinct axes of the ranks' mesh, which "
            + (f"has {known}" if known else "is missing; pass mesh=")
            + "; axes of jax.vmap, pmap and shard_map are other axes"
        )
    own = tuple(name for name in known if name in names)
    return () if len(own) == len(known) else own
