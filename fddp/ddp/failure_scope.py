"""Exceptions of one rank in a step of a wrapped module, told to the others.

[Note: exceptions outside of backward]
A wrapped module sees its forward and backward passes, and nothing of what is between them. A
forward pass that no backward follows may be one whose loss function raised, or one that was wanted:
scripts evaluate on one rank, and go forward several times before they go backward. Neither the rank
itself nor a comparison of ranks can tell these apart. So callers say where a step begins and ends.
What a rank then owes the others is known: the broadcasts and votes around a forward pass, unless
one has begun since, and the step, unless it has ended since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fddp.ddp.state import WrapperState

if TYPE_CHECKING:
    from fddp.ddp.backward_steps import Steps


class FailurePropagation(WrapperState):
    """A wrapped module whose steps fail on all ranks together."""

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """One step: what is raised inside, on one rank, is told to the others in the same step.

        It holds the input, forward passes, loss function and backward pass of one step, on every
        rank. The exception goes on where it was raised; the others get a `PeerError` with its text
        at the end of their backward pass, or in the operator in which they wait for this rank. No
        rank has gradients of the step, and all can go on.
        Nothing is communicated where nothing is raised.

        Inside are one step and its earlier micro-batches under `no_sync`; a block of micro-batches
        alone is to be under `no_sync` as a whole. With `forward_sync_buffers` or within `join`,
        there is one forward pass outside of `no_sync`. Evaluation has no place inside.

        Raises:
            RankLostError, SyncTimeoutError, DesyncError: the others could not be told; what was
                raised inside is the context of this error.

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
            self._steps.give_up_stale()  # an earlier step, of which others wait for the end
        self._forward_collectives.is_open = False
        step, done = self._next_step, self._forward_collectives.done
        self._enter()
        try:
            yield
        except BaseException as error:
            steps = self._owed(step)
            if steps is not None:
                self._tell(steps, error, self._forward_collectives.done - done)
            raise
        finally:
            self._leave()

    def _enter(self) -> None:
        self._forward_collectives.in_step = True
        if self._steps is not None:
            self._steps.enter()

    def _leave(self) -> None:
        self._forward_collectives.in_step = False
        if self._steps is not None:
            self._steps.leave()

    @property
    def _next_step(self) -> int:
        return 0 if self._steps is None else int(self._steps.engine.step)

    def _owed(self, step: int) -> Steps | None:
        """What is to carry the step with this number, if the others wait for this rank in it."""
        steps = self._steps
        if steps is None or steps.is_stopped or self._all_delayed or not self._syncs:
            return None
        if (
            self._forward_collectives.is_open
            or steps.engine.is_closed
            or steps.engine.transport.closed_by
        ):
            return None  # they have met with an error as well
        return steps if steps.engine.step == step or steps.is_broken_off else None

    def _tell(self, steps: Steps, error: BaseException, meetings: int) -> None:
        """Takes part in the rest of a step only to say what went wrong.

        Args:
            meetings: how many of the two around a forward pass this rank has been to.
        """
        raised_at = error.__traceback__
        try:
            steps.raise_alarm(error)  # first: they may be in the midst of their forward pass
            if not steps.is_broken_off:
                if meetings == 0:
                    self._sync_before_forward()
                if meetings == 0 or meetings % 2 == 1:
                    self._sync_after_forward()
                self.require_forward_param_sync = True  # as on the others
            steps.fail(error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            error.__traceback__ = raised_at  # without the way here
