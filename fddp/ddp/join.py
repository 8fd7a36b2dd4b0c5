"""A wrapped module in `torch.distributed.algorithms.join.Join`: ranks with fewer inputs.

A rank that has run out shadows the collectives of the others' forward and backward passes: their
votes, the broadcast of buffers, and the step, in which it contributes nothing.

[Note: counting who is left]
torch's `Join` has ranks with and without input count each other over the caller's group, whose
backend says of a lost rank that a connection broke. The context that a wrapped module makes itself
counts over the transport of the module, which names ranks, and within a host knows at once. A
`Join` that callers make of several objects is torch's, and counts as it does.

[Note: steps that fail within join]
After a step that failed on all ranks, those with input go on or leave the block with the error, as
their loops have it. A rank that has run out can't know, and no loop of its own could catch what it
raised. So it keeps the error until ranks count again. One that leaves after such a step takes part
in that count to say so, since the next thing that all others do is to count. Then they leave, too:
a rank that has run out with the error that it kept, and one that had gone on with `RankLostError`.
In a `Join` of the caller's nobody can say so: ranks that have run out raise at once.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from fddp.ddp.state import WrapperState
from fddp.errors import FddpError, NonFiniteError, PeerError, RankLostError
from fddp.transport import Transport

_HAS_INPUT, _SYNCS, _LEAVES = 1, 2, 4  # what a rank votes for


class ModuleJoinHook(JoinHook):
    """What `Join` calls on a rank without further input.

    Args:
        ddp: the wrapped module.
        divide_by_initial_world_size: whether ranks that have joined still count in the mean.
    """

    def __init__(self, ddp: WrapperState, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        self._steps = ddp.steps
        self._weight = 1.0 if divide_by_initial_world_size else 0.0
        super().__init__()

    def main_hook(self) -> None:
        """Takes part in one forward and backward pass of the others."""
        ddp = self._ddp
        self._steps.has_failed = False
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers(has_inputs=False)
        syncs = some_sync(ddp, mine=False)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers(has_inputs=False)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        try:
            self._steps.take_part(self._weight)
        except (PeerError, NonFiniteError) as error:
            if not isinstance(ddp._join_config, _CountedHere):
                raise
            # Without the frames, which hold tensors of the step.
            ddp._forward_collectives.failure = error.with_traceback(None)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Brings all ranks to the parameters of the one that went on for longest."""
        self._ddp._sync_final_model(is_last_joiner)


class _CountedHere(_JoinConfig):
    """The configuration of a module in a `ModuleJoin`."""


class ModuleJoin(Join):
    """`Join` of one wrapped module; see [Note: counting who is left].

    Args:
        ddp: the wrapped module.
        divide, enable, throw_on_early_termination: as for `DistributedDataParallel.join`.
    """

    def __init__(
        self,
        ddp: WrapperState,
        *,
        divide: bool,
        enable: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self._ddp = ddp
        super().__init__(
            [ddp], enable, throw_on_early_termination, divide_by_initial_world_size=divide
        )
        # It is never the "first" joinable: torch would count for that one.
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
        """Tells the others that this rank goes, where they count next: after a step that failed."""
        steps = self._ddp._steps
        if steps is not None and steps.has_failed:
            with suppress(FddpError):  # the error that it leaves with is what callers are to see
                _votes(self._ddp, _LEAVES)

    def _extract_dist_info(self) -> None:
        self._process_group, self._device = self._ddp.join_process_group, self._ddp.join_device
        self._rank = self._ddp.steps.engine.transport.rank

    def _get_num_nonjoined_procs(self) -> int:
        return _number_with_input(self._ddp, mine=False)

    def _notify_procs_to_terminate(self) -> None:
        _number_with_input(self._ddp, mine=True)
        raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")


def notify(ddp: WrapperState) -> None:
    """Tells ranks that have joined, before a forward pass, that this one has not.

    Raises:
        RuntimeError: one has joined, and callers asked for this error.
    """
    if not isinstance(ddp._join_config, _CountedHere):
        work = Join.notify_join_context(ddp)
        if work is not None:
            ddp.steps.work.append(work.wait)
        return
    _number_with_input(ddp, mine=True)
    throws = ddp._join_config.throw_on_early_termination
    if throws and _number_with_input(ddp, mine=False):  # of those that have joined
        raise RuntimeError(
            "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )


def _number_with_input(ddp: WrapperState, *, mine: bool) -> int:
    """The number of ranks that say so; a collective call."""
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
    steps.has_failed = False
    received = steps.engine.transport.exchange(bytes([own]), "inputs in join()")
    return [int.from_bytes(vote[:1], "big") for vote in received]


def _left_error(ddp: WrapperState, left: tuple[int, ...]) -> RankLostError:
    """The error of a rank that caught what others left the block with."""
    transport, step = ddp.steps.engine.transport, ddp.steps.engine.step - 1
    names = ", ".join(map(str, left))
    return RankLostError(
        f"join() on rank {transport.rank} of {transport.world_size}: lost rank {names}, which left "
        f"the block with an error after step {step} had failed on all ranks; catch the error of "
        f"such a step within the block on all ranks, or on none",
        left,
    )


def some_sync(ddp: WrapperState, *, mine: bool) -> bool:
    """Whether the backward pass of any rank will synchronise gradients; a collective call, where it
    was not told when ranks with input were counted."""
    if isinstance(ddp._join_config, _CountedHere):
        return bool(ddp._forward_collectives.some_sync)
    return any_rank(ddp.steps.engine.transport, mine=mine)


def any_rank(transport: Transport, *, mine: bool) -> bool:
    """Whether any rank votes for it; a collective call."""
    return last_rank(transport, mine=mine) is not None


def last_rank(transport: Transport, *, mine: bool) -> int | None:
    """The last rank that votes for it, or None; a collective call."""
    votes = transport.exchange(bytes([mine]), "votes")
    return max((rank for rank, vote in enumerate(votes) if vote != b"\0"), default=None)
