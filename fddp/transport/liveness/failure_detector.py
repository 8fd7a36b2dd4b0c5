"""State of the other ranks, from the operating system, the store and their own statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fddp.transport.liveness.interrupts import PeerFailureError, ProcessExitedError
from fddp.transport.liveness.processes import has_ended, is_stopped
from fddp.transport.liveness.status import MAX_RANKS_SHOWN, format_statuses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fddp.transport.liveness.membership import Membership
    from fddp.transport.liveness.processes import Process
    from fddp.transport.liveness.status import TransportStatus

_GRACE_S = 2.0


class FailureDetector:
    """Liveness and status of the other ranks of a transport, whose numbers on the status board are
    `board_ranks`, and in the job `global_ranks`."""

    def __init__(
        self,
        membership: Membership,
        status: TransportStatus,
        board_ranks: Sequence[int],
        global_ranks: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.grace_s = min(_GRACE_S, timeout_s / 4)  # longest wait for the others' reports
        self._answers_s = min(_GRACE_S, timeout_s / 2)  # and for their statuses
        self._membership = membership
        self._status = status
        self._board_ranks = board_ranks
        self._global_ranks = global_ranks
        self._processes: dict[int, Process] | None = None  # by rank, in this PID namespace

    def names(self, ranks: tuple[int, ...]) -> str:
        """Format ranks for error texts, with their global rank if it differs."""
        return ", ".join(
            f"rank {rank}"
            + (f" (global {self._global_ranks[rank]})" if self._global_ranks[rank] != rank else "")
            for rank in ranks
        )

    def refresh_processes(self) -> None:
        known = self._status.board.processes()
        ranks = enumerate(self._board_ranks)
        self._processes = {rank: known[number] for rank, number in ranks if number in known}

    def check_alive(self, among: Sequence[int] | None, *, refresh: bool) -> None:
        """Raise ProcessExitedError if the process of a rank `among` these (None: of any rank) has
        ended, or PeerFailureError if it has reported a failure before.

        Connections do not reveal this before they are established, or while a forked process holds
        them.
        """
        if refresh:
            self.refresh_processes()
        self.check_lost([rank for rank in self.ended() if among is None or rank in among])

    def check_lost(self, ranks: Sequence[int], why: str = "its process has ended") -> None:
        """Raise the errors of `check_alive` if there are `ranks`, which are lost."""
        if ranks:
            if lost := self._membership.unreported(tuple(ranks)):
                raise ProcessExitedError(lost, why)
            raise PeerFailureError("another rank reported a failure")

    def ended(self) -> tuple[int, ...]:
        return self._which(has_ended)

    def ended_or_stopped(self) -> tuple[int, ...]:
        """Ranks of this PID namespace whose process has ended or is stopped."""
        return self._which(lambda process: has_ended(process) or is_stopped(process))

    def _which(self, holds: Callable[[Process], bool]) -> tuple[int, ...]:
        if self._processes is None:
            self.refresh_processes()
        known = self._processes or {}
        return tuple(rank for rank, process in known.items() if holds(process))

    def unresponsive(self, silent: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Query `silent` ranks, and return those that will not take part in the operation: lost
        ones, and those that closed this transport without an error and continue elsewhere.

        A silent rank that answers is still computing, and does not know of the failure yet. Ranks
        whose process is known to be alive are lost only if no other is: they may be unable to
        answer for a while, or have closed all their transports.
        """
        if not silent:
            return (), ()
        answers = self._status.board.answers(
            [self._board_ranks[r] for r in silent], "", self.grace_s
        )
        statuses = {rank: answers.get(self._board_ranks[rank]) for rank in silent}
        unanswered = tuple(rank for rank, status in statuses.items() if status is None)
        living = set(self._processes or ()) - set(self.ended())
        lost = tuple(rank for rank in unanswered if rank not in living) or unanswered
        closed = tuple(
            rank
            for rank, status in statuses.items()
            if status is not None and self._status.key not in status.transports
        )
        # A rank that closes because of a failure reports it first.
        return lost, self._membership.unreported(closed)

    def describe_status(self, first: tuple[int, ...]) -> str:
        """Query the ranks and return their statuses as text; `first` are listed first if there are
        too many."""
        ordered = [*first, *(rank for rank in range(len(self._board_ranks)) if rank not in first)]
        some = sorted(ordered[:MAX_RANKS_SHOWN])
        numbers = {rank: self._board_ranks[rank] for rank in some}
        answers = self._status.board.answers(
            list(numbers.values()), self._status.key, self._answers_s
        )
        return format_statuses({self.names((rank,)): answers.get(numbers[rank]) for rank in some})
