"""Rest of a step, from the end of backward on, and the functions that the executor calls.

The executor walks the list to its end. On the way it calls `write_word`, unless the control word is
a regular one, and `read_report`, unless its sum is: that decides on repairs or failure.

[Note: deferred reports]
The control word of a step in which every rank contributes all leaves with weight 1 only confirms
what all ranks did. With `report="next"` such steps are the only ones, so the list is a straight
line in which nothing waits for the report, and `finish` returns results before it is there. What is
no such step fails on this rank (`_unfit_error`), in place of a repair or another factor. `settle`
reads the report later, always before the next collective of the same transport, so that all ranks
exchange their errors at the same place. A rank that fails waits there in the step itself. Its next
call raises the error again, as that of every other rank does: else its loop would be one step
ahead. A step within another one, whose collectives follow, reads its report at once. What devices
find in results is in [Note: flags of results].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import (
    ControlReport,
    ControlWord,
    decode,
    encode,
    read_squares,
    write_squares,
)
from fddp.core.protocol.launch import TraceAction
from fddp.core.schedule.schedule import summands
from fddp.core.text import leaf_text
from fddp.errors import FddpError, InternalError, NoGradientError, WeightError
from fddp.native import extension
from fddp.native.executor import Phase
from fddp.native.layout import Stats
from fddp.runtime import operations
from fddp.runtime.failures import (
    desync_error,
    exchange_reports,
    incompatible_contributions_error,
    locate,
    peer_error,
)
from fddp.runtime.nonfinite import StopStepError, deferred_error
from fddp.runtime.step import CAPTURED, Outcome, Step

if TYPE_CHECKING:
    from fddp._C import StepCalls


def send(step: Step) -> None:
    """Send all buckets and the control word as far as that does not wait for other ranks; the
    contributions are complete. A further call sends more. Errors of operations are raised by
    `finish`.

    For callers that do something else before `finish`: the wrapper and `GradSync.start`. With a
    hook, the rest is left to `finish`: the control word has to report whether the hook fails.
    """
    if not step.is_prepared:
        step.prepare()
    if step.code.hook is None:
        step.executor.run(Phase.COMPLETE)


def finish(step: Step) -> Outcome:
    """Run the rest of the schedule after backward.

    Raises:
        BaseException: this rank's own failure, once the step's collectives are done.
        PeerError: another rank failed.
        WeightError: the total weight over ranks is zero, or out of proportion.
        DesyncError: ranks are at different steps, or run different plans.
        NonFiniteError: a number is not finite, under the policy "raise".
        RankLostError, SyncTimeoutError: the transport failed.
    """
    step.note("backward ended")
    executor, program = step.executor, step.program
    try:
        if not step.is_prepared:
            step.prepare()
        try:
            executor.run(Phase.FREE)
            gives_views = executor.gives_views
            if program.defers_report and step.failure is not None:
                if step.flags is not None:
                    step.flags.abstain(step.flag_device)
                executor.settle()
                raise InternalError("a step of which this rank failed was reported as regular")
            if gives_views:
                step.take_views()
            if step.flags is not None:
                step.flags.check_memory(step.result_memory, step.flag_device)
            if step.flags is None or not step.flags.are_read_later:
                step.take_regular_report()
            report = step.report
            if not gives_views or (report is not None and 0 in report.users):
                used = [True] * len(program.plan.reduced) if report is None else report.used
                step.results.complete(used, step.contributions.local(program))
            if step.flags is not None:
                step.flags.check_leaves(step.leaves, step.flag_device)
            if step.check is not None:
                step.check.check_results(step.transport, step.number)
        except StopStepError:
            return _stopped(step)
    except BaseException as error:
        _locate(step, error)
        raise
    if step.code.hook is not None:
        assert report is not None
        step.take_states(step.sums.new_states(step.hook_states, report, step.leaves))
    if sequence := program.schedule.sequence:
        last = program.buckets[sequence[-1]].text
        step.transport.note_finished(f"{last} of step {step.number}")
    step.release()
    stats = step.results.stats if step.record_time else None
    outcome = Outcome(step, step.leaves, report, stats, step.begin_result)
    if report is None:
        step.note("results taken")
        step.keep_word()
    else:
        step.note("reported repair" if report.late else "reported regular")
    return outcome


def settle(step: Step) -> ControlReport:
    """Read the report of a step that gave its results before; see [Note: deferred reports].

    Raises:
        PeerError, DesyncError, RankLostError, SyncTimeoutError: as `finish`, of that step.
        NonFiniteError: a result is not finite, under the policy "raise".
    """
    if failed := {rank: text for rank, text in enumerate(step.failures) if text}:
        raise peer_error(step.number, failed, returned=True)
    try:
        step.executor.settle()
    except BaseException as error:
        _locate(step, error)
        raise
    step.take_regular_report()
    if step.flags is not None and (paths := step.flags.found_paths()):
        if step.life.name == "unread":  # else raised before, in the step itself
            step.note("reported failure")
        raise deferred_error(step.number, paths)
    step.note("reported regular")
    assert step.report is not None
    return step.report


def _locate(step: Step, error: BaseException) -> None:
    position = step.executor.position
    op = None if position < 0 else step.program.schedule.ops[position]
    locate(error, step.program, op, step.number)


def _stopped(step: Step) -> Outcome:
    """Return the outcome of a step that all ranks stopped because of a non-finite number, or
    raise its error under the policy "raise"."""
    step.executor.drain()
    report = step.report
    if report is None or step.check is None:
        raise InternalError("a step was stopped before the control word was read")
    error = step.check.error(step.transport, step.number, step.hook_states)
    step.release()
    step.note("reported failure" if error else "reported regular")
    try:
        if error is not None:
            raise error
    finally:
        del error  # whose traceback refers to this frame
    nothing: list[Tensor | None] = [None] * len(step.leaves)
    stats = Stats(math.nan, False)
    return Outcome(step, nothing, report, stats, step.begin_result, skipped=True)


# The control word


def write_word(step: Step) -> Tensor | None:
    """Return this rank's control word, in the memory that is reduced; None for the regular one."""
    if step.record_time:
        step.log.append((step.arrived, TraceAction("control")))
    if step.regular is not None:
        used, late = step.source.used(step.program), step.source.late(step.program)
        if all(used) and not any(late) and not step.executor.may_overflow:
            if step.measures_squares:
                vector = step.regular.vector
                write_squares(step.program.control, vector.numpy(), step.own_squares)
            return None
        step.leave_regular()
    if step.code.hook is not None:
        operations.reduce_sparse(step)
    if failure := step.sums.failure():
        step.fail(*failure)
    if step.program.defers_report and (error := _unfit_error(step)) is not None:
        step.fail(error)
    word = torch.from_numpy(_own_word(step))
    schedule = step.program.schedule
    carrier = schedule.ops[schedule.control].bucket
    if carrier < 0:
        return word.to(step.transport.control_device)
    bucket = step.program.buckets[carrier]
    if carrier in step.idle:  # the bucket is left out, and the word travels alone
        return word.to(step.devices[bucket.device])
    return step.memory(carrier)[bucket.padded_numel :].copy_(word)


