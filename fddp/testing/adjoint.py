"""Gradient checks for functions that communicate.

torch's `gradcheck` perturbs the inputs of one process and observes its outputs. If ranks
communicate, the outputs of all ranks depend on the inputs of each, and a gradient may lack the
other ranks' part. So these checks perturb one rank's input at a time and observe all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fddp import Communicator
from fddp.extend import Group, Mesh, communicator_of, entrance, exchange, tree_flatten

_STEP = 1e-6  # of differences, in float64
_Vector: TypeAlias = Callable[[Tensor], Tensor]


@entrance
def check_adjoint(
    fn: Callable[[Any], Any],
    inputs: Any,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    seed: int = 0,
    rtol: float = 1e-9,
) -> None:
    """Compare forward mode with reverse mode over all ranks. A collective call.

    For random tangents t and cotangents c, the sums over ranks of <c, J t> and of <J^T c, t> must
    be equal. All ranks run both modes. So ranks must be processes, because the threads of
    `fddp.loopback` share torch's forward mode.

    Args:
        fn: function from a tree of tensors to a tree of tensors; communicates over `group`.
        inputs: this rank's tree of float64 or complex128 tensors.
        group, mesh: as for `fddp.pmean`.
        seed: seed of the tangents and cotangents, which differ between ranks.
        rtol: tolerance, relative to the larger sum.

    Raises:
        AssertionError: the sums differ by more; on every rank, with both numbers.
    """
    __tracebackhide__ = True
    communicator = communicator_of(group, mesh)
    vector, at = _as_vector(fn, inputs)
    generator = torch.Generator().manual_seed(seed * communicator.world_size + communicator.rank)
    tangent = torch.randn(at.shape, generator=generator, dtype=at.dtype)
    output, moved = torch.func.jvp(vector, (at,), (tangent,))[:2]
    cotangent = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    (pulled,) = torch.func.vjp(vector, at)[1](cotangent)
    mine = [float(cotangent @ moved), float(pulled @ tangent)]
    received = exchange(mine, (float, float), communicator)
    forward, reverse = (sum(rank[k] for rank in received) for k in range(2))
    if not abs(forward - reverse) <= rtol * max(abs(forward), abs(reverse), 1.0):
        raise AssertionError(
            f"summed over {communicator.world_size} ranks, <c, J t> is {forward} and <J^T c, t> is "
            f"{reverse}; by rank: {received}"
        )


@entrance
def check_gradients(
    fn: Callable[[Any], Any],
    inputs: Any,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    forward: bool = False,
    tol: float = 1e-7,
) -> None:
    """Compare derivatives with central differences over all ranks. A collective call.

    Differences perturb one element of one rank's inputs at a time, and observe the outputs of all
    ranks. Reverse mode gets one unit cotangent on one rank at a time. Both yield the Jacobian of
    all ranks' outputs by all ranks' inputs.

    Args:
        fn, inputs, group, mesh: as for `check_adjoint`. All ranks need inputs and outputs of the
            same sizes.
        forward: also check forward mode; ranks must then be processes.
        tol: tolerance of an element, relative to the largest element or to 1, whichever is larger.

    Raises:
        AssertionError: an element differs by more; on every rank, with both numbers and indices.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     x = torch.tensor([1.0, 2.0], dtype=torch.float64) + group.rank
        ...     check_gradients(lambda x: fddp.pmean(x.sin(), group) ** 2, x, group)
        >>> fddp.loopback(2, f)
        [None, None]
    """
    __tracebackhide__ = True
    communicator = communicator_of(group, mesh)
    n = communicator.world_size
    vector, at = _as_vector(fn, inputs)
    with torch.no_grad():
        output = vector(at)

    def move(direction: Tensor) -> Tensor:
        __tracebackhide__ = True
        with torch.no_grad():
            return (vector(at + direction) - vector(at - direction)) / (2 * _STEP)

    def by_input(columns: Tensor) -> Tensor:
        # By rank of the output, its element, rank of the input, its element.
        return columns.view(n, at.numel(), n, output.numel()).permute(2, 3, 0, 1)

    wanted = by_input(_columns(communicator, at, lambda unit: move(unit * _STEP)))
    reverse = _columns(communicator, output, torch.func.vjp(vector, at)[1])
    _compare("reverse mode", reverse.view(wanted.shape), wanted, tol)
    if forward:
        jvp = _columns(communicator, at, lambda unit: torch.func.jvp(vector, (at,), (unit,))[1])
        _compare("forward mode", by_input(jvp), wanted, tol)


@entrance
def pulling_back(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function from `(inputs, cotangents)` to the gradients of `fn`.

    Check it to check second derivatives of `fn`.

    Example:
        >>> import torch
        >>> double = pulling_back(lambda x: x * x)
        >>> double((torch.tensor(3.0), torch.tensor(1.0)))
        tensor(6.)
    """

    def pull(pair: Any) -> Any:
        inputs, cotangents = pair
        return torch.func.vjp(fn, inputs)[1](cotangents)[0]

    return pull


def _columns(communicator: Communicator, like: Tensor, fn: Callable[[Tensor], Any]) -> Tensor:
    """Return `fn` on all ranks of each unit vector on one rank, with zeros on the others.

    The shape is `(ranks, elements, ranks, outputs)`, with each pair flattened.
    """
    __tracebackhide__ = True
    rows = []
    for rank in range(communicator.world_size):
        for element in range(like.numel()):
            unit = torch.zeros_like(like)
            if rank == communicator.rank:
                unit[element] = 1.0
            result = fn(unit)
            rows.append(result[0] if isinstance(result, tuple) else result)
    mine = torch.stack(rows).detach()
    received = exchange(mine.tolist(), [[float]], communicator)
    return torch.stack([torch.tensor(rank, dtype=like.dtype) for rank in received], dim=1)


def _compare(what: str, found: Tensor, wanted: Tensor, tol: float) -> None:
    __tracebackhide__ = True
    off = (found - wanted).abs()
    worst = int(off.argmax())
    if float(off.flatten()[worst]) <= tol * max(float(wanted.abs().max()), 1.0):
        return
    output, i, rank, j = (int(k) for k in torch.unravel_index(torch.tensor(worst), off.shape))
    raise AssertionError(
        f"{what}: the derivative of element {i} of rank {output}'s outputs by element {j} of rank "
        f"{rank}'s inputs is {float(found[output, i, rank, j])}, and by differences "
        f"{float(wanted[output, i, rank, j])}"
    )


def _as_vector(fn: Callable[[Any], Any], inputs: Any) -> tuple[_Vector, Tensor]:
    """Return `fn` as a function of real vectors, and the vector of its inputs."""
    leaves, treedef = tree_flatten(inputs)

    def vector(flat: Tensor) -> Tensor:
        __tracebackhide__ = True
        parts = torch.split(flat, [leaf.numel() * (1 + leaf.is_complex()) for leaf in leaves])
        own = [_shaped(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]
        results, _ = tree_flatten(fn(treedef.unflatten(own)))
        return _flat(results)

    return vector, _flat([leaf.detach() for leaf in leaves])


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    if not like.is_complex():
        return part.view(like.shape)
    return torch.view_as_complex(part.view(*like.shape, 2))


def _flat(leaves: Sequence[Tensor]) -> Tensor:
    return torch.cat([(torch.view_as_real(x) if x.is_complex() else x).reshape(-1) for x in leaves])
