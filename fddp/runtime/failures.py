"""Exchange of error texts after a failed step, and the errors that ranks raise.

The control word only reports that a rank has failed. The texts are exchanged afterwards.
"""

from __future__ import annotations

import reprlib
import signal
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.messages import Schema
from fddp.core.text import leaf_text
from fddp.errors import (
    DesyncError,
    FddpError,
    PeerError,
    RankLostError,
    SyncTimeoutError,
    TreeMismatchError,
    WeightError,
)
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.runtime.agreement import exchange
from fddp.transport.base import Transport

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.core.schedule.op import Op
    from fddp.runtime.contributions import Contributions
    from fddp.runtime.program import Program
    from fddp.runtime.sums import Sums


class StepReport(NamedTuple):
    """Report of one rank on its step.

    Attributes:
        step: `Step.moment`.
        digest: `shared_digest` of its schedule.
        method: the call that opened the step; empty if the rank contributes nothing.
        abandoned: keys of operators' transports that it abandoned during a call.
        failure: its error text; empty if it has not failed.
    """

    step: str
    digest: str
    method: str
    abandoned: list[str]
    failure: str


_REPORT: Schema = (str, str, str, [str], str)


def exchange_reports(
    transport: Transport, step: str, digest: str, method: str, failure: str
) -> list[StepReport]:
    """Return the reports of all ranks, by rank; a collective call.

    Operators' transports that any rank has abandoned are closed on all ranks. The next call of an
    operator opens a new one.
    """
    failure = failure.encode(errors="backslashreplace").decode()  # without lone surrogates
    own = StepReport(step, digest, method, transport.abandoned, failure)
    received = exchange(transport, own, _REPORT, "failures", on_malformed=_malformed_report)
    reports = [StepReport(*report) for report in received]
    transport.close_abandoned([key for report in reports for key in report.abandoned])
    return reports


def _malformed_report(text: bytes) -> StepReport:
    """Stand-in for a malformed report, which must not hide the reports of other ranks."""
    failure = f"it sent a malformed report: {reprlib.repr(text)}"
    return StepReport("unknown", "unknown", "", [], failure)


def locate(error: BaseException, program: Program, op: Op | None, step: int) -> None:
    """Add bucket, leaves and step to an error, if it is one of the transport. `op` is the operation
    under way; None if it is part of no schedule."""
    if not isinstance(error, (RankLostError, SyncTimeoutError)) or error.step >= 0:
        return
    if error.bucket < 0 and op is not None and op.kind != "control":
        error.bucket = op.bucket
    error.step = step
    if error.bucket >= 0:
        words = program.buckets[error.bucket].text
        plan = program.plan
        error.paths = tuple(plan.paths[i] for i in plan.buckets[error.bucket].leaves)
    else:
        words = "the exchange of failures" if op is None else "the control word"
    where = f"{words} of step {step}"
    if where not in str(error):
        error.args = (f"{where}: {error}", *error.args[1:])


def peer_error(step: int, failures: Mapping[int, str], *, returned: bool = False) -> PeerError:
    """Return the error of ranks that did not fail, with the texts of those that did.

    Args:
        returned: True if results of the step were returned before its report.
    """
    lines = [f"rank {rank} failed at step {step}: {text}" for rank, text in failures.items()]
    advice = "no gradients were produced on any rank; the group is in step and can go on"
    if returned:
        advice = f"{_RETURNED}; the group is in step and can go on"
    return PeerError("; ".join([*lines, advice]), failures)


_RETURNED = (
    "results of this step, where report='next' has returned them before, are no mean over ranks: "
    "go back to parameters and state from before it"
)


def desync_error(
    rank: int, reports: Sequence[StepReport], *, returned: bool = False
) -> DesyncError:
    """Return the error of ranks whose control words belong to different steps or plans; `returned`
    as for `peer_error`."""
    error = _desync_error(rank, reports)
    return DesyncError(f"{error}; {_RETURNED}") if returned else error


def _desync_error(rank: int, reports: Sequence[StepReport]) -> DesyncError:
    mine = reports[rank]
    other = next((r for r, report in enumerate(reports) if report[:2] != mine[:2]), None)
    if other is None:
        return _mismatched_calls_error(reports)
    theirs = reports[other]
    return DesyncError(
        f"rank {rank} is at step {mine.step} with plan {mine.digest[:12]}, rank {other} at step "
        f"{theirs.step} with plan {theirs.digest[:12]}; every rank must synchronise equally often "
        f"with one GradSync (fddp.uneven does this for loops of unequal length)"
    )


def _mismatched_calls_error(reports: Sequence[StepReport]) -> DesyncError:
    first: dict[str, int] = {}
    for rank, report in enumerate(reports):
        if report.method:
            first.setdefault(report.method, rank)
    calls = " and ".join(f"{method} on rank {rank}" for method, rank in first.items())
    return DesyncError(
        f"step {reports[0].step} is {calls}; every rank must make the same calls of one GradSync "
        f"in the same order (a rank that contributes nothing to a call may pass weight=0)"
    )


def pack_error(
    program: Program, bucket: int, buffer: Tensor, contributions: Contributions, error: Exception
) -> Exception:
    """Return the error for gradients that can't be packed, with the leaf's path. Errors raised by
    a signal handler meanwhile are returned unchanged."""
    if _raised_by_signal_handler(error):
        return error
    problem = TreeMismatchError(f"{program.buckets[bucket].text} can't be packed: {error}")
    problem.__cause__ = error
    leaves = program.plan.buckets[bucket].leaves
    given = [part.sources for part in contributions.sources(program, bucket)]
    if contributions.leaf_set is not None:  # which may have released the gradients
        own = contributions.leaf_set.leaves
        given.append([own[number] for number in program.member_numbers[bucket]])
    for leaf, source in chain.from_iterable(zip(leaves, each, strict=True) for each in given):
        path = program.plan.paths[leaf]
        if source is not None and (kind := wrapper_kind(source)):
            return TreeMismatchError(
                f"the gradient of {leaf_text(path)} is a {kind}, whose memory does not hold "
                f"its values; {PLAIN_INSTEAD}"
            )
        if source is not None and source.device != buffer.device:
            return TreeMismatchError(
                f"the gradient of {leaf_text(path)} is on {source.device} where its bucket is "
                f"on {buffer.device}; move it there"
            )
    return problem


def _raised_by_signal_handler(error: Exception) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers if callable(handler)]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def incompatible_contributions_error(
    report: ControlReport, program: Program, sums: Sums, step: int, *, allow_idle_ranks: bool
) -> FddpError | None:
    """Return the error of contributions that have no mean together, or None."""
    if report.total_weight <= 0.0:
        return WeightError(
            f"step {step}: the total weight over {program.scale.ranks} ranks is "
            f"{report.total_weight}, so there is no mean; give at least one rank a weight above 0, "
            f"or skip the step on all of them"
        )
    if problem := sums.problem(report, allow_idle_ranks=allow_idle_ranks):
        return WeightError(f"step {step}: {problem}")
    if program.schedule.result != "replicated":
        return None
    ranks = program.schedule.topology.world_size
    for leaf, users in zip(program.plan.reduced, report.users, strict=True):
        if 0 < users < ranks:
            return TreeMismatchError(
                f"step {step}: {leaf_text(program.plan.paths[leaf], 'shards')} is None on "
                f"{ranks - users} of {ranks} ranks; pass its shard on every rank, or None on all"
            )
    return None
