"""Requests to stop, which end the loops of all ranks at the same step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stopping:
    """Requests to stop, of one rank and of all.

    Attributes:
        asked: True once this rank has asked. What it sends with each step or operator says so from
            then on.
        agreed: True once some rank has asked: on all ranks from the same step on.
    """

    asked: bool = False
    agreed: bool = False

    def ask(self) -> None:
        """Ask, from the next step or operator on."""
        self.asked = True

    def agree(self) -> None:
        """Note that a rank has asked, which all ranks have seen."""
        self.agreed = True

    def take_over(self, earlier: Stopping) -> None:
        """Go on asking what was asked before ranks were lost, which may have taken the agreement
        with them."""
        self.asked = self.asked or earlier.asked or earlier.agreed
