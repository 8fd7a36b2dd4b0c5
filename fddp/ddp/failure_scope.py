"""Exceptions of one rank in a step of a wrapped module, reported to the other ranks.

[Note: exceptions outside of backward]
A wrapped module observes its forward and backward passes, but not the code between them. If no
backward follows a forward pass, the loss function may have raised, or the script may have intended
it: scripts evaluate on one rank, and run several forward passes before a backward pass. Neither the
rank itself nor a comparison of ranks can distinguish these cases. So the caller marks the beginning
and the end of a step. The collectives that the other ranks still expect are then known: the
broadcasts and votes around a forward pass, unless a forward has begun since, and the step, unless
it has ended since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fddp.ddp.state import WrapperState

if TYPE_CHECKING:
    from fddp.ddp.backward_steps import BackwardDriver


class FailurePropagation(WrapperState):
    """A wrapped module whose steps fail on all ranks together."""

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark one step. An exception raised inside on one rank is reported to the others.

        The block contains the input, forward passes, loss function and backward pass of one step,
        on every rank. The exception propagates on the rank that raised it. The others raise
        `PeerError` with its text at the end of their backward pass, or in the operator in which
        they wait for this rank. No rank has gradients of the step, and all can continue. Nothing
        is communicated if nothing is raised.

        The block contains one step and its earlier micro-batches under `no_sync`. A block of
        micro-batches alone must be under `no_sync` as a whole. With `forward_sync_buffers` or
        within `join`, the block has one forward pass outside of `no_sync`. Keep evaluation out of
        the block.

        Raises:
            RankLostError, SyncTimeoutError, DesyncError: the exception could not be reported. It is
                the context of this error.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     try:
            ...         with ddp.in_step():
            ...             loss = ddp(torch.ones(1, 2)).sum()
            ...             if group.rank == 1:
            ...                 raise ValueError("a bad batch")
            ...             loss.backward()
            ...     except (ValueError, fddp.PeerError) as error:
            ...         return type(error).__name__, "a bad batch" in str(error)
            >>> fddp.loopback(2, train)
            [('PeerError', True), ('ValueError', True)]
        """
        if self._steps is not None:
            self._steps.abort_stale_step()  # others wait for its end
        self._forward_collectives.is_open = False
        step = 0 if self._steps is None else self._steps.engine.step
        done = self._forward_collectives.done
        self._switch.in_step = True
        if self._steps is not None:
            self._steps.engine.transport.enter_step(step)
        try:
            yield
        except BaseException as error:
            steps = self._expected(step)
            if steps is not None:
                self._report(steps, error, self._forward_collectives.done - done)
            raise
        finally:
            self._switch.in_step = False
            if self._steps is not None:
                self._steps.engine.transport.leave_step()

    def _expected(self, step: int) -> BackwardDriver | None:
        """Return the driver of this step if the other ranks wait for this rank in it."""
        steps = self._steps
        if steps is None or steps.is_stopped or self._all_delayed or not self._syncs:
            return None
        if (
            self._forward_collectives.is_open
            or steps.engine.is_closed
            or steps.engine.transport.closed_by
        ):
            return None  # the other ranks have an error as well
        return steps if steps.engine.step == step or steps.is_broken_off else None

    def _report(self, steps: BackwardDriver, error: BaseException, done: int) -> None:
        """Report the error in the rest of a step, `done` of whose rounds around forward passes this
        rank has run."""
        raised_at = error.__traceback__
        try:
            steps.publish_failure(error)  # first, because others may wait in their forward pass
            if not steps.is_broken_off:
                if done == 0:
                    self._sync_before_forward()
                if done == 0 or done % 2 == 1:
                    self._sync_after_forward()
                self.require_forward_param_sync = True  # as on the others
            steps.fail(error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            error.__traceback__ = raised_at  # without the frames of this module