def _unfit_error(step: Step) -> FddpError | None:
    """Return the error of contributions that a deferred report does not allow."""
    program, source = step.program, step.source
    weights = [source.weight] if step.earlier is None else [source.weight, *step.earlier.weights]
    if step.failure is not None:
        return None
    unfit = [weight for weight in weights if weight != 1.0]
    if unfit:
        return WeightError(
            f"the weight is {unfit[0]}, and report='next' takes a weight of 1 on every rank, "
            f"because results are used before the total weight is known; scale the loss, or pass "
            f"report='now'"
        )
    paths, advice = program.plan.paths, "with report='next' there is no repair; pass report='now'"
    used = zip(program.plan.reduced, _used(step), strict=True)
    if missing := next((leaf_text(paths[leaf]) for leaf, flag in used if not flag), None):
        return NoGradientError(f"{missing} has no gradient, and {advice}")
    late = zip(program.buckets, source.late(program), strict=True)
    if found := next((bucket.text for bucket, flag in late if flag), None):
        return NoGradientError(f"a gradient came after its {found} had been sent, and {advice}")
    return None


def _own_word(step: Step) -> npt.NDArray[np.floating[Any]]:
    """This rank's control word: the sum of one for each of its summands."""
    layout, source, earlier = step.program.control, step.source, step.earlier
    # A rank without weight has nothing to measure.
    measures = step.measures_squares or (layout.groups > 0 and source.weight == 0.0)
    word = ControlWord(
        fingerprint=step.fingerprint,
        method=step.method,
        weight=source.weight,
        used=_used(step),
        late=source.late(step.program),
        has_next=step.has_next,
        nonfinite=not step.executor.is_finite,
        may_overflow=step.executor.may_overflow,
        failed=step.failure is not None,
        stop=step.asks_stop,
        order=_order(step),
        squares=step.own_squares if measures else (),
    )
    total = encode(layout, word)
    further = step.program.summands - 1
    for weight in [0.0] * further if earlier is None else earlier.weights:
        total += encode(
            layout,
            ControlWord(
                step.fingerprint,
                weight,
                used=[False] * layout.leaves,
                late=[False] * layout.buckets,
                method=step.method,
                has_next=step.has_next,
            ),
        )
    return total


