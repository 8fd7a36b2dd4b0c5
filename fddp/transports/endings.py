"""How a failure ended a transport, as a value, and the error that its operations then raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fddp.errors import FddpError, RankLostError, SyncTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class Failure(NamedTuple):
    """What is known of the failure that closed a transport."""

    text: str  # what was seen, one line
    late: bool  # some rank waited for as long as it may
    silent: tuple[int, ...] | None  # ranks waited for in vain; None where the store is gone too


def explain(
    failure: Failure, where: str, name: Callable[[tuple[int, ...]], str], timeout_s: float
) -> FddpError:
    """The error for an operation that the failure ended.

    Args:
        failure: what is known.
        where: the operation and the rank, in words.
        name: says ranks as the user knows them.
        timeout_s: the transport's.

    >>> failure = Failure("connection reset", late=False, silent=(2,))
    >>> explain(failure, "bucket 3 on rank 0 of 4", lambda ranks: f"rank {ranks[0]}", 9.0).ranks
    (2,)
    """
    if failure.silent is None:
        return RankLostError(
            f"{where}: {failure.text}; the group's store does not answer either, so the rank "
            "or agent that hosts it is gone: start the job again from a checkpoint"
        )
    names = name(failure.silent)
    if failure.late:
        return SyncTimeoutError(
            f"{where}: not finished within timeout_s={timeout_s}; "
            f"{f'no word from {names}' if names else 'every rank is alive'}. All ranks must "
            "issue the same operations in the same order; where one is only slow, raise "
            "timeout_s"
        )
    return RankLostError(
        f"{where}: {f'lost {names}' if names else 'a connection broke'} ({failure.text}); "
        "start the job again from a checkpoint, or go on with a group of the ranks that are "
        "left",
        failure.silent,
    )
