"""Forward passes of a wrapped module, and the collectives around them."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fddp.ddp.broadcast import broadcast_buffers
from fddp.ddp.joiner import Joiner, last_rank
from fddp.ddp.outputs import find_tensors, warn_if_hidden
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.steps import Steps
from fddp.native.torch_private import current_graph_task_id, peek_interpreter_stack
from fddp.runtime.inputs import is_traced
from fddp.telemetry.flight.dump import dump_failures

_LOCAL_GRADIENTS = (
    "gradients of tensors that torch.func.functional_call puts in place of a "
    "DistributedDataParallel's parameters stay local to this rank; use fddp.GradSync for their "
    "mean, or call it within `with ddp.no_sync():` if local gradients are wanted"
)


class ForwardPasses:
    """Begins and ends forward passes: votes within `join`, and buffers, in one order on all ranks.

    A rank with input runs one round of collectives before and one after its forward pass. A rank
    without input runs both at once, and so does one that reports an error in place of the rest of a
    step. Methods take the wrapped module, which has the names of torch, and do not keep it.

    Attributes:
        rounds: number of rounds that this rank has run.
        is_in_round: True if a round is running, or was left by an exception.
        is_synced: True if the running forward pass takes part in synchronisation.
    """

    def __init__(self, steps: Steps, joiner: Joiner, watch: ParameterWatch) -> None:
        self.rounds = 0
        self.is_in_round = self.is_synced = False
        self._steps = steps
        self._joiner = joiner
        self._watch = watch

    def begin(self, ddp: Any) -> None:
        """Prepare for a forward pass, if it takes part in synchronisation."""
        steps = self._steps
        self.is_synced = False
        if not self._watch.params:  # all are delayed
            return
        change = self._watch.change()
        if change == "swapped":
            if steps.settings.syncs and self._watch.are_others_tracked:
                warnings.warn(_LOCAL_GRADIENTS, stacklevel=3)
            return
        if peek_interpreter_stack() is not None or is_traced():
            return
        if not steps.is_open and _needs_no_communicator(ddp):
            return
        self._prepare(ddp, change == "changed")
        self.is_synced = True

    def resume(self, is_synced: bool) -> None:
        """Set `is_synced` of the running forward pass."""
        self.is_synced = is_synced

    def _prepare(self, ddp: Any, changed: bool) -> None:
        steps, logger, is_grad_enabled = self._steps.open(), ddp.logger, torch.is_grad_enabled()
        logger.begin_forward()
        syncs = is_grad_enabled and steps.settings.is_on
        if (
            syncs
            and steps.engine.is_captured
            and (error := steps.engine.capture_error()) is not None
        ):
            with steps.engine.beside_capture():
                self.report(ddp, error)
        steps.settle()
        if not ddp._lazy_init_ran:
            ddp._lazy_init()
        if syncs:
            logger.count_forward()
        if is_grad_enabled:
            ddp._raise_pending()
        if syncs:
            steps.usage.begin_forward()
        steps.usage.note_joining(ddp._join_config.enable)
        if changed or not steps.parameters.are_hooked():
            steps.change_parameters()
            logger.renumber(steps.usage.names)
        steps.parameters.hooks.await_gradients([])
        if is_grad_enabled:
            steps.begin_forward()
            steps.weights.note_forward()
        self.run_before(ddp)

    def end(self, ddp: Any, output: Any) -> None:
        """Hook the output of a forward pass, and run the collectives after it."""
        if not self.is_synced:
            return
        self.run_after(ddp)
        syncs = self._steps.settings.syncs
        if ddp.require_forward_param_sync is not syncs:  # assignment takes microseconds
            ddp.require_forward_param_sync = syncs
        is_pass = syncs or self._steps.options.arguments.virtual_ranks is not None
        if is_pass and not self._watch.all_frozen:
            tensors = find_tensors(output)
            if not tensors and torch.is_grad_enabled():
                warn_if_hidden(output)
            self._steps.expect(tensors)
        elif self._steps.passes.reports_local and torch.is_grad_enabled():
            self._steps.allow(find_tensors(output))

    # Collectives

    def report(self, ddp: Any, error: BaseException, done: int = 0) -> None:
        """Report an error in the rest of a step, `done` of whose rounds around forward passes this
        rank has run. A collective call.

        Raises:
            BaseException: as `Steps.fail`.
        """
        steps = self._steps
        steps.publish_failure(error)  # first, because others may wait in their forward pass
        if not steps.is_owed:
            if done == 0:
                self.run_before(ddp)
            if done == 0 or done % 2 == 1:
                self.run_after(ddp)
            ddp.require_forward_param_sync = True  # as on the others
        steps.fail(error)

    def leave_round(self) -> None:
        """Forget a round that was left by an exception."""
        self.is_in_round = False

    def run_before(self, ddp: Any) -> None:
        """Run the round before a forward pass. A collective call."""
        is_joining = ddp._join_config.enable
        self.is_in_round = True
        if is_joining:
            self._joiner.notify(ddp)
        if self._watch.has_buffers and ddp._check_sync_bufs_pre_fwd():
            self._sync_buffers(ddp)
        if is_joining:
            self._joiner.some_sync(ddp._join_config, mine=self._steps.settings.syncs)
        self.rounds += 1
        self.is_in_round = False

    def run_after(self, ddp: Any) -> None:
        """Run the round after a forward pass. A collective call."""
        self.is_in_round = True
        if self._watch.has_buffers and ddp._check_sync_bufs_post_fwd():
            self._sync_buffers(ddp)
        self.rounds += 1
        self.is_in_round = False

    def shadow(self, ddp: Any) -> bool:
        """Run both rounds of the others, on a rank without input. A collective call.

        Return True if the backward pass of any rank will synchronise gradients.
        """
        if ddp._check_sync_bufs_pre_fwd():
            self._sync_buffers(ddp, has_input=False)
        syncs = self._joiner.some_sync(ddp._join_config, mine=False)
        if ddp._check_sync_bufs_post_fwd():
            self._sync_buffers(ddp, has_input=False)
        return syncs

    def _sync_buffers(self, ddp: Any, *, has_input: bool = True) -> None:
        """Broadcast buffers from rank 0, or within `join` from a rank that still has input."""
        if current_graph_task_id() >= 0:
            return  # a checkpoint runs forward again, and ranks may be at different points
        self._steps.engine.check_usable()
        self._steps.engine.check_complete()
        transport, src = self._steps.engine.transport, 0
        if ddp._join_config.enable:
            src = last_rank(transport, mine=has_input) or 0
        with dump_failures(), torch.no_grad(), torch.inference_mode(False):
            if not hasattr(ddp, "buffer_hook"):
                broadcast_buffers(transport, ddp.module, self._steps.options.ignored, src)
                return
            hook = ddp.buffer_hook
            # The hook may call operators, and also runs on ranks that have failed.
            outer = transport.enter_step(None)
            try:
                state, buffers = hook.buffer_comm_hook_state, ddp.named_module_buffers
                futures = hook.buffer_comm_hook(state, buffers)
            finally:
                transport.enter_step(outer)
            self._steps.work.extend(future.wait for future in futures or ())


def _needs_no_communicator(ddp: Any) -> bool:
    """Return True if a forward pass needs no communicator.

    Copies have none at first, and may be evaluated on one rank alone.
    """
    is_joining = ddp._join_config.enable
    return not (torch.is_grad_enabled() or is_joining or ddp.will_sync_module_buffers())
