"""Calls of operators, and the calls derived from them by differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.collectives.communicator import Communicator
    from fddp.collectives.operator_program import OperatorProgram
    from fddp.telemetry.call_site import Site


@dataclass(eq=False)
class Call:
    """An operator to run, or a derivative of one.

    Attributes:
        communicator: the communicator that runs it.
        program: the operator and its leaves.
        site: the call site in the caller's code; its text in a call that is read from a graph.
        roles: derivatives that led to this call, the latest last: "backward", "jvp".
        origin: the call in the caller's code that led to this one; None if it is that call itself.
        number: number of a call in the caller's code on its communicator. Ranks compare it when
            they differentiate. None before the call has run, and in graphs.
        position: number of a call in the caller's code among the traced calls of a graph; None
            outside of graphs.
        splits: True to record a call for each bucket, in a graph that is not differentiated again.
    """

    communicator: Communicator
    program: OperatorProgram
    site: Site | str | None
    roles: tuple[str, ...] = ()
    origin: Call | None = None
    number: int | None = None
    position: int | None = None
    splits: bool = False

    @property
    def original(self) -> Call:
        """The call in the caller's code."""
        return self.origin or self

    def transposed(self) -> Call:
        """The call that reduces cotangents."""
        return self.derived(self.program.transposed, "backward")

    def tangent(self) -> Call:
        """The call that reduces tangents."""
        return self.derived(self.program.differentiable, "jvp")

    def batched(self, size: int) -> Call:
        """The same call under one more `vmap` over `size` examples."""
        program = self.program.batched(size)
        return Call(self.communicator, program, self.site, self.roles, self.original)

    def derived(self, program: OperatorProgram, role: str) -> Call:
        """A call for a derivative of this one."""
        roles = (*self.roles, role)
        return Call(self.communicator, program, self.site, roles, self.original)

    @cached_property
    def text(self) -> str:
        """Roles, operator, leaves and call site, for errors."""
        roles = "".join(f"{role} of " for role in reversed(self.roles))
        site = f", called at {self.site}" if self.site else ""
        return f"{roles}{self.program.text}{site}"
