"""Ranks with fewer inputs: a wrapped module in `torch.distributed.algorithms.join.Join`.

A rank without further input shadows the collectives of the others' forward and backward passes:
votes, the broadcast of buffers, and the step, to which it contributes nothing.

[Note: counting who is left]
In torch's `Join`, ranks count the ranks with input over the caller's group. If a rank is lost, the
group's backend only reports a broken connection. The context that a wrapped module makes itself
counts over the module's transport, which names lost ranks, and within a host detects them at once.
A `Join` over several objects, made by the caller, is torch's and counts over the group.

[Note: steps that fail within join]
After a step that failed on all ranks, a rank with input either continues or leaves the block with
the error, depending on its loop. A rank without input does not know which, and has no loop that
could catch an error. So it keeps the error until the next count. A rank that leaves after such a
step reports this in the count, which is the next collective of all other ranks. Then they leave,
too: a rank without input raises the error that it kept, and a rank that continued raises
`RankLostError`. In a `Join` made by the caller, ranks can't report that they leave, so ranks
without input raise at once.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any

from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from fddp.ddp.backward_steps import BackwardDriver
from fddp.ddp.broadcast import broadcast_module
from fddp.ddp.state import WrapperState
from fddp.errors import FddpError, InternalError, NonFiniteError, PeerError, RankLostError
from fddp.transport import Transport

_HAS_INPUT, _SYNCS, _LEAVES = 1, 2, 4  # flags of a vote


class ModuleJoinHook(JoinHook):
    """Hook that `Join` calls on a rank without further input.

    Raises:
        AssertionError: `ddp` is no wrapped module.
    """

    def __init__(self, ddp: WrapperState, divide_by_initial_world_size: bool) -> None:
        if not isinstance(ddp, WrapperState):
            raise AssertionError(
                f"DDP join hook requires passing in a DistributedDataParallel instance as the "
                f"state, got {type(ddp).__name__}; pass the wrapped module"
            )
        self._ddp = ddp
        self._steps = ddp.steps
        self._weight = 1.0 if divide_by_initial_world_size else 0.0
        super().__init__()

    def main_hook(self) -> None:
        """Take part in one forward and backward pass of the others."""
        ddp = self._ddp
        self._steps.runner.has_failed = False
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers(has_inputs=False)
        syncs = some_sync(ddp, mine=False)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers(has_inputs=False)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        try:
            _take_part(self._steps, self._weight)
        except (PeerError, NonFiniteError) as error:
            if not isinstance(ddp._join_config, _CountedHere):
                raise
            # Without the frames, which hold tensors of the step.
            ddp._forward_collectives.failure = error.with_traceback(None)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the parameters of a rank that joined last."""
        self._ddp._sync_final_model(is_last_joiner)


class _CountedHere(_JoinConfig):
    """Configuration of a module in a `ModuleJoin`."""


class ModuleJoin(Join):
    """`Join` of one wrapped module; see [Note: counting who is left]."""

    def __init__(
        self, ddp: WrapperState, *, divide: bool, enable: bool, throw_on_early_termination: bool
    ) -> None:
        self._ddp = ddp
        super().__init__(
            [ddp], enable, throw_on_early_termination, divide_by_initial_world_size=divide
        )
        # It is never the "first" joinable, for which torch would count.
        ddp._join_config = _CountedHere(enable, throw_on_early_termination, False)

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._enable and isinstance(value, Exception):
                self._leave()
            super().__exit__(type, value, traceback)
        except Exception:
            self._leave()
            raise

    def _leave(self) -> None:
        """Report in the next count that this rank leaves, if the last step failed."""
        steps = self._ddp._steps
        if steps is not None and steps.runner.has_failed:
            with suppress(FddpError):  # callers see the error that the block was left with
                _votes(self._ddp, _LEAVES)

    def _extract_dist_info(self) -> None:
        self._process_group, self._device = self._ddp.join_process_group, self._ddp.join_device
        self._rank = self._ddp.steps.engine.transport.rank

    def _get_num_nonjoined_procs(self) -> int:
        self._ddp.steps.abort_stale_step()  # others wait for its end before their next count
        return _number_with_input(self._ddp, mine=False)

    def _notify_procs_to_terminate(self) -> None:
        _number_with_input(self._ddp, mine=True)
        raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")