def _used(step: Step) -> Sequence[bool]:
    """For each reduced leaf, True if this rank contributes to it."""
    used = step.source.used(step.program)
    return used if step.earlier is None else [bool(flag) for flag in step.earlier.used | used]


def _order(step: Step) -> tuple[int, ...]:
    """Slots of the control word of the reduced leaves, in rank 0's order of their gradients, which
    is that of the rebuilt plan. Empty where the word has none, and on other ranks."""
    program = step.program
    if not program.control.with_order or step.transport.rank != 0:
        return ()
    slots = {leaf: slot for slot, leaf in enumerate(program.plan.reduced)}
    return tuple(slots[leaf] for leaf in step.source.order(program) if leaf in slots)


def read_report(step: Step, is_regular: bool) -> tuple[Sequence[int], bool]:
    """Act on the sum of the control words, which is that of regular ones if `is_regular`.

    Returns:
        The late buckets, and True if nothing has to be repaired and results need no factor.
    """
    layout = step.program.control
    if is_regular and step.regular is not None:
        report = step.regular.report
        if report.measured:
            report = replace(report, squares=read_squares(layout, _summed_word(step)))
        step.take_report(report)
    else:
        report = decode(
            layout,
            _summed_word(step),
            fingerprint=step.fingerprint,
            world_size=summands(step.program.schedule),
        )
        step.take_report(report)
        if not step.sums.is_regular(report):
            _check_report(step, report)
            if step.sums.applies_scale:
                step.take_report(report, step.program.scale.after(report.total_weight))
    if step.check is not None:
        step.check.on_report(report, step.sources)
    return report.late, step.after == 1.0 and not report.late


def _summed_word(step: Step) -> npt.NDArray[np.floating[Any]]:
    word = step.executor.word()
    if word is None:
        raise InternalError("the control word was read before it was written")
    summed: npt.NDArray[np.floating[Any]] = word.cpu().numpy()
    return summed


@cache
def executor_calls() -> StepCalls:
    """Return the functions of Python for the executor of a step."""
    made: StepCalls = extension.compiled.StepCalls(
        operations.run, operations.fail_pack, write_word, read_report
    )
    return made


def _check_report(step: Step, report: ControlReport) -> None:
    if not report.agreed or report.failed:
        _give_up(step)
    unfit = incompatible_contributions_error(
        report, step.program, step.sums, step.number, allow_idle_ranks=step.allow_idle_ranks
    )
    if unfit is not None:
        step.executor.drain()
        step.note("reported failure")
        raise unfit


def _give_up(step: Step) -> NoReturn:
    """Raise on every rank, after all collectives in flight have finished."""
    step.executor.drain()
    report, returned = step.report, step.life.name == "unread"
    assert report is not None
    method = step.method if step.contributions.weight > 0.0 else Method.NOTHING
    digest = step.program.schedule.shared_digest
    own = step.moment, digest, method.text, step.failure_text
    try:
        reports = exchange_reports(step.transport, *own)
    except FddpError as error:
        if step.failure is not None:  # other ranks may have left without reading the report
            raise error from step.failure
        raise
    texts = [report.failure for report in reports]
    step.take_failures(texts)
    if len({CAPTURED in report.step for report in reports}) > 1:
        # Ranks that capture nothing wait on their devices: the step can't end in good order.
        raise desync_error(step.transport.rank, reports, returned=returned) from step.failure
    step.note("reported failure" if report.agreed else "reported desync")
    if not report.agreed:
        raise desync_error(step.transport.rank, reports, returned=returned) from step.failure
    failed = {rank: text for rank, text in enumerate(texts) if text}
    if step.failure is not None:
        failed.pop(step.transport.rank, None)
        if failed and step.failure.__cause__ is None:  # may be the cause, where a hook waited
            step.failure.__cause__ = peer_error(step.number, failed, returned=returned)
        step.raise_failure()
    raise peer_error(step.number, failed, returned=returned)
