"""How a failure ended a transport, as a value, and the error that its operations then raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from fddp.errors import DesyncError, FddpError, PeerError, RankLostError, SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: what is seen of a rank that has closed its side of a transport in order
CLOSED = "it closed its transport"


class Failure(NamedTuple):
    """What is known of the failure that closed a transport."""

    text: str  # what was seen, one line
    late: bool  # some rank waited for as long as it may
    silent: tuple[int, ...]  # ranks waited for in vain
    statuses: str = ""  # what the ranks do instead, in words
    mismatch: str = ""  # the operations that ranks met in, where they are known to differ
    peer: str = ""  # what another rank failed with, where that ends the step on this rank as well
    store: Literal["", "silent", "gone"] = ""  # where the group's store could not be asked
    waited_s: float | None = None  # how long this rank had waited, where that may be shorter
    gave_up: tuple[int, ...] = ()  # other ranks whose time was over, as far as they are known


def check_titles(titles: Mapping[int, str]) -> None:
    """Raises where ranks open transports for different ends.

    Raises:
        DesyncError: the same on every rank.

    >>> check_titles({0: "GradSync", 1: "GradSync"})
    """
    first = min(titles)
    for rank, title in sorted(titles.items()):
        if title != titles[first]:
            raise DesyncError(
                f"rank {first} opens a {titles[first]} where rank {rank} opens a {title}: all "
                f"ranks of a group must make what communicates over it in the same order"
            )


def to_error(
    failure: Failure, where: str, name: Callable[[tuple[int, ...]], str], timeout_s: float
) -> FddpError:
    """The error for an operation that the failure ended.

    Args:
        failure: what is known.
        where: the operation and the rank, in words.
        name: says ranks as the user knows them.
        timeout_s: the transport's.

    >>> failure = Failure("connection reset", late=False, silent=(2,))
    >>> to_error(failure, "bucket 3 on rank 0 of 4", lambda ranks: f"rank {ranks[0]}", 9.0).ranks
    (2,)
    """
    names = name(failure.silent)
    if failure.store:
        return _error_without_store(failure, where, names, timeout_s)
    if failure.peer:
        return PeerError(
            f"{where}: {failure.peer}, and does not come here; the step fails on all ranks"
        )
    if failure.mismatch:
        return DesyncError(
            f"{where}: ranks met in different operations: {failure.mismatch}; all ranks must issue "
            "the same operations in the same order"
        )
    if failure.late:
        statuses = f" What each does: {failure.statuses}." if failure.statuses else ""
        passed = f"not finished within timeout_s={timeout_s}"
        if failure.waited_s is not None and failure.waited_s < timeout_s - _unsure_s(timeout_s):
            others = name(failure.gave_up) or "another rank"
            passed = (
                f"given up after {failure.waited_s:.1f} s of timeout_s={timeout_s}, because that "
                f"of {others} was over"
            )
        return SyncTimeoutError(
            f"{where}: {passed}; "
            f"{f'no word from {names}' if names else 'every rank is alive'}. All ranks must "
            "issue the same operations in the same order; where one is only slow, raise "
            f"timeout_s.{statuses}",
            failure.silent,
        )
    return RankLostError(
        f"{where}: {f'lost {names}' if names else 'a connection broke'} ({failure.text}); "
        "start the job again from a checkpoint, or go on with a group of the ranks that are "
        "left",
        failure.silent,
    )


def _unsure_s(timeout_s: float) -> float:
    """How much sooner than its own time a rank may hear that another one's was over, where all
    have waited for as long."""
    return min(1.0, timeout_s / 4)


def _error_without_store(
    failure: Failure, where: str, names: str, timeout_s: float
) -> RankLostError | SyncTimeoutError:
    """The error where the other ranks can't be heard; `names` are known from the system."""
    if failure.store == "gone":
        lost = f"lost {names} ({failure.text})" if names else failure.text
        return RankLostError(
            f"{where}: {lost}; the group's store does not answer either, so the rank or agent that "
            "hosts it is gone: start the job again from a checkpoint",
            failure.silent,
        )
    seen = f"not finished within timeout_s={timeout_s}" if failure.late else failure.text
    who = f"; {names}: stopped, or ended" if names else ""
    text = (
        f"{where}: {seen}{who}; the group's store does not answer, so the rank or agent that hosts "
        "it is stopped or out of reach: let it go on, or start the job again from a checkpoint"
    )
    return (SyncTimeoutError if failure.late else RankLostError)(text, failure.silent)
