"""Arguments of operators that select ranks: group, mesh and axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fddp.collectives import handshake
from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.operator_program import GroupPosition
from fddp.errors import FddpError
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
    """The communicator of an operator, and this rank's position among the ranks that meet.

    Raises:
        TypeError, ValueError: an argument is invalid.
        FddpError: the communicator can't be opened. The first operator on a group opens it.
    """
    try:
        communicator = communicator_of(group, mesh)
    except (FddpError, TypeError, ValueError) as error:
        error.args = (f"{_what(operator, site)}: {error}", *error.args[1:])
        raise
    if axis is None:
        return communicator, communicator.place(())
    known = () if communicator.topology is None else communicator.topology.names
    try:
        _check_axis(operator, axis, known)
    except (TypeError, ValueError) as error:
        # The ranks along the valid axes wait for this rank.
        place = _place(communicator, axis, known)
        handshake.abort_handshake(communicator, place, _what(operator, site), error)
    return communicator, _place(communicator, axis, known)


def _what(operator: str, site: Site | None) -> str:
    return f"{operator}, called at {site}" if site else operator


def _place(communicator: Communicator, axis: Axis, known: tuple[str, ...]) -> GroupPosition:
    """The position along those of the axes that the mesh has."""
    names = (axis,) if isinstance(axis, str) else axis
    own = tuple(name for name in known if isinstance(names, Sequence) and name in names)
    return communicator.place(() if len(own) == len(known) else own)


def _check_axis(operator: str, axis: Any, known: tuple[str, ...]) -> None:
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{operator}: axis must be a name of an axis of the mesh, or a tuple of names, got "
            f"{axis!r}; axes of tensors and batches of vmap are not axes of ranks"
        )
    if not names or not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(
            f"{operator}: axis={axis!r} must name distinct axes of the mesh, which "
            + (f"has {known}" if known else "is missing; pass mesh=")
        )
