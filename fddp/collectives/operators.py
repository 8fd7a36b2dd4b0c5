"""Operators: differentiable collectives on pytrees of tensors.

[Note: one function of all ranks]
An operator is one function from the inputs of all ranks to the results of all ranks. Its backward
is the exact adjoint of that function. So `psum`, `pmean` and `all_to_all` are their own transposes,
`all_gather` and `reduce_scatter` are transposes of each other, and the transpose of
`broadcast_from` is the sum at the root and zeros elsewhere. For all tangents t and cotangents c,
the sum over ranks of <c, J t> equals the sum over ranks of <J^T c, t>. `grad` on a rank returns the
gradient of the sum of all ranks' results. So the gradient of `psum(loss)` has a factor of the
number of ranks, and the gradient of `pmean(loss)` has none. The derivative of `pmax` is that of a
maximum, split equally among the ranks that attain it. The one exception is `sync_on_backward`: it
averages cotangents, which turns local losses into the gradient of their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fddp.collectives import dynamo, handshake
from fddp.collectives.autograd import apply_rules, has_rules, run
from fddp.collectives.call_cache import CalledOperator, checked_spec
from fddp.collectives.calls import Call
from fddp.collectives.communicator import Communicator
from fddp.collectives.group_position import Axis, resolve_communicator
from fddp.core.entrance import entrance
from fddp.core.plan.plan import BucketPlan
from fddp.telemetry.call_site import call_site
from fddp.transport import Group
from fddp.transport.mesh import Mesh

Tree = TypeVar("Tree")


@entrance
def pmean(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """Mean over ranks of each leaf. A differentiable collective call.

    It works in and around `torch.func` transforms and with `create_graph=True`. It is its own
    transpose, see [Note: one function of all ranks].

    Args:
        tree: floating or complex tensors; None stays None. Ranks must have the same paths, shapes
            and dtypes. Not written.
        group: as for `GradSync`, or a `Communicator`; None for the default group.
        mesh: the axes of the ranks, as for `GradSync`.
        axis: one or more names of axes of the mesh. The mean is over ranks that differ only in
            these axes; None for all ranks.
        plan: bucket plan for exactly this tree; None to plan it automatically.

    Returns:
        A new tree of the same structure, the same on all ranks that take part.

    Raises:
        DesyncError: ranks called different operators or passed different trees. Raised on all
            ranks.
        PeerError: another rank can't take part; the text has its error.
        TypeError, ValueError, PlanMismatchError: an argument of this rank is invalid.
        SyncTimeoutError: a rank did not arrive; the text has the operator and its call site.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     w = torch.tensor([1.0 + group.rank])
        ...     mean = lambda w: (fddp.pmean(w, group) ** 2).sum()
        ...     return mean(w).item(), torch.func.grad(mean)(w).item()
        >>> fddp.loopback(2, f)
        [(2.25, 3.0), (2.25, 3.0)]
    """
    return _operate("pmean", tree, group, mesh, axis, plan)


@entrance
def psum(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """Sum over ranks of each leaf. A differentiable collective call.

    Arguments, result and errors are those of `pmean`; integers are supported, too.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda group: fddp.psum(torch.tensor(3 + group.rank), group).item())
        [7, 7]
    """
    return _operate("psum", tree, group, mesh, axis, plan)


@entrance
def all_gather(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
    tiled: bool = False,
) -> Tree:
    """Leaves of all ranks on every rank. A differentiable collective call.

    Args:
        tree: tensors of any dtype; None stays None.
        group, mesh, axis, plan: as for `pmean`.
        tiled: True to concatenate leaves along their first axis instead of adding an axis.

    Returns:
        A tree of the same structure. With n ranks, a leaf of shape `s` becomes one of shape
        `(n, *s)`, or `(n * s[0], *s[1:])` if `tiled`. The transpose is `reduce_scatter`.

    Raises:
        As `pmean`; ValueError: `tiled` is set and a leaf is a scalar.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda g: fddp.all_gather(torch.tensor(g.rank), g).tolist())
        [[0, 1], [0, 1]]
    """
    return _operate("all_gather", tree, group, mesh, axis, plan, tiled=tiled)


@entrance
def reduce_scatter(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
    tiled: bool = False,
) -> Tree:
    """This rank's slice of the sum over ranks. A differentiable collective call.

    Args:
        tree: tensors with a leading axis of size n, the number of ranks that take part; None stays
            None.
        group, mesh, axis, plan: as for `pmean`.
        tiled: True to split the first axis into n equal parts instead of removing an axis of n.

    Returns:
        A tree of the same structure. A leaf of shape `(n, *s)` becomes one of shape `s`; if
        `tiled`, `(n * k, *s)` becomes `(k, *s)`. The transpose is `all_gather`.

    Raises:
        As `pmean`; ValueError: a leaf's first axis does not fit the number of ranks.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     return fddp.reduce_scatter(torch.tensor([1.0, 10.0]), group).item()
        >>> fddp.loopback(2, f)
        [2.0, 20.0]
    """
    return _operate("reduce_scatter", tree, group, mesh, axis, plan, tiled=tiled)


@entrance
def all_to_all(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
    tiled: bool = False,
) -> Tree:
    """One row of each leaf to every rank. A differentiable collective call.

    Rank `i` sends its row `j` to rank `j`, which receives it as row `i`. It is its own transpose.

    Args:
        tree: tensors of any dtype with a leading axis of size n, the number of ranks that take
            part; None stays None.
        group, mesh, axis, plan: as for `pmean`.
        tiled: True to split the first axis into n equal parts, which take the place of rows.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        As `pmean`; ValueError: a leaf's first axis does not fit the number of ranks.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     return fddp.all_to_all(10 * group.rank + torch.arange(2), group).tolist()
        >>> fddp.loopback(2, f)
        [[0, 10], [1, 11]]
    """
    return _operate("all_to_all", tree, group, mesh, axis, plan, tiled=tiled)


@entrance
def broadcast_from(
    tree: Tree,
    root: int,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """Leaves of the root on every rank. A differentiable collective call.

    Its transpose is the sum of all cotangents at the root, and zeros elsewhere.

    Args:
        tree: tensors of any dtype; None stays None. Shapes and dtypes must be the same on all
            ranks; only the root's values are used.
        root: number of the source rank among the ranks that take part, the same on all of them.
        group, mesh, axis, plan: as for `pmean`.

    Raises:
        As `pmean`; ValueError: `root` is out of range.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda group: fddp.broadcast_from(torch.tensor(group.rank), 1, group))
        [tensor(1), tensor(1)]
    """
    return _operate("broadcast_from", tree, group, mesh, axis, plan, root=root)


@entrance
def pmax(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """Maximum over ranks of each element. A differentiable collective call.

    The derivative is that of `torch.amax` over ranks: split equally among the ranks that attain the
    maximum. NaN counts as the largest value.

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
    return _operate("pmax", tree, group, mesh, axis, plan)


