"""State of the other ranks, from the operating system, the store and their own statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fddp.transport.liveness.bounded_store import GLANCE_S
from fddp.transport.liveness.interrupts import (
    PeerFailureError,
    ProcessExitedError,
    ignore_backend_errors,
)
from fddp.transport.liveness.processes import (
    boot_id,
    has_ended,
    is_stopped,
    line_of,
    look_at,
    names_in,
    process_behind,
)
from fddp.transport.liveness.status import MAX_RANKS_SHOWN, format_statuses
from fddp.transport.shm.fd_passing import FdListener

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from fddp.transport.liveness.membership import Membership
    from fddp.transport.liveness.processes import Look, Process
    from fddp.transport.liveness.status import RankStatus, TransportStatus

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
        # Open during the opening of the transport, see [Note: proof of a shared host].
        self._listener: FdListener | None = None
        self._boot_id = boot_id()

    def names(self, ranks: tuple[int, ...]) -> str:
        """Format ranks for error texts, with their global rank if it differs."""
        return ", ".join(
            f"rank {rank}"
            + (f" (global {self._global_ranks[rank]})" if self._global_ranks[rank] != rank else "")
            for rank in ranks
        )

    def listen(self, rank: int) -> None:
        """Let ranks of this host find the process of this `rank`, until `stop_listening`."""
        with ignore_backend_errors(OSError, NotImplementedError):  # some stores can't append
            if self._boot_id:
                self._listener = self._listener or FdListener()
                self._membership.store.append(self.key, line_of(rank, self._listener.name))

    def stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def refresh_processes(self) -> None:
        """Find the processes of the ranks that listen, and were not found before."""
        known, store = self._status.board.processes, self._membership.store.within(GLANCE_S)
        with ignore_backend_errors(ValueError):
            if not self._boot_id or not store.check([self.key]):
                return
            for rank, name in names_in(store.get(self.key).decode(errors="replace")).items():
                number = self._board_ranks[rank] if rank < len(self._board_ranks) else -1
                if number >= 0 and number not in known:
                    process = process_behind(name)
                    if process is not None:
                        known[number] = process

    @property
    def key(self) -> str:
        """Key of the names at which ranks listen, in the transport's part of the store."""
        return f"processes/{self._boot_id}"

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

    def living(self) -> set[int]:
        """Ranks of this host whose process runs."""
        return set(self._found()) - set(self.ended())

    def ended_or_stopped(self) -> tuple[int, ...]:
        """Ranks of this host whose process has ended or is stopped."""
        return self._which(lambda seen, now: has_ended(seen, now) or is_stopped(seen, now))

    def _which(self, holds: Callable[[Process, Look], bool]) -> tuple[int, ...]:
        found = self._found().items()
        return tuple(rank for rank, process in found if holds(process, look_at(process)))

    def _found(self) -> dict[int, Process]:
        known, ranks = self._status.board.processes, enumerate(self._board_ranks)
        return {rank: known[number] for rank, number in ranks if number in known}

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
        living = self.living()
        lost = tuple(rank for rank in unanswered if rank not in living) or unanswered
        closed = tuple(
            rank
            for rank, status in statuses.items()
            if status is not None and self._status.key not in status.transports
        )
        # A rank that closes because of a failure reports it first.
        return lost, self._membership.unreported(closed)

    def statuses(self, first: Collection[int]) -> dict[int, RankStatus | None]:
        """Query the ranks and return their statuses; if there are too many, those of `first` and of
        some others."""
        ordered = [*first, *(rank for rank in range(len(self._board_ranks)) if rank not in first)]
        some = sorted(ordered[:MAX_RANKS_SHOWN])
        numbers = {rank: self._board_ranks[rank] for rank in some}
        answers = self._status.board.answers(
            list(numbers.values()), self._status.key, self._answers_s
        )
        return {rank: answers.get(number) for rank, number in numbers.items()}

    def describe(self, statuses: Mapping[int, RankStatus | None]) -> str:
        return format_statuses({self.names((rank,)): found for rank, found in statuses.items()})
