"""The operators: collectives that differentiate, on trees of tensors.

[Note: one function of all ranks]
The ranks together are one function on the product of their inputs: each rank gives its own, and
each gets its own result. Each operator's backward is the exact adjoint of that function. So `psum`
and `pmean` are their own transposes, `all_gather` and `reduce_scatter` each other's, and that of
`broadcast_from` is the sum to the root and zeros elsewhere. For all tangents t and cotangents c,
the sum over ranks of <c, J t> is that of <J^T c, t>; forward and reverse mode agree where all ranks
move together. What a rank gets from `grad` is the gradient of the sum of all ranks' results, so
that of `psum(loss)` has a factor of the number of ranks, and that of `pmean(loss)` has none. `pmax`
has the derivative of a maximum, shared equally among the ranks that attain it. The one exception is
`sync_on_backward`: its cotangents are averaged, which turns local losses into the gradient of their
mean.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

from fddp.collectives import dynamo, handshake
from fddp.collectives.autograd import (
    FddpLinear,
    FddpMaximum,
    FddpMeanOnBackward,
    has_rules,
    largest,
)
from fddp.collectives.call_cache import CallSpec, FlattenedCall, flatten_call
from fddp.collectives.calls import Call, CallRecord
from fddp.collectives.communicator import Communicator
from fddp.collectives.dispatch import run
from fddp.collectives.group_position import Axis, checked_root, resolve_communicator
from fddp.collectives.operator_program import GroupPosition, Operator
from fddp.core.plan.plan import BucketPlan
from fddp.runtime.guards import outside_tracing
from fddp.telemetry.call_site import Site, call_site
from fddp.transport import Group
from fddp.transport.mesh import Mesh

Tree = TypeVar("Tree")


def pmean(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """The mean over ranks of each leaf; a collective call, which differentiates.

    It works in and around `torch.func` transforms and with `create_graph=True`; it is its own
    transpose, see [Note: one function of all ranks].

    Args:
        tree: floating or complex tensors; None stays None. Ranks must have the same paths, shapes
            and dtypes. Not written.
        group: as for `GradSync`, or a `Communicator`; None for the default group.
        mesh: the axes of the ranks, as for `GradSync`.
        axis: a name or several, of the mesh's axes: the ranks that differ in these alone meet. None
            for all ranks.
        plan: which leaves travel together, a plan for this very tree; None has them planned.

    Returns:
        A new tree of the same structure, the same on all ranks that meet.

    Raises:
        DesyncError: ranks met in different operators or with different trees; on all of them.
        PeerError: another rank can't take part; the text says why.
        TypeError, ValueError, PlanMismatchError: what is wrong with the arguments, on this rank.
        SyncTimeoutError: a rank did not come; the text has the operator and where it was called.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     w = torch.tensor([1.0 + group.rank])
        ...     mean = lambda w: (fddp.pmean(w, group) ** 2).sum()
        ...     return mean(w).item(), torch.func.grad(mean)(w).item()
        >>> fddp.loopback(2, f)
        [(2.25, 3.0), (2.25, 3.0)]
    """
    return _linear("pmean", tree, group, mesh, axis, plan)


def psum(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """The sum over ranks of each leaf; a collective call, which differentiates.

    Arguments, result and errors are those of `pmean`; integers can be summed, too.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda group: fddp.psum(torch.tensor(3 + group.rank), group).item())
        [7, 7]
    """
    return _linear("psum", tree, group, mesh, axis, plan)


def all_gather(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
    tiled: bool = False,
) -> Tree:
    """Every rank's leaves on every rank; a collective call, which differentiates.

    Args:
        tree: tensors of any dtype; None stays None.
        group, mesh, axis, plan: as for `pmean`.
        tiled: whether leaves are concatenated along their first axis, in place of a new one.

    Returns:
        A tree of the same structure: a leaf of shape `s` becomes one of shape `(n, *s)`, with n
        ranks; `tiled`, one of shape `(n * s[0], *s[1:])`. The transpose is `reduce_scatter`.

    Raises:
        As `pmean`; ValueError: `tiled`, and a leaf is a scalar.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda g: fddp.all_gather(torch.tensor(g.rank), g).tolist())
        [[0, 1], [0, 1]]
    """
    return _linear("all_gather", tree, group, mesh, axis, plan, tiled=tiled)


def reduce_scatter(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
    tiled: bool = False,
) -> Tree:
    """This rank's slice of the sum over ranks; a collective call, which differentiates.

    Args:
        tree: tensors with a leading axis of n, the number of ranks that meet; None stays None.
        group, mesh, axis, plan: as for `pmean`.
        tiled: whether the first axis is one of n times as many elements, of which each rank gets a
            run.

    Returns:
        A tree of the same structure: a leaf of shape `(n, *s)` becomes one of shape `s`; `tiled`,
        one of shape `(n * k, *s)` becomes one of `(k, *s)`. The transpose is `all_gather`.

    Raises:
        As `pmean`; ValueError: a leaf's first axis does not fit the number of ranks.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     return fddp.reduce_scatter(torch.tensor([1.0, 10.0]), group).item()
        >>> fddp.loopback(2, f)
        [2.0, 20.0]
    """
    return _linear("reduce_scatter", tree, group, mesh, axis, plan, tiled=tiled)


def broadcast_from(
    tree: Tree,
    root: int,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """The root's leaves on every rank; a collective call, which differentiates.

    Its transpose is the sum of all cotangents at the root, and zeros elsewhere.

    Args:
        tree: tensors of any dtype; None stays None. Shapes and dtypes are those of the root on
            every rank; values count on the root alone.
        root: number of the rank among those that meet, the same on all of them.
        group, mesh, axis, plan: as for `pmean`.

    Raises:
        As `pmean`; ValueError: there is no such rank.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda group: fddp.broadcast_from(torch.tensor(group.rank), 1, group))
        [tensor(1), tensor(1)]
    """
    return _linear("broadcast_from", tree, group, mesh, axis, plan, root=root)


def pmax(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """The largest over ranks of each element; a collective call, which differentiates.

    The derivative is that of `torch.amax` over ranks: shared equally among the ranks that attain
    the maximum. NaN counts as the largest.

    Args:
        tree: real tensors; None stays None.
        group, mesh, axis, plan: as for `pmean`.

    Raises:
        As `pmean`; TypeError: a leaf is complex.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda group: fddp.pmax(torch.tensor(group.rank), group).item())
        [1, 1]
    """
    if is_dynamo_compiling():
        return dynamo.operate("pmax", tree, group, mesh, axis, plan)  # type: ignore[no-any-return]
    site = call_site()
    communicator, place = resolve_communicator("pmax", group, mesh, axis, site)
    taken = _flattened(communicator, place, "pmax", tree, plan, None, site)
    call = Call(communicator, taken.program, CallRecord(site))
    if has_rules(taken.leaves):
        results = FddpMaximum.apply(call, *taken.leaves)  # type: ignore[no-untyped-call]
    else:
        results = largest(call, taken.leaves)
    rebuilt: Tree = taken.rebuilt(results[: len(taken.leaves)])
    return rebuilt


def sync_on_backward(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """The tree itself, whose cotangents are averaged over ranks; nothing is communicated before.

    It turns the gradient of each rank's own loss into the gradient of their mean. It is no function
    of all ranks in the sense of [Note: one function of all ranks]: tangents pass as they are. Where
    gradients are wanted, ranks must call it equally often, and differentiate through all of it.

    Args:
        tree: tensors, usually parameters, the same on all ranks; None stays None, and what is not
            floating or complex passes as it is.
        group, mesh, axis, plan: as for `pmean`.

    Returns:
        A tree of the same structure, whose leaves are views of those of `tree`.

    Raises:
        TypeError, ValueError, PlanMismatchError: as `pmean`. Backward raises the rest.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     loss = lambda w: (fddp.sync_on_backward(w, group) * group.rank).sum()
        ...     return torch.func.grad(loss)(torch.ones(1)).item()
        >>> fddp.loopback(2, f)
        [0.5, 0.5]
    """
    if is_dynamo_compiling():
        return dynamo.operate("sync_on_backward", tree, group, mesh, axis, plan)  # type: ignore[no-any-return]
    site = call_site()
    communicator, place = resolve_communicator("sync_on_backward", group, mesh, axis, site)
    taken = flatten_call(communicator, CallSpec("sync_on_backward", place, -1, plan), tree, site)
    if not has_rules(taken.leaves):
        return tree
    call = Call(communicator, taken.program, CallRecord(site))
    call.record.number = communicator.next_call_number(place)
    results = FddpMeanOnBackward.apply(call, *taken.leaves)  # type: ignore[no-untyped-call]
    rebuilt: Tree = taken.rebuilt(results)
    return rebuilt


def _linear(
    operator: Operator,
    tree: Tree,
    group: Group | Communicator | None,
    mesh: Mesh | None,
    axis: Axis,
    plan: BucketPlan | None,
    *,
    root: Any = None,
    tiled: bool = False,
) -> Tree:
    if is_dynamo_compiling():
        traced: Tree = dynamo.operate(operator, tree, group, mesh, axis, plan, root, tiled)
        return traced
    site = call_site()
    communicator, place = resolve_communicator(operator, group, mesh, axis, site)
    taken = _flattened(communicator, place, operator, tree, plan, root, site, tiled)
    call = Call(communicator, taken.program, CallRecord(site))
    if has_rules(taken.leaves):
        results = FddpLinear.apply(call, *taken.leaves)  # type: ignore[no-untyped-call]
    else:
        results = run(call, taken.leaves)
    if tiled and operator == "all_gather":
        results = [result.flatten(0, 1) for result in results]
    rebuilt: Tree = taken.rebuilt(results)
    return rebuilt


def _flattened(
    communicator: Communicator,
    place: GroupPosition,
    operator: Operator,
    tree: Any,
    plan: BucketPlan | None,
    root: Any,
    site: Site,
    tiled: bool = False,
) -> FlattenedCall:
    try:
        number = checked_root(root, place) if operator == "broadcast_from" else -1
        if plan is not None and not isinstance(plan, BucketPlan):
            raise TypeError(f"{operator}: plan must be a BucketPlan, got {type(plan).__name__}")
        return flatten_call(
            communicator, CallSpec(operator, place, number, plan, tiled), tree, site
        )
    except Exception as error:
        with outside_tracing():
            handshake.abort_handshake(communicator, place, f"{operator}, called at {site}", error)
