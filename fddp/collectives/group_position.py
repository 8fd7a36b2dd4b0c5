"""Arguments of operators that select ranks: group, mesh, axis and root."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.operator_program import GroupPosition, Operator
from fddp.core.plan.plan import BucketPlan
from fddp.errors import FddpError
from fddp.telemetry.call_site import Site
from fddp.transport import Group
from fddp.transport.mesh import Mesh

Axis = str | Sequence[str] | None


class OperatorArgs(NamedTuple):
    """Arguments of an operator as the caller passed them, except its tree. Not validated."""

    operator: Operator | Literal["sync_on_backward"]
    group: Group | Communicator | None
    mesh: Mesh | None
    axis: Axis
    plan: BucketPlan | None
    root: Any = None
    tiled: bool = False


def resolve_communicator(
    operator: str,
    group: Group | Communicator | None,
    mesh: Mesh | None,
    axis: Axis,
    site: Site | None = None,
) -> tuple[Communicator, GroupPosition]:
    """The communicator of an operator, and this rank's position among the ranks that meet.

    Raises:
        TypeError, ValueError: an argument is invalid.
        FddpError: the communicator can't be opened. The first operator on a group opens it.
    """
    what = f"{operator}, called at {site}" if site else operator
    try:
        communicator = communicator_of(group, mesh)
    except (FddpError, TypeError, ValueError) as error:
        error.args = (f"{what}: {error}", *error.args[1:])
        raise
    if axis is None:
        return communicator, communicator.place(())
    known = () if communicator.topology is None else communicator.topology.names
    names = (axis,) if isinstance(axis, str) else axis
    own = tuple(name for name in known if isinstance(names, Sequence) and name in names)
    place = communicator.place(() if len(own) == len(known) else own)
    problem = _axis_problem(operator, axis, known)
    if problem is not None:
        # The ranks along the valid axes wait for this rank.
        handshake.abort_handshake(communicator, place, what, problem)
    return communicator, place


def _axis_problem(operator: str, axis: Any, known: tuple[str, ...]) -> Exception | None:
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return TypeError(
            f"{operator}: axis must be a name of an axis of the mesh, or a tuple of names, got "
            f"{axis!r}; axes of tensors and batches of vmap are not axes of ranks"
        )
    if names and set(names) <= set(known) and len(set(names)) == len(names):
        return None
    return ValueError(
        f"{operator}: axis={axis!r} must name distinct axes of the mesh, which "
        + (f"has {known}" if known else "is missing; pass mesh=")
    )


def checked_root(root: Any, place: GroupPosition) -> int:
    """`root` of `broadcast_from` as an int.

    Raises:
        TypeError, ValueError: it is not the number of a rank of `place`.
    """
    if isinstance(root, Tensor):
        raise TypeError(
            "broadcast_from: root must be an int that all ranks know, got a tensor; a root can't "
            "be batched by vmap"
        )
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TypeError(f"broadcast_from: root must be an int, got {root!r}")
    number = index(root)
    if not 0 <= number < place.size:
        raise ValueError(
            f"broadcast_from: root={number} is out of range; {place.size} ranks meet, numbered "
            f"from 0"
        )
    return number
