"""Calls of operators: what was called where, and what followed from it by differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.collectives.communicator import Communicator
    from fddp.collectives.operator_program import OperatorProgram
    from fddp.telemetry.call_site import Site


class CallRecord:
    """One call of an operator in the caller's code.

    Attributes:
        site: where it stands.
        number: its number on the communicator: derivatives say by it which call is meant. None
            before it has run, and for derivatives in graphs, which are calls by themselves.
        position: in a graph, its number among the calls that were traced, for the same purpose.
    """

    __slots__ = ("number", "position", "site")

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.number: int | None = None
        self.position: int | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """What is about to run.

    Attributes:
        communicator: what it runs on.
        program: what is done with which leaves.
        record: the call in the caller's code that it belongs to.
        roles: which derivatives led to it, the latest last: "backward", "jvp".
    """

    communicator: Communicator
    program: OperatorProgram
    record: CallRecord
    roles: tuple[str, ...] = ()

    def transposed(self) -> Call:
        """What carries cotangents."""
        return self._derived(self.program.transposed, "backward")

    def tangent(self) -> Call:
        """What carries tangents."""
        return self._derived(self.program.differentiable, "jvp")

    def summing(self, role: str) -> Call:
        """The sum of what has derivatives."""
        return self._derived(self.program.summing, role)

    def averaging(self, role: str) -> Call:
        """The mean of what has derivatives."""
        return self._derived(self.program.averaging, role)

    def batched(self, size: int) -> Call:
        """The same under one more `vmap`."""
        return Call(self.communicator, self.program.batched(size), self.record, self.roles)

    def _derived(self, program: OperatorProgram, role: str) -> Call:
        return Call(self.communicator, program, self.record, (*self.roles, role))

    @cached_property
    def text(self) -> str:
        """What runs, and where it was called, for errors."""
        roles = "".join(f"{role} of " for role in reversed(self.roles))
        site = f", called at {self.record.site}" if self.record.site else ""
        return f"{roles}{self.program.text}{site}"
