"""How an operation of a backend ended, worked out from its error and from what other ranks tell."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fddp.transport.liveness.bounded_store import SilentError
from fddp.transport.liveness.failure import CLOSED, Failure
from fddp.transport.liveness.interrupts import LateError, ToldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fddp.transport.liveness.failure_detector import Peers
    from fddp.transport.liveness.membership import Report, RollCall, Verdict


def diagnose(roll: RollCall, peers: Peers, error: Exception, report: Report) -> Failure:
    """Tell the others, and hear from them, how the operation of `report` that raised `error` ended.

    Args:
        roll: by which ranks tell each other.
        peers: the other ranks.
        error: what the backend raised, or what ended the wait.
        report: what this rank tells; its verdict is filled in.

    Silent alone means little: a rank that takes no part in what failed may be busy elsewhere.
    """
    # Without gloo's own source line in front and its general advice behind.
    text = re.sub(r"^\[[^\]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
    verdict: Verdict = "broken"
    if isinstance(error, ToldError):
        verdict = "told"
    elif isinstance(error, (LateError, SilentError)) or _is_late(text):
        verdict = "timeout"
    late = verdict == "timeout"
    try:
        roll.report(report._replace(verdict=verdict))
        reports = roll.reports(peers.grace_s, peers.ended)
        gone = tuple(rank for rank in peers.ended() if rank not in reports)
        if gone:
            roll.report(report._replace(verdict="dead", ranks=gone))
    except SilentError:
        return Failure(text, late, (), store="silent")
    except RuntimeError:
        return Failure(text, late, (), store="gone")
    awaited = {r for told in reports.values() if told.verdict != "told" for r in told.ranks}
    dead = {r for told in reports.values() if told.verdict == "dead" for r in told.ranks}
    dead |= set(gone)
    timed_out = tuple(rank for rank, told in sorted(reports.items()) if told.verdict == "timeout")
    silent = tuple(sorted(dead or awaited - reports.keys()))
    if not dead and not timed_out:
        lost, closed = peers.unheard(silent)
        silent, text = (closed, CLOSED) if closed else (lost, text)
    return Failure(
        text,
        late=bool(timed_out) and not gone,
        silent=silent,
        mismatch="" if dead else _mismatch(reports, report),
        gave_up=() if late else timed_out,
    )


def _is_late(text: str) -> bool:
    """Whether a backend ended an operation because of the time."""
    # gloo calls it a timeout, too, that it has tried to connect often enough.
    words = text.lower()
    return ("timeout" in words or "timed out" in words) and "refused" not in words


def _mismatch(reports: Mapping[int, Report], own: Report) -> str:
    """What ranks are in that met in one place with different operations; empty if none did."""
    met = {
        rank: told.operation
        for rank, told in sorted(reports.items())
        if told.place >= 0 and (told.ranks, told.place) == (own.ranks, own.place)
    }
    first = next(iter(met.values()), "")
    if all(operation == first for operation in met.values()):
        return ""
    return ", ".join(f"rank {rank} {operation}" for rank, operation in met.items())
