"""The other ranks of a transport, as far as the system, the store and they themselves tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fddp.transport.liveness.interrupts import PeerFailureError, ProcessExitedError
from fddp.transport.liveness.processes import has_ended, is_stopped
from fddp.transport.liveness.status import MOST_RANKS, format_statuses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fddp.transport.liveness.membership import Membership
    from fddp.transport.liveness.processes import Process
    from fddp.transport.liveness.status import TransportStatus

_GRACE_S = 2.0  # how long a failing rank waits for the others to say that they live


class UnresponsiveRanks(NamedTuple):
    """Ranks that will not come.

    Attributes:
        lost: those that do not answer; those of which the system says that they live only where
            there are no others. A rank may be unable to answer for a while, and one that has closed
            all its transports answers no more.
        closed: those that have closed their side in order, and go on elsewhere.
    """

    lost: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()


class FailureDetector:
    """Whether the other ranks are there, and what they do.

    Args:
        membership: by which the transport's ranks tell each other of failures.
        status: of this rank on this transport.
        board_ranks: numbers of the ranks on the status board.
        global_ranks: their numbers in the job.
        timeout_s: of the transport.

    Attributes:
        grace_s: how long a failing rank waits for the others to say that they live.
    """

    def __init__(
        self,
        membership: Membership,
        status: TransportStatus,
        board_ranks: Sequence[int],
        global_ranks: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.grace_s = min(_GRACE_S, timeout_s / 4)
        self._membership = membership
        self._status = status
        self._board_ranks = board_ranks
        self._global_ranks = global_ranks
        self._processes: dict[int, Process] | None = None  # of ranks that this one can look for

    def names(self, ranks: tuple[int, ...]) -> str:
        """Ranks as the user knows them: with the global number where that is another one."""
        return ", ".join(
            f"rank {rank}"
            + (f" (global {self._global_ranks[rank]})" if self._global_ranks[rank] != rank else "")
            for rank in ranks
        )

    # Processes

    def refresh_processes(self) -> None:
        """Asks anew which processes the ranks are."""
        known = self._status.board.processes()
        ranks = enumerate(self._board_ranks)
        self._processes = {rank: known[number] for rank, number in ranks if number in known}

    def check_alive(self, among: Sequence[int], *, refresh: bool) -> None:
        """Raises where a rank has ended, of which its connections do not tell: there is none yet,
        or a process that it forked holds them.

        Args:
            among: ranks to look for.
            refresh: ask first which processes they are.

        Raises:
            EndedError: ranks have ended, and reported nothing.
            ToldError: they had reported a failure.
        """
        if refresh:
            self.refresh_processes()
        ended = tuple(rank for rank in self.ended() if rank in among)
        if ended:
            lost = self._membership.unreported(ended)
            raise (
                ProcessExitedError(lost)
                if lost
                else PeerFailureError("another rank reported a failure")
            )

    def ended(self) -> tuple[int, ...]:
        """Ranks of this host whose process has ended."""
        return self._which(has_ended)

    def ended_or_stopped(self) -> tuple[int, ...]:
        """Ranks that have ended or are stopped, as far as the system tells, where no store does."""
        return self._which(lambda process: has_ended(process) or is_stopped(process))

    def _which(self, holds: Callable[[Process], bool]) -> tuple[int, ...]:
        if self._processes is None:
            self.refresh_processes()
        known = self._processes or {}
        return tuple(rank for rank, process in known.items() if holds(process))

    # What they say

    def unresponsive(self, silent: tuple[int, ...]) -> UnresponsiveRanks:
        """Those of the ranks that were waited for in vain that will not come: where one has ended,
        others may compute, and not know it yet."""
        if not silent:
            return UnresponsiveRanks()
        answers = self._status.board.answers(
            [self._board_ranks[r] for r in silent], 0, self.grace_s
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
        return UnresponsiveRanks(
            lost, self._membership.unreported(closed)
        )  # it reports before it closes for that

    def describe_status(self, first: tuple[int, ...], since: int) -> str:
        """What ranks do, in words.

        Args:
            first: those who have said nothing, of whom is told if not of all.
            since: number of a question; what ranks that gave up have said since then counts.
        """
        asked = [*first, *(rank for rank in range(len(self._board_ranks)) if rank not in first)]
        some = sorted(asked[:MOST_RANKS])
        numbers = {rank: self._board_ranks[rank] for rank in some}
        answers = self._status.board.answers(list(numbers.values()), since, self.grace_s)
        return format_statuses({self.names((rank,)): answers.get(numbers[rank]) for rank in some})
