"""Diagnosis of failed operations from the backend's error and the other ranks' reports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fddp.transport.liveness.bounded_store import StoreTimeoutError
from fddp.transport.liveness.failure import CLOSED, Failure
from fddp.transport.liveness.interrupts import DeadlineExceededError, PeerFailureError
from fddp.transport.liveness.user_code import from_user_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fddp.transport.liveness.failure_detector import FailureDetector
    from fddp.transport.liveness.membership import Membership, Report, Verdict


def diagnose(
    membership: Membership, detector: FailureDetector, error: Exception, report: Report
) -> Failure:
    """Exchange reports about a failed operation and return its cause.

    A missing report alone does not mean that a rank is lost: a rank that takes no part in the
    operation may be busy elsewhere.

    Args:
        membership: channel of the reports.
        detector: processes and statuses of the other ranks.
        error: raised by the backend, or by a check during the wait.
        report: this rank's report; its verdict is filled in here.
    """
    # Strip gloo's source location and its general advice.
    text = re.sub(r"^\[[^\]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
    verdict: Verdict = "broken"
    if isinstance(error, PeerFailureError):
        verdict = "notified"
    elif isinstance(error, (DeadlineExceededError, StoreTimeoutError)) or _is_late(text):
        verdict = "timeout"
    late = verdict == "timeout"
    try:
        membership.report(report._replace(verdict=verdict))
        reports = membership.reports(detector.grace_s, detector.ended)
        gone = tuple(rank for rank in detector.ended() if rank not in reports)
        if gone:
            membership.report(report._replace(verdict="dead", ranks=gone))
    except StoreTimeoutError:
        return Failure(text, late, (), store="silent")
    except RuntimeError as problem:
        if from_user_code(problem):
            raise
        return Failure(text, late, (), store="gone")
    awaited = {r for other in reports.values() if other.verdict != "notified" for r in other.ranks}
    dead = {r for other in reports.values() if other.verdict == "dead" for r in other.ranks}
    dead |= set(gone)
    timed_out = tuple(rank for rank, other in sorted(reports.items()) if other.verdict == "timeout")
    silent = tuple(sorted(dead or awaited - reports.keys()))
    if not dead and not timed_out:
        lost, closed = detector.unresponsive(silent)
        silent, text = (closed, CLOSED) if closed else (lost, text)
    return Failure(
        text,
        late=bool(timed_out) and not gone,
        silent=silent,
        mismatch="" if dead else _mismatch(reports, report),
        gave_up=() if late else timed_out,
    )


def _is_late(text: str) -> bool:
    # gloo also reports a timeout after several refused connections.
    words = text.lower()
    return ("timeout" in words or "timed out" in words) and "refused" not in words


def _mismatch(reports: Mapping[int, Report], own: Report) -> str:
    """Return the different operations that ranks issued at one position; empty if none differ."""
    issued = {
        rank: other.operation
        for rank, other in sorted(reports.items())
        if other.place >= 0 and (other.ranks, other.place) == (own.ranks, own.place)
    }
    first = next(iter(issued.values()), "")
    if all(operation == first for operation in issued.values()):
        return ""
    return ", ".join(f"rank {rank} {operation}" for rank, operation in issued.items())
