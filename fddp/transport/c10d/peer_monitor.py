"""The other ranks of a c10d transport: checks during waits, and diagnosis of failures."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from fddp.transport.liveness.bounded_store import StoreTimeoutError
from fddp.transport.liveness.failure import CLOSED, Failure, Report, not_responding
from fddp.transport.liveness.interrupts import (
    DeadlineExceededError,
    PeerAbortedError,
    PeerFailureError,
    ProcessExitedError,
    from_user_code,
    ignore_backend_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from fddp.transport.liveness.failure import Verdict
    from fddp.transport.liveness.failure_detector import FailureDetector
    from fddp.transport.liveness.membership import Membership
    from fddp.transport.liveness.status import TransportStatus

_LEFT = "it left the group, or its process has ended"
_CHECK_PROCESSES_AFTER_S = 1.0  # duration of a wait after which processes are checked


class PeerMonitor:
    """The other ranks of one transport, as seen from this one."""

    def __init__(
        self,
        membership: Membership,
        detector: FailureDetector,
        status: TransportStatus,
    ) -> None:
        self._membership = membership
        self._detector = detector
        self._status = status
        self._began_s = 0.0  # start of the current or last wait

    def begin_wait(self, ago_s: float = 0.0) -> float:
        """Record and return the start of a wait, which is `ago_s` seconds in the past."""
        self._began_s = time.perf_counter() - ago_s
        return self._began_s

    def check(
        self,
        what: str,
        begin_s: float,
        *,
        check_failures: bool = True,
        among: tuple[int, ...] | None = None,
    ) -> None:
        """Check the other ranks; called repeatedly during a wait.

        Args:
            what: description of the operation.
            begin_s: start of the wait, in `time.perf_counter` seconds.
            check_failures: look for failure reports on this transport. If False, check the
                processes of ranks at once instead of after a second.
            among: ranks that the operation depends on. None for all.

        Raises:
            PeerFailureError: another rank has reported a failure.
            PeerAbortedError: another rank has failed the step that this one is in.
            ProcessExitedError: the process of another rank has ended.
        """
        self._status.begin(what)
        if check_failures and self._membership.failed():
            raise PeerFailureError("another rank reported a failure")
        if (peer := self._status.board.step_failure(self._status)) is not None:
            raise PeerAbortedError(peer)
        now_s = time.perf_counter()
        late = now_s - begin_s > _CHECK_PROCESSES_AFTER_S
        if among != () and (late or not check_failures):
            self._detector.check_alive(among, refresh=not check_failures)

    def check_opening(self, what: str, begin_s: float, lost: Callable[[], Sequence[int]]) -> None:
        """As `check`, before failures can be reported on the transport; `lost` returns the ranks
        that have left the process group."""
        self.check(what, begin_s, check_failures=False)
        self._detector.check_lost(lost(), _LEFT)

    def check_connecting(
        self, what: str, begin_s: float, lost: Callable[[], Sequence[int]]
    ) -> None:
        """As `check_opening`, once failures can be reported."""
        self.check(what, begin_s)
        self._detector.check_lost(lost(), _LEFT)

    def find_lost(self, begin_s: float, among: Collection[int]) -> set[int]:
        """Return those of some ranks that will not come back, from the operating system and what
        ranks have reported. A rank that has only closed its transport gets some time to do so, and
        one that is silent some time to answer.

        Args:
            begin_s: start of the wait for them, in `time.perf_counter` seconds.
            among: the ranks.
        """
        detector, lost = self._detector, set(self._detector.ended())
        with ignore_backend_errors():
            reports, living = self._membership.reports(0.0), detector.living()
            dead = _dead(reports)
            lost |= dead - _closed(dead, reports) - living
            if time.perf_counter() - begin_s > detector.grace_s:
                lost |= dead
                silent = set(among) - lost - reports.keys()
                unanswered = set(detector.unresponsive(tuple(sorted(silent)))[0])
                lost |= unanswered - living  # who is stopped may come back
        return lost & set(among)

    def diagnose(self, error: Exception, ranks: tuple[int, ...], at: tuple[int, str]) -> Failure:
        """Exchange reports with the other ranks and return the cause of a failure; arguments as for
        `C10dTransport.fail`."""
        report = Report("notified", ranks, *at)
        peer = self._status.board.step_failure(self._status)
        if peer is not None:
            self.report(report)
            return Failure(str(error), late=False, silent=(), peer=peer)
        if isinstance(error, ProcessExitedError):
            self.report(Report("dead", error.ranks))
            return Failure(str(error), late=False, silent=error.ranks)
        waited_s = time.perf_counter() - self._began_s
        failure = self._cause(error, report)
        if failure.store:
            return failure._replace(silent=self._detector.ended_or_stopped())
        if failure.gave_up:
            failure = failure._replace(waited_s=waited_s)
        return self._with_statuses(failure)

    def _cause(self, error: Exception, report: Report) -> Failure:
        """Complete and publish this rank's report, and derive the cause from those of all ranks.

        A missing report alone does not mean that a rank is lost: a rank that takes no part in the
        operation may be busy elsewhere.
        """
        # Strip gloo's source location and its general advice.
        text = re.sub(r"^\[[^\]]*\] |\. This is typically.*", "", str(error).split("\n", 1)[0])
        verdict: Verdict = "broken"
        if isinstance(error, PeerFailureError):
            verdict = "notified"
        elif isinstance(error, (DeadlineExceededError, StoreTimeoutError)) or _is_late(text):
            verdict = "timeout"
        late, detector = verdict == "timeout", self._detector
        try:
            self._membership.report(report._replace(verdict=verdict))
            reports = self._membership.reports(detector.grace_s, detector.ended)
            gone = tuple(rank for rank in detector.ended() if rank not in reports)
            if gone:
                self._membership.report(report._replace(verdict="dead", ranks=gone))
        except StoreTimeoutError:
            return Failure(text, late, (), store="silent")
        except RuntimeError as problem:
            if from_user_code(problem):
                raise
            return Failure(text, late, (), store="gone")
        failed = {r: one.operation for r, one in reports.items() if one.verdict == "failed"}
        if failed:
            return Failure(text, late=False, silent=(), failed=failed)
        awaited = {r for one in reports.values() if one.verdict != "notified" for r in one.ranks}
        dead = _dead(reports) | set(gone)
        timed_out = tuple(rank for rank in sorted(reports) if reports[rank].verdict == "timeout")
        silent = tuple(sorted(dead or awaited - reports.keys()))
        if dead and dead == _closed(dead, reports):
            text = CLOSED  # each of them has reported its own end
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

    def adopt(self, failure: Failure) -> Failure:
        """Report a failure whose cause a communicator has found; complete it and return it."""
        if failure.late:
            failure = failure._replace(waited_s=time.perf_counter() - self._began_s)
        if failure.text == CLOSED:
            # The other rank may have closed after a mismatch or an error that only it has seen.
            failure = failure._replace(
                mismatch=self._membership.mismatch(),
                failed=self._membership.errors(failure.silent),
            )
        verdict: Verdict = "timeout" if failure.late else "dead"
        self.report(Report(verdict, failure.silent))
        return self._with_statuses(failure)

    def report(self, report: Report) -> None:
        """Publish a failure report, if the store is reachable."""
        with ignore_backend_errors():
            self._membership.report(report)

    def publish_mismatch(self, text: str) -> None:
        """Publish the different operations of the ranks, for ranks that detect it later."""
        self._membership.publish_mismatch(text)

    def _with_statuses(self, failure: Failure) -> Failure:
        """Add the statuses of the ranks to a timeout, and name those that do not respond by these
        and the reports of all ranks."""
        if not failure.late or failure.mismatch:
            return failure
        answers = self._detector.statuses(failure.silent)
        failure = failure._replace(statuses=self._detector.describe(answers))
        with ignore_backend_errors():
            reports = self._membership.reports(0.0)  # ranks have had the time of the answers
            # By now, a rank that came late may have given up as well, and all respond.
            silent = not_responding(reports, answers, self._status.key)
            return failure._replace(silent=silent or failure.silent)
        return failure


def _dead(reports: Mapping[int, Report]) -> set[int]:
    """Return the ranks that some rank has reported dead."""
    return {rank for one in reports.values() if one.verdict == "dead" for rank in one.ranks}


def _closed(dead: Collection[int], reports: Mapping[int, Report]) -> set[int]:
    """Return those of dead ranks that have reported their own end."""
    return {rank for rank in dead if rank in reports and rank in reports[rank].ranks}


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
