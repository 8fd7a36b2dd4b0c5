"""Steps of a wrapped module that the caller closes, as in torch 2.15.

By default a step is closed when its backward pass ends. With manual finalization, the end of
backward starts the collectives that are left, and `finalize_backward` waits for them and writes the
gradients. In between, other work of the caller overlaps the communication.
"""

from __future__ import annotations

from fddp.ddp.finalization import needs_end_of_backward
from fddp.ddp.state import WrapperState

_NOT_MANUAL = (
    "finalize_backward() was called, but manual backward finalization is not required; set "
    "require_manual_backward_finalization = True before forward"
)
_ALL_DELAYED = (
    "Manual backward finalization is not supported when all parameters have a delayed all-reduce "
    "(delay_all_reduce_named_params); leave one of the two out"
)
_TOO_LATE = (
    "require_manual_backward_finalization cannot change after forward while a backward pass is "
    "expected or in progress; set it before forward, or after finalize_backward()"
)


class ManualFinalization(WrapperState):
    """A wrapped module whose steps may be closed by `finalize_backward`."""

    @property
    def carried_ranks(self) -> range:
        """Virtual ranks that this rank carries; empty without virtual ranks."""
        virtual = self.steps.engine.schedule.virtual
        return range(0) if virtual is None else virtual.runs[self.steps.engine.transport.rank]

    @property
    def require_manual_backward_finalization(self) -> bool:
        """True if each step is closed by `finalize_backward`, and not by the end of backward.

        Call `finalize_backward` once for each backward pass that synchronises gradients, before the
        next forward pass. Until then gradients are undefined, or those of this rank. Outside of
        `in_step`, the last bucket is sent when backward ends, and an exception after that does not
        fail the step on other ranks.

        Raises:
            RuntimeError: it is set after a forward pass and before its step was closed, or all
                parameters have a delayed all-reduce.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     ddp.require_manual_backward_finalization = True
            ...     ddp(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
            ...     # Other work overlaps the all-reduce.
            ...     ddp.finalize_backward()
            ...     return model.weight.grad.tolist()
            >>> fddp.loopback(2, train)
            [[[1.5, 1.5]], [[1.5, 1.5]]]
        """
        return self._switch.is_manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if self._all_delayed:
            if required:
                raise RuntimeError(_ALL_DELAYED)
            return
        if required != self._switch.is_manual and self._steps is not None and self._steps.is_open:
            raise RuntimeError(_TOO_LATE)
        self._switch.is_manual = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """True if `finalize_backward` must wait until the coming backward pass has returned.

        If False, a hook within backward may call it once all parameters have their gradients. Read
        it after forward. It is always False without `require_manual_backward_finalization`. It is
        True before the plan was rebuilt, with mixed precision, delayed parameters or
        `find_unused_parameters`, and if the last step did not use all parameters.
        """
        if not self._switch.is_manual:
            return False
        return (
            self._mixed is not None
            or self._delayed is not None
            or self.find_unused_parameters
            or self._steps is None
            or needs_end_of_backward(self._steps.runner)
        )

    def finalize_backward(self) -> None:
        """Wait for the step's collectives, and write its gradients.

        A collective call, after backward or in a hook within it; see
        `should_finalize_after_backward`.

        Raises:
            RuntimeError: `require_manual_backward_finalization` is not set, no backward pass has to
                be finalized, or parameters have no gradient yet within backward.
            Exception: the step failed, as at the end of backward without manual finalization.
        """
        if self._all_delayed:
            raise RuntimeError(_ALL_DELAYED)
        if not self._switch.is_manual:
            raise RuntimeError(_NOT_MANUAL)
        self.steps.finalize()

    def _raise_pending(self) -> None:
        steps = self._steps
        if steps is None:
            return
        steps.suspension.check_inactive()
        pending = steps.runner.usage.pending
        if pending:
            self._log_and_throw(RuntimeError, pending)
