"""What ranks tell each other when a step cannot be completed, and the errors that follow from it.

Texts are exchanged only then: the control word says that something failed, not what.
"""

from __future__ import annotations

import reprlib
import signal
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlReport
from fddp.errors import (
    DesyncError,
    FddpError,
    PeerError,
    RankLostError,
    SyncTimeoutError,
    TreeMismatchError,
    WeightError,
)
from fddp.transport.base import Transport

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.core.schedule.op import Op
    from fddp.runtime.contributions import Contributions
    from fddp.runtime.program import Program


class StepReport(NamedTuple):
    """What one rank says of its step.

    Attributes:
        step: its number, and what callers say of when that is.
        digest: `shared_digest` of its schedule.
        method: the call that it is in; empty where it brings nothing.
        abandoned: keys of transports that it left half way through a call, each with a tab.
        failure: what went wrong there; empty if nothing did.
    """

    step: str
    digest: str
    method: str
    abandoned: str
    failure: str


def exchange(
    transport: Transport, step: str, digest: str, method: str, failure: str
) -> list[StepReport]:
    """Every rank's account, by rank; a collective call.

    What any rank has left half way through a call of an operator is closed on all of them, so that
    the next call opens it anew.
    """
    board = transport.status.board
    abandoned = "\t".join(board.abandoned)
    own = StepReport(step, digest, method, abandoned, failure)
    payload = "\n".join(own).encode(errors="backslashreplace")
    reports = [_decode_report(text) for text in transport.exchange(payload, "failures")]
    board.close_abandoned(
        [key for account in reports for key in account.abandoned.split("\t") if key]
    )
    return reports


def _decode_report(text: bytes) -> StepReport:
    """An account; of one that makes no sense, that it makes none."""
    parts = text.decode(errors="replace").split("\n", len(StepReport._fields) - 1)
    if len(parts) == len(StepReport._fields):
        return StepReport(*parts)
    return StepReport(
        "unknown", "unknown", "", "", f"it says {reprlib.repr(text)}, which makes no sense"
    )


def locate(error: BaseException, program: Program, op: Op | None, step: int) -> None:
    """Says of an error of the transport what that does not know: bucket, leaves and step.

    Args:
        error: what a session ended with; others than those of the transport stay as they are.
        program: what the session carries out.
        op: the operation under way; None where it was in no schedule.
        step: number of the synchronisation.
    """
    if not isinstance(error, (RankLostError, SyncTimeoutError)) or error.step >= 0:
        return
    if error.bucket < 0 and op is not None and op.kind != "control":
        error.bucket = op.bucket
    error.step = step
    if error.bucket >= 0:
        words = program.describe(error.bucket)
        error.paths = tuple(program.paths[i] for i in program.plan.buckets[error.bucket].leaves)
    else:
        words = "what went wrong" if op is None else "the control word"
    where = f"{words} of step {step}"
    if where not in str(error):
        error.args = (f"{where}: {error}", *error.args[1:])


def peer_error(step: int, failures: Mapping[int, str]) -> PeerError:
    """The error of the ranks that did not fail, from what went wrong on the others."""
    lines = [f"rank {rank} failed at step {step}: {text}" for rank, text in failures.items()]
    advice = "no gradients were produced on any rank; the group is in step and can go on"
    return PeerError("; ".join([*lines, advice]), failures)


def desync_error(rank: int, reports: Sequence[StepReport]) -> DesyncError:
    """The error of ranks that met in one control word while not in step."""
    mine = reports[rank]
    other = next((r for r, account in enumerate(reports) if account[:2] != mine[:2]), None)
    if other is None:
        return _mismatched_calls_error(reports)
    theirs = reports[other]
    return DesyncError(
        f"rank {rank} is at step {mine.step} with plan {mine.digest[:12]}, rank {other} at step "
        f"{theirs.step} with plan {theirs.digest[:12]}; every rank must synchronise equally often "
        f"with one GradSync (fddp.uneven does this for loops of unequal length)"
    )


def _mismatched_calls_error(reports: Sequence[StepReport]) -> DesyncError:
    """The error of ranks that are in the same step by different calls."""
    first: dict[str, int] = {}
    for rank, account in enumerate(reports):
        if account.method:
            first.setdefault(account.method, rank)
    sides = " and ".join(f"{method} on rank {rank}" for method, rank in first.items())
    return DesyncError(
        f"step {reports[0].step} is {sides}; every rank must make the same calls of one GradSync "
        f"in the same order (a rank without a part in a call may pass weight=0)"
    )


def pack_error(
    program: Program, bucket: int, buffer: Tensor, contributions: Contributions, error: Exception
) -> Exception:
    """The error of gradients that can't be packed into a bucket's buffer, by path; what a signal
    handler raised meanwhile stays as it is."""
    if _is_of_a_handler(error):
        return error
    problem = TreeMismatchError(f"{program.describe(bucket)} can't be packed: {error}")
    problem.__cause__ = error
    for part in contributions.parts(bucket):
        for leaf, source in zip(program.plan.buckets[bucket].leaves, part.sources, strict=True):
            if source is not None and source.device != buffer.device:
                return TreeMismatchError(
                    f"the gradient of leaf {program.paths[leaf]!r} is on {source.device} where its "
                    f"bucket is on {buffer.device}; move it there"
                )
    return problem


def _is_of_a_handler(error: Exception) -> bool:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers if callable(handler)]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def incompatible_contributions_error(
    report: ControlReport, program: Program, scale: WeightScale, step: int, hook_error: str | None
) -> FddpError | None:
    """The error of contributions that make no result together, or None."""
    if problem := weight_problem(report, scale) or hook_error:
        return WeightError(f"step {step}: {problem}")
    if program.schedule.result != "replicated":
        return None
    ranks = program.schedule.topology.world_size
    for leaf, users in zip(program.reduced, report.users, strict=True):
        if 0 < users < ranks:
            return TreeMismatchError(
                f"step {step}: leaf {program.paths[leaf]!r} of the shards is None on "
                f"{ranks - users} of {ranks} ranks; pass its shard on every rank, or None on all"
            )
    return None


def weight_problem(report: ControlReport, scale: WeightScale) -> str | None:
    """Why the weights of all ranks have no mean, or None."""
    total = report.total_weight
    if total <= 0.0:
        return (
            f"the total weight over {scale.world_size} ranks is {total}, so there is no mean; give "
            f"at least one rank a weight above 0, or skip the step on all of them"
        )
    if not scale.bears(total, report.active):
        return (
            f"the mean weight is {total / report.active} where sums were scaled for {scale.unit}, "
            f"and a jump by more than 2**40 can't be corrected; the next step is scaled for the "
            f"new weights: call it again"
        )
    return None
