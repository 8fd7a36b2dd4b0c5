"""Rest of a step, from the end of backward on.

The control word is sent; its sum is compared with that of equal words of all ranks; where it
differs, repairs or failure are decided on; and the rest of the schedule runs.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, ControlWord, decode, encode
from fddp.core.protocol.launch import Action
from fddp.core.schedule.schedule import summands
from fddp.errors import FddpError, InternalError
from fddp.native.executor import Phase
from fddp.native.layout import Stats
from fddp.runtime.failures import (
    desync_error,
    exchange_reports,
    incompatible_contributions_error,
    locate,
    peer_error,
)
from fddp.runtime.nonfinite import StopStepError
from fddp.runtime.operations import reduce_sparse
from fddp.runtime.step import Step
from fddp.runtime.step_context import USUAL, WITH_VIEWS, Outcome, RegularWord


def send(step: Step) -> None:
    """Send all buckets and the control word as far as that does not wait for other ranks; the
    contributions are complete. A further call sends more. Never raises: `finish` does.

    For callers that do something else before `finish`: the wrapper and `GradSync.start`. With a
    hook, the rest is left to `finish`: the control word has to report whether the hook fails.
    """
    if not step.is_prepared:
        step.prepare()
    if step.bound_hook is not None:
        return
    if step.executor.run(Phase.COMPLETE) and not step.sent_word:
        send_word(step, Phase.COMPLETE)


def finish(step: Step) -> Outcome:
    """Run the rest of the schedule after backward.

    Raises:
        BaseException: this rank's own failure, once the step's collectives are done.
        PeerError: another rank failed.
        WeightError: the total weight over ranks is zero.
        DesyncError: ranks are at different steps, or run different plans.
        NonFiniteError: a number is not finite, under the policy "raise".
        RankLostError, SyncTimeoutError: the transport failed.
    """
    step.backward_ended = True
    try:
        return _run_to_end(step)
    except BaseException as error:
        position = step.executor.position
        op = None if position < 0 else step.program.schedule.ops[position]
        locate(error, step.program, op, step.number)
        raise


def _run_to_end(step: Step) -> Outcome:
    executor, code = step.executor, step.code
    if not step.is_prepared:
        step.prepare()
    executor.run(Phase.FREE)
    if not step.sent_word:
        send_word(step, Phase.FREE)
    try:
        is_regular = _read_report(step)
        report = step.report
        assert report is not None
        measures = step.record_time or step.check is not None
        gives_views = is_regular and code.has_views and not measures
        if gives_views:
            key = WITH_VIEWS if step.key is USUAL else step.key._replace(views=True)
        else:
            key = step.key
        executor.run_list(code.rest(key), Phase.FREE)
        if gives_views and 0 not in report.users:
            step.leaves = executor.results()
        else:
            if gives_views:
                step.leaves[:] = executor.results()
            step.results.finish(report.used, step.contributions)
        if step.check is not None:
            step.check.check_results(step.transport, step.number)
    except StopStepError:
        return _stopped(step)
    if step.bound_hook is not None:
        step.hook_states = step.sums.new_states(step.hook_states, report, step.leaves)
    if sequence := step.program.schedule.sequence:
        last = step.program.buckets[sequence[-1]].text
        step.transport.note_finished(f"{last} of step {step.number}")
    step.close()
    return Outcome(step.leaves, report, step.results.stats if step.record_time else None)


def _stopped(step: Step) -> Outcome:
    """Return the outcome of a step that all ranks stopped because of a non-finite number, or
    raise its error under the policy "raise"."""
    step.executor.drain()
    report = step.report
    if report is None or step.check is None:
        raise InternalError("a step was stopped before the control word was read")
    step.failure = step.check.error(step.transport, step.number)
    step.close()
    step.raise_failure()
    nothing: list[Tensor | None] = [None] * len(step.leaves)
    return Outcome(nothing, report, Stats(math.nan, False), skipped=True)


# The control word


def send_word(step: Step, phase: Phase) -> None:
    """Write this rank's control word into its bucket's buffer, or into memory of its own, and
    send it."""
    step.sent_word = True
    schedule = step.program.schedule
    carrier = schedule.ops[schedule.control].bucket
    following = step.first_lists.after_word
    if step.record_time:
        step.log.append((step.contributions.arrived(), Action("control")))
    regular = step.regular_word = _regular_word(step)
    if regular is not None:
        step.executor.send_word(regular.vector, step.fingerprint, carrier, following, phase)
        return
    if step.bound_hook is not None:
        reduce_sparse(step)
    if failure := step.sums.failure():
        step.fail(*failure)
    vector = torch.from_numpy(_own_word(step))
    if carrier < 0:
        word = vector.to(step.transport.control_device)
    elif carrier in step.context.idle:
        word = vector.to(step.devices[step.program.buckets[carrier].device])
    else:
        word = step.memory(carrier)[step.program.buckets[carrier].padded_numel :]
        word.copy_(vector)
    step.executor.send_written_word(word, following, phase)


def _regular_word(step: Step) -> RegularWord | None:
    """Return the control word of a step in which this rank contributes all gradients with the
    agreed weight; None if this is not one."""
    code, weight = step.code, step.contributions.weight
    if (
        step.failure is not None
        or weight != 1.0
        or not (step.has_next and code.has_regular_words)
        or (step.program.control.with_order and step.contributions.backward is not None)
        or step.context.idle
        or step.executor.may_overflow
    ):
        return None
    is_whole = step.is_whole
    if is_whole is None:
        is_whole = step.source.is_complete()
    return code.regular_word(step.method, weight) if is_whole else None


def _own_word(step: Step) -> npt.NDArray[np.floating[Any]]:
    """This rank's control word: the sum of one for each of its summands."""
    layout, source = step.program.control, step.source
    # Rank 0's order of gradients is that of the rebuilt plan.
    has_order = layout.with_order and step.transport.rank == 0 and not step.failure
    word = ControlWord(
        fingerprint=step.fingerprint,
        method=step.method,
        weight=source.weight,
        used=source.used(step.program),
        late=source.late(step.program),
        has_next=step.has_next,
        nonfinite=not step.executor.is_finite,
        may_overflow=step.executor.may_overflow,
        failed=step.failure is not None,
        order=tuple(step.contributions.order(step.program)) if has_order else (),
    )
    total = encode(layout, word)
    further = step.program.summands - 1
    for weight in source.earlier_weights or [0.0] * further:
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


