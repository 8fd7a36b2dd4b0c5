"""A wrapped module in `torch.distributed.algorithms.join.Join`: ranks with fewer inputs.

A rank that has run out shadows the collectives of the others' forward and backward passes: their
votes, the broadcast of buffers, and the step, in which it contributes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

from fddp.transports import Transport

if TYPE_CHECKING:
    from fddp.ddp.wrapper import DistributedDataParallel


class ModuleJoinHook(JoinHook):
    """What `Join` calls on a rank without further input.

    Args:
        ddp: the wrapped module.
        divide_by_initial_world_size: whether ranks that have joined still count in the mean.
    """

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        self._steps = ddp.steps
        self._weight = 1.0 if divide_by_initial_world_size else 0.0
        super().__init__()

    def main_hook(self) -> None:
        """Takes part in one forward and backward pass of the others."""
        ddp = self._ddp
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers(has_inputs=False)
        syncs = any_rank(self._steps.engine.transport, mine=False)
        if ddp._check_sync_bufs_post_fwd():
            ddp._sync_buffers(has_inputs=False)
        ddp.require_forward_param_sync = syncs
        if syncs:
            self._steps.take_part(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Brings all ranks to the parameters of the one that went on for longest."""
        self._ddp._sync_final_model(is_last_joiner)


def any_rank(transport: Transport, *, mine: bool) -> bool:
    """Whether any rank votes for it; a collective call."""
    return last_rank(transport, mine=mine) is not None


def last_rank(transport: Transport, *, mine: bool) -> int | None:
    """The last rank that votes for it, or None; a collective call."""
    votes = transport.exchange(bytes([mine]), "votes")
    return max((rank for rank, vote in enumerate(votes) if vote != b"\0"), default=None)