@entrance
def sync_on_backward(
    tree: Tree,
    group: Group | Communicator | None = None,
    *,
    mesh: Mesh | None = None,
    axis: Axis = None,
    plan: BucketPlan | None = None,
) -> Tree:
    """Identity whose cotangents are averaged over ranks. Only its backward communicates.

    It turns the gradient of each rank's local loss into the gradient of the mean loss. It is not
    the adjoint described in [Note: one function of all ranks]: tangents are not changed. All ranks
    must call it equally often, and differentiate through all of its results.

    Args:
        tree: tensors, usually parameters, the same on all ranks; None stays None. Leaves that are
            neither floating nor complex are returned unchanged.
        group, mesh, axis, plan: as for `pmean`.

    Returns:
        A tree of the same structure, whose leaves are views of the leaves of `tree`.

    Raises:
        TypeError, ValueError, PlanMismatchError: as `pmean`. Backward raises the other errors of
            `pmean`.

    Example:
        >>> import fddp, torch
        >>> def f(group):
        ...     loss = lambda w: (fddp.sync_on_backward(w, group) * group.rank).sum()
        ...     return torch.func.grad(loss)(torch.ones(1)).item()
        >>> fddp.loopback(2, f)
        [0.5, 0.5]
    """
    return _operate("sync_on_backward", tree, group, mesh, axis, plan)


def _operate(
    operator: CalledOperator,
    tree: Tree,
    group: Group | Communicator | None,
    mesh: Mesh | None,
    axis: Axis,
    plan: BucketPlan | None,
    root: Any = None,
    tiled: bool = False,
) -> Tree:
    """Validate arguments, flatten the tree, and run the operator. An error of the arguments is
    reported to all ranks that take part."""
    if is_dynamo_compiling():
        traced: Tree = dynamo.operate(operator, tree, group, mesh, axis, plan, root, tiled)
        return traced
    site = call_site()
    communicator, place = resolve_communicator(operator, group, mesh, axis, site)
    backward_only = operator == "sync_on_backward"
    try:
        spec = checked_spec(operator, place, plan, root, tiled)
        leaves, treedef, known = communicator.calls.prepare(spec, tree, site)
    except Exception as error:
        if backward_only:
            raise  # no rank waits
        handshake.abort_handshake(communicator, place, f"{operator}, called at {site}", error)
    call = Call(communicator, known.program, site)
    if has_rules(leaves):
        if backward_only:
            call.number = communicator.next_call_number(place)
        results: Sequence[Tensor] = apply_rules(operator, call, leaves)
    elif backward_only:
        return tree
    else:
        results = run(call, leaves)
        if operator == "pmax":
            results = [rows.amax(0) for rows in results]
    rebuilt: Tree = known.rebuilt(treedef, results)
    return rebuilt