def _read_report(step: Step) -> bool:
    """Wait for the control word, and act on it. Return True if nothing has to be repaired, and
    results need no factor."""
    schedule, regular = step.program.schedule, step.regular_word
    piggyback = schedule.piggyback_op
    position = piggyback if piggyback >= 0 else schedule.control
    if regular is None:
        step.executor.wait_at(position)
    elif step.executor.read_word(position, regular.vector, step.fingerprint):
        step.report = report = regular.report
        if step.check is None:
            return True
        is_regular = True
    if step.report is None:
        word = step.executor.word()
        if word is None:
            raise InternalError("the control word was read before it was written")
        step.report = report = decode(
            step.program.control,
            word.cpu().numpy(),
            fingerprint=step.fingerprint,
            world_size=summands(schedule),
        )
        is_regular = step.sums.is_regular(report)
    if not is_regular:
        _check_report(step, report)
        if step.sums.applies_scale:
            step.after = step.program.scale.after(report.total_weight)
    if step.check is not None:
        step.check.on_report(report, step.source)
    if report.late:
        step.key = step.key._replace(late=frozenset(report.late))
    return step.after == 1.0 and not report.late


def _check_report(step: Step, report: ControlReport) -> None:
    unfit = None
    if report.agreed and not report.failed:
        unfit = incompatible_contributions_error(
            report, step.program, step.sums, step.number, allow_idle_ranks=step.allow_idle_ranks
        )
    if not report.agreed or report.failed or unfit is not None:
        _give_up(step, report, unfit)


def _give_up(step: Step, report: ControlReport, unfit: FddpError | None) -> NoReturn:
    """Raise on every rank, after all collectives in flight have finished."""
    step.executor.drain()
    if unfit is not None and report.agreed and not report.failed:
        step.is_orderly = True
        raise unfit
    method = step.method if step.contributions.weight > 0.0 else Method.NOTHING
    digest = step.program.schedule.shared_digest
    reports = exchange_reports(
        step.transport, step.context.moment, digest, method.text, step.failure_text
    )
    step.failures = [report.failure for report in reports]
    step.is_orderly = True
    if not report.agreed:
        raise desync_error(step.transport.rank, reports) from step.failure
    failed = {rank: text for rank, text in enumerate(step.failures) if text}
    if step.failure is not None:
        failed.pop(step.transport.rank, None)
        if failed and step.failure.__cause__ is None:  # may be the cause, where a hook waited
            step.failure.__cause__ = peer_error(step.number, failed)
        step.raise_failure()
    raise peer_error(step.number, failed)
