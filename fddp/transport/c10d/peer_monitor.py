"""The other ranks of a c10d transport: checks during waits, and diagnosis of failures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fddp.transport.c10d.diagnosis import diagnose
from fddp.transport.liveness.failure import Failure
from fddp.transport.liveness.interrupts import (
    PeerAbortedError,
    PeerFailureError,
    ProcessExitedError,
)
from fddp.transport.liveness.membership import Report
from fddp.transport.liveness.user_code import ignore_backend_errors

if TYPE_CHECKING:
    from fddp.transport.liveness.failure_detector import FailureDetector
    from fddp.transport.liveness.membership import Membership, Verdict
    from fddp.transport.liveness.status import TransportStatus

_CHECK_PROCESSES_AFTER_S = 1.0  # duration of a wait after which processes are checked


class PeerMonitor:
    """The other ranks of one transport, as seen from this one."""

    def __init__(
        self,
        membership: Membership,
        detector: FailureDetector,
        status: TransportStatus,
        timeout_s: float,
    ) -> None:
        self._membership = membership
        self._detector = detector
        self._status = status
        self._timeout_s = timeout_s
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
            check_failures: also look for failure reports on this transport.
            among: ranks that the operation depends on. None for all.

        Raises:
            PeerFailureError: another rank has reported a failure.
            PeerAbortedError: another rank has failed the step that this one is in.
            ProcessExitedError: the process of another rank has ended.
        """
        wait = self._status.begin(what)
        if check_failures and self._membership.failed():
            raise PeerFailureError("another rank reported a failure")
        if (peer := self._status.board.step_failure(self._status)) is not None:
            raise PeerAbortedError(peer)
        now_s = time.perf_counter()
        if not check_failures or now_s - begin_s > _CHECK_PROCESSES_AFTER_S:
            self._detector.check_alive(among, refresh=not check_failures)
        if now_s - begin_s > self._timeout_s / 4:
            wait.query(self._status.board, now_s)

    def diagnose(self, error: Exception, ranks: tuple[int, ...], at: tuple[int, str]) -> Failure:
        """Exchange reports with the other ranks and return the cause of a failure.

        Args:
            error: raised by the backend or by `check`.
            ranks: participants of the failed operation.
            at: its position among the operations of these ranks, and its description.
        """
        peer = self._status.board.step_failure(self._status)
        if peer is not None:
            self.report(Report("notified", ranks, *at))
            return Failure(str(error), late=False, silent=(), peer=peer)
        if isinstance(error, ProcessExitedError):
            self.report(Report("dead", error.ranks))
            return Failure(str(error), late=False, silent=error.ranks)
        waited_s, report = time.perf_counter() - self._began_s, Report("notified", ranks, *at)
        failure = diagnose(self._membership, self._detector, error, report)
        if failure.store:
            return failure._replace(silent=self._detector.ended_or_stopped())
        if failure.gave_up:
            failure = failure._replace(waited_s=waited_s)
        return self._with_statuses(failure)

    def adopt(self, failure: Failure) -> Failure:
        """Report a failure that was detected outside the backend, and add the ranks' statuses."""
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

    def mismatch(self) -> str:
        return self._membership.mismatch()

    def _with_statuses(self, failure: Failure) -> Failure:
        """Add the statuses of the ranks to a timeout, silent ranks first."""
        if not failure.late or failure.mismatch:
            return failure
        # Ranks that gave up before this one sent any query published their status then.
        since = self._status.since or (1 if failure.gave_up else 0)
        return failure._replace(statuses=self._detector.describe_status(failure.silent, since))
