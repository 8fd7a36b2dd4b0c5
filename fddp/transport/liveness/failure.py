"""Failures of a transport as values, and the errors that its operations then raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from fddp.errors import DesyncError, FddpError, PeerError, RankLostError, SyncTimeoutError
from fddp.transport.liveness.status import RankStatus

if TYPE_CHECKING:
    from collections.abc import Callable

#: text of a failure caused by a rank that closed its transport without an error
CLOSED = "it closed its transport"


#: cause of a failure on the reporting rank: a time limit, a broken connection, dead ranks, a report
#: of another rank, or an error of its own
Verdict = Literal["timeout", "broken", "dead", "notified", "failed"]


class Report(NamedTuple):
    """Report of a failed operation by one rank."""

    verdict: Verdict
    ranks: tuple[int, ...]  # participants of the operation; for "dead", the dead ranks
    place: int = -1  # position of the operation among those of the same ranks; -1 if unknown
    operation: str = ""  # its description; for "failed", the error


class Failure(NamedTuple):
    """A failure that closed a transport.

    Attributes:
        text: one-line description.
        late: True if the time limit of some rank was exceeded.
        silent: ranks that did not respond.
        statuses: formatted statuses of the ranks.
        mismatch: the different operations that ranks issued, if known.
        peer: error of another rank that ends the step on this rank.
        store: state of the group's store if it was unreachable.
        waited_s: duration of this rank's wait if another rank's limit was exceeded first.
        gave_up: other ranks whose limit was exceeded, as far as known.
        failed: errors of ranks that can't take part because of them.
    """

    text: str
    late: bool
    silent: tuple[int, ...]
    statuses: str = ""
    mismatch: str = ""
    peer: str = ""
    store: Literal["", "silent", "gone"] = ""
    waited_s: float | None = None
    gave_up: tuple[int, ...] = ()
    failed: Mapping[int, str] = MappingProxyType({})


def not_responding(
    reports: Mapping[int, Report], answers: Mapping[int, RankStatus | None], key: str
) -> tuple[int, ...]:
    """Return the ranks to name after a time limit, from what all ranks have reported and answered.

    They are those that others wait for in vain. A rank that waits itself is not among them: it did
    not report only because its own limit has not expired. A rank whose waits were interrupted has
    waited for too short a time to blame others, unless these do not answer either.

    Args:
        reports: failure reports by rank.
        answers: statuses by rank; None for those without an answer.
        key: the transport.

    >>> waiting = RankStatus(("a sum",), awaits=("a transport",))
    >>> reports = {0: Report("timeout", (0, 2)), 1: Report("notified", (1, 3))}
    >>> not_responding(reports, {2: waiting, 3: None}, "a transport")
    (3,)
    >>> not_responding(reports, {2: RankStatus(at="data.py:3"), 3: waiting}, "a transport")
    (2,)
    """
    late = {r for one in reports.values() if one.verdict != "notified" for r in one.ranks}
    others = {r for one in reports.values() for r in one.ranks}
    unanswered = {rank for rank, status in answers.items() if status is None}
    waiting = {rank for rank, status in answers.items() if status and key in status.awaits}
    return tuple(sorted((late | (others & unanswered)) - reports.keys() - waiting))


def check_titles(titles: Mapping[int, str]) -> None:
    """Check that all ranks open a transport with the same title.

    Raises:
        DesyncError: titles differ; the same error on every rank.

    >>> check_titles({0: "GradSync", 1: "GradSync"})
    """
    first = min(titles)
    for rank, title in sorted(titles.items()):
        if title != titles[first]:
            raise DesyncError(
                f"rank {first} opens a {titles[first]} where rank {rank} opens a {title}: all "
                f"ranks of a group must create the users of its transports in the same order"
            )


def mismatch_error(where: str, mismatch: str) -> DesyncError:
    return DesyncError(
        f"{where}: ranks met in different operations: {mismatch}; all ranks must issue the same "
        "operations in the same order"
    )


def to_error(
    failure: Failure,
    where: str,
    name: Callable[[tuple[int, ...]], str],
    timeout_s: float,
    numbers: Sequence[int] | None = None,
) -> FddpError:
    """Return the error of an operation that the failure ended.

    Args:
        failure: the failure.
        where: description of the operation and this rank.
        name: formats ranks.
        timeout_s: time limit of one operation.
        numbers: numbers of the ranks in `ranks` of the error; None for their own.

    >>> failure = Failure("connection reset", late=False, silent=(2,))
    >>> to_error(failure, "bucket 3 on rank 0 of 4", lambda ranks: f"rank {ranks[0]}", 9.0).ranks
    (2,)
    """
    names = name(failure.silent)
    ranks = failure.silent if numbers is None else tuple(numbers[r] for r in failure.silent)
    if failure.store:
        return _error_without_store(failure, where, names, timeout_s, ranks)
    if failure.peer:
        return PeerError(f"{where}: {failure.peer}, and takes no part; the step fails on all ranks")
    if failure.failed:
        errors = "; ".join(f"{name((rank,))} failed: {e}" for rank, e in failure.failed.items())
        return PeerError(
            f"{where}: {errors}; nothing was opened on any rank, so call again on all of them",
            failure.failed,
        )
    if failure.mismatch:
        return mismatch_error(where, failure.mismatch)
    if failure.late:
        statuses = f" Status of the ranks: {failure.statuses}." if failure.statuses else ""
        passed = f"not finished within timeout_s={timeout_s}"
        # Limits of ranks that have waited equally long may expire at slightly different times.
        tolerance_s = min(1.0, timeout_s / 4)
        if failure.waited_s is not None and failure.waited_s < timeout_s - tolerance_s:
            others = name(failure.gave_up) or "another rank"
            passed = (
                f"given up after {failure.waited_s:.1f} s of timeout_s={timeout_s}, because the "
                f"time limit of {others} expired"
            )
        return SyncTimeoutError(
            f"{where}: {passed}; "
            f"{f'no response from {names}' if names else 'every rank is alive'}. All ranks must "
            "issue the same operations in the same order; if one is only slow, raise "
            f"timeout_s.{statuses}",
            ranks,
        )
    return RankLostError(
        f"{where}: {f'lost {names}' if names else 'a connection broke'} ({failure.text}); "
        "start the job again from a checkpoint, or go on with the ranks that are left: rebuild()",
        ranks,
    )


def _error_without_store(
    failure: Failure, where: str, names: str, timeout_s: float, ranks: tuple[int, ...]
) -> RankLostError | SyncTimeoutError:
    """Return the error if the store is unreachable; `names` are ranks known to be unresponsive, and
    `ranks` their numbers."""
    if failure.store == "gone":
        lost = f"lost {names} ({failure.text})" if names else failure.text
        return RankLostError(
            f"{where}: {lost}; the group's store does not answer either, so the rank or agent that "
            "hosts it is gone: start the job again from a checkpoint",
            ranks,
        )
    cause = f"not finished within timeout_s={timeout_s}" if failure.late else failure.text
    silent = f"; {names}: stopped, or ended" if names else ""
    text = (
        f"{where}: {cause}{silent}; the group's store does not answer, so the rank or agent that "
        "hosts it is stopped or unreachable: resume it or start the job again from a checkpoint"
    )
    return (SyncTimeoutError if failure.late else RankLostError)(text, ranks)
