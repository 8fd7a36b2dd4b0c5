"""Calls of operators, and the calls derived from them by differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.collectives.communicator import Communicator
    from fddp.collectives.operator_program import OperatorProgram
    from fddp.telemetry.call_site import Site


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of an operator in the caller's code.

    Attributes:
        site: the call site; its text in a call that is read from a graph.
        number: number of the call on the communicator. Ranks compare it when they differentiate.
            None before the call has run, and in graphs.
        position: number of the call among the traced calls of a graph; None outside of graphs.
    """

    site: Site | str | None
    number: int | None = None
    position: int | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """An operator to run, or a derivative of one.

    Attributes:
        communicator: the communicator that runs it.
        program: the operator and its leaves.
        record: the call in the caller's code.
        roles: derivatives that led to this call, the latest last: "backward", "jvp".
    """

    communicator: Communicator
    program: OperatorProgram
    record: CallRecord
    roles: tuple[str, ...] = ()

    def transposed(self) -> Call:
        """The call that reduces cotangents."""
        return self.derived(self.program.transposed, "backward")

    def tangent(self) -> Call:
        """The call that reduces tangents."""
        return self.derived(self.program.differentiable, "jvp")

    def batched(self, size: int) -> Call:
        """The same call under one more `vmap` over `size` examples."""
        return Call(self.communicator, self.program.batched(size), self.record, self.roles)

    def derived(self, program: OperatorProgram, role: str) -> Call:
        """A call for a derivative of this one."""
        return Call(self.communicator, program, self.record, (*self.roles, role))

    @cached_property
    def text(self) -> str:
        """Roles, operator, leaves and call site, for errors."""
        roles = "".join(f"{role} of " for role in reversed(self.roles))
        site = f", called at {self.record.site}" if self.record.site else ""
        return f"{roles}{self.program.text}{site}"
