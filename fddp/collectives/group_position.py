"""Arguments of operators that name a place: group, mesh, axis and root."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.operator_program import GroupPosition
from fddp.errors import FddpError
from fddp.runtime.guards import outside_tracing
from fddp.telemetry.call_site import Site
from fddp.transport import Group
from fddp.transport.mesh import Mesh

Axis = str | Sequence[str] | None


def resolve_communicator(
    operator: str,
    group: Group | Communicator | None,
    mesh: Mesh | None,
    axis: Axis,
    site: Site | None = None,
) -> tuple[Communicator, GroupPosition]:
    """What an operator runs on, and who meets there.

    Raises:
        TypeError, ValueError: an argument makes no sense.
        FddpError: the communicator, which the first operator on a group opens, can't be opened.
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
        # Who waits for this rank depends on what it meant: those along the axes that there are.
        with outside_tracing():
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
            f"broadcast_from: root={number} is no rank among the {place.size} that meet; they "
            f"count from 0"
        )
    return number