class UnevenInputs(WrapperState):
    """A wrapped module whose ranks may have different numbers of inputs."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> ModuleJoin:
        """Return a context for loops over inputs of unequal length, as torch's.

        Within it, ranks without further input shadow the collectives of the others.

        Args:
            divide_by_initial_world_size: True if joined ranks count in the mean.
            enable: False disables the context.
            throw_on_early_termination: raise on all ranks once one has no input left.

        Raises:
            RankLostError, SyncTimeoutError: a rank is lost, has left the block with an error, or
                is late; inside.
            RuntimeError: a rank has no input left and `throw_on_early_termination` is set; inside.
            ValueError: the wrapper has virtual ranks.
        """
        if self._virtual_ranks is not None:
            raise ValueError(
                "join() and virtual_ranks can't be combined: ranks without inputs would leave out "
                "their virtual ranks; give each virtual rank a batch, or use fddp.GradSync, where "
                "fddp.EXHAUSTED stands for a virtual rank without input"
            )
        return ModuleJoin(
            self,
            divide=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> ModuleJoinHook:
        """Return the hook that `torch.distributed.algorithms.join.Join` calls on joined ranks.

        Args:
            divide_by_initial_world_size: True if joined ranks count in the mean.
        """
        divide = kwargs.get("divide_by_initial_world_size", True)
        hook = ModuleJoinHook(self, divide)
        self.logger.note(join_uneven_inputs=1)
        return hook

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self.steps.abort_stale_step()
        transport = self.steps.engine.transport
        src = last_rank(transport, mine=is_last_joiner)
        if src is None:
            raise InternalError("no rank was the last to join")
        self._authoritative_rank = src
        broadcast_module(
            transport, self.module, self._options.ignored, src, buffers=self.forward_sync_buffers
        )

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Take part in the others' step without gradients. A collective call."""
        _take_part(self.steps, 1.0)

    def _match_unused_params_allreduce(self) -> None:
        """No-op. Every step exchanges the use of parameters."""


def _take_part(steps: BackwardDriver, weight: float) -> None:
    """Run a step without a backward pass on this rank, whose gradients stay unchanged."""
    steps.suspension.check_inactive()
    steps.abort_stale_step()
    steps.runner.take_part(weight)


def notify(ddp: WrapperState) -> None:
    """Notify joined ranks before a forward pass that this rank has input.

    Raises:
        RuntimeError: a rank has joined, and `throw_on_early_termination` is set.
    """
    if not isinstance(ddp._join_config, _CountedHere):
        work = Join.notify_join_context(ddp)
        if work is not None:
            ddp.steps.runner.work.append(work.wait)
        return
    _number_with_input(ddp, mine=True)
    throws = ddp._join_config.throw_on_early_termination
    if throws and _number_with_input(ddp, mine=False):  # the joined ranks' count
        raise RuntimeError(
            "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )


def _number_with_input(ddp: WrapperState, *, mine: bool) -> int:
    votes = _votes(ddp, _HAS_INPUT * mine + _SYNCS * (mine and ddp._syncs))
    kept, ddp._forward_collectives.failure = ddp._forward_collectives.failure, None
    left = tuple(rank for rank, vote in enumerate(votes) if vote & _LEAVES)
    if left:
        raise kept or _left_error(ddp, left)
    ddp._forward_collectives.some_sync = any(vote & _SYNCS for vote in votes)
    return sum(bool(vote & _HAS_INPUT) for vote in votes)


def _votes(ddp: WrapperState, own: int) -> list[int]:
    steps = ddp.steps
    steps.engine.check_usable()
    steps.runner.has_failed = False
    received = steps.engine.transport.exchange(bytes([own]), "inputs in join()")
    return [int.from_bytes(vote[:1], "big") for vote in received]


def _left_error(ddp: WrapperState, left: tuple[int, ...]) -> RankLostError:
    transport, step = ddp.steps.engine.transport, ddp.steps.engine.step - 1
    names = ", ".join(map(str, left))
    return RankLostError(
        f"join() on rank {transport.rank} of {transport.world_size}: lost rank {names}, which left "
        f"the block with an error after step {step} had failed on all ranks; catch the error of "
        f"such a step within the block on all ranks, or on none",
        left,
    )


def some_sync(ddp: WrapperState, *, mine: bool) -> bool:
    """Return True if the backward pass of any rank will synchronise gradients.

    A collective call, unless the count of ranks with input included it.
    """
    if isinstance(ddp._join_config, _CountedHere):
        return bool(ddp._forward_collectives.some_sync)
    return last_rank(ddp.steps.engine.transport, mine=mine) is not None


def last_rank(transport: Transport, *, mine: bool) -> int | None:
    """Return the last rank that votes for it, or None. A collective call."""
    votes = transport.exchange(bytes([mine]), "votes")
    return max((rank for rank, vote in enumerate(votes) if vote != b"\0"), default=None)
