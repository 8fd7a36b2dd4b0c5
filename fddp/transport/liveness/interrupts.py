"""Exceptions that interrupt a wait for other ranks."""

from __future__ import annotations


class DeadlineExceededError(RuntimeError):
    """An operation did not finish in time."""


class PeerFailureError(RuntimeError):
    """Another rank reported a failure while this one waited."""


class ProcessExitedError(RuntimeError):
    """The processes of some ranks have ended.

    Attributes:
        ranks: the ranks whose process has ended.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__("its process has ended")
        self.ranks = ranks


class PeerAbortedError(RuntimeError):
    """Another rank has failed the step that this one is in, and takes no part in the operation."""
