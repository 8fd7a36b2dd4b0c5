"""Open or closed state of a `GradSync`, with the reason and the advice to callers."""

from __future__ import annotations

from fddp.errors import ClosedError


class Lifecycle:
    """State of an engine from its construction until it is closed.

    Attributes:
        closed_by: reason of the close; "" while the engine is open.
        superseded: True if another engine replaces this one.
    """

    def __init__(self) -> None:
        self.closed_by = ""
        self.superseded = False
        self._label = "this GradSync, or its owner,"
        self._advice = (
            "build a new one on a working group, or rebuild this one there with its plan and "
            "state: sync = sync.rebuild(group)"
        )

    @property
    def closed_text(self) -> str:
        """Error text after the close: reason and advice."""
        return f"{self._label} is closed ({self.closed_by}); {self._advice}"

    def set_label(self, label: str, advice: str) -> None:
        """Set the name and the advice for error texts."""
        self._label, self._advice = label, advice

    def close(self, reason: str) -> None:
        """Note that no further step may start; the first reason is kept."""
        self.closed_by = self.closed_by or reason

    def supersede(self, reason: str, advice: str) -> None:
        """Note that another engine replaces this one."""
        self.closed_by, self._advice, self.superseded = reason, advice, True

    def check(self) -> None:
        """Raise `ClosedError` if the engine is closed."""
        if self.closed_by:
            raise ClosedError(self.closed_text)
